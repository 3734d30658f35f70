"""Under which addresses other ranks can reach this process, and which of them to try."""

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_SCOPE_GLOBAL = 0
# Nothing is sent there: connecting a datagram socket only looks up the route. RFC 5737, RFC 3849.
_FAR_AWAY = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


class Address(NamedTuple):
    """Where a process listens.

    Attributes:
        machine: The same for two processes if and only if they share a loopback interface.
        hosts: The names and numbers under which its host may be reached, the likeliest first.
        port: The port.
    """

    machine: str
    hosts: tuple[str, ...]
    port: int


def address_of_port(port: int, *, is_master: bool) -> Address:
    """Return the address of a port of this process.

    Args:
        port: The port that it listens on.
        is_master: Whether ``MASTER_ADDR`` is the address of this process's host.
    """
    return Address(_this_machine(), tuple(dict.fromkeys(_candidates(is_master=is_master))), port)


def hosts_to_try(address: Address) -> list[str]:
    """Return the hosts under which this process may reach an address, in the order to try them.

    Loopback comes first for a process of the same machine. For another machine, addresses that this host
    has too (loopback, the bridges of container engines) are left out: whoever listens there is somebody
    else, who could pass the messages of both sides on and so be taken for a rank.
    """
    if address.machine == _this_machine():
        return list(dict.fromkeys([_LOOPBACK, *address.hosts]))
    own = {_LOOPBACK, *_interface_addresses()}
    return [host for host in address.hosts if host not in own]


def _this_machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _candidates(*, is_master: bool) -> Iterator[str]:
    master = os.environ.get("MASTER_ADDR", "")
    if is_master and master:
        yield master
    routes = [(socket.AF_INET, master), (socket.AF_INET6, master)] if master else []
    routes.extend(_FAR_AWAY)
    for family, target in routes:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((target, 9))
            yield asking.getsockname()[0]
    yield socket.gethostname()
    yield from _interface_addresses()


def _interface_addresses() -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                told = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield socket.inet_ntoa(told[20:24])
    # Linux lists IPv6 addresses nowhere else. Link-local ones are of no use to another host.
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
        for line in table:
            number, _, _, scope, *_ = line.split()
            if int(scope, 16) == _SCOPE_GLOBAL:
                yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))

"""Where a process can be reached from others, on this host and from elsewhere."""

import contextlib
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator

from holdfast.errors import CheckpointError

__all__ = ["addresses", "connect", "listen"]

_LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_EVERYWHERE = 0
_CONNECT_TIMEOUT = 5.0  # seconds; a name that leads nowhere must not use up the patience of the group
_WELCOME_TIMEOUT = 60.0  # a thousand ranks at one door, and a coordinator that may be busy
# Nothing is sent there: a datagram socket's connect only asks for the route. RFC 5737, RFC 3849.
_FAR_AWAY = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def listen(backlog: int) -> socket.socket:
    """A listener on a free port of every interface."""
    try:
        made = socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=socket.has_dualstack_ipv6(), backlog=backlog
        )
    except (OSError, ValueError):  # a host without IPv6
        made = socket.create_server(("", 0), backlog=backlog)
    made.settimeout(0)
    return made


def addresses(*, is_master: bool) -> list[str]:
    """The names and numbers under which this host may be reached, the likeliest first.

    Args:
        is_master: Whether ``MASTER_ADDR`` means this very process's host.
    """
    return list(dict.fromkeys(_candidates(is_master=is_master)))


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
    yield from _interfaces()
    yield _LOOPBACK


def _interfaces() -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                told = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield socket.inet_ntoa(told[20:24])
    # Linux tells these nowhere else. Of addresses that count on one cable only, another host has no use.
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
        for line in table:
            number, _, _, scope, *_ = line.split()
            if int(scope, 16) == _EVERYWHERE:
                yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))


def connect(
    hosts: list[str],
    port: int,
    hello: bytes,
    password: bytes,
    size: int,
    check: Callable[[], None] = lambda: None,
) -> tuple[socket.socket, bytes]:
    """A connection to whoever answers ``hello`` with ``size`` bytes that begin with the password.

    ``check`` is called while nothing happens, and may raise.

    Loopback is tried first: it is the fastest where the other is on this host, refused at once where it
    is not, and a stranger on that port does not know the password.

    Raises:
        ConnectionError: None of the hosts does; says why not, each.
    """
    reasons = []
    for host in dict.fromkeys([_LOOPBACK, *hosts]):
        try:
            made = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT)
        except OSError as error:
            reasons.append(f"{host}: {error}")
            continue
        try:
            made.sendall(hello)
            answer = _hear(made, size, check)
            if len(answer) == size and answer.startswith(password):
                return made, answer
            reasons.append(f"{host}: something else listens there")
        except CheckpointError:  # of check: it may be an OSError as well
            made.close()
            raise
        except OSError as error:
            reasons.append(f"{host}: {error}")
        made.close()
    raise ConnectionError(f"the coordinator cannot be reached on port {port}: {'; '.join(reasons)}")


def _hear(connection: socket.socket, size: int, check: Callable[[], None]) -> bytes:
    answer = b""
    until = time.monotonic() + _WELCOME_TIMEOUT
    connection.settimeout(0.1)
    while len(answer) < size and time.monotonic() < until:
        try:
            more = connection.recv(size - len(answer))
        except TimeoutError:
            check()
            continue
        if not more:
            break
        answer += more
    return answer

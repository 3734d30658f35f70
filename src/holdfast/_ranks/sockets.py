"""How a channel's sockets are made, so that a process forked later does not keep them open.

A socket is closed for its peer when no process has it open any more. A forked child (a worker of a
DataLoader, say) inherits all sockets of its parent; if it kept them, the other ranks would not notice the
parent's death.
"""

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

S = TypeVar("S")

_BACKLOG = 4096  # all ranks of a group may connect at once; the kernel has a limit of its own

no_fork = threading.RLock()
"""Held while no other thread may fork: between the making of a socket and its entry in the set below, say.

It is re-entrant because a signal handler may fork while its thread holds it.
"""
_of_this_process: "weakref.WeakSet[Any]" = weakref.WeakSet()


def closed_in_children(make: Callable[[], S]) -> S:
    """Return what ``make`` returns; it must have ``close``, which forked children will call first of all.

    ``make`` must not block: the process cannot fork meanwhile.
    """
    with no_fork:
        made = make()
        _of_this_process.add(made)
    return made


def _close_all_in_child() -> None:
    for inherited in list(_of_this_process):
        with contextlib.suppress(OSError):
            inherited.close()
    _of_this_process.clear()
    no_fork.release()


os.register_at_fork(
    before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=_close_all_in_child
)


def open_pair() -> tuple[socket.socket, socket.socket]:
    """Return two sockets that are connected to each other."""
    with no_fork:
        pair = socket.socketpair()
        _of_this_process.update(pair)
    return pair


def listen() -> socket.socket:
    """Return a listening socket that does not block, on a free port of every interface."""

    def make() -> socket.socket:
        try:
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=socket.has_dualstack_ipv6(), backlog=_BACKLOG
            )
        except (OSError, ValueError):  # a host without IPv6
            return socket.create_server(("", 0), backlog=_BACKLOG)

    made = closed_in_children(make)
    made.settimeout(0)
    return made


def open_connection(host: str, port: int, timeout: float) -> socket.socket:
    """Connect to a host by name or number, trying each of its addresses for ``timeout`` seconds.

    Raises:
        OSError: None of them answers; the error is that of the last one.
    """
    failed = OSError(f"{host} has no address")
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            connection = closed_in_children(lambda family=family: socket.socket(family))  # type: ignore[misc]
        except OSError as error:  # a family that this host does not have, or no file left
            failed = error
            continue
        try:
            connection.settimeout(timeout)
            connection.connect(address)
        except OSError as error:
            connection.close()
            failed = error
        else:
            return connection
    raise failed

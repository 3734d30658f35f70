"""The heartbeat of a process: a sign of life that needs no Python.

A rank answers the messages of its peers in a thread, and that thread cannot run while another one holds the
GIL: a pickle of millions of records holds it for many seconds. Such a rank is busy, not dead. A listener
that native code serves tells the two apart: the server thread of a ``TCPStore`` closes a connection that
its client has shut down, whatever Python is doing (measured: 0.3 ms), and a stopped process does not.
Nothing is ever stored in it, and the system drops whatever is sent to it (Linux).
"""

import contextlib
import ctypes
import errno
import os
import socket
import struct
import sys
import threading
from typing import Any

import torch.distributed as dist

from holdfast._ranks.sockets import closed_in_children, listen

_stores: dict[int, Any] = {}  # by process: a forked child inherits the store without its thread
_opening = threading.Lock()
_DEFER_ACCEPT = 3600  # seconds; the kernel makes it about so many
_SO_ATTACH_FILTER = 26
# Classic BPF, a (code, jump if true, jump if false, value) a line: only TCP segments without data pass.
_NO_DATA = (
    (0x80, 0, 0, 0),  # the length of the segment
    (0x02, 0, 0, 0),  # is kept
    (0x30, 0, 0, 12),  # the length of its header
    (0x54, 0, 0, 0xF0),
    (0x74, 0, 0, 2),
    (0x07, 0, 0, 0),
    (0x60, 0, 0, 0),
    (0x1D, 0, 1, 0),  # are they equal?
    (0x06, 0, 0, 0xFFFFFFFF),  # yes: it passes
    (0x06, 0, 0, 0),  # no: it is dropped
)


def heartbeat_port() -> int:
    """Return the port of this process's heartbeat, which the first call opens; 0 if it cannot be opened."""
    with _opening:
        process = os.getpid()
        if process not in _stores:
            try:
                _stores[process] = _open_store()
            except (OSError, RuntimeError):  # no port is free: peers must do with what Python answers
                return 0
        return int(_stores[process].port)


def _open_store() -> Any:
    with listen() as listening:
        # The store never closes a connection that says nothing. This lets the kernel keep such connections to
        # itself, so that they use no file of this process. A probe shuts its side down, which counts as data.
        if sys.platform == "linux":
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _DEFER_ACCEPT)
        port = listening.getsockname()[1]
        served = os.dup(listening.fileno())
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            port,
            None,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=served,
            use_libuv=False,  # of torch 2.6, that one takes no socket that listens already
        )
        # Only now: the store has sent something to itself. From now on no client can store anything.
        if sys.platform == "linux":
            _drop_data(listening)
    return store


def _drop_data(listening: socket.socket) -> None:
    """Have the system drop all data that is sent to a listening socket, where it can do that."""
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in _NO_DATA))
    with contextlib.suppress(OSError):
        about = struct.pack("HL", len(_NO_DATA), ctypes.addressof(program))
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, about)


class HeartbeatProbe:
    """One look at the heartbeat of a peer; no method blocks.

    Attributes:
        connection: Call :meth:`connected` when it can be written to, then :meth:`is_alive` when it can be
            read.
    """

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.connection = closed_in_children(lambda: socket.socket(family, socket.SOCK_STREAM))
        self.connection.settimeout(0)
        code = self.connection.connect_ex((host, port))
        if code not in (0, errno.EINPROGRESS):
            self.connection.close()
            raise OSError(code, "the peer's heartbeat cannot be reached")

    def connected(self) -> None:
        """Shut down this side, so that the peer's native thread closes the other. Raises OSError."""
        self.connection.shutdown(socket.SHUT_WR)

    def is_alive(self) -> bool:
        """Return whether the peer has closed the connection in an orderly way."""
        try:
            return not self.connection.recv(1)
        except OSError:
            return False

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

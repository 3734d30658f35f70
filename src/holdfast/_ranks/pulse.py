"""The pulse of a process: a sign of life that needs no Python.

A rank answers its peers from a thread, and that thread starves while another holds Python's lock: a
pickle of millions of records does so for many seconds. Such a rank is busy, not dead. What tells the
two apart is a listener served by native code: the server thread of a ``TCPStore`` closes a connection
that its client has ended, whatever Python is doing (measured: 0.3 ms), and a stopped process does not.
Nothing is ever stored in it.
"""

import errno
import os
import socket
import threading
from typing import Any

import torch.distributed as dist

__all__ = ["Probe", "pulse_port"]

_opened: dict[int, Any] = {}  # by process: a forked child has the listener, and nobody to serve it
_opening = threading.Lock()


def pulse_port() -> int:
    """The port on which this process shows its pulse; opened at the first call. 0 if it cannot be."""
    with _opening:
        here = os.getpid()
        if here not in _opened:
            try:
                store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
                _opened[here] = store
            except RuntimeError:  # no port to be had: peers have to do with what Python says
                return 0
        return int(_opened[here].port)


class Probe:
    """One look at a peer's pulse, without waiting for it.

    Attributes:
        connection: To be watched: for writing until :meth:`connected`, then for reading until :meth:`beats`.
    """

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.connection = socket.socket(family, socket.SOCK_STREAM)
        self.connection.settimeout(0)
        code = self.connection.connect_ex((host, port))
        if code not in (0, errno.EINPROGRESS):
            self.connection.close()
            raise OSError(code, "no pulse to be felt")

    def connected(self) -> None:
        """End our side; the peer's native thread will end the other. Raises OSError if nobody is there."""
        self.connection.shutdown(socket.SHUT_WR)

    def beats(self) -> bool:
        """Whether the peer has ended the connection in an orderly way."""
        try:
            return not self.connection.recv(1)
        except OSError:
            return False

    def close(self) -> None:
        """Forget it."""
        self.connection.close()

"""The messages between trainer and writer process: frames on a Unix socket, with file descriptors."""

import os
import socket
import struct
import sys
from collections.abc import Sequence
from typing import NamedTuple

PROTOCOL = 4
"""Must change when anything changes that the two ends have to agree on."""

READY, REQUEST, DONE, FAILED = range(4)

_HEADER = struct.Struct("<BQQ")
_CLOSE_ON_EXEC = socket.MSG_CMSG_CLOEXEC if sys.platform == "linux" else 0


class ProcessMessage(NamedTuple):
    """One message.

    Attributes:
        kind: ``READY``, ``REQUEST``, ``DONE`` or ``FAILED``.
        number: The number of the request. An answer has the number of its request.
        body: The content.
        fds: File descriptors that came with it. The receiver must close them.
    """

    kind: int
    number: int
    body: bytearray
    fds: list[int]


def send(
    link: socket.socket, kind: int, number: int, parts: Sequence[bytes], fds: Sequence[int] = ()
) -> None:
    """Send a message whose body is the parts one after the other. Only one thread at a time may call this.

    Raises:
        OSError: The other end is gone.
    """
    header = _HEADER.pack(kind, number, sum(map(len, parts)))
    if fds:
        header = header[socket.send_fds(link, [header], fds) :]
    link.sendall(header)
    for part in parts:
        link.sendall(part)


def receive(link: socket.socket) -> ProcessMessage | None:
    """Wait for the next message, without the GIL; returns None when the other end is gone."""
    fds: list[int] = []
    try:
        start, fds, _, _ = socket.recv_fds(link, _HEADER.size, 1, _CLOSE_ON_EXEC)
        if not start:
            return None
        kind, number, nbytes = _HEADER.unpack(start + _receive_exactly(link, _HEADER.size - len(start)))
        return ProcessMessage(kind, number, _receive_exactly(link, nbytes), fds)
    except OSError:
        for fd in fds:
            os.close(fd)
        return None


def _receive_exactly(link: socket.socket, nbytes: int) -> bytearray:
    body = bytearray(nbytes)
    view = memoryview(body)
    while view:
        received = link.recv_into(view)
        if received == 0:
            raise ConnectionResetError("the other end is gone")
        view = view[received:]
    return body

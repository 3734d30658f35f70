"""Owns the messages between trainer and helper: frames on a Unix socket, file descriptors beside them."""

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DONE", "FAILED", "PROTOCOL", "READY", "REQUEST", "Frame", "receive", "send"]

PROTOCOL = 2
"""Changes with anything that the two ends must agree on."""

READY, REQUEST, DONE, FAILED = range(4)

_HEADER = struct.Struct("<BQQ")
_CLOSE_ON_EXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


@dataclass(frozen=True)
class Frame:
    """One message.

    Attributes:
        kind: One of ``READY``, ``REQUEST``, ``DONE`` and ``FAILED``.
        number: The request that it is about; answers carry the number of their request.
        body: A pickle, as a rule.
        fds: Descriptors that came with it. They are the receiver's to close.
    """

    kind: int
    number: int
    body: bytearray
    fds: tuple[int, ...]


def send(
    link: socket.socket,
    kind: int,
    number: int,
    parts: Sequence[bytes | memoryview],
    fds: Sequence[int] = (),
) -> None:
    """Send a message whose body is the parts one after the other. Only one thread at a time may.

    Raises:
        OSError: The other end is gone.
    """
    header = _HEADER.pack(kind, number, sum(len(part) for part in parts))
    if fds:
        header = header[socket.send_fds(link, [header], fds) :]
    link.sendall(header)
    for part in parts:
        link.sendall(part)


def receive(link: socket.socket) -> Frame | None:
    """The next message; None when the other end is gone. Waits without end, and without Python's lock."""
    header, fds = _receive_header(link)
    if header is None:
        return None
    kind, number, nbytes = _HEADER.unpack(header)
    body = bytearray(nbytes)
    if not _fill(link, memoryview(body)):
        for fd in fds:
            os.close(fd)
        return None
    return Frame(kind, number, body, tuple(fds))


def _receive_header(link: socket.socket) -> tuple[bytes | None, list[int]]:
    try:
        header, fds, _, _ = socket.recv_fds(link, _HEADER.size, 1, _CLOSE_ON_EXEC)
    except OSError:
        return None, []
    rest = bytearray(_HEADER.size - len(header))
    if not header or not _fill(link, memoryview(rest)):
        return None, []
    return header + bytes(rest), fds


def _fill(link: socket.socket, view: memoryview) -> bool:
    while view:
        try:
            nbytes = link.recv_into(view)
        except OSError:
            return False
        if nbytes == 0:
            return False
        view = view[nbytes:]
    return True

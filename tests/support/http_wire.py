"""HTTP/1.1 on a socket, piece by piece, for a proxy that streams bodies."""

import contextlib
import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass

_PIECE = 1 << 18  # what one read takes at most: the only part of a body that is in memory


@dataclass(frozen=True)
class Head:
    """The first line and the headers of a request or an answer, as they came and as they are understood."""

    raw: bytes
    words: list[str]
    headers: dict[str, str]

    @property
    def status(self) -> int:
        return int(self.words[1])

    @property
    def is_kept(self) -> bool:
        """Whether the connection stays open after the message, if the other side agrees."""
        option = self.headers.get("connection", "").lower()
        return "keep-alive" in option if "HTTP/1.0" in self.words else "close" not in option

    @property
    def expects_continue(self) -> bool:
        return self.headers.get("expect", "").lower() == "100-continue"


class Wire:
    """A connection, and what was read of it and not used yet."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self._unread = bytearray()

    def shut(self) -> None:
        """End the connection for both sides; a thread that reads or writes here is told so."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def some(self, most: int = _PIECE) -> bytes:
        """At least one byte; b"" if the connection has ended."""
        if not self._unread:
            return self.socket.recv(min(most, _PIECE))
        data = bytes(self._unread[:most])
        del self._unread[:most]
        return data

    def line(self) -> bytes:
        """The next line with its end; what there is if the connection ends before."""
        while (end := self._unread.find(b"\n") + 1) == 0:
            more = self.socket.recv(_PIECE)
            if not more:
                end = len(self._unread)
                break
            self._unread += more
        data = bytes(self._unread[:end])
        del self._unread[:end]
        return data

    def head(self) -> Head | None:
        """None if the connection ends before it begins."""
        lines = [self.line()]
        if not lines[0]:
            return None
        headers: dict[str, str] = {}
        while (line := self.line()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            name = name.lower()
            headers[name] = f"{headers[name]}, {value.strip()}" if name in headers else value.strip()
            lines.append(line)
        if not line:
            raise ConnectionResetError("the connection ended within the headers")
        return Head(b"".join([*lines, line]), lines[0].decode("latin-1").split(), headers)

    def next_head(self) -> Head:
        """Raises a ConnectionError if there is none."""
        if (head := self.head()) is None:
            raise ConnectionResetError("the connection ended before the headers")
        return head

    def is_readable(self) -> bool:
        """Whether there is something to read, the end included."""
        return bool(self._unread) or bool(poll_wires(0, self))


class Body:
    """The body behind a head.

    Attributes:
        length: In bytes; None if only its end shows it.
        ends_with_connection: Whether the end of the connection is that of the body.
    """

    def __init__(self, wire: Wire, head: Head, *, is_answer: bool = False) -> None:
        self._wire = wire
        self._is_chunked = "chunked" in head.headers.get("transfer-encoding", "").lower()
        length = head.headers.get("content-length")
        self.ends_with_connection = is_answer and not self._is_chunked and length is None
        is_open = self._is_chunked or self.ends_with_connection
        self.length = None if is_open else int(length or 0)
        self._trailers = b""

    def pieces(self) -> Iterator[bytes]:
        """The body without the marks of its chunks; raises a ConnectionError if it is not whole."""
        if self.ends_with_connection:
            yield from iter(self._wire.some, b"")
        elif self.length is not None:
            yield from self._exactly(self.length)
        else:
            while nbytes := self._chunk_length():
                yield from self._exactly(nbytes)
                self._wire.line()
            while (line := self._wire.line()).strip():
                self._trailers += line
            if not line:
                raise ConnectionResetError("the connection ended within the trailers")

    def frame(self, piece: bytes) -> bytes:
        """A piece as it is sent on."""
        return b"%x\r\n%b\r\n" % (len(piece), piece) if self._is_chunked else piece

    def end(self) -> bytes:
        """What is sent on after the last piece."""
        return b"0\r\n%b\r\n" % self._trailers if self._is_chunked else b""

    def _exactly(self, nbytes: int) -> Iterator[bytes]:
        while nbytes:
            piece = self._wire.some(nbytes)
            if not piece:
                raise ConnectionResetError(f"the connection ended {nbytes} bytes too early")
            nbytes -= len(piece)
            yield piece

    def _chunk_length(self) -> int:
        line = self._wire.line()
        if not line:
            raise ConnectionResetError("the connection ended between chunks")
        return int(line.partition(b";")[0], 16)


def poll_wires(milliseconds: int | None, *wires: Wire) -> list[int]:
    poll = select.poll()
    for wire in wires:
        poll.register(wire.socket, select.POLLIN)
    return [number for number, _ in poll.poll(milliseconds)]


def wait_readable(first: Wire, second: Wire) -> Wire:
    """The one of both from which something can be read; the first if from both."""
    for wire in (first, second):
        if wire.is_readable():
            return wire
    return first if first.socket.fileno() in poll_wires(None, first, second) else second

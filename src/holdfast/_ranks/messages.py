"""The messages between ranks: values as pickles with their buffers beside them, sent over a socket.

A message is a header, the lengths of its segments, and the segments. The first segment of a value is its
pickle, the others are the buffers that protocol 5 keeps out of it: arrays travel without being copied into
the pickle. A message may have any size; the socket takes and gives it piece by piece.
"""

import enum
import pickle
import socket
import struct
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Segments: TypeAlias = Sequence[bytes | bytearray | memoryview]

_HEADER = struct.Struct("!BQIH")  # kind, session, step, number of segments
_LENGTH = struct.Struct("!Q")
_PIECE = 1 << 20  # bytes at most for one call of the kernel
_TURN = 16 << 20  # bytes at most for one peer before another one has its turn


class MessageKind(enum.IntEnum):
    """What a message says."""

    PING = 0
    PONG = 1
    PART = 2  # to the coordinator: what this rank has done in a step
    FAILED_PART = 3  # to the coordinator: what this rank has raised in a step
    ABORT = 4  # to the coordinator: this rank has left the session in the middle
    GIVE_UP = 5  # to the coordinator: this rank takes the coordinator for dead
    END = 6  # to the coordinator: this rank has left the session at its end
    ANSWER = 7  # from the coordinator: the outcome of a step
    FAILURE = 8  # from the coordinator: the session has failed
    LEAVING = 9  # either way: this process is about to end
    EXPECT = 10  # to the coordinator: this rank waits for others in the middle of its part
    ASK = 11  # from the coordinator: has this rank begun the session?
    BEGUN = 12  # to the coordinator: it has


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        kind: What it says.
        session: The save or load that it belongs to.
        step: The number of the step in it.
        body: The segments that come with it.
    """

    kind: MessageKind
    session: int = 0
    step: int = 0
    body: Segments = ()

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the message, in order."""
        lengths = b"".join(_LENGTH.pack(memoryview(segment).nbytes) for segment in self.body)
        yield memoryview(_HEADER.pack(self.kind, self.session, self.step, len(self.body)) + lengths)
        for segment in self.body:
            if memoryview(segment).nbytes:
                yield memoryview(segment).cast("B")


def encode(value: Any) -> list[bytes | memoryview]:
    """Return a value as segments, which may be sent to any number of ranks."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    if len(buffers) > 60_000:  # the header counts segments in 16 bits
        return [pickle.dumps(value, protocol=5)]
    return [pickled, *(buffer.raw() for buffer in buffers)]


def decode(segments: Segments) -> Any:
    """Return the value that :func:`encode` was given.

    This runs a pickle: the sender must have proved that it is a rank of the group.
    """
    return pickle.loads(segments[0], buffers=segments[1:])


class MessageSender:
    """The messages that wait to be sent on one socket."""

    def __init__(self) -> None:
        self._pieces: deque[memoryview] = deque()

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, message: Message) -> None:
        """Put a message at the end of the queue."""
        self._pieces.extend(message.pieces())

    def send(self, connection: socket.socket) -> None:
        """Hand to the kernel as much as it takes now. Raises OSError if the connection is broken."""
        turn = 0
        while self._pieces and turn < _TURN:
            piece = self._pieces[0]
            try:
                sent = connection.send(piece[:_PIECE])
            except BlockingIOError:
                return
            turn += sent
            if sent == len(piece):
                self._pieces.popleft()
            else:
                self._pieces[0] = piece[sent:]


class MessageReader:
    """The message that is coming in on one socket."""

    def __init__(self) -> None:
        self._complete: list[Message] = []
        self._parser = self._parse()
        self._expect(next(self._parser))

    def _expect(self, size: int) -> None:
        self._target = bytearray(size)
        self._filled = 0

    def receive(self, connection: socket.socket) -> list[Message]:
        """Take what has come, and return the messages that are complete now.

        Raises:
            EOFError: The other end has closed the connection.
            OSError: The connection is broken.
            ValueError: What has come is not a message.
        """
        turn = 0
        while turn < _TURN:
            try:
                taken = connection.recv_into(memoryview(self._target)[self._filled :])
            except BlockingIOError:
                break
            except OSError:
                if self._complete:
                    break
                raise
            if not taken:
                if self._complete:
                    break  # what was sent before the end counts; the end is met again next time
                raise EOFError
            self._filled += taken
            turn += taken
            while self._filled == len(self._target):
                self._expect(self._parser.send(self._target))
        complete, self._complete = self._complete, []
        return complete

    def _parse(self) -> Generator[int, bytearray, None]:
        """Yield how many bytes are wanted next, and be sent them."""
        while True:
            kind, session, step, count = _HEADER.unpack((yield _HEADER.size))
            lengths = _LENGTH.iter_unpack((yield _LENGTH.size * count))
            body = []
            for (length,) in lengths:
                body.append((yield length))
            self._complete.append(Message(MessageKind(kind), session, step, body))

"""The wire format between ranks: values as pickles with their buffers beside them, frames on a socket.

A frame is a header, the lengths of its segments, and the segments. The first segment of a value is its
pickle, the others are buffers that protocol 5 keeps out of it: arrays travel without being copied into
the pickle. A frame may be of any size; a socket takes and gives it piece by piece.
"""

import enum
import pickle
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["Frame", "FrameReader", "FrameSender", "Kind", "Segments", "decode", "encode"]

Segments: TypeAlias = Sequence[bytes | bytearray | memoryview]

_HEADER = struct.Struct("!BQIH")  # kind, session, step, number of segments
_LENGTH = struct.Struct("!Q")
_PIECE = 1 << 20  # at most so much for one call of the kernel
_TURN = 16 << 20  # at most so much for one link before another has its turn


class Kind(enum.IntEnum):
    """What a frame says."""

    PING = 0
    PONG = 1
    PART = 2  # to the coordinator: what this rank has done in a step
    FAILED_PART = 3  # to the coordinator: what this rank has raised in a step
    ABORT = 4  # to the coordinator: this rank has left the session in the middle
    GIVE_UP = 5  # to the coordinator: this rank takes the coordinator for dead
    END = 6  # to the coordinator: this rank has left the session for good
    ANSWER = 7  # from the coordinator: the outcome of a step
    FAILURE = 8  # from the coordinator: the session has failed
    EXPECT = 10  # to the coordinator: this rank waits for others in the middle of its part
    LEAVING = 9  # either way: this process is about to end


@dataclass(frozen=True, slots=True)
class Frame:
    """One message.

    Attributes:
        kind: What it says.
        session: The save or load that it belongs to.
        step: The number of the step in it.
        body: What comes with it.
    """

    kind: Kind
    session: int = 0
    step: int = 0
    body: Segments = ()

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the frame, in order."""
        lengths = b"".join(_LENGTH.pack(memoryview(segment).nbytes) for segment in self.body)
        yield memoryview(_HEADER.pack(self.kind, self.session, self.step, len(self.body)) + lengths)
        for segment in self.body:
            if memoryview(segment).nbytes:
                yield memoryview(segment).cast("B")


def encode(value: Any) -> list[bytes | memoryview]:
    """A value as segments; pickled once, however many ranks it goes to."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    if len(buffers) > 60_000:  # the header counts segments in 16 bits
        return [pickle.dumps(value, protocol=5)]
    return [pickled, *(buffer.raw() for buffer in buffers)]


def decode(segments: Segments) -> Any:
    """The value that :func:`encode` was given. Runs its pickle: only for what a rank of the group sent."""
    return pickle.loads(segments[0], buffers=segments[1:])


class FrameSender:
    """The frames that wait to be sent on one socket."""

    def __init__(self) -> None:
        self._pieces: deque[memoryview] = deque()

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, frame: Frame) -> None:
        """Put a frame at the end of the queue."""
        self._pieces.extend(frame.pieces())

    def send(self, connection: socket.socket) -> None:
        """Hand to the kernel what it takes now. Raises OSError if the connection is broken."""
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


class FrameReader:
    """The frame that is coming in on one socket."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._segments: list[bytearray] = []
        self._waiting: list[int] = []
        self._header: tuple[int, int, int, int] | None = None
        self._lengths_known = False
        self._expect(_HEADER.size)

    def _expect(self, size: int) -> None:
        self._target = bytearray(size)
        self._filled = 0

    def receive(self, connection: socket.socket) -> list[Frame]:
        """Take what has come; the frames that are complete with it.

        Raises:
            EOFError: The other end has closed the connection.
            OSError: The connection is broken.
        """
        frames: list[Frame] = []
        turn = 0
        while turn < _TURN:
            if self._filled < len(self._target):
                try:
                    taken = connection.recv_into(memoryview(self._target)[self._filled :])
                except BlockingIOError:
                    break
                except OSError:
                    if frames:
                        break
                    raise
                if not taken:
                    if frames:
                        break  # what was said before the end counts; the end is met again next time
                    raise EOFError
                self._filled += taken
                turn += taken
            if self._filled == len(self._target):
                frames.extend(self._advance())
        return frames

    def _advance(self) -> Iterator[Frame]:
        if self._header is None:
            self._header = _HEADER.unpack(self._target)
            self._expect(_LENGTH.size * self._header[3])
        elif not self._lengths_known:
            self._lengths_known = True
            self._waiting = [length for (length,) in _LENGTH.iter_unpack(self._target)][::-1]
        else:
            self._segments.append(self._target)
        if self._lengths_known and self._waiting:
            self._expect(self._waiting.pop())
        elif self._lengths_known or not self._header[3]:
            kind, session, step, _ = self._header
            segments = self._segments
            self._begin()
            yield Frame(Kind(kind), session, step, segments)

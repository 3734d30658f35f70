"""The transform under test, and how the suite writes and reads through it."""

import abc
import io
import random
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any, ClassVar, cast

from typing_extensions import Self

from holdfast.extension import ExtensionRegistry, StreamTransformExtension
from holdfast.testing.fake_streams import FakeInput, FakeOutput, MinimalInput
from holdfast.testing.rot13 import Rot13Example

MIB = 1 << 20


class TransformContractBase(abc.ABC):
    """What the author of a transform defines; ``TransformContract`` describes it."""

    detects_damage: ClassVar[bool] = True
    chunk_size: ClassVar[int] = io.DEFAULT_BUFFER_SIZE
    memory_limit: ClassVar[int] = 8 * MIB

    @abc.abstractmethod
    def make_transform(self) -> StreamTransformExtension:
        """A new transform."""

    def companions(self) -> Sequence[StreamTransformExtension]:
        """Other transforms, to be stacked with yours."""
        return [Rot13Example(chunk_size=11)]

    def make_registry(self) -> ExtensionRegistry:
        """The registry of a reader that is to read what your transform wrote."""
        registry = ExtensionRegistry()
        registry.register(type(self.make_transform()))
        return registry


def payload(size: int, *, seed: int = 0) -> bytes:
    """``size`` bytes of text, zeros and random bytes; the same for the same seed."""
    rng = random.Random(seed)  # noqa: S311 - repeatable, and nothing is secret
    content = bytearray()
    while len(content) < size:
        run = rng.randrange(1, 700)
        content += rng.choice((b"Some words to be packed. \n" * 28, bytes(700), rng.randbytes(700)))[:run]
        if len(content) > MIB:
            # Enough variety; a payload of many MiB should not take long to make.
            content *= 2
    return bytes(content[:size])


def pieces(content: bytes, rng: random.Random) -> Iterable[bytes]:
    """``content`` in pieces of random sizes, some of them empty."""
    start = 0
    while start < len(content):
        size = rng.choice((0, 1, rng.randrange(1, 300), rng.randrange(1, 20_000)))
        yield content[start : start + size]
        start += size


def new_writer(transform: StreamTransformExtension, sink: FakeOutput) -> IO[bytes]:
    """A stream that writes to ``sink`` through ``transform``."""
    return transform.transform_to(cast("IO[bytes]", sink))


def new_reader(
    transform: StreamTransformExtension, source: bytes | io.BytesIO | FakeInput | MinimalInput
) -> io.RawIOBase:
    """A stream that reads from ``source`` through ``transform``."""
    stream = FakeInput(source) if isinstance(source, bytes) else source
    return cast("io.RawIOBase", transform.transform_from(cast("IO[bytes]", stream)))


def encode(
    transform: StreamTransformExtension, written: Iterable[bytes], sink: FakeOutput | None = None
) -> bytes:
    """Write the pieces through the transform and close the stream; the bytes that reach the output."""
    sink = FakeOutput() if sink is None else sink
    stream = new_writer(transform, sink)
    for piece in written:
        stream.write(piece)
    stream.close()
    return bytes(sink.content)


def decode(transform: StreamTransformExtension, data: bytes) -> bytes:
    """Read ``data`` through the transform up to the end."""
    with new_reader(transform, data) as stream:
        return drain(stream)


def drain(stream: io.RawIOBase, most: int = 1 << 40) -> bytes:
    """Everything up to the end, in reads of a changing size; more than ``most`` bytes are an error."""
    found = bytearray()
    size = 1
    while data := stream.read(size):
        found += data
        size = size * 3 % 200_003 + 1
        assert len(found) <= most, f"{len(found)} bytes were read, and there is no end to it"
    return bytes(found)


def read_into(stream: io.RawIOBase, buffer: Any) -> bytes:
    """Everything up to the end, read through one reused buffer."""
    found = bytearray()
    with memoryview(buffer).cast("B") as view:
        while count := stream.readinto(buffer):
            found += view[:count]
    return bytes(found)


def read_exactly(stream: io.RawIOBase, size: int) -> bytes:
    """Read until there are ``size`` bytes or the stream ends."""
    found = bytearray()
    while data := stream.read(size - len(found)):
        found += data
    return bytes(found)


def attempt(call: Callable[..., object], *args: object) -> Exception | None:
    """The exception that the call raises, or None."""
    try:
        call(*args)
    except Exception as error:  # noqa: BLE001 - the caller looks at it
        return error
    return None


class MemoryPeak:
    """Measures the most memory that Python held within a ``with`` block, above what it held before."""

    nbytes = 0

    def __enter__(self) -> Self:
        tracemalloc.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.nbytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

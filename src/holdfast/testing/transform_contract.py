"""The suite that every stream transform must pass."""

import io
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from typing import IO, cast

import pytest

from holdfast.extension import StreamTransformExtension, split_descriptor
from holdfast.testing.fake_streams import FakeInput, FakeOutput
from holdfast.testing.transform_contract_base import (
    decode,
    drain,
    encode,
    new_reader,
    new_writer,
    payload,
    pieces,
)
from holdfast.testing.transform_damage_tests import TransformDamageTests
from holdfast.testing.transform_stream_tests import TransformStreamTests

__all__ = ["TransformContract"]


class TransformContract(TransformStreamTests, TransformDamageTests):
    """Subclass it, make your transform, and let pytest collect the subclass::

        class TestMyTransform(TransformContract):
            def make_transform(self):
                return MyTransform()

    Each test's first line says what is required. The requirements are those of
    ``holdfast.extension.StreamTransformExtension``. Override ``companions`` to stack yours with others, and
    ``make_registry`` if ``register(type(make_transform()))`` is not how readers learn of it.

    Attributes:
        detects_damage: Whether the transform notices changed and missing bytes. If False, damage may go
            unnoticed, but reading must still end.
        chunk_size: Where its behaviour may change; sizes around it are tried.
        memory_limit: The most extra memory, as Python counts it, that streaming 24 MiB may take.
    """

    # Descriptors

    def test_the_descriptor_is_well_formed_and_names_the_class(self) -> None:
        """get_descriptor() is registry_name(), a slash and a version."""
        transform = self.make_transform()
        name, version = split_descriptor(transform.get_descriptor())
        assert name == transform.registry_name()
        assert version, "without a version, a later format cannot be told from this one"

    def test_the_registry_makes_a_transform_that_reads_the_data(self) -> None:
        """from_descriptor gives an instance that reads what this one wrote, and has the same descriptor."""
        transform = self.make_transform()
        content = payload(1000)
        (again,) = self.make_registry().from_descriptor_list([transform.get_descriptor()])
        assert isinstance(again, StreamTransformExtension)
        assert again.get_descriptor() == transform.get_descriptor()
        assert decode(again, encode(transform, [content])) == content

    def test_a_minor_version_is_read_and_another_major_version_refused(self) -> None:
        """What stands before the first dot decides; a format that is not known raises ValueError."""
        transform = self.make_transform()
        name, version = split_descriptor(transform.get_descriptor())
        major = version.partition(".")[0]
        self.make_registry().from_descriptor_list([f"{name}/{major}.99"])
        for other in (f"{name}/{major}99", f"{name}/99999.{version}"):
            with pytest.raises(ValueError):
                self.make_registry().from_descriptor_list([other])

    def test_a_transform_can_be_pickled(self) -> None:
        """Saves may run in another process, which gets the transform by pickle."""
        transform = self.make_transform()
        again = pickle.loads(pickle.dumps(transform))
        assert decode(transform, encode(again, [b"abc"])) == b"abc"

    # Together with others

    @pytest.mark.parametrize("seed", range(4))
    def test_stacks_round_trip_when_undone_in_reverse(self, seed: int) -> None:
        """Two to four transforms on top of each other give the payload back, and close through to the end."""
        rng = random.Random(seed)  # noqa: S311
        choice = [self.make_transform(), *self.companions()]
        stack = [choice[0], *rng.choices(choice, k=rng.randrange(1, 4))]
        rng.shuffle(stack)
        content = payload(rng.randrange(3 * self.chunk_size), seed=seed)
        sink = FakeOutput(most=1 + rng.randrange(5000))
        out = cast("IO[bytes]", sink)
        for transform in stack:
            out = transform.transform_to(out)
        for piece in pieces(content, rng):
            out.write(piece)
        out.close()
        assert sink.closed
        source = FakeInput(bytes(sink.content), most=1 + rng.randrange(5000))
        stream = cast("IO[bytes]", source)
        for transform in stack:
            stream = transform.transform_from(stream)
        assert drain(cast("io.RawIOBase", stream)) == content
        stream.close()
        assert source.closed

    def test_streams_of_one_transform_do_not_disturb_one_another(self) -> None:
        """Two streams written in turns, and read in turns, each keep their own bytes."""
        transform = self.make_transform()
        contents = [payload(2 * self.chunk_size, seed=1), payload(2 * self.chunk_size, seed=2)]
        sinks = [FakeOutput(), FakeOutput()]
        writers = [new_writer(transform, sink) for sink in sinks]
        for start in range(0, 2 * self.chunk_size, 999):
            for writer, content in zip(writers, contents, strict=True):
                writer.write(content[start : start + 999])
        for writer in writers:
            writer.close()
        readers = [new_reader(transform, bytes(sink.content)) for sink in sinks]
        found = [bytearray(), bytearray()]
        done = False
        while not done:
            got = [reader.read(777) or b"" for reader in readers]
            for collected, piece in zip(found, got, strict=True):
                collected.extend(piece)
            done = not any(got)
        assert [bytes(f) for f in found] == contents

    def test_threads_may_use_one_transform_at_once(self) -> None:
        """Several threads make and use streams of one instance, each its own."""
        transform = self.make_transform()
        contents = [payload(4 * self.chunk_size + n, seed=n) for n in range(16)]

        def round_trip(content: bytes) -> bytes:
            rng = random.Random(len(content))  # noqa: S311
            return decode(transform, encode(transform, pieces(content, rng)))

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(round_trip, contents)) == contents

    def test_a_stream_may_move_to_another_thread(self) -> None:
        """A stream made and written on one thread is closed on another, and read likewise."""
        transform = self.make_transform()
        sink = FakeOutput()
        stream = new_writer(transform, sink)
        with ThreadPoolExecutor(1) as other:
            other.submit(stream.write, b"abc").result()
            stream.write(b"def")
            other.submit(stream.close).result()
            reader = new_reader(transform, FakeInput(bytes(sink.content)))
            assert other.submit(reader.read, 1).result() + drain(reader) == b"abcdef"

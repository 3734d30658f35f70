"""Tests of a transform's streams: they give back every byte, and behave as ``io`` requires."""

import io
import random
from array import array
from typing import Any, cast

import pytest

from holdfast.testing.fake_streams import FakeInput, FakeOutput, MinimalInput
from holdfast.testing.transform_contract_base import (
    MIB,
    MemoryPeak,
    TransformContractBase,
    decode,
    drain,
    encode,
    new_reader,
    new_writer,
    payload,
    pieces,
    read_exactly,
    read_into,
)


class TransformStreamTests(TransformContractBase):
    """Round trips, buffers, flags, flushing, closing and seeking."""

    # Round trips

    def test_every_size_round_trips(self) -> None:
        """What was written is read, for no byte, one, and lengths around chunk boundaries."""
        transform = self.make_transform()
        around = (n + d for n in (self.chunk_size, 3 * self.chunk_size, 128 << 10) for d in (-1, 0, 1))
        for size in {0, 1, 2, *around}:
            content = payload(size)
            assert decode(transform, encode(transform, [content])) == content, f"{size} bytes"

    def test_one_large_write_round_trips(self) -> None:
        """A single write of many MiB is taken whole."""
        transform = self.make_transform()
        content = payload(5 * MIB + 3)
        assert decode(transform, encode(transform, [content])) == content

    @pytest.mark.parametrize("seed", range(5))
    def test_random_pieces_and_random_reads_round_trip(self, seed: int) -> None:
        """It does not matter in which pieces the bytes are written, nor in which they are read."""
        rng = random.Random(seed)  # noqa: S311 - repeatable, and nothing is secret
        transform = self.make_transform()
        content = payload(rng.randrange(8 * self.chunk_size), seed=seed)
        stream = new_reader(transform, FakeInput(encode(transform, pieces(content, rng))))
        found = bytearray()
        while piece := stream.read(rng.choice((1, 7, 1000, self.chunk_size, 3 * self.chunk_size))):
            found += piece
        assert bytes(found) == content

    def test_all_ways_of_reading_agree(self) -> None:
        """read(), read(n), readall(), readinto() and lines of a BufferedReader give the same bytes."""
        transform = self.make_transform()
        content = payload(2 * self.chunk_size + 5) + b"\nlast line"
        encoded = encode(transform, [content])
        assert new_reader(transform, encoded).read() == content
        assert new_reader(transform, encoded).read(-1) == content
        assert new_reader(transform, encoded).readall() == content
        assert read_into(new_reader(transform, encoded), bytearray(1000)) == content
        assert read_into(new_reader(transform, encoded), array("d", bytes(800))) == content
        assert b"".join(io.BufferedReader(new_reader(transform, encoded))) == content

    def test_reading_none_and_reading_past_the_end_give_nothing(self) -> None:
        """read(0) takes nothing; after the end every read returns no bytes."""
        transform = self.make_transform()
        stream = new_reader(transform, encode(transform, [b"abc"]))
        assert stream.read(0) == b""
        assert stream.readinto(bytearray()) == 0
        assert stream.read() == b"abc"
        assert [stream.read(), stream.read(5), stream.readinto(bytearray(5))] == [b"", b"", 0]

    @pytest.mark.parametrize("most", [1, 7, 4096])
    def test_an_input_with_short_reads_is_read_to_its_end(self, most: int) -> None:
        """An input may return fewer bytes than asked for; only none means the end."""
        transform = self.make_transform()
        content = payload(self.chunk_size + 1)
        assert drain(new_reader(transform, FakeInput(encode(transform, [content]), most=most))) == content

    def test_an_input_without_readinto_is_enough(self) -> None:
        """An input need have no more than read() and close()."""
        transform = self.make_transform()
        content = payload(2 * self.chunk_size)
        source = MinimalInput(encode(transform, [content]))
        assert drain(new_reader(transform, source)) == content

    def test_a_non_blocking_input_does_not_look_like_the_end(self) -> None:
        """Where the input returns None, so does readinto, or it waits; no bytes are lost."""
        transform = self.make_transform()
        content = payload(2 * self.chunk_size)
        source = FakeInput(encode(transform, [content]), most=self.chunk_size // 2 + 1, blocks=True)
        stream = new_reader(transform, source)
        buffer, found = bytearray(997), bytearray()
        for _ in range(100_000):
            count = stream.readinto(buffer)
            if count == 0:
                break
            found += buffer[: count or 0]
        assert bytes(found) == content

    @pytest.mark.parametrize("most", [1, 7, 4096])
    def test_an_output_with_short_writes_gets_everything(self, most: int) -> None:
        """An output may take fewer bytes than it is given; the rest must be offered again."""
        transform = self.make_transform()
        content = payload(self.chunk_size + 1)
        assert decode(transform, encode(transform, [content], FakeOutput(most=most))) == content

    def test_memory_does_not_grow_with_the_payload(self) -> None:
        """One write of 24 MiB, and reading it in small pieces, take little memory beside the payload."""
        transform = self.make_transform()
        content = payload(MIB) * 24
        encoded = encode(transform, [content])
        with MemoryPeak() as writing:
            encode(transform, [content], FakeOutput(keep=False))
        assert writing.nbytes < self.memory_limit
        stream = new_reader(transform, encoded)
        buffer = bytearray(4096)
        with MemoryPeak() as reading:
            while stream.readinto(buffer):
                pass
        assert reading.nbytes < self.memory_limit

    # What the caller hands over

    def test_the_callers_buffer_is_neither_changed_nor_kept(self) -> None:
        """A buffer is as it was after write, and may be overwritten or resized at once."""
        transform = self.make_transform()
        content = payload(3 * self.chunk_size)
        sink = FakeOutput()
        stream = new_writer(transform, sink)
        for start in range(0, len(content), 1000):
            buffer = bytearray(content[start : start + 1000])
            stream.write(buffer)
            assert buffer == content[start : start + 1000]
            buffer[:] = b"\xaa" * len(buffer)
            buffer.clear()
        stream.close()
        assert decode(transform, bytes(sink.content)) == content

    def test_write_takes_every_contiguous_buffer_and_counts_bytes(self) -> None:
        """Items may be larger than a byte; what write returns is the length in bytes."""
        transform = self.make_transform()
        doubles = array("d", [0.5, -1.0, 3e300])
        table = memoryview(bytes(range(24))).cast("B", (4, 6))
        buffers: list[Any] = [
            b"abc",
            bytearray(b"defg"),
            doubles,
            memoryview(doubles)[1:],
            table,
            b"",
            array("d"),
        ]
        sink = FakeOutput()
        stream = new_writer(transform, sink)
        for buffer in buffers:
            assert stream.write(buffer) == memoryview(buffer).nbytes
        stream.close()
        assert decode(transform, bytes(sink.content)) == b"".join(memoryview(b).tobytes() for b in buffers)

    def test_readinto_fills_no_more_than_it_says(self) -> None:
        """Bytes of the buffer beyond the returned count are left alone."""
        transform = self.make_transform()
        buffer = bytearray(b"\xaa" * 10)
        stream = new_reader(transform, encode(transform, [b"abcd"]))
        count = stream.readinto(buffer)
        assert count is not None
        assert 0 < count <= 4
        assert buffer == b"abcd"[:count] + b"\xaa" * (10 - count)

    # The manners of a stream

    def test_flags_tell_the_truth(self) -> None:
        """A writing stream is writable and not readable, a reading one the other way round."""
        transform = self.make_transform()
        writer = new_writer(transform, FakeOutput())
        assert (writer.writable(), writer.readable(), writer.closed) == (True, False, False)
        writer.close()
        reader = new_reader(transform, FakeInput(encode(transform, [b"abc"])))
        assert (reader.writable(), reader.readable(), reader.closed) == (False, True, False)
        assert not reader.seekable(), "its input is not seekable and the stream cannot rewind it"

    def test_the_classes_of_io_can_wrap_it(self) -> None:
        """BufferedWriter, BufferedReader and TextIOWrapper work on it, and close it."""
        transform = self.make_transform()
        text = "".join(f"line {n} with an \u00e4\n" for n in range(2000))
        sink = FakeOutput()
        with io.TextIOWrapper(
            io.BufferedWriter(cast("io.RawIOBase", new_writer(transform, sink))), "utf-8"
        ) as out:
            out.write(text)
        assert sink.closed
        with io.TextIOWrapper(
            io.BufferedReader(new_reader(transform, bytes(sink.content))), "utf-8", newline=""
        ) as lines:
            assert list(lines) == text.splitlines(keepends=True)

    def test_flush_does_not_end_the_stream(self) -> None:
        """Flushing reaches the output, may be repeated, and writing goes on after it."""
        transform = self.make_transform()
        sink = FakeOutput()
        stream = new_writer(transform, sink)
        stream.flush()
        stream.write(b"one, ")
        stream.flush()
        stream.flush()
        assert sink.flush_count > 0
        stream.write(b"two")
        stream.close()
        assert decode(transform, bytes(sink.content)) == b"one, two"

    def test_closing_closes_what_is_wrapped(self) -> None:
        """close() of the transformed stream closes its output or input; closing twice is fine."""
        transform = self.make_transform()
        sink = FakeOutput()
        writer = new_writer(transform, sink)
        writer.write(b"abc")
        assert not sink.closed
        writer.close()
        writer.close()
        assert (sink.closed, writer.closed) == (True, True)
        source = FakeInput(bytes(sink.content))
        reader = new_reader(transform, source)
        reader.read(1)
        assert not source.closed
        reader.close()
        reader.close()
        assert (source.closed, reader.closed) == (True, True)

    def test_a_with_block_closes(self) -> None:
        """Leaving a with block closes the stream and what it wraps, also by an exception."""
        transform = self.make_transform()
        sink = FakeOutput()
        with new_writer(transform, sink) as writer:
            writer.write(b"abc")
        assert decode(transform, bytes(sink.content)) == b"abc"
        assert sink.closed
        abandoned = FakeOutput()

        def give_up() -> None:
            with new_writer(transform, abandoned) as writer:
                writer.write(b"abc")
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            give_up()
        assert abandoned.closed

    def test_a_closed_stream_refuses(self) -> None:
        """Reading or writing after close() raises ValueError."""
        transform = self.make_transform()
        writer = new_writer(transform, FakeOutput())
        writer.close()
        with pytest.raises(ValueError):
            writer.write(b"abc")
        reader = new_reader(transform, encode(transform, [b"abc"]))
        reader.close()
        for use in (
            reader.read,
            reader.readall,
            lambda: reader.read(1),
            lambda: reader.readinto(bytearray(1)),
        ):
            with pytest.raises(ValueError):
                use()

    def test_a_seekable_stream_seeks_as_io_says(self) -> None:
        """Where seekable() is true, all three kinds of seek and tell agree with a plain file."""
        transform = self.make_transform()
        content = payload(2 * self.chunk_size)
        stream = new_reader(transform, io.BytesIO(encode(transform, [content])))
        if not stream.seekable():
            with pytest.raises((OSError, ValueError)):
                stream.seek(0)
            return
        rng = random.Random(3)  # noqa: S311
        plain = io.BytesIO(content)
        for _ in range(200):
            whence = rng.choice((io.SEEK_SET, io.SEEK_CUR, io.SEEK_END))
            start = {io.SEEK_SET: 0, io.SEEK_CUR: plain.tell(), io.SEEK_END: len(content)}[whence]
            offset = rng.randrange(len(content) + 10) - start
            assert stream.seek(offset, whence) == plain.seek(offset, whence)
            count = rng.randrange(50)
            assert read_exactly(stream, count) == plain.read(count)
            assert stream.tell() == plain.tell()

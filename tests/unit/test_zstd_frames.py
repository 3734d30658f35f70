"""zstd streams: their frame structure, what is refused and when, and how much memory that takes."""

import errno
import gc
import io
import random
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from enum import IntEnum
from typing import IO, Any, cast

import pytest
import zstandard

from holdfast._io import zstd_backends
from holdfast._io.zstd import ZstdReader, ZstdWriter
from holdfast._io.zstd_backends import Backend, select_backend
from holdfast.errors import IntegrityError, StorageError, TruncatedFileError
from holdfast.testing.fake_streams import FakeInput, FakeOutput

STANDARD_LIBRARY = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
MIB = 1 << 20
MAGIC = struct.pack("<I", 0xFD2FB528)
SMALL_WINDOW = b"\x00\x00"
"""Frame descriptor and window of a plain frame: 1 KiB of window, no checksum, no declared size."""


class BlockKind(IntEnum):
    RAW = 0
    RLE = 1
    COMPRESSED = 2
    RESERVED = 3


@pytest.fixture(params=["zstandard", STANDARD_LIBRARY])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setattr(zstd_backends, "PREFERENCE", (request.param,))
    selected = select_backend()
    assert selected is not None
    return selected


def writer_on(sink: Any, backend: Backend, level: int = 3) -> ZstdWriter:
    return ZstdWriter(cast("IO[bytes]", sink), backend, level)


def reader_of(data: Any, backend: Backend, max_size: int | None = None) -> ZstdReader:
    source = FakeInput(data) if isinstance(data, bytes) else data
    return ZstdReader(cast("IO[bytes]", source), backend, max_size=max_size)


def compress(content: bytes, backend: Backend, *, flush: bool = False) -> bytes:
    sink = FakeOutput()
    with writer_on(sink, backend) as stream:
        stream.write(content)
        if flush:
            stream.flush()
    return bytes(sink.content)


def block(kind: BlockKind, size: int, body: bytes, *, last: bool = True) -> bytes:
    return (size << 3 | kind << 1 | last).to_bytes(3, "little") + body


def skippable(body: bytes, number: int = 0) -> bytes:
    return struct.pack("<II", 0x184D2A50 + number, len(body)) + body


def bomb(size: int) -> bytes:
    """A frame of ``size`` zeros, 128 KiB in each block of four bytes."""
    count = size >> 17
    window_of_128_kib = b"\x00\x38"
    blocks = block(BlockKind.RLE, 1 << 17, b"\0", last=False) * (count - 1)
    return MAGIC + window_of_128_kib + blocks + block(BlockKind.RLE, 1 << 17, b"\0")


def memory_peak(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def header(descriptor: int, size: int) -> bytes:
    """The header of a frame of ``size`` bytes with the fields that its descriptor announces."""
    single_segment = descriptor & 0x20
    nbytes = (0, 2, 4, 8)[descriptor >> 6] or int(bool(single_segment))
    declared = size - 256 if nbytes == 2 else size
    window, dictionary = b"" if single_segment else b"\x00", bytes((0, 1, 2, 4)[descriptor & 3])
    size_field = declared.to_bytes(nbytes, "little") if nbytes else b""
    return MAGIC + bytes([descriptor]) + window + dictionary + size_field


class TestFrames:
    def test_every_form_of_header_is_read(self, backend: Backend) -> None:
        content = random.Random(1).randbytes(255)
        for descriptor in range(256):
            if descriptor & 0x0C:
                continue  # reserved, or with a checksum
            whole = content * 2 if descriptor >> 6 == 1 else content
            data = header(descriptor, len(whole)) + block(BlockKind.RAW, len(whole), whole)
            assert reader_of(data, backend).read() == whole

    def test_each_back_end_reads_what_the_other_wrote(self, monkeypatch: pytest.MonkeyPatch) -> None:
        content = random.Random(2).randbytes(300_000) + bytes(300_000)
        backends = []
        for name in ("zstandard", STANDARD_LIBRARY):
            monkeypatch.setattr(zstd_backends, "PREFERENCE", (name,))
            backends.append(select_backend())
        one, other = backends
        assert one is not None
        assert other is not None
        assert reader_of(compress(content, one), other).read() == content
        assert reader_of(compress(content, other), one).read() == content

    def test_an_empty_payload_is_a_frame_with_a_checksum(self, backend: Backend) -> None:
        data = compress(b"", backend)
        assert zstandard.get_frame_parameters(data).has_checksum
        assert reader_of(data, backend).read() == b""

    def test_several_frames_are_one_payload(self, backend: Backend) -> None:
        parts = [b"one", b"", bytes(200_000), b"two"]
        data = b"".join(compress(part, backend) for part in parts)
        assert reader_of(data, backend).read() == b"".join(parts)

    def test_skippable_frames_are_passed_over_wherever_they_stand(self, backend: Backend) -> None:
        data = compress(b"content", backend)
        whole = (
            skippable(b"x" * 300_000, 15)
            + data
            + skippable(b"")
            + skippable(b"y")
            + data
            + skippable(b"z", 7)
        )
        assert reader_of(whole, backend).read() == b"contentcontent"

    def test_frames_without_checksum_and_with_raw_and_rle_blocks_are_read(self, backend: Backend) -> None:
        blocks = block(BlockKind.RAW, 3, b"abc", last=False) + block(BlockKind.RLE, 5, b"z", last=False)
        assert (
            reader_of(MAGIC + SMALL_WINDOW + blocks + block(BlockKind.RAW, 0, b""), backend).read()
            == b"abczzzzz"
        )

    def test_one_huge_write_reaches_the_output_in_small_pieces(self, backend: Backend) -> None:
        sizes = []

        class Measuring(FakeOutput):
            def write(self, b: Any, /) -> int:
                sizes.append(len(b))
                return super().write(b)

        content = random.Random(3).randbytes(MIB) * 8
        with writer_on(Measuring(keep=False), backend, level=-5) as stream:
            assert stream.write(content) == len(content)
        assert max(sizes) < 2 * MIB

    def test_flush_makes_all_that_was_written_readable(self, backend: Backend) -> None:
        sink = FakeOutput()
        stream = writer_on(sink, backend)
        stream.flush()
        assert not sink.content
        stream.write(b"abc" * 1000)
        stream.flush()
        before = len(sink.content)
        stream.flush()
        assert len(sink.content) == before
        # A library's own incremental reader needs no end of the frame to get at it.
        assert backend.new_decompressor().decompress(sink.content) == b"abc" * 1000


class TestTruncation:
    def test_no_input_at_all_is_truncated(self, backend: Backend) -> None:
        with pytest.raises(TruncatedFileError, match="before any data frame"):
            reader_of(b"", backend).read()

    def test_skippable_frames_alone_are_truncated(self, backend: Backend) -> None:
        with pytest.raises(TruncatedFileError):
            reader_of(skippable(b"abc"), backend).read()

    @pytest.mark.parametrize("flush", [False, True])
    def test_a_frame_cut_anywhere_is_truncated(self, backend: Backend, flush: bool) -> None:
        data = skippable(b"ab") + compress(b"some text, some text, more text" * 3, backend, flush=flush)
        for length in range(len(data)):
            with pytest.raises(TruncatedFileError) as caught:
                reader_of(data[:length], backend).read()
            assert caught.value.found == length
            assert caught.value.expected > length

    def test_the_error_names_the_file(self, backend: Backend, tmp_path: Any) -> None:
        path = tmp_path / "item"
        path.write_bytes(compress(b"abc", backend)[:-1])
        with path.open("rb") as file, pytest.raises(TruncatedFileError, match="item") as caught:
            reader_of(file, backend).read()
        assert caught.value.path == str(path)

    def test_a_dropped_writer_leaves_a_frame_that_is_truncated(self, backend: Backend) -> None:
        sink = FakeOutput()
        stream = writer_on(sink, backend)
        stream.write(b"abc")
        stream.flush()
        del stream
        gc.collect()
        assert not sink.closed
        with pytest.raises(TruncatedFileError):
            reader_of(bytes(sink.content), backend).read()

    def test_a_with_block_left_by_an_exception_leaves_a_frame_that_is_truncated(
        self, backend: Backend
    ) -> None:
        sink = FakeOutput()

        def give_up() -> None:
            with writer_on(sink, backend) as stream:
                stream.write(b"abc")
                stream.flush()
                raise KeyError

        with pytest.raises(KeyError):
            give_up()
        assert sink.closed
        with pytest.raises(TruncatedFileError):
            reader_of(bytes(sink.content), backend).read()

    def test_a_dropped_reader_leaves_its_input_open(self, backend: Backend) -> None:
        source = io.BytesIO(compress(b"abc", backend))
        assert reader_of(source, backend).read() == b"abc"
        gc.collect()
        assert not source.closed


class TestDamage:
    def test_the_librarys_own_error_is_the_cause(self, backend: Backend) -> None:
        data = bytearray(compress(b"some text " * 100, backend))
        data[-1] ^= 1
        with pytest.raises(IntegrityError, match="damaged") as caught:
            reader_of(bytes(data), backend).read()
        assert isinstance(caught.value.__cause__, backend.error)
        assert not isinstance(caught.value, TruncatedFileError)

    def test_a_failed_reader_stays_failed(self, backend: Backend) -> None:
        frame = compress(b"good", backend)
        stream = reader_of(frame + b"junk" + frame, backend)
        assert stream.read(4) == b"good"
        for _ in range(3):
            with pytest.raises(IntegrityError, match="magic number"):
                stream.read(1)
        with pytest.raises(IntegrityError):
            stream.readinto(bytearray(1))

    def test_bytes_lost_to_a_passing_error_of_the_input_are_not_skipped(self, backend: Backend) -> None:
        content = random.Random(6).randbytes(MIB)

        class Hiccup(FakeInput):
            def readinto(self, b: Any, /) -> int | None:
                if self.read_count == 2:
                    self.read_count += 1
                    raise OSError("a passing error")
                return super().readinto(b)

        stream = reader_of(Hiccup(compress(content, backend)), backend)
        # Some of the bytes were read before the error, and nobody got them: going on would leave a hole.
        for _ in range(2):
            with pytest.raises(OSError, match="a passing error"):
                stream.readinto(bytearray(MIB))

    @pytest.mark.parametrize("size", [10, 200_000, 600_000])
    def test_who_reads_just_the_payloads_length_has_had_the_checksum_checked(
        self, backend: Backend, size: int
    ) -> None:
        content = random.Random(4).randbytes(size)
        for flush in (False, True):
            data = bytearray(compress(content, backend, flush=flush))
            data[-2] ^= 4
            with pytest.raises(IntegrityError):
                reader_of(bytes(data), backend).read(size)
            with pytest.raises(TruncatedFileError):
                reader_of(bytes(data[:-1]), backend).readinto(bytearray(size))

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"PK\x03\x04 is a zip", "magic number"),
            (MAGIC + b"\x08\x00" + block(BlockKind.RAW, 0, b""), "damaged"),
            (MAGIC + b"\x01\x00\x07" + block(BlockKind.RAW, 0, b""), "damaged"),
            (MAGIC + SMALL_WINDOW + block(BlockKind.RESERVED, 0, b""), "kind 3"),
            (MAGIC + SMALL_WINDOW + block(BlockKind.RLE, (128 << 10) + 1, b"a"), "size 131073"),
            (MAGIC + b"\x00\x88" + block(BlockKind.RAW, 0, b""), "128 MiB"),
            (MAGIC + b"\xa0" + struct.pack("<I", 1 << 30) + block(BlockKind.RAW, 0, b""), "damaged"),
        ],
        ids=[
            "foreign",
            "reserved-bit",
            "dictionary",
            "reserved-kind",
            "large-block",
            "window",
            "single-segment",
        ],
    )
    def test_what_no_writer_of_ours_makes_is_refused(
        self, backend: Backend, data: bytes, message: str
    ) -> None:
        if message == "128 MiB":
            # A window of so many bytes is allowed, the next larger one is not.
            assert reader_of(data, backend).read() == b""
            data, message = data.replace(b"\x00\x88", b"\x00\x89"), "damaged"
        with pytest.raises(IntegrityError, match=message):
            reader_of(data, backend).read()

    def test_a_wrong_declared_size_is_damage(self, backend: Backend) -> None:
        with pytest.raises(IntegrityError):
            reader_of(MAGIC + b"\x20\x04" + block(BlockKind.RAW, 3, b"abc"), backend).read()


class TestLimits:
    def test_max_size_admits_exactly_that_many_bytes(self, backend: Backend) -> None:
        data = compress(bytes(300_000), backend)
        assert reader_of(data, backend, 300_000).read() == bytes(300_000)
        assert reader_of(compress(b"", backend), backend, 0).read() == b""
        with pytest.raises(IntegrityError, match="299999") as caught:
            reader_of(data, backend, 299_999).read()
        assert caught.value.expected == 299_999

    def test_max_size_counts_all_frames_together(self, backend: Backend) -> None:
        data = compress(b"abc", backend) + compress(b"def", backend)
        assert reader_of(data, backend, 6).read() == b"abcdef"
        stream = reader_of(data, backend, 5)
        with pytest.raises(IntegrityError):
            stream.read()

    def test_an_explosive_stream_is_stopped_one_block_behind_the_limit(self, backend: Backend) -> None:
        data = bomb(1 << 30)
        assert len(data) < 33_000

        def read() -> None:
            with pytest.raises(IntegrityError):
                reader_of(data, backend, 1000).read()

        assert memory_peak(read) < MIB

    def test_a_huge_request_takes_no_more_memory_than_the_data(self, backend: Backend) -> None:
        data = compress(b"abc", backend)
        assert memory_peak(lambda: reader_of(data, backend).read(1 << 60)) < MIB

    def test_an_explosive_stream_read_in_small_pieces_takes_a_few_mib(self, backend: Backend) -> None:
        # In a process of its own: the library's memory shows only in the size of the process.
        code = f"""
import io, resource, sys
from holdfast._io import zstd_backends
from holdfast._io.zstd import ZstdReader
zstd_backends.PREFERENCE = ({backend.module!r},)
backend = zstd_backends.select_backend()
data, buffer, total = sys.stdin.buffer.read(), bytearray(4096), 0
ZstdReader(io.BytesIO(data[:]), backend).read(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
stream = ZstdReader(io.BytesIO(data), backend)
while count := stream.readinto(buffer):
    total += count
print(total, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
        done = subprocess.run(
            [sys.executable, "-c", code], input=bomb(1 << 30), capture_output=True, check=True
        )
        total, grown_kib = map(int, done.stdout.split())
        assert total == 1 << 30
        assert grown_kib < 8 << 10


class TestAwkwardStreams:
    def test_a_write_that_makes_no_progress_is_an_error(self, backend: Backend) -> None:
        for answer, kind in ((0, OSError), (None, BlockingIOError), (-1, OSError), (10**9, OSError)):

            class Stuck(FakeOutput):
                returned = answer

                def write(self, b: Any, /) -> Any:
                    return self.returned

            sink = Stuck()
            stream = writer_on(sink, backend)
            stream.write(b"abc")
            with pytest.raises(kind):
                stream.close()
            assert sink.closed

    def test_after_a_failed_write_the_frame_is_never_ended(self, backend: Backend) -> None:
        sink = FakeOutput(room=100)
        stream = writer_on(sink, backend)
        with pytest.raises(OSError, match="imaginary disk"):
            stream.write(random.Random(5).randbytes(3 * MIB))
        sink.room = None
        before = len(sink.content)
        with pytest.raises(OSError, match="imaginary disk") as caught:
            stream.write(b"more")
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(OSError, match="imaginary disk"):
            stream.close()
        assert len(sink.content) == before

    def test_an_interrupt_is_not_raised_a_second_time(self, backend: Backend) -> None:
        class Interrupted(FakeOutput):
            def write(self, b: Any, /) -> int:
                raise KeyboardInterrupt

        stream = writer_on(Interrupted(), backend)
        stream.write(b"abc")
        with pytest.raises(KeyboardInterrupt):
            stream.flush()
        with pytest.raises(StorageError, match="KeyboardInterrupt"):
            stream.write(b"def")
        with pytest.raises(StorageError, match="KeyboardInterrupt"):
            stream.close()

    def test_a_non_blocking_input_gives_none_and_then_the_rest(self, backend: Backend) -> None:
        content = bytes(500_000)
        stream = reader_of(FakeInput(compress(content, backend), most=10, blocks=True), backend)
        assert stream.readinto(bytearray(10)) is None
        assert stream.read(10) is None
        found = bytearray()
        while (data := stream.read(100_000)) != b"":
            found += data or b""
        assert bytes(found) == content

    def test_buffers_that_cannot_serve_are_refused_before_anything_is_read(self, backend: Backend) -> None:
        stream = reader_of(compress(b"abc", backend), backend)
        with pytest.raises(TypeError, match="writable"):
            stream.readinto(b"read-only")
        with pytest.raises(BufferError, match="contiguous"):
            stream.readinto(memoryview(bytearray(10))[::2])
        assert stream.read() == b"abc"
        with writer_on(FakeOutput(), backend) as writer, pytest.raises(BufferError, match="contiguous"):
            writer.write(memoryview(b"abcdef")[::2])

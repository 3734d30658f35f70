import io
import os
import pickle
import random
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._format.dtypes import DTYPES
from holdfast._format.torch_item import ItemFrame, bytes_item, tensor_item
from holdfast._format.torch_item_reader import TensorLayout, read_item_layout
from holdfast.errors import ChecksumError, IntegrityError, TruncatedFileError, UsageError


def build(item: ItemFrame, payload: bytes, position: int = 0) -> bytes:
    return item.head(position) + payload + item.tail(position, zlib.crc32(payload))


def reader_of(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, nbytes: data[offset : offset + nbytes]


def layout_of(data: bytes) -> TensorLayout | None:
    return read_item_layout(reader_of(data), len(data), path="__0_0.distcp", key="weight")


def combine(first: int, second: int, nbytes: int) -> int:
    """CRC-32 of joined runs by its definition: what zeros do to the first, added to the second."""
    zeros = b"\0" * nbytes
    return zlib.crc32(zeros, first) ^ zlib.crc32(zeros) ^ second


def archive_of(records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return buffer.getvalue()


PAYLOAD = bytes(range(24))
FLOATS = build(tensor_item("float32", (2, 3)), PAYLOAD)


def records_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@given(
    st.sampled_from([name for name, dtype in DTYPES.items() if dtype.storage]),
    st.lists(st.integers(0, 4), max_size=5).map(tuple),
    st.integers(0, 10_000),
)
def test_payload_is_aligned_in_the_file_and_lengths_are_known_before_writing(
    dtype: str, shape: tuple[int, ...], position: int
) -> None:
    item = tensor_item(dtype, shape)
    payload = random.Random(position).randbytes(item.payload_nbytes)
    head, tail = item.head(position), item.tail(position, zlib.crc32(payload))
    assert (position + len(head)) % 64 == 0
    assert len(head) == item.payload_offset(position)
    assert len(tail) == item.tail_nbytes
    assert len(head) + len(payload) + len(tail) == item.nbytes(position)
    with zipfile.ZipFile(io.BytesIO(head + payload + tail)) as archive:
        assert archive.testzip() is None


@given(
    st.sampled_from([name for name, dtype in DTYPES.items() if dtype.storage]),
    st.lists(st.integers(0, 2**18), max_size=3).map(tuple),
)
def test_the_layout_of_an_item_is_what_it_was_built_from(dtype: str, shape: tuple[int, ...]) -> None:
    item = tensor_item(dtype, shape)
    head, tail = item.head(0), item.tail(0, 7)
    tail_at = len(head) + item.payload_nbytes

    def read_at(offset: int, nbytes: int) -> bytes:
        # Of a payload of terabytes only what is around it exists.
        around = {**dict(enumerate(head)), **dict(enumerate(tail, tail_at))}
        return bytes(around.get(i, 0) for i in range(offset, offset + nbytes))

    layout = read_item_layout(read_at, item.nbytes(0), path="f")
    assert layout is not None
    assert (layout.dtype, layout.shape, layout.storage_offset) == (dtype, shape, 0)
    assert (layout.payload_offset, layout.payload_nbytes, layout.crc32) == (len(head), item.payload_nbytes, 7)
    assert (layout.byteorder, layout.conj, layout.neg) == ("little", False, False)


def test_large_payloads_begin_on_a_page_and_small_ones_cost_little() -> None:
    large = tensor_item("uint8", (1 << 20,))
    assert [(p + large.payload_offset(p)) % 4096 for p in (0, 1, 4095, 5000)] == [0] * 4
    assert max(tensor_item("float32", ()).nbytes(p) for p in range(64)) - 4 < 700


def test_an_item_is_the_same_however_often_it_is_built() -> None:
    first = build(tensor_item("bfloat16", (3, 4)), bytes(24), 100)
    tensor_item.cache_clear()
    assert build(tensor_item("bfloat16", (3, 4)), bytes(24), 100) == first


@pytest.mark.parametrize("dtype", ["qint8", "int4", "float33"])
def test_a_dtype_that_torch_cannot_load_is_refused(dtype: str) -> None:
    with pytest.raises(UsageError, match=dtype):
        tensor_item(dtype, (2,))


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize("nbytes", [0, 1, 255, 70_000])
def test_bytes_are_one_aligned_run_inside_a_valid_pickle(kind: type[bytes], nbytes: int) -> None:
    content = random.Random(nbytes).randbytes(nbytes)
    item = bytes_item(nbytes, combine=combine, kind=kind)
    data = build(item, content, 1001)
    start = item.payload_offset(1001)
    assert (1001 + start) % 64 == 0
    assert data[start : start + nbytes] == content
    assert len(data) == item.nbytes(1001)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        loaded = pickle.loads(archive.read("a/data.pkl"))
    assert type(loaded) is kind
    assert loaded == content
    assert layout_of(data) is None


@pytest.mark.parametrize("excess", [-(2**17), -1, 0, 5000])
def test_an_archive_beyond_4_gib_is_valid(tmp_path: Path, excess: int) -> None:
    nbytes = 2**32 + excess
    item = tensor_item("uint8", (nbytes,))
    path = tmp_path / "item"
    with open(path, "wb") as file:
        file.write(item.head(0))
        assert file.tell() % 4096 == 0
        file.seek(nbytes, os.SEEK_CUR)  # a hole: no disk and no memory
        file.write(item.tail(0, 0xABCDEF01))
        assert file.tell() == item.nbytes(0)
    with zipfile.ZipFile(path) as archive, open(path, "rb") as raw:
        info = archive.getinfo("a/data/0")
        assert (info.file_size, info.compress_size, info.CRC) == (nbytes, nbytes, 0xABCDEF01)
        with archive.open(info) as record:
            assert record.read(4096) == bytes(4096)
        assert archive.read("a/version") == b"3\n"
        layout = read_item_layout(
            lambda offset, n: os.pread(raw.fileno(), n, offset), item.nbytes(0), path=str(path)
        )
    assert layout is not None
    assert (layout.payload_offset, layout.payload_nbytes) == (item.payload_offset(0), nbytes)


def test_a_layout_takes_few_and_small_reads() -> None:
    def read_at(offset: int, nbytes: int) -> bytes:
        reads.append(nbytes)
        return data[offset : offset + nbytes]

    for nbytes, most in ((64, 1), (1 << 21, 2)):
        reads: list[int] = []
        data = build(tensor_item("uint8", (nbytes,)), bytes(nbytes))
        assert read_item_layout(read_at, len(data), path="f") is not None
        assert len(reads) <= most
        assert sum(reads) < 4096


def layout_or_error(data: bytes) -> TensorLayout | IntegrityError | None:
    try:
        return layout_of(data)
    except IntegrityError as error:
        return error


def test_every_single_wrong_byte_outside_of_the_payload_is_found_or_harmless() -> None:
    whole = layout_of(FLOATS)
    assert whole is not None
    payload = range(whole.payload_offset, whole.payload_offset + whole.payload_nbytes)
    for place in set(range(len(FLOATS))).difference(payload):
        for flip in (1, 0x80, 0xFF):
            damaged = bytearray(FLOATS)
            damaged[place] ^= flip
            found = layout_or_error(bytes(damaged))
            if isinstance(found, IntegrityError):
                assert (found.path, found.key) == ("__0_0.distcp", "weight")
            else:
                assert found in (whole, None), place


@pytest.mark.parametrize("length", [0, 1, 21, 22, 100, len(FLOATS) - 1])
def test_an_item_that_was_cut_off_is_reported(length: int) -> None:
    with pytest.raises(IntegrityError):
        layout_of(FLOATS[:length])
    with pytest.raises(TruncatedFileError) as caught:
        read_item_layout(reader_of(FLOATS[:length]), len(FLOATS), path="f", key="k")
    assert (caught.value.expected, caught.value.found) == (len(FLOATS), length)


@given(st.binary(max_size=300), st.data())
@settings(max_examples=300)
def test_any_pickle_gives_a_layout_or_none_or_an_integrity_error(noise: bytes, data: st.DataObject) -> None:
    records = records_of(FLOATS)
    pickled = records["a/data.pkl"]
    start = data.draw(st.integers(0, len(pickled)))
    end = data.draw(st.integers(start, len(pickled)))
    records["a/data.pkl"] = pickled[:start] + noise + pickled[end:]
    found = layout_or_error(archive_of(records))
    assert not isinstance(found, TensorLayout) or found.payload_nbytes == len(PAYLOAD)


@given(st.binary(min_size=1, max_size=400))
def test_any_bytes_give_none_or_an_integrity_error(noise: bytes) -> None:
    for data in (noise, noise + FLOATS[-22:], FLOATS[:-200] + noise + FLOATS[-200:]):
        assert not isinstance(layout_or_error(data), TensorLayout)


def with_pickle(pickled: bytes) -> bytes:
    return archive_of({**records_of(FLOATS), "a/data.pkl": pickled})


def test_a_pickle_that_would_run_code_is_not_run_and_not_a_layout(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    assert layout_of(with_pickle(pickle.dumps(Evil(), 2))) is None
    assert not (tmp_path / "ran").exists()


def test_small_pickles_that_ask_for_much_are_refused_at_once() -> None:
    names = b"ctorch\nTensor\nq\1ctorch._tensor\n_rebuild_from_type_v2\nq\0"
    calls_in_calls = b"\x80\x02" + names + b"(h\0h\1" * 9000 + b")" + b"Nt" * 9000 + b"R."
    for pickled in (
        b"\x80\x02" + b")\x85" + b"\x85" * 60_000 + b".",
        b"\x80\x02X\xff\xff\xff\xff.",
        b"\x80\x02\x8e" + b"\xff" * 8 + b".",
        b"\x80\x02Nr\xff\xff\xff\xff.",
        calls_in_calls,
    ):
        assert len(pickled) < 64 * 1024
        assert layout_of(with_pickle(pickled)) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"K\x06tQ", b"K\x07tQ"),  # the storage is longer than its record
        (b"tQK\0", b"tQK\1"),  # the tensor begins late, and so ends outside of the storage
        (b"K\x02K\x03\x86", b"K\x03K\x03\x86"),  # a longer shape
        (b"K\x03K\x01\x86\x89", b"K\x04K\x01\x86\x89"),  # a longer stride
        (b"X\1\0\0\x000X", b"X\1\0\0\x001X"),  # a storage that is not there
    ],
)
def test_a_tensor_that_does_not_fit_its_bytes_is_an_integrity_error(old: bytes, new: bytes) -> None:
    pickled = records_of(FLOATS)["a/data.pkl"]
    assert pickled.count(old) == 1
    with pytest.raises(IntegrityError):
        layout_of(with_pickle(pickled.replace(old, new)))


def test_compressed_records_are_left_to_torch() -> None:
    assert layout_of(archive_of(records_of(FLOATS))) is not None
    assert layout_of(archive_of(records_of(FLOATS), zipfile.ZIP_DEFLATED)) is None


def test_a_record_given_twice_is_an_integrity_error() -> None:
    buffer = io.BytesIO(FLOATS)
    with zipfile.ZipFile(buffer, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("a/data/0", bytes(24))
    with pytest.raises(IntegrityError, match="twice"):
        layout_of(buffer.getvalue())


def test_a_pickle_with_a_wrong_checksum_is_a_checksum_error() -> None:
    at = FLOATS.index(b"FloatStorage")
    with pytest.raises(ChecksumError, match=r"weight.*data\.pkl"):
        layout_of(FLOATS[:at] + b"F1oatStorage" + FLOATS[at + 12 :])


def test_building_and_reading_import_neither_torch_nor_numpy() -> None:
    modules = "holdfast._geometry, holdfast._format.torch_item, holdfast._format.torch_item_reader"
    program = f"import sys, {modules}; sys.exit(bool({{'torch', 'numpy'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

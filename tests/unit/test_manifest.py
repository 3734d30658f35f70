"""The manifest and the file around it: what is written is read, and what is damaged or newer is refused."""

import struct
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast._format import metadata_file
from holdfast._format.manifest import FORMAT_MAJOR, Manifest, decode, encode
from holdfast.errors import CheckpointError, MetadataFormatError
from holdfast.extension import ZStandard


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("checkpoint")
    state = {
        "a": torch.ones(2, 3),
        "b": {"c": torch.zeros(0, dtype=torch.int8), 5: "object", "empty": {}},
        "big": torch.ones(600_000),
        "scalar": torch.tensor(1j),
    }
    hf.save(state, storage_writer=hf.FileSystemWriter(place))
    return place


@pytest.fixture(scope="module")
def content(folder: Path) -> bytes:
    return (folder / ".metadata").read_bytes()


@pytest.fixture(scope="module")
def manifest(content: bytes) -> Manifest:
    section = metadata_file.split(content, path="f").manifest
    assert section is not None
    return decode(section, path="f")


def test_it_says_what_there_is_without_torch(manifest: Manifest, folder: Path) -> None:
    entries = {
        key: None if properties is None else (manifest.properties[properties][0], shape, chunks)
        for key, properties, shape, chunks in manifest.entries()
    }
    assert entries == {
        "a": ("float32", [2, 3], [([0, 0], [2, 3])]),
        "b.c": ("int8", [0], [([0], [0])]),
        "b.5": None,
        "big": ("float32", [600_000], [([0], [600_000])]),
        "scalar": ("complex64", [], [([], [])]),
    }
    (name,) = manifest.file_names
    assert (folder / name).stat().st_size >= struct.unpack("<q", manifest.file_nbytes)[0]


def test_each_item_lies_where_the_manifest_says(manifest: Manifest, folder: Path) -> None:
    items = dict(zip(manifest.keys, manifest.items(), strict=True))
    item = items["a"]
    data = (folder / item.relative_path).read_bytes()
    start = item.offset + item.payload_offset
    assert data[start : start + item.payload_nbytes] == struct.pack("<6f", *[1.0] * 6)
    big = items["big"]
    start = big.offset + big.payload_offset
    for number, at in enumerate(range(0, big.payload_nbytes, manifest.block_size)):
        block = data[start + at : start + min(at + manifest.block_size, big.payload_nbytes)]
        assert zlib.crc32(block).to_bytes(4, "little") == big.checksums[4 * number : 4 * number + 4]
    assert len(big.checksums) == 4 * 3


def test_it_comes_back_equal(manifest: Manifest) -> None:
    assert decode(encode(manifest), path="f") == manifest


def changed(manifest: Manifest, **fields: Any) -> bytes:
    return encode(msgspec.structs.replace(manifest, **fields))


def test_a_newer_major_version_is_refused_and_a_newer_minor_one_read(manifest: Manifest) -> None:
    with pytest.raises(MetadataFormatError, match="Update holdfast") as caught:
        decode(changed(manifest, version=(FORMAT_MAJOR + 1, 0)), path="f")
    assert caught.value.found == FORMAT_MAJOR + 1
    assert decode(changed(manifest, version=(FORMAT_MAJOR, 99)), path="f").keys == manifest.keys


def test_fields_of_a_newer_minor_version_are_ignored(manifest: Manifest) -> None:
    fields = msgspec.msgpack.decode(encode(manifest))
    fields["something new"] = [1, 2, 3]
    assert decode(msgspec.msgpack.encode(fields), path="f") == manifest


def test_a_manifest_of_format_1_0_is_read(manifest: Manifest) -> None:
    fields = msgspec.msgpack.decode(encode(manifest))
    for name in ("checksum_algorithm", "saves", "item_saves"):
        del fields[name]
    read = decode(msgspec.msgpack.encode({**fields, "version": [1, 0]}), path="f")
    assert list(read.items()) == list(manifest.items())
    assert {item.save_id for item in read.items()} == {None}


def test_unknown_checksums_are_refused_with_what_to_do(manifest: Manifest) -> None:
    with pytest.raises(MetadataFormatError, match=r"'xxh3'.*Update holdfast") as caught:
        decode(changed(manifest, checksum_algorithm="xxh3"), path="f")
    assert (caught.value.expected, caught.value.found) == ("crc32", "xxh3")


def test_each_item_may_belong_to_an_earlier_save(manifest: Manifest) -> None:
    numbers = struct.pack("<5I", 0, 1, 0, 0, 2)
    read = decode(changed(manifest, saves=[None, "abc", "def"], item_saves=numbers), path="f")
    assert [item.save_id for item in read.items()] == [None, "abc", None, None, "def"]
    with pytest.raises(MetadataFormatError, match="an item refers to saves that are not there"):
        decode(changed(manifest, saves=[None, "abc"], item_saves=numbers), path="f")
    with pytest.raises(MetadataFormatError, match="item_saves"):
        decode(changed(manifest, saves=[None, "abc"], item_saves=b"\0" * 16), path="f")


def test_items_of_the_save_itself_take_no_column(manifest: Manifest) -> None:
    assert (manifest.saves, manifest.item_saves) == ([None], b"")
    assert manifest.version == (1, 3)
    assert manifest.checksum_algorithm == "crc32"


def test_a_newer_major_version_is_refused_whatever_else_it_holds() -> None:
    with pytest.raises(MetadataFormatError, match="Update holdfast"):
        decode(msgspec.msgpack.encode({"version": [FORMAT_MAJOR + 1, 3], "all": "different"}), path="f")


def q(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"keys": ["a", "a", "big", "scalar", "b.5"]}, "twice"),
        ({"keys": ["a"]}, "do not match"),
        ({"block_size": 0}, "block size"),
        ({"block_size": (1 << 64) - 1}, "checksums"),
        ({"file_names": ["../evil"]}, "leads out"),
        ({"file_names": ["/etc/passwd"]}, "leads out"),
        ({"file_names": [".."]}, "leads out"),
        ({"file_names": []}, ""),
        ({"file_nbytes": q(3)}, "beyond the end"),
        ({"file_nbytes": q(-1)}, "negative"),
        ({"item_offsets": b""}, "item_offsets"),
        ({"item_offsets": q(*[1 << 60] * 5)}, "beyond"),
        ({"checksums": b""}, "checksums"),
        ({"tensor_properties": b"\x09" * 16}, "properties"),
        ({"item_transforms": b"\x09" * 20}, "transforms"),
        ({"chunk_offsets": q(5, 5, 0, 0)}, "outside"),
        ({"tensor_shapes": q(1 << 40, 1 << 40, 0, 600_000)}, "impossible"),
        ({"paths": [None]}, "paths"),
    ],
    ids=str,
)
def test_a_manifest_that_cannot_be_is_refused_with_the_reason(
    manifest: Manifest, fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(MetadataFormatError, match=f"f does not describe a checkpoint: .*{problem}"):
        decode(changed(manifest, **fields), path="f")


_COLUMNS = (
    "file_nbytes",
    "tensor_properties",
    "tensor_shapes",
    "tensor_chunks",
    "chunk_offsets",
    "chunk_lengths",
)
_COLUMNS_OF_ITEMS = (
    "files",
    "offsets",
    "nbytes",
    "payload_offsets",
    "payload_nbytes",
    "transforms",
    "blocks",
)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_changed_number_is_refused_unless_every_row_is_still_sound(
    manifest: Manifest, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([*_COLUMNS, *(f"item_{column}" for column in _COLUMNS_OF_ITEMS)]))
    column = bytearray(getattr(manifest, name))
    width = 4 if name in _NARROW else 8
    at = width * data.draw(st.integers(0, len(column) // width - 1))
    before = int.from_bytes(column[at : at + width], "little")
    near = st.integers(-2, 2).map(lambda step: (before + step) % (1 << 8 * width))
    number = data.draw(st.one_of(near, st.integers(0, (1 << 8 * width) - 1)))
    column[at : at + width] = number.to_bytes(width, "little")
    try:
        read = decode(changed(manifest, **{name: bytes(column)}), path="f")
    except MetadataFormatError:
        assert number != before
        return
    sizes = dict(zip(read.file_names, struct.unpack("<q", read.file_nbytes), strict=True))
    for item in read.items():
        assert 0 <= item.offset <= item.offset + item.length <= sizes[item.relative_path]
        assert 0 <= item.payload_offset <= item.payload_offset + item.payload_nbytes <= item.length
        assert len(item.checksums) == 4 * -(-item.payload_nbytes // read.block_size)
    for _, _, shape, chunks in read.entries():
        for offsets, lengths in chunks:
            for offset, length, extent in zip(offsets, lengths, shape, strict=True):
                assert 0 <= offset <= offset + length <= extent


_NARROW = (
    *("tensor_properties", "tensor_chunks"),
    *("item_files", "item_transforms", "item_blocks"),
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_change_of_the_manifest_is_refused_or_harmless(manifest: Manifest, data: st.DataObject) -> None:
    # The checksum around it finds accidents; this is about what somebody made on purpose.
    damaged = bytearray(encode(manifest))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = decode(bytes(damaged), path="f")
    except (MetadataFormatError, UnicodeDecodeError):
        # Text that is not UTF-8 has the test below.
        return
    list(read.entries())
    list(read.items())


def test_text_that_is_not_utf_8_is_refused(manifest: Manifest) -> None:
    damaged = encode(manifest).replace(b"float32", b"\x80loat32")
    with pytest.raises(MetadataFormatError):
        decode(damaged, path="f")


def test_every_single_flipped_byte_of_the_file_is_noticed(content: bytes) -> None:
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 0x10
        with pytest.raises(CheckpointError):
            read_back(bytes(damaged))


def read_back(data: bytes) -> Any:
    from holdfast._storage.metadata_reading import load_metadata  # noqa: PLC0415 - torch is not needed above

    return load_metadata(data, path="f")


def test_every_truncation_of_the_file_is_noticed(content: bytes) -> None:
    for length in range(0, len(content), 7):
        with pytest.raises(CheckpointError):
            read_back(content[:length])


@pytest.mark.parametrize("more", [b"\0", b"HOLDFAST", b"x" * 100], ids=repr)
def test_bytes_after_the_footer_are_noticed(content: bytes, more: bytes) -> None:
    with pytest.raises(CheckpointError):
        read_back(content + more)


def test_the_parts_of_two_files_do_not_go_together(content: bytes, tmp_path: Path) -> None:
    hf.save({"other": 1}, checkpoint_id=tmp_path)
    other = metadata_file.split((tmp_path / ".metadata").read_bytes(), path="f")
    mine = metadata_file.split(content, path="f")
    assert mine.manifest is not None
    with pytest.raises(CheckpointError):
        read_back(bytes(other.pickle) + bytes(mine.manifest) + content[-40 - 4 :])


def test_a_file_for_holdfast_alone_has_no_pickle(tmp_path: Path) -> None:
    hf.save({"a": 1}, storage_writer=hf.FileSystemWriter(tmp_path, torch_compatible=False))
    assert not metadata_file.split((tmp_path / ".metadata").read_bytes(), path="f").pickle


def test_the_metadata_that_is_read_equals_the_one_that_was_returned(tmp_path: Path) -> None:
    for number, options in enumerate(({}, {"_extensions": [ZStandard()]}, {"single_file_per_rank": False})):
        writer = hf.FileSystemWriter(tmp_path / str(number), **options)  # type: ignore[arg-type]
        made = hf.save({"a": torch.ones(2), "b": {3: [torch.ones(1)]}, "n": 5}, storage_writer=writer)
        read = hf.FileSystemReader(tmp_path / str(number)).read_metadata()
        assert read.state_dict_metadata == made.state_dict_metadata
        assert read.storage_data == made.storage_data
        assert read.planner_data == made.planner_data
        assert read.storage_meta is not None
        assert made.storage_meta is not None
        assert read.storage_meta.save_id == made.storage_meta.save_id


def test_more_kinds_of_properties_and_transforms_than_fit_a_byte_are_not_lost(tmp_path: Path) -> None:
    # One vocabulary entry a dtype and requires_grad; far fewer than 256, whatever a state holds.
    state = {
        f"{dtype} {grad}": torch.zeros(1, dtype=dtype, requires_grad=grad)
        for dtype in (torch.float16, torch.float32, torch.bfloat16, torch.complex64)
        for grad in (False, True)
    }
    hf.save(state, checkpoint_id=tmp_path)
    read = hf.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    for key, value in state.items():
        entry = read[key]
        assert isinstance(entry, hf.TensorStorageMetadata)
        assert (entry.properties.dtype, entry.properties.requires_grad) == (value.dtype, value.requires_grad)

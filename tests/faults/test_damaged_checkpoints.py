"""Bytes that changed after the save: never wrong values, and file and key are named (D1 to D5, B5)."""

import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoints import (
    METADATA,
    changed_column,
    contents,
    data_files,
    failure_of,
    load,
    put_back,
    read_manifest,
    write_manifest,
)
from tests.support.states import differing, large_state, same, small_state
from tests.support.stock_torch import stock_save
from tests.support.sweeps import sweep
from torch.distributed.checkpoint import filesystem as torch_filesystem

import holdfast as hf
from holdfast._format import metadata_file
from holdfast._format.description import column, ints
from holdfast.errors import (
    CheckpointException,
    IncompleteCheckpointError,
    IntegrityError,
    InvalidPlanError,
    MetadataFormatError,
    TruncatedFileError,
    UnsafeMetadataError,
)
from holdfast.extension import ZStandard

pytestmark = pytest.mark.one_core


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without torch's part": {"torch_compatible": False},
    "a file per item": {"single_file_per_rank": False},
    "zstd": {"_extensions": [ZStandard()]},
}


@pytest.fixture(params=FORMS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    hf.save(small_state(1), storage_writer=hf.FileSystemWriter(folder, **FORMS[request.param]))
    return folder


def _check_damaged_load(folder: Path, name: str, what: str) -> IntegrityError | None:
    """Load a checkpoint of which ``name`` is damaged: it is bit-identical, or an error names the file."""
    state = small_state(99)
    raised = failure_of(load, folder, state)
    if raised is None:
        assert same(state, small_state(1)), f"{what}: wrong values were loaded without a word"
        return None
    assert isinstance(raised, IntegrityError), f"{what}: {raised!r}"
    assert name in str(raised), f"{what}: the error does not name {name}: {raised}"
    assert raised.path is not None, f"{what}: {raised}"
    assert raised.path.endswith(name), f"{what}: {raised}"
    if name != METADATA:
        assert raised.key in _keys_in(folder, name), f"{what}: the key is not named: {raised}"
        assert raised.key in str(raised)
    return raised


def _keys_in(folder: Path, name: str) -> list[str]:
    manifest = read_manifest(folder)
    items = zip(manifest.keys, manifest.items(), strict=True)
    return [key for key, item in items if item.relative_path == name]


def _flip_bytes(folder: Path, stride: int) -> Iterator[tuple[str, int, IntegrityError | None]]:
    for name, data in sorted(contents(folder).items()):
        for at in range(0, len(data), stride):
            damaged, mask = bytearray(data), (0xFF, 0x01, 0x80)[at % 3]
            damaged[at] ^= mask
            (folder / name).write_bytes(damaged)
            yield name, at, _check_damaged_load(folder, name, f"byte {at} of {name} flipped by {mask:#x}")
        (folder / name).write_bytes(data)


@sweep(stride=61)
def test_a_flipped_byte_is_never_loaded_silently(checkpoint: Path, stride: int) -> None:
    missed = [(name, at) for name, at, error in _flip_bytes(checkpoint, stride) if error is None]
    # Of .metadata every byte counts; of a data file, what stock torch needs around a payload does not.
    assert not [name for name, _ in missed if name == METADATA]
    manifest = read_manifest(checkpoint)
    for key, item in zip(manifest.keys, manifest.items(), strict=True):
        first, file = item.offset + item.payload_offset, item.relative_path
        harmless = [at for name, at in missed if name == file and first <= at < first + item.payload_nbytes]
        assert not harmless, f"payload bytes {harmless} of {key} are not checked"


@sweep(stride=11)
def test_a_flipped_byte_of_a_tensor_names_that_tensor(tmp_path: Path, stride: int) -> None:
    hf.save(small_state(1), checkpoint_id=tmp_path)
    manifest = read_manifest(tmp_path)
    for key, item in zip(manifest.keys, manifest.items(), strict=True):
        intact = (tmp_path / item.relative_path).read_bytes()
        for at in range(0, item.payload_nbytes, stride):
            damaged = bytearray(intact)
            damaged[item.offset + item.payload_offset + at] ^= 4
            (tmp_path / item.relative_path).write_bytes(damaged)
            error = _check_damaged_load(tmp_path, item.relative_path, f"byte {at} of {key}")
            assert error is not None
            assert error.key == key
        (tmp_path / item.relative_path).write_bytes(intact)


@pytest.mark.parametrize("zstd", [False, True])
def test_a_flipped_byte_in_any_block_of_a_large_tensor_names_it(tmp_path: Path, zstd: bool) -> None:
    state = large_state(1)
    hf.save(state, storage_writer=hf.FileSystemWriter(tmp_path, _extensions=[ZStandard()] if zstd else None))
    manifest = read_manifest(tmp_path)
    key, item = list(zip(manifest.keys, manifest.items(), strict=True))[manifest.keys.index("rows.rows1")]
    first = item.offset + item.payload_offset
    for at in (0, 1, (1 << 20) - 1, 1 << 20, item.payload_nbytes // 2, item.payload_nbytes - 1):
        with (tmp_path / item.relative_path).open("r+b") as file:
            file.seek(first + at)
            byte = file.read(1)
            file.seek(first + at)
            file.write(bytes([byte[0] ^ 1]))
            file.flush()
            raised = failure_of(load, tmp_path, large_state(99))
            assert isinstance(raised, IntegrityError)
            assert (raised.key, raised.path) == (key, str(tmp_path / item.relative_path))
            file.seek(first + at)
            file.write(byte)
    assert same(load(tmp_path, large_state(99)), state)


def test_a_flipped_byte_is_found_when_only_a_slice_is_read(tmp_path: Path) -> None:
    """A slice reads some blocks of the payload; each is checked as a whole."""
    hf.save({"w": torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)}, checkpoint_id=tmp_path)
    (item,) = read_manifest(tmp_path).items()
    reader = hf.FileSystemReader(tmp_path)
    with (tmp_path / item.relative_path).open("r+b") as file:
        file.seek(item.offset + item.payload_offset + (2 << 20) + 5)
        file.write(b"\xee")
    metadata = reader.read_metadata()
    entry = metadata.state_dict_metadata["w"]
    assert isinstance(entry, hf.TensorStorageMetadata)

    class OneRow(hf.DefaultLoadPlanner):
        """Reads row 600 alone, which shares its block with the damaged byte."""

        def create_local_plan(self) -> Any:
            (item,) = super().create_local_plan().items
            size = torch.Size([1, 1024])
            item = type(item)(
                item.type,
                item.dest_index,
                torch.Size([600, 0]),
                item.storage_index,
                torch.Size([600, 0]),
                size,
            )
            return hf.LoadPlan([item])

    with pytest.raises(IntegrityError, match="w: "):
        hf.load({"w": torch.zeros(1024, 1024)}, storage_reader=reader, planner=OneRow())


def test_a_file_cut_at_any_length_is_never_loaded_silently(checkpoint: Path) -> None:
    lengths = random.Random(0)
    for name, data in sorted(contents(checkpoint).items()):
        for length in {0, 1, len(data) - 1, *lengths.sample(range(len(data)), min(15, len(data)))}:
            (checkpoint / name).write_bytes(data[:length])
            error = _check_damaged_load(checkpoint, name, f"{name} cut to {length} bytes")
            assert error is not None, f"{name} cut to {length} bytes was not noticed"
            if name != METADATA:
                assert isinstance(error, TruncatedFileError)
                assert error.found == length < error.expected <= len(data)
        (checkpoint / name).write_bytes(data)


@sweep(stride=23)
def test_a_metadata_file_cut_at_any_length_is_refused(checkpoint: Path, stride: int) -> None:
    whole = (checkpoint / METADATA).read_bytes()
    for length in range(0, len(whole), stride):
        (checkpoint / METADATA).write_bytes(whole[:length])
        assert _check_damaged_load(checkpoint, METADATA, f"cut to {length} bytes") is not None


def test_a_metadata_file_that_ends_where_torchs_part_ends_is_refused(tmp_path: Path) -> None:
    """What is left is a whole pickle, which stock torch would read; without checksums it is not ours."""
    hf.save(small_state(1), checkpoint_id=tmp_path)
    whole = (tmp_path / METADATA).read_bytes()
    end = len(metadata_file.split(whole, path="").pickle)
    for length in (end, end + 1, len(whole) - 44):
        (tmp_path / METADATA).write_bytes(whole[:length])
        assert _check_damaged_load(tmp_path, METADATA, f"cut to {length} bytes") is not None


@pytest.mark.parametrize("garbage", [b"\0", b"x" * 300, bytes(4096), b"HOLDFAST", b"\0" * 44 + b"HOLDFAST"])
def test_bytes_after_the_end_are_refused_or_harmless(checkpoint: Path, garbage: bytes) -> None:
    for name, data in sorted(contents(checkpoint).items()):
        (checkpoint / name).write_bytes(data + garbage)
        error = _check_damaged_load(checkpoint, name, f"{name} with {len(garbage)} bytes more")
        assert (error is None) == (name != METADATA)
        (checkpoint / name).write_bytes(data)


@pytest.mark.parametrize("fill", ["zeros", "ones", "random", "another pickle", "empty"])
def test_garbage_in_place_of_a_file_is_refused(checkpoint: Path, fill: str) -> None:
    for name, data in sorted(contents(checkpoint).items()):
        size = len(data)
        (checkpoint / name).write_bytes(
            {
                "zeros": bytes(size),
                "ones": b"\xff" * size,
                "random": random.Random(1).randbytes(size),
                "another pickle": b"\x80\x04]\x94.",
                "empty": b"",
            }[fill]
        )
        assert _check_damaged_load(checkpoint, name, f"{name} of {fill}") is not None or _has_no_bytes(
            checkpoint, name, data
        )
        (checkpoint / name).write_bytes(data)


def _has_no_bytes(folder: Path, name: str, intact: bytes) -> bool:
    """Whether a file holds nothing but a tensor without elements: then no garbage in it matters."""
    items = read_manifest(folder).items()
    return all(item.payload_nbytes == 0 for item in items if item.relative_path == name)


def test_a_zeroed_page_inside_a_large_tensor_is_refused(tmp_path: Path) -> None:
    hf.save(large_state(1), checkpoint_id=tmp_path)
    (name,) = data_files(tmp_path)
    with (tmp_path / name).open("r+b") as file:
        file.seek(2 << 20)
        file.write(bytes(4096))
    with pytest.raises(IntegrityError, match=name):
        load(tmp_path, large_state(99))


def test_data_files_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    """Same names, same sizes, same structure: only the bytes differ."""
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, seed in ((one, 1), (two, 2)):
        hf.save(small_state(seed), storage_writer=hf.FileSystemWriter(folder, thread_count=3))
    for mine, theirs in zip(data_files(one), data_files(two), strict=True):
        intact = (one / mine).read_bytes()
        assert os.path.getsize(one / mine) == os.path.getsize(two / theirs)
        (one / mine).write_bytes((two / theirs).read_bytes())
        assert _check_damaged_load(one, mine, "the file of another checkpoint") is not None
        (one / mine).write_bytes(intact)


def test_data_files_of_one_checkpoint_that_are_swapped_are_refused(tmp_path: Path) -> None:
    state = {f"w{n}": torch.full((100,), float(n)) for n in range(2)}
    hf.save(state, storage_writer=hf.FileSystemWriter(tmp_path, single_file_per_rank=False))
    first, second = (tmp_path / name for name in data_files(tmp_path))
    one, two = first.read_bytes(), second.read_bytes()
    assert len(one) == len(two)
    first.write_bytes(two)
    second.write_bytes(one)
    with pytest.raises(IntegrityError, match=r"\.distcp"):
        load(tmp_path, {f"w{n}": torch.zeros(100) for n in range(2)})


def test_a_metadata_file_of_another_save_is_refused(tmp_path: Path) -> None:
    hf.save(small_state(1), checkpoint_id=tmp_path)
    old = (tmp_path / METADATA).read_bytes()
    hf.save(small_state(2), checkpoint_id=tmp_path)
    (tmp_path / METADATA).write_bytes(old)
    with pytest.raises(IncompleteCheckpointError, match="missing"):
        load(tmp_path, small_state(99))


def test_a_missing_data_file_is_named_with_a_key_and_nothing_is_changed(tmp_path: Path) -> None:
    hf.save(small_state(1), storage_writer=hf.FileSystemWriter(tmp_path, single_file_per_rank=False))
    intact = contents(tmp_path)
    for name in data_files(tmp_path):
        (key,) = _keys_in(tmp_path, name)
        (tmp_path / name).unlink()
        state = small_state(99)
        raised = failure_of(load, tmp_path, state)
        assert isinstance(raised, IncompleteCheckpointError)
        assert (raised.key, raised.path) == (key, str(tmp_path / name))
        assert same(state, small_state(99))
        put_back(tmp_path, intact)


def test_damaged_metadata_does_not_fall_back_to_another_file(tmp_path: Path) -> None:
    """torch looks for __0.metadata then; one rank's own part of an older save is not this checkpoint."""
    hf.save(small_state(1), checkpoint_id=tmp_path / "own", use_collectives=False)
    hf.save(small_state(2), checkpoint_id=tmp_path / "all")
    for name, data in contents(tmp_path / "own").items():
        (tmp_path / "all" / name).write_bytes(data)
    (tmp_path / "all" / METADATA).write_bytes(b"\x80\x04")
    with pytest.raises(TruncatedFileError, match=METADATA):
        load(tmp_path / "all", small_state(99))
    (tmp_path / "all" / METADATA).write_bytes(b"")
    with pytest.raises(MetadataFormatError, match="empty"):
        load(tmp_path / "all", small_state(99))


@pytest.mark.parametrize(("offsets", "lengths"), [((4, 0), (20, 8)), ((0, 0), (23, 8)), ((0, 1), (24, 7))])
def test_chunks_that_do_not_cover_the_tensor_are_refused_and_nothing_is_changed(
    tmp_path: Path, offsets: tuple[int, int], lengths: tuple[int, int]
) -> None:
    hf.save(small_state(1), checkpoint_id=tmp_path)
    manifest = read_manifest(tmp_path)
    assert manifest.keys[0] == "model.weight"
    for axis in range(2):
        changed_column(manifest, "chunk_offsets", "q", axis, offsets[axis])
        changed_column(manifest, "chunk_lengths", "q", axis, lengths[axis])
    changed_column(manifest, "item_payload_nbytes", "q", 0, 4 * lengths[0] * lengths[1])
    write_manifest(tmp_path, manifest)
    state = small_state(99)
    raised = failure_of(load, tmp_path, state)
    assert isinstance(raised, InvalidPlanError | IntegrityError)
    assert "model.weight" in str(raised)
    assert same(state, small_state(99))


def test_a_payload_that_is_shorter_than_its_tensor_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    hf.save({"w": torch.arange(6.0)}, checkpoint_id=tmp_path)
    manifest = read_manifest(tmp_path)
    changed_column(manifest, "item_payload_nbytes", "q", 0, 0)
    changed_column(manifest, "item_blocks", "I", 0, 0)
    manifest.checksums = b""
    write_manifest(tmp_path, manifest)
    for target in (torch.full((6,), 7.0), torch.full((6, 2), 7.0)[:, 0], torch.full((6,), 7.0).bfloat16()):
        state = {"w": target}
        raised = failure_of(load, tmp_path, state, cast=True)
        assert isinstance(raised, IntegrityError)
        assert bool((state["w"] == 7).all())


def test_a_torch_checkpoint_with_a_chunk_missing_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    writer = torch_filesystem.FileSystemWriter(tmp_path)
    stock_save({"w": torch.arange(12.0).reshape(4, 3), "v": torch.ones(2)}, storage_writer=writer)
    path = tmp_path / METADATA
    metadata = pickle.loads(path.read_bytes())
    chunk = metadata.state_dict_metadata["w"].chunks[0]
    chunk.sizes = torch.Size([3, 3])
    path.write_bytes(pickle.dumps(metadata))
    state = {"w": torch.full((4, 3), 7.0), "v": torch.zeros(2)}
    with pytest.raises(InvalidPlanError, match="w"):
        load(tmp_path, state)
    assert same(state, {"w": torch.full((4, 3), 7.0), "v": torch.zeros(2)})
    metadata.state_dict_metadata["w"].chunks = []
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(InvalidPlanError, match="w"):
        load(tmp_path, state)
    assert same(state, {"w": torch.full((4, 3), 7.0), "v": torch.zeros(2)})


def test_a_torch_checkpoint_whose_payload_is_damaged_is_refused(tmp_path: Path) -> None:
    stock_save({"w": torch.arange(4096.0)}, storage_writer=torch_filesystem.FileSystemWriter(tmp_path))
    (name,) = data_files(tmp_path)
    data = (tmp_path / name).read_bytes()
    payload = torch.arange(4096.0).numpy().tobytes()
    first = data.index(payload)
    for at in range(0, len(payload), 997):
        damaged = bytearray(data)
        damaged[first + at] ^= 1
        (tmp_path / name).write_bytes(damaged)
        raised = failure_of(load, tmp_path, {"w": torch.zeros(4096)})
        assert isinstance(raised, IntegrityError)
        assert (raised.key, raised.path) == ("w", str(tmp_path / name))


def test_an_object_of_a_torch_checkpoint_that_is_no_pickle_any_more_is_damaged(tmp_path: Path) -> None:
    writer = torch_filesystem.FileSystemWriter(tmp_path)
    stock_save({"names": ["a", "b"]}, storage_writer=writer)
    (name,) = data_files(tmp_path)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(b"\x95" * len(data))
    raised = failure_of(load, tmp_path, {"names": []})
    assert isinstance(raised, IntegrityError)
    assert not isinstance(raised, UnsafeMetadataError)
    assert "names: the stored object cannot be read: it is no pickle" in str(raised)
    assert name in str(raised)


@pytest.mark.parametrize("offset", [8, 10])
def test_flags_and_methods_of_an_archive_that_python_does_not_know_are_damage(
    tmp_path: Path, offset: int
) -> None:
    stock_save({"names": ["a", "b"]}, storage_writer=torch_filesystem.FileSystemWriter(tmp_path))
    (name,) = data_files(tmp_path)
    data = bytearray((tmp_path / name).read_bytes())
    data[data.index(b"PK\1\2") + offset] ^= 1
    (tmp_path / name).write_bytes(data)
    (damage,) = hf.open(tmp_path).verify().damages
    assert damage.keys == ["names"]


def test_a_failed_load_says_what_it_changed(tmp_path: Path) -> None:
    """Damage in the middle: some values came before it, some would have come after."""
    hf.save(large_state(1), storage_writer=hf.FileSystemWriter(tmp_path, single_file_per_rank=False))
    manifest = read_manifest(tmp_path)
    for key, item in zip(manifest.keys, manifest.items(), strict=True):
        if not item.payload_nbytes:
            continue
        with (tmp_path / item.relative_path).open("r+b") as file:
            file.seek(item.offset + item.payload_offset)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        state = large_state(99)
        raised = failure_of(load, tmp_path, state)
        assert isinstance(raised, IntegrityError)
        changed = differing(state, large_state(99))
        assert all(name in str(raised) for name in changed), f"{key}: {changed} are not all in {raised}"
        assert ("nothing was changed" in str(raised)) <= (not changed)
        with (tmp_path / item.relative_path).open("r+b") as file:
            file.seek(item.offset + item.payload_offset)
            file.write(byte)
    assert same(load(tmp_path, large_state(99)), large_state(1))


def test_damage_is_found_before_anything_is_changed_where_sizes_show_it(tmp_path: Path) -> None:
    hf.save(large_state(1), storage_writer=hf.FileSystemWriter(tmp_path, single_file_per_rank=False))
    intact = contents(tmp_path)
    for name in data_files(tmp_path):
        os.truncate(tmp_path / name, os.path.getsize(tmp_path / name) - 1)
        state = large_state(99)
        raised = failure_of(load, tmp_path, state)
        assert isinstance(raised, TruncatedFileError)
        assert "nothing was changed" in str(raised)
        assert same(state, large_state(99))
        (tmp_path / name).write_bytes(intact[name])


def test_errors_of_a_load_are_one_class_and_the_classes_of_their_cause(tmp_path: Path) -> None:
    hf.save(small_state(1), checkpoint_id=tmp_path)
    (name,) = data_files(tmp_path)
    os.truncate(tmp_path / name, 100)
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path, small_state(99))
    assert isinstance(caught.value, TruncatedFileError)
    assert isinstance(caught.value, EOFError)
    assert caught.value.step == "read"


def test_two_chunks_that_claim_the_same_place_are_refused(tmp_path: Path) -> None:
    """An index by place would keep one of them and forget the other."""
    hf.save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path)
    m = read_manifest(tmp_path)
    for name in [f for f in m.__struct_fields__ if f.startswith(("item_", "chunk_", "checksums"))]:
        setattr(m, name, getattr(m, name) * 2)
    m.tensor_chunks = column([2], "I")
    assert list(ints(m.chunk_lengths, "q")) == [4, 4]
    write_manifest(tmp_path, m)
    state = {"w": torch.zeros(4)}
    raised = failure_of(load, tmp_path, state)
    assert raised is not None or same(state, {"w": torch.arange(4.0)})

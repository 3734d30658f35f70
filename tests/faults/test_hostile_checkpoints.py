"""Checkpoints made to harm: no code, no file outside, no memory beyond the declared (C1 to C4, F6, M2)."""

import fractions
import io
import os
import pickle
import uuid
import zipfile
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.support.checkpoints import (
    METADATA,
    changed_column,
    contents,
    data_files,
    failure_of,
    load,
    read_manifest,
    write_manifest,
)
from tests.support.process import PeakMemory
from tests.support.states import MIB, same, small_state
from tests.support.stock_torch import stock_save
from tests.support.sweeps import sweep
from torch.distributed.checkpoint import filesystem as torch_filesystem

import holdfast as hf
from holdfast._format.description import column, ints
from holdfast._format.manifest import Manifest
from holdfast.default_planner import EmptyStateDictLoadPlanner
from holdfast.errors import (
    CheckpointError,
    ExtensionError,
    IntegrityError,
    MetadataFormatError,
    PlanError,
    StorageError,
    UnsafeMetadataError,
)
from holdfast.extension import ZStandard
from holdfast.filesystem import FileSystemWriter

pytestmark = pytest.mark.one_core


class _Reduced:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def _evil_pickles(proof: Path) -> dict[str, bytes]:
    """Pickles that would make the file ``proof``, by every opcode that can call or import."""
    command = f"touch {proof}"
    text = b"X" + len(command).to_bytes(4, "little") + command.encode()
    inst = b"S'" + command.encode() + b"'\n"
    return {
        "REDUCE": pickle.dumps(_Reduced(os.system, command), 0),
        "REDUCE, protocol 4": pickle.dumps(_Reduced(os.system, command), 4),
        "INST": b"(" + inst + b"iposix\nsystem\n.",
        "OBJ": b"(cposix\nsystem\n" + inst + b"o.",
        "NEWOBJ": b"\x80\x02csubprocess\nPopen\n" + text + b"\x85\x81.",
        "eval": b"\x80\x02c__builtin__\neval\n" + _text(f"open({str(proof)!r},'w')") + b"\x85R.",
        "a dotted name": b"\x80\x04\x8c\x08builtins\x8c\x09exec.__call__\x93" + text + b"\x85R.",
        "getattr": b"\x80\x02c__builtin__\ngetattr\ncposix\nsystem\nX\x08\x00\x00\x00__call__\x86R"
        + text
        + b"\x85R.",
        "torch.load": b"\x80\x02ctorch.serialization\nload\n" + text + b"\x85R.",
        "a partial": b"\x80\x02cfunctools\npartial\ncposix\nsystem\n" + text + b"\x86R.",
        "the state of an allowed function": (
            b"\x80\x02c_codecs\nencode\n(cposix\nsystem\n)}Ntb" + text + b"\x85R."
        ),
    }


def _text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


KINDS = list(_evil_pickles(Path("x")))


@pytest.mark.parametrize("kind", KINDS)
def test_code_in_a_metadata_file_without_our_footer_is_refused(tmp_path: Path, kind: str) -> None:
    folder, proof = tmp_path / "checkpoint", tmp_path / "proof"
    hf.save(small_state(1), checkpoint_id=folder)
    (folder / METADATA).write_bytes(_evil_pickles(proof)[kind])
    with pytest.raises(IntegrityError, match=METADATA):
        load(folder, small_state(99))
    with pytest.raises(IntegrityError):
        load(folder, small_state(99), allow_pickle=True)
    assert not proof.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_code_in_torchs_part_of_our_metadata_is_never_looked_at(tmp_path: Path, kind: str) -> None:
    folder, proof = tmp_path / "checkpoint", tmp_path / "proof"
    hf.save(small_state(1), checkpoint_id=folder)
    write_manifest(folder, read_manifest(folder), _evil_pickles(proof)[kind])
    assert same(load(folder, small_state(99)), small_state(1))
    assert not proof.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_code_in_the_planners_data_is_refused(tmp_path: Path, kind: str) -> None:
    folder, proof = tmp_path / "checkpoint", tmp_path / "proof"
    hf.save(small_state(1), checkpoint_id=folder)
    manifest = read_manifest(folder)
    manifest.planner_pickle = _evil_pickles(proof)[kind]
    write_manifest(folder, manifest)
    state = small_state(99)
    with pytest.raises(IntegrityError, match=METADATA):
        load(folder, state)
    assert not proof.exists()
    assert same(state, small_state(99))


def _replace_object(folder: Path, key: str, payload: bytes) -> None:
    """Put another payload under an object's key, in a file of its own, with all checksums right."""
    (folder / "__0_77-0.distcp").write_bytes(payload)
    manifest = read_manifest(folder)
    row = manifest.keys.index(key)
    rows = list(ints(manifest.item_blocks, "I"))
    first = 4 * sum(rows[:row])
    blocks = [zlib.crc32(payload[at : at + MIB]) for at in range(0, len(payload), MIB)]
    manifest.checksums = (
        manifest.checksums[:first] + column(blocks, "I") + manifest.checksums[first + 4 * rows[row] :]
    )
    manifest.file_names.append("__0_77-0.distcp")
    manifest.file_nbytes += column([len(payload)], "q")
    for name, typecode, value in (
        ("item_files", "I", len(manifest.file_names) - 1),
        ("item_offsets", "q", 0),
        ("item_nbytes", "q", len(payload)),
        ("item_payload_offsets", "q", 0),
        ("item_payload_nbytes", "q", len(payload)),
        ("item_raw_nbytes", "q", len(payload)),
        ("item_blocks", "I", len(blocks)),
        ("item_wrap_checksums", "I", 0),
    ):
        changed_column(manifest, name, typecode, row, value)
    write_manifest(folder, manifest)


def _container(path: Path, pickled: bytes) -> bytes:
    """A pickle in the zip that torch.load reads."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (("data.pkl", pickled), ("version", b"3\n"), ("byteorder", b"little")):
            archive.writestr(f"archive/{name}", data)
    return path.read_bytes()


@pytest.mark.parametrize("wrapped", [True, False], ids=["in torch's container", "bare"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_would_run_code_is_refused_by_its_content_alone(
    tmp_path: Path, kind: str, wrapped: bool
) -> None:
    folder, proof = tmp_path / "checkpoint", tmp_path / "proof"
    hf.save(small_state(1), checkpoint_id=folder)
    evil = _evil_pickles(proof)[kind]
    _replace_object(folder, "step", _container(tmp_path / "zip", evil) if wrapped else evil)
    state = small_state(99)
    with pytest.raises(IntegrityError, match="step"):
        load(folder, state)
    assert not proof.exists()
    assert same(state["model"], small_state(99)["model"]), "a tensor was changed before objects were checked"


def test_an_object_runs_its_code_if_the_caller_says_so(tmp_path: Path) -> None:
    folder, proof = tmp_path / "checkpoint", tmp_path / "proof"
    hf.save(small_state(1), checkpoint_id=folder)
    _replace_object(folder, "step", _container(tmp_path / "zip", _evil_pickles(proof)["REDUCE"]))
    load(folder, small_state(99), allow_pickle=True)
    assert proof.exists()


def _load_object(tmp_path: Path, pickled: bytes) -> Any:
    folder = tmp_path / "checkpoint"
    hf.save({"step": 1}, checkpoint_id=folder)
    _replace_object(folder, "step", _container(tmp_path / "zip", pickled))
    return load(folder, {"step": 0})["step"]


def test_an_object_cannot_change_what_later_objects_mean(tmp_path: Path) -> None:
    failure_of(
        lambda: _load_object(tmp_path, b"\x80\x02cbuiltins\nint\n}X\x04\x00\x00\x00madecbuiltins\nset\nsb.")
    )
    try:
        loaded = _load_object(tmp_path, pickle.dumps(defaultdict(int, a=1)))
        assert loaded.default_factory is int
    finally:
        # The other tests share this process.
        from holdfast._objects import allowed  # noqa: PLC0415

        allowed._MADE_BY["builtins", "int"].made = int


@pytest.mark.parametrize("dtype", ["O", [("field", "O")]])
def test_an_array_of_objects_over_chosen_addresses_is_refused(tmp_path: Path, dtype: Any) -> None:
    """Whoever looks at its element makes Python follow a pointer that the checkpoint chose."""
    address = b"\x41" * 8
    evil = pickle.dumps(_Reduced(np.ndarray, (1,), _Reduced(np.dtype, dtype), address))
    with pytest.raises(IntegrityError):
        _load_object(tmp_path, evil)


def test_a_tiny_pickle_does_not_take_memory_by_its_memo(tmp_path: Path) -> None:
    with PeakMemory() as peak:
        failure_of(lambda: _load_object(tmp_path, b"\x80\x04Nr\xff\xff\xff\x01."))
    assert peak.nbytes < 100 * MIB


def test_a_short_text_does_not_become_a_number_of_a_million_digits(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError):
        _load_object(tmp_path, pickle.dumps(_Reduced(fractions.Fraction, "1e300000")))


@pytest.mark.parametrize("opcode", [b"\x80\x04\x8e", b"\x80\x05\x96", b"\x80\x04\x8d"])
def test_a_pickle_that_declares_more_bytes_than_it_has_takes_no_memory(tmp_path: Path, opcode: bytes) -> None:
    with pytest.raises((IntegrityError, MemoryError)):
        _load_object(tmp_path, opcode + (1 << 45).to_bytes(8, "little") + b".")


EVIL_PATHS = [
    "../outside",
    "/etc/passwd",
    "a/../../outside",
    "..",
    ".",
    "",
    "a\0b",
    "sub/file",
    "..\\outside",
]


@pytest.mark.parametrize("name", EVIL_PATHS)
def test_a_manifest_that_names_a_file_outside_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoint"
    hf.save(small_state(1), checkpoint_id=folder)
    (tmp_path / "outside").write_bytes((folder / data_files(folder)[0]).read_bytes())
    manifest = read_manifest(folder)
    manifest.file_names = [name]
    write_manifest(folder, manifest)
    with pytest.raises(IntegrityError, match=METADATA):
        load(folder, small_state(99))


@pytest.mark.parametrize("name", EVIL_PATHS)
def test_a_torch_pickle_that_names_a_file_outside_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoint"
    stock_save({"w": torch.ones(3)}, storage_writer=torch_filesystem.FileSystemWriter(folder))
    (tmp_path / "outside").write_bytes((folder / data_files(folder)[0]).read_bytes())
    metadata = pickle.loads((folder / METADATA).read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises((IntegrityError, StorageError)):
        load(folder, {"w": torch.zeros(3)})


def test_links_in_place_of_files_are_not_followed_by_a_load(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    hf.save(small_state(1), checkpoint_id=folder)
    for name in (data_files(folder)[0], METADATA):
        (folder / name).rename(tmp_path / "elsewhere")
        (folder / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StorageError, match=name):
            load(folder, small_state(99))
        (folder / name).unlink()
        (tmp_path / "elsewhere").rename(folder / name)
    assert same(load(folder, small_state(99)), small_state(1))


@pytest.mark.parametrize("target", ["victim", "nowhere"])
def test_links_planted_where_a_save_writes_are_neither_followed_nor_overwritten(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names are random; an attacker who could guess them gains nothing."""
    folder, victim = tmp_path / "checkpoint", tmp_path / "victim"
    victim.write_bytes(b"precious")
    hf.save(small_state(1), checkpoint_id=folder)
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=5))
    monkeypatch.setattr("os.urandom", lambda n: b"\x55" * n)
    for name in (f"__0_0-{uuid.UUID(int=5).hex[:12]}.distcp", f"{METADATA}.{'5' * 16}.tmp"):
        (folder / name).symlink_to(tmp_path / target)
        with pytest.raises((StorageError, FileExistsError), match="exists"):
            hf.save(small_state(2), checkpoint_id=folder)
        (folder / name).unlink(missing_ok=True)
        assert victim.read_bytes() == b"precious"
        assert not (tmp_path / "nowhere").exists()
        assert same(load(folder, small_state(99)), small_state(1))
        for left in set(data_files(folder)) - set(read_manifest(folder).file_names):
            (folder / left).unlink()


@pytest.mark.parametrize("target", ["victim", "nowhere"])
def test_a_link_in_place_of_the_metadata_is_replaced_and_not_followed_by_a_save(
    tmp_path: Path, target: str
) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / METADATA).symlink_to(tmp_path / target)
    hf.save(small_state(1), checkpoint_id=folder)
    assert not (folder / METADATA).is_symlink()
    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert not (tmp_path / "nowhere").exists()
    assert same(load(folder, small_state(99)), small_state(1))


def test_a_pipe_in_place_of_a_file_is_refused_without_waiting(tmp_path: Path) -> None:
    hf.save(small_state(1), checkpoint_id=tmp_path)
    (name,) = data_files(tmp_path)
    for victim in (name, METADATA):
        (tmp_path / victim).unlink()
        os.mkfifo(tmp_path / victim)
        with pytest.raises(StorageError, match="regular"):
            load(tmp_path, small_state(99))


def _zstd_bomb(nbytes: int) -> bytes:
    """A few KB that inflate to ``nbytes`` zeros."""
    sink = _Kept()
    stream = ZStandard().transform_to(sink)
    for _ in range(nbytes // MIB):
        stream.write(bytes(MIB))
    stream.close()
    return sink.getvalue()


class _Kept(io.BytesIO):
    """Can be read after whoever wrote it has closed it."""

    def close(self) -> None:
        pass


@pytest.mark.parametrize("key", ["step", "model.weight"])
def test_an_item_that_inflates_beyond_its_declared_size_is_refused_in_bounded_memory(
    tmp_path: Path, key: str
) -> None:
    hf.save(small_state(1), storage_writer=FileSystemWriter(tmp_path, _extensions=[ZStandard()]))
    raw_nbytes = list(read_manifest(tmp_path).items())[read_manifest(tmp_path).keys.index(key)].raw_nbytes
    bomb = _zstd_bomb(512 * MIB)
    assert len(bomb) < MIB
    _replace_object(tmp_path, key, bomb)
    manifest = read_manifest(tmp_path)
    changed_column(manifest, "item_raw_nbytes", "q", manifest.keys.index(key), raw_nbytes)
    write_manifest(tmp_path, manifest)
    with PeakMemory() as peak, pytest.raises(IntegrityError, match=key):
        load(tmp_path, small_state(99))
    assert peak.nbytes < 100 * MIB


def test_a_container_of_torch_with_a_compressed_record_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    """torch.save never compresses; a record that is compressed can only be there to surprise."""
    stock_save({"w": torch.ones(4)}, storage_writer=torch_filesystem.FileSystemWriter(tmp_path))
    stream, bomb = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(4), stream)
    count = (256 * MIB // 4).to_bytes(4, "little")
    with zipfile.ZipFile(stream) as plain, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            data = bytes(256 * MIB) if name.endswith("data/0") else plain.read(name)
            packed.writestr(name, data.replace(b"K\x04tq", b"J" + count + b"tq", 1))
    assert len(bomb.getvalue()) < MIB
    (tmp_path / "bomb.distcp").write_bytes(bomb.getvalue())
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path, info.offset, info.length = "bomb.distcp", 0, len(bomb.getvalue())
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with PeakMemory() as peak, pytest.raises(IntegrityError, match="w"):
        load(tmp_path, {"w": torch.zeros(4)})
    assert peak.nbytes < 100 * MIB


def _declare(manifest: Manifest, key: str, nbytes: int) -> None:
    """Let a manifest say that an item has so many bytes, checksums and all but the file's bytes."""
    manifest.file_nbytes = column([nbytes + MIB] * len(manifest.file_names), "q")
    row = manifest.keys.index(key)
    for name in ("item_nbytes", "item_payload_nbytes", "item_raw_nbytes"):
        changed_column(manifest, name, "q", row, nbytes)
    changed_column(manifest, "item_offsets", "q", row, 0)
    changed_column(manifest, "item_payload_offsets", "q", row, 0)
    manifest.block_size = nbytes


@pytest.mark.parametrize("key", ["blob", "step", "model.weight"])
@pytest.mark.parametrize("bits", [33, 45])
def test_a_manifest_that_declares_a_huge_item_takes_no_memory(tmp_path: Path, key: str, bits: int) -> None:
    hf.save(small_state(1), checkpoint_id=tmp_path)
    manifest = read_manifest(tmp_path)
    _declare(manifest, key, 1 << bits)
    write_manifest(tmp_path, manifest)
    state = small_state(99)
    with PeakMemory() as peak, pytest.raises(IntegrityError):
        load(tmp_path, state)
    assert peak.nbytes < 100 * MIB
    assert same(state, small_state(99))


@pytest.mark.parametrize("bits", [31, 45])
def test_a_huge_tensor_in_a_manifest_takes_no_memory_when_the_state_is_built_from_it(
    tmp_path: Path, bits: int
) -> None:
    hf.save({"w": torch.ones(4)}, checkpoint_id=tmp_path)
    manifest = read_manifest(tmp_path)
    manifest.tensor_shapes = manifest.chunk_lengths = column([1 << (bits - 2)], "q")
    write_manifest(tmp_path, manifest)
    state: dict[str, Any] = {}
    with pytest.raises(IntegrityError):
        load(tmp_path, state, planner=EmptyStateDictLoadPlanner())


STRANGE: list[Any] = [
    None,
    True,
    -1,
    0,
    1 << 62,
    -(1 << 63),
    1.5,
    "",
    "x",
    b"",
    b"\xff" * 7,
    [],
    [[]],
    {},
    ["x"],
]
STRANGE += [
    [None],
    [1],
    [-1],
    [b""],
    {"a": 1},
    [["x"]] * 8,
    [[1, 2]],
    "\ud7ff" * 50,
    [[[[[]]]]] * 8,
    [True] * 8,
]


def _encoded_fields(manifest: Manifest) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest))
    return fields


def _assert_harmless(folder: Path, what: str) -> None:
    """Whatever a manifest says, a load gives the right values or an error of ours."""
    state = small_state(99)
    error = failure_of(load, folder, state)
    if error is None:
        assert same(state, small_state(1)), f"{what}: wrong values were loaded"
    else:
        assert isinstance(error, IntegrityError | PlanError | StorageError | ExtensionError), (
            f"{what}: {error}"
        )


@pytest.mark.parametrize("field", Manifest.__struct_fields__)
def test_a_wrong_type_in_any_field_of_a_manifest_is_refused_or_harmless(tmp_path: Path, field: str) -> None:
    hf.save(small_state(1), checkpoint_id=tmp_path)
    intact = _encoded_fields(read_manifest(tmp_path))
    for strange in STRANGE:
        write_manifest(tmp_path, msgspec.msgpack.encode({**intact, field: strange}))
        _assert_harmless(tmp_path, f"{field} = {strange!r}")
    without = {name: value for name, value in intact.items() if name != field}
    write_manifest(tmp_path, msgspec.msgpack.encode(without))
    _assert_harmless(tmp_path, f"without {field}")


COLUMNS = sorted(name for name, kind in Manifest.__annotations__.items() if kind is bytes)


@sweep(stride=7)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:tensors are cast on load")
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("field", COLUMNS)
def test_a_wrong_number_in_any_column_of_a_manifest_is_refused_or_harmless(
    tmp_path: Path, field: str, compressed: bool, stride: int
) -> None:
    extensions = [ZStandard()] if compressed else None
    hf.save(small_state(1), storage_writer=FileSystemWriter(tmp_path, _extensions=extensions))
    intact = _encoded_fields(read_manifest(tmp_path))
    data = intact[field]
    for at in range(0, len(data), stride):
        for value in {0, 1, 0x7F, 0xFF, data[at] ^ 1, (data[at] + 1) % 256}:
            changed = bytearray(data)
            changed[at] = value
            write_manifest(tmp_path, msgspec.msgpack.encode({**intact, field: bytes(changed)}))
            _assert_harmless(tmp_path, f"byte {at} of {field} = {value}")


def test_a_thousand_stacked_transforms_are_refused(tmp_path: Path) -> None:
    hf.save(small_state(1), storage_writer=FileSystemWriter(tmp_path, _extensions=[ZStandard()]))
    manifest = read_manifest(tmp_path)
    manifest.transforms = [["stream.zstd/1"] * 1000]
    write_manifest(tmp_path, manifest)
    with pytest.raises(IntegrityError):
        load(tmp_path, small_state(99))


def test_a_thousand_stacked_transforms_of_torch_are_reported_by_verify(tmp_path: Path) -> None:
    stock_save({"w": torch.zeros(3)}, checkpoint_id=tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for item in metadata.storage_data.values():
        item.transform_descriptors = ["stream.zstd/1"] * 1000
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with hf.open(tmp_path) as view:
        found = view.verify()
    assert not found.ok
    assert "1000 transforms" in str(found)


def test_an_array_in_place_of_a_manifest_is_refused(tmp_path: Path) -> None:
    hf.save(small_state(1), checkpoint_id=tmp_path)
    for data in (b"", b"\xc1", b"\x90", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 100_000):
        write_manifest(tmp_path, data)
        with pytest.raises(MetadataFormatError, match=METADATA):
            load(tmp_path, small_state(99))


def test_a_newer_format_is_refused_with_advice(tmp_path: Path) -> None:
    hf.save(small_state(1), checkpoint_id=tmp_path)
    manifest = read_manifest(tmp_path)
    manifest.version = (2, 0)
    write_manifest(tmp_path, manifest)
    with pytest.raises(MetadataFormatError, match="Update holdfast"):
        load(tmp_path, small_state(99))


def test_an_object_where_the_state_has_a_tensor_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    hf.save({"a": 7, "b": torch.ones(2)}, checkpoint_id=tmp_path)
    state = {"a": torch.zeros(2), "b": torch.zeros(2)}
    with pytest.raises(PlanError, match=r"a: .*object"):
        load(tmp_path, state)
    assert same(state, {"a": torch.zeros(2), "b": torch.zeros(2)})


def test_a_tensor_where_the_state_has_an_object_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    hf.save({"a": torch.ones(2), "b": torch.ones(2)}, checkpoint_id=tmp_path)
    state = {"a": 7, "b": torch.zeros(2)}
    with pytest.raises(PlanError, match=r"a: .*tensor"):
        load(tmp_path, state)
    assert same(state, {"a": 7, "b": torch.zeros(2)})


def test_a_hostile_object_in_place_of_a_tensor_is_not_even_read(tmp_path: Path) -> None:
    """The manifest says object where the state has a tensor: none of it is decoded, whatever is allowed."""
    proof = tmp_path / "proof"
    hf.save({"w": 1}, checkpoint_id=tmp_path / "c")
    _replace_object(tmp_path / "c", "w", _container(tmp_path / "zip", _evil_pickles(proof)["REDUCE"]))
    with pytest.raises(PlanError):
        load(tmp_path / "c", {"w": torch.zeros(2)}, allow_pickle=True)
    assert not proof.exists()


def test_errors_about_hostile_checkpoints_are_of_our_tree(tmp_path: Path) -> None:
    hf.save(small_state(1), checkpoint_id=tmp_path)
    (tmp_path / METADATA).write_bytes(_evil_pickles(tmp_path / "proof")["REDUCE"])
    before = contents(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, small_state(99))
    assert isinstance(caught.value, UnsafeMetadataError)
    assert contents(tmp_path) == before

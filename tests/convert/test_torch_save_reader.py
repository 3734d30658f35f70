"""Files of ``torch.save`` are read as checkpoints: bit by bit, by ranges, and without running anything."""

import datetime as dt
import fractions
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.convert.saved_states import nested, read, same, tensors

import holdfast as dcp
from holdfast.errors import (
    CheckpointException,
    CheckpointNotFoundError,
    IntegrityError,
    MetadataFormatError,
    UnsafeMetadataError,
    UsageError,
)
from holdfast.format_utils import TorchSaveReader


def saved(folder: Path, state: Any) -> Path:
    torch.save(state, folder / "model.pt")
    return folder / "model.pt"


@pytest.mark.parametrize("state", [tensors(), nested()], ids=["tensors", "nested"])
def test_everything_comes_back(tmp_path: Path, state: dict[Any, Any]) -> None:
    found = read(saved(tmp_path, state))
    if "parameter" in found:  # the memory that is loaded into is a plain tensor's
        found["parameter"] = torch.nn.Parameter(found["parameter"])
    assert same(found, state)


def test_a_tensor_of_other_values_keeps_its_kind(tmp_path: Path) -> None:
    state = {"x": (torch.eye(3).to_sparse(), fractions.Fraction(1, 3), dt.date(2024, 1, 2))}
    found = read(saved(tmp_path, state))["x"]
    assert found[1:] == state["x"][1:]
    assert torch.equal(found[0].to_dense(), torch.eye(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_tensors_without_elements_inside_other_values(tmp_path: Path, dtype: torch.dtype) -> None:
    empty = torch.zeros(2, 0, dtype=dtype)
    state = {"pair": (empty, torch.ones(3)), "twice": (empty, empty), "of views": (torch.ones(4)[2:2], 1)}
    path = saved(tmp_path, state)
    assert same(read(path), state)
    dcp.convert(path, tmp_path / "folder", to="holdfast")
    assert same(dcp.open(tmp_path / "folder").read(), state)
    dcp.convert(tmp_path / "folder", tmp_path / "again.pt")
    assert same(dcp.open(tmp_path / "again.pt").read(), state)
    assert same(torch.load(tmp_path / "again.pt", weights_only=True), state)


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path, {"small": torch.arange(4.0), "large": torch.zeros(4 << 20)})
    asked: list[int] = []
    reader = TorchSaveReader(path)
    open_inner = reader.store._inner.open  # type: ignore[attr-defined]

    def watched(name: str) -> Any:
        file = open_inner(name)
        read_into = file.read_into

        def counted(at: int, view: Any) -> None:
            asked.append(len(view))
            read_into(at, view)

        file.read_into = counted
        return file

    reader.store._inner.open = watched  # type: ignore[attr-defined]
    state = {"small": torch.zeros(4), "large": torch.ones(4 << 20)[:0]}
    del state["large"]
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert state["small"].tolist() == [0, 1, 2, 3]
    assert sum(asked) < 20_000


def test_a_part_of_a_strided_tensor(tmp_path: Path) -> None:
    whole = torch.arange(600_000.0).view(600, 1000)
    path = saved(tmp_path, {"t": whole.t()})
    state = {"t": torch.zeros(1000, 600)}
    dcp.load(state, storage_reader=TorchSaveReader(path), no_dist=True)
    assert torch.equal(state["t"], whole.t())


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def test_nothing_that_the_file_names_is_run_and_the_rest_can_be_loaded(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = saved(
        tmp_path, {"bad": Hostile(marker), "deep": {"x": [1, (Hostile(marker),)]}, "w": torch.ones(3)}
    )
    state = {"w": torch.zeros(3)}
    dcp.load(state, storage_reader=TorchSaveReader(path), no_dist=True)
    assert torch.equal(state["w"], torch.ones(3))
    with pytest.raises(CheckpointException) as raised:
        read(path)
    refused = raised.value.failures[0][0]
    assert isinstance(refused, UnsafeMetadataError)
    assert "posix.mkdir" in str(refused)
    assert refused.key in {"bad", "deep.x"}
    assert not marker.exists()


def test_a_file_that_is_an_object_as_a_whole_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(UnsafeMetadataError, match="mkdir"):
        TorchSaveReader(saved(tmp_path, Hostile(marker))).read_metadata()
    with pytest.raises(UnsafeMetadataError, match="state_dict"):
        TorchSaveReader(saved(tmp_path, torch.nn.Linear(2, 2))).read_metadata()
    assert not marker.exists()


def test_a_class_that_the_caller_allows(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": Point(3)})
    allowed: list[dict[str, Any]] = [{"safe_globals": [Point]}, {"allow_pickle": True}]
    for options in allowed:
        state: dict[str, Any] = {"x": None}
        reader = TorchSaveReader(path, **options)
        dcp.load(state, storage_reader=reader, no_dist=True, **options)
        assert state["x"].x == 3


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


def test_other_files_are_refused_with_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"x": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(MetadataFormatError, match=r"torch before 1\.6"):
        TorchSaveReader(path).read_metadata()
    path.write_bytes(b"hello world, this is text")
    with pytest.raises(MetadataFormatError, match="something else"):
        TorchSaveReader(path).read_metadata()
    path.write_bytes(b"")
    with pytest.raises(MetadataFormatError, match="something else"):
        TorchSaveReader(path).read_metadata()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/b.txt", "x")
    with pytest.raises(MetadataFormatError, match="not one of torch"):
        TorchSaveReader(path).read_metadata()
    with pytest.raises(MetadataFormatError, match="holds a Tensor"):
        TorchSaveReader(saved(tmp_path, torch.ones(3))).read_metadata()
    with pytest.raises(CheckpointNotFoundError):
        TorchSaveReader(tmp_path / "absent.pt").read_metadata()
    with pytest.raises(UsageError, match="does not name a file"):
        TorchSaveReader("s3://bucket")


def test_damage_is_found(tmp_path: Path) -> None:
    state = {"small": torch.arange(1000.0), "large": torch.arange(1_000_000.0) + 0.5}
    path = saved(tmp_path, state)
    whole = path.read_bytes()
    for key in state:
        data = bytearray(whole)
        at = data.index(state[key].numpy()[100:200].tobytes())
        data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(CheckpointException, match="not the ones that were written"):
            read(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(IntegrityError):
        read(path)


def test_a_tensor_that_is_expanded_without_end_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.ones(1).expand(1 << 40)})
    with pytest.raises(IntegrityError, match="expanded"):
        TorchSaveReader(path).read_metadata()


def test_a_storage_that_is_shorter_than_declared(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.ones(100)})
    stream = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"1234" if name.endswith("/data/0") else old.read(name))
    path.write_bytes(stream.getvalue())
    with pytest.raises(IntegrityError, match="its storage needs 400"):
        TorchSaveReader(path).read_metadata()

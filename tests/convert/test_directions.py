"""Every format becomes every other one: bit by bit, with its structure, or refused by key."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.convert.saved_states import nested, same, tensors
from tests.support.process import PeakMemory
from tests.support.stock_torch import IS_NEWEST, stock_load, stock_save

import holdfast as dcp
from holdfast.default_planner import _EmptyStateDictLoadPlanner
from holdfast.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    IntegrityError,
    MissingKeyError,
    PlanError,
    UnsafeMetadataError,
    UsageError,
)

FORMATS = ["holdfast", "torch", "torch_save", "safetensors"]
DIRECTIONS = [pair for pair in itertools.product(FORMATS, FORMATS) if pair[0] != pair[1]]


def place(folder: Path, name: str, kind: str) -> Path:
    return folder / (f"{name}.pt" if kind == "torch_save" else name)


def put(kind: str, state: dict[Any, Any], folder: Path) -> Path:
    path = place(folder, f"from-{kind}", kind)
    if kind == "holdfast":
        dcp.save(state, checkpoint_id=path, no_dist=True)
    elif kind == "torch":
        stock_save(state, checkpoint_id=path)
    elif kind == "torch_save":
        torch.save(state, path)
    else:
        path.mkdir()
        save_file(state, path / "model.safetensors")
    return path


def get(kind: str, path: Path) -> dict[Any, Any]:
    """What other programs find, where they can find all of it."""
    if kind == "torch_save":
        loaded: dict[Any, Any] = torch.load(path, weights_only=True)
        return loaded
    if kind == "safetensors":
        return load_file(path / "model.safetensors")
    state: dict[Any, Any] = {}
    dcp.load(state, checkpoint_id=path, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def flat_state() -> dict[str, torch.Tensor]:
    plain = {key: value.resolve_conj().resolve_neg() for key, value in tensors().items()}
    return {
        key: value.clone(memory_format=torch.contiguous_format)
        for key, value in plain.items()
        if value.dtype != torch.complex128
    }


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_tensors_are_the_same_bit_by_bit(tmp_path: Path, source: str, target: str) -> None:
    state = flat_state()
    output = place(tmp_path, "to", target)
    result = dcp.convert(put(source, state, tmp_path), output, to=target)  # type: ignore[arg-type]
    assert (result.source_format, result.target_format) == (source, target)
    assert result.tensors == len(state)
    found = get(target, output)
    assert same({key: found[key] for key in state}, state)
    if target in {"holdfast", "torch"}:
        stock = {key: torch.empty_like(value) for key, value in state.items()}
        stock_load(stock, checkpoint_id=output)
        assert same(stock, state)


@pytest.mark.parametrize(("source", "target"), [("holdfast", "torch_save"), ("torch_save", "holdfast")])
def test_structure_is_kept(tmp_path: Path, source: str, target: str) -> None:
    state = nested()
    output = place(tmp_path, "to", target)
    dcp.convert(put(source, state, tmp_path), output, to=target)  # type: ignore[arg-type]
    found = get(target, output)
    found["parameter"] = torch.nn.Parameter(found["parameter"])
    assert same(found, state)


def test_there_and_back_is_the_same(tmp_path: Path) -> None:
    state = nested()
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    dcp.convert(tmp_path / "a", tmp_path / "b.pt")
    dcp.convert(tmp_path / "b.pt", tmp_path / "c", to="torch")
    found, first = get("holdfast", tmp_path / "c"), get("holdfast", tmp_path / "a")
    assert same(found, first)


def test_chunks_of_many_ranks_are_joined(tmp_path: Path) -> None:
    whole = torch.arange(6_000_000.0).view(2000, 3000)
    for name, start in (("a", 0), ("b", 1000)):
        part = json.dumps({"x": {"saved_offsets": [0, start]}})
        length = 1000 if name == "a" else 2000
        content = {"x": whole.narrow(1, start, length).contiguous()}
        save_file(content, tmp_path / f"{name}.safetensors", metadata={"DCP_SHARDING_INFO": part})
    dcp.convert(tmp_path, tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt")["x"], whole)
    dcp.convert(tmp_path / "x.pt", tmp_path / "model", to="safetensors", dtype="bfloat16")
    assert torch.equal(load_file(tmp_path / "model" / "model.safetensors")["x"], whole.bfloat16())


def test_tensors_that_are_one_stay_one(tmp_path: Path) -> None:
    weight = torch.arange(12.0).view(3, 4)
    torch.save(
        {"a": weight, "tied": weight, "flat": weight.view(-1), "other": weight.clone()}, tmp_path / "x.pt"
    )
    dcp.convert(tmp_path / "x.pt", tmp_path / "y.pt")
    found = torch.load(tmp_path / "y.pt")
    pointers = {key: value.data_ptr() for key, value in found.items()}
    assert pointers["a"] == pointers["tied"] == pointers["flat"] != pointers["other"]
    assert torch.equal(found["flat"], weight.view(-1))


def test_keys_rename_and_dtype(tmp_path: Path) -> None:
    dcp.save(nested(), checkpoint_id=tmp_path / "a", no_dist=True)
    options: dict[str, Any] = {"keys": "model", "rename": {"model": "", "model.inner": "deep"}}
    result = dcp.convert(tmp_path / "a", tmp_path / "b", to="safetensors", dtype=torch.bfloat16, **options)
    assert (result.tensors, result.objects) == (3, 0)
    found = load_file(tmp_path / "b" / "model.safetensors")
    assert set(found) == {"weight", "tied", "deep.bias"}
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    dcp.convert(tmp_path / "a", tmp_path / "c.pt", keys=["model.*", "step"], rename={"model": "net"})
    state = torch.load(tmp_path / "c.pt")
    assert list(state) == ["net", "step"]
    assert type(state["net"]).__name__ == "OrderedDict"
    assert torch.equal(state["net"]["inner"]["bias"], torch.ones(2))
    dcp.convert(tmp_path / "a", tmp_path / "d.pt", keys="model", rename=lambda key: f"x.{key}")
    assert list(torch.load(tmp_path / "d.pt")) == ["x"]


@pytest.mark.skipif(not IS_NEWEST, reason="older torch cannot copy 4-bit numbers")
@pytest.mark.parametrize("target", ["holdfast", "torch_save", "safetensors"])
def test_packed_pairs_of_numbers_are_not_cast(tmp_path: Path, target: str) -> None:
    packed = torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    dcp.save({"x": packed, "y": torch.ones(3)}, checkpoint_id=tmp_path / "a", no_dist=True)
    output = place(tmp_path, "to", target)
    dcp.convert(tmp_path / "a", output, to=target, dtype="bfloat16")  # type: ignore[arg-type]
    found = get(target, output)
    assert found["y"].dtype == torch.bfloat16
    assert torch.equal(found["x"].view(torch.uint8), packed.view(torch.uint8))


def test_one_safetensors_file_by_its_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "two.safetensors")
    dcp.convert(tmp_path / "two.safetensors", tmp_path / "x.pt")
    assert list(torch.load(tmp_path / "x.pt")) == ["b"]


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    dcp.save(nested(), checkpoint_id=tmp_path / "a", no_dist=True)
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"target": "b"}, UsageError, "which format. Pass to="),
        ({"target": "b", "to": "zip"}, UsageError, "to is one of"),
        ({"target": "b", "to": "safetensors"}, PlanError, "param_groups.*keys="),
        ({"target": "b.safetensors"}, UsageError, "a model is a folder: .* and pass to='safetensors'"),
        ({"target": "b.safetensors", "to": "safetensors"}, UsageError, "a model is a folder"),
        ({"target": "b.pt", "keys": "absent.*"}, MissingKeyError, "no key matches"),
        ({"target": "b.pt", "dtype": "int8"}, UsageError, "floating-point"),
        ({"target": "b.pt", "max_shard_size": 5}, UsageError, "max_shard_size"),
        ({"target": "b.pt", "rename": {"step": "name"}}, UsageError, "both be called 'name'"),
        ({"target": "b.pt", "rename": {"nosuch": "x"}}, MissingKeyError, "no key is 'nosuch' or below it"),
        ({"target": "b.pt", "rename": {"step": 7}}, UsageError, "step: rename gives 7"),
        ({"target": "b.pt", "rename": "net"}, UsageError, "rename is a function of a key, or a dict"),
        ({"target": "a", "to": "torch"}, UsageError, "same place"),
        ({"source": "absent", "target": "b.pt"}, CheckpointNotFoundError, "no such file or folder"),
    ]
    for options, error, message in refused:
        source = tmp_path / options.pop("source", "a")
        with pytest.raises(error, match=message):
            dcp.convert(source, tmp_path / options.pop("target"), **options)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError):
        dcp.convert(tmp_path / "empty", tmp_path / "b.pt")
    dcp.save({"x": torch.ones(1)}, checkpoint_id=tmp_path / "parts", no_dist=True, use_collectives=False)
    with pytest.raises(UsageError, match="each for itself"):
        dcp.convert(tmp_path / "parts", tmp_path / "b.pt")
    assert sorted(os.listdir(tmp_path)) == ["a", "empty", "parts"]


@pytest.mark.parametrize("target", ["holdfast", "torch_save", "safetensors"])
def test_what_is_there_is_replaced_only_if_asked_for(tmp_path: Path, target: str) -> None:
    for number in (1.0, 2.0):
        torch.save({"x": torch.full((3,), number)}, tmp_path / f"{number}.pt")
    output = place(tmp_path, "to", target)
    options: dict[str, Any] = {"to": target}
    dcp.convert(tmp_path / "1.0.pt", output, **options)
    with pytest.raises(CheckpointExistsError):
        dcp.convert(tmp_path / "2.0.pt", output, **options)
    assert get(target, output)["x"].tolist() == [1, 1, 1]
    dcp.convert(tmp_path / "2.0.pt", output, overwrite=True, **options)
    assert get(target, output)["x"].tolist() == [2, 2, 2]


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def test_a_hostile_file_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    torch.save({"w": torch.ones(3), "bad": Hostile(marker)}, tmp_path / "x.pt")
    for target, options in (("a", {"to": "holdfast"}), ("b.pt", {}), ("c", {"to": "torch"})):
        with pytest.raises(UnsafeMetadataError, match=r"bad.*mkdir"):
            dcp.convert(tmp_path / "x.pt", tmp_path / target, **options)  # type: ignore[arg-type]
    dcp.convert(tmp_path / "x.pt", tmp_path / "d", to="safetensors", keys="w")
    assert not marker.exists()
    assert sorted(os.listdir(tmp_path)) == ["d", "x.pt"]


def test_a_value_of_a_checkpoint_that_needs_code_goes_on_as_it_is(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(1), "color": Color(3)}, checkpoint_id=tmp_path / "a", no_dist=True)
    dcp.convert(tmp_path / "a", tmp_path / "b", to="holdfast")
    with pytest.raises(UnsafeMetadataError, match=r"color.*Color"):
        dcp.convert(tmp_path / "a", tmp_path / "c.pt")
    dcp.convert(tmp_path / "a", tmp_path / "c.pt", safe_globals=[Color])
    assert torch.load(tmp_path / "c.pt", weights_only=False)["color"].number == 3


class Color:
    def __init__(self, number: int) -> None:
        self.number = number


def test_damage_of_the_source_is_found(tmp_path: Path) -> None:
    torch.save({"x": torch.arange(6_000_000.0)}, tmp_path / "x.pt")
    data = bytearray((tmp_path / "x.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(IntegrityError, match="not the ones that were written"):
        dcp.convert(tmp_path / "x.pt", tmp_path / "y.pt")
    assert os.listdir(tmp_path) == ["x.pt"]


def test_a_target_that_is_not_what_was_sent_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"x": torch.arange(100.0)}, tmp_path / "x.pt")
    torch.save({"x": torch.zeros(1)}, tmp_path / "y.pt")
    # The file is sound in itself: its checksums are those of the wrong bytes.
    wrong = "holdfast._conversion.torch_save_target.memory_of"
    monkeypatch.setattr(wrong, lambda tensor: memoryview(bytes(tensor.nbytes)))
    with pytest.raises(IntegrityError, match="x: has other bytes than were sent"):
        dcp.convert(tmp_path / "x.pt", tmp_path / "y.pt", overwrite=True)
    assert torch.load(tmp_path / "y.pt")["x"].tolist() == [0]
    assert sorted(os.listdir(tmp_path)) == ["x.pt", "y.pt"]


def test_progress_is_told_until_the_end(tmp_path: Path) -> None:
    dcp.save({"x": torch.zeros(9 << 20)}, checkpoint_id=tmp_path / "a", no_dist=True)
    told: list[Any] = []
    dcp.convert(tmp_path / "a", tmp_path / "x.pt", progress=told.append)
    assert told[-1].nbytes_done == told[-1].nbytes_total == 36 << 20


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path) -> None:
    nbytes = 320 << 20
    torch.save({"x": torch.zeros(nbytes // 8, 2), "y": [1]}, tmp_path / "a.pt")
    steps: list[tuple[str, str, dict[str, Any]]] = [
        ("a.pt", "b", {"to": "holdfast"}),
        ("b", "c.pt", {}),
        ("c.pt", "d", {"to": "safetensors", "keys": "x"}),
        ("d", "e", {"to": "torch"}),
    ]
    dcp.convert(tmp_path / "a.pt", tmp_path / "warm.pt", keys="y")
    for source, target, options in steps:
        with PeakMemory() as peak:
            dcp.convert(tmp_path / source, tmp_path / target, **options)
        assert peak.nbytes < 224 << 20, (source, target, peak.nbytes >> 20)
    assert torch.equal(get("holdfast", tmp_path / "e")["x"], torch.zeros(nbytes // 8, 2))


def test_a_compressed_checkpoint(tmp_path: Path) -> None:
    from holdfast.extension import ZStandard  # noqa: PLC0415

    state = {"x": torch.arange(9_000_000.0), "step": {"n": 3}}
    writer = dcp.FileSystemWriter(tmp_path / "a", _extensions=[ZStandard()])
    dcp.save(state, storage_writer=writer, no_dist=True)
    dcp.convert(tmp_path / "a", tmp_path / "x.pt")
    assert same(torch.load(tmp_path / "x.pt"), state)
    dcp.convert(tmp_path / "a", tmp_path / "b", to="holdfast")
    assert same(get("holdfast", tmp_path / "b"), state)


def test_a_dict_that_older_versions_of_torch_keep_as_one_value(tmp_path: Path) -> None:
    golden = Path(__file__).parents[1] / "golden" / "torch-2.3"
    sources = [path.parent for path in golden.rglob(".metadata")]
    assert sources
    for number, source in enumerate(sources):
        dcp.convert(source, tmp_path / f"{number}.pt", safe_globals=[])
        found = torch.load(tmp_path / f"{number}.pt", weights_only=False)
        assert found


def test_a_folder_is_not_replaced_by_a_file_of_torch_save(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c", no_dist=True)
    (tmp_path / "folder.pt").mkdir()
    for overwrite in (False, True):
        with pytest.raises(CheckpointExistsError, match="is a folder"):
            dcp.convert(tmp_path / "c", tmp_path / "folder.pt", overwrite=overwrite)
    assert sorted(os.listdir(tmp_path)) == ["c", "folder.pt"]

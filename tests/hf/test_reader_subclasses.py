"""Subclasses of the readers that change how a request is read, or where tensors lie, as with torch's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.hf.model_files import export, room_for, same
from typing_extensions import override

import holdfast as dcp
from holdfast._hf_utils import _HFStorageInfo
from holdfast.errors import IncompleteCheckpointError
from holdfast.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast.planner import LoadPlanner, ReadItem
from holdfast.quantized_hf_storage import QuantizedHuggingFaceStorageReader

STATE = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(5), "scalar": torch.tensor(2.5)}


class Negating(dcp.HuggingFaceStorageReader):
    """Changes the values on their way in."""

    @override
    def _process_read_request(self, f: Any, req: ReadItem, planner: LoadPlanner) -> None:
        target = planner.resolve_tensor(req).detach()
        target.copy_(-f.get_tensor(req.storage_index.fqn))
        planner.commit_tensor(req, target)


class PassingOn(dcp.HuggingFaceStorageReader):
    """Looks at requests, and leaves the reading to its base class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[str] = []

    @override
    def _process_read_request(self, f: Any, req: ReadItem, planner: LoadPlanner) -> None:
        self.seen.append(req.storage_index.fqn)
        super()._process_read_request(f, req, planner)


class WithOtherNames(dcp.HuggingFaceStorageReader):
    """Finds the files itself, and says so with torch's records."""

    @override
    def read_metadata(self) -> Metadata:
        entries: dict[str, Any] = {}
        places: dict[MetadataIndex, _HFStorageInfo] = {}
        for file in map(str, Path(self.path).iterdir()):
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - it is no mapping
                    tensor = opened.get_tensor(key)
                    zeros = torch.Size([0] * tensor.dim())
                    chunk = ChunkStorageMetadata(zeros, tensor.shape)
                    properties = TensorProperties(dtype=tensor.dtype)
                    entries[key] = TensorStorageMetadata(properties, tensor.shape, [chunk])
                    places[MetadataIndex(key, zeros)] = _HFStorageInfo(file, tensor.shape, tensor.dtype)
        return Metadata(entries, storage_data=places)


class Looking(dcp.HuggingFaceStorageReader):
    """Looks at the metadata, and changes nothing."""

    @override
    def read_metadata(self) -> Metadata:
        metadata = super().read_metadata()
        assert metadata.state_dict_metadata
        return metadata


def load_with(
    reader: dcp.HuggingFaceStorageReader, state: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    room = room_for(state)
    dcp.load(room, storage_reader=reader)
    return room


def test_a_replaced_request_decides_the_values(tmp_path: Path) -> None:
    export(STATE, tmp_path)
    assert same(load_with(Negating(tmp_path), STATE), {key: -value for key, value in STATE.items()})


@pytest.mark.parametrize("thread_count", [1, 2])
def test_a_request_that_is_passed_on_is_read_as_always(tmp_path: Path, thread_count: int) -> None:
    export(STATE, tmp_path, fqn_to_index_mapping={"a": 1, "b": 2, "scalar": 2})
    reader = PassingOn(tmp_path, thread_count)
    assert same(load_with(reader, STATE), STATE)
    assert sorted(reader.seen) == ["a", "b", "scalar"]


def test_places_in_the_records_of_torch(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "weights.safetensors")
    assert same(load_with(WithOtherNames(tmp_path), STATE), STATE)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "weights.safetensors")

    class Gone(WithOtherNames):
        def read_metadata(self) -> Metadata:
            metadata = super().read_metadata()
            (tmp_path / "weights.safetensors").unlink()
            return metadata

    with pytest.raises(IncompleteCheckpointError, match=r"weights\.safetensors"):
        load_with(Gone(tmp_path), STATE)


def test_a_subclass_that_changes_no_record_still_checks_bytes(tmp_path: Path) -> None:
    export(STATE, tmp_path)
    assert same(load_with(Looking(tmp_path), STATE), STATE)
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(dcp.CheckpointException):
        load_with(Looking(tmp_path), STATE)


def test_quantised_tensors_of_a_passed_on_request(tmp_path: Path) -> None:
    class Quantised(QuantizedHuggingFaceStorageReader):
        def _process_read_request(self, f: Any, req: ReadItem, planner: LoadPlanner) -> None:
            super()._process_read_request(f, req, planner)

    weight = torch.arange(16.0).view(4, 4)
    save_file(
        {"w.weight": weight, "w.weight_scale_inv": torch.tensor([[2.0]]), "bias": torch.arange(3.0)},
        tmp_path / "model.safetensors",
    )
    state = {"w.weight": 2 * weight, "bias": torch.arange(3.0)}
    assert same(load_with(Quantised(tmp_path), state), state)


def test_records_are_those_of_torchs_reader(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "weights.safetensors")
    found = dcp.HuggingFaceStorageReader(tmp_path).read_metadata().storage_data
    name = str(tmp_path / "weights.safetensors")
    assert found == {
        MetadataIndex(key, [0] * value.dim()): _HFStorageInfo(name, value.shape, value.dtype)
        for key, value in STATE.items()
    }


class UnderAnotherName(dcp.HuggingFaceStorageReader):
    """Changes the records of the base class, which know where the bytes are."""

    @override
    def read_metadata(self) -> Metadata:
        found = super().read_metadata()
        entries = {f"new.{key}": entry for key, entry in found.state_dict_metadata.items()}
        places = {
            replace(index, fqn=f"new.{index.fqn}"): replace(info, dtype=info.dtype)
            for index, info in found.storage_data.items()
        }
        return replace(found, state_dict_metadata=entries, storage_data=places)


def test_changed_records_still_check_bytes(tmp_path: Path) -> None:
    export(STATE, tmp_path)
    renamed = {f"new.{key}": value for key, value in STATE.items()}
    assert same(load_with(UnderAnotherName(tmp_path), renamed), renamed)
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(dcp.CheckpointException):
        load_with(UnderAnotherName(tmp_path), renamed)


def test_records_can_be_given_to_a_reader_by_hand(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "weights.safetensors")
    described = WithOtherNames(tmp_path).read_metadata()
    reader = dcp.HuggingFaceStorageReader(tmp_path)
    reader.storage_data = described.storage_data
    room = room_for(STATE)
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(room, described)
    reader.read_data(planner.create_local_plan(), planner).wait()
    assert same(room, STATE)


class WithScalesOfItsOwn(QuantizedHuggingFaceStorageReader):
    """Knows a third kind of quantised tensors: one factor for the whole tensor."""

    @override
    def _build_weight_scale_mapping(self, weight_map: dict[str, str]) -> None:
        super()._build_weight_scale_mapping(weight_map)
        for key in weight_map:
            if key.endswith(".factor"):
                self._weight_scale_mapping[key.removesuffix(".factor")] = key

    @override
    def _read_quantized_tensor_with_block_alignment(
        self, req: ReadItem, safetensor_file: Any
    ) -> torch.Tensor:
        key = req.storage_index.fqn
        scale = self._weight_scale_mapping[key]
        if not scale.endswith(".factor"):
            return super()._read_quantized_tensor_with_block_alignment(req, safetensor_file)
        with safe_open(Path(self.path) / self._weight_map[scale], "pt") as other:
            factor = other.get_tensor(scale)
        begins = zip(req.storage_offsets, req.lengths, strict=True)
        box = tuple(slice(at, at + length) for at, length in begins)
        numbers: torch.Tensor = safetensor_file.get_slice(key)[box].float() * factor
        return numbers


@pytest.mark.parametrize("in_one_file", [True, False])
def test_a_subclass_adds_a_kind_of_quantised_tensors(tmp_path: Path, in_one_file: bool) -> None:
    stored = {"w.weight": torch.arange(64.0).view(8, 8), "odd": torch.arange(6.0).view(2, 3)}
    scales = {
        "w.weight_scale_inv": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "odd.factor": torch.tensor(10.0),
    }
    blocks = {"e_blocks": torch.tensor([[[0x21, 0x43]]], dtype=torch.uint8)}
    exponents = {"e_scales": torch.tensor([[128]], dtype=torch.uint8)}
    first, second = {**stored, **blocks}, {**scales, **exponents}
    if in_one_file:
        save_file({**first, **second}, tmp_path / "model.safetensors")
    else:
        save_file(first, tmp_path / "model-00001-of-00002.safetensors")
        save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    factors = scales["w.weight_scale_inv"].repeat_interleave(4, 0).repeat_interleave(4, 1)
    state = {
        "w.weight": stored["w.weight"] * factors,
        "odd": stored["odd"] * 10,
        "e_blocks": torch.tensor([[1.0, 2.0, 3.0, 4.0]]),
    }
    assert same(load_with(WithScalesOfItsOwn(tmp_path, block_size=4), state), state)

"""Programs that call the writer's ``write_data`` and ``finish`` themselves, without a plan of all ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.stock_torch import stock_hf_storage, stock_load

import holdfast as dcp
from holdfast.errors import CheckpointError, IncompleteWriteError, UsageError
from holdfast.hf_storage import HuggingFaceStorageWriter
from holdfast.metadata import ChunkStorageMetadata, Metadata, TensorProperties
from holdfast.planner import TensorWriteData, WriteItem, WriteItemType

INDEX = "model.safetensors.index.json"


def plan_of(state: dict[str, Any], told: Any = None) -> tuple[dcp.SavePlan, dcp.DefaultSavePlanner]:
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(state)
    items = planner.create_local_plan().items
    return dcp.SavePlan(items, storage_data=told), planner


class PartPlanner(dcp.DefaultSavePlanner):
    """Has some rows of a tensor of 5 rows."""

    def __init__(self, rows: torch.Tensor, first: int) -> None:
        super().__init__()
        self.rows = rows
        chunk = ChunkStorageMetadata(torch.Size([first, 0]), rows.shape)
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(rows), torch.Size([5, 3]))
        index = dcp.metadata.MetadataIndex("t", chunk.offsets)
        self.item = WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        assert write_item.index == self.item.index
        return self.rows


def write_part(folder: Path, rows: torch.Tensor, first: int, told: Any) -> Any:
    planner = PartPlanner(rows, first)
    writer = HuggingFaceStorageWriter(folder, save_distributed=True)
    return writer.write_data(dcp.SavePlan([planner.item], storage_data=told), planner).wait()


def test_files_have_their_names_after_write_data_and_an_index_after_finish(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    state = {"a": torch.arange(4.0), "b": torch.tensor(True), "c": torch.ones(3, 2).t()}
    mapping = {"a": 1, "b": 2, "c": 2, "of another rank": 3}
    writer = HuggingFaceStorageWriter(folder)
    results = writer.write_data(*plan_of(state, {"fqn_to_index_mapping": mapping})).wait()
    names = {result.index.fqn: result.storage_data.relative_path for result in results}
    first, second = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
    assert names == {"a": first, "b": second, "c": second}
    assert sorted(path.name for path in folder.iterdir()) == [first, second]
    writer.finish(Metadata({}), [results])
    index = json.loads((folder / INDEX).read_text())
    assert index == {"metadata": {"total_size": 16 + 1 + 24}, "weight_map": names}
    found = load_file(folder / first) | load_file(folder / second)
    assert found.keys() == state.keys()
    into = {key: torch.zeros_like(value) for key, value in state.items()}
    dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(folder))
    for key, value in state.items():
        assert torch.equal(found[key], value)
        assert torch.equal(into[key], value)


def test_a_plan_that_says_nothing_goes_into_one_file_as_the_writer_is_told(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(tmp_path, dtype=torch.bfloat16, rename={"a": "x"})
    (result,) = writer.write_data(*plan_of({"a": torch.arange(5.0)})).wait()
    found = load_file(tmp_path / result.storage_data.relative_path)
    assert torch.equal(found["x"], torch.arange(5.0).bfloat16())


def test_the_index_replaces_the_model_that_was_there(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, storage_writer=HuggingFaceStorageWriter(tmp_path, max_shard_size="1MB"))
    assert (tmp_path / "model.safetensors").exists()
    writer = HuggingFaceStorageWriter(tmp_path)
    results = writer.write_data(*plan_of({"a": torch.zeros(2)})).wait()
    writer.finish(Metadata({}), [results])
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {"model-00001-of-00001.safetensors"}
    into = {"a": torch.ones(2)}
    dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(tmp_path))
    assert torch.equal(into["a"], torch.zeros(2))


def test_parts_of_ranks_are_read_together_here_and_by_torch(tmp_path: Path) -> None:
    whole = torch.arange(15.0).view(5, 3)
    results = [
        write_part(tmp_path, whole[:2], 0, {"shard_index": 1}),
        write_part(tmp_path, whole[2:], 2, {"shard_index": 2}),
    ]
    HuggingFaceStorageWriter(tmp_path, save_distributed=True).finish(Metadata({}), results)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001.safetensors",
    ]
    for load, reader in (
        (dcp.load, dcp.HuggingFaceStorageReader(tmp_path)),
        (stock_load, stock_hf_storage().HuggingFaceStorageReader(str(tmp_path))),
    ):
        into = {"t": torch.zeros(5, 3)}
        load(into, storage_reader=reader)
        assert torch.equal(into["t"], whole)


def test_what_would_be_lost_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"t: the plan has a part of shape \[2, 3\].*\[5, 3\].*shard_index"):
        write_part(tmp_path, torch.ones(2, 3), 0, None)
    with pytest.raises(CheckpointError, match="step: not a tensor"):
        HuggingFaceStorageWriter(tmp_path).write_data(*plan_of({"step": 3}))
    told = {"fqn_to_index_mapping": {"b": 1}}
    with pytest.raises(UsageError, match="a: fqn_to_index_mapping has no file for it"):
        HuggingFaceStorageWriter(tmp_path).write_data(*plan_of({"a": torch.ones(1)}, told))
    writer = HuggingFaceStorageWriter(tmp_path, rename=lambda _: "x")
    with pytest.raises(UsageError, match=r"two values that are called 'x'"):
        writer.write_data(*plan_of({"a": torch.ones(1), "b": torch.ones(1)}))
    assert not list(tmp_path.iterdir())


def test_two_ranks_that_write_the_same_file_are_found(tmp_path: Path) -> None:
    writers = [HuggingFaceStorageWriter(tmp_path) for _ in range(2)]
    results = [writer.write_data(*plan_of({"a": torch.ones(1)})).wait() for writer in writers]
    with pytest.raises(IncompleteWriteError, match=r"ranks 0 and 1 both wrote model-00001-of-00001"):
        writers[0].finish(Metadata({}), results)
    assert not (tmp_path / INDEX).exists()


def test_a_save_with_a_global_plan_is_finished_by_its_writer_only(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(tmp_path)
    plan, planner = plan_of({"a": torch.ones(1)})
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(plan)])
    results = writer.write_data(plan, planner).wait()
    with pytest.raises(UsageError, match="without the global plan"):
        HuggingFaceStorageWriter(tmp_path).finish(Metadata({}), [results])
    assert not (tmp_path / INDEX).exists()
    writer.abandon()

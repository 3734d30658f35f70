"""Sharded safetensors files of stock torch, joined."""

import json
import sys
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from tests.hf.model_files import DTYPES, load, model_files, of_dtype, same, with_safetensors
from tests.support.ranks import run_ranks
from tests.support.stock_torch import stock_hf_storage
from torch.distributed.checkpoint import state_dict_saver as stock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from holdfast import _consolidate_hf_safetensors as consolidation
from holdfast._consolidate_hf_safetensors import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)
from holdfast._conversion import entry_stream
from holdfast._tensors.host import memory_of
from holdfast.errors import IncompleteCheckpointError, UsageError


def write_shard(path: Path, tensors: dict[str, torch.Tensor], offsets: dict[str, list[int]]) -> None:
    """A file as stock torch writes it for one rank."""
    info = {key: {"saved_offsets": offsets[key]} for key in tensors}
    save_file(tensors, path, {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"})


def shards_of_two_ranks(folder: Path) -> dict[str, torch.Tensor]:
    """Two files with the halves of tensors of every dtype; the whole tensors."""
    whole = {str(dtype)[6:]: of_dtype(dtype, 6, 8) for dtype in DTYPES}
    whole["long"] = torch.arange(1000)
    for rank in range(2):
        half = {
            key: value[rank * len(value) // 2 :][: len(value) // 2].clone() for key, value in whole.items()
        }
        offsets = {key: [rank * len(value) // 2, *[0] * (value.dim() - 1)] for key, value in whole.items()}
        if rank == 0:
            half["scalar"], offsets["scalar"] = torch.tensor(4.5), []
        write_shard(folder / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors", half, offsets)
    return {**whole, "scalar": torch.tensor(4.5)}


def test_parts_are_joined_without_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_stream, "PIECE", 100)
    whole = shards_of_two_ranks(tmp_path)
    assert same(load(tmp_path, whole), whole)
    mapping = {key: 1 + number % 2 for number, key in enumerate(whole)}
    consolidate_safetensors_files(tmp_path, tmp_path / "out", mapping, num_threads=3)
    assert model_files(tmp_path / "out") == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert same(with_safetensors(tmp_path / "out"), whole)
    assert same(load(tmp_path / "out", whole), whole)


def test_a_program_that_imports_only_safetensors_reads_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards_of_two_ranks(tmp_path)
    monkeypatch.delitem(sys.modules, "safetensors.torch")
    monkeypatch.delattr(safetensors, "torch")
    consolidate_safetensors_files(tmp_path, tmp_path / "out")
    read = safetensors.torch.load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    assert read["scalar"].item() == 4.5


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    shards_of_two_ranks(tmp_path)
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(IncompleteCheckpointError, match="do not have all of it"):
        consolidate_safetensors_files(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mapping_to_tensors_that_are_not_there_is_refused(tmp_path: Path) -> None:
    whole = shards_of_two_ranks(tmp_path)
    with pytest.raises(UsageError, match=r"nothing\.weight"):
        consolidate_safetensors_files(
            tmp_path, tmp_path / "out", dict.fromkeys([*whole, "nothing.weight"], 1)
        )
    assert model_files(tmp_path / "out") == []


def save_with_stock_torch(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(40.0).view(8, 5)
    state = {f"dim {dim}": distribute_tensor(whole + dim, mesh, [Shard(dim)]) for dim in range(2)}
    stock.save(
        state, storage_writer=stock_hf_storage().HuggingFaceStorageWriter(folder, save_distributed=True)
    )
    consolidate_safetensors_files_on_every_rank(folder, f"{folder}/out", {"dim 0": 1, "dim 1": 1})


@pytest.mark.slow
def test_ranks_join_what_stock_torch_wrote(tmp_path: Path) -> None:
    assert run_ranks(save_with_stock_torch, 2, str(tmp_path)) == [("returned", None)] * 2
    whole = torch.arange(40.0).view(8, 5)
    assert same(with_safetensors(tmp_path / "out"), {"dim 0": whole, "dim 1": whole + 1})
    assert same(load(tmp_path, {"dim 0": whole}), {"dim 0": whole})


def test_the_private_functions_that_torchs_own_tests_call() -> None:
    longest = consolidation._calculate_max_contiguous_elements
    assert longest([2], [5], [10]) == 3
    assert longest([1, 0], [3, 4], [6, 4]) == 8  # whole rows
    assert longest([1, 2], [3, 4], [6, 8]) == 2  # the rest of a row
    assert longest([1, 0], [3, 2], [4, 8]) == 2  # some columns
    assert longest([1, 0, 0], [3, 2, 4], [5, 2, 4]) == 16
    for wrong, said in [
        (([], [2, 3], [4, 5]), "empty"),
        (([1], [2, 3], [4, 5]), "same length"),
        (([2, 1], [2, 3], [4, 5]), "out of bounds"),
        (([1, 2], [2, 6], [4, 5]), "exceeds"),
    ]:
        with pytest.raises(ValueError, match=said):
            longest(*wrong)
    whole, part = torch.zeros(3, 8), torch.arange(6.0).view(3, 2)
    memory, elements = (memory_of(tensor) for tensor in (whole, part))
    consolidation._write_sub_tensor_to_file_optimized(memory, bytes(elements), 4, [3, 8], [0, 3], [3, 2])
    assert torch.equal(whole[:, 3:5], part)
    assert whole.sum() == part.sum()

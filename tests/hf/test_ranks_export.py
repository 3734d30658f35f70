"""Several real ranks write the final files of a model together, and load them in any layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hf.model_files import DTYPES, export, model_files, of_dtype, same, same_bits, with_safetensors
from tests.support.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast as dcp
from holdfast.errors import CheckpointException
from holdfast.state_dict_saver import AsyncCheckpointerType

pytestmark = pytest.mark.slow


def whole_state() -> dict[str, torch.Tensor]:
    """What the ranks save, as one process would have it."""
    generator = torch.Generator().manual_seed(7)
    cube = torch.randn(5, 7, 6, generator=generator)
    state = {f"cube.{dim}": cube + dim for dim in range(3)}
    state["mesh"] = torch.randn(8, 9, 3, generator=generator)
    state["long rows"] = torch.randn(6, 300_000, generator=generator)
    state["columns"] = torch.randn(3000, 400, generator=generator)
    state["replicated"] = torch.randn(900, 500, generator=generator)
    state["plain"] = torch.arange(10)
    state["scalar"] = torch.tensor(2.5)
    state["empty"] = torch.zeros(0, 3)
    for number, dtype in enumerate(DTYPES):
        state[f"{number % 2} {dtype}"] = of_dtype(dtype, 4, 8)
    return state


def shard(value: torch.Tensor, dim: int, mesh: DeviceMesh) -> DTensor:
    """A sharded tensor, made without collectives: these do not know all dtypes."""
    rank, length = dist.get_rank(), -(-value.shape[dim] // dist.get_world_size())
    start = min(rank * length, value.shape[dim])
    local = value.narrow(dim, start, min(length, value.shape[dim] - start))
    return DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=value.shape, stride=value.stride()
    )


def spread(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state as DTensors of this rank."""
    world = dist.get_world_size()
    line = init_device_mesh("cpu", (world,))
    placements: dict[str, Any] = {
        **{f"cube.{dim}": [Shard(dim)] for dim in range(3)},
        "long rows": [Shard(1)],
        "columns": [Shard(1)],
        "replicated": [Replicate()],
        "empty": [Shard(0)],
    }
    spread_out = {
        key: distribute_tensor(value, line, placements[key]) if key in placements else value
        for key, value in state.items()
    }
    for key, value in state.items():
        if "torch." in key:
            spread_out[key] = shard(value, int(key[0]), line)
    square = init_device_mesh("cpu", (2, world // 2)) if world % 2 == 0 else line
    both = [Shard(0), Shard(2)] if world % 2 == 0 else [Shard(2)]
    spread_out["mesh"] = distribute_tensor(state["mesh"], square, both)
    return spread_out


def save_together(folder: str, options: dict[str, Any]) -> None:
    export(spread(whole_state()), folder, **options)


def load_together(folder: str) -> bool:
    """Load what was saved into other layouts, and compare."""
    state = whole_state()
    line = init_device_mesh("cpu", (dist.get_world_size(),))
    room = {
        key: distribute_tensor(torch.zeros_like(value), line, [Shard(value.dim() - 1)])
        if key.startswith(("cube", "mesh", "rep"))
        else torch.zeros(value.shape, dtype=torch.uint8).view(value.dtype)
        if str(value.dtype) == "torch.float4_e2m1fn_x2"
        else torch.zeros_like(value)
        for key, value in state.items()
    }
    dcp.load(room, storage_reader=dcp.HuggingFaceStorageReader(folder))
    return all(
        same_bits(value.full_tensor() if isinstance(value, DTensor) else value, state[key])
        for key, value in room.items()
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_write_one_model_that_everybody_reads(tmp_path: Path, world_size: int) -> None:
    assert run_ranks(save_together, world_size, str(tmp_path), {}) == [("returned", None)] * world_size
    assert model_files(tmp_path) == ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    assert same(with_safetensors(tmp_path), whole_state())
    assert run_ranks(load_together, 2, str(tmp_path)) == [("returned", True)] * 2


def test_any_number_of_ranks_writes_the_same_bytes(tmp_path: Path) -> None:
    for world_size in (1, 3):
        folder = tmp_path / str(world_size)
        ended = run_ranks(
            save_together, world_size, str(folder), {"max_shard_size": "2MB", "thread_count": 2}
        )
        assert ended == [("returned", None)] * world_size
    assert len(model_files(tmp_path / "1")) > 3
    for path in (tmp_path / "1").iterdir():
        assert path.read_bytes() == (tmp_path / "3" / path.name).read_bytes(), path.name


def save_in_the_background(folder: str, kind: AsyncCheckpointerType) -> None:
    writer = dcp.HuggingFaceStorageWriter(folder)
    saving: Any = dcp.async_save(spread(whole_state()), storage_writer=writer, async_checkpointer_type=kind)
    saving.result()


@pytest.mark.parametrize("kind", [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS])
def test_ranks_write_in_the_background(tmp_path: Path, kind: AsyncCheckpointerType) -> None:
    assert run_ranks(save_in_the_background, 2, str(tmp_path), kind) == [("returned", None)] * 2
    assert model_files(tmp_path) == ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    assert same(with_safetensors(tmp_path), whole_state())


class _Failing(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "columns" and dist.get_rank() == 1:
            raise OSError(5, "no data")
        return super().resolve_data(write_item)


def fail_while_columns_are_sent(folder: str) -> str:
    writer = dcp.HuggingFaceStorageWriter(folder)
    try:
        dcp.save(spread(whole_state()), storage_writer=writer, planner=_Failing())
    except CheckpointException as error:
        return str(error)
    return "saved"


def test_a_failure_while_columns_are_sent_is_raised_by_all(tmp_path: Path) -> None:
    for kind, message in run_ranks(fail_while_columns_are_sent, 3, str(tmp_path)):
        assert kind == "returned"
        assert "no data" in message
    assert model_files(tmp_path) == []

"""The modules under torch's names between ranks: collectives, nested shards, FSDP1's optimizer state."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import run_ranks
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint import _sharded_tensor_utils as torchs_utils
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

import holdfast
from holdfast import utils
from holdfast._sharded_tensor_utils import _flatten_sharded_tensors

pytestmark = pytest.mark.slow


class OddRankError(Exception):
    """Raised on odd ranks."""


def fail_on_odd_ranks() -> int:
    if dist.get_rank() % 2:
        raise OddRankError("odd")
    return dist.get_rank()


class LocalOnly(Exception):
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not this one")


def fail_without_pickle() -> None:
    raise LocalOnly("told in text")


def use_collectives() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for coordinator in (0, 1):
        wrapper = utils._DistWrapper(None, use_dist=True, coordinator_rank=coordinator)
        assert wrapper.is_coordinator == (rank == coordinator)
        assert wrapper.get_world_size() == world
        assert wrapper.broadcast_object(rank if rank == coordinator else None) == coordinator
        gathered = wrapper.gather_object(rank)
        assert gathered == (list(range(world)) if rank == coordinator else None)
        assert wrapper.all_gather_object(rank) == list(range(world))
        numbers = [10 + n for n in range(world)] if rank == coordinator else None
        assert wrapper.scatter_object(numbers) == 10 + rank
        doubled = wrapper.reduce_scatter("plan", lambda: rank, lambda ranks: [2 * r for r in ranks])
        assert doubled == 2 * rank
        assert wrapper.all_reduce("plan", lambda: rank, len) == world
        assert wrapper.all_gather("plan", lambda: rank) == list(range(world))
        assert wrapper.broadcast("plan", lambda: rank) == coordinator
        wrapper.barrier()
        steps: list[Any] = [
            lambda wrapper=wrapper: wrapper.reduce_scatter("plan", fail_on_odd_ranks, list),
            lambda wrapper=wrapper: wrapper.all_reduce("plan", fail_on_odd_ranks, list),
            lambda wrapper=wrapper: wrapper.all_gather("plan", fail_on_odd_ranks),
        ]
        for step in steps:
            with pytest.raises(utils.CheckpointException, match="odd") as raised:
                step()
            assert isinstance(raised.value, OddRankError)
            assert list(raised.value.failures) == [1]
        with pytest.raises(utils.CheckpointException, match="told in text"):
            wrapper.broadcast("plan", fail_without_pickle)
    group = dist.new_group([1, 0][:world])
    assert utils._DistWrapper(group, use_dist=True, coordinator_rank=0).global_coordinator_rank in (0, 1)
    utils._assert_same_keys({"a": 1})
    with pytest.raises(AssertionError, match="extra") if rank == 0 else _nothing():
        utils._assert_same_keys({"a": 1} if rank == 0 else {"a": 1, "extra": 2})


def _nothing() -> Any:
    return pytest.MonkeyPatch.context()


def test_collectives_return_on_every_rank_or_raise_on_every_rank() -> None:
    assert run_ranks(use_collectives, 2) == [("returned", None)] * 2


def sharded(local: Any, offset: int, all_offsets: list[int], length: int) -> ShardedTensor:
    """A tensor of shards of one length, the n-th of them on rank n."""
    shards = [ShardMetadata([at], [length], f"rank:{n}/cpu") for n, at in enumerate(all_offsets)]
    about = ShardedTensorMetadata(
        shards, torch.Size([length * len(shards)]), TensorProperties(dtype=torch.float32)
    )
    (mine,) = [shard for shard in shards if shard.shard_offsets == [offset]]
    return ShardedTensor._init_from_local_shards_and_global_metadata([LocalShard(local, mine)], about)


def flatten_twice_sharded() -> tuple[list[Any], list[Any]]:
    rank = dist.get_rank()
    inner = sharded(torch.full((2,), float(rank)), 2 * rank, [0, 2], 2)
    state = {"deep": {"twice": sharded(inner, 4 * rank, [0, 4], 4)}, "once": inner, "n": 1}
    told = []
    for flatten in (_flatten_sharded_tensors, torchs_utils._flatten_sharded_tensors):
        flat = flatten(state)
        (shard,) = flat["deep"]["twice"].local_shards()
        offsets = sorted(s.shard_offsets for s in flat["deep"]["twice"].metadata().shards_metadata)
        told.append([flat["n"], shard.metadata.shard_offsets, shard.tensor.tolist(), offsets])
        assert flat["once"] is inner
    return told[0], told[1]


def test_tensors_that_are_sharded_twice_are_flattened_as_torch_does() -> None:
    for rank, (kind, told) in enumerate(run_ranks(flatten_twice_sharded, 2)):
        assert kind == "returned", told
        assert told[0] == told[1]
        assert told[0][1] == [6 * rank]


def make_model() -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), device_id=torch.device("cpu")
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, 8) * (1 + dist.get_rank())).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def resume_fsdp1(folder: Path) -> None:
    model, optimizer = make_model()
    take_step(model, optimizer)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {
            "model": model.state_dict(),
            "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer),
        }
        holdfast.save(state, checkpoint_id=folder)
    expected = [take_step(model, optimizer) for _ in range(2)][-1]

    model, optimizer = make_model()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        weights = model.state_dict()
        holdfast.load({"model": weights}, checkpoint_id=folder)
        model.load_state_dict(weights)
        loaded = holdfast.load_sharded_optimizer_state_dict(
            weights, "optim", holdfast.FileSystemReader(folder)
        )
        assert list(loaded) == ["optim"]
        flat = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, loaded["optim"])
        optimizer.load_state_dict(flat)
    assert torch.equal([take_step(model, optimizer) for _ in range(2)][-1], expected)


def test_a_model_of_fsdp1_resumes_with_its_sharded_optimizer_state(tmp_path: Path) -> None:
    assert run_ranks(resume_fsdp1, 2, tmp_path) == [("returned", None)] * 2

"""State dicts as FSDP1 makes them, built directly: FSDP1 itself does not run without an accelerator.

``SHARDED_STATE_DICT`` holds ShardedTensors, or DTensors where a device mesh was given; ``LOCAL_STATE_DICT``
holds one flat ShardedTensor for each wrapped module; ``FULL_STATE_DICT`` with ``rank0_only`` leaves all ranks
but the first with nothing.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.training.fingerprints import fingerprint
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast

SHAPES = {"even.weight": (12, 5), "uneven.weight": (10, 3), "few_rows.weight": (2, 4), "bias": (7,)}
FORMS = ("sharded", "mesh", "hybrid", "flat", "full")
TARGETS = {"sharded": "sharded", "mesh": "mesh", "hybrid": "hybrid", "flat": "flat", "full": "everywhere"}
"""How what was saved in a form is loaded by other ranks; ``full`` is wanted by all then."""


def values(form: str, seed: int) -> dict[str, torch.Tensor]:
    """The whole tensors: parameters, and an optimizer state for each."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"_flat_param": (83,)} if form == "flat" else dict(SHAPES)
    made = {f"model.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        made[f"optimizer.{name}.exp_avg"] = torch.randn(shape, generator=generator)
        made[f"optimizer.{name}.exp_avg_sq"] = torch.rand(shape, generator=generator).bfloat16()
    return made


def as_sharded_tensor(whole: torch.Tensor) -> ShardedTensor:
    """Rows in equal parts as ``torch.chunk`` makes them; the last ranks may have none."""
    parts, rank = whole.chunk(dist.get_world_size()), dist.get_rank()
    shards = []
    if rank < len(parts):
        offsets = [sum(len(part) for part in parts[:rank]), *[0] * (whole.dim() - 1)]
        shards = [LocalShard.from_tensor_and_offsets(parts[rank].clone(), offsets, rank)]
    return init_from_local_shards(shards, *whole.shape)


def as_dtensor(whole: torch.Tensor) -> DTensor:
    return distribute_tensor(whole, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def as_hybrid(whole: torch.Tensor) -> DTensor:
    outer = 2 if dist.get_world_size() % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (outer, dist.get_world_size() // outer))
    return distribute_tensor(whole, mesh, [Replicate(), Shard(0)])


_MAKERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sharded": as_sharded_tensor,
    "flat": as_sharded_tensor,
    "mesh": as_dtensor,
    "hybrid": as_hybrid,
    "everywhere": torch.clone,
}


def make_state(form: str, seed: int) -> dict[str, Any]:
    if form == "full":
        return dict(values(form, seed)) if dist.get_rank() == 0 else {}
    return {key: _MAKERS[form](whole) for key, whole in values(form, seed).items()}


def whole_of(value: Any) -> torch.Tensor:
    """The tensor put together again, on every rank."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not isinstance(value, ShardedTensor):
        return value  # type: ignore[no-any-return]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [shard.tensor for shard in value.local_shards()])
    return torch.cat([tensor for of_rank in parts for tensor in of_rank])


def save_form(folder: Path, form: str) -> dict[str, str]:
    state = make_state(form, seed=1)
    holdfast.save(state, checkpoint_id=folder / f"fsdp1-{form}")
    return {key: fingerprint(whole) for key, whole in values(form, seed=1).items()}


def load_form(folder: Path, form: str, target: str) -> dict[str, str]:
    state = {key: _MAKERS[target](whole) for key, whole in values(form, seed=2).items()}
    holdfast.load(state, checkpoint_id=folder / f"fsdp1-{form}", strict=True)
    return {key: fingerprint(whole_of(value)) for key, value in state.items()}

"""The layouts in which one small model is trained: who holds which part of it, and who computes what."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

LAYOUTS = ("fsdp", "hsdp", "tp", "tp_fsdp", "ddp")
FEATURES, HIDDEN, CLASSES = 12, 24, 10


class Block(nn.Module):
    """A residual block whose two matrices tensor parallelism splits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(0.2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.dropout(self.down(torch.relu(self.up(self.norm(inputs)))))
        return inputs + made


class Model(nn.Module):
    """Sizes that do not divide by the number of ranks, a parameter smaller than it, and a buffer."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.blocks = nn.ModuleList([Block()])
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.scales = nn.Parameter(torch.ones(2, 1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        made = self.first(inputs)
        for block in self.blocks:
            made = block(made)
        return self.head(made * self.scales[0]) + self.scales[1]  # type: ignore[no-any-return]


def build(layout: str) -> tuple[nn.Module, int, int]:
    """A new model in that layout over all ranks; how many batches there are in a step, and which is mine."""
    model, rank, world_size = Model(), dist.get_rank(), dist.get_world_size()
    inner = 2 if world_size == 4 else world_size
    outer = world_size // inner
    if layout == "ddp":
        # Otherwise DDP orders its buckets anew after the first step, and with them the additions of the
        # gradients: the sums of an uninterrupted run and of a resumed one differ in their last bits.
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True), world_size, rank
    if layout == "fsdp":
        return _shard(model, init_device_mesh("cpu", (world_size,))), world_size, rank
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("replicas", "shards"))
        return _shard(model, mesh), world_size, rank
    if layout == "tp":
        return _split(model, init_device_mesh("cpu", (world_size,))), 1, 0
    mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("data", "tensor"))
    return _shard(_split(model, mesh["tensor"]), mesh["data"]), outer, rank // inner


def _shard(model: Any, mesh: Any) -> nn.Module:
    # gloo has no mean of its own in every version of torch; other dtypes than float32 are added and divided.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)  # type: ignore[no-any-return]


def _split(model: Any, mesh: Any) -> nn.Module:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model  # type: ignore[no-any-return]

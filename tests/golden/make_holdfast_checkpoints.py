"""Makes small checkpoints with the Holdfast that runs it, one folder for each form that the format has.

    python -m tests.golden.make_holdfast_checkpoints holdfast-1.0     writes holdfast-1.0/<form>/ here

The states are functions of this module and of ``make_torch_checkpoints``, so that a test can make them again
and compare. A folder of a released version of the format is never made anew.
"""

# ruff: noqa: T201 - this is a program that prints
# mypy: disable-error-code="attr-defined,no-untyped-call"

import datetime as dt
import decimal
import os
import pathlib
import sys
import tempfile
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests.golden.make_torch_checkpoints import compressible_state, plain_state, ramp, sharded_full_tensors
from torch.distributed._shard import sharded_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast.extension import ZStandard
from holdfast.per_rank import PerRank

HERE = Path(__file__).resolve().parent
WORLD_SIZE = 2
MIB = 1 << 20


def blocks_state() -> dict[str, Any]:
    """Payloads of more than one block of checksums, which has 1 MiB, and one that ends on a block."""
    return {"rows": ramp(MIB + 4099, dtype=torch.uint8), "whole_blocks": torch.zeros(MIB, dtype=torch.uint8)}


def objects_state() -> dict[str, Any]:
    """Values that are not tensors, keys that are not strings, and tensors inside of objects."""
    return {
        "numbers": {"int": 2**70, "float": 0.1, "complex": 1 - 2j, "bool": True, "none": None},
        "text": {"unicode": "naïve ☃ \U0001f600", "empty": "", "bytes": bytes(range(256)), "dots.in.key": 1},
        "containers": {
            "tuple": (1, ("two", [3.0])),
            "set": {1, "two"},
            "frozenset": frozenset({3}),
            "ordered": OrderedDict(b=1, a=OrderedDict(c=2)),
            "counter": Counter("abca"),
            "deque": deque([1, 2], maxlen=5),
            "empty_list": [],
            "list_of_dicts": [{"a": 1}, {"a": ramp(2)}],
        },
        "keys": {0: "int", (1, "a"): "tuple", None: "none", 2.5: "float", "text": "text", True: "bool"},
        "library": {
            "date": dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.timezone.utc),
            "decimal": decimal.Decimal("1.10"),
            "path": pathlib.PurePosixPath("a/b"),
            "slice": slice(1, None, 2),
            "size": torch.Size([2, 3]),
            "device": torch.device("cpu"),
        },
        "numpy": {
            "array": np.arange(6, dtype=np.int16).reshape(2, 3),
            "scalar": np.float32(1.5),
            "text": np.array(["a", "bc"]),
        },
        "tensors_in_objects": (ramp(3), {"deep": (ramp(2, start=4), torch.tensor(True))}),
        "sparse": torch.eye(3).to_sparse(),
    }


def code_state() -> dict[str, Any]:
    """Objects that a load refuses unless the caller allows their classes."""
    return {"allowed": 1, "refused": HasCode(5), "dtype": torch.bfloat16}


class HasCode:
    """A class that is not on the list of what a load allows."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HasCode) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


def replicated_tensor() -> torch.Tensor:
    """A tensor that every rank holds and that is large enough to be split: each rank writes a part."""
    return ramp(2 * MIB + 77, dtype=torch.uint8, start=6)


def sharded_state(rank: int) -> dict[str, Any]:
    """What a rank of two has of tensors that ranks divide or share."""
    mesh = DeviceMesh("cpu", list(range(WORLD_SIZE)))
    full = sharded_full_tensors()
    placements = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}
    model: dict[str, DTensor] = {
        name: distribute_tensor(full[name], mesh, [placements[name]]) for name in full
    }
    # Uneven on purpose: four rows on rank 0, two on rank 1.
    offset, count = ((0, 4), (4, 2))[rank]
    shard = sharded_tensor.Shard.from_tensor_and_offsets(
        ramp(6, 2)[offset : offset + count], [offset, 0], rank
    )
    return {
        "model": model,
        "table": sharded_tensor.init_from_local_shards([shard], [6, 2]),
        "step": 11,
        "only": {f"of_rank_{rank}": ramp(3, start=rank)},
    }


def sharded_whole() -> dict[str, Any]:
    """The state of one process that has all of ``sharded_state``."""
    return {
        "model": sharded_full_tensors(),
        "table": ramp(6, 2),
        "step": 11,
        "only": {f"of_rank_{rank}": ramp(3, start=rank) for rank in range(WORLD_SIZE)},
    }


def per_rank_state(rank: int) -> dict[str, Any]:
    """Values that each rank has for itself, as ``PerRank``."""
    return {
        "shared": ramp(4),
        "rng": PerRank(ramp(5, dtype=torch.uint8, start=rank)),
        "data": {"epoch": 3, "position": PerRank({"file": f"part-{rank}", "line": 100 * rank})},
    }


def rank_local_state(rank: int) -> dict[str, Any]:
    """What each rank saves by itself, without the others."""
    return {"mine": ramp(4, start=rank), "rank": rank, "nested": {"list": [rank, ramp(2, start=rank)]}}


def save(state: dict[str, Any], folder: str, **options: Any) -> None:
    """Save with options of the writer."""
    holdfast.save(state, storage_writer=holdfast.FileSystemWriter(folder, **options))


def save_sharded(folder: str) -> None:
    save(sharded_state(dist.get_rank()), folder)


def save_split(folder: str) -> None:
    save({"large": replicated_tensor()}, folder, _extensions=[ZStandard()])


def save_per_rank(folder: str) -> None:
    save(per_rank_state(dist.get_rank()), folder)


def save_rank_local(folder: str) -> None:
    holdfast.save(rank_local_state(dist.get_rank()), checkpoint_id=folder, use_collectives=False)


def _be_a_rank(rank: int, rendezvous: str, function: Callable[[str], None], folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD_SIZE)
    try:
        function(folder)
    finally:
        dist.destroy_process_group()


def _on_ranks(function: Callable[[str], None], folder: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        work = (f"{temporary}/rendezvous", function, folder)
        torch.multiprocessing.spawn(_be_a_rank, args=work, nprocs=WORLD_SIZE)


RECIPES: dict[str, Callable[[str], None]] = {
    "plain": lambda folder: save(plain_state(), folder),
    "file_per_item": lambda folder: save(rank_local_state(0), folder, single_file_per_rank=False),
    "threads": lambda folder: save(plain_state(), folder, thread_count=3),
    "native": lambda folder: save(plain_state(), folder, torch_compatible=False),
    "zstd": lambda folder: save(compressible_state(), folder, _extensions=[ZStandard()]),
    "zstd_blocks": lambda folder: save(blocks_state(), folder, _extensions=[ZStandard()]),
    "blocks": lambda folder: save({"rows": blocks_state()["rows"]}, folder),
    "objects": lambda folder: save(objects_state(), folder),
    "code": lambda folder: save(code_state(), folder),
    "empty": lambda folder: save({}, folder),
    "sharded": lambda folder: _on_ranks(save_sharded, folder),
    "split_zstd": lambda folder: _on_ranks(save_split, folder),
    "per_rank": lambda folder: _on_ranks(save_per_rank, folder),
    "rank_local": lambda folder: _on_ranks(save_rank_local, folder),
}


def main() -> None:
    """Write the folder that the first argument names, which must not exist."""
    root = HERE / sys.argv[1]
    root.mkdir()
    # Relative names keep the maker's folders out of the metadata.
    os.chdir(HERE)
    for name, make in RECIPES.items():
        make(f"{root.name}/{name}")
    size = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
    print(f"{root.name}: {size} bytes")


if __name__ == "__main__":
    # Objects must name the class in the module that tests import, not in __main__.
    from tests.golden import make_holdfast_checkpoints

    make_holdfast_checkpoints.main()

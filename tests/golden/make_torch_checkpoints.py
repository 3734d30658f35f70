"""Makes the small checkpoints in this folder with whatever torch runs it, from 2.0 on.

    python make_torch_checkpoints.py            writes torch-<version>/<name>/ beside this file

The states are functions of this module, so that a test can make them again and compare, without
torch's checkpoint package. What this torch cannot make is left out and printed.
"""

# ruff: noqa: PLC0415, T201 - each recipe imports what its torch has, and this is a program that prints
# mypy: disable-error-code="attr-defined,no-untyped-call"

import contextlib
import inspect
import io
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
WORLD_SIZE = 2
DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2"),
)


def ramp(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    """0, 1, 2 ... modulo 23 from ``start`` on, in the given shape: exact in every dtype."""
    count = 1
    for dim in shape:
        count *= dim
    values = (torch.arange(count) + start) % 23
    return values.reshape(shape).to(dtype)


def plain_state() -> dict[str, Any]:
    """Nested containers, many dtypes, tensors of odd layouts, and objects."""
    available = [name for name in DTYPES if hasattr(torch, name)]
    tensors = {}
    for number, name in enumerate(available):
        # torch 2.3 and 2.4 have uint16 to uint64 but cannot save them.
        with contextlib.suppress(RuntimeError, TypeError, KeyError):
            tensor = ramp(2, 3, dtype=getattr(torch, name), start=number)
            torch.save(tensor, io.BytesIO())
            tensors[name] = tensor
    return {
        "dtypes": tensors,
        "odd": {
            "scalar": torch.tensor(2.5),
            "empty": torch.zeros(0, 4),
            "view": ramp(4, 6)[1:3, ::2],
            "channels_last": ramp(1, 2, 2, 2).to(memory_format=torch.channels_last),
            "conj": torch.complex(ramp(3), ramp(3, start=5)).conj(),
            "grad": torch.nn.Parameter(ramp(2, 2)),
        },
        "list": [ramp(2), {"deep": ramp(1, start=3)}, "text"],
        "optimizer": {
            "state": {0: {"step": torch.tensor(7.0), "exp_avg": ramp(2, 2)}, 1: {"step": torch.tensor(8.0)}},
            "param_groups": [{"lr": 0.125, "params": [0, 1]}],
        },
        "epoch": 3,
        "name": "golden",
        "ratios": [0.5, 0.25],
        "nothing": None,
        "empty_dict": {},
    }


def compressible_state() -> dict[str, Any]:
    """Two tensors and an object, for stream transforms."""
    return {"zeros": torch.zeros(64, 64), "ramp": ramp(16, 16), "note": "x" * 500}


def sharded_full_tensors() -> dict[str, torch.Tensor]:
    """The whole tensors of which the sharded checkpoint has shards."""
    return {"rows": ramp(5, 4), "columns": ramp(4, 6, start=2), "replicated": ramp(3, start=1)}


def save(state: dict[str, Any], folder: str, **options: Any) -> None:
    import torch.distributed.checkpoint as dcp

    writer_options = options.pop("writer", {})
    writer = dcp.FileSystemWriter(str(folder), **writer_options)
    if hasattr(dcp, "save"):
        parameters = inspect.signature(dcp.save).parameters
        if "no_dist" in parameters:
            options.setdefault("no_dist", not torch.distributed.is_initialized())
        dcp.save(state, storage_writer=writer, **options)
    else:
        dcp.save_state_dict(state, writer, no_dist=not torch.distributed.is_initialized(), **options)


def make_zstd(folder: str) -> None:
    from torch.distributed.checkpoint._extension import ZStandard

    save(compressible_state(), folder, writer={"_extensions": [ZStandard()]})


def run_rank(rank: int, rendezvous: str, work: tuple[str, ...]) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD_SIZE
    )
    try:
        globals()[work[0]](rank, *work[1:])
    finally:
        torch.distributed.destroy_process_group()


def save_sharded(rank: int, folder: str) -> None:
    try:
        from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
    except ImportError:
        from torch.distributed._tensor import DeviceMesh, Replicate, Shard, distribute_tensor
    mesh = DeviceMesh("cpu", list(range(WORLD_SIZE)))
    full = sharded_full_tensors()
    placements = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}
    state: dict[str, Any] = {
        "model": {name: distribute_tensor(full[name], mesh, [placements[name]]) for name in full}
    }
    state["step"] = 11
    save(state, folder)


def save_sharded_tensor(rank: int, folder: str) -> None:
    from torch.distributed._shard import sharded_tensor

    full = ramp(6, 2)
    # Uneven on purpose: four rows on rank 0, two on rank 1.
    offset, count = ((0, 4), (4, 2))[rank]
    shard = sharded_tensor.Shard.from_tensor_and_offsets(full[offset : offset + count], [offset, 0], rank)
    save({"table": sharded_tensor.init_from_local_shards([shard], [6, 2])}, folder)


def save_rank_local(rank: int, folder: str) -> None:
    save({"mine": ramp(4, start=rank), "rank": rank}, folder, use_collectives=False)


def on_ranks(*work: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        torch.multiprocessing.spawn(run_rank, args=(f"{temporary}/rendezvous", work), nprocs=WORLD_SIZE)


RECIPES = {
    "plain": lambda folder: save(plain_state(), folder),
    "file_per_item": lambda folder: save(
        {"a": ramp(3), "b": {"c": ramp(2, 2)}, "n": 5}, folder, writer={"single_file_per_rank": False}
    ),
    "zstd": make_zstd,
    "sharded": lambda folder: on_ranks("save_sharded", folder),
    "sharded_tensor": lambda folder: on_ranks("save_sharded_tensor", folder),
    "rank_local": lambda folder: on_ranks("save_rank_local", folder),
}


def main() -> None:
    warnings.simplefilter("ignore")
    version = ".".join(torch.__version__.split(".")[:2])
    # Relative names keep the maker's folders out of the metadata.
    os.chdir(HERE)
    root = Path(f"torch-{version}")
    shutil.rmtree(root, ignore_errors=True)
    for name, make in RECIPES.items():
        folder = root / name
        folder.mkdir(parents=True)
        try:
            make(str(folder))
        except BaseException as error:
            shutil.rmtree(folder)
            print(
                f"torch {torch.__version__} cannot make {name}: {type(error).__name__}: {str(error)[-200:]}"
            )
    size = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
    print(f"{root}: {size} bytes")


if __name__ == "__main__":
    main()

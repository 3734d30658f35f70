"""Cases of models as safetensors files: two ranks export one, and one process loads it from the disk."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import holdfast
from benchmarks.case import Case, Goal, Job, Quantity, Samples, interleave
from benchmarks.one_slice import RANKS as SLICES
from benchmarks.one_slice import shard_of_rank
from benchmarks.rank import bytes_counted
from benchmarks.ranks import RANKS, rank_contents, run_ranks
from benchmarks.states import MIB, Tensors, bulk
from benchmarks.turns import drop_caches, read_through, seconds_of

__all__ = ["EXTRA", "OWN_FORMAT", "SAVE", "SAVE_OWN", "WRITTEN", "safetensors_cases"]

OWN_FORMAT = "holdfast, own format"
SAFETENSORS = "safetensors"
SAVE, SAVE_OWN = "save", "save, compared with our own format"
EXTRA, WRITTEN = "extra memory", "bytes written per byte"
_LOAD, _PART = "load", "bytes read per byte of a part"


def safetensors_cases(scale: float) -> list[Case]:
    """The cases of this module."""
    exported = rank_contents(scale)["ranks-reshard"].contents
    loaded = bulk(int(2048 * MIB * scale))
    return [
        Case(
            "safetensors-export",
            f"{RANKS} ranks save a model as safetensors files, {exported.nbytes / MIB:,.0f} MiB in "
            f"{exported.count} DTensors, Shard(0)",
            (
                Quantity(SAVE, "s", Goal(times=2.5)),
                Quantity(SAVE_OWN, "s", Goal(within=1.15, against=(OWN_FORMAT,))),
                Quantity(EXTRA, "MiB", Goal(at_most=256)),
                Quantity(WRITTEN, "bytes/byte", Goal(at_most=1.01)),
            ),
            2 * exported.nbytes,
            5,
            partial(run_ranks, "benchmarks.safetensors_rank", "safetensors-export", scale),
            "torch writes shards, then joins them (enable_consolidation); what it joins is not synced. "
            "The kernel counts the bytes written (write_bytes in /proc/self/io), of all ranks",
        ),
        Case(
            "safetensors-load",
            f"load a model from safetensors files on the disk, {loaded.nbytes / MIB:,.0f} MiB in "
            f"{loaded.count} tensors",
            (
                Quantity(_LOAD, "s", Goal(times=1.5, against=(SAFETENSORS,))),
                Quantity(_PART, "bytes/byte", Goal(at_most=1.05)),
            ),
            loaded.nbytes,
            5,
            partial(_load, loaded),
            "safetensors' load_file returns new tensors, which are copied into the state on the clock; the "
            "part is one eighth of the rows of each tensor, and only holdfast reads less than all for it",
        ),
    ]


def _load(contents: Tensors, job: Job) -> Samples:
    drop_caches()  # so that the case is skipped before anything is saved where that is impossible
    target = contents.filled()
    folder = job.folder / "model"
    holdfast.save(target, storage_writer=holdfast.HuggingFaceStorageWriter(folder), no_dist=True)
    loads: dict[str, Callable[[dict[str, Any], Path], None]] = {
        "holdfast": _load_ours,
        SAFETENSORS: _load_file,
    }

    def act(side: str) -> dict[str, float]:
        contents.clear(target)
        drop_caches()
        found = {_LOAD: seconds_of(lambda: loads[side](target, folder))}
        contents.check(target)
        if side == "holdfast":
            found[_PART] = _read_a_part(contents, folder)
        return found

    return interleave(list(loads), act, rounds=job.rounds, name_of=str, say=job.say)


def _load_ours(state: dict[str, Any], folder: Path) -> None:
    holdfast.load(state, storage_reader=holdfast.HuggingFaceStorageReader(folder), no_dist=True)


def _load_file(state: dict[str, Any], folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    loaded = import_module("safetensors.torch").load_file(file)
    for key, tensor in state.items():
        tensor.copy_(loaded[key])


def _read_a_part(contents: Tensors, folder: Path) -> float:
    """Bytes that a load of one rank's rows of each tensor reads, for each byte of them."""
    read_through(folder)
    rows, *rest = contents.shape
    part = {
        f"layers.{number}.weight": shard_of_rank(torch.empty(rows // SLICES, *rest))
        for number in range(contents.count)
    }
    before = bytes_counted("rchar")
    _load_ours(part, folder)
    read = bytes_counted("rchar") - before
    return read / sum(value.to_local().nbytes for value in part.values())

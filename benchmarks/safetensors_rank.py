"""The process of one rank that exports a model: as safetensors files by both sides, and in our own format.

``python -m benchmarks.safetensors_rank CASE SCALE ROUNDS FOLDER RANK OUTPUT``; rank 0 writes the samples to
OUTPUT, as JSON.
"""

import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint import state_dict_saver as stock_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter as StockWriter
from torch.distributed.device_mesh import init_device_mesh

import holdfast
from benchmarks.case import SIDES, Job, Samples, interleave
from benchmarks.footprint import Footprint
from benchmarks.rank import by_the_first, bytes_counted, held_by_rank, run_as_rank, slowest_of
from benchmarks.ranks import RANKS, rank_contents
from benchmarks.safetensors_files import EXTRA, OWN_FORMAT, SAVE, SAVE_OWN, WRITTEN
from benchmarks.states import MIB, Tensors


def _save_ours(state: dict[str, Any], folder: Path) -> object:
    return holdfast.save(state, storage_writer=holdfast.HuggingFaceStorageWriter(folder))


def _save_theirs(state: dict[str, Any], folder: Path) -> object:
    writer = StockWriter(str(folder), save_distributed=True, enable_consolidation=True)
    return stock_saver.save(state, storage_writer=writer)


def _save_in_our_format(state: dict[str, Any], folder: Path) -> object:
    return holdfast.save(state, checkpoint_id=folder)


def _measure(contents: Tensors, job: Job) -> Samples:
    mesh = init_device_mesh("cpu", (RANKS,))
    held = held_by_rank(contents, "rows", mesh)
    sides: dict[str, Callable[[dict[str, Any], Path], object]] = dict(
        zip((*SIDES, OWN_FORMAT), (_save_ours, _save_theirs, _save_in_our_format), strict=True)
    )
    for number, save in enumerate(sides.values()):
        save({"x": torch.ones(4)}, job.folder / f"warm-up-{number}")

    def act(side: str) -> dict[str, float]:
        folder = job.folder / "model"
        footprint, before = Footprint(), bytes_counted("write_bytes")
        seconds = slowest_of(lambda: sides[side](held, folder))
        extra = torch.tensor(footprint.extra() / MIB)
        written = torch.tensor(bytes_counted("write_bytes") - before)
        dist.all_reduce(extra, dist.ReduceOp.MAX)
        dist.all_reduce(written)
        if side in SIDES:
            by_the_first(lambda: _check(contents, folder))
        by_the_first(lambda: shutil.rmtree(folder))
        return {
            SAVE: seconds,
            SAVE_OWN: seconds,
            EXTRA: extra.item(),
            WRITTEN: written.item() / contents.nbytes,
        }

    return interleave(list(sides), act, rounds=job.rounds, name_of=str, say=job.say)


def _check(contents: Tensors, folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118 - it is no mapping
            assert contents.is_right(key, opened.get_tensor(key)), f"{key} was saved wrong"


if __name__ == "__main__":
    name_, scale_, *rest = sys.argv[1:]
    contents_ = rank_contents(float(scale_))["ranks-reshard"].contents
    run_as_rank(partial(_measure, contents_), name_, *rest)

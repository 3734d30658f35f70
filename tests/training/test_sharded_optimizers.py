"""Fresh optimizers of sharded models get their state from a checkpoint, on as many ranks and on others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import run_ranks
from tests.training import optimizer_jobs
from tests.training.layouts import LAYOUTS

pytestmark = pytest.mark.slow

OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    # One needs sparse gradients, one a closure, one matrices only.
    and name not in ("Optimizer", "SparseAdam", "LBFGS", "Muon")
)
SAMPLE = ("AdamW", "Factored")


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=() if name in SAMPLE else pytest.mark.soak)
        for name in [*OPTIMIZERS, "Factored"]
    ],
)
def test_fresh_optimizers_of_every_layout_go_on_exactly(optimizer: str, tmp_path: Path) -> None:
    cases = [(layout, optimizer) for layout in LAYOUTS]
    first = _run(optimizer_jobs.first_job, 4, tmp_path, cases)
    trained = [case for case in cases if "untrainable" not in first[0][case]]
    # torch does not train DTensors with these.
    assert trained == cases or optimizer in ("Adafactor", "Rprop")
    resumed = _run(optimizer_jobs.resumed_job, 4, tmp_path, trained)
    for case in trained:
        for before, after in zip(first, resumed, strict=True):
            assert after[case]["loaded"] == before[case]["saved"], case
            assert after[case]["layouts"] == before[case]["layouts"], case
            assert after[case]["losses"] == before[case]["losses"], case
            assert after[case]["end"] == before[case]["end"], case
    for rank in _run(optimizer_jobs.resumed_job, 2, tmp_path, trained):
        for case in trained:
            assert rank[case]["loaded"] == first[0][case]["saved"], case


def test_a_fresh_optimizer_that_keeps_plain_tensors_of_its_own_part_goes_on_exactly(tmp_path: Path) -> None:
    case = ("fsdp", "LocalParts")
    first = _run(optimizer_jobs.first_job, 4, tmp_path, [case])
    for before, after in zip(first, _run(optimizer_jobs.resumed_job, 4, tmp_path, [case]), strict=True):
        assert after[case]["loaded"] == before[case]["saved"]
        assert after[case]["layouts"] == before[case]["layouts"]
        assert after[case]["losses"] == before[case]["losses"]
        assert after[case]["end"] == before[case]["end"]


def test_whole_tensors_that_differed_between_ranks_become_parts_of_one(tmp_path: Path) -> None:
    first = run_ranks(optimizer_jobs.save_apart, 2, tmp_path)
    resumed = run_ranks(optimizer_jobs.load_into_shards, 2, tmp_path)
    assert first[0][1] != first[1][1]
    assert resumed == [first[0], first[0]]


def _run(job: Any, world_size: int, *args: Any) -> list[dict[Any, Any]]:
    results = run_ranks(job, world_size, *args)
    for rank, (kind, value) in enumerate(results):
        assert kind == "returned", f"rank {rank}: {value}"
        for case, found in value.items():
            assert isinstance(found, dict), f"rank {rank}, {case}: {found}"
    return [value for _, value in results]

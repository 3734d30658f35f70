"""Runs go on exactly, in whichever order a model is compiled, sharded and checkpointed."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.ranks import run_ranks
from tests.support.sweeps import sweep
from tests.training import wrappings

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@sweep(14)
def test_one_process_goes_on_in_every_wrapping(stride: int, tmp_path: Path) -> None:
    wrappings.check_resumes(tmp_path, "plain", stride)


@sweep(14)
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp"])
def test_two_ranks_go_on_in_every_wrapping(layout: str, stride: int, tmp_path: Path) -> None:
    for kind, value in run_ranks(wrappings.check_resumes, 2, tmp_path, layout, stride, timeout=600):
        assert kind == "returned", value


@sweep(28)
@pytest.mark.parametrize(
    ("layout", "before", "after"),
    [
        ("ddp", 2, 2),
        ("fsdp", 4, 2),
        pytest.param("plain", 1, 1, marks=pytest.mark.soak),
        pytest.param("fsdp", 2, 2, marks=pytest.mark.soak),
        pytest.param("tp", 2, 2, marks=pytest.mark.soak),
    ],
)
def test_new_processes_find_every_tensor_and_go_on_exactly(
    layout: str, before: int, after: int, stride: int, tmp_path: Path
) -> None:
    first = returned(run_ranks(wrappings.first_job, before, tmp_path, layout, stride, timeout=600))
    goes_on = before == after
    resumed = run_ranks(wrappings.resumed_job, after, tmp_path, layout, stride, goes_on, timeout=600)
    for rank, of_rank in enumerate(returned(resumed)):
        for case, found, expected in zip(wrappings.cases(layout, stride), of_rank, first[rank], strict=True):
            assert found == {name: expected[name] for name in found}, case


def returned(outcomes: list[tuple[str, Any]]) -> list[Any]:
    for kind, value in outcomes:
        assert kind == "returned", value
    return [value for _, value in outcomes]

"""Runs go on exactly, in whichever order a model is compiled, sharded and checkpointed."""

from pathlib import Path

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
    for kind, value in run_ranks(wrappings.check_resumes, 2, tmp_path, layout, stride, timeout=400):
        assert kind == "returned", value

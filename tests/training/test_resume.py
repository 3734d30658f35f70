"""Training goes on from a checkpoint as if it had never stopped; any number of ranks finds the same state."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.training.jobs import layout_pairs
from tests.training.layouts import LAYOUTS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_processes_find_the_saved_state_bit_for_bit(
    layout: str, first_job: list[Any], resumed_job: list[Any]
) -> None:
    for before, after in zip(first_job, resumed_job, strict=True):
        assert after[layout,]["loaded"] == before[layout,]["saved"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resumed_training_ends_bit_for_bit_where_the_uninterrupted_one_does(
    layout: str, first_job: list[Any], resumed_job: list[Any]
) -> None:
    for before, after in zip(first_job, resumed_job, strict=True):
        assert after[layout,]["end"] == before[layout,]["end"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_value_changes_after_the_save_that_training_changes(layout: str, first_job: list[Any]) -> None:
    # Or the comparisons above would compare what never moves.
    found = first_job[0][layout,]
    still = {name for name, value in found["saved"].items() if found["end"][name] == value}
    assert not [name for name in still if name.startswith("model.") or ".exp_avg" in name or "rng" in name]
    assert {"seen", "optimizer.lr", "schedule.last_epoch"}.isdisjoint(still)


@pytest.mark.parametrize(
    ("world_size", "saved", "loaded"),
    [(world_size, *pair) for world_size in (1, 2, 3) for pair in layout_pairs(world_size)],
)
def test_other_numbers_of_ranks_find_the_state_of_four_bit_for_bit(
    world_size: int,
    saved: str,
    loaded: str,
    first_job: list[Any],
    loading_job: Callable[[int], list[Any]],
) -> None:
    for rank in loading_job(world_size):
        assert rank[saved, loaded] == first_job[0][saved,]["saved"]

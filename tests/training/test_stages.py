"""Pipeline stages, where every rank saves keys of its own, resume exactly and can be dealt out anew."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def test_resumed_stages_train_on_bit_for_bit(first_job: list[Any], resumed_job: list[Any]) -> None:
    for before, after in zip(first_job, resumed_job, strict=True):
        assert after["stages",]["loaded"] == before["stages",]["saved"]
        assert after["stages",]["end"] == before["stages",]["end"]
        assert before["stages",]["end"] != before["stages",]["saved"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_layers_of_four_stages_load_into_fewer(
    world_size: int, first_job: list[Any], loading_job: Callable[[int], list[Any]]
) -> None:
    saved = [rank["stages",]["saved"] for rank in first_job]
    loaded = [rank["stages",] for rank in loading_job(world_size)]
    assert all(loaded)
    assert _merged(loaded) == _merged(saved)


def _merged(ranks: list[dict[str, str]]) -> dict[str, str]:
    merged = {name: value for rank in ranks for name, value in rank.items()}
    assert len(merged) == sum(map(len, ranks)), "a layer is on two ranks"
    return merged

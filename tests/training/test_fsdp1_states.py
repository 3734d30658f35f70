"""The ShardedTensors and DTensors of FSDP1's state dicts load in any number of ranks, and as each other."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.training.jobs import FSDP1_PAIRS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("saved", "loaded"), FSDP1_PAIRS)
def test_what_four_ranks_saved_loads_bit_for_bit(
    world_size: int,
    saved: str,
    loaded: str,
    first_job: list[Any],
    loading_job: Callable[[int], list[Any]],
) -> None:
    for rank in loading_job(world_size):
        assert rank["fsdp1", saved, loaded] == first_job[0]["fsdp1", saved]

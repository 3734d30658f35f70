"""Every layout on 1, 2, 3, 4 and 6 ranks is loaded into every layout on so many ranks, bit for bit."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.reshard.layouts import WORLD_SIZES, assert_holds, blank, layouts_of, matrix

from holdfast.testing import FakeRank, FakeRanks

# torch says so about every operation on a ShardedTensor.
pytestmark = [
    pytest.mark.one_core,
    pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning"),
]


def check_pairs(writers: int, readers: int, pairs: Sequence[tuple[str, str]], folder: Path) -> None:
    """Save each pair's first layout by so many ranks and load it into its second, each pair a key."""
    sources, targets = layouts_of(writers), layouts_of(readers)
    wholes = {pair: matrix(number) for number, pair in enumerate(pairs)}

    def save(rank: FakeRank) -> None:
        state = {f"{s} to {t}": sources[s](rank, whole) for (s, t), whole in wholes.items()}
        rank.save(state, checkpoint_id=folder)

    def load(rank: FakeRank) -> None:
        state: dict[str, Any] = {
            f"{s} to {t}": targets[t](rank, blank(whole)) for (s, t), whole in wholes.items()
        }
        rank.load(state, checkpoint_id=folder)
        for (s, t), whole in wholes.items():
            assert_holds(state[f"{s} to {t}"], targets[t](rank, whole), f"{s} to {t}, rank {rank.rank}")

    FakeRanks(writers).run(save)
    FakeRanks(readers).run(load)


@pytest.mark.parametrize("readers", WORLD_SIZES)
@pytest.mark.parametrize("writers", WORLD_SIZES)
def test_each_layout_loads_into_others(writers: int, readers: int, tmp_path: Path) -> None:
    # Each layout of either side at least once; which ones meet changes with the world sizes.
    sources, targets = list(layouts_of(writers)), list(layouts_of(readers))
    count = max(len(sources), len(targets))
    pairs = [(sources[n % len(sources)], targets[(n + writers) % len(targets)]) for n in range(count)]
    check_pairs(writers, readers, pairs, tmp_path)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("readers", WORLD_SIZES)
@pytest.mark.parametrize("writers", WORLD_SIZES)
def test_every_layout_loads_into_every_layout(writers: int, readers: int, tmp_path: Path) -> None:
    pairs = list(itertools.product(layouts_of(writers), layouts_of(readers)))
    check_pairs(writers, readers, pairs, tmp_path)

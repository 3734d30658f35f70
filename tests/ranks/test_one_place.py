"""All ranks of a save write to one place, and only files that have something in them."""

from pathlib import Path

import pytest
import torch

from holdfast.errors import UsageError
from holdfast.testing import FakeRanks


def test_ranks_that_save_to_different_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"rank 0 saves to .*step-0 and rank 1 to .*step-1"):
        FakeRanks(2).run(
            lambda rank: rank.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / f"step-{rank.rank}")
        )
    assert not list(tmp_path.rglob(".metadata"))


def test_a_rank_without_items_makes_no_file(tmp_path: Path) -> None:
    for number in range(3):
        FakeRanks(4).run(lambda rank, number=number: rank.save({"n": number}, checkpoint_id=tmp_path))  # type: ignore[misc]
    assert len(list(tmp_path.glob("*.distcp"))) == 1

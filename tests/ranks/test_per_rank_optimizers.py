"""Optimizers in a PerRank: each rank gets its own momenta back, also if it has not taken a step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.states import assert_same

import holdfast
from holdfast import PerRank
from holdfast.errors import MissingKeyError
from holdfast.testing import FakeRank, FakeRanks


def trained(seed: int) -> torch.optim.Optimizer:
    torch.manual_seed(seed)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return optimizer


def new_optimizer() -> torch.optim.Optimizer:
    return torch.optim.Adam(torch.nn.Linear(2, 2).parameters())


@pytest.mark.parametrize("as_dict", [False, True])
def test_an_optimizer_that_has_not_taken_a_step_gets_its_own_momenta(tmp_path: Path, as_dict: bool) -> None:
    def work(rank: FakeRank) -> None:
        rank.save({"x": [1, {"o": PerRank([trained(rank.rank)])}]}, checkpoint_id=tmp_path)
        optimizer = new_optimizer()
        value: Any = optimizer.state_dict() if as_dict else optimizer
        state = {"x": [0, {"o": PerRank([value])}]}
        result = rank.load(state, checkpoint_id=tmp_path)
        assert not result.not_asked_for
        (found,) = state["x"][1]["o"].value  # type: ignore[index]
        assert found is value
        found = found if as_dict else found.state_dict()
        assert_same(found, trained(rank.rank).state_dict())

    FakeRanks(2).run(work)


def test_an_optimizer_gets_the_momenta_that_were_saved_for_all_ranks(tmp_path: Path) -> None:
    FakeRanks(2).run(lambda rank: rank.save({"o": trained(0)}, checkpoint_id=tmp_path))

    def work(rank: FakeRank) -> None:
        optimizer = new_optimizer()
        rank.load({"o": PerRank(optimizer)}, checkpoint_id=tmp_path)
        assert_same(optimizer.state_dict(), trained(0).state_dict())

    FakeRanks(3).run(work)


def test_a_rule_gives_an_optimizer_the_momenta_of_another_number_of_ranks(tmp_path: Path) -> None:
    FakeRanks(2).run(lambda rank: rank.save({"o": PerRank(trained(rank.rank))}, checkpoint_id=tmp_path))
    optimizer = new_optimizer()
    state = {"o": PerRank(optimizer, resize=lambda values, _rank, _world_size: values[1])}
    FakeRanks(1).run(lambda rank: rank.load(state, checkpoint_id=tmp_path))
    assert_same(optimizer.state_dict(), trained(1).state_dict())


def test_a_load_that_fails_leaves_no_room_in_the_state_of_an_optimizer(tmp_path: Path) -> None:
    FakeRanks(1).run(lambda rank: rank.save({"o": PerRank(trained(0)), "x": 1}, checkpoint_id=tmp_path))
    value = new_optimizer().state_dict()
    before = repr(value)
    with pytest.raises(MissingKeyError):
        holdfast.load({"o": PerRank(value), "y": 0}, checkpoint_id=tmp_path)
    assert repr(value) == before

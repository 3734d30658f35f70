"""PerRank: every rank's value is kept and comes back, and other numbers of ranks need a rule."""

import copy
import logging
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import run_ranks
from tests.support.stock_torch import stock_load
from torch.distributed.tensor import Shard

import holdfast
from holdfast.errors import CheckpointException, DtypeMismatchError, PlanError, ShapeMismatchError, UsageError
from holdfast.per_rank import PerRank, rank_key, rank_name
from holdfast.testing import FakeRank, FakeRanks


def save(rank: FakeRank, state: dict[str, Any], folder: Path, **options: Any) -> None:
    rank.save(state, checkpoint_id=folder, planner=holdfast.DefaultSavePlanner(**options))


def load(rank: FakeRank, state: dict[str, Any], folder: Path, **options: Any) -> None:
    rank.load(state, checkpoint_id=folder, planner=holdfast.DefaultLoadPlanner(**options))


class Loader:
    """A Stateful data loader that knows how far it has come."""

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self.seen = torch.full((3,), position)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.seen = state["position"], state["seen"].clone()


class KeepsOwn:
    """A Stateful object in whose state something is each rank's own."""

    def __init__(self, number: int) -> None:
        self.number, self.shared = number, 0

    def state_dict(self) -> dict[str, Any]:
        return {"own": PerRank(self.number), "shared": self.shared}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number, self.shared = state["own"].value, state["shared"]


def torch_state(rank: int) -> torch.Tensor:
    return torch.Generator().manual_seed(rank).get_state()


def a_state(rank: FakeRank, number: int) -> dict[Any, Any]:
    """Values of every kind under PerRank, and others beside them; ``number`` is what tells ranks apart."""
    return {
        "weight": rank.distribute(torch.arange(12.0), rank.mesh(), [Shard(0)]),
        "rng": PerRank(torch_state(number)),
        "python": PerRank(random.Random(number).getstate()),
        "data": {
            "loader": PerRank({"at": number, "seen": [torch.tensor([number]), {"deep": b"x" * number}]}),
            "epoch": 3,
        },
        "stateful": PerRank(Loader(number)),
        "list": [PerRank(number), torch.ones(2)],
        ("key", 1): OrderedDict(own=PerRank(None if number == 0 else {"a": number}), other="y"),
        "nothing": PerRank({}),
    }


def blank(rank: FakeRank) -> dict[Any, Any]:
    state = a_state(rank, rank.rank)
    state["weight"] = rank.distribute(torch.zeros(12), rank.mesh(), [Shard(0)])
    state["rng"] = PerRank(torch.zeros_like(torch_state(0)))
    state["python"] = PerRank(None)
    state["data"] = {
        "loader": PerRank({"at": -1, "seen": [torch.zeros(1, dtype=torch.int64), {"deep": b""}]}),
        "epoch": 0,
    }
    state["stateful"] = PerRank(Loader())
    state["list"] = [PerRank(None), torch.zeros(2)]
    return state


def assert_is_of(number: int, state: dict[Any, Any]) -> None:
    assert torch.equal(state["rng"].value, torch_state(number))
    assert state["python"].value == random.Random(number).getstate()
    assert state["data"]["loader"].value["at"] == number
    assert state["data"]["loader"].value["seen"][0].item() == number
    assert state["data"]["loader"].value["seen"][1] == {"deep": b"x" * number}
    assert state["data"]["epoch"] == 3
    assert state["stateful"].value.position == number
    assert state["stateful"].value.seen.tolist() == [number] * 3
    assert state["list"][0].value == number
    assert state["list"][1].tolist() == [1, 1]
    assert state["key", 1]["other"] == "y"
    assert state["nothing"].value == {}


def test_each_rank_gets_its_own_value_back(tmp_path: Path) -> None:
    def resume(rank: FakeRank) -> None:
        state = blank(rank)
        rng, loader, data = state["rng"].value, state["stateful"].value, state["data"]["loader"].value
        load(rank, state, tmp_path)
        assert_is_of(rank.rank, state)
        assert state["key", 1]["own"].value == (None if rank.rank == 0 else {"a": rank.rank})
        assert state["weight"].to_local().tolist() == list(range(rank.rank * 4, rank.rank * 4 + 4))
        # What could be filled where it was, was.
        assert torch.equal(rng, torch_state(rank.rank))
        assert loader.position == rank.rank
        assert data["at"] == rank.rank

    FakeRanks(3).run(lambda rank: save(rank, a_state(rank, rank.rank), tmp_path))
    FakeRanks(3).run(resume)


def test_saving_changes_nothing_in_the_state(tmp_path: Path) -> None:
    def check(rank: FakeRank) -> None:
        state = a_state(rank, rank.rank)
        places = state["rng"], state["data"], state["data"]["loader"], state["list"][0]
        save(rank, state, tmp_path)
        assert_is_of(rank.rank, state)
        now = state["rng"], state["data"], state["data"]["loader"], state["list"][0]
        assert all(a is b for a, b in zip(places, now, strict=True))

    FakeRanks(2).run(check)


def test_a_stateful_object_may_keep_something_for_each_rank(tmp_path: Path) -> None:
    def read(rank: FakeRank) -> int:
        state = {"it": KeepsOwn(0)}
        load(rank, state, tmp_path)
        return state["it"].number

    FakeRanks(2).run(lambda rank: save(rank, {"it": KeepsOwn(rank.rank + 5)}, tmp_path))
    assert FakeRanks(2).run(read) == [5, 6]


def test_another_number_of_ranks_without_a_rule_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    def resume(rank: FakeRank) -> str:
        state = {"rng": PerRank(torch.zeros(2)), "at": PerRank(-1), "step": 0}
        with pytest.raises(PlanError) as caught:
            load(rank, state, tmp_path)
        assert state["rng"].value.tolist() == [0, 0]  # type: ignore[attr-defined]
        assert state["at"].value == -1  # type: ignore[attr-defined]
        assert state["step"] == 0
        return str(caught.value)

    def write(rank: FakeRank) -> None:
        save(rank, {"rng": PerRank(torch.ones(2)), "at": PerRank(rank.rank), "step": 5}, tmp_path)

    FakeRanks(3).run(write)
    for world_size in (1, 2, 4):
        for message in FakeRanks(world_size).run(resume):
            assert f"rng: 3 ranks saved a value each, and now there are {world_size}" in message
            assert f"at: 3 ranks saved a value each, and now there are {world_size}" in message
            assert "resize=" in message


def spread(values: list[int], rank: int, world_size: int) -> int:
    assert values == [0, 10, 20]
    return sum(values) * 100 + rank * 10 + world_size


def test_a_rule_makes_the_values_of_another_number_of_ranks(tmp_path: Path) -> None:
    def write(rank: FakeRank) -> None:
        state = {
            "at": PerRank(rank.rank * 10),
            "seen": PerRank({"last": torch.tensor([rank.rank]), "of": [1, {"k": rank.rank}], "none": {}}),
            "loader": PerRank(Loader(rank.rank)),
        }
        save(rank, state, tmp_path)

    def resume(rank: FakeRank) -> int:
        def last(values: list[Any], _rank: int, _world_size: int) -> Any:
            assert [value["last"].item() for value in values] == [0, 1, 2]
            assert [value["of"] for value in values] == [[1, {"k": 0}], [1, {"k": 1}], [1, {"k": 2}]]
            assert [value["none"] for value in values] == [{}] * 3
            return values[-1]

        def sum_up(values: list[Any], _rank: int, _world_size: int) -> Any:
            return {**values[0], "position": sum(value["position"] for value in values)}

        memory, loader = torch.zeros(1, dtype=torch.int64), Loader(7)
        state: dict[str, Any] = {
            "at": PerRank(0, resize=spread),
            "seen": PerRank({"last": memory, "of": None, "none": None}, resize=last),
            "loader": PerRank(loader, resize=sum_up),
        }
        load(rank, state, tmp_path)
        assert memory.item() == 2
        assert state["seen"].value == {"last": memory, "of": [1, {"k": 2}], "none": {}}
        assert state["loader"].value is loader
        assert loader.position == 3
        at: int = state["at"].value
        return at

    FakeRanks(3).run(write)
    assert FakeRanks(2).run(resume) == [3002, 3012]
    assert FakeRanks(1).run(resume) == [3001]
    assert FakeRanks(4).run(resume) == [3004, 3014, 3024, 3034]


def test_a_rule_is_not_asked_for_the_number_of_ranks_that_saved(tmp_path: Path) -> None:
    def never(values: list[int], rank: int, world_size: int) -> int:
        raise AssertionError

    def resume(rank: FakeRank) -> int:
        state = {"at": PerRank(0, resize=never)}
        load(rank, state, tmp_path)
        return state["at"].value

    FakeRanks(2).run(lambda rank: save(rank, {"at": PerRank(rank.rank)}, tmp_path))
    assert FakeRanks(2).run(resume) == [0, 1]


@pytest.mark.parametrize(
    ("made", "error"),
    [
        (torch.zeros(3), ShapeMismatchError),
        (torch.zeros(2, dtype=torch.int64), DtypeMismatchError),
        ([0, 0], PlanError),
    ],
)
def test_a_rule_must_return_what_fits_the_tensor(tmp_path: Path, made: Any, error: type[PlanError]) -> None:
    FakeRanks(2).run(lambda rank: save(rank, {"at": PerRank(torch.ones(2))}, tmp_path))
    state = {"at": PerRank(torch.zeros(2), resize=lambda *_: made)}
    with pytest.raises(error, match="at: the rule of this PerRank returned"):
        FakeRanks(1).run(lambda rank: load(rank, state, tmp_path))


def test_every_rank_gets_a_value_that_was_saved_for_all(tmp_path: Path) -> None:
    saved = {"a": 5, "b": {"c": torch.ones(1), "d": 5}, "l": [1, torch.ones(2)], "it": Loader(7), "n": 5}

    def resume(rank: FakeRank) -> None:
        memory, loader = torch.zeros(1), Loader()
        state: dict[str, Any] = {
            "a": PerRank(0),
            "b": PerRank({"c": memory, "d": 0}),
            "l": [PerRank(0), torch.zeros(2)],
            "it": PerRank(loader),
            "n": 0,
        }
        load(rank, state, tmp_path)
        assert state["a"].value == state["n"] == 5
        assert state["b"].value == {"c": memory, "d": 5}
        assert memory.item() == 1
        assert state["l"][0].value == 1
        assert state["l"][1].tolist() == [1, 1]
        assert state["it"].value is loader
        assert loader.position == 7

    FakeRanks(2).run(lambda rank: save(rank, saved, tmp_path))
    for world_size in (1, 2, 3):
        FakeRanks(world_size).run(resume)


def test_a_per_rank_around_values_of_ranks_is_refused(tmp_path: Path) -> None:
    FakeRanks(2).run(lambda rank: save(rank, {"a": {"b": PerRank(rank.rank)}}, tmp_path))
    with pytest.raises(PlanError, match=r"a\.b: each of 2 ranks saved its own value here"):
        FakeRanks(2).run(lambda rank: load(rank, {"a": PerRank({"b": 0})}, tmp_path))


@pytest.mark.parametrize("there", [0, torch.zeros(1), {"c": 1}, [1]])
def test_values_of_ranks_are_not_loaded_into_anything_else(tmp_path: Path, there: Any) -> None:
    FakeRanks(2).run(lambda rank: save(rank, {"a": {"b": PerRank(rank.rank)}, "c": 1}, tmp_path))
    with pytest.raises(PlanError, match=r"a\.b: each of 2 ranks saved its own value here"):
        load_alone({"a": {"b": there}}, tmp_path, allow_partial_load=True)


def load_alone(state: dict[str, Any], folder: Path, **options: Any) -> None:
    FakeRanks(1).run(lambda rank: load(rank, state, folder, **options))


def test_a_missing_value_is_reported_or_left_alone_as_any_other(tmp_path: Path) -> None:
    FakeRanks(1).run(lambda rank: save(rank, {"c": 1}, tmp_path))
    state = {"at": PerRank(7), "c": 0}
    with pytest.raises(CheckpointException, match=r"at\.@rank-0-of-1: Missing key"):
        load_alone(state, tmp_path)
    load_alone(state, tmp_path, allow_partial_load=True)
    assert state["at"].value == 7  # type: ignore[attr-defined]
    assert state["c"] == 1


def test_a_rule_needs_the_values_of_all_ranks_that_saved(tmp_path: Path) -> None:
    def write(rank: FakeRank) -> None:
        save(rank, {"at": PerRank(rank.rank)} if rank.rank != 1 else {"c": 1}, tmp_path)

    FakeRanks(3).run(write)
    with pytest.raises(PlanError, match="only 2 of them: that of rank 1 is not there"):
        load_alone({"at": PerRank(0, resize=lambda *_: 0)}, tmp_path)


def test_checkpoints_of_ranks_show_their_values_as_a_dict(tmp_path: Path) -> None:
    FakeRanks(11).run(lambda rank: save(rank, {"a": {"at": PerRank(rank.rank), "c": 1}}, tmp_path))
    metadata = holdfast.FileSystemReader(tmp_path).read_metadata()
    names = [f"a.at.@rank-{rank:02}-of-11" for rank in range(11)]
    assert sorted(metadata.state_dict_metadata) == [*names, "a.c"]
    state: dict[str, Any] = {}
    holdfast.load(
        state,
        checkpoint_id=tmp_path,
        planner=holdfast.default_planner.EmptyStateDictLoadPlanner(),
    )
    assert state["a"]["at"] == {rank_name(rank, 11): rank for rank in range(11)}
    some = {"a": {"at": {rank_name(4, 11): None}}}
    load_alone(some, tmp_path)
    assert some == {"a": {"at": {"@rank-04-of-11": 4}}}


def test_stock_torch_loads_the_values_of_all_ranks(tmp_path: Path) -> None:
    FakeRanks(2).run(lambda rank: save(rank, {"at": PerRank(torch.tensor([rank.rank]))}, tmp_path))
    state = {"at": {rank_name(rank, 2): torch.zeros(1, dtype=torch.int64) for rank in range(2)}}
    stock_load(state, checkpoint_id=tmp_path)
    assert [value.item() for value in state["at"].values()] == [0, 1]


def test_values_of_other_ranks_are_not_called_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FakeRanks(2).run(lambda rank: save(rank, {"a": {"at": PerRank(rank.rank), "b": 1}}, tmp_path))
    with caplog.at_level(logging.WARNING):
        FakeRanks(2).run(lambda rank: load(rank, {"a": {"at": PerRank(0), "b": 0}}, tmp_path))
        FakeRanks(2).run(lambda rank: load(rank, {"a": {"at": PerRank(0), "b": 0}}, tmp_path, strict=True))
    assert caplog.records == []
    with pytest.raises(CheckpointException, match=r"a\.b: is in the checkpoint, but not in the state"):
        FakeRanks(2).run(lambda rank: load(rank, {"a": {"at": PerRank(0)}}, tmp_path, strict=True))


def test_where_a_per_rank_cannot_stand_it_is_refused(tmp_path: Path) -> None:
    def attempt(state: dict[str, Any], **options: Any) -> None:
        FakeRanks(1).run(lambda rank: save(rank, state, tmp_path, **options))

    with pytest.raises(UsageError, match=r"a PerRank stands in a PerRank, at a\.b"):
        attempt({"a": PerRank({"b": PerRank(1)})})
    with pytest.raises(UsageError, match="a: a PerRank needs a planner that flattens"):
        attempt({"a": PerRank(1)}, flatten_state_dict=False)
    with pytest.raises(CheckpointException, match="a PerRank can only stand in the dicts and lists"):
        attempt({"a": (PerRank(1),)})
    endless: dict[str, Any] = {"a": PerRank(1)}
    endless["b"] = endless
    with pytest.raises(UsageError, match="contains itself"):
        attempt(endless)
    assert not (tmp_path / ".metadata").exists()


def first_of(values: list[list[int]], rank: int, world_size: int) -> list[int]:
    return values[0]


def test_copies_of_a_state_have_per_ranks_of_their_own() -> None:
    state = {"a": PerRank([1], resize=first_of)}
    deep = copy.deepcopy(state)
    deep["a"].value.append(2)
    assert state["a"].value == [1]
    assert deep["a"].resize is first_of
    assert copy.copy(state["a"]).value is state["a"].value


@pytest.mark.parametrize(
    "key", ["a", "@rank-0", "a.@rank-2-of-2", "a.@rank-0-of-11", "a.@rank-0-of-2x", "a.x@rank-0-of-2"]
)
def test_other_keys_are_not_taken_for_those_of_ranks(key: str) -> None:
    assert rank_key(key) is None
    assert rank_key(f"{key}.{rank_name(1, 2)}.b") == (key, 1, 2)


def save_own(folder: str, **options: Any) -> None:
    torch.manual_seed(dist.get_rank())
    state = {"rng": PerRank(torch.get_rng_state()), "at": PerRank(dist.get_rank())}
    holdfast.save(state, checkpoint_id=folder, **options)


def load_own(folder: str) -> tuple[float, int]:
    state: dict[str, Any] = {"rng": PerRank(torch.get_rng_state()), "at": PerRank(-1)}
    holdfast.load(state, checkpoint_id=folder)
    torch.set_rng_state(state["rng"].value)
    return torch.rand(1).item(), state["at"].value


def save_and_load_own(folder: str) -> list[tuple[float, int]]:
    save_own(folder)
    save_own(f"{folder}-apart", use_collectives=False)
    torch.manual_seed(1000)
    dist.barrier()
    return [load_own(folder), load_own(f"{folder}-apart")]


@pytest.mark.slow
def test_processes_go_on_with_their_own_random_numbers(tmp_path: Path) -> None:
    expected = [
        (torch.rand(1, generator=torch.Generator().manual_seed(rank)).item(), rank) for rank in range(2)
    ]
    assert run_ranks(save_and_load_own, 2, str(tmp_path / "c")) == [
        ("returned", [each] * 2) for each in expected
    ]

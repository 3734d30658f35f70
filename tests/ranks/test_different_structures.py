"""Ranks that have a dict, a list or a value under one key: each gets its own back, or the save raises."""

import random
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.states import assert_same
from tests.support.stock_torch import stock_load
from torch.distributed.tensor import Shard

import holdfast
from holdfast import PerRank
from holdfast.default_planner import EmptyStateDictLoadPlanner
from holdfast.errors import MissingKeyError, PlanError, UsageError
from holdfast.state_dict_loader import _load_state_dict_from_keys
from holdfast.testing import FakeRank, FakeRanks

State = dict[Any, Any]


def blank(value: Any) -> Any:
    """A template: the same containers, other values."""
    if isinstance(value, dict):
        return type(value)((key, blank(entry)) for key, entry in value.items())
    if isinstance(value, list):
        return [blank(entry) for entry in value]
    return torch.full_like(value, 9) if isinstance(value, torch.Tensor) else "blank"


def save(states: list[State], folder: Path, **options: Any) -> list[str]:
    """Save a state for each rank; returns what was warned of."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        FakeRanks(len(states)).run(
            lambda rank: rank.save(
                states[rank.rank], checkpoint_id=folder, planner=holdfast.DefaultSavePlanner(**options)
            )
        )
    return [str(warning.message) for warning in seen]


def load(templates: list[State], folder: Path) -> list[State]:
    """Load into a template for each rank."""

    def work(rank: FakeRank) -> State:
        rank.load(templates[rank.rank], checkpoint_id=folder)
        return templates[rank.rank]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FakeRanks(len(templates)).run(work)


T = torch.tensor
CASES: dict[str, tuple[Any, ...]] = {
    "a dict and None": ({"a": 1}, None),
    "None and a dict": (None, {"a": 1, "b": {"c": T([1.0])}}),
    "a dict and a tensor": ({"a": 1}, T([1.0, 2.0])),
    "a list of tensors and a tensor": ([T([1.0]), T([2.0])], T([3.0])),
    "a tensor and a list of tensors": (T([3.0]), [T([1.0]), T([2.0])]),
    "a list and a dict": ([T([1.0]), {"a": 5}], {"a": 1, "0": T([3.0])}),
    "a dict and a list": ({"a": 1}, [T([1.0])]),
    "an empty dict and None": ({}, None),
    "None and an empty dict": (None, {}),
    "an empty dict and a full one": ({}, {"a": 1}),
    "a full dict and an empty one": ({"a": 1}, {}),
    "an empty list and an empty dict": ([], {}),
    "an ordered dict and a number": (5, OrderedDict(z=1, a=OrderedDict())),
    "keys that are not strings": (5, {1: {("a", 2): T([1])}, None: {}}),
    "three kinds": (5, {"a": {"b": 1}}, {"a": 7, "c": []}),
    "the same dict on two of three": (None, {"a": 1}, {"a": 1}),
    "different dicts on two of three": ({"a": T([1])}, 3, {"a": T([2])}),
    "a value below a list on one rank, below dicts on others": ({"x": 1}, [T([7])], {"0": 8}),
}


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
@pytest.mark.parametrize("depth", [0, 1])
def test_each_rank_gets_its_own_structure_back(tmp_path: Path, values: tuple[Any, ...], depth: int) -> None:
    states: list[State] = [
        {"same": 5, "extra": value} if not depth else {"in": {"same": 5, "extra": value}} for value in values
    ]
    said = save(states, tmp_path)
    key = "in.extra" if depth else "extra"
    if not all(isinstance(value, dict) for value in values):
        assert len(said) == 1
        assert f"{key}" in said[0]
    for found, expected in zip(load([blank(state) for state in states], tmp_path), states, strict=True):
        assert_same(found, expected)
    # On another number of ranks, and with stock torch, the state of the coordinator.
    (found,) = load([blank(states[0])], tmp_path)
    assert_same(found, states[0])
    stock = blank(states[0])
    stock_load(stock, checkpoint_id=tmp_path)
    assert_same(stock, states[0])


def test_a_load_without_a_template_builds_what_each_rank_had(tmp_path: Path) -> None:
    states: list[State] = [{"s": 1, "x": [T([1.0]), {"a": 5}]}, {"s": 1, "x": {"b": {}}}, {"s": 1, "x": 4}]
    save(states, tmp_path)

    def build(rank: FakeRank) -> State:
        built: State = {}
        rank.load(built, checkpoint_id=tmp_path, planner=EmptyStateDictLoadPlanner())
        return built

    for found, expected in zip(FakeRanks(3).run(build), states, strict=True):
        assert_same(found, expected)
    with pytest.warns(UserWarning, match=r"x\.0"):
        (found,) = FakeRanks(1).run(build)
    assert_same(found, states[0])


def test_a_kept_container_leaves_the_plain_keys_below_it_to_other_ranks(tmp_path: Path) -> None:
    save([{"x": {"a": 1}}, {"x": [T([7])]}, {"x": {"0": T([8])}}], tmp_path)
    keys = holdfast.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert set(keys) == {"x.a", "x.0", "@kept-for-rank-1-of-3.x.0"}
    (found,) = load([{"x": {"a": 0, "0": T([0])}}], tmp_path)
    assert found == {"x": {"a": 1, "0": T([8])}}


def test_what_cannot_be_kept_is_refused_by_key_and_rank(tmp_path: Path) -> None:
    large = torch.zeros(1 << 17)

    def sharded(rank: FakeRank) -> Any:
        weight = rank.distribute(torch.ones(4), rank.mesh(), [Shard(0)])
        return {"w": weight} if rank.rank else None

    def both_sharded(rank: FakeRank) -> Any:
        weight = rank.distribute(torch.ones(4), rank.mesh(), [Shard(0)])
        return {"w": weight} if rank.rank else weight

    cases: list[tuple[Callable[[FakeRank], Any], dict[str, Any], str]] = [
        (lambda rank: {"w": large} if rank.rank else None, {}, "ranks 0 and 1 have different"),
        (sharded, {}, "ranks 0 and 1 have different"),
        (lambda rank: PerRank(5) if rank.rank else 5, {}, "ranks 0 and 1 have different"),
        (lambda rank: {"w": 1} if rank.rank else None, {"check_replicas": "raise"}, "ranks 0 and 1 have"),
        (both_sharded, {}, "rank 0 has a value and rank 1 has a dict here"),
        (
            lambda rank: {"w": 1} if rank.rank else None,
            {"check_replicas": False},
            "rank 0 has a value and rank 1 has",
        ),
    ]
    for value, options, message in cases:

        def work(rank: FakeRank, value: Any = value, options: Any = options) -> None:
            planner = holdfast.DefaultSavePlanner(**options)
            rank.save({"a": {"extra": value(rank)}, "z": 1}, checkpoint_id=tmp_path, planner=planner)

        for error in FakeRanks(2).attempt(work):
            assert isinstance(error, PlanError)
            assert f"a.extra: {message}" in str(error)
            assert "PerRank(value)" in str(error)
    assert not (tmp_path / ".metadata").exists()


def test_saves_with_cached_plans_keep_structures_that_differ(tmp_path: Path) -> None:
    planners = [holdfast.DefaultSavePlanner(enable_plan_caching=True) for _ in range(2)]
    for number, differ in enumerate((True, True, False, True)):
        states: list[State] = [{"x": None, "n": number}, {"x": {"a": 1} if differ else None, "n": number}]

        def work(rank: FakeRank, states: Any = states, number: int = number) -> None:
            folder = tmp_path / str(number)
            rank.save(states[rank.rank], checkpoint_id=folder, planner=planners[rank.rank])

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            FakeRanks(2).run(work)
        assert load([blank(state) for state in states], tmp_path / str(number)) == states


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    ("saved", "template", "message"),
    [
        ({"x": {"a": 1}}, {"x": 5}, "x: Missing key in checkpoint: it has a dict here, the state a value"),
        ({"x": {}}, {"x": 5}, "x: Missing key in checkpoint: it has a dict here, the state a value"),
        ({"x": [T([1])]}, {"x": None}, "x: Missing key in checkpoint: it has a list here"),
        ({"x": [T([1])]}, {"x": []}, "x: Missing .*: it has a list with tensors .* the state a list without"),
        ({"x": 5}, {"x": {"a": 1}}, r"x\.a: Missing key in checkpoint: it has a value at x, .* a dict"),
        ({"x": 5}, {"x": [T([1])]}, r"x\.0: Missing key in checkpoint: it has a value at x, .* a list"),
        ({"x": 5}, {"x": {}}, "x: the checkpoint has a value here, the state an empty container"),
        ({"d": {"x": T([1])}}, {"d": {"x": {}}}, "x: the checkpoint has a value here"),
    ],
)
def test_a_container_in_the_place_of_a_value_is_reported(
    tmp_path: Path, saved: State, template: State, message: str, partial: bool
) -> None:
    holdfast.save({**saved, "same": 1}, checkpoint_id=tmp_path)
    before = repr(template)
    with pytest.raises(PlanError, match=message) as caught:
        holdfast.load({**template, "same": 0}, checkpoint_id=tmp_path, allow_partial_load=partial)
    assert isinstance(caught.value, MissingKeyError) == ("Missing" in message)
    assert repr(template) == before


def test_a_layer_that_was_replaced_by_a_parameter_may_be_left_out(tmp_path: Path) -> None:
    """The names of a model's state dict have dots, but there is no container between them."""
    holdfast.save({"model": {"layer.weight": T([1]), "other": T([2])}}, checkpoint_id=tmp_path)
    state = {"model": {"layer": T([5]), "other": T([0])}}
    holdfast.load(state, checkpoint_id=tmp_path, allow_partial_load=True)
    assert state == {"model": {"layer": T([5]), "other": T([2])}}


def random_value(source: random.Random, depth: int) -> Any:
    kind = source.randrange(10 if depth < 3 else 6)
    if kind < 2:
        return source.choice([None, 0, 1, "a", True, 0.5, (1, 2), [], [1, 2], b"x"])
    if kind < 4:
        return torch.full(
            (source.randrange(3),), source.randrange(3), dtype=source.choice([torch.int8, torch.float32])
        )
    if kind < 6:
        return source.choice([5, {}, OrderedDict()])
    if kind < 9:
        keys = source.sample(["a", "b", 1, "0", "a.b", None], source.randrange(4))
        return {key: random_value(source, depth + 1) for key in keys}
    return [random_value(source, depth + 1) for _ in range(source.randrange(3))]


def changed(value: Any, source: random.Random, depth: int = 0) -> Any:
    """A value that is like another in most places."""
    if depth and source.random() < 0.15:
        return random_value(source, depth)
    if isinstance(value, dict):
        entries = ((key, changed(entry, source, depth + 1)) for key, entry in value.items())
        return type(value)(entries)
    if isinstance(value, list):
        return [changed(entry, source, depth + 1) for entry in value]
    return value


@pytest.mark.parametrize("seed", range(12))
def test_random_states_come_back_on_every_rank(tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    for number in range(3):
        common = {key: random_value(source, 1) for key in ("a", "b", "c")}
        states = [changed(common, source) for _ in range(source.choice([2, 3]))]
        folder = tmp_path / str(number)
        try:
            save(states, folder)
        except UsageError:
            continue  # {"a.b": 1, "a": {"b": 2}}: two values would have one name
        for found, expected in zip(load([blank(state) for state in states], folder), states, strict=True):
            assert_same(found, expected)
        assert_same(load([blank(states[0])], folder), states[:1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _load_state_dict_from_keys(checkpoint_id=folder)

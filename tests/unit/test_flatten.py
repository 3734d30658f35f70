"""Nested states come back as they were: keys of every type, empty containers, and what is refused."""

import collections
import enum
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast._plan.flatten import flatten, unflatten
from holdfast.errors import CheckpointException, PlanError, UsageError
from holdfast.state_dict_loader import _load_state_dict_from_keys


def save(state: dict[Any, Any], folder: Path) -> None:
    hf.save(state, storage_writer=hf.FileSystemWriter(folder, sync_files=False))


def load_all(folder: Path, keys: set[str] | str | None = None) -> dict[Any, Any]:
    return _load_state_dict_from_keys(keys, checkpoint_id=folder)


def described(value: Any) -> Any:
    """A value with the types of all keys and containers written out, for exact comparison."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, value.tolist())
    if isinstance(value, dict):
        entries = [(type(key).__name__, repr(key), described(entry)) for key, entry in value.items()]
        return (
            type(value).__name__,
            entries if isinstance(value, collections.OrderedDict) else sorted(entries),
        )
    if isinstance(value, list | tuple):
        return (type(value).__name__, [described(entry) for entry in value])
    return (type(value).__name__, repr(value))


KEYS: list[Any] = [
    0,
    -5,
    2**80,
    True,
    None,
    1.5,
    float("inf"),
    b"raw",
    (1, "a"),
    (),
    ((None, 2.5), (True,)),
    "",
    "with space",
    "with.dot",
    "1",
    "None",
    "grüße",
]


@pytest.mark.parametrize("key", KEYS, ids=repr)
@pytest.mark.parametrize("value", [torch.arange(3.0), 7, {}, [], {"deep": torch.ones(1)}], ids=str)
def test_a_key_of_any_type_comes_back_at_any_depth(tmp_path: Path, key: Any, value: Any) -> None:
    state = {"outer": {key: value, "x": 1}, "other": 2}
    save(state, tmp_path)
    assert described(load_all(tmp_path)) == described(state)


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_values_under_keys_of_any_type_are_restored_in_place(tmp_path: Path, key: Any) -> None:
    save({key: torch.arange(3.0), "inner": {key: 5}}, tmp_path)
    tensor, inner = torch.zeros(3), {key: 0}
    state: dict[Any, Any] = {key: tensor, "inner": inner}
    hf.load(state, checkpoint_id=tmp_path)
    assert torch.equal(tensor, torch.arange(3.0))
    assert inner == {key: 5}
    assert [type(k) for k in inner] == [type(key)]
    assert len(state) == 2


STATES: dict[str, dict[Any, Any]] = {
    "empty containers": {"a": {}, "b": [], "c": {"d": {}}, "e": [{}, [], {"f": []}], "g": ()},
    "lists": {"l": [torch.ones(1), [torch.zeros(1), {"x": [1, 2]}], "t", None]},
    "plain lists": {"l": [1, [2, [3]], "x"], "n": [None, None]},
    "ordered": {"o": collections.OrderedDict([("b", 1), ("a", torch.ones(1))])},
    "ordered in a list": {"l": [collections.OrderedDict(x=torch.ones(1)), collections.OrderedDict()]},
    "nothing but objects": {"a": 1, "b": {"c": None}},
    "optimizer": {
        "state": {0: {"step": 7, "m": torch.ones(2)}, 1: {}},
        "groups": [{"lr": 0.1, "params": [0, 1]}],
    },
    "dotted": {"a.b": {"c": 1}, "a": {"b.d": 2}},
}


@pytest.mark.parametrize("name", STATES)
def test_the_nested_structure_is_rebuilt_without_a_template(tmp_path: Path, name: str) -> None:
    save(STATES[name], tmp_path)
    assert described(load_all(tmp_path)) == described(STATES[name])


def test_empty_containers_alone_are_rebuilt(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": {}, "b": {"c": {}}}
    save(state, tmp_path)
    assert load_all(tmp_path) == state


def test_an_empty_container_keeps_its_place_in_an_ordered_dict(tmp_path: Path) -> None:
    state = {"o": collections.OrderedDict([("first", {}), ("second", 1)])}
    save(state, tmp_path)
    assert described(load_all(tmp_path)) == described(state)


def test_empty_containers_beside_each_other_keep_their_order(tmp_path: Path) -> None:
    state: dict[str, Any] = {"z": {}, "a": {}, "m": {"y": {}, "b": {}, "x": 1}, "q": {}, "p": {"k": {}}}
    save(state, tmp_path)
    loaded = load_all(tmp_path)
    assert (list(loaded), list(loaded["m"])) == (list(state), list(state["m"]))


@pytest.mark.parametrize(
    "state",
    [
        {"d": {1: {"a": 1}, "1": {"b": 2}}},
        {"d": {1: {}, "1": {}}},
        {"d": {None: {"a": 1}, "None": {"b": 2}}},
        {"d": {1.0: {"x": {"a": 1}}, "1.0": {"x": {"b": 2}}}},
    ],
    ids=repr,
)
def test_keys_that_look_alike_as_text_are_kept_apart_or_refused(
    tmp_path: Path, state: dict[str, Any]
) -> None:
    try:
        save(state, tmp_path)
    except UsageError:
        return
    assert described(load_all(tmp_path)) == described(state)


def nested() -> dict[str, Any]:
    return {
        "model": {"layer.weight": torch.ones(2), "bias": torch.zeros(1), "sizes": {3: 4}},
        "model2": {"x": 1},
        "list": [torch.ones(1), {"deep": 5}],
        "step": 9,
    }


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("model", {"model": nested()["model"]}),
        ("step", {"step": 9}),
        ({"model.sizes", "step"}, {"model": {"sizes": {3: 4}}, "step": 9}),
        ("model.layer.weight", {"model": {"layer.weight": torch.ones(2)}}),
        ("list.0", {"list": [torch.ones(1)]}),
        ({"list", "model2.x"}, {"list": nested()["list"], "model2": {"x": 1}}),
        (None, nested()),
        (set(), nested()),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_only_what_is_below_the_named_keys_is_loaded(
    tmp_path: Path, keys: Any, expected: dict[str, Any]
) -> None:
    save(nested(), tmp_path)
    assert described(load_all(tmp_path, keys)) == described(expected)


def test_the_kinds_of_containers_below_a_named_key_are_kept(tmp_path: Path) -> None:
    state = {"model": collections.OrderedDict([("b", torch.ones(1)), ("a", {})]), "step": 9}
    save(state, tmp_path)
    loaded = load_all(tmp_path, "model")
    assert type(loaded["model"]) is collections.OrderedDict
    assert loaded["model"]["a"] == {}


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": 1}, "a.b": 2},
        {"a": {"b": {"c": torch.ones(1)}}, "a.b": {"c": torch.ones(1)}},
        {1: 1, "1": 2},
        {"l": [torch.ones(1)], "l.0": 3},
        {None: 1, "None": 2},
    ],
    ids=repr,
)
def test_two_values_with_one_flat_name_are_refused_with_both_places(
    tmp_path: Path, state: dict[Any, Any]
) -> None:
    with pytest.raises(UsageError, match="two values would both be called") as caught:
        save(state, tmp_path)
    assert isinstance(caught.value, ValueError)
    assert not (tmp_path / ".metadata").exists()


class Wrapped(torch.Tensor):
    """A tensor subclass with behaviour of its own."""


def unsavable() -> Iterator[tuple[str, Any]]:
    yield "lambda", lambda: None
    yield "generator", (number for number in range(3))
    yield "meta tensor", torch.empty(3, device="meta")
    yield "tensor subclass", torch.ones(2).as_subclass(Wrapped)
    yield "tensor of a dtype that torch cannot load", torch.empty(3, dtype=getattr(torch, "uint4"))  # noqa: B009 - unknown to mypy
    yield "module object", types
    yield "lambda in a tuple", (1, lambda: None)
    yield "lambda in a list", [1, lambda: None]


@pytest.mark.parametrize(("name", "value"), list(unsavable()), ids=[name for name, _ in unsavable()])
def test_what_cannot_be_saved_exactly_is_refused_with_its_key(tmp_path: Path, name: str, value: Any) -> None:
    old = {"fine": torch.ones(1)}
    save(old, tmp_path)
    with pytest.raises(PlanError, match=r"part\.value") as caught:
        save({"fine": torch.zeros(1), "part": {"value": value}}, tmp_path)
    assert caught.value.key == "part.value"
    kept = {"fine": torch.zeros(1)}
    hf.load(kept, checkpoint_id=tmp_path)
    assert kept["fine"] == 1


def test_an_open_file_is_refused_with_its_key(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file, pytest.raises(PlanError, match="log file") as caught:
        save({"log file": file}, tmp_path / "checkpoint")
    assert caught.value.key == "log file"


def test_a_class_that_loading_needs_is_named_when_an_object_with_tensors_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save({"value": (torch.ones(2).as_subclass(Wrapped), 1)}, tmp_path)
    assert "Wrapped" in caplog.text


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    first: int
    second: int


@pytest.mark.parametrize("key", [Colour.RED, frozenset({1}), 1j, Pair(1, 2), torch.Size([1])], ids=repr)
def test_a_key_whose_type_cannot_be_kept_is_refused(tmp_path: Path, key: Any) -> None:
    with pytest.raises(PlanError, match="cannot be kept exactly") as caught:
        save({"a": {key: 1}}, tmp_path)
    assert caught.value.key == f"a.{key}"
    assert os.listdir(tmp_path) == []  # refused before anything is written


@pytest.mark.parametrize(
    "state", [{"a": {"\udc80": {}}}, {"a": {"\udc80": [1]}}, {("\udc80",): 1}], ids=ascii
)
def test_a_name_that_is_no_text_is_refused_before_anything_is_written(
    tmp_path: Path, state: dict[Any, Any]
) -> None:
    with pytest.raises(CheckpointException, match=r"udc80.* half of a character"):
        save(state, tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_state_that_contains_itself_is_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": 1}
    state["self"] = {"again": state}
    with pytest.raises(UsageError, match="contains itself"):
        save(state, tmp_path)


def test_values_in_other_mappings_are_restored_in_place(tmp_path: Path) -> None:
    save({"counts": collections.Counter(a=2, b=1), "d": collections.defaultdict(list, x=[1])}, tmp_path)
    counts = collections.Counter(a=0, b=0)
    default: collections.defaultdict[str, list[int]] = collections.defaultdict(list, x=[])
    hf.load({"counts": counts, "d": default}, checkpoint_id=tmp_path)
    assert counts == {"a": 2, "b": 1}
    assert default == {"x": [1]}
    assert default.default_factory is list


def test_what_is_not_loaded_is_left_alone(tmp_path: Path) -> None:
    save({"a": 1}, tmp_path)
    extra = {"set": {1}, "array": object(), "complex": 2j, "t": torch.ones(1)}
    state = {"a": 0, **extra}
    hf.load(state, checkpoint_id=tmp_path, allow_partial_load=True)
    assert state == {"a": 1, **extra}
    with pytest.raises(PlanError):
        hf.load(state, checkpoint_id=tmp_path)
    assert state == {"a": 1, **extra}
    assert all(state[key] is value for key, value in extra.items())


def test_saving_does_not_change_the_state(tmp_path: Path) -> None:
    state = nested()
    before = described(state)
    containers = (state["model"], state["list"], state["list"][1])
    save(state, tmp_path)
    assert described(state) == before
    assert containers == (state["model"], state["list"], state["list"][1])


keys = st.one_of(
    st.text("ab.1", min_size=1, max_size=3),
    st.integers(-3, 3),
    st.booleans(),
    st.none(),
    st.tuples(st.integers(0, 2), st.text("x", max_size=1)),
    st.floats(allow_nan=False, width=16),
    st.binary(max_size=2),
)
leaves = st.one_of(
    st.integers(), st.text(max_size=3), st.none(), st.just(torch.tensor([1.0, 2.0])), st.tuples(st.integers())
)
nests = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(
            lambda d: collections.OrderedDict(sorted(d.items(), key=repr))
        ),
    ),
    max_leaves=12,
)


def looks_alike(value: Any) -> bool:
    """Whether two keys of one dict are the same as text, which has a test of its own."""
    if isinstance(value, dict):
        return len({str(key) for key in value}) < len(value) or any(map(looks_alike, value.values()))
    return isinstance(value, list) and any(map(looks_alike, value))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(keys, nests, max_size=4))
def test_flattening_and_unflattening_gives_the_same_state(state: dict[Any, Any]) -> None:
    if looks_alike(state):
        return
    try:
        flat, structure, _ = flatten(state, lambda value: isinstance(value, torch.Tensor))
    except UsageError:
        return
    assert described(unflatten(flat, structure, structure.containers)) == described(state)


def test_lists_with_nothing_but_tensors_that_are_stored_whole_are_rebuilt(tmp_path: Path) -> None:
    whole = torch.eye(3).to_sparse()
    save({"a": [whole, 5], "b": [[whole]]}, tmp_path)
    loaded = load_all(tmp_path)
    assert torch.equal(loaded["a"][0].to_dense(), torch.eye(3))
    assert loaded["a"][1:] == [5]
    assert torch.equal(loaded["b"][0][0].to_dense(), torch.eye(3))


def test_a_position_of_a_list_is_loaded_alone(tmp_path: Path) -> None:
    entries = [torch.ones(2), {"x": 1, "y": [torch.zeros(3), 7]}, torch.ones(1).to_sparse(), "plain"]
    save({"a": entries}, tmp_path)
    assert load_all(tmp_path, "a.1.x") == {"a": [None, {"x": 1}]}
    assert load_all(tmp_path, "a.1.y.1") == {"a": [None, {"y": [None, 7]}]}
    assert load_all(tmp_path, "a.3") == {"a": [None, None, None, "plain"]}
    assert described(load_all(tmp_path, "a.1")) == described({"a": [None, entries[1]]})

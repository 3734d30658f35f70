"""What is selected and renamed keeps its structure, or is refused by key before anything is written."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.convert.saved_states import same
from tests.support.stock_torch import IS_NEWEST, stock_save

import holdfast as dcp
from holdfast.default_planner import _EmptyStateDictLoadPlanner
from holdfast.errors import CheckpointError, CheckpointExistsError, InvalidPlanError, PlanError, UsageError

ONE, TWO = torch.arange(3.0), torch.arange(3.0) + 1
DEEP = {"deep": ONE, "step": 5}
DICT = OrderedDict({1: ONE, "b": TWO, "void": {}})
STATE: dict[Any, Any] = {"list": [ONE, TWO, DEEP], "dict": DICT, "void": {}, "step": 3}


def converted(folder: Path, state: dict[Any, Any], kind: str, **options: Any) -> dict[Any, Any]:
    """A state that was saved, converted, and loaded without being told what it holds."""
    torch.save(state, folder / "from.pt")
    if kind == "torch_save":
        dcp.convert(folder / "from.pt", folder / "to.pt", **options)
        loaded: dict[Any, Any] = torch.load(folder / "to.pt", weights_only=False)
        return loaded
    dcp.convert(folder / "from.pt", folder / "to", to="holdfast", **options)
    found: dict[Any, Any] = {}
    dcp.load(found, checkpoint_id=folder / "to", planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return found


@pytest.mark.parametrize("kind", ["torch_save", "holdfast"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"keys": "list.0"}, {"list": [ONE]}),
        ({"keys": "list.1"}, {"list": {1: TWO}}),
        ({"keys": "list.2.deep"}, {"list": {2: {"deep": ONE}}}),
        ({"keys": "list", "rename": {"list.1": "x"}}, {"list": {0: ONE, 2: DEEP}, "x": TWO}),
        ({"keys": "list", "rename": {"list.1": "list.x"}}, {"list": {0: ONE, "x": TWO, 2: DEEP}}),
        ({"keys": "list", "rename": {"list.2": "list.1.z"}}, {"list": {0: ONE, 1: TWO, "1.z": DEEP}}),
        # Empty and ordered dicts stay.
        ({"keys": "dict"}, {"dict": DICT}),
        ({"rename": {"step": "n"}}, {"list": [ONE, TWO, DEEP], "dict": DICT, "void": {}, "n": 3}),
        ({"rename": {"void": "gap"}}, {"list": [ONE, TWO, DEEP], "dict": DICT, "gap": {}, "step": 3}),
        ({"rename": {"void": ""}}, {"list": [ONE, TWO, DEEP], "dict": DICT, "step": 3}),
        ({"keys": "dict", "rename": lambda key: f"x.{key}"}, {"x": {"dict": DICT}}),
    ],
)
def test_structure_is_kept_and_lists_with_gaps_become_dicts(
    tmp_path: Path, kind: str, options: dict[str, Any], expected: dict[Any, Any]
) -> None:
    found = converted(tmp_path, STATE, kind, **options)
    assert same(found, expected), found


@pytest.mark.parametrize("kind", ["torch_save", "holdfast"])
def test_empty_containers_side_by_side_keep_their_order(tmp_path: Path, kind: str) -> None:
    full = OrderedDict({"x": {}, "y": OrderedDict(), "z": ONE})
    state: dict[Any, Any] = {
        "b": {},
        "a": OrderedDict(),
        3: {"n": {}, "m": {}},
        "full": full,
        "d": {},
        "c": {},
    }
    found = converted(tmp_path, state, kind)
    assert [list(found), list(found[3]), list(found["full"])] == [list(state), ["n", "m"], list(full)]


@pytest.mark.parametrize("kind", ["torch_save", "holdfast"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rename": {"step": "dict"}}, "dict would be the name of a value and of a container"),
        ({"rename": {"dict": "step"}}, "step would be the name of a value and of a container"),
        ({"rename": {"step": "void"}}, "void would be the name of a value and of a container"),
        ({"rename": {"dict": None}}, "dict: rename gives None"),
        ({"rename": {"step": "half\ud800"}}, "not valid text"),
        ({"keys": []}, "keys is empty"),
        ({"keys": 5}, "keys is a pattern"),
        ({"keys": [5]}, "keys is a pattern"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        converted(tmp_path, STATE, kind, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["from.pt"]


def test_places_without_a_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(STATE, tmp_path / "from.pt")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for source, target in (
        (tmp_path / "from.pt", ""),
        ("", "to"),
        (None, "to"),
        (tmp_path / "from.pt", None),
    ):
        with pytest.raises(UsageError, match="is a path or a URL"):
            dcp.convert(source, target, to="holdfast")  # type: ignore[arg-type]
    assert not list((tmp_path / "empty").iterdir())


def test_names_that_checkpoints_keep_for_themselves(tmp_path: Path) -> None:
    """A file of strangers may have them. They are copied, or refused by key, but not left out."""
    name = "@kept-for-rank-1-of-4.loss"
    torch.save({name: ONE, "x": TWO}, tmp_path / "from.pt")
    dcp.convert(tmp_path / "from.pt", tmp_path / "to.pt")
    assert same(torch.load(tmp_path / "to.pt"), {name: ONE, "x": TWO})
    with pytest.raises(UsageError, match=name):
        dcp.convert(tmp_path / "from.pt", tmp_path / "to", to="holdfast")
    with pytest.raises(InvalidPlanError, match=name):
        dcp.convert(tmp_path / "from.pt", tmp_path / "to", to="safetensors")
    with pytest.raises(UsageError, match=name):
        dcp.convert(tmp_path / "from.pt", tmp_path / "to", to="holdfast", rename={name: "y", "x": name})


@pytest.mark.skipif(not IS_NEWEST, reason="older torch cannot copy 4-bit numbers")
def test_a_lone_pair_of_packed_numbers_is_refused_by_its_key(tmp_path: Path) -> None:
    pair = torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).view(())
    torch.save({"pair": pair}, tmp_path / "from.pt")
    with pytest.raises(InvalidPlanError, match=r"pair: .* torch.float4_e2m1fn_x2 and shape \[\]"):
        dcp.convert(tmp_path / "from.pt", tmp_path / "to", to="safetensors")


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
def test_quantised_tensors_that_torch_saved_are_refused_by_key(tmp_path: Path) -> None:
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    stock_save({"q": quantised, "x": ONE}, checkpoint_id=tmp_path / "from")
    with pytest.raises(PlanError, match="q: is a quantised tensor"):
        dcp.convert(tmp_path / "from", tmp_path / "to", to="holdfast")
    dcp.convert(tmp_path / "from", tmp_path / "to", to="holdfast", keys="x")


def test_a_target_with_another_format_is_refused(tmp_path: Path) -> None:
    torch.save({"x": ONE}, tmp_path / "from.pt")
    for there, to in (("holdfast", "safetensors"), ("safetensors", "holdfast")):
        target = tmp_path / there
        dcp.convert(tmp_path / "from.pt", target, to=there)  # type: ignore[arg-type]
        before = sorted(target.iterdir())
        for overwrite in (False, True):
            with pytest.raises(CheckpointExistsError, match="of another format"):
                dcp.convert(tmp_path / "from.pt", target, to=to, overwrite=overwrite)  # type: ignore[arg-type]
        assert sorted(target.iterdir()) == before
        assert same(dcp.open(target)["x"].numpy().tolist(), ONE.tolist())


def test_errors_are_of_the_package(tmp_path: Path) -> None:
    stock_save({"half\ud800": ONE}, checkpoint_id=tmp_path / "from")
    for to in ("holdfast", "torch_save", "safetensors"):
        with pytest.raises(CheckpointError, match="not valid text"):
            dcp.convert(tmp_path / "from", tmp_path / "to", to=to)

"""The examples in the docstrings of the planners, taken from the text and run."""

import ast
import inspect
import re
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import holdfast as hf
from holdfast.planner import LoadPlanner, SavePlanner
from holdfast.testing import drive_save


def examples(documented: type) -> dict[str, Any]:
    """The classes that the docstring shows, by name, made from its text."""
    text = inspect.getdoc(documented) or ""
    found: dict[str, Any] = {}
    for block in re.findall(r"::\n\n((?:    .*\n|\n)+)", text + "\n"):
        source = textwrap.dedent(block)
        tree = ast.parse(source)
        scope = {
            "DefaultSavePlanner": hf.DefaultSavePlanner,
            "DefaultLoadPlanner": hf.DefaultLoadPlanner,
            "torch": torch,
            "replace": replace,
        }
        exec(compile(tree, f"<docstring of {documented.__name__}>", "exec"), scope)
        found.update({node.name: scope[node.name] for node in tree.body if isinstance(node, ast.ClassDef)})
    return found


SAVE, LOAD = examples(SavePlanner), examples(LoadPlanner)


def test_these_are_all_the_examples() -> None:
    assert set(SAVE) == {"PrefixPlanner", "HalfPlanner", "RoundRobinPlanner", "NotesPlanner"}
    assert set(LOAD) == {"StripPrefixPlanner", "MaterializePlanner"}


def test_a_prefix_that_was_put_on_when_saving_comes_off_when_loading(tmp_path: Path) -> None:
    hf.save({"w": torch.ones(2), "n": 5}, checkpoint_id=tmp_path, planner=SAVE["PrefixPlanner"]())
    assert set(hf.FileSystemReader(tmp_path).read_metadata().state_dict_metadata) == {"model.w", "model.n"}
    state: dict[str, Any] = {"w": torch.zeros(2), "n": 0}
    hf.load(state, checkpoint_id=tmp_path, planner=LOAD["StripPrefixPlanner"]())
    assert state["w"].all()


def test_a_renamed_value_that_is_not_a_tensor_reaches_the_caller(tmp_path: Path) -> None:
    hf.save({"n": 5}, checkpoint_id=tmp_path, planner=SAVE["PrefixPlanner"]())
    state = {"n": 0}
    hf.load(state, checkpoint_id=tmp_path, planner=LOAD["StripPrefixPlanner"]())
    assert state == {"n": 5}


def test_tensors_are_cast_when_saved(tmp_path: Path) -> None:
    original: dict[str, Any] = {"w": torch.full((3,), 1.5), "n": 5, "nested": {"v": torch.ones(2, 2).t()}}
    hf.save(original, checkpoint_id=tmp_path, planner=SAVE["HalfPlanner"]())
    assert original["w"].dtype == torch.float32
    state: dict[str, Any] = {
        "w": torch.zeros(3, dtype=torch.float16),
        "n": 0,
        "nested": {"v": torch.zeros(2, 2, dtype=torch.float16)},
    }
    hf.load(state, checkpoint_id=tmp_path, cast=False)
    assert state["w"].tolist() == [1.5] * 3
    assert state["nested"]["v"].all()
    assert state["n"] == 5


def test_items_are_dealt_round_among_the_ranks(tmp_path: Path) -> None:
    states = [{f"t{number}": torch.full((2,), float(number)) for number in range(5)} for _ in range(2)]
    writers = [hf.FileSystemWriter(tmp_path) for _ in states]
    metadata = drive_save(states, [SAVE["RoundRobinPlanner"]() for _ in states], writers)
    by_rank = {index.fqn: info.relative_path[:4] for index, info in metadata.storage_data.items()}
    assert by_rank == {"t0": "__0_", "t1": "__1_", "t2": "__0_", "t3": "__1_", "t4": "__0_"}
    loaded = {f"t{number}": torch.zeros(2) for number in range(5)}
    hf.load(loaded, checkpoint_id=tmp_path)
    assert [int(value[0]) for value in loaded.values()] == [0, 1, 2, 3, 4]


def test_a_note_is_kept_in_the_metadata(tmp_path: Path) -> None:
    hf.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, planner=SAVE["NotesPlanner"]())
    assert hf.FileSystemReader(tmp_path).read_metadata().planner_data["saved by ranks"] == 1
    state = {"w": torch.zeros(2)}
    hf.load(state, checkpoint_id=tmp_path)
    assert state["w"].all()


def test_a_note_does_not_cost_the_structure(tmp_path: Path) -> None:
    hf.save({"w": 1, "empty": {}}, checkpoint_id=tmp_path, planner=SAVE["NotesPlanner"]())
    loaded = hf.state_dict_loader._load_state_dict_from_keys(checkpoint_id=tmp_path)
    assert loaded == {"w": 1, "empty": {}}


def test_a_model_on_the_meta_device_is_given_memory(tmp_path: Path) -> None:
    hf.save({"w": torch.arange(4.0), "big": torch.ones(300, 1000)}, checkpoint_id=tmp_path)
    state = {"w": torch.empty(4, device="meta"), "big": torch.empty(300, 1000, device="meta")}
    hf.load(state, checkpoint_id=tmp_path, planner=LOAD["MaterializePlanner"]())
    assert state["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert bool((state["big"] == 1).all())

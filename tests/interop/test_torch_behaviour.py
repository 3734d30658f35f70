"""What programs written for torch's checkpoint package count on, held against it where that can be."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from tests.support.stock_torch import stock_load, stock_save
from torch.distributed.checkpoint import default_planner as theirs
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint import planner as torch_planner
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

import holdfast as hf
from holdfast import default_planner as ours
from holdfast._torch_compat.torch_records import to_ours, to_torch
from holdfast.errors import CheckpointException, CheckpointExistsError, CheckpointNotFoundError, UsageError
from holdfast.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast.planner import LoadItemType, LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType

# Its types say that it exports nothing.
dcp: Any = torch_checkpoint
pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")


def flat_state() -> dict[str, Any]:
    return {
        "weight": torch.rand(3, 4),
        "view": torch.rand(4, 6).t()[1:3],
        "half": torch.rand(5).half(),
        "scalar": torch.tensor(2),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "number": 5,
        "text": "x",
        "bytes": b"y",
    }


def hints(plan: SavePlan) -> list[int | None]:
    """Hints do not take part in the comparison of items, so they are compared besides."""
    return [item.index.index for item in plan.items]


# Plans.


@pytest.mark.parametrize("is_coordinator", [True, False])
def test_local_save_plans_equal_torchs(is_coordinator: bool) -> None:
    state = flat_state()
    mine = ours.create_default_local_save_plan(state, is_coordinator)
    their_plan = to_ours(theirs.create_default_local_save_plan(state, is_coordinator))
    assert mine.items == their_plan.items
    for one, other in zip(mine.items, their_plan.items, strict=True):
        if one.tensor_data is not None:
            assert dataclasses.asdict(one.tensor_data.chunk) == dataclasses.asdict(other.tensor_data.chunk)
        assert one.tensor_storage_size() == other.tensor_storage_size()


def test_global_save_plans_and_metadata_equal_torchs() -> None:
    states: list[dict[str, Any]] = [{"a": torch.rand(3), "n": 1}, {"b": torch.rand(2, 2)}, {}]
    mine = [ours.create_default_local_save_plan(state, is_coordinator=False) for state in states]
    my_plans, my_metadata = ours.create_default_global_save_plan(mine)
    their_plans, their_metadata = theirs.create_default_global_save_plan(to_torch(mine))
    assert my_plans == to_ours(their_plans)
    assert my_metadata == to_ours(their_metadata)
    assert [hints(plan)[:1] for plan in my_plans] == [hints(plan)[:1] for plan in to_ours(their_plans)]


def shard(key: str, offset: int, length: int, size: int) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([offset]), torch.Size([length]))
    data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size([size]))
    return WriteItem(MetadataIndex(key, [offset]), WriteItemType.SHARD, tensor_data=data)


@pytest.mark.parametrize("rewrite", [True, False])
def test_hints_of_shards_are_rewritten_as_torch_does(rewrite: bool) -> None:
    plans = [SavePlan([shard("t", 4, 4, 12)]), SavePlan([shard("t", 0, 4, 12), shard("t", 8, 4, 12)])]
    mine, my_metadata = ours.create_default_global_save_plan(plans, rewrite)
    their_plans, their_metadata = theirs.create_default_global_save_plan(to_torch(plans), rewrite)
    assert mine == to_ours(their_plans)
    assert [hints(plan) for plan in mine] == [hints(plan) for plan in to_ours(their_plans)]
    assert my_metadata == to_ours(their_metadata)


def stored_in_chunks(*offsets_and_lengths: tuple[int, int], size: int) -> Metadata:
    chunks = [ChunkStorageMetadata(torch.Size([o, 0]), torch.Size([n, 3])) for o, n in offsets_and_lengths]
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([size, 3]), chunks)
    return Metadata({"t": entry})


@pytest.mark.parametrize(
    "metadata",
    [
        stored_in_chunks((0, 8), size=8),
        stored_in_chunks((0, 4), (4, 4), size=8),
        stored_in_chunks((5, 3), (0, 2), (2, 3), size=8),
    ],
    ids=["whole", "halves", "uneven"],
)
def test_load_plans_read_the_same_boxes_as_torchs(metadata: Metadata) -> None:
    state = {"t": torch.zeros(8, 3)}
    mine = ours.create_default_local_load_plan(state, metadata)
    other = to_ours(theirs.create_default_local_load_plan(state, to_torch(metadata)))
    assert sorted(map(repr, map(_box, mine.items))) == sorted(map(repr, map(_box, other.items)))


def _box(item: Any) -> Any:
    return (
        item.type,
        item.dest_index.fqn,
        tuple(item.dest_offsets),
        tuple(item.storage_index.offset or ()),
        tuple(item.storage_offsets),
        tuple(item.lengths),
    )


def test_a_load_plan_of_an_object_is_one_line() -> None:
    metadata = Metadata({"n": hf.BytesStorageMetadata()})
    (item,) = ours.create_default_local_load_plan({"n": 0}, metadata).items
    (other,) = to_ours(theirs.create_default_local_load_plan({"n": 0}, to_torch(metadata))).items
    assert (item.type, item.dest_index, item.storage_index) == (
        other.type,
        other.dest_index,
        other.storage_index,
    )
    assert item.type == LoadItemType.BYTE_IO


def test_missing_keys_raise_what_torch_raises_and_strict_false_skips_them() -> None:
    with pytest.raises(RuntimeError, match="absent"):
        ours.create_default_local_load_plan({"absent": torch.zeros(1)}, Metadata({}))
    assert ours.create_default_local_load_plan({"absent": 1}, Metadata({}), strict=False) == LoadPlan([])


def test_another_shape_raises_what_torch_raises() -> None:
    metadata = stored_in_chunks((0, 8), size=8)
    with pytest.raises(ValueError, match="Size mismatch"):
        ours.create_default_local_load_plan({"t": torch.zeros(4, 3)}, metadata)
    with pytest.raises(ValueError, match="Size mismatch"):
        theirs.create_default_local_load_plan({"t": torch.zeros(4, 3)}, to_torch(metadata))


def test_global_load_plans_come_back_as_they_are() -> None:
    plans = [LoadPlan([]), LoadPlan([])]
    assert ours.create_default_global_load_plan(plans) == plans


def test_replicated_items_are_written_once_as_torch_does() -> None:
    state = {"a": torch.rand(4), "b": torch.rand(8), "n": 1}
    plans = [ours.create_default_local_save_plan(state, is_coordinator=rank == 0) for rank in range(4)]
    for lowest in (True, False):
        mine, _ = hf.DefaultSavePlanner(
            flatten_state_dict=False, dedup_save_to_lowest_rank=lowest
        ).create_global_plan(plans)
        other, _ = theirs.DefaultSavePlanner(
            flatten_state_dict=False, dedup_save_to_lowest_rank=lowest
        ).create_global_plan(to_torch(plans))
        assert sum(len(plan.items) for plan in mine) == sum(len(plan.items) for plan in other) == 3
        if lowest:
            assert mine == to_ours(other)


def nested_states() -> dict[str, dict[Any, Any]]:
    t = torch.ones(1)
    return {
        "flat": {"a": t, "b": 1},
        "dicts": {"a": {"b": {"c": t, "d": 1}}},
        "dict without tensors": {"a": {"b": {"c": 1}}},
        "empty": {"a": {}, "b": [], "c": ()},
        "lists": {"l": [t, 1], "m": [1, 2], "n": [[t], [1]], "o": [[1], [2]], "p": [{"x": 1}]},
        "tuples": {"t": (t, 1), "u": ({"x": t},)},
        "int keys": {"s": {0: {"m": t}, 1: 5}},
        "dots": {"a.b": {"c.d": t}},
    }


@pytest.mark.parametrize("name", nested_states())
def test_flat_keys_and_paths_are_torchs(name: str) -> None:
    state = nested_states()[name]
    planner = hf.DefaultSavePlanner()
    planner.set_up_planner(state, None, is_coordinator=True)
    flat, mappings = flatten_state_dict(state)
    assert list(planner.state_dict) == list(flat)
    assert {key: tuple(path) for key, path in planner.mappings.items()} == mappings
    for key, value in flat.items():
        assert planner.state_dict[key] is value


# The file system.


@pytest.mark.parametrize("make", [str, Path, lambda path: FsPath(str(path))], ids=["str", "Path", "PathLike"])
def test_places_may_be_given_as_anything_that_is_a_path(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    place = make(tmp_path / "deep" / "er")
    hf.save({"a": torch.ones(2)}, checkpoint_id=place)
    state = {"a": torch.zeros(2)}
    hf.load(state, checkpoint_id=place)
    assert state["a"].all()
    assert hf.FileSystemWriter.validate_checkpoint_id(place)
    assert hf.FileSystemReader.validate_checkpoint_id(place)


class FsPath(os.PathLike[str]):
    def __init__(self, path: str) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return self.path


@pytest.mark.parametrize(
    ("place", "words"), [(None, "must be specifi"), ("nowhere://bucket/step", "Cannot detect")]
)
def test_a_place_that_no_storage_serves_raises_what_torch_raises(place: str | None, words: str) -> None:
    for call in (hf.save, hf.load, stock_save, stock_load):
        with pytest.raises(RuntimeError, match=words):
            call({"a": 1}, checkpoint_id=place)


def test_no_place_at_all_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="storage_writer"):
        hf.save({"a": 1})
    with pytest.raises(UsageError, match="storage_reader"):
        hf.load({"a": 1})


def test_a_place_wins_over_the_one_that_the_storage_was_made_with(tmp_path: Path) -> None:
    writer = hf.FileSystemWriter(tmp_path / "first")
    hf.save({"a": 1}, storage_writer=writer, checkpoint_id=tmp_path / "second")
    assert not (tmp_path / "first").exists()
    assert writer.checkpoint_id == tmp_path / "second"
    state = {"a": 0}
    reader = hf.FileSystemReader(tmp_path / "first")
    hf.load(state, storage_reader=reader, checkpoint_id=tmp_path / "second")
    assert state == {"a": 1}
    assert reader.checkpoint_id == tmp_path / "second"


def test_storage_meta_tells_the_place_and_a_new_id_for_each_save(tmp_path: Path) -> None:
    writer = hf.FileSystemWriter(tmp_path)
    saves = [hf.save({"a": 1}, storage_writer=writer) for _ in range(2)]
    metas = [metadata.storage_meta for metadata in saves]
    assert metas[0] is not None
    assert metas[1] is not None
    assert metas[0].save_id != metas[1].save_id
    assert os.fspath(metas[0].checkpoint_id or "") == str(tmp_path)
    read = hf.FileSystemReader(tmp_path).read_metadata().storage_meta
    assert read is not None
    assert read.save_id == metas[1].save_id
    assert read.load_id is not None


def test_overwriting_is_the_default_and_can_be_refused(tmp_path: Path) -> None:
    hf.save({"a": 1}, checkpoint_id=tmp_path)
    hf.save({"a": 2}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointExistsError, match="Checkpoint already exists"):
        hf.save({"a": 3}, storage_writer=hf.FileSystemWriter(tmp_path, overwrite=False))
    state = {"a": 0}
    hf.load(state, checkpoint_id=tmp_path)
    assert state == {"a": 2}
    hf.save({"a": 4}, storage_writer=hf.FileSystemWriter(tmp_path / "new", overwrite=False))


def test_loading_where_nothing_is_raises_what_torch_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hf.load({"a": 1}, checkpoint_id=tmp_path / "absent")
    with pytest.raises(CheckpointNotFoundError):
        hf.FileSystemReader(tmp_path).read_metadata()
    assert not (tmp_path / "absent").exists()


def test_one_file_a_thread_and_a_file_an_item(tmp_path: Path) -> None:
    state = {f"t{number}": torch.ones(10) for number in range(6)}
    for name, options, files in (
        ("one", {}, 1),
        ("threads", {"thread_count": 3}, 3),
        ("items", {"single_file_per_rank": False}, 6),
    ):
        hf.save(state, storage_writer=hf.FileSystemWriter(tmp_path / name, **options))
        assert len(list((tmp_path / name).glob("__0_*.distcp"))) == files


@pytest.mark.parametrize("parameter", list(dataclasses.fields(torch_metadata.Metadata)), ids=lambda f: f.name)
def test_the_metadata_that_save_returns_is_filled(tmp_path: Path, parameter: Any) -> None:
    metadata = hf.save({"a": {"b": torch.ones(2)}, "n": 1}, checkpoint_id=tmp_path)
    assert getattr(metadata, parameter.name)
    assert set(metadata.state_dict_metadata) == {"a.b", "n"}
    assert metadata.planner_data == {"a.b": ("a", "b"), "n": ("n",)}


# The calls.


@pytest.mark.parametrize("no_dist", [True, False])
def test_a_single_process_needs_no_process_group(tmp_path: Path, no_dist: bool) -> None:
    hf.save({"a": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=no_dist)
    state = {"a": torch.zeros(2)}
    hf.load(state, checkpoint_id=tmp_path, no_dist=no_dist)
    assert state["a"].all()


def test_the_deprecated_names_work_and_say_so(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="save_state_dict is deprecated"):
        hf.save_state_dict({"a": torch.ones(2)}, hf.FileSystemWriter(tmp_path), no_dist=True)
    state = {"a": torch.zeros(2)}
    with pytest.warns(FutureWarning, match="load_state_dict is deprecated"):
        hf.load_state_dict(state, hf.FileSystemReader(tmp_path), no_dist=True)
    assert state["a"].all()


def test_a_failing_planner_is_reported_with_its_rank_and_class(tmp_path: Path) -> None:
    class Failing(hf.DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            raise ZeroDivisionError("of the planner")

    with pytest.raises(CheckpointException, match="of the planner") as caught:
        hf.save({"a": 1}, checkpoint_id=tmp_path, planner=Failing())
    assert isinstance(caught.value, ZeroDivisionError)
    assert list(caught.value.failures) == [0]
    assert caught.value.step == "plan"


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass_as_they_are_and_commit_nothing(
    tmp_path: Path, interrupt: type[BaseException]
) -> None:
    class Interrupted(hf.DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            raise interrupt

    with pytest.raises(interrupt) as caught:
        hf.save({"a": torch.ones(1)}, checkpoint_id=tmp_path, planner=Interrupted())
    assert type(caught.value) is interrupt
    assert not (tmp_path / ".metadata").exists()


class Element:
    """A Stateful object that is not a module."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.calls: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        self.calls.append("state_dict")
        return {"value": self.value, "tensor": torch.tensor(self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")
        assert state["tensor"] == state["value"]
        self.value = state["value"]


def test_stateful_objects_are_asked_once_and_given_their_state_once(tmp_path: Path) -> None:
    saved, loaded = Element(5), Element(0)
    hf.save({"e": saved}, checkpoint_id=tmp_path)
    assert saved.calls == ["state_dict"]
    hf.load({"e": loaded}, checkpoint_id=tmp_path)
    assert loaded.calls == ["state_dict", "load_state_dict"]
    assert loaded.value == 5


class Logged:
    """A Stateful object that tells when it is asked and when it is given its state."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def state_dict(self) -> dict[str, Any]:
        self.log.append(f"asked {self.name}")
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"value": 1}
        self.log.append(f"given {self.name}")


def test_stateful_objects_are_asked_in_one_order_whatever_the_order_of_the_dict(tmp_path: Path) -> None:
    def state(log: list[str], keys: list[Any]) -> dict[str, Any]:
        return {
            "of": {key: Logged(f"of.{key}", log) for key in keys},
            "a": [Logged("a", log)],
        }

    asked: list[str] = []
    hf.save(state(asked, ["y", 3, "x"]), checkpoint_id=tmp_path)
    assert asked == ["asked a", "asked of.3", "asked of.x", "asked of.y"]
    for keys in (["x", "y", 3], [3, "y", "x"]):
        log: list[str] = []
        loaded = state(log, keys)
        hf.load(loaded, checkpoint_id=tmp_path)
        assert log == asked + [line.replace("asked", "given") for line in asked]
        assert list(loaded["of"]) == keys


def test_one_planner_and_one_storage_serve_several_saves_and_loads(tmp_path: Path) -> None:
    planner, loader = hf.DefaultSavePlanner(), hf.DefaultLoadPlanner()
    writer, reader = hf.FileSystemWriter(tmp_path), hf.FileSystemReader(tmp_path)
    for number in range(3):
        name = f"t{number}"
        hf.save({name: torch.full((number + 1,), float(number))}, storage_writer=writer, planner=planner)
        state = {name: torch.zeros(number + 1)}
        hf.load(state, storage_reader=reader, planner=loader)
        assert state[name].tolist() == [number] * (number + 1)


@pytest.mark.parametrize("name", ["lookup_object", "transform_object", "resolve_data"])
def test_subclasses_extend_the_same_methods_as_torchs(name: str) -> None:
    assert hasattr(hf.DefaultSavePlanner, name)
    assert hasattr(theirs.DefaultSavePlanner, name)


def test_a_saving_planner_that_changes_what_it_looks_up(tmp_path: Path) -> None:
    class Doubling(hf.DefaultSavePlanner):
        def lookup_object(self, index: MetadataIndex) -> Any:
            return super().lookup_object(index) * 2

        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            data = super().transform_object(write_item, object)
            return data + 1 if isinstance(data, torch.Tensor) else data

    hf.save({"t": torch.ones(2), "n": 4}, checkpoint_id=tmp_path, planner=Doubling())
    state: dict[str, Any] = {"t": torch.zeros(2), "n": 0}
    hf.load(state, checkpoint_id=tmp_path)
    assert state["t"].tolist() == [3.0, 3.0]
    assert state["n"] == 8


def test_a_loading_planner_that_changes_what_it_looks_up(tmp_path: Path) -> None:
    class Other(hf.DefaultLoadPlanner):
        other = torch.zeros(2)

        def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
            return self.other

    hf.save({"t": torch.ones(2)}, checkpoint_id=tmp_path)
    state = {"t": torch.zeros(2)}
    hf.load(state, checkpoint_id=tmp_path, planner=Other())
    assert state["t"].tolist() == [0.0, 0.0]
    assert Other.other.tolist() == [1.0, 1.0]


def test_a_plan_that_leaves_out_an_item_commits_nothing(tmp_path: Path) -> None:
    class Forgetful(hf.FileSystemWriter):
        def write_data(self, plan: SavePlan, planner: hf.SavePlanner) -> Any:
            return super().write_data(dataclasses.replace(plan, items=plan.items[1:]), planner)

    with pytest.raises(hf.errors.IncompleteWriteError, match="first"):
        hf.save({"first": 1, "second": 2}, storage_writer=Forgetful(tmp_path))
    assert not (tmp_path / ".metadata").exists()


def test_enumerations_have_torchs_members_and_values() -> None:
    for name in ("WriteItemType", "LoadItemType"):
        mine, other = getattr(hf.planner, name), getattr(torch_planner, name)
        assert {member.name: member.value for member in mine} == {m.name: m.value for m in other}


@pytest.mark.parametrize("name", ["save", "load", "save_state_dict", "load_state_dict", "DefaultSavePlanner"])
def test_public_names_are_where_torch_has_them(name: str) -> None:
    assert hasattr(hf, name)
    assert hasattr(dcp, name)


def test_every_name_of_torchs_module_for_state_dicts_is_there() -> None:
    for name in vars(torch_state_dict):
        if not name.startswith("__"):
            assert hasattr(hf.state_dict, name)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = hf.state_dict.no_such_name


def test_a_mapping_of_the_callers_own_is_told_what_was_loaded(tmp_path: Path) -> None:
    class Noting(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            set_again.append(key)
            super().__setitem__(key, value)

    set_again: list[str] = []
    hf.save({"tensor": torch.ones(2), "number": 1, "object": Element(5)}, checkpoint_id=tmp_path)
    for load in (hf.load, stock_load):
        set_again.clear()
        load(Noting(tensor=torch.zeros(2), number=1, object=Element(0)), checkpoint_id=tmp_path)
        assert set(set_again) == {"tensor", "number"}

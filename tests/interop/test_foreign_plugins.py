"""torch's planners and storages in our save and load, and ours in torch's."""

import copy
import dataclasses
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from tests.support.stock_torch import IS_NEWEST, stock_load, stock_save
from torch.distributed.checkpoint import default_planner as torch_planners
from torch.distributed.checkpoint import filesystem as torch_filesystem
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint import metadata as torch_metadata

import holdfast as hf
from holdfast import metadata as our_metadata
from holdfast._torch_compat.torch_records import to_torch

# Its types say that it exports nothing.
dcp: Any = torch_checkpoint
pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
OURS, TORCHS = "ours", "torch's"


def make_state() -> dict[str, Any]:
    return {
        "model": {
            "weight": torch.arange(12.0).view(3, 4),
            "half": torch.ones(3, dtype=torch.bfloat16).mul(3),
        },
        "view": torch.arange(20.0).view(4, 5).t()[1:3],
        "empty": torch.empty(0, 2),
        "scalar": torch.tensor(5),
        "step": 7,
        "note": "text",
        "raw": b"\x00\xffbytes",
        "list": [torch.ones(2), {"k": 1}],
        "pair": (1, torch.ones(1)),
    }


def blank_state() -> dict[str, Any]:
    return {
        "model": {"weight": torch.zeros(3, 4), "half": torch.zeros(3, dtype=torch.bfloat16)},
        "view": torch.zeros(2, 4),
        "empty": torch.empty(0, 2),
        "scalar": torch.tensor(0),
        "step": 0,
        "note": "",
        "raw": b"",
        "list": [torch.zeros(2), {"k": 0}],
        "pair": None,
    }


def assert_arrived(state: dict[str, Any]) -> None:
    expected = make_state()
    assert torch.equal(state["model"]["weight"], expected["model"]["weight"])
    assert torch.equal(state["model"]["half"], expected["model"]["half"])
    assert torch.equal(state["view"], expected["view"])
    assert torch.equal(state["list"][0], expected["list"][0])
    assert state["list"][1] == {"k": 1}
    assert state["scalar"] == 5
    assert (state["step"], state["note"], state["raw"]) == (7, "text", b"\x00\xffbytes")
    assert state["pair"][0] == 1
    assert torch.equal(state["pair"][1], torch.ones(1))


Save = Callable[..., Any]
ENGINES: dict[str, tuple[Save, Save]] = {OURS: (hf.save, hf.load), TORCHS: (stock_save, stock_load)}
SAVE_PLANNERS: dict[str, Callable[[], Any]] = {OURS: hf.DefaultSavePlanner, TORCHS: dcp.DefaultSavePlanner}
LOAD_PLANNERS: dict[str, Callable[[], Any]] = {OURS: hf.DefaultLoadPlanner, TORCHS: dcp.DefaultLoadPlanner}
WRITERS: dict[str, Callable[[Path], Any]] = {
    OURS: lambda folder: hf.FileSystemWriter(folder, sync_files=False),
    TORCHS: lambda folder: dcp.FileSystemWriter(folder, sync_files=False),
}
READERS: dict[str, Callable[[Path], Any]] = {OURS: hf.FileSystemReader, TORCHS: dcp.FileSystemReader}


# A planner of ours deals in our records, which torch's own engine does not know.
combinations = pytest.mark.parametrize(
    ("engine", "planner", "storage"),
    [
        pytest.param(*case, id="{} engine, {} planner, {} storage".format(*case))
        for case in itertools.product((OURS, TORCHS), repeat=3)
        if case[:2] != (TORCHS, OURS)
    ],
)


@combinations
def test_every_planner_saves_with_every_storage_in_every_engine(
    tmp_path: Path, engine: str, planner: str, storage: str
) -> None:
    ENGINES[engine][0](
        make_state(),
        storage_writer=WRITERS[storage](tmp_path),
        planner=SAVE_PLANNERS[planner](),
    )
    for load in (hf.load, stock_load):
        state = blank_state()
        load(state, checkpoint_id=tmp_path)
        assert_arrived(state)


@pytest.mark.parametrize("written_by", [OURS, TORCHS])
@combinations
def test_every_planner_loads_with_every_storage_in_every_engine(
    tmp_path: Path, written_by: str, engine: str, planner: str, storage: str
) -> None:
    ENGINES[written_by][0](make_state(), storage_writer=WRITERS[written_by](tmp_path))
    state = blank_state()
    ENGINES[engine][1](state, storage_reader=READERS[storage](tmp_path), planner=LOAD_PLANNERS[planner]())
    assert_arrived(state)


class TorchPrefixSaver(torch_planners.DefaultSavePlanner):
    """A planner as people write them for torch: everything gets a prefix."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({f"run.{k}": v for k, v in state_dict.items()}, storage_meta, is_coordinator)


class TorchPrefixLoader(torch_planners.DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        assert isinstance(metadata, torch_metadata.Metadata)
        super().set_up_planner({f"run.{k}": v for k, v in state_dict.items()}, metadata, is_coordinator)


def test_planners_written_for_torch_see_torchs_records_in_our_save_and_load(tmp_path: Path) -> None:
    hf.save({"w": torch.ones(3), "n": 1}, checkpoint_id=tmp_path, planner=TorchPrefixSaver())  # type: ignore[arg-type]
    assert set(hf.FileSystemReader(tmp_path).read_metadata().state_dict_metadata) == {"run.w", "run.n"}
    state = {"w": torch.zeros(3)}
    hf.load(state, checkpoint_id=tmp_path, planner=TorchPrefixLoader())  # type: ignore[arg-type]
    assert state["w"].all()


class TorchCastingSaver(torch_planners.DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        self.plan = plan
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data.to(torch.float16) if isinstance(data, torch.Tensor) else data


def test_a_casting_planner_written_for_torch_casts_in_our_save(tmp_path: Path) -> None:
    hf.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, planner=TorchCastingSaver())  # type: ignore[arg-type]
    state = {"w": torch.zeros(3, dtype=torch.float16)}
    hf.load(state, checkpoint_id=tmp_path)
    assert state["w"].all()


class TorchCountingWriter(dcp.FileSystemWriter):  # type: ignore[misc]
    items = 0

    def write_data(self, plan: Any, planner: Any) -> Any:
        assert isinstance(plan, dcp.planner.SavePlan)
        type(self).items = len(plan.items)
        return super().write_data(plan, planner)


class TorchCountingReader(dcp.FileSystemReader):  # type: ignore[misc]
    items = 0

    def read_data(self, plan: Any, planner: Any) -> Any:
        assert isinstance(plan, dcp.planner.LoadPlan)
        type(self).items = len(plan.items)
        return super().read_data(plan, planner)


def test_storages_written_for_torch_see_torchs_records_in_our_save_and_load(tmp_path: Path) -> None:
    metadata = hf.save(make_state(), storage_writer=TorchCountingWriter(tmp_path))
    assert TorchCountingWriter.items == len(metadata.state_dict_metadata)
    state = blank_state()
    hf.load(state, storage_reader=TorchCountingReader(tmp_path))
    assert_arrived(state)
    assert TorchCountingReader.items == len(metadata.state_dict_metadata)


class SendingWriter(dcp.FileSystemWriter):  # type: ignore[misc]
    """A writer that lets other processes of its own write: they get the planner, or what it resolves to."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        sent = pickle.loads(pickle.dumps(planner))
        for item in plan.items:
            if item.tensor_data is None:
                stream = pickle.loads(pickle.dumps(copy.copy(planner).resolve_data(item)))
                assert stream.read() == sent.resolve_data(item).getvalue()
        return super().write_data(plan, sent)


def test_a_writer_may_send_our_planner_and_its_streams_to_other_processes(tmp_path: Path) -> None:
    hf.save(make_state(), storage_writer=SendingWriter(tmp_path))
    state = blank_state()
    hf.load(state, checkpoint_id=tmp_path)
    assert_arrived(state)


def test_our_planner_saves_the_plan_of_last_time_with_torchs_storage(tmp_path: Path) -> None:
    planner = hf.DefaultSavePlanner(enable_plan_caching=True)
    for number in (1.0, 2.0, 3.0):
        folder = tmp_path / str(number)
        hf.save({"w": torch.full((3,), number)}, storage_writer=WRITERS[TORCHS](folder), planner=planner)
        for load in (hf.load, stock_load):
            state = {"w": torch.zeros(3)}
            load(state, checkpoint_id=folder)
            assert state["w"].tolist() == [number] * 3


class OurPrefixSaver(hf.DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({f"run.{k}": v for k, v in state_dict.items()}, storage_meta, is_coordinator)


class OurLookingReader(hf.FileSystemReader):
    """Looks at the metadata on the way, as people do."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = super().read_metadata(*args, **kwargs)
        return self.seen


def test_a_subclass_of_our_planner_renames_with_torchs_storage(tmp_path: Path) -> None:
    hf.save({"w": torch.ones(3)}, storage_writer=WRITERS[TORCHS](tmp_path), planner=OurPrefixSaver())
    state = {"run.w": torch.zeros(3)}
    stock_load(state, checkpoint_id=tmp_path)
    assert state["run.w"].all()


def test_a_subclass_of_our_reader_works_in_torchs_load(tmp_path: Path) -> None:
    hf.save(make_state(), checkpoint_id=tmp_path)
    state = blank_state()
    stock_load(state, storage_reader=OurLookingReader(tmp_path))
    assert_arrived(state)


def test_records_that_go_in_and_out_are_equal_and_of_the_right_classes(tmp_path: Path) -> None:
    ours = hf.save(make_state(), storage_writer=WRITERS[TORCHS](tmp_path / "a"))
    assert type(ours) is our_metadata.Metadata
    assert {type(entry) for entry in ours.state_dict_metadata.values()} == {
        our_metadata.TensorStorageMetadata,
        our_metadata.BytesStorageMetadata,
    }
    # The writer of torch 2.9 fills in a copy of the metadata that nobody sees.
    if ours.storage_data is not None or IS_NEWEST:
        assert {type(index) for index in ours.storage_data} == {our_metadata.MetadataIndex}


def test_metadata_that_torchs_save_returns_holds_torchs_records_only(tmp_path: Path) -> None:
    theirs = stock_save(make_state(), storage_writer=WRITERS[OURS](tmp_path))
    assert type(theirs) is torch_metadata.Metadata
    assert {type(index) for index in theirs.storage_data} == {torch_metadata.MetadataIndex}
    assert type(theirs.storage_meta) is torch_metadata.StorageMeta


def test_torchs_load_reports_damage_that_our_reader_finds(tmp_path: Path) -> None:
    hf.save({"w": torch.ones(1000)}, checkpoint_id=tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(BaseException, match="not the ones that were written"):
        stock_load({"w": torch.zeros(1000)}, storage_reader=READERS[OURS](tmp_path))


def test_overwriting_torchs_checkpoint_with_our_writer_in_torchs_save(tmp_path: Path) -> None:
    stock_save({"w": torch.zeros(3), "old": 1}, checkpoint_id=tmp_path)
    stock_save({"w": torch.ones(3)}, storage_writer=WRITERS[OURS](tmp_path))
    state = {"w": torch.zeros(3)}
    stock_load(state, checkpoint_id=tmp_path)
    assert state["w"].all()
    assert len(list(tmp_path.glob("*.distcp"))) == 1


def test_records_of_both_sides_have_the_same_fields() -> None:
    for name in ("ChunkStorageMetadata", "TensorProperties", "Metadata", "MetadataIndex", "StorageMeta"):
        ours, theirs = getattr(our_metadata, name), getattr(torch_metadata, name)
        fields = [field.name for field in dataclasses.fields(theirs)]
        assert [field.name for field in dataclasses.fields(ours)][: len(fields)] == fields
        assert len(fields) == len(dataclasses.fields(ours)) or not IS_NEWEST


class OldWriter(torch_filesystem.FileSystemWriter):
    """From before ranks were told to storages."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        super().set_up_storage_writer(is_coordinator)


class OldReader(torch_filesystem.FileSystemReader):
    """The same."""

    def read_metadata(self) -> Any:
        return super().read_metadata()

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool) -> None:
        super().set_up_storage_reader(metadata, is_coordinator)


def test_storages_written_for_torch_before_keyword_arguments_work(tmp_path: Path) -> None:
    writer: Any = OldWriter(tmp_path / "c")
    hf.save({"t": torch.ones(2)}, storage_writer=writer)
    state = {"t": torch.zeros(2)}
    reader: Any = OldReader(tmp_path / "c")
    hf.load(state, storage_reader=reader)
    assert state["t"].tolist() == [1, 1]
    with pytest.raises(FileNotFoundError):
        hf.load(state, storage_reader=reader, checkpoint_id=tmp_path / "nowhere")


class Around:
    """A plugin around another one, by composition only."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("planners", [OURS, TORCHS])
@pytest.mark.parametrize("storages", [OURS, TORCHS])
def test_plugins_may_be_wrapped_without_inheritance(tmp_path: Path, planners: str, storages: str) -> None:
    writer: Any
    planner: Any
    writer, planner = Around(WRITERS[storages](tmp_path)), Around(SAVE_PLANNERS[planners]())
    hf.save(make_state(), storage_writer=writer, planner=planner)
    state = blank_state()
    reader: Any
    loader: Any
    reader, loader = Around(READERS[storages](tmp_path)), Around(LOAD_PLANNERS[planners]())
    hf.load(state, storage_reader=reader, planner=loader)
    assert_arrived(state)


class PlainFuture:
    """As much of a future as torch's save asks for."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> None:
        pass

    def value(self) -> Any:
        return self._result


@pytest.mark.parametrize("base", [dcp.FileSystemWriter, hf.FileSystemWriter])
def test_a_writer_may_have_a_future_of_its_own(tmp_path: Path, base: Any) -> None:
    class Writer(base):  # type: ignore[misc]
        def write_data(self, plan: Any, planner: Any) -> Any:
            return PlainFuture(super().write_data(plan, planner).wait())

    hf.save(make_state(), storage_writer=Writer(tmp_path))
    state = blank_state()
    hf.load(state, checkpoint_id=tmp_path)
    assert_arrived(state)


@pytest.mark.parametrize("reported", [None, [], [{"done": True}], [("weight", 8)]], ids=repr)
def test_a_writer_may_report_in_records_of_its_own(tmp_path: Path, reported: Any) -> None:
    finished = []

    class Writer(hf.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            return PlainFuture(reported)

        def finish(self, metadata: Any, results: Any) -> None:
            finished.append(results)

    hf.save({"weight": torch.ones(2), "step": 1}, storage_writer=Writer(tmp_path))
    assert finished == [[reported]]


@pytest.mark.parametrize("base", [dcp.DefaultSavePlanner, hf.DefaultSavePlanner])
@pytest.mark.parametrize("kind", [tuple, list])
def test_a_planner_may_give_shapes_and_offsets_as_plain_sequences(
    tmp_path: Path, base: Any, kind: Any
) -> None:
    class Planner(base):  # type: ignore[misc]
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            items = [item if item.tensor_data is None else in_plain(item) for item in plan.items]
            self.plan = dataclasses.replace(plan, items=items)
            return self.plan

    def in_plain(item: Any) -> Any:
        data = item.tensor_data
        chunk = type(data.chunk)(kind(data.chunk.offsets), kind(data.chunk.sizes))
        return dataclasses.replace(
            item, tensor_data=dataclasses.replace(data, chunk=chunk, size=kind(data.size))
        )

    hf.save(make_state(), checkpoint_id=tmp_path, planner=Planner())
    state = blank_state()
    hf.load(state, checkpoint_id=tmp_path)
    assert_arrived(state)


class OldTorchPlanner(torch_planners.DefaultSavePlanner):
    """From before storage_meta, with names of its own; torch calls it by position."""

    def set_up_planner(self, values: Any, leads: bool) -> None:  # type: ignore[override]
        super().set_up_planner(values, None, leads)


class OldPlanner(hf.DefaultSavePlanner):
    def set_up_planner(self, values: Any, leads: bool) -> None:  # type: ignore[override]
        super().set_up_planner(values, None, leads)


class PlannerThatWantsStorageMeta(torch_planners.DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any, is_coordinator: bool) -> None:  # type: ignore[override]
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


class WriterWithoutMeta(torch_filesystem.FileSystemWriter):
    def storage_meta(self) -> Any:
        return None


@pytest.mark.parametrize("planner", [OldTorchPlanner, OldPlanner, PlannerThatWantsStorageMeta])
@pytest.mark.parametrize("writer", [WriterWithoutMeta, hf.FileSystemWriter])
def test_a_save_planner_is_set_up_with_the_arguments_that_it_has(
    tmp_path: Path, writer: Any, planner: Any
) -> None:
    hf.save(make_state(), storage_writer=writer(tmp_path), planner=planner())
    state = blank_state()
    hf.load(state, checkpoint_id=tmp_path)
    assert_arrived(state)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("place_is_given_to", ["load", "reader"])
def test_torchs_storage_gets_torchs_planner_itself(tmp_path: Path, place_is_given_to: str) -> None:
    """Such as torch's reader of torch.save files, which looks at the state of the planner that it knows.

    A reset makes it forget its own place.
    """
    path = tmp_path / "plain.pt"
    torch.save({"t": torch.ones(2)}, path)
    state = {"t": torch.zeros(2)}
    planner: Any = format_utils.DynamicMetaLoadPlanner()
    given: Any = {"storage_reader": format_utils.BroadcastingTorchSaveReader(path)}
    if place_is_given_to == "load":
        given = {"storage_reader": format_utils.BroadcastingTorchSaveReader(), "checkpoint_id": path}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        hf.load(state, planner=planner, **given)
    finally:
        dist.destroy_process_group()
    assert state["t"].tolist() == [1, 1]


def test_a_planner_that_builds_the_state_does_not_ask_a_strangers_storage_for_its_places(
    tmp_path: Path,
) -> None:
    class Stranger(hf.FileSystemReader):
        """Keeps numbers for places, and metadata in the records of torch's that it once wrote."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            self.ours = super().read_metadata(*args, **kwargs)
            theirs: Any = to_torch(self.ours)
            theirs.storage_data = dict.fromkeys(theirs.storage_data, 7)
            return theirs

        def set_up_storage_reader(self, metadata: Any, *args: Any, **kwargs: Any) -> None:
            assert isinstance(metadata, our_metadata.Metadata)
            super().set_up_storage_reader(self.ours, *args, **kwargs)

    hf.save({"t": torch.ones(2), "n": 3}, checkpoint_id=tmp_path)
    state: dict[str, Any] = {}
    hf.load(state, storage_reader=Stranger(tmp_path), planner=hf.default_planner.EmptyStateDictLoadPlanner())
    assert state["t"].tolist() == [1, 1]
    assert state["n"] == 3


def test_our_reader_serves_torch_behind_a_wrapper_once_it_is_told_so(tmp_path: Path) -> None:
    class Logging:
        """A program's own reader around ours: torch calls this one, and only this one calls ours."""

        def __init__(self, inner: hf.FileSystemReader) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def read_metadata(self) -> Any:
            return self.inner.read_metadata()

    hf.save({"t": torch.ones(2)}, checkpoint_id=tmp_path)
    state = {"t": torch.zeros(2)}
    reader: Any = Logging(hf.FileSystemReader(tmp_path).for_torch())
    stock_load(state, storage_reader=reader)
    assert state["t"].tolist() == [1, 1]


@pytest.mark.skipif(not IS_NEWEST, reason="older versions of torch have no such example")
def test_transforms_of_torchs_classes_are_applied_and_undone(tmp_path: Path) -> None:
    examples: Any = pytest.importorskip("torch.testing._internal.distributed.checkpoint_utils")
    state = {"bytes": b"Some Bytes", "text": "Text", "tensor": torch.arange(100)}
    hf.save(state, storage_writer=hf.FileSystemWriter(tmp_path, _extensions=[examples.Rot13Example()]))
    loaded = {"bytes": b"", "text": "", "tensor": torch.zeros(100, dtype=torch.int64)}
    registry = examples.get_test_extension_registry()
    hf.load(loaded, storage_reader=hf.FileSystemReader(tmp_path, registry))
    assert (loaded["bytes"], loaded["text"]) == (state["bytes"], state["text"])
    assert torch.equal(torch.as_tensor(loaded["tensor"]), torch.arange(100))

"""The shipped suites, on the file storage and on the default planners."""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem as FsspecMemory
from tests.contract.fsspec_file_systems import OtherLocalFileSystem, forget_memory
from tests.contract.memory_store import MemoryStore
from tests.contract.stream_file_systems import (
    DiskFileSystem,
    ListedMemoryFileSystem,
    MemoryFileSystem,
    StreamReader,
    StreamWriter,
)

import holdfast as hf
from holdfast._context import SaveContext
from holdfast._io.fsspec_store import open_fsspec
from holdfast._io.progress import ProgressTracker
from holdfast._storage.store_reader import StoreReader
from holdfast._storage.store_writer import StoreWriter
from holdfast.errors import StorageError
from holdfast.extension import ZStandard
from holdfast.testing import PlannerContract, StorageContract


class TestFileStorage(StorageContract):
    def make_writer(self, place: Path) -> hf.StorageWriter:
        return hf.FileSystemWriter(place)

    def make_reader(self, place: Path) -> hf.StorageReader:
        return hf.FileSystemReader(place)


class TestFileStorageWithThreads(StorageContract):
    def make_writer(self, place: Path) -> hf.StorageWriter:
        return hf.FileSystemWriter(place, thread_count=3, sync_files=False)

    def make_reader(self, place: Path) -> hf.StorageReader:
        return hf.FileSystemReader(place, thread_count=2)


class TestAFilePerItem(StorageContract):
    def make_writer(self, place: Path) -> hf.StorageWriter:
        return hf.FileSystemWriter(place, single_file_per_rank=False, sync_files=False)

    def make_reader(self, place: Path) -> hf.StorageReader:
        return hf.FileSystemReader(place, thread_count=1)


class TestCompressedFileStorage(StorageContract):
    def make_writer(self, place: Path) -> hf.StorageWriter:
        return hf.FileSystemWriter(place, _extensions=[ZStandard()], sync_files=False)

    def make_reader(self, place: Path) -> hf.StorageReader:
        return hf.FileSystemReader(place)


class TestFileStorageWithoutTorch(StorageContract):
    def make_writer(self, place: Path) -> hf.StorageWriter:
        return hf.FileSystemWriter(place, torch_compatible=False, sync_files=False)

    def make_reader(self, place: Path) -> hf.StorageReader:
        return hf.FileSystemReader(place)


def test_storages_pickle_during_a_save_and_a_load(tmp_path: Path) -> None:
    """A copy, in another process say, does not have the folder, and tells nobody how far it is."""
    writer = hf.FileSystemWriter(tmp_path)
    writer.store.make()
    writer.set_up_storage_writer(True, rank=3, context=SaveContext(rank=3, progress=ProgressTracker(print)))
    writer.prepare_global_plan([])
    copy = pickle.loads(pickle.dumps(writer))
    assert (copy.save_id, copy.path, copy.context.rank) == (writer.save_id, writer.path, 3)
    copy.reset()
    with pytest.raises(StorageError, match="another save"):
        hf.save({"a": 1}, checkpoint_id=tmp_path)
    writer.reset()
    hf.save({"a": 1}, storage_writer=copy)
    reader = pickle.loads(pickle.dumps(hf.FileSystemReader(tmp_path)))
    state = {"a": 0}
    hf.load(state, storage_reader=pickle.loads(pickle.dumps(reader)))
    assert state == {"a": 1}


class TestAStoreInMemory(StorageContract):
    """The writer and the reader know nothing of folders."""

    def make_writer(self, place: Path) -> hf.StorageWriter:
        return StoreWriter(MemoryStore(f"memory:{place}"))

    def make_reader(self, place: Path) -> hf.StorageReader:
        return StoreReader(MemoryStore(f"memory:{place}"))

    def stored_files(self, place: Path) -> dict[str, bytes]:
        store = MemoryStore(f"memory:{place}")
        return {name: bytes(store.read(name, max_bytes=1 << 30)) for name in store.names()}

    def replace_stored_file(self, place: Path, name: str, data: bytes | None) -> None:
        store = MemoryStore(f"memory:{place}")
        store.delete([name])
        if data is not None:
            store.replace(name, data)


class TestStreamsInMemory(StorageContract):
    fs: type[MemoryFileSystem] = MemoryFileSystem

    def make_writer(self, place: Path) -> hf.StorageWriter:
        return StreamWriter(f"mem:/{place}", self.fs())

    def make_reader(self, place: Path) -> hf.StorageReader:
        return StreamReader(f"mem:/{place}", self.fs())

    def stored_files(self, place: Path) -> dict[str, bytes]:
        start = f"mem:/{place}/"
        return {path[len(start) :]: data for path, data in self.fs.files.items() if path.startswith(start)}

    def replace_stored_file(self, place: Path, name: str, data: bytes | None) -> None:
        self.fs.files.pop(f"mem:/{place}/{name}", None)
        if data is not None:
            self.fs.files[f"mem:/{place}/{name}"] = data


class TestListedStreamsInMemory(TestStreamsInMemory):
    fs = ListedMemoryFileSystem


class TestStreamsOnDisk(StorageContract):
    def make_writer(self, place: Path) -> hf.StorageWriter:
        return StreamWriter(place, DiskFileSystem(), thread_count=2)

    def make_reader(self, place: Path) -> hf.StorageReader:
        return StreamReader(place, DiskFileSystem())


class TestFsspecInMemory(StorageContract):
    @pytest.fixture(autouse=True)
    def memory(self) -> Iterator[None]:
        yield
        forget_memory()

    def make_writer(self, place: Path) -> hf.StorageWriter:
        return hf.FsspecWriter(f"memory:/{place}", thread_count=2)

    def make_reader(self, place: Path) -> hf.StorageReader:
        return hf.FsspecReader(f"memory:/{place}")

    def stored_files(self, place: Path) -> dict[str, bytes]:
        fs = FsspecMemory()
        return {os.path.basename(path): fs.cat_file(path) for path in fs.ls(str(place), detail=False)}

    def replace_stored_file(self, place: Path, name: str, data: bytes | None) -> None:
        fs = FsspecMemory()
        fs.store.pop(f"{place}/{name}", None)
        if data is not None:
            fs.pipe_file(f"{place}/{name}", data)


class TestFsspecLocal(StorageContract):
    def make_writer(self, place: Path) -> hf.StorageWriter:
        return hf.FsspecWriter(f"file://{place}", sync_files=False)

    def make_reader(self, place: Path) -> hf.StorageReader:
        return hf.FsspecReader(f"file://{place}")


class TestFsspecWithRename(StorageContract):
    def make_writer(self, place: Path) -> hf.StorageWriter:
        return StoreWriter(open_fsspec(OtherLocalFileSystem(), f"other://{place}"), sync_files=False)

    def make_reader(self, place: Path) -> hf.StorageReader:
        return StoreReader(open_fsspec(OtherLocalFileSystem(), f"other://{place}"))


class TestDefaultPlanners(PlannerContract):
    def make_save_planner(self) -> hf.SavePlanner:
        return hf.DefaultSavePlanner()

    def make_load_planner(self) -> hf.LoadPlanner:
        return hf.DefaultLoadPlanner()


class TestDefaultPlannersOnNestedStates(PlannerContract):
    def make_save_planner(self) -> hf.SavePlanner:
        return hf.DefaultSavePlanner(dedup_save_to_lowest_rank=True)

    def make_load_planner(self) -> hf.LoadPlanner:
        return hf.DefaultLoadPlanner()

    def make_state(self) -> dict[str, Any]:
        return {
            "model": {"w": torch.arange(6.0).view(2, 3), 5: torch.tensor(1)},
            "list": [torch.ones(2), "x"],
            "n": 3,
        }

    def blank_state(self) -> dict[str, Any]:
        return {"model": {"w": torch.zeros(2, 3), 5: torch.tensor(0)}, "list": [torch.zeros(2), ""], "n": 0}

    def flat(self, state: dict[str, Any]) -> dict[str, Any]:
        flat = {f"model.{key}": value for key, value in state["model"].items()}
        return {**flat, "list.0": state["list"][0], "list.1": state["list"][1], "n": state["n"]}


class TestDefaultPlannersWithoutFlattening(PlannerContract):
    def make_save_planner(self) -> hf.SavePlanner:
        return hf.DefaultSavePlanner(flatten_state_dict=False)

    def make_load_planner(self) -> hf.LoadPlanner:
        return hf.DefaultLoadPlanner(flatten_state_dict=False)

"""The shipped suites, on the file storage and on the default planners."""

from pathlib import Path
from typing import Any

import torch
from tests.contract.memory_store import MemoryStore
from tests.contract.stream_file_systems import (
    DiskFileSystem,
    ListedMemoryFileSystem,
    MemoryFileSystem,
    StreamReader,
    StreamWriter,
)

import holdfast as hf
from holdfast._storage.store_reader import StoreReader
from holdfast._storage.store_writer import StoreWriter
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


class TestAStoreInMemory(StorageContract):
    """The writer and the reader know nothing of folders."""

    def make_writer(self, place: Path) -> hf.StorageWriter:
        return StoreWriter(MemoryStore(f"memory:{place}"))

    def make_reader(self, place: Path) -> hf.StorageReader:
        return StoreReader(MemoryStore(f"memory:{place}"))


class TestStreamsInMemory(StorageContract):
    fs: type[MemoryFileSystem] = MemoryFileSystem

    def make_writer(self, place: Path) -> hf.StorageWriter:
        return StreamWriter(f"mem:/{place}", self.fs())

    def make_reader(self, place: Path) -> hf.StorageReader:
        return StreamReader(f"mem:/{place}", self.fs())


class TestListedStreamsInMemory(TestStreamsInMemory):
    fs = ListedMemoryFileSystem


class TestStreamsOnDisk(StorageContract):
    def make_writer(self, place: Path) -> hf.StorageWriter:
        return StreamWriter(place, DiskFileSystem(), thread_count=2)

    def make_reader(self, place: Path) -> hf.StorageReader:
        return StreamReader(place, DiskFileSystem())


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

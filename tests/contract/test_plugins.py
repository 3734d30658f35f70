"""The shipped suites, on the storage of the examples and on the plain planners."""

from pathlib import Path

from folder_storage import FolderReader, FolderWriter

import holdfast
from holdfast.testing import PlainLoadPlanner, PlainSavePlanner, PlannerContract, StorageContract


class TestFolderStorage(StorageContract):
    def make_writer(self, place: Path) -> holdfast.StorageWriter:
        return FolderWriter(place)

    def make_reader(self, place: Path) -> holdfast.StorageReader:
        return FolderReader(place)


class TestPlainPlanners(PlannerContract):
    def make_save_planner(self) -> holdfast.SavePlanner:
        return PlainSavePlanner()

    def make_load_planner(self) -> holdfast.LoadPlanner:
        return PlainLoadPlanner()

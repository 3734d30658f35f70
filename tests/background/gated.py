"""Writers that wait or fail where a test wants it."""

import threading
from typing import Any

import holdfast
from holdfast.filesystem import FileSystemWriter

HANG_GUARD = 60.0


class Gated(FileSystemWriter):
    """Stops before it writes its data until it is let go."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reached = threading.Event()
        self.may_go = threading.Event()

    def write_data(self, plan: holdfast.SavePlan, planner: holdfast.SavePlanner) -> Any:
        self.reached.set()
        assert self.may_go.wait(HANG_GUARD)
        return super().write_data(plan, planner)


class GatedCommit(FileSystemWriter):
    """Stops inside of its commit until it is let go."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reached = threading.Event()
        self.may_go = threading.Event()

    def finish(self, metadata: holdfast.Metadata, results: Any) -> None:
        self.reached.set()
        assert self.may_go.wait(HANG_GUARD)
        super().finish(metadata, results)


class Failing(FileSystemWriter):
    """Fails when it writes."""

    def write_data(self, plan: holdfast.SavePlan, planner: holdfast.SavePlanner) -> Any:
        raise OSError(5, "on purpose")

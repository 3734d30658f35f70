"""A storage writer that stops when its save in the background is cancelled."""

from concurrent.futures import CancelledError

from holdfast._background.running_save import RunningSave
from holdfast._context import SaveContext
from holdfast._engine.ports import SavePlannerPort, WriterPort
from holdfast.metadata import Metadata
from holdfast.planner import SavePlan
from holdfast.storage import WriteResult


class CancellableWriter(WriterPort):
    """Asks before each step whether the save was cancelled."""

    def __init__(self, inner: WriterPort, running: RunningSave) -> None:
        super().__init__(inner)
        self._running = running
        self._commits = False

    def set_up(self, context: SaveContext) -> None:
        self._running.check()
        self._commits = context.is_coordinator
        self.inner.set_up(context)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._running.check()
        return self.inner.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._running.check()
        return self.inner.prepare_global_plan(plans)

    def write(self, plan: SavePlan, planner: SavePlannerPort) -> list[WriteResult]:
        """Write. The end of it is the last moment to cancel on every rank but the coordinator."""
        self._running.check()
        try:
            results = self.inner.write(plan, planner)
        except CancelledError:
            self._running.check()
            raise
        if not self._commits:
            self._running.close()
        return results

    def commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, unless the save was cancelled."""
        self._running.close()
        self.inner.commit(metadata, results)

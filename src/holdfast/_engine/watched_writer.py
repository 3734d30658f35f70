"""A storage writer that tells how far it is, and that stops when its save is cancelled."""

import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.futures import Future

from holdfast._engine.request import Delegate, Request
from holdfast._io.oversight import overseen_by
from holdfast._plan.own_values import own_values
from holdfast._plan.write_lines import columns_of
from holdfast.metadata import Metadata, StorageMeta
from holdfast.planner import SavePlan, SavePlanner
from holdfast.storage import StorageWriter, WriteResult

__all__ = ["WatchedWriter"]


class WatchedWriter(StorageWriter):
    """Passes every call on to ``inner``, unless the request is cancelled.

    Args:
        inner: Who writes. A ``Delegate`` is asked and told; of any other the values are counted that it
            takes, and the bytes if it writes in our ways.
        request: Who is told of the progress, and is asked before each step.
    """

    def __init__(self, inner: StorageWriter, request: Request) -> None:
        self.inner = inner
        self._request = request
        self._commits = False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.inner.reset(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return self.inner.storage_meta()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._request.check()
        self._commits = is_coordinator
        # Writers from before these keyword arguments existed do not take them.
        if "kwargs" in inspect.signature(self.inner.set_up_storage_writer).parameters:
            self.inner.set_up_storage_writer(is_coordinator, *args, **kwargs)
        else:
            self.inner.set_up_storage_writer(is_coordinator)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._request.check()
        return self.inner.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._request.check()
        return self.inner.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Write, counting; on every rank but the coordinator the last moment to cancel is the end of it."""
        self._request.check()
        columns = columns_of(plan)
        sizes: Counter[str] = Counter()
        for key, nbytes in zip(columns.keys, columns.line_nbytes(), strict=True):
            sizes[key] += nbytes
        self._request.begin_writing(sum(sizes.values()))
        if isinstance(self.inner, Delegate):
            self._request.delegate(self.inner)
            watching: AbstractContextManager[None] = self._cancellation_in_our_words()
        else:
            watching = _told_of_values(planner, lambda key: self._request.take(sizes.pop(key, 0)))
        with watching, overseen_by(self._request):
            done = self.inner.write_data(plan, planner)
            done.wait()
        self._request.end_writing()
        if not self._commits:
            self._request.close()
        return done

    @contextmanager
    def _cancellation_in_our_words(self) -> Iterator[None]:
        try:
            yield
        except CancelledError:
            self._request.check()
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, if nobody has cancelled by now."""
        self._request.close()
        self.inner.finish(metadata, results)

    def abandon(self, *, outcome_is_known: bool = True) -> None:
        """What ``run_save`` asks of a writer whose save has failed, if the writer knows how."""
        abandon = getattr(self.inner, "abandon", None)
        if abandon is not None:
            abandon(outcome_is_known=outcome_is_known)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        raise NotImplementedError(f"{cls.__name__} stands for one writer; {checkpoint_id} was not looked at")


class _Values(dict[str, Any]):
    """A planner's flat state that tells which value is looked at."""

    __slots__ = ("tell",)
    tell: Callable[[str], None]

    def __getitem__(self, key: str) -> Any:
        self.tell(key)
        return super().__getitem__(key)


@contextmanager
def _told_of_values(planner: Any, tell: Callable[[str], None]) -> Iterator[None]:
    """Have ``tell`` called with the key of each value that the writer asks for, inside a with-block.

    The writer must not notice: one that may take values straight from the planner's state goes on doing so,
    which for thousands of small tensors is three times as fast as asking for each.
    """
    values = own_values(planner, "resolve_data")
    if values is not None:
        told = _Values(values)
        told.tell = tell
        planner.state_dict = told
        try:
            yield
        finally:
            planner.state_dict = values
        return
    resolve = planner.resolve_data

    def resolve_data(write_item: Any) -> Any:
        tell(write_item.index.fqn)
        return resolve(write_item)

    before = vars(planner).get("resolve_data")
    planner.resolve_data = resolve_data
    try:
        yield
    finally:
        if before is None:
            del planner.resolve_data
        else:
            planner.resolve_data = before

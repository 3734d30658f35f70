"""Owns the writer that has its data written by the helper: everything else stays in the trainer."""

import pickle
import threading
from concurrent.futures import CancelledError
from typing import NamedTuple

from torch.futures import Future

from holdfast._engine.ports import SavePlannerPort, WriterPort
from holdfast._helper.frames import DONE, Frame
from holdfast._helper.keeper import ready_helper
from holdfast._helper.parcel import pack, refuse_unportable
from holdfast._helper.slate import Slot
from holdfast._plan.write_columns import columns_of
from holdfast._staging.staged import StagedState
from holdfast.errors import RemoteError, UsageError
from holdfast.metadata import Metadata
from holdfast.planner import SavePlan, SavePlanner
from holdfast.storage import WriteResult

__all__ = ["Progress", "RemoteWriter", "remote_writer"]


class Progress(NamedTuple):
    """How far a write is, in bytes of tensors."""

    done: int
    total: int


def remote_writer(
    writer: WriterPort, staged: StagedState, planner: SavePlanner | None = None
) -> "RemoteWriter":
    """A writer whose data is written by the helper process, from the staged memory.

    Args:
        writer: Does everything else here, and is copied into the helper for ``write_data``.
        staged: What is saved, in shared memory. It must not be released before the save has ended.
        planner: If given, it is made sure now that it can go along.

    Raises:
        UsageError: The memory is not shared, or ``writer`` or ``planner`` cannot be pickled.
    """
    if staged.fd is None:
        raise UsageError(
            "the state was staged into memory of this process alone, which the helper cannot see: stage with "
            "use_shared_memory=True, or save in a thread"
        )
    refuse_unportable(writer.plugin, "storage writer")
    if planner is not None:
        refuse_unportable(planner, "planner")
    return RemoteWriter(writer, staged)


class WriteFuture(Future):  # type: ignore[type-arg]
    """The results of a write that another process does.

    What ``wait`` raises is held by Python. torch's own would hold it where the garbage collector cannot look,
    while its traceback holds the future and with that the state: both would stay for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ended = threading.Event()
        self._failure: Exception | None = None

    def wait(self) -> list[WriteResult]:
        """The results, when there are; raises what went wrong."""
        self._ended.wait()
        if self._failure is None:
            results: list[WriteResult] = super().wait()
            return results
        try:
            raise self._failure
        finally:
            del self

    def complete(self, results: list[WriteResult]) -> None:
        """All is written."""
        self.set_result(results)
        self._ended.set()

    def fail(self, failure: Exception) -> None:
        """It was not."""
        self._failure = failure
        self.set_exception(RemoteError.from_exception(failure))
        self._ended.set()


class RemoteWriter(WriterPort):
    """Passes every call on to ``inner``, except ``write_data``: that is done by a copy of it in the helper.

    What the copy has noted in its attributes meanwhile is noted in ``inner`` too, before the future
    completes. If ``inner`` has a method ``expect_files(plan)``, it is called before: a helper that is killed
    leaves files which only ``inner.abandon`` can remove.
    """

    def __init__(self, inner: WriterPort, staged: StagedState) -> None:
        super().__init__(inner)
        self._staged = staged
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._ended.set()
        self._slot: Slot | None = None
        self._total = 0
        self._pid: int | None = None
        self._is_cancelled = False

    def write(self, plan: SavePlan, planner: SavePlannerPort) -> list[WriteResult]:
        """Have the helper write, and return the results."""
        return self.start_writing(plan, planner.plugin).wait()

    def start_writing(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Have the helper write; starts one if there is none.

        Returns:
            A future that completes when the data is on stable storage. It raises what was raised there, with
            the helper's traceback as its cause; StorageError if the helper is gone; CancelledError.

        Raises:
            UsageError: Writer or planner cannot be handed over; nothing was written.
            StorageError: The helper could not be started; nothing was written.
        """
        self._refuse_if_cancelled()
        self._staged.wait()
        body = pack(plan, planner, self.plugin, self._staged._base)  # noqa: SLF001
        helper = ready_helper()
        self.inner.expect_files(plan)
        done = WriteFuture()
        self._total = sum(columns_of(plan).item_nbytes())
        self._ended.clear()

        def answer(frame: Frame | None, failure: Exception | None) -> None:
            self._take_answer(done, frame, failure)

        assert self._staged.fd is not None
        self._pid = helper.pid
        try:
            slot = helper.submit(body, self._staged.fd, answer)
        except BaseException:
            self._ended.set()
            raise
        with self._lock:
            self._slot = slot
            if self._is_cancelled:
                slot.cancel()
        return done

    def _take_answer(self, done: WriteFuture, frame: Frame | None, failure: Exception | None) -> None:
        results: list[WriteResult] | None = None
        try:
            if frame is None:
                assert failure is not None
            elif frame.kind == DONE:
                results, changed = pickle.loads(frame.body)
                for name, value in changed.items():
                    setattr(self.plugin, name, pickle.loads(value))
            else:
                failure = _failure_in(frame, self._pid)
            self._refuse_if_cancelled()
        except Exception as error:  # noqa: BLE001 - whoever waits for the future is told
            failure = error
        self._ended.set()
        if failure is not None:
            done.fail(failure)
        else:
            assert results is not None
            done.complete(results)

    def cancel(self) -> None:
        """Have the write stop, within a few MiB. Never waits; a save that is not committed yet will not be.

        The future completes when the helper has stopped writing: one that is stopped itself does that when it
        goes on, or is killed (``kill_helper``).
        """
        with self._lock:
            self._is_cancelled = True
            if self._slot is not None and not self._ended.is_set():
                self._slot.cancel()

    def _refuse_if_cancelled(self) -> None:
        if self._is_cancelled:
            raise CancelledError("the save was cancelled")

    def progress(self) -> Progress:
        """How much of the data is written."""
        slot = self._slot
        return Progress(0 if slot is None else min(slot.done, self._total), self._total)

    def commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, here; raises CancelledError if that is not wanted any more."""
        self._refuse_if_cancelled()
        self.inner.commit(metadata, results)

    def abandon(self, *, outcome_is_known: bool) -> None:
        """After a save that failed: have the helper stop, and when it has, let ``inner`` clean up."""
        self.cancel()
        self._ended.wait()
        self.inner.abandon(outcome_is_known=outcome_is_known)


def _failure_in(frame: Frame, pid: int | None) -> Exception:
    """The helper's error, of its own class if this process has that; the helper's traceback is its cause."""
    pickled, described, trace = pickle.loads(frame.body)
    try:
        error = pickle.loads(pickled)
    except Exception:  # noqa: BLE001 - a class that only the helper could import
        error = described
    if not isinstance(error, Exception):
        error = described
    error.__cause__ = RemoteError(f"in the helper process {pid}:\n{trace}", type_name=described.type_name)
    result: Exception = error
    return result

"""The storage writer whose data is written by the writer process. Everything else stays in the trainer."""

import contextlib
import pickle
import threading
import time
from concurrent import futures
from typing import Any

from holdfast._context import SaveContext
from holdfast._engine.ports import SavePlannerPort, WriterPort
from holdfast._staging.staged import StagedState
from holdfast._writer_process.client import ready_writer_process
from holdfast._writer_process.process_messages import DONE, ProcessMessage
from holdfast._writer_process.request_planner import request_planner
from holdfast._writer_process.returned_state import WriteAnswer
from holdfast._writer_process.save_request import SaveRequest, pack
from holdfast._writer_process.shared_progress import ProgressSlot
from holdfast.errors import RemoteError, UsageError
from holdfast.metadata import Metadata
from holdfast.planner import SavePlan
from holdfast.storage import WriteResult


class ProcessWriter(WriterPort):
    """The same as ``inner``, but has the data written by a copy of its plugin in another process.

    After the write, the plugin in the trainer gets the attributes that the copy has changed.

    Args:
        inner: The writer that does everything else.
        staged: The state that is saved, in shared memory. It must not be released before the save has ended.

    Raises:
        UsageError: The memory is not shared.
    """

    def __init__(self, inner: WriterPort, staged: StagedState) -> None:
        super().__init__(**vars(inner))
        if staged.fd is None:
            raise UsageError(
                "the writer process cannot read the staged state, because it is not in shared memory: stage "
                "with use_shared_memory=True, or save in a thread"
            )
        self._staged = staged
        self._fd = staged.fd
        self._lock = threading.Lock()
        self._slot: ProgressSlot | None = None
        self._reply: futures.Future[ProcessMessage] | None = None
        self._is_cancelled = False
        self._context: SaveContext | None = None

    def set_up(self, context: SaveContext) -> None:
        """Tell the writer of the save that begins."""
        self._context = context
        context.writes_elsewhere = True
        super().set_up(context)

    def write(self, plan: SavePlan, planner: SavePlannerPort) -> list[WriteResult]:
        """Have the writer process write, and wait until the data is on stable storage.

        What ranks must exchange bytes for is written here: the connections are those of this process.

        An exception of the writer process is raised here; its cause has the traceback of that process.

        Raises:
            UsageError: Writer or planner cannot be pickled; nothing was written.
            StorageError: The writer process could not be started, or has died.
            CancelledError: ``cancel`` was called.
        """
        began = time.perf_counter()
        self._refuse_if_cancelled()
        self._staged.wait()
        if self.needs_other_ranks(plan):
            return super().write(plan, planner)
        self.expect_files(plan)
        request = SaveRequest(plan, request_planner(plan, planner.plugin), self.plugin)
        body = pack(request, self._staged.base)
        process = ready_writer_process()
        slot, reply = process.submit(body, self._fd)
        del request, body
        with self._lock:
            self._slot, self._reply = slot, reply
            if self._is_cancelled:
                slot.cancel()
        futures.wait([reply])
        self._refuse_if_cancelled()
        message = reply.result()
        if message.kind != DONE:
            raise _failure_in(message, process.pid)
        answer: WriteAnswer
        answer, changed = pickle.loads(message.body)
        for name, value in changed.items():
            setattr(self.plugin, name, value)
        self._take_measures(answer, slot.nbytes_done, time.perf_counter() - began)
        results: list[WriteResult] = answer.results
        return results

    def _take_measures(self, answer: WriteAnswer, nbytes: int, seconds: float) -> None:
        """Take over what the writer process has counted, and tell its work from the way there and back."""
        context = self._context
        if context is not None:
            context.progress.adopt(nbytes, answer.events)
            if context.recorder is not None:
                context.recorder.clock.insert_before("hand over", seconds - answer.seconds)

    def cancel(self) -> None:
        """Stop the write within a few MiB. Returns at once; an uncommitted save will not be committed.

        ``write`` raises when the writer process has stopped writing. If that process is itself stopped
        (SIGSTOP), this is when it continues, or is killed.
        """
        with self._lock:
            self._is_cancelled = True
            if self._slot is not None and self._reply is not None and not self._reply.done():
                self._slot.cancel()

    def _refuse_if_cancelled(self) -> None:
        if self._is_cancelled:
            raise futures.CancelledError("the save was cancelled")

    @property
    def nbytes_done(self) -> int:
        """The bytes that were written to files so far, whichever process writes."""
        if self._slot is not None:
            return self._slot.nbytes_done
        return 0 if self._context is None else self._context.progress.nbytes_done

    def commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, in the trainer; raises CancelledError if ``cancel`` was called."""
        self._refuse_if_cancelled()
        super().commit(metadata, results)

    def abandon(self, *, outcome_is_known: bool) -> None:
        """Clean up after a failed save, once the writer process has stopped writing."""
        self.cancel()
        if self._reply is not None:
            futures.wait([self._reply])
        super().abandon(outcome_is_known=outcome_is_known)


def _failure_in(message: ProcessMessage, pid: int | None) -> Exception:
    """The error of an answer, of its own class if this process has that. Its cause is the other traceback."""
    pickled, described, trace = pickle.loads(message.body)
    error: Any = described
    with contextlib.suppress(Exception):  # a class that only the writer process can import
        error = pickle.loads(pickled)
    result: Exception = error if isinstance(error, Exception) else described
    result.__cause__ = RemoteError(f"in the writer process {pid}:\n{trace}", type_name=described.type_name)
    return result

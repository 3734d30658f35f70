"""The thread that runs a save in the background."""

import logging
import os
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import Any

from holdfast._background.handover import Handover
from holdfast._background.running_save import RunningSave, is_cancellation
from holdfast._background.running_saves import running_saves
from holdfast._background.save_future import SaveFuture
from holdfast._background.short_turns import short_turns
from holdfast._background.staged_copy import StateCopy
from holdfast._engine.ports import SavePlannerPort, WriterPort
from holdfast._engine.save import run_save
from holdfast._ranks.exchange import Exchange
from holdfast._transfer_recorder import TransferRecorder
from holdfast._writer_process.process_writer import ProcessWriter
from holdfast.errors import CheckpointException
from holdfast.metadata import Metadata
from holdfast.records import publish

logger = logging.getLogger(__name__)

# More would starve it where all cores are busy: there 256 MiB took 0.3 to 0.4 s at 0, 0.5 to 0.8 s at 5
# and 2.2 to 3.8 s at 19, and the loop beside it was not measurably faster for that.
_NICENESS = 5


@dataclass
class SaveThread:
    """One save, from the moment when the state is staged or is being staged.

    The thread is not a daemon: the interpreter waits for it when the program ends, however that comes about,
    before anything that it needs is taken down.

    Attributes:
        handover: Decides which thread frees what the save holds.
        running: Its shared state.
        future: What the caller is given.
        exchange: Opened by the trainer's thread, left by this one.
        copy: The copy of the state, complete or on its way.
        planner: Decides what is written.
        writer: The writer of the save.
        in_process: Whether another process writes.
        use_collectives: As for ``save``.
        recorder: Measures the save.
        user_metadata: What the caller wants to keep with the checkpoint, encoded.
    """

    handover: Handover
    running: RunningSave
    future: SaveFuture
    exchange: Exchange
    copy: StateCopy
    planner: SavePlannerPort
    writer: WriterPort
    recorder: TransferRecorder
    in_process: bool
    use_collectives: bool
    user_metadata: bytes

    def start(self) -> None:
        """Start the thread. The caller does not wait for anything after this.

        Raises:
            RuntimeError: The system has no thread to give; then nothing has begun.
        """
        self.recorder.clock.count(self.copy.nbytes)
        self.running.tracker.expect(self.copy.nbytes)
        if self.copy.is_complete:
            self.future.staged.set_result(None)
        self.recorder.release_caller()
        thread = threading.Thread(target=self._run, name=f"holdfast-save-{self.running.number}")
        thread.daemon = False  # also where the thread that calls is one
        running_saves.add(self.running)
        self.handover.held.callback(self.future.give_up)
        self.handover.held.callback(self.running.ended.set)
        self.handover.offer(self.running.cancel)
        thread.start()

    def _run(self) -> None:
        if not self.handover.take():
            return
        self.running.thread = threading.get_ident()
        _lower_priority()
        metadata: Metadata | None = None
        error: BaseException | None = None
        try:
            metadata = self._save()
        except BaseException as raised:  # noqa: BLE001 - whatever it is, the future tells it
            error = raised
            _forget_locals(raised)
        self._end(metadata, error)

    def _save(self) -> Metadata:
        with self.exchange, short_turns():
            state, writer = self._obtain()
            self.running.check()
            metadata = run_save(
                state,
                self.planner,
                writer,
                self.exchange,
                use_collectives=self.use_collectives,
                progress=self.running.tracker,
                cancellation=self.running,
                recorder=self.recorder,
                user_metadata=self.user_metadata,
            )
        metadata.record = self.future.record = self.recorder.record()
        publish(metadata.record)
        return metadata

    def _obtain(self) -> tuple[dict[str, Any], WriterPort]:
        """The copied state and its writer, once the copy is complete; raises why there is no copy."""
        state = self.copy.wait()
        if not self.future.staged.done():
            self.future.staged.set_result(None)
        if not self.in_process:
            return state, self.writer
        shared = self.copy.wait_shared()
        writer = ProcessWriter(self.writer, shared)
        self.running.writes_elsewhere(writer)
        return shared.state, writer

    def _end(self, metadata: Metadata | None, error: BaseException | None) -> None:
        """Free everything, then finish the future: its callbacks may begin the next save at once."""
        running, future, release = self.running, self.future, self.copy.release
        vars(self).clear()
        try:
            release()
        except Exception as failure:  # noqa: BLE001 - a stranger's stager may raise anything
            logger.warning("%s: the staged copy could not be released: %r", running.place, failure)
        cancelled = error is not None and is_cancellation(error)
        if error is not None and not cancelled:
            running.error = error
        running.group = None
        running.ended.set()
        running.keys = frozenset()
        # In this order: a callback may begin the next save, which waits until this future is done.
        _finish(future, error, metadata, cancelled=cancelled)
        if not future.staged.done():
            _finish(future.staged, error, None, cancelled=cancelled)
        del future
        if running.is_unseen_failure and not running.is_held:
            # If the caller holds the future, that tells of the failure, and the log need not repeat it.
            logger.error("the save to %s in the background failed: %s", running.place, _in_one_line(error))


def _finish(future: Any, error: BaseException | None, value: Any, *, cancelled: bool) -> None:
    if cancelled:
        future.give_up()
    elif error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


def _in_one_line(error: BaseException | None) -> str:
    """The first line of what the first rank that failed says."""
    if isinstance(error, CheckpointException) and error.failures:
        error = error.failures[min(error.failures)][0]
    return "".join(traceback.format_exception_only(error)).partition("\n")[0]


def _lower_priority() -> None:
    """Lower the priority of this thread and of those that it starts; the trainer's threads keep theirs."""
    if sys.platform == "linux":
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        except OSError:
            pass  # a nicety: some sandboxes forbid it


def _forget_locals(error: BaseException | None) -> None:
    """Release the staged state, which the frames of a traceback hold for as long as the error lives."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__

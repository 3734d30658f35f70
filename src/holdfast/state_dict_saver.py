"""Saving a checkpoint, and going on with something else meanwhile."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from typing_extensions import deprecated

from holdfast._background.handover import Handover
from holdfast._background.running_save import RunningSave, exclusive_keys
from holdfast._background.running_saves import WhenBusy, running_saves
from holdfast._background.save_future import SaveFuture
from holdfast._background.save_thread import SaveThread
from holdfast._background.shutdown import prepare_for_shutdown, set_grace_period
from holdfast._background.staged_copy import StateCopy, stager_keys, take_copy
from holdfast._call_arguments import checked_call
from holdfast._engine.adapt import adapt_save_planner, adapt_writer, stages_itself
from holdfast._engine.save import run_save
from holdfast._engine.stateful_objects import open_states
from holdfast._engine.tensor_subclasses import open_subclasses
from holdfast._format.manifest import encode_user_metadata
from holdfast._io.page_cache import PageCache
from holdfast._io.progress import Progress
from holdfast._names_elsewhere import names_of
from holdfast._ranks.group_exchange import DEFAULT_PEER_TIMEOUT, open_exchange
from holdfast._storage_choice import choose_save_planner, choose_writer
from holdfast._transfer_recorder import TransferRecorder
from holdfast._writer_process.client import start_writer_process
from holdfast.default_planner import DefaultSavePlanner
from holdfast.errors import UsageError
from holdfast.metadata import STATE_DICT_TYPE, Metadata
from holdfast.planner import SavePlanner
from holdfast.progress_display import ProgressOption, tracking
from holdfast.records import publish
from holdfast.staging import AsyncStager
from holdfast.stateful import Stateful
from holdfast.storage import StorageWriter

__all__ = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "Progress",
    "SaveFuture",
    "async_save",
    "save",
    "save_state_dict",
    "set_grace_period",
]

if not TYPE_CHECKING:
    __getattr__ = names_of(__name__, "_storage_utils", "logger", "planner", "staging", "storage", "utils")


@checked_call("storage_writer")
def save(
    state_dict: STATE_DICT_TYPE | Stateful,  # type: ignore[type-arg]
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    overwrite: bool | None = None,
    page_cache: PageCache | None = None,
    check_replicas: bool | Literal["full", "raise"] | None = None,
    peer_timeout: float = DEFAULT_PEER_TIMEOUT,
    progress: ProgressOption = None,
    user_metadata: Mapping[str, Any] | None = None,
) -> Metadata:
    """Save a state: on every rank of the group, each its own part.

    It waits for saves in the background that go to the same place, or use the same writer or planner.

    When ``save`` returns, on any rank, the checkpoint is complete, counted and on stable storage. When it
    raises, the old checkpoint is still there, whole. One exception: if only the final flush to disk failed,
    the new one is there. A crash at any instant leaves the old checkpoint or the new one.

    Stateful objects (modules, optimizers), wherever they stand in the state, are saved as their
    ``state_dict()``. Nested dicts, lists, tuples, numbers, strings, bytes and other picklable values are
    saved as they are, keys of every type included.

    What several ranks hold alike is written once. Small values that differ under one key are kept for each
    rank, and the coordinator warns; see ``check_replicas`` of :class:`DefaultSavePlanner`.

    Args:
        state_dict: What to save: a dict. It is not changed. A single module, optimizer or other Stateful
            object is saved as its ``state_dict()``.
        checkpoint_id: Where to: a folder. Not needed if ``storage_writer`` knows. It may be passed as the
            second argument, without its name.
        storage_writer: What to write with; by default a ``FileSystemWriter`` on ``checkpoint_id``.
        planner: What decides what is written; by default ``DefaultSavePlanner()``.
        process_group: The ranks that save together; by default all. Rank 0 of it coordinates.
        no_dist: Save from this process alone, whatever groups there are.
        use_collectives: False: each rank saves its own part (``__{rank}.metadata``) and does not
            communicate.
        overwrite: False: raise if the folder has a checkpoint already. Not with ``storage_writer``, which
            has this option itself.
        page_cache: What the files leave in the page cache, "auto", "keep" or "bypass", as for
            :class:`FileSystemWriter`. Not with ``storage_writer``.
        check_replicas: As for :class:`DefaultSavePlanner`. Not with ``planner``.
        peer_timeout: After how many seconds without a sign of life a rank is taken for dead, and all
            others raise. Slow storage is not silence: a rank that writes for hours is waited for.
        progress: True shows how far rank 0 is: as a bar in a terminal, as log lines elsewhere. A function is
            called with a :class:`Progress` every few MiB that this rank has written, one call at a time, from
            the threads that write. An exception from it stops the save and is raised.
        user_metadata: A small dict of plain values to keep in the metadata of the checkpoint, committed with
            it: ``holdfast.FileSystemReader(place).read_metadata().user_metadata``. That of rank 0 counts.

    Returns:
        The metadata of the checkpoint. Its ``record`` says what the save did, by phase and rank.

    Raises:
        UsageError: Neither a place nor a writer was given, or the state is no dict.
        CheckpointException: A step failed on some rank; also an instance of that failure's class. Or an
            earlier save in the background failed and nobody asked its future: then this call saves nothing.

    Example:
        >>> holdfast.save({"model": model, "optimizer": optimizer}, checkpoint_id="checkpoints/100")
    """
    place, keys = exclusive_keys(checkpoint_id, storage_writer, planner)
    kept = encode_user_metadata(user_metadata)
    recorder = TransferRecorder("save", place)
    recorder.clock.begin_wait()
    with open_exchange(
        process_group,
        purpose="save",
        no_dist=no_dist,
        use_collectives=use_collectives,
        peer_timeout=peer_timeout,
    ) as exchange:
        running_saves.come_after(exchange, process_group, keys)
        recorder.clock.end_wait()
        opened, _ = open_states(state_dict)
        writer = choose_writer(storage_writer, checkpoint_id, overwrite=overwrite, page_cache=page_cache)
        chosen = choose_save_planner(planner, check_replicas=check_replicas)
        with tracking(progress, f"saving {place}", rank=exchange.rank) as tracker:
            metadata = run_save(
                opened,
                adapt_save_planner(chosen),
                adapt_writer(writer),
                exchange,
                use_collectives=use_collectives,
                progress=tracker,
                recorder=recorder,
                user_metadata=kept,
            )
    metadata.record = recorder.record()
    publish(metadata.record)
    return metadata


@deprecated("save_state_dict is deprecated: use save", category=FutureWarning)
def save_state_dict(
    state_dict: STATE_DICT_TYPE,  # type: ignore[type-arg]
    storage_writer: StorageWriter,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
    use_collectives: bool = True,
) -> Metadata:
    """The name of :func:`save` before torch 2.2. Stateful objects are not opened."""
    _, keys = exclusive_keys(None, storage_writer, planner)
    with open_exchange(
        process_group,
        purpose="save",
        no_dist=no_dist,
        use_collectives=use_collectives,
        coordinator_rank=coordinator_rank,
    ) as exchange:
        running_saves.come_after(exchange, process_group, keys)
        storage_writer.reset()
        return run_save(
            state_dict,
            adapt_save_planner(DefaultSavePlanner() if planner is None else planner),
            adapt_writer(storage_writer),
            exchange,
            use_collectives=use_collectives,
        )


# The same without the warning; programs call it by this name of torch's.
_save_state_dict: Callable[..., Metadata] = save_state_dict.__wrapped__  # type: ignore[attr-defined]


def _stateful_to_state_dict(state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:  # type: ignore[type-arg]
    """A copy of the state, with every Stateful object replaced by its state."""
    return open_states(state_dict)[0]


class AsyncCheckpointerType(Enum):
    """Where a save in the background does its work: in a thread of this process, or in another process."""

    THREAD = "thread"
    PROCESS = "process"

    @classmethod
    def _missing_(cls, value: object) -> "AsyncCheckpointerType":
        """Take torch's enumeration of the same name for ours.

        Raises:
            UsageError: It is something else.
        """
        for kind in cls:
            if isinstance(value, Enum) and value.value == kind.value:
                return kind
        raise UsageError(
            f"async_checkpointer_type is AsyncCheckpointerType.THREAD or .PROCESS, not {value!r}", found=value
        )


@dataclass
class AsyncSaveResponse:
    """The return value of ``async_save`` if the stager is an asynchronous one.

    Attributes:
        staging_completion: Done when the copy is complete, so that the original may change.
        upload_completion: Done when the checkpoint is durable: a :class:`SaveFuture`.
    """

    staging_completion: Future[None]
    upload_completion: Future[Any]


@checked_call("storage_writer")
def async_save(
    state_dict: STATE_DICT_TYPE | Stateful,  # type: ignore[type-arg]
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    overwrite: bool | None = None,
    page_cache: PageCache | None = None,
    check_replicas: bool | Literal["full", "raise"] | None = None,
    when_busy: WhenBusy = "wait",
    peer_timeout: float = DEFAULT_PEER_TIMEOUT,
    user_metadata: Mapping[str, Any] | None = None,
) -> SaveFuture | AsyncSaveResponse:
    """Copy a state, and save the copy in the background: on every rank of the group, each its own part.

    The checkpoint holds the values of the moment of the call, whatever is done to the state after it. What
    ``save`` promises of a checkpoint holds here too. Saves that share a place, a stager, a writer or a
    planner are made one at a time, in the order of the calls. The program does not end before its saves have.

    A failure is raised by the future. If nobody asks the future, the next ``save`` or ``load`` raises the
    failure on every rank. The next ``async_save`` raises it too; if you still hold the failed future, it
    waits one call longer. If the program ends first, it prints the failure and exits with status 120.

    Args:
        state_dict: What to save: a dict. It is not changed. A single module, optimizer or other Stateful
            object is saved as its ``state_dict()``.
        checkpoint_id: Where to: a folder. Not needed if ``storage_writer`` knows. It may be passed as the
            second argument, without its name.
        storage_writer: What to write with; by default a ``FileSystemWriter`` on ``checkpoint_id``.
        planner: What decides what is written; by default ``DefaultSavePlanner()``.
        process_group: The ranks that save together; by default all. Rank 0 of it coordinates.
        async_checkpointer_type: A thread, or a process beside this one, which disturbs training less.
        async_stager: What copies. By default ``storage_writer`` if it stages in a way of its own, or else
            buffers that are kept for the next save. If you pass a stager, you must close it.
        no_dist: Save from this process alone, whatever groups there are.
        use_collectives: False: each rank saves its own part and does not communicate.
        overwrite: As for :func:`save`.
        page_cache: As for :func:`save`.
        check_replicas: As for :func:`save`.
        when_busy: What to do while an earlier save that shares something with this one is not done, on any
            rank: ``"wait"`` for it, ``"skip"`` this one, or ``"raise"``.
        peer_timeout: After how many seconds without a sign of life a rank is taken for dead.
        user_metadata: As for :func:`save`.

    Returns:
        A future of the metadata, or with an asynchronous stager two futures. See :class:`SaveFuture` for
        what it can do besides: how long the call waited, progress, cancelling, and whether the copy is made.

    Raises:
        UsageError: The arguments make no sense, or there is an earlier save and ``when_busy`` is "raise".
        PlanError: A value cannot be copied. The futures of the other ranks raise a CheckpointException.
        CheckpointException: An earlier save failed and nobody asked its future; nothing is saved.

    Example:
        >>> saving = holdfast.async_save({"model": model}, checkpoint_id="checkpoints/100")
        >>> train()
        >>> saving.result()
    """
    if when_busy not in ("wait", "skip", "raise"):
        raise UsageError(f"when_busy is 'wait', 'skip' or 'raise', not {when_busy!r}", found=when_busy)
    prepare_for_shutdown()
    in_process = AsyncCheckpointerType(async_checkpointer_type) is AsyncCheckpointerType.PROCESS
    stager = _chosen_stager(async_stager, storage_writer)
    place, keys = exclusive_keys(checkpoint_id, storage_writer, planner)
    kept = encode_user_metadata(user_metadata)
    recorder = TransferRecorder("save", place, "process" if in_process else "thread")
    recorder.clock.begin_wait()

    with Handover() as handover:
        exchange = open_exchange(
            process_group,
            purpose="save",
            no_dist=no_dist,
            use_collectives=use_collectives,
            peer_timeout=peer_timeout,
        )
        handover.held.push(exchange)
        keys |= stager_keys(stager, shared=in_process)
        running = running_saves.begin(place, keys, exchange, process_group)
        waited = running_saves.begin_after(running, exchange, when_busy)
        if waited is None:
            return _skipped(running)
        recorder.clock.end_wait()
        if in_process:
            # It takes seconds for the first time, in which the state is copied and planned.
            start_writer_process(wait=False)
        opened, _ = open_states(state_dict)
        writer = adapt_writer(
            choose_writer(storage_writer, checkpoint_id, overwrite=overwrite, page_cache=page_cache)
        )
        planner_port = adapt_save_planner(choose_save_planner(planner, check_replicas=check_replicas))
        recorder.clock.enter("stage")
        # The parts of subclasses are copied as memory; the tensors themselves would be as objects.
        copy = take_copy(stager, open_subclasses(opened, planner_port), shared=in_process)
        handover.held.callback(copy.release)
        future = SaveFuture(running, waited=waited)
        SaveThread(
            *(handover, running, future, exchange, copy, planner_port, writer, recorder),
            in_process=in_process,
            use_collectives=use_collectives,
            user_metadata=kept,
        ).start()
    return _handed_over(future, copy, stager)


def _chosen_stager(given: AsyncStager | None, writer: StorageWriter | None) -> Any:
    """The stager that copies the state; None for our own buffers."""
    return writer if given is None and writer is not None and stages_itself(writer) else given


def _handed_over(future: SaveFuture, copy: StateCopy, stager: Any) -> SaveFuture | AsyncSaveResponse:
    """The return value of ``async_save`` for a save that runs in the background."""
    if copy.is_asynchronous:
        return AsyncSaveResponse(staging_completion=future.staged, upload_completion=future)
    if stager is not None and stager.should_synchronize_after_execute:
        try:
            stager.synchronize_staging()
        except BaseException:
            future.cancel()
            raise
    return future


def _skipped(running: RunningSave) -> SaveFuture:
    future = SaveFuture(running, skipped=True)
    future.staged.set_result(None)
    future.set_result(None)
    return future

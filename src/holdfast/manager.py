"""The checkpoints of a run: saved when they should be, kept as long as they should be, and found again.

Policies are small frozen values that are joined with ``|``:

========================  ===========================================================================
``keep=``                 what is kept
========================  ===========================================================================
``Last(3)``               the newest 3
``Every(1000)``           multiples of 1000; ``nearest=True``: the first step at or after each
``Every("6h")``           one in six hours
``Best(2, "loss")``       the 2 with the lowest loss; ``highest=True``: with the highest value
``Within("24h")``         what was saved in the 24 hours before the newest
``Steps({10, 100})``      these
``Pinned()``              what ``pin`` was called for, which every manager keeps
``All()``                 everything: the default
========================  ===========================================================================

========================  ===========================================================================
``when=``                 when ``should_save`` says yes
========================  ===========================================================================
``EverySteps(500)``       at multiples of 500
``EverySeconds(600)``     600 seconds after the last save began
``Continuous(60)``        when the last save is durable, and began 60 seconds ago or earlier
``Steps({10, 100})``      at these
``First()``, ``Last()``   at the first step of a new run; at the step that is called the last
``Preempted()``           when SIGTERM has come to any rank; then ``should_stop`` is True
========================  ===========================================================================
"""

import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import wait as wait_for_futures
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch.distributed as dist
from typing_extensions import Self

from holdfast._background.save_future import SaveFuture
from holdfast._background.staged_copy import prepare_staging
from holdfast._engine.stateful_objects import open_states
from holdfast._manager.background_pruning import BackgroundPruning
from holdfast._manager.kept_facts import facts_to_keep, run_metadata
from holdfast._manager.preemption_notice import ignore_preemption
from holdfast._manager.restoring import RestoredStep, refuse_a_checkpoint, restore_newest
from holdfast._manager.save_decision import RefusingPlanner, SaveDecision
from holdfast._manager.step_queries import StepQueries
from holdfast._manager.update_guard import UpdateGuard
from holdfast._ranks.group_exchange import open_exchange
from holdfast._steps.policies import (
    All,
    AnyOf,
    Best,
    Continuous,
    Every,
    EverySeconds,
    EverySteps,
    First,
    KeepPolicy,
    Last,
    Pinned,
    Preempted,
    StepFacts,
    Steps,
    WhenPolicy,
    Within,
    check_policy,
)
from holdfast._steps.pruning import Pruning
from holdfast._steps.run_root import RunRoot
from holdfast._steps.step_names import DEFAULT_NAME, StepNames, check_step
from holdfast._writer_process.client import start_writer_process
from holdfast.errors import CheckpointError, StorageError, UsageError
from holdfast.metadata import Metadata
from holdfast.staging import DefaultStager
from holdfast.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save, save

__all__ = [
    "All",
    "AnyOf",
    "Best",
    "CheckpointManager",
    "Continuous",
    "Every",
    "EverySeconds",
    "EverySteps",
    "First",
    "KeepPolicy",
    "Last",
    "Pinned",
    "Preempted",
    "RestoredStep",
    "StepFacts",
    "Steps",
    "WhenPolicy",
    "Within",
    "ignore_preemption",
]

logger = logging.getLogger(__name__)


class CheckpointManager(StepQueries):
    """Saves, finds, restores and deletes the checkpoints of one run, each in its own folder below a root.

    What is promised:

    - The newest complete checkpoint is never deleted. What is not complete, or known to be damaged, counts
      for nothing and is left where it is. A crash at any instant of a save or deletion leaves this true.
    - Deleting is done in a thread on rank 0, and no save waits for it.
    - All ranks decide alike: ``should_save`` returns the same on every rank for a step.
    - If a run goes back to an earlier step, the log says so. From the next save on, ``latest`` is a step of
      the new run, although the old one had higher numbers. If that cannot be noted in the root, the save
      fails.
    - Managers of several processes may save below one root. None deletes the step that it saved last.

    It must be made on every rank of the group, and ``save``, ``async_save``, ``restore`` and ``should_save``
    must be called on every rank. All other methods work on any one rank.

    Args:
        root: The folder or URL below which steps are saved. It need not exist.
        keep: Which steps are kept; everything by default.
        when: When ``should_save`` says yes; by default always.
        name: How the folder of a step is called: ``"step-{step}"`` as torchtitan, ``"checkpoint-{step}"`` as
            transformers, ``"{step}"`` as Orbax; ``"{step:08d}"`` for leading zeros.
        process_group: The ranks that save together; by default all.
        no_dist: This process works alone, whatever groups there are.
        metadata: Something to keep of the run, as JSON; see ``run_metadata``.
        read_only: Only look and restore: nothing in the root is changed.
        overlap_staging: ``async_save`` returns while large tensors are still being copied. Then everything
            that changes the state must stand in ``with manager.updating():``.
        async_checkpointer_type: Where ``async_save`` does its work.

    Raises:
        UsageError: The arguments make no sense together.
        CheckpointException: The root cannot be read, or is a checkpoint itself; the same on every rank.

    Example:
        >>> with CheckpointManager("run", keep=Last(3) | Best(1, "loss"), when=EverySteps(500)) as manager:
        ...     restored = manager.restore(state)
        ...     for step in range(restored.step + 1 if restored else 0, 10_000):
        ...         loss = train_step()
        ...         if manager.should_save(step):
        ...             manager.async_save(step, state, metrics={"loss": loss})
        ...         if manager.should_stop:
        ...             break
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: KeepPolicy | None = None,
        when: WhenPolicy | None = None,
        name: str = DEFAULT_NAME,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        metadata: Mapping[str, Any] | None = None,
        read_only: bool = False,
        overlap_staging: bool = False,
        async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    ) -> None:
        keep = All() if keep is None else keep
        check_policy(keep, KeepPolicy, "keep")
        if when is not None:
            check_policy(when, WhenPolicy, "when")
        self.read_only = read_only
        self._root = RunRoot(root, StepNames(name))
        self._group: dict[str, Any] = {"process_group": process_group, "no_dist": no_dist}
        self._type = AsyncCheckpointerType(async_checkpointer_type)
        self._stager = DefaultStager(overlap_host=True) if overlap_staging else None
        self._guard = UpdateGuard()
        self._newest, self._is_coordinator = self._open(run_metadata(metadata))
        self._is_closed = False
        self._pruning = Pruning(self._root, keep)
        self._background = BackgroundPruning(self._pruning)
        self._decision = SaveDecision(
            Steps(()) if read_only else when,
            is_new_run=self._newest is None,
            is_coordinator=self._is_coordinator,
            group=self._group,
        )

    def _open(self, metadata: dict[str, Any] | None) -> tuple[int | None, bool]:
        """The newest step, as rank 0 finds it, and whether this is that rank."""

        def look() -> int | None:
            found = self._root.find_newest()
            refuse_a_checkpoint(self._root, found)
            if metadata is not None and not self.read_only:
                self._root.write_run_metadata(metadata)
            usable = found.usable
            return usable[-1].number if usable else None

        with open_exchange(
            self._group["process_group"], purpose="CheckpointManager", no_dist=self._group["no_dist"]
        ) as exchange:
            return exchange.share("open the root", look), exchange.is_coordinator

    # Deciding.

    def should_save(self, step: int, *, last: bool = False) -> bool:
        """Whether to save this step: the same on every rank. To be called once after each step, on all ranks.

        It costs about ten microseconds, and no message, unless ranks have to agree because of a time or a
        signal. A step that was just saved is not to be saved again.

        Args:
            step: The step.
            last: Whether it is the last one of the run, for ``when=Last()``.

        Raises:
            UsageError: The step is not a number of 0 or more.
        """
        check_step(step)
        return self._decision.should_save(step, is_last=last)

    def poll(self) -> bool:
        """For loops without steps, such as an evaluation: whether the run is to end, the same on every rank.

        To be called on all ranks, equally often. If it is True, leave the loop and save; ``should_save`` of
        the next step is True, too.
        """
        return self._decision.poll()

    @property
    def should_stop(self) -> bool:
        """Whether a signal of pre-emption has come to some rank, and the step to save at was reached.

        It becomes True in ``should_save`` or ``poll``, at the same call on every rank. Save, and end.
        """
        return self._decision.is_to_stop

    # Saving.

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Metadata:
        """Save a step, on every rank. When it returns the checkpoint is durable.

        A step that exists is replaced: until then the old one is there, whole.

        Args:
            step: The step.
            state: What to save: a dict, or a Stateful object such as a ``TrainingState``.
            metrics: Numbers by name, for ``Best`` and ``best``. They are committed with the checkpoint.
            metadata: Other plain values to keep with it.
            options: As for :func:`holdfast.save`.

        Raises:
            UsageError: The manager is for reading only or closed, the step is not a number of 0 or more, or
                metrics or metadata cannot be kept.
            CheckpointException: As of :func:`holdfast.save`. No other step has been touched.
        """
        with self._saving(step, metrics, metadata, options) as where:
            result = save(state, **where, **options)
        self._committed(step)
        return result

    def async_save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> SaveFuture:
        """Save a step in the background, on every rank. The arguments are those of :meth:`save`.

        It waits for the save before, if that is not done. A failure is raised by the future, or by the next
        call of a save.

        Returns:
            The future of :func:`holdfast.async_save`.
        """
        newest = self._newest
        options.setdefault("async_stager", self._stager)
        options.setdefault("async_checkpointer_type", self._type)
        with self._saving(step, metrics, metadata, options) as where:
            made = async_save(state, **where, **options)
        future: Any = made.upload_completion if isinstance(made, AsyncSaveResponse) else made
        self._guard.staging = future.staged
        self._decision.saving = future
        future.add_done_callback(lambda done: self._after_async(done, step, newest))
        saving: SaveFuture = future
        return saving

    @contextmanager
    def _saving(
        self,
        step: int,
        metrics: Mapping[str, float] | None,
        metadata: Mapping[str, Any] | None,
        options: dict[str, Any],
    ) -> Iterator[dict[str, Any]]:
        """Begin the save of a step, and give its arguments; an exception is that the save has failed."""
        newest = self._newest
        kept = self._begin(step, metrics, metadata, options)
        place = self._root.place_of(self._root.names.folder(step))
        try:
            yield {"checkpoint_id": place, "user_metadata": kept, **self._group}
        except BaseException:
            self._failed(step, newest)
            raise

    def _begin(
        self,
        step: int,
        metrics: Mapping[str, float] | None,
        metadata: Mapping[str, Any] | None,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        """Note that a step is being saved; returns what to keep with it. Options change if it must fail."""
        self._check_may_write()
        if self._is_closed:
            raise UsageError(f"{self._root.place}: this manager is closed: make another one")
        check_step(step)
        for name in options.keys() & {"checkpoint_id", "user_metadata", *self._group}:
            raise UsageError(f"{name}: the manager decides this itself. To choose it, call holdfast.save")
        kept = facts_to_keep(step, metrics, metadata)
        if self._newest is not None and step < self._newest:
            options |= self._go_back(step, self._newest)
        self._guard.wait()
        self._decision.saving = None
        self._newest = step
        self._decision.begin(step)
        self._background.leave_alone(self._root.names.folder(step))
        return kept

    def _go_back(self, step: int, newest: int) -> dict[str, Any]:
        """The run goes back: say so, and remember which steps it has left behind.

        If that cannot be remembered, the save must fail: the steps from before would count as newer, and the
        next prune would delete what was just saved. Returns what makes it fail, on all ranks.
        """
        if not self._is_coordinator:
            return {}
        if self._decision.saving is not None:
            # What it commits must be among the steps that are left behind.
            wait_for_futures([self._decision.saving])
        try:
            later = self._root.abandon_after(step, self._root.find_steps())
        except (CheckpointError, OSError) as error:
            refusal = StorageError(
                f"{self._root.place}: the run goes back from step {newest} to step {step}, and that could "
                f"not be noted in the root, so step {step} was not saved: {error}",
                path=self._root.place,
            )
            return {"planner": RefusingPlanner(refusal), "check_replicas": None}
        logger.warning(
            "%s: the run goes back: it saves step %d, and had saved step %d. From now on step %d is the "
            "newest, and these are older, and deleted as keep= says: %s",
            *(self._root.place, step, newest, step, ", ".join(map(str, later)) or "none"),
        )
        return {}

    def _committed(self, step: int) -> None:
        self._pruning.saved_last = self._root.names.folder(step)
        self._background.release(self._root.names.folder(step))
        if self._is_coordinator and not isinstance(self._pruning.keep, All):
            self._background.request()

    def _failed(self, step: int, newest: int | None) -> None:
        """A save has failed: the step before is the newest again, and the same step may be saved again."""
        self._background.release(self._root.names.folder(step))
        # A later save may have begun, if this one was made in the background.
        if self._newest == step:
            self._newest = newest
        if self._decision.begun_step == step:
            self._decision.begun_step = None

    def _after_async(self, done: Any, step: int, newest: int | None) -> None:
        # Not by exception(), by which its owner is told of a failure.
        if done.cancelled() or done._exception is not None or done.skipped:  # noqa: SLF001
            self._failed(step, newest)
        else:
            self._committed(step)

    def updating(self) -> AbstractContextManager[None]:
        """A guard for what changes the state: ``with manager.updating(): optimizer.step()``.

        It waits until the copy of the last ``async_save`` is complete, and costs less than a microsecond if
        it is. Without ``overlap_staging`` copies on the host are always complete.
        """
        return self._guard

    def prewarm(self, state: Any) -> None:
        """Take the memory for the copy of a state now, so that the first ``async_save`` does not have to."""
        opened, _ = open_states(state)
        shared = self._type is AsyncCheckpointerType.PROCESS
        if self._stager is not None:
            self._stager.prepare(opened)
        else:
            prepare_staging(opened, shared=shared)
        if shared:
            start_writer_process(wait=False)

    # Restoring.

    def restore(self, state: Any, step: int | None = None, **options: Any) -> RestoredStep | None:
        """Load a step into a state, in place, on every rank.

        Without a step it is the newest one that is complete and sound in what is asked for. One that is
        damaged is named in the log of every rank, left where it is, and the one before is loaded. Every load
        fills all of the state, so nothing of the damaged one is left in it. With ``allow_partial_load`` or
        ``ignore_mismatched_sizes`` this could not be promised: then damage that is found while data is read
        is raised. A state that does not fit is raised, and no older step is tried.

        Args:
            state: What to fill: a dict, or a Stateful object.
            step: The step; None for the newest.
            options: As for :func:`holdfast.load`.

        Returns:
            What was loaded. None if there is no complete step, and none was asked for: a first start.

        Raises:
            UsageError: The step is not a number of 0 or more.
            CheckpointException: As of :func:`holdfast.load`; if no step is sound, the error of the newest.
                The state may have been changed then.
        """
        if step is not None:
            check_step(step)
        return restore_newest(self._root, state, step, self._group, options, read_only=self.read_only)

    # Keeping.

    def prune(self, *, dry_run: bool = False) -> list[int]:
        """Delete now what the policy does not keep, and return these steps. Only rank 0 does anything.

        Every save asks for it in the background; this is for a policy that has changed.

        Args:
            dry_run: Only return what would be deleted.
        """
        if dry_run:
            return [step.number for step in self._pruning.plan().doomed]
        self._check_may_write()
        return self._background.run() if self._is_coordinator else []

    # Ending.

    def wait(self) -> None:
        """Wait for the last save in the background, and for deletions.

        Raises if the save failed, and its future has not said so yet.
        """
        saving, self._decision.saving = self._decision.saving, None
        if saving is not None:
            wait_for_futures([saving])
            # Whoever has cancelled it, or was told by the future, is not told again.
            if not (saving.cancelled() or saving.looked_at):
                saving.result()
        self._background.wait()

    def close(self) -> None:
        """Wait for the last save and for deletions, and free everything. Raises what :meth:`wait` does."""
        try:
            self.wait()
        finally:
            self._is_closed = True
            self._background.close()
            self._decision.close()
            if self._stager is not None:
                self._stager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            # What ended the training must not be hidden by what came of it.
            logger.error("%s: the last save failed, too: %s", self._root.place, failure)  # noqa: TRY400

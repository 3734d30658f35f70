"""A save, from top to bottom."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from holdfast._collector import paused_collector
from holdfast._context import SaveContext
from holdfast._engine.per_rank_values import split_by_rank
from holdfast._engine.ports import SavePlannerPort, WriterPort
from holdfast._engine.replica_check import Holders, Replicas, differ
from holdfast._engine.result_check import check_counts, check_results, nbytes_reported
from holdfast._engine.tensor_subclasses import open_subclasses
from holdfast._engine.timed_exchange import TimedExchange
from holdfast._io.progress import ProgressTracker
from holdfast._phase_clock import PhaseClock
from holdfast._plan.write_columns import columns_of
from holdfast._ranks.exchange import Exchange
from holdfast._transfer_record import RankRecord
from holdfast._transfer_recorder import TransferRecorder
from holdfast.errors import UsageError
from holdfast.metadata import Metadata
from holdfast.planner import SavePlan
from holdfast.storage import WriteResult

# Metadata of more items than this is not sent to every rank: few ranks ever look at it.
_MOST_SENT = 20_000


class SaveCancellation:
    """Whether a save may go on; subclasses know."""

    def check(self) -> None:
        """Raise if the save was cancelled."""

    def close(self) -> None:
        """Make it impossible to cancel; raise if the save was cancelled before."""


def run_save(
    state_dict: dict[str, Any],
    planner: SavePlannerPort,
    writer: WriterPort,
    exchange: Exchange,
    *,
    use_collectives: bool = True,
    progress: ProgressTracker | None = None,
    cancellation: SaveCancellation | None = None,
    recorder: TransferRecorder | None = None,
    user_metadata: bytes = b"",
) -> Metadata:
    """Save ``state_dict``; called on every rank of the exchange.

    When it returns, on any rank, every planned item of every rank is on stable storage and the checkpoint
    is committed. When it raises, nothing was committed.

    Args:
        state_dict: What to save, with Stateful objects already replaced by their state.
        planner: Decides what is written.
        writer: Writes it.
        exchange: The ranks that save together.
        use_collectives: False if each rank writes a checkpoint of its own part.
        progress: Told of the bytes that are written; it may raise to stop the save.
        cancellation: Asked before each step whether to go on; by default nobody can cancel.
        recorder: Measures the save, and can tell afterwards what all ranks have done.
        user_metadata: What the caller wants to keep with the checkpoint, encoded; the coordinator's counts.

    Raises:
        CheckpointException: A step failed on some rank; the same on every rank.
    """
    recorder = recorder or TransferRecorder("save")
    context = SaveContext(
        rank=exchange.rank,
        world_size=exchange.world_size,
        is_coordinator=exchange.is_coordinator,
        use_collectives=use_collectives,
        progress=progress or ProgressTracker(),
        confirm_commit=exchange.confirm,
        others_at_work=exchange.others_at_work,
        open_broadcast=exchange.open_broadcast if exchange.can_broadcast else None,
        recorder=recorder,
        user_metadata=user_metadata,
    )
    recorder.set_up(exchange.rank, exchange.world_size, context.progress.events)
    timed = TimedExchange(exchange, recorder.clock)
    replicas = Replicas(planner, timed)
    may_go_on = cancellation or SaveCancellation()
    steps = _SaveSteps(state_dict, planner, writer, timed, context, may_go_on, replicas)
    try:
        return steps.take(recorder)
    except BaseException:
        writer.abandon(outcome_is_known=exchange.outcome_is_known)
        raise


@dataclass(frozen=True)
class _Offer:
    """What a rank offers to write, one fingerprint of the values that others have too, and its place."""

    plan: SavePlan
    marks: dict[Holders, bytes]
    place: str | None


_Written: TypeAlias = tuple[list[WriteResult], RankRecord]
"""What a rank has written, and how long it took for that until then."""


@dataclass
class _SaveSteps:
    """The steps of one save on one rank. They stand here in the order in which they are taken."""

    _state_dict: dict[str, Any]
    _planner: SavePlannerPort
    _writer: WriterPort
    _exchange: Exchange
    _context: SaveContext
    _cancellation: SaveCancellation
    _replicas: Replicas
    # The coordinator's alone:
    _offered: list[SavePlan] = field(default_factory=list)
    _planned: list[SavePlan] = field(default_factory=list)
    _metadata: Metadata | None = None

    def take(self, recorder: TransferRecorder) -> Metadata:
        recorder.clock.enter("plan")
        plan = self._exchange.decide("plan", self._offer, self._merge)
        if plan is None:
            plan = self._replicas.settle(self._offered, self._make_local_plan, self._make_global_plan)
        recorder.clock.enter("write")

        def write() -> _Written:
            return self._write(plan, recorder.clock), recorder.mine()

        def commit(written: list[_Written]) -> list[Any]:
            recorder.gather([row for _, row in written])
            recorder.commit_begins()
            told = self._commit([results for results, _ in written])
            others = told, recorder.to_tell()
            return [
                (self._metadata, None) if rank == self._exchange.rank else others
                for rank in range(self._exchange.world_size)
            ]

        told, of_all_ranks = self._exchange.decide("write", write, commit)
        if of_all_ranks is not None:
            recorder.learn(of_all_ranks)
        return self._writer.metadata_of(told)

    @paused_collector()
    def _offer(self) -> _Offer:
        planner, exchange = self._planner, self._exchange
        state = split_by_rank(self._state_dict, planner, rank=exchange.rank, world_size=exchange.group_size)
        planner.set_up(
            state_dict=open_subclasses(state, planner),
            storage_meta=self._writer.plugin.storage_meta(),
            is_coordinator=exchange.is_coordinator,
        )
        self._cancellation.check()
        self._writer.set_up(self._context)
        return _Offer(self._make_local_plan(), self._replicas.together(), self._writer.place)

    @paused_collector()
    def _make_local_plan(self) -> SavePlan:
        plan = self._planner.plugin.create_local_plan()
        self._cancellation.check()
        return self._writer.plugin.prepare_local_plan(plan)

    def _merge(self, offers: list[_Offer]) -> Sequence[SavePlan | None]:
        _check_places([offer.place for offer in offers])
        self._offered.extend(offer.plan for offer in offers)
        if differ(offer.marks for offer in offers):
            return [None] * len(offers)
        return self._make_global_plan(self._offered)

    @paused_collector()
    def _make_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans, self._metadata = self._planner.plugin.create_global_plan(plans)
        self._cancellation.check()
        self._planned = self._writer.plugin.prepare_global_plan(plans)
        return self._planned

    def _write(self, plan: SavePlan, clock: PhaseClock) -> list[WriteResult]:
        progress = self._context.progress
        final = self._planner.finish_plan(plan)
        if progress.is_watched:
            progress.begin(sum(columns_of(final).item_nbytes()))
        self._cancellation.check()
        try:
            results = self._writer.write(final, self._planner)
        except Exception:
            self._cancellation.check()  # also if a write that was under way has failed
            raise
        if not self._exchange.is_coordinator:
            # The coordinator may commit as soon as it is told of the results.
            self._cancellation.close()
        progress.end()
        check_results(final, results, rank=self._exchange.rank)
        # Storages that do not know of progress say the size of each result.
        clock.count(progress.nbytes_done or nbytes_reported(results))
        return results

    def _commit(self, written: list[list[WriteResult]]) -> Any:
        """On the coordinator: commit, and return what the other ranks are told of the checkpoint."""
        metadata = self._metadata
        assert metadata is not None
        check_counts(self._planned, written)
        self._cancellation.close()
        self._writer.commit(metadata, written)
        is_large = len(metadata.storage_data or ()) > _MOST_SENT
        return self._writer.summary_of(metadata) if is_large else metadata


def _check_places(places: Sequence[str | None]) -> None:
    """Raise if ranks write to different places: no place would have the whole checkpoint."""
    for rank, place in enumerate(places):
        if place != places[0]:
            raise UsageError(
                f"all ranks must save to the same place, but rank 0 saves to {places[0]} and rank {rank} to "
                f"{place}. Make the name on one rank and broadcast it; leave rank and time out of it.",
                rank=rank,
                expected=places[0],
                found=place,
            )

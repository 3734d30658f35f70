"""The record of a save by thousands of ranks stays small, in the manifest and in messages."""

import pickle

import pytest

from holdfast._format.stored_record import open_record, store_record
from holdfast._transfer_record import PhaseTime, RankRecord, TransferRecord
from holdfast._transfer_recorder import TransferRecorder

RANKS = 10_000
SLOW = 7_123


def sent_by(rank: int) -> RankRecord:
    """What a rank has measured when it has written: rank 7123 took 5 s, all others 2 s."""
    seconds = [0.1, 0.5, 5.0 if rank == SLOW else 2.0]
    phases = [
        PhaseTime(name, sum(seconds[:at]), seconds[at], 0.0, 1 << 30 if name == "write" else 0)
        for at, name in enumerate(("prepare", "plan", "write"))
    ]
    return RankRecord(rank, 0.0, tuple(phases), sum(seconds), {"retry": 1} if rank == SLOW else {})


def coordinator() -> TransferRecorder:
    recorder = TransferRecorder("save", "run/1")
    recorder.set_up(0, RANKS, {})
    recorder.clock.enter("plan")
    recorder.clock.enter("write")
    recorder.gather([sent_by(rank) for rank in range(RANKS)])
    recorder.commit_begins()
    return recorder


def kept_by(recorder: TransferRecorder) -> TransferRecord:
    assert recorder.at_commit is not None
    return recorder.at_commit


@pytest.mark.slow
@pytest.mark.one_core
def test_the_manifest_takes_less_than_a_megabyte_and_names_the_slowest_rank() -> None:
    record = kept_by(coordinator())
    stored = store_record(record)
    columns = [
        value for name in stored.__struct_fields__ if isinstance(value := getattr(stored, name), bytes)
    ]
    assert sum(map(len, columns)) < 1_000_000
    opened = open_record(stored, "run/1")
    assert opened.slowest == record.slowest
    assert opened.slowest is not None
    assert (opened.slowest.rank, opened.slowest.phase) == (SLOW, "write")
    assert opened.nbytes == (RANKS - 1) << 30  # the coordinator itself has written nothing here
    assert opened.retries == 1
    slow = opened.of_rank(SLOW)
    assert slow is not None
    assert [phase.name for phase in slow.phases] == ["prepare", "plan", "write"]
    assert slow.phases[-1].busy == pytest.approx(5.0, rel=1e-6)
    assert slow.events == {"retry": 1}


@pytest.mark.slow
@pytest.mark.one_core
def test_other_ranks_are_told_in_a_few_kilobytes() -> None:
    told, _ = coordinator().to_tell()
    assert len(pickle.dumps(told)) < 10_000
    assert told.slowest is not None
    assert told.slowest.rank == SLOW
    worker = TransferRecorder("save", "run/1")
    worker.set_up(5, RANKS, {})
    worker.learn((told, 0.0))
    record = worker.record()
    assert record.slowest == told.slowest
    assert record.of_rank(5) is not None
    assert record.of_rank(SLOW) is not None
    assert record.nbytes == told.nbytes

"""The simulated job on our side: the package's own planners, messages, commit and reader."""

import pickle
from collections.abc import Iterator
from pathlib import Path

from benchmarks.footprint import Footprint
from benchmarks.planning_fleet import Fleet
from benchmarks.planning_stages import SAMPLED_RANKS, Stages
from holdfast import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from holdfast._collector import paused_collector
from holdfast._plan.write_columns import columns_of
from holdfast._storage.results import Results, WrittenItems
from holdfast.metadata import Metadata
from holdfast.planner import LoadPlan, SavePlan

__all__ = ["offers_of", "plan_together", "read_offers", "run_ours", "sizes_of_second_save", "write_offers"]


def offers_of(fleet: Fleet) -> Iterator[SavePlan]:
    """What the default planner offers on each rank, in rank order."""
    for rank in range(fleet.ranks):
        yield _planned_on(fleet, rank)


def _planned_on(fleet: Fleet, rank: int) -> SavePlan:
    planner = DefaultSavePlanner()
    planner.set_up_planner(fleet.state(rank), is_coordinator=rank == 0)
    return planner.create_local_plan()


def write_offers(fleet: Fleet, file: Path) -> None:
    """Leave every rank's offer in a file, as the messages that would be sent."""
    with file.open("wb") as out:
        for offer in offers_of(fleet):
            out.write(pickle.dumps(offer, protocol=5))


def read_offers(fleet: Fleet, file: Path) -> list[SavePlan]:
    """The offers as they arrive: unpickled one by one, with nothing in common."""
    with file.open("rb") as messages:
        return [pickle.load(messages) for _ in range(fleet.ranks)]


def plan_together(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """The coordinator's decision: dedup, description and validation."""
    with paused_collector():
        return DefaultSavePlanner().create_global_plan(plans)


def run_ours(fleet: Fleet, file: Path, folder: Path) -> Stages:
    """A save on the coordinator of the fleet, and the load on one of its ranks.

    Args:
        fleet: The job.
        file: What ``write_offers`` wrote, in another process: its memory shall not count here.
        folder: Where the checkpoint's ``.metadata`` goes. There are no data files.
    """
    stages = Stages()
    footprint = Footprint()
    offers = read_offers(fleet, file)
    plans, metadata = stages.time("plan", plan_together, offers)
    del offers
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(is_coordinator=True, rank=0, use_collectives=True)
    writer.prepare_local_plan(plans[0])
    plans = writer.prepare_global_plan(plans)
    results = [_as_sent(results_of(plan)) for plan in plans]
    for of_rank in plans:
        _pretend_to_write(folder, of_rank)
    for suffix, for_torch in ((" without", False), ("", True)):
        writer.torch_compatible = for_torch
        metadata.storage_data = None
        stages.time("write" + suffix, _finish, writer, metadata, results)
        stages.note_file(folder, ".metadata" + suffix)
    stages.memory = footprint.extra()
    _measure_messages(stages, fleet, plans, results)
    del plans, results, metadata
    # A load of either file reads the same bytes of it, footer and manifest.
    read = stages.time("read", _read, folder)
    assert len(read.state_dict_metadata) == fleet.tensors
    state = fleet.state(fleet.ranks // 2, to_load=True)
    plan = stages.time("load plan", _plan_load, state, read)
    assert len(plan.items) == fleet.tensors
    return stages


def results_of(plan: SavePlan) -> Results:
    """What a rank reports when it has written its plan: an invented place of the usual form for each item."""
    columns, items, count = columns_of(plan), WrittenItems(), len(plan.items)
    payload_nbytes = columns.item_nbytes()
    nbytes = [size + 448 + 320 for size in payload_nbytes]
    checksums = [0x9E3779B1 * number & 0xFFFFFFFF for number in range(1, count + 1)]
    items.add(
        columns.keys,
        b"".join([number.to_bytes(4, "little") for number in checksums]),
        chunk_offsets=columns.offset,
        hints=columns.hints,
        files=[0] * count,
        offsets=[1 << 20 | number << 12 for number in range(count)],
        nbytes=nbytes,
        payload_offsets=[448] * count,
        payload_nbytes=payload_nbytes,
        raw_nbytes=nbytes,
        blocks=[1] * count,
        wrap_checksums=checksums,
    )
    names = plan.storage_data
    return Results(items.sealed(columns.offsets, {"file_names": [names.name(0)]}))


def _pretend_to_write(folder: Path, plan: SavePlan) -> None:
    """Make the file of a rank, as large as its items say, with nothing in it: the commit looks for it."""
    nbytes = columns_of(plan).item_nbytes()
    with (folder / plan.storage_data.name(0)).open("wb") as file:
        file.truncate((2 << 20) + (len(nbytes) << 12) + sum(nbytes))


def _as_sent(results: Results) -> Results:
    sent: Results = pickle.loads(pickle.dumps(results, protocol=5))
    return sent


def _finish(writer: FileSystemWriter, metadata: Metadata, results: list[Results]) -> None:
    with paused_collector():
        writer.finish(metadata, results)  # type: ignore[arg-type]


def _read(folder: Path) -> Metadata:
    with paused_collector():
        return FileSystemReader(folder).read_metadata()


def _plan_load(state: dict[str, object], metadata: Metadata) -> LoadPlan:
    with paused_collector():
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, metadata)
        return planner.create_local_plan()


def _measure_messages(stages: Stages, fleet: Fleet, plans: list[SavePlan], results: list[Results]) -> None:
    sampled = range(min(SAMPLED_RANKS, fleet.ranks))
    offers = [pickle.dumps(_planned_on(fleet, rank), protocol=5) for rank in sampled]
    reports = [pickle.dumps(results[rank], protocol=5) for rank in sampled]
    answers: list[bytes] = []

    def pass_on() -> None:
        for offer, report in zip(offers, reports, strict=True):
            pickle.loads(offer)
            pickle.loads(report)
        answers.extend(pickle.dumps(plans[rank], protocol=5) for rank in sampled)

    stages.time("messages", pass_on)
    stages.seconds["messages"] *= fleet.ranks / len(sampled)
    stages.nbytes |= {"offer": len(offers[0]), "answer": len(answers[0]), "results": len(reports[0])}
    stages.nbytes["second save"] = sum(sizes_of_second_save(fleet))


def sizes_of_second_save(fleet: Fleet) -> tuple[int, int]:
    """The bytes of a rank's offer, and of the answer to it, when nothing has changed since the first save."""
    planner, sizes = DefaultSavePlanner(enable_plan_caching=True), (0, 0)
    for _ in range(2):
        planner.set_up_planner(fleet.state(0), is_coordinator=True)
        offer = planner.create_local_plan()
        (answer,), _ = planner.create_global_plan([offer])
        planner.finish_plan(answer)
        sizes = len(pickle.dumps(offer, protocol=5)), len(pickle.dumps(answer, protocol=5))
    return sizes

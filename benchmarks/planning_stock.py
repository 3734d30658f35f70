"""The simulated job on torch's side: its own planning functions, its commit and its reader."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner, filesystem, metadata, planner, storage

from benchmarks.footprint import Footprint
from benchmarks.planning_fleet import Fleet, Part
from benchmarks.planning_stages import SAMPLED_RANKS, Stages

__all__ = ["plan_together", "plans_of", "run_stock", "sizes_of_second_save"]


def plans_of(fleet: Fleet) -> list[planner.SavePlan]:
    """What the default planner of torch offers on each rank, as objects of their own, in rank order."""
    return [_plan_of(fleet, rank) for rank in range(fleet.ranks)]


def _plan_of(fleet: Fleet, rank: int) -> planner.SavePlan:
    items = [_item_of(part, sharded=fleet.is_sharded) for part in fleet.parts(rank)]
    paths = {item.index.fqn: fleet.path(number) for number, item in enumerate(items)}
    return planner.SavePlan(items, planner_data=paths)


def _item_of(part: Part, *, sharded: bool) -> planner.WriteItem:
    offsets, lengths = torch.Size(part.offsets), torch.Size(part.lengths)
    return planner.WriteItem(
        metadata.MetadataIndex(part.key, offsets),
        planner.WriteItemType.SHARD if sharded else planner.WriteItemType.TENSOR,
        tensor_data=planner.TensorWriteData(
            metadata.ChunkStorageMetadata(offsets, lengths),
            metadata.TensorProperties(torch.float32),
            torch.Size(part.shape),
        ),
    )


def plan_together(plans: list[planner.SavePlan]) -> tuple[list[planner.SavePlan], metadata.Metadata]:
    """The coordinator's decision: dedup, description and validation."""
    return default_planner.DefaultSavePlanner().create_global_plan(plans)


def run_stock(fleet: Fleet, folder: Path) -> Stages:
    """As ``run_ours``, with torch's parts; torch always writes what torch reads."""
    stages = Stages()
    footprint = Footprint()
    offers = plans_of(fleet)
    plans, description = stages.time("plan", plan_together, offers)
    del offers
    writer = filesystem.FileSystemWriter(folder)
    writer.set_up_storage_writer(is_coordinator=True)
    folder.mkdir(parents=True, exist_ok=True)
    results = [_results_of(plan, rank) for rank, plan in enumerate(plans)]
    stages.time("write", writer.finish, description, results)
    stages.note_file(folder, ".metadata")
    stages.memory = footprint.extra()
    _measure_messages(stages, fleet, plans, results)
    del plans, results, description
    read = stages.time("read", filesystem.FileSystemReader(folder).read_metadata)
    assert len(read.state_dict_metadata) == fleet.tensors
    state = fleet.state(fleet.ranks // 2, to_load=True)
    plan = stages.time("load plan", _plan_load, state, read)
    assert len(plan.items) == fleet.tensors
    stages.seconds["write without"] = stages.seconds["write"]
    stages.nbytes[".metadata without"] = stages.nbytes[".metadata"]
    return stages


def _results_of(plan: planner.SavePlan, rank: int) -> list[storage.WriteResult]:
    return [
        storage.WriteResult(
            item.index,
            1600,
            filesystem._StorageInfo(f"__{rank}_0.distcp", 1600 * number, 1600),  # noqa: SLF001
        )
        for number, item in enumerate(plan.items)
    ]


def _plan_load(state: dict[str, Any], read: metadata.Metadata) -> planner.LoadPlan:
    loader = default_planner.DefaultLoadPlanner()
    loader.set_up_planner(state, read)
    return loader.create_local_plan()


def _measure_messages(
    stages: Stages,
    fleet: Fleet,
    plans: list[planner.SavePlan],
    results: list[list[storage.WriteResult]],
) -> None:
    sampled = range(min(SAMPLED_RANKS, fleet.ranks))
    offers = [pickle.dumps(_plan_of(fleet, rank)) for rank in sampled]
    reports = [pickle.dumps(results[rank]) for rank in sampled]
    answers: list[bytes] = []

    def pass_on() -> None:
        for offer, report in zip(offers, reports, strict=True):
            pickle.loads(offer)
            pickle.loads(report)
        answers.extend(pickle.dumps(plans[rank]) for rank in sampled)

    stages.time("messages", pass_on)
    stages.seconds["messages"] *= fleet.ranks / len(sampled)
    stages.nbytes |= {"offer": len(offers[0]), "answer": len(answers[0]), "results": len(reports[0])}
    stages.nbytes["second save"] = sum(sizes_of_second_save(fleet))


def sizes_of_second_save(fleet: Fleet) -> tuple[int, int]:
    """The bytes of a rank's offer, and of the answer to it, when nothing has changed since the first save."""
    caches = [value for name, value in vars(planner.SavePlanner).items() if name.startswith("_cached_")]
    for cache in caches:
        cache.clear()
    sizes = (0, 0)
    for _ in range(2):
        saver = default_planner.DefaultSavePlanner(enable_plan_caching=True)
        saver.set_up_planner(fleet.state(0), is_coordinator=True)
        offer = saver.create_local_plan()
        # The rank's offer alone would be refused for what the others hold.
        caches_hit = not offer.usable
        answer = offer if caches_hit else _plan_of(fleet, 0)
        saver.finish_plan(answer)
        sizes = len(pickle.dumps(offer)), len(pickle.dumps(answer))
    for cache in caches:
        cache.clear()
    return sizes

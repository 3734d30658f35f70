"""Planning for thousands of ranks: what is sent, what is proved, and columns that mean what lines mean.

Nothing here is timed.
"""

import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import planning_ours, planning_stock
from benchmarks.planning_fleet import LAYOUTS, Fleet, Layout
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

import holdfast
from holdfast.default_planner import create_default_local_save_plan
from holdfast.errors import InvalidPlanError
from holdfast.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from holdfast.testing import FakeRank, FakeRanks


@pytest.fixture(autouse=True)
def no_plan_remembered() -> Iterator[None]:
    caches = [value for name, value in vars(SavePlanner).items() if name.startswith("_cached_")]
    assert caches
    for cache in caches:
        cache.clear()
    yield
    for cache in caches:
        cache.clear()


def plan_for(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    return holdfast.DefaultSavePlanner().create_global_plan(plans)


def sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value, protocol=5))


def shard(key: str, shape: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...]) -> WriteItem:
    place = torch.Size(offsets)
    data = TensorWriteData(
        ChunkStorageMetadata(place, torch.Size(lengths)), TensorProperties(torch.float32), torch.Size(shape)
    )
    return WriteItem(MetadataIndex(key, place), WriteItemType.SHARD, tensor_data=data)


# What is sent


def messages_of_two_saves(state: dict[str, Any]) -> list[tuple[int, int]]:
    """For each of two saves of one rank the bytes of its offer and of the answer to it."""
    sizes = []
    planner = holdfast.DefaultSavePlanner(enable_plan_caching=True)
    for _ in range(2):
        planner.set_up_planner(state, is_coordinator=True)
        offer = planner.create_local_plan()
        (answer,), metadata = planner.create_global_plan([offer])
        assert list(metadata.state_dict_metadata) == list(state)
        # The answer stands for the whole plan, whatever was sent.
        assert len(planner.finish_plan(answer).items) == len(state)
        sizes.append((len(pickle.dumps(offer)), len(pickle.dumps(answer))))
    return sizes


def test_an_unchanged_second_save_sends_as_little_for_a_thousand_tensors_as_for_ten() -> None:
    sizes = {}
    for count in (10, 1000):
        first, second = messages_of_two_saves({f"weight.{n}": torch.zeros(n % 5) for n in range(count)})
        assert sum(first) > 20 * count
        sizes[count] = second
        for cache in (value for name, value in vars(SavePlanner).items() if name.startswith("_cached_")):
            cache.clear()
    assert sizes[10] == sizes[1000]
    assert max(sizes[1000]) < 256


def test_one_changed_tensor_is_sent_with_all_the_others() -> None:
    state: dict[str, Any] = {f"weight.{n}": torch.zeros(4) for n in range(100)}
    messages_of_two_saves(state)
    state["weight.50"] = torch.zeros(4, dtype=torch.float64)
    first, second = messages_of_two_saves(state)
    assert min(first) > 1000 > max(second)


def test_a_rank_of_a_thousand_sends_no_more_than_one_of_ten() -> None:
    few, many = (
        len(pickle.dumps(next(planning_ours.offers_of(Fleet("shards", ranks, 50))))) for ranks in (10, 1000)
    )
    # Only the numbers in it are larger.
    assert many - few < 50


def test_an_offer_takes_fewer_bytes_than_torch_sends_for_the_same() -> None:
    fleet = Fleet("shards", 8, 200)
    ours, theirs = (
        len(pickle.dumps(offer))
        for offer in (next(planning_ours.offers_of(fleet)), planning_stock.plans_of(fleet)[0])
    )
    assert 2 * ours < theirs


# What is proved


@pytest.fixture(scope="module")
def many_shards() -> dict[Layout, list[SavePlan]]:
    """One tensor on 4096 ranks, divided along either dimension and along both."""
    return {
        layout: [SavePlan([shard(*part) for part in fleet.parts(rank)]) for rank in range(fleet.ranks)]
        for layout in ("rows", "columns", "grid")
        for fleet in [Fleet(layout, 4096, 1)]
    }


DIVISIONS = pytest.mark.parametrize("layout", ["rows", "columns", "grid"])


@pytest.mark.slow
@DIVISIONS
def test_a_tensor_in_4096_shards_is_described_and_each_shard_finds_its_place(
    layout: Layout, many_shards: dict[Layout, list[SavePlan]]
) -> None:
    plans, metadata = plan_for(many_shards[layout])
    (entry,) = metadata.state_dict_metadata.values()
    chunks = entry.chunks  # type: ignore[union-attr]
    assert len(chunks) == 4096
    for plan in plans:
        (item,) = plan.items
        assert item.tensor_data is not None
        assert item.index.index is not None
        assert chunks[item.index.index] == item.tensor_data.chunk


@pytest.mark.slow
@DIVISIONS
def test_a_missing_shard_among_4096_is_found(
    layout: Layout, many_shards: dict[Layout, list[SavePlan]]
) -> None:
    plans = list(many_shards[layout])
    plans[2718] = SavePlan([])
    with pytest.raises(InvalidPlanError, match="in no chunk"):
        plan_for(plans)


@pytest.mark.slow
@DIVISIONS
def test_a_shard_that_overlaps_its_neighbour_is_found_among_4096(
    layout: Layout, many_shards: dict[Layout, list[SavePlan]]
) -> None:
    plans = list(many_shards[layout])
    (item,) = plans[2718].items
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    shape = tuple(item.tensor_data.size)
    # One element longer in every dimension where there is a neighbour.
    longer = tuple(
        length + (offset + length < size)
        for offset, length, size in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )
    plans[2718] = SavePlan([shard(item.index.fqn, shape, tuple(chunk.offsets), longer)])
    with pytest.raises(InvalidPlanError, match="overlap"):
        plan_for(plans)


@pytest.mark.slow
@DIVISIONS
def test_a_shard_beyond_the_edge_is_found_among_4096(
    layout: Layout, many_shards: dict[Layout, list[SavePlan]]
) -> None:
    plans = list(many_shards[layout])
    (item,) = plans[-1].items
    assert item.tensor_data is not None
    shape, chunk = item.tensor_data.size, item.tensor_data.chunk
    beyond = shard(item.index.fqn, tuple(shape), tuple(chunk.offsets), tuple(n + 1 for n in chunk.sizes))
    with pytest.raises(InvalidPlanError, match="out of bounds"):
        plan_for([*plans[:-1], SavePlan([beyond])])


# Columns and lines


def test_columns_survive_being_sent() -> None:
    state = {"a": torch.zeros(3), "b": {"n": 5, "c": torch.zeros(2, 2, dtype=torch.int8)}, "d": b"x" * 2**20}
    planner = holdfast.DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    plan = planner.create_local_plan()
    arrived = sent(plan)
    assert arrived == plan
    assert arrived.planner_data == plan.planner_data
    # Looked at on both sides, they are the same lines.
    assert list(arrived.items) == list(plan.items)
    assert [item.index.fqn for item in arrived.items] == ["a", "b.n", "b.c", "d"]
    assert sent(arrived) == plan, "lines that were looked at travel, too"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_simulated_ranks_hold_what_their_planner_offers(layout: Layout) -> None:
    fleet = Fleet(layout, 4, 3)
    offers = list(planning_ours.offers_of(fleet))
    for rank, (offer, theirs) in enumerate(zip(offers, planning_stock.plans_of(fleet), strict=True)):
        held = [(item.index.fqn, item.tensor_data) for item in offer.items if item.tensor_data is not None]
        assert [(key, data.size, data.chunk.offsets, data.chunk.sizes) for key, data in held] == [
            tuple(part) for part in fleet.parts(rank)
        ]
        assert offer.planner_data == theirs.planner_data


@pytest.mark.parametrize("layout", ["shards", "hsdp", "replicas"])
def test_a_simulated_rank_reports_what_a_writer_would(layout: Layout, tmp_path: Path) -> None:
    fleet = Fleet(layout, 2, 5)
    plans, _ = plan_for(list(planning_ours.offers_of(fleet)))
    for rank in range(2):
        planner = holdfast.DefaultSavePlanner()
        planner.set_up_planner(fleet.state(rank), is_coordinator=rank == 0)
        planner.create_local_plan()
        writer = holdfast.FileSystemWriter(tmp_path, sync_files=False)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[rank])
        written = writer.write_data(plan, planner).wait()
        said = planning_ours.results_of(plan)
        assert Counter(result.index for result in said) == Counter(result.index for result in written)
        assert {result.storage_data.relative_path for result in said} == {
            result.storage_data.relative_path for result in written
        }


@st.composite
def fleets_of_lines(draw: st.DrawFn) -> list[list[WriteItem]]:
    """What ranks offer: shards of grids, some of them by several ranks; whole tensors; objects."""
    world = draw(st.integers(1, 5))
    ranks: list[list[WriteItem]] = [[] for _ in range(world)]
    some_ranks = st.sets(st.integers(0, world - 1), min_size=1)
    for number in range(draw(st.integers(0, 6))):
        key = f"key {number}"
        kind = draw(st.sampled_from(["grid", "whole", "object"]))
        if kind == "object":
            for rank in draw(some_ranks):
                ranks[rank].append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
            continue
        if kind == "whole":
            data = create_default_local_save_plan({key: torch.zeros(draw(st.integers(0, 4)), 2)}, False)
            for rank in draw(some_ranks):
                ranks[rank] += [*data.items]
            continue
        cuts = [sorted({0, *draw(st.sets(st.integers(1, 8), max_size=3)), 9}) for _ in range(2)]
        for top, bottom in zip(cuts[0], cuts[0][1:], strict=False):
            for left, right in zip(cuts[1], cuts[1][1:], strict=False):
                for rank in draw(some_ranks):
                    ranks[rank].append(shard(key, (9, 9), (top, left), (bottom - top, right - left)))
    return [draw(st.permutations(lines)) for lines in ranks]


def as_columns(lines: list[WriteItem]) -> SavePlan:
    """A plan of these lines that nobody has looked at, as it comes from a rank."""
    from holdfast._plan.write_columns import WriteItems, columns_of  # noqa: PLC0415 - made by planners only

    return SavePlan(WriteItems(columns_of(SavePlan(lines))))


@pytest.mark.slow
@settings(deadline=None)
@given(ranks=fleets_of_lines(), lowest=st.booleans())
def test_columns_and_lines_are_merged_alike_and_each_item_once(
    ranks: list[list[WriteItem]], lowest: bool
) -> None:
    def merged(plans: list[SavePlan]) -> tuple[list[list[WriteItem]], Metadata]:
        planner = holdfast.DefaultSavePlanner(dedup_save_to_lowest_rank=lowest, flatten_state_dict=False)
        found, metadata = planner.create_global_plan(plans)
        return [list(plan.items) for plan in found], metadata

    from_lines, metadata = merged([SavePlan(list(lines)) for lines in ranks])
    from_columns, same_metadata = merged([as_columns(lines) for lines in ranks])
    assert from_columns == from_lines
    assert meaning(same_metadata) == meaning(metadata)
    # Each item is written exactly once, by a rank that offered it.
    due = {item.index for lines in ranks for item in lines}
    assert Counter(item.index for lines in from_lines for item in lines) == dict.fromkeys(due, 1)
    for offered, kept in zip(ranks, from_lines, strict=True):
        assert {item.index for item in kept} <= {item.index for item in offered}
    for described, plans in ((metadata, from_lines), (same_metadata, from_columns)):
        for item in (item for lines in plans for item in lines if item.tensor_data is not None):
            assert item.tensor_data is not None
            entry = described.state_dict_metadata[item.index.fqn]
            assert item.index.index is not None
            assert entry.chunks[item.index.index] == item.tensor_data.chunk  # type: ignore[union-attr]


def meaning(metadata: Metadata) -> dict[str, Any]:
    """What the metadata says; the order of a tensor's chunks says nothing."""
    return {
        key: (entry.properties, entry.size, sorted((c.offsets, c.sizes) for c in entry.chunks))
        if isinstance(entry, TensorStorageMetadata)
        else entry
        for key, entry in metadata.state_dict_metadata.items()
    }


def test_ranks_that_say_nothing_has_changed_save_the_same_again(tmp_path: Path) -> None:
    whole = torch.arange(32.0)
    told: list[bool] = []

    class Planner(holdfast.DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            offer = super().create_local_plan()
            told.append(offer.usable)
            return offer

    def work(rank: FakeRank) -> None:
        state = {"w": rank.distribute(whole, rank.mesh(), [Shard(0)])}
        for name in ("first", "second"):
            planner = Planner(enable_plan_caching=True)
            # Ranks are processes, each with a memory of its own; here the name tells theirs apart.
            planner._cached_plans_key = f"rank {rank.rank}"
            rank.save(state, checkpoint_id=tmp_path / name, planner=planner)

    FakeRanks(4).run(work)
    assert told == [True] * 4 + [False] * 4
    for name in ("first", "second"):
        state = {"w": torch.zeros(32)}
        holdfast.load(state, checkpoint_id=tmp_path / name, no_dist=True)
        assert torch.equal(state["w"], whole)


def test_a_planner_that_looks_at_its_items_does_not_have_them_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = {f"key {n}": torch.zeros(2) for n in range(10)}
    plan = create_default_local_save_plan(state, is_coordinator=True)
    assert len([*plan.items]) == 10

    def make_again(self: WriteItem, *args: Any) -> None:
        raise AssertionError("an item was made again")

    with monkeypatch.context() as patched:
        patched.setattr(WriteItem, "__init__", make_again)
        _, metadata = plan_for([plan])
    assert len(metadata.state_dict_metadata) == 10

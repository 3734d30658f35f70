"""Sharded checkpoints both ways: torch writes and we load into every layout, and the other way round."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.reshard.layouts import Layout, assert_holds, blank, layouts_of, matrix
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.tensor import Shard

from holdfast import default_planner
from holdfast.metadata import TensorStorageMetadata
from holdfast.testing import FakeRank, FakeRanks

pytestmark = [
    pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


def torch_save(rank: FakeRank, state: dict[str, Any], folder: Path) -> None:
    """torch's own planner and writer, with the steps of torch's save, over the fake exchange."""
    planner, writer = DefaultSavePlanner(), FileSystemWriter(folder)
    first, exchange = rank.rank == 0, rank.open_exchange()
    metadata = None

    def offer() -> Any:
        planner.set_up_planner(state, writer.storage_meta(), first)
        writer.set_up_storage_writer(first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def merge(plans: list[Any]) -> list[Any]:
        nonlocal metadata
        merged, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(merged)

    plan = exchange.decide("plan", offer, merge)

    def write() -> Any:
        return writer.write_data(planner.finish_plan(plan), planner).wait()

    def commit(results: list[Any]) -> None:
        assert metadata is not None
        writer.finish(metadata, results)

    exchange.agree("write", write, commit)


def torch_load(rank: FakeRank, state: dict[str, Any], folder: Path) -> None:
    """torch's own planner and reader, with the steps of torch's load, over the fake exchange."""
    planner, reader = DefaultLoadPlanner(), FileSystemReader(folder)
    first, exchange = rank.rank == 0, rank.open_exchange()

    def need() -> Any:
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, first)
        reader.set_up_storage_reader(metadata, first)
        return reader.prepare_local_plan(planner.create_local_plan())

    def merge(plans: list[Any]) -> list[Any]:
        return reader.prepare_global_plan(planner.create_global_plan(plans))

    plan = exchange.decide("plan", need, merge)
    exchange.agree(
        "read", lambda: reader.read_data(planner.finish_plan(plan), planner).wait(), lambda _: None
    )


def ours_save(rank: FakeRank, state: dict[str, Any], folder: Path) -> None:
    rank.save(state, checkpoint_id=folder)


def ours_load(rank: FakeRank, state: dict[str, Any], folder: Path) -> None:
    rank.load(state, checkpoint_id=folder)


# Where torch is wrong: it names one box where a rank has several, or one at a wrong place, and looks at the
# memory of a rank that is outside of the mesh.
_WRONG_IN_TORCH = ("strided", "tp, then dp", "first rank", "all but")


def layouts_torch_knows(world_size: int) -> dict[str, Layout]:
    # A ShardedTensor without a local shard asks for a CUDA device when torch asks for its device.
    wrong = (*_WRONG_IN_TORCH, "sharded") if world_size > 4 else _WRONG_IN_TORCH
    return {
        name: make for name, make in layouts_of(world_size).items() if not any(word in name for word in wrong)
    }


def check(
    writers: int,
    readers: int,
    folder: Path,
    save: Callable[[FakeRank, dict[str, Any], Path], None],
    load: Callable[[FakeRank, dict[str, Any], Path], None],
    sources: dict[str, Layout],
    targets: dict[str, Layout],
) -> None:
    names = list(sources)
    pairs = [(names[n % len(names)], target) for n, target in enumerate(targets)]
    pairs += [(source, list(targets)[n % len(targets)]) for n, source in enumerate(reversed(names))]
    wholes = {pair: matrix(n) for n, pair in enumerate(pairs)}

    def first(rank: FakeRank) -> None:
        save(rank, {f"{s} to {t}": sources[s](rank, whole) for (s, t), whole in wholes.items()}, folder)

    def second(rank: FakeRank) -> None:
        state = {f"{s} to {t}": targets[t](rank, blank(whole)) for (s, t), whole in wholes.items()}
        load(rank, state, folder)
        for (s, t), whole in wholes.items():
            assert_holds(state[f"{s} to {t}"], targets[t](rank, whole), f"{s} to {t}, rank {rank.rank}")

    FakeRanks(writers).run(first)
    FakeRanks(readers).run(second)


WORLDS = [(1, 4), (2, 3), (4, 1), (4, 6), (6, 4)]


@pytest.mark.parametrize(("writers", "readers"), WORLDS)
def test_what_torch_saved_sharded_loads_into_every_layout(writers: int, readers: int, tmp_path: Path) -> None:
    sources, targets = layouts_torch_knows(writers), layouts_of(readers)
    check(writers, readers, tmp_path, torch_save, ours_load, sources, targets)


@pytest.mark.parametrize(("writers", "readers"), WORLDS)
def test_torch_loads_every_layout_that_we_saved(writers: int, readers: int, tmp_path: Path) -> None:
    sources, targets = layouts_of(writers), layouts_torch_knows(readers)
    check(writers, readers, tmp_path, ours_save, torch_load, sources, targets)


def test_the_empty_chunks_that_torch_writes_are_read(tmp_path: Path) -> None:
    whole = torch.arange(6.0).view(2, 3)

    def save(rank: FakeRank) -> None:
        torch_save(rank, {"weight": rank.distribute(whole, rank.mesh(), [Shard(0)])}, tmp_path)

    def load(rank: FakeRank) -> None:
        state = {"weight": rank.distribute(torch.zeros(2, 3), rank.mesh(), [Shard(1)])}
        rank.load(state, checkpoint_id=tmp_path)
        assert_holds(state["weight"], rank.distribute(whole, rank.mesh(), [Shard(1)]), "weight")

    FakeRanks(4).run(save)
    FakeRanks(5).run(load)


def test_a_state_is_described_as_torch_does_also_where_a_rank_has_no_shard() -> None:
    whole = torch.arange(4.0)

    def describe(rank: FakeRank) -> None:
        value = rank.sharded_tensor(whole, [[((0,), (4,))], []])
        for state in ({"t": value}, {"t": value, "plain": torch.ones(2)}):
            entry = default_planner._create_default_local_metadata(state).state_dict_metadata["t"]
            assert isinstance(entry, TensorStorageMetadata)
            assert (entry.size, entry.properties.dtype) == (whole.shape, whole.dtype)
            assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks] == [((0,), (4,))]

    FakeRanks(2).run(describe)

"""Values that several ranks save under one key: written once, shared out, and never one winner in silence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import holdfast as hf
from holdfast.errors import PlanError
from holdfast.testing import FakeRank, FakeRanks

MIB = 1 << 20


def bytes_by_rank(folder: Path) -> list[int]:
    """How much each rank wrote, by the names of the files."""
    found: dict[int, int] = {}
    for file in folder.glob("*.distcp"):
        rank = int(file.name.removeprefix("__").split("_")[0])
        found[rank] = found.get(rank, 0) + file.stat().st_size
    return [found.get(rank, 0) for rank in range(max(found) + 1)]


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param([(3 * MIB,)], id="one tensor"),
        pytest.param([(1024, 1024), (7,), (333, 1000), (5, 100_000)], id="some tensors"),
        pytest.param([(1, 2, 3 * MIB)], id="dimensions of one"),
        pytest.param([(64, 1024)] * 60, id="many tensors"),
    ],
)
def test_a_replicated_model_takes_each_of_four_ranks_a_quarter_of_the_bytes(
    tmp_path: Path, shapes: list[tuple[int, ...]]
) -> None:
    state = {f"w{n}": torch.randn(shape) for n, shape in enumerate(shapes)}
    FakeRanks(4).run(lambda rank: rank.save(dict(state), checkpoint_id=tmp_path))
    written = bytes_by_rank(tmp_path)
    assert len(written) == 4
    assert max(written) < 1.1 * sum(written) / 4
    loaded = {key: torch.zeros_like(value) for key, value in state.items()}
    hf.load(loaded, checkpoint_id=tmp_path)
    assert all(torch.equal(loaded[key], state[key]) for key in state)


def test_replicated_shards_are_shared_out_among_the_ranks_that_hold_them(tmp_path: Path) -> None:
    whole = torch.randn(2048, 1024)

    def save(rank: FakeRank) -> None:
        mesh = rank.mesh(2, 2)
        state = {"w": rank.distribute(whole, mesh, [Replicate(), Shard(0)])}
        rank.save(state, checkpoint_id=tmp_path)

    FakeRanks(4).run(save)
    written = bytes_by_rank(tmp_path)
    assert max(written) < 1.1 * sum(written) / 4
    loaded = {"w": torch.zeros_like(whole)}
    hf.load(loaded, checkpoint_id=tmp_path)
    assert torch.equal(loaded["w"], whole)


def test_the_lowest_rank_writes_everything_if_asked_to(tmp_path: Path) -> None:
    state = {"w": torch.randn(3 * MIB)}
    planners = [hf.DefaultSavePlanner(dedup_save_to_lowest_rank=True) for _ in range(3)]
    FakeRanks(3).run(lambda rank: rank.save(dict(state), checkpoint_id=tmp_path, planner=planners[rank.rank]))
    written = bytes_by_rank(tmp_path)
    assert written[0] > 12 * MIB
    assert sum(written[1:]) == 0


LARGE: dict[str, Any] = {
    "the last element of a large tensor": lambda rank: (
        torch.arange(16_000) + (torch.arange(16_000) == 15_999) * rank
    ),
    "a large tensor": lambda rank: torch.full((MIB,), float(rank)),
    "large bytes": lambda rank: b"x" * MIB + bytes([rank]),
    "a large object": lambda rank: [rank, "x" * MIB],
}


@pytest.mark.parametrize("value", LARGE.values(), ids=LARGE)
def test_large_values_that_differ_are_refused_on_all_ranks(tmp_path: Path, value: Any) -> None:
    hf.save({"old": 1}, checkpoint_id=tmp_path)

    def save(rank: FakeRank) -> None:
        state = {"same": 5, "small": rank.rank, "other": value(max(rank.rank, 1))}
        rank.save(state, checkpoint_id=tmp_path)

    errors = FakeRanks(3).attempt(save)
    for error in errors:
        assert isinstance(error, PlanError)
        assert "other: ranks 0, 1 and 2 have different values" in str(error)
        assert "not kept for each rank" in str(error)
        assert "PerRank" in str(error)
        assert "same" not in str(error)
        assert "small:" not in str(error)
    state = {"old": 0}
    hf.load(state, checkpoint_id=tmp_path)
    assert state == {"old": 1}


def test_every_byte_of_large_tensors_is_compared_if_asked_to(tmp_path: Path) -> None:
    def save(check: Any) -> list[BaseException | None]:
        def work(rank: FakeRank) -> None:
            value = torch.zeros(4 * MIB)
            value[123_457] = rank.rank
            planner = hf.DefaultSavePlanner(check_replicas=check)
            rank.save({"w": value}, checkpoint_id=tmp_path, planner=planner)

        return FakeRanks(2).attempt(work)

    assert all(isinstance(error, PlanError) for error in save("full"))
    assert save(False) == [None, None]


def test_ranks_may_have_keys_of_their_own(tmp_path: Path) -> None:
    FakeRanks(3).run(
        lambda rank: rank.save({"step": 7, f"stage{rank.rank}": rank.rank}, checkpoint_id=tmp_path)
    )
    state = {"step": 0, "stage0": -1, "stage1": -1, "stage2": -1}
    hf.load(state, checkpoint_id=tmp_path)
    assert state == {"step": 7, "stage0": 0, "stage1": 1, "stage2": 2}


def test_a_planner_that_finds_values_in_its_own_way_is_not_asked_for_parts_of_them(tmp_path: Path) -> None:
    class Doubling(hf.DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            return super().lookup_object(index) * 2

    state = {"w": torch.arange(2.0 * MIB)}
    FakeRanks(2).run(lambda rank: rank.save(dict(state), checkpoint_id=tmp_path, planner=Doubling()))
    loaded = {"w": torch.zeros(2 * MIB)}
    hf.load(loaded, checkpoint_id=tmp_path)
    assert torch.equal(loaded["w"], state["w"] * 2)


def test_every_rank_gets_the_metadata_of_a_large_checkpoint_when_it_looks(tmp_path: Path) -> None:
    keys = [f"k{n}" for n in range(20_001)]

    def save(rank: FakeRank) -> tuple[int, str, Any]:
        made = rank.save(dict.fromkeys(keys, torch.zeros(1)), checkpoint_id=tmp_path)
        first = made.state_dict_metadata["k0"]
        return len(made.state_dict_metadata), repr(first), list(made.state_dict_metadata) == keys

    results = FakeRanks(2).run(save)
    assert results[0] == results[1]
    assert results[0][0] == 20_001
    assert results[0][2]


def test_replicas_of_a_dtensor_that_differ_raise_with_the_chunk_and_its_ranks(tmp_path: Path) -> None:
    def save(rank: FakeRank, wrong: int | None) -> None:
        mesh = rank.mesh(2, 2)
        rows = torch.arange(8.0).view(4, 2)[2 * (rank.rank % 2) :][:2].clone()
        rows[0, 0] += 1 if rank.rank == wrong else 0
        state = {
            "w": rank.assemble(rows, mesh, [Replicate(), Shard(0)], [4, 2]),
            "r": rank.assemble(torch.ones(2), mesh, [Replicate(), Replicate()], [2]),
        }
        rank.save(state, checkpoint_id=tmp_path)

    FakeRanks(4).run(lambda rank: save(rank, None))
    for error in FakeRanks(4).attempt(lambda rank: save(rank, 3)):
        assert isinstance(error, PlanError)
        assert "w[2:4, 0:2]: ranks 1 and 3 have different values" in str(error)
        assert "r[" not in str(error)

"""What cannot be described as boxes is refused, with key and placements, when saving and when loading."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.reshard.layouts import strided
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import holdfast
from holdfast.errors import InvalidPlanError, PlanError
from holdfast.testing import FakeRank, FakeRanks

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")


class OddShard(Shard):
    """A user's own way to divide a dimension: what it gives to whom is not known to us."""


def partial(rank: FakeRank) -> Any:
    return rank.assemble(torch.ones(4), rank.mesh(), [Partial()], [4])


def partly_partial(rank: FakeRank) -> Any:
    return rank.assemble(torch.ones(4), rank.mesh(1, 2), [Shard(0), Partial("max")], [4])


def of_an_unknown_class(rank: FakeRank) -> Any:
    return rank.assemble(torch.ones(2), rank.mesh(), [OddShard(0)], [4])


def of_another_size(rank: FakeRank) -> Any:
    # A user who cut 4 rows into 1 and 3 by hand.
    return rank.assemble(torch.ones(1 + 2 * rank.rank), rank.mesh(), [Shard(0)], [4])


UNKNOWABLE = {
    "Partial(sum)": partial,
    "Partial(max)": partly_partial,
    "OddShard": of_an_unknown_class,
    "local shape": of_another_size,
}


@pytest.mark.parametrize("word", UNKNOWABLE)
def test_an_unknowable_layout_is_not_saved(word: str, tmp_path: Path) -> None:
    make = UNKNOWABLE[word]

    def save(rank: FakeRank) -> None:
        rank.save({"model": {"weight": make(rank)}}, checkpoint_id=tmp_path)

    for error in FakeRanks(2).attempt(save):
        assert isinstance(error, PlanError)
        assert error.key == "model.weight"
        assert "model.weight" in str(error)
        assert word in str(error)
    assert not (tmp_path / ".metadata").exists()


@pytest.mark.parametrize("word", UNKNOWABLE)
def test_an_unknowable_layout_is_not_loaded_into(word: str, tmp_path: Path) -> None:
    make = UNKNOWABLE[word]
    holdfast.save({"weight": torch.zeros(4)}, checkpoint_id=tmp_path)

    def load(rank: FakeRank) -> None:
        state = {"weight": make(rank)}
        try:
            rank.load(state, checkpoint_id=tmp_path)
        finally:
            assert state["weight"].to_local().all(), "it was written to"

    for error in FakeRanks(2).attempt(load):
        assert isinstance(error, PlanError)
        assert word in str(error)


def test_two_meanings_of_one_shape_are_not_guessed_between(tmp_path: Path) -> None:
    # 27 rows over 4 tensor-parallel ranks and 3 data-parallel ones: for one rank the layout of FSDP2 and
    # that of torch's distribute_tensor have the same shape at different places.
    def save(rank: FakeRank) -> None:
        value = rank.distribute(torch.arange(27.0), rank.mesh(3, 4), [strided(0, 4), Shard(0)])
        rank.save({"weight": value}, checkpoint_id=tmp_path)

    for error in FakeRanks(12).attempt(save):
        assert isinstance(error, PlanError)
        assert "weight" in str(error)
        assert "two meanings" in str(error)
        assert "_StridedShard" in str(error)


def test_shards_of_different_dtypes_are_refused(tmp_path: Path) -> None:
    def save(rank: FakeRank) -> None:
        local = torch.ones(2, dtype=torch.float32 if rank.rank == 0 else torch.bfloat16)
        rank.save({"weight": rank.assemble(local, rank.mesh(), [Shard(0)], [4])}, checkpoint_id=tmp_path)

    for error in FakeRanks(2).attempt(save):
        assert isinstance(error, InvalidPlanError)
        assert "weight" in str(error)
        assert "float32" in str(error)
        assert "bfloat16" in str(error)
    assert not (tmp_path / ".metadata").exists()


def test_shards_of_different_whole_shapes_are_refused(tmp_path: Path) -> None:
    def save(rank: FakeRank) -> None:
        value = rank.distribute(torch.ones(4 + 2 * rank.rank), rank.mesh(), [Shard(0)])
        rank.save({"weight": value}, checkpoint_id=tmp_path)

    for error in FakeRanks(2).attempt(save):
        assert isinstance(error, InvalidPlanError)
        assert "weight" in str(error)


def test_a_key_that_is_sharded_here_and_plain_there_is_refused(tmp_path: Path) -> None:
    def save(rank: FakeRank) -> None:
        value: Any = torch.ones(4)
        if rank.rank == 0:
            value = rank.distribute(value, rank.mesh(), [Shard(0)])
        rank.save({"weight": value}, checkpoint_id=tmp_path)

    for error in FakeRanks(2).attempt(save):
        assert isinstance(error, PlanError)
        assert "weight" in str(error)


def test_a_shard_that_nobody_saves_is_noticed(tmp_path: Path) -> None:
    def save(rank: FakeRank) -> None:
        value = rank.distribute(torch.ones(4), rank.mesh(), [Shard(0)])
        rank.save({"weight": value} if rank.rank else {"step": 1}, checkpoint_id=tmp_path)

    for error in FakeRanks(2).attempt(save):
        assert isinstance(error, InvalidPlanError)
        assert "weight" in str(error)


def test_a_sharded_tensor_whose_shard_has_another_size_than_it_says_is_refused(tmp_path: Path) -> None:
    def save(rank: FakeRank) -> None:
        value = rank.sharded_tensor(torch.ones(4), [[((0,), (2,))], [((2,), (2,))]])
        value.local_shards()[0].tensor = torch.ones(3)
        rank.save({"weight": value}, checkpoint_id=tmp_path)

    for error in FakeRanks(2).attempt(save):
        assert isinstance(error, PlanError)
        assert error.key == "weight"


def test_a_dtensor_without_data_is_not_saved(tmp_path: Path) -> None:
    def save(rank: FakeRank) -> None:
        local = torch.empty(2, device="meta")
        value: DTensor = rank.assemble(local, rank.mesh(), [Replicate()], [2])
        rank.save({"weight": value}, checkpoint_id=tmp_path)

    for error in FakeRanks(2).attempt(save):
        assert isinstance(error, PlanError)
        assert error.key == "weight"
        assert "meta device" in str(error)


@pytest.mark.parametrize("nbytes", [0, 20], ids=["freed", "cut"])
@pytest.mark.parametrize("kind", ["plain", "transposed", "DTensor"])
def test_a_tensor_whose_storage_was_freed_is_neither_saved_nor_loaded_into(
    tmp_path: Path, kind: str, nbytes: int
) -> None:
    def without_memory(rank: FakeRank) -> Any:
        memory = torch.ones(8, 4)
        local = memory.t() if kind == "transposed" else memory
        memory.untyped_storage().resize_(nbytes)
        return rank.assemble(local, rank.mesh(), [Shard(0)], [16, 4]) if kind == "DTensor" else local

    def save(rank: FakeRank) -> None:
        rank.save({"model": {"weight": without_memory(rank)}}, checkpoint_id=tmp_path)

    def load(rank: FakeRank) -> None:
        rank.load({"model": {"weight": without_memory(rank)}}, checkpoint_id=tmp_path)

    for error in FakeRanks(2).attempt(save):
        assert isinstance(error, PlanError)
        assert error.key == "model.weight"
        assert "freed" in str(error)
    shape = {"plain": (8, 4), "transposed": (4, 8), "DTensor": (16, 4)}[kind]
    holdfast.save({"model": {"weight": torch.ones(shape)}}, checkpoint_id=tmp_path)
    for error in FakeRanks(2).attempt(load):
        assert isinstance(error, PlanError)
        assert "model.weight" in str(error)
        assert "freed" in str(error)

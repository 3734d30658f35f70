"""torch's LocalShardsWrapper in DTensors, and other values that name their chunks, on real ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import run_ranks
from tests.unit.test_checkpointable import Columns
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import holdfast
from holdfast.state_dict_saver import AsyncCheckpointerType

pytestmark = pytest.mark.slow

WHOLE = torch.arange(44, dtype=torch.bfloat16).reshape(4, 11)
# For each number of ranks the columns at which the shards of each rank begin; the last rank of 3 has none.
BEGINS: dict[int, list[list[int]]] = {3: [[0, 1], [3], []], 2: [[0, 4, 5], [9]]}


def table(*, zeros: bool = False) -> DTensor:
    """A table of embeddings that is divided by columns, several shards on a rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    cuts = [begin for begins in BEGINS[world] for begin in begins] + [WHOLE.shape[1]]
    whole = torch.zeros_like(WHOLE) if zeros else WHOLE
    begins = BEGINS[world][rank]
    shards = [whole[:, a : cuts[cuts.index(a) + 1]].clone() for a in begins]
    return DTensor.from_local(
        LocalShardsWrapper(shards, [(0, a) for a in begins]),
        init_device_mesh("cpu", (world,)),
        [Shard(1)],
        run_check=False,
        shape=WHOLE.shape,
        stride=WHOLE.stride(),
    )


def assert_is_whole(value: DTensor) -> None:
    local: Any = value._local_tensor
    for shard, (_, begin) in zip(local.local_shards(), local.local_offsets(), strict=False):
        assert torch.equal(shard, WHOLE[:, begin : begin + shard.shape[1]])


def save_tables(folder: Path) -> None:
    holdfast.save({"t": table()}, checkpoint_id=folder / "ours")
    state_dict_saver.save({"t": table()}, checkpoint_id=folder / "theirs")


def load_tables(folder: Path) -> None:
    for place in ("ours", "theirs"):
        for load in (holdfast.load, state_dict_loader.load):
            value, plain = table(zeros=True), torch.zeros_like(WHOLE)
            load({"t": value}, checkpoint_id=folder / place)
            assert_is_whole(value)
            load({"t": plain}, checkpoint_id=folder / place)
            assert torch.equal(plain, WHOLE)


@pytest.mark.parametrize(("writers", "readers"), [(3, 2), (2, 3)])
def test_tables_of_several_shards_a_rank_go_from_ranks_to_ranks(
    writers: int, readers: int, tmp_path: Path
) -> None:
    assert run_ranks(save_tables, writers, tmp_path) == [("returned", None)] * writers
    assert run_ranks(load_tables, readers, tmp_path) == [("returned", None)] * readers


def save_in_the_background(folder: Path) -> None:
    for mode in AsyncCheckpointerType:
        value = table()
        saving: Any = holdfast.async_save(
            {"nested": [value]}, checkpoint_id=folder / mode.value, async_checkpointer_type=mode
        )
        for shard in value._local_tensor.local_shards():  # type: ignore[attr-defined]
            shard.zero_()
        saving.result()
        into = table(zeros=True)
        result = holdfast.load({"nested": [into]}, checkpoint_id=folder / mode.value)
        assert result.loaded == ("nested.0",)
        assert_is_whole(into)


def test_a_background_save_of_a_table_has_the_values_of_its_call(tmp_path: Path) -> None:
    assert run_ranks(save_in_the_background, 2, tmp_path) == [("returned", None)] * 2


LARGE = torch.arange(4 * 300_000, dtype=torch.float64).reshape(4, 300_000)


def save_and_load_columns(folder: Path) -> list[int]:
    """Both ranks hold all columns, so that each writes a part of them."""
    saved = holdfast.save({"w": Columns(LARGE, 0, 150_000)}, checkpoint_id=folder)
    into = Columns(torch.zeros_like(LARGE), *([0, 7] if dist.get_rank() else [0, 200_000]))
    holdfast.load({"w": into}, checkpoint_id=folder)
    assert torch.equal(into.together(), LARGE)
    return sorted(place.length for place in saved.storage_data.values())


def test_a_value_that_both_ranks_hold_is_written_once_in_parts(tmp_path: Path) -> None:
    (kind, lengths), _ = run_ranks(save_and_load_columns, 2, tmp_path)
    assert kind == "returned", lengths
    assert LARGE.nbytes <= sum(lengths) < LARGE.nbytes * 1.01
    assert len({path.name.split("_")[2] for path in tmp_path.glob("*.distcp")}) == 2

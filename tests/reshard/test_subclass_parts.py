"""DTensors of tensor subclasses, saved by some ranks and loaded by others."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.subclasses import BlockScaled, RowScaled, assert_same_parts
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import holdfast
from holdfast._engine.optimizer_room import OptimizerRooms
from holdfast._parameter_states import ParameterStates
from holdfast.default_planner import DefaultLoadPlanner
from holdfast.errors import CheckpointError
from holdfast.testing import FakeRank, FakeRanks

pytestmark = pytest.mark.one_core

Layout = tuple[tuple[int, ...], list[Placement]]


def block_scaled(rank: FakeRank, layout: Layout, whole: BlockScaled) -> Any:
    """This rank's rows of a tensor, with the scales of their blocks."""
    mesh = rank.mesh(*layout[0])
    codes = rank.distribute(whole.codes, mesh, layout[1])
    rows = whole.codes.shape[0]
    by_row = whole.scale.view(rows, -1)
    scale = rank.distribute(by_row, mesh, layout[1]).to_local().flatten()
    local = BlockScaled(codes.to_local(), scale, whole.table.clone(), whole.context)
    return divided(local, codes, whole)


def row_scaled(rank: FakeRank, layout: Layout, whole: RowScaled) -> Any:
    """This rank's box of a tensor, with the scales of its rows, in any division of rows and columns."""
    mesh = rank.mesh(*layout[0])
    values = rank.distribute(whole.rows, mesh, layout[1])
    of_rows = [Replicate() if getattr(one, "dim", 0) else one for one in layout[1]]
    scale = rank.distribute(whole.scale, mesh, of_rows).to_local()
    return divided(RowScaled(values.to_local(), scale, tuple(values.to_local().shape)), values, whole)


def divided(local: torch.Tensor, like: Any, whole: torch.Tensor) -> Any:
    about = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=about)
    return type(like)(local, spec, requires_grad=False)


def rows_of(seed: int, shape: Sequence[int] = (10, 8)) -> RowScaled:
    source = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 100, tuple(shape), generator=source, dtype=torch.int8)
    return RowScaled(values, torch.rand(shape[0], 1, generator=source), tuple(shape))


ROWS: list[Layout] = [
    ((4,), [Shard(0)]),  # 3, 3, 3 and 1 rows
    ((3,), [Shard(0)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2,), [Replicate()]),
    ((12,), [Shard(0)]),  # two ranks have none
]
COLUMNS: list[Layout] = [((2,), [Shard(1)]), ((2, 2), [Shard(0), Shard(1)]), ((4,), [Shard(1)])]


def ranks_of(layout: Layout) -> FakeRanks:
    return FakeRanks(torch.Size(layout[0]).numel())


@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_blocks_of_rows_load_into_every_other_layout(tmp_path: Path, layout: Layout) -> None:
    whole = BlockScaled.random(10, 8, block=4, seed=1)
    other = BlockScaled.random(10, 8, block=4, seed=2)

    def save(rank: FakeRank) -> None:
        rank.save({"w": block_scaled(rank, layout, whole)}, checkpoint_id=tmp_path)

    ranks_of(layout).run(save)
    target = {"w": BlockScaled.random(10, 8, block=4, seed=2)}
    holdfast.load(target, checkpoint_id=tmp_path, strict=True)
    assert_same_parts(target["w"], whole)
    for into in ROWS:

        def load(rank: FakeRank, into: Layout = into) -> None:
            found, expected = (block_scaled(rank, into, one) for one in (other, whole))
            state = {"w": found}
            rank.load(state, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(strict=True))
            assert state["w"] is found
            local = found._local_tensor
            if local.numel():
                assert_same_parts(local, expected._local_tensor)

        ranks_of(into).run(load)


@pytest.mark.parametrize("layout", [*ROWS, *COLUMNS], ids=str)
def test_a_class_that_cannot_be_cut_is_divided_as_its_shapes_say(tmp_path: Path, layout: Layout) -> None:
    def save(rank: FakeRank) -> None:
        rank.save({"w": row_scaled(rank, layout, rows_of(1))}, checkpoint_id=tmp_path)

    ranks_of(layout).run(save)
    target = {"w": rows_of(2)}
    holdfast.load(target, checkpoint_id=tmp_path, strict=True)
    assert_same_parts(target["w"], rows_of(1))
    for into in [ROWS[0], *COLUMNS]:

        def load(rank: FakeRank, into: Layout = into) -> None:
            found, expected = (row_scaled(rank, into, rows_of(seed)) for seed in (2, 1))
            rank.load({"w": found}, checkpoint_id=tmp_path)
            assert_same_parts(found._local_tensor, expected._local_tensor)

        ranks_of(into).run(load)


def test_a_template_on_the_meta_device_is_given_memory(tmp_path: Path) -> None:
    def save(rank: FakeRank) -> None:
        rank.save({"w": row_scaled(rank, ROWS[0], rows_of(1))}, checkpoint_id=tmp_path)

    def load(rank: FakeRank) -> None:
        expected = row_scaled(rank, COLUMNS[1], rows_of(1))
        local = expected._local_tensor
        empty = RowScaled(local.rows.to("meta"), local.scale.to("meta"), tuple(local.shape))
        state: dict[str, Any] = {"w": torch.nn.Parameter(divided(empty, expected, rows_of(1)))}
        rank.load(state, checkpoint_id=tmp_path)
        loaded = state["w"]
        assert loaded.placements == expected.placements
        assert_same_parts(loaded._local_tensor, local)
        assert isinstance(loaded, torch.nn.Parameter)

    ranks_of(ROWS[0]).run(save)
    ranks_of(COLUMNS[1]).run(load)


def test_parts_that_are_dtensors_are_saved_as_such(tmp_path: Path) -> None:
    def state(rank: FakeRank, seed: int, size: int) -> Any:
        whole, mesh = rows_of(seed), rank.mesh(size)
        parts = [rank.distribute(part, mesh, [Shard(0)]) for part in (whole.rows, whole.scale)]
        return {"w": RowScaled(*parts)}

    def load(rank: FakeRank) -> None:
        target, expected = state(rank, 2, 3), state(rank, 1, 3)
        rank.load(target, checkpoint_id=tmp_path)
        for name in ("rows", "scale"):
            found = getattr(target["w"], name).to_local()
            assert torch.equal(found, getattr(expected["w"], name).to_local())

    FakeRanks(2).run(lambda rank: rank.save(state(rank, 1, 2), checkpoint_id=tmp_path))
    FakeRanks(3).run(load)


def save_refused(rank: FakeRank, value: Any, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        rank.save({"m": {"w": value}}, checkpoint_id=folder)
    return str(caught.value)


def test_what_cannot_be_known_is_refused_with_the_key(tmp_path: Path) -> None:
    def unknown_part(rank: FakeRank) -> str:
        mesh = rank.mesh(2)
        values = rank.distribute(torch.ones(8, 4), mesh, [Shard(0)])
        # Seven numbers for four rows: no class says what they belong to.
        return save_refused(
            rank, divided(RowScaled(values.to_local(), torch.ones(7)), values, torch.ones(8, 4)), tmp_path
        )

    def other_scales(rank: FakeRank) -> str:
        mesh = rank.mesh(2)
        values = rank.distribute(torch.ones(8, 4), mesh, [Shard(0)])
        # One scale on each rank looks as if all ranks had the same.
        local = RowScaled(values.to_local(), torch.full((1, 1), float(rank.rank)))
        return save_refused(rank, divided(local, values, torch.ones(8, 4)), tmp_path)

    def other_contexts(rank: FakeRank) -> str:
        mesh = rank.mesh(2)
        values = rank.distribute(torch.ones(8, 4), mesh, [Shard(0)])
        local = RowScaled(values.to_local(), torch.ones(4, 1), f"rank {rank.rank}")
        return save_refused(rank, divided(local, values, torch.ones(8, 4)), tmp_path)

    for case, words in (
        (unknown_part, "m.w: a tensor of the class tests.support.subclasses.RowScaled cannot be stored"),
        (other_scales, "m.w.scale"),
        (other_contexts, "m.w: ranks hold different tensors here"),
    ):
        for message in FakeRanks(2).run(case):
            assert words in message
    assert not (tmp_path / ".metadata").exists()


def test_parts_of_parts_are_divided_alike(tmp_path: Path) -> None:
    def state(rank: FakeRank, seed: int, layout: Layout) -> Any:
        whole = BlockScaled.random(10, 8, seed=seed)
        inner = block_scaled(rank, layout, whole)
        scale = rank.distribute(whole.scale[:10].view(10, 1), inner.device_mesh, layout[1]).to_local()
        return {"w": divided(RowScaled(inner._local_tensor, scale), inner, whole)}

    def load(rank: FakeRank) -> None:
        target, expected = (state(rank, seed, ROWS[1]) for seed in (2, 1))
        rank.load(target, checkpoint_id=tmp_path)
        assert_same_parts(target["w"]._local_tensor, expected["w"]._local_tensor)

    ranks_of(ROWS[0]).run(lambda rank: rank.save(state(rank, 1, ROWS[0]), checkpoint_id=tmp_path))
    ranks_of(ROWS[1]).run(load)


def test_a_rank_outside_of_the_mesh_takes_part(tmp_path: Path) -> None:
    def state(rank: FakeRank, seed: int) -> Any:
        mesh, whole = rank.mesh(ranks=[1, 2]), rows_of(seed)
        values, scale = (rank.distribute(part, mesh, [Shard(0)]) for part in (whole.rows, whole.scale))
        if mesh.get_coordinate() is None:
            return {"w": divided(torch.empty(0), values, whole)}
        return {"w": divided(RowScaled(values.to_local(), scale.to_local(), (5, 8)), values, whole)}

    def load(rank: FakeRank) -> None:
        target, expected = state(rank, 2), state(rank, 1)
        before = target["w"]
        rank.load(target, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(strict=True))
        assert target["w"] is before
        if rank.rank:
            assert_same_parts(target["w"]._local_tensor, expected["w"]._local_tensor)

    FakeRanks(3).run(lambda rank: rank.save(state(rank, 1), checkpoint_id=tmp_path))
    FakeRanks(3).run(load)
    whole = {"w": rows_of(2)}
    holdfast.load(whole, checkpoint_id=tmp_path, strict=True)
    assert_same_parts(whole["w"], rows_of(1))


@pytest.mark.parametrize("is_flat", [False, True])
def test_room_for_the_state_of_a_divided_parameter_is_made_from_the_checkpoint(
    tmp_path: Path, is_flat: bool
) -> None:
    whole = BlockScaled.random(10, 8, seed=1)

    def state(rank: FakeRank, layout: Layout, moment: Any) -> Any:
        parameter = rank.distribute(torch.ones(10, 8), rank.mesh(*layout[0]), layout[1])
        if is_flat:
            flat = {f"state.{name}.exp_avg": value["exp_avg"] for name, value in moment.items()}
            return ParameterStates(flat, parameters={"w": parameter})
        states = ParameterStates(moment, parameters={"w": parameter})
        return {"state": states, "param_groups": [{"params": ["w"]}]}

    def save(rank: FakeRank) -> None:
        moment = {"w": {"exp_avg": block_scaled(rank, ROWS[0], whole)}}
        rank.save({"optimizer": state(rank, ROWS[0], moment)}, checkpoint_id=tmp_path)

    def load(rank: FakeRank) -> None:
        for layout in (ROWS[2], ROWS[4]):
            target = {"optimizer": state(rank, layout, {})}
            rooms = OptimizerRooms(target, [])
            rooms.make(holdfast.FileSystemReader(tmp_path).read_metadata())
            rank.load(target, checkpoint_id=tmp_path)
            rooms.settle()
            made = target["optimizer"]
            found = made["state.w.exp_avg"] if is_flat else made["state"]["w"]["exp_avg"]
            expected = block_scaled(rank, layout, whole)
            assert found.placements == expected.placements
            assert_same_parts(found._local_tensor, expected._local_tensor)

    FakeRanks(4).run(save)
    FakeRanks(4).run(load)

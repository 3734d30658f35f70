"""States such as training has them, saved by some ranks and loaded by others."""

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.reshard.layouts import (
    assert_holds,
    blank,
    layouts_of,
    matrix,
    on_mesh,
    parts_of,
    plain,
    strided,
)
from tests.reshard.test_layouts import layouts
from tests.support.states import same
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import holdfast
from holdfast._tensors import layout_table
from holdfast._tensors.chunks import with_memory
from holdfast._tensors.dtensors import held_pieces
from holdfast.errors import PlanError
from holdfast.testing import FakeRank, FakeRanks

pytestmark = [
    pytest.mark.one_core,
    pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning"),
]

DTYPES = [
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
]
MeshAndPlacements = tuple[tuple[int, ...], list[Placement]]


def numbers(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(count, generator=generator) > 0.5
    if dtype.is_complex:
        return torch.randn(count, 2, generator=generator).view(torch.complex64).flatten()
    size = count * dtype.itemsize
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype)


def test_every_dtype_keeps_its_bits(tmp_path: Path) -> None:
    wholes = {str(dtype): numbers(35, dtype).view(7, 5) for dtype in DTYPES}

    def save(rank: FakeRank) -> None:
        mesh = rank.mesh(2, 2)
        state = {key: rank.distribute(whole, mesh, [Shard(0), Shard(1)]) for key, whole in wholes.items()}
        rank.save(state, checkpoint_id=tmp_path)

    def load(rank: FakeRank) -> None:
        placements = [Shard(1)]
        state: dict[str, Any] = {
            key: rank.distribute(torch.zeros_like(whole), rank.mesh(), placements)
            for key, whole in wholes.items()
        }
        rank.load(state, checkpoint_id=tmp_path)
        for key, whole in wholes.items():
            assert_holds(state[key], rank.distribute(whole, rank.mesh(), placements), key)

    FakeRanks(4).run(save)
    FakeRanks(3).run(load)


def training_state(rank: FakeRank, placements: list[Placement], mesh: tuple[int, ...], *, seed: int) -> Any:
    """A model and an AdamW over it, as ``get_state_dict`` gives them."""

    def shard(number: int, *shape: int) -> Any:
        return rank.distribute(matrix(seed + number, shape), rank.mesh(*mesh), placements)

    sizes = {"embedding.weight": (11, 3), "out.weight": (2, 11), "out.bias": (2,)}
    momenta = {
        name: {
            "step": torch.tensor(float(seed)),
            "exp_avg": shard(10 + number, *size),
            "exp_avg_sq": shard(20 + number, *size),
        }
        for number, (name, size) in enumerate(sizes.items())
    }
    return {
        "model": {name: shard(number, *size) for number, (name, size) in enumerate(sizes.items())},
        "optimizer": {
            "state": momenta,
            "param_groups": [{"lr": 0.1 * seed, "betas": (0.9, 0.95), "params": list(sizes)}],
        },
        "epoch": seed,
        "rng": torch.full((5,), seed, dtype=torch.uint8),
        "shared buffer": rank.distribute(
            matrix(seed + 40, (6,)), rank.mesh(*mesh), [Replicate()] * len(mesh)
        ),
        "scalar": rank.distribute(torch.tensor(1.5 * seed), rank.mesh(*mesh), [Replicate()] * len(mesh)),
    }


def assert_same_state(left: Any, right: Any, what: str) -> None:
    if isinstance(left, torch.Tensor):
        assert_holds(left, right, what)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same_state(left[key], right[key], f"{what}.{key}")
    elif isinstance(left, list):
        assert len(left) == len(right)
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same_state(one, other, f"{what}.{number}")
    else:
        assert left == right, what


@pytest.mark.parametrize(
    ("target_world", "target_mesh", "target"),
    [
        (1, (1,), [Shard(0)]),
        (2, (2,), [Replicate()]),
        (3, (3,), [Shard(0)]),
        (4, (4, 1), [Replicate(), Shard(0)]),
        (6, (3, 2), [Replicate(), Shard(0)]),
    ],
)
@pytest.mark.parametrize(("mesh", "source"), [((4,), [Shard(0)]), ((2, 2), [Replicate(), Shard(0)])])
def test_a_training_state_continues_on_another_number_of_ranks(
    mesh: tuple[int, ...],
    source: list[Placement],
    target_world: int,
    target_mesh: tuple[int, ...],
    target: list[Placement],
    tmp_path: Path,
) -> None:
    def save(rank: FakeRank) -> None:
        rank.save(training_state(rank, source, mesh, seed=3), checkpoint_id=tmp_path)

    def load(rank: FakeRank) -> None:
        state = training_state(rank, target, target_mesh, seed=200)
        rank.load(state, checkpoint_id=tmp_path)
        expected = training_state(rank, target, target_mesh, seed=3)
        assert_same_state(state, expected, f"rank {rank.rank}")

    FakeRanks(4).run(save)
    FakeRanks(target_world).run(load)


def test_replicated_values_are_written_once(tmp_path: Path) -> None:
    whole = torch.arange(1000.0)

    def save(rank: FakeRank) -> None:
        state = {
            "replicated": rank.distribute(whole, rank.mesh(), [Replicate()]),
            "plain": whole,
            "halves": rank.distribute(whole, rank.mesh(2, 2), [Replicate(), Shard(0)]),
        }
        rank.save(state, checkpoint_id=tmp_path)

    FakeRanks(4).run(save)
    stored = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    assert stored < 1.5 * 3 * whole.nbytes


def test_what_is_smaller_than_the_world_or_empty_or_of_no_dimension(tmp_path: Path) -> None:
    wholes = {
        "one": torch.tensor([1.0]),
        "two rows": torch.arange(6.0).view(2, 3),
        "no rows": torch.empty(0, 4),
        "no columns": torch.empty(4, 0),
        "nothing": torch.empty(0),
        "scalar": torch.tensor(7.0),
    }

    def placement(whole: torch.Tensor, dim: int) -> list[Placement]:
        return [Shard(dim % whole.dim()) if whole.dim() else Replicate()]

    def save(rank: FakeRank) -> list[str]:
        state = {
            key: rank.distribute(whole, rank.mesh(), placement(whole, 0)) for key, whole in wholes.items()
        }
        return sorted(rank.save(state, checkpoint_id=tmp_path).state_dict_metadata)

    def load(rank: FakeRank) -> None:
        state: dict[str, Any] = {
            key: rank.distribute(torch.full_like(whole, -1), rank.mesh(), placement(whole, 1))
            for key, whole in wholes.items()
        }
        rank.load(state, checkpoint_id=tmp_path)
        for key, whole in wholes.items():
            assert_holds(state[key], rank.distribute(whole, rank.mesh(), placement(whole, 1)), key)

    assert FakeRanks(6).run(save) == [sorted(wholes)] * 6
    FakeRanks(4).run(load)
    alone: dict[str, Any] = {key: torch.full_like(whole, -1) for key, whole in wholes.items()}
    holdfast.load(alone, checkpoint_id=tmp_path)
    assert all(same(alone[key], whole) for key, whole in wholes.items())


def test_parameters_that_require_gradients_are_loaded_in_place(tmp_path: Path) -> None:
    whole = matrix(1)

    def save(rank: FakeRank) -> None:
        value = rank.distribute(whole, rank.mesh(), [Shard(0)])
        rank.save({"weight": torch.nn.Parameter(value)}, checkpoint_id=tmp_path)

    def load(rank: FakeRank) -> None:
        value = rank.distribute(blank(whole), rank.mesh(), [Shard(1)])
        weight = torch.nn.Parameter(value)
        rank.load({"weight": weight}, checkpoint_id=tmp_path)
        assert weight.requires_grad
        assert weight.grad_fn is None
        assert_holds(weight, rank.distribute(whole, rank.mesh(), [Shard(1)]), "weight")

    FakeRanks(2).run(save)
    FakeRanks(3).run(load)


@pytest.mark.parametrize("is_parameter", [False, True])
def test_a_dtensor_without_memory_is_given_some_or_refused_but_never_left_empty(
    tmp_path: Path, is_parameter: bool
) -> None:
    whole = matrix(5)
    holdfast.save({"weight": whole}, checkpoint_id=tmp_path)

    def load(rank: FakeRank) -> None:
        rows = rank.distribute(whole, rank.mesh(), [Shard(0)])
        local = rows.to_local().to("meta")
        value: Any = rank.assemble(local, rank.mesh(), [Shard(0)], whole.shape)
        state = {"weight": torch.nn.Parameter(value) if is_parameter else value}
        rank.load(state, checkpoint_id=tmp_path)
        assert_holds(state["weight"], rows, "weight")

    for error in FakeRanks(2).attempt(load):
        assert error is None or (isinstance(error, PlanError) and "meta device" in str(error))


def test_a_dtensor_of_which_a_rank_holds_nothing_does_not_stay_without_memory(tmp_path: Path) -> None:
    holdfast.save({"weight": torch.arange(2.0)}, checkpoint_id=tmp_path)

    def load(rank: FakeRank) -> None:
        rows = rank.distribute(torch.arange(2.0), rank.mesh(), [Shard(0)])
        value, other = (
            rank.assemble(rows.to_local().to("meta"), rank.mesh(), [Shard(0)], [2]) for _ in range(2)
        )
        state = {"weight": value, "other": other}
        planner = holdfast.DefaultLoadPlanner(allow_partial_load=True)
        rank.load(state, checkpoint_id=tmp_path, planner=planner)
        assert_holds(state["weight"], rows, "weight")
        assert state["weight"].to_local().device.type == "cpu"
        assert state["other"] is other

    FakeRanks(3).run(load)


def test_memory_is_made_in_the_layout_of_a_tensor_that_has_none() -> None:
    def make(rank: FakeRank) -> None:
        value = rank.assemble(torch.empty(2, 3, device="meta"), rank.mesh(), [Shard(0)], [4, 3])
        parameter: Any = torch.nn.Parameter(value)
        for made in (with_memory(value, torch.device("cpu")), with_memory(parameter, torch.device("cpu"))):
            assert made.to_local().device.type == "cpu"
            assert made.to_local().shape == (2, 3)
            assert (made.shape, made.placements) == (value.shape, value.placements)
            assert made.device_mesh.get_coordinate() == value.device_mesh.get_coordinate()
        assert not with_memory(value, torch.device("cpu")).requires_grad
        trainable = with_memory(parameter, torch.device("cpu"))
        assert isinstance(trainable, torch.nn.Parameter)
        assert trainable.requires_grad
        assert trainable.is_leaf

    FakeRanks(2).run(make)


def test_shards_that_are_views_are_saved_and_loaded(tmp_path: Path) -> None:
    whole = matrix(2, (6, 4))

    def transposed(rank: FakeRank, whole: torch.Tensor) -> Any:
        local = whole[rank.rank * 3 :][:3].t().contiguous().t()
        assert not local.is_contiguous()
        return rank.assemble(local, rank.mesh(), [Shard(0)], whole.shape)

    def save_and_load(rank: FakeRank) -> None:
        rank.save({"weight": transposed(rank, whole)}, checkpoint_id=tmp_path)
        state = {"weight": transposed(rank, blank(whole))}
        rank.load(state, checkpoint_id=tmp_path)
        assert_holds(state["weight"], transposed(rank, whole), "weight")

    FakeRanks(2).run(save_and_load)


def test_ranks_outside_of_a_mesh_save_and_load_their_own_part(tmp_path: Path) -> None:
    """Pipeline stages: each tensor lives on the ranks of its stage."""
    first, second = matrix(1), matrix(2)

    def stage(rank: FakeRank, ranks: list[int], whole: torch.Tensor) -> Any:
        return rank.distribute(whole, rank.mesh(ranks=ranks), [Shard(0)])

    def save(rank: FakeRank) -> None:
        state = {"first": stage(rank, [0, 1], first), "second": stage(rank, [2, 3], second)}
        rank.save(state, checkpoint_id=tmp_path)

    def load(rank: FakeRank) -> None:
        state = {"first": stage(rank, [2, 0], blank(first)), "second": stage(rank, [1], blank(second))}
        rank.load(state, checkpoint_id=tmp_path)
        assert_holds(state["first"], stage(rank, [2, 0], first), "first")
        assert_holds(state["second"], stage(rank, [1], second), "second")

    FakeRanks(4).run(save)
    FakeRanks(3).run(load)


def test_ranks_that_hold_different_keys_save_one_checkpoint(tmp_path: Path) -> None:
    def save(rank: FakeRank) -> None:
        rank.save({f"layer {rank.rank}": matrix(rank.rank)}, checkpoint_id=tmp_path)

    FakeRanks(3).run(save)
    state: dict[str, Any] = {f"layer {number}": torch.zeros(7, 5) for number in range(3)}
    holdfast.load(state, checkpoint_id=tmp_path)
    assert all(same(state[f"layer {number}"], matrix(number)) for number in range(3))


def many_layouts(rank: FakeRank, shape: tuple[int, int], shift: int = 0) -> dict[str, Any]:
    """Tensors of one shape in every layout, three of each: what is found for one must not serve another."""
    made = [make for make in layouts_of(rank.world_size).values() if make is not plain]
    if rank.world_size == 4 and shape == (8, 8):
        # These differ in the factor alone.
        made += [on_mesh([2, 2], [strided(0, factor), Replicate()]) for factor in (2, 4)]
    wholes = [matrix(n, shape) if n % 3 else matrix(n, shape).view(torch.int32) for n in range(66)]
    return {f"{n}": made[(n // 3 + shift) % len(made)](rank, whole) for n, whole in enumerate(wholes)}


@pytest.mark.parametrize(
    ("world", "shape", "shift"), [(4, (8, 8), 0), (4, (7, 5), 0), (4, (8, 8), 1), (6, (7, 5), 0)]
)
def test_tensors_of_many_layouts_in_one_state_keep_their_own(
    world: int, shape: tuple[int, int], shift: int, tmp_path: Path
) -> None:
    def save(rank: FakeRank) -> None:
        rank.save(many_layouts(rank, shape), checkpoint_id=tmp_path)

    def load(rank: FakeRank) -> None:
        state, expected = many_layouts(rank, shape, shift), many_layouts(rank, shape, shift)
        for value in state.values():
            for part in parts_of(value):
                part.fill_(-1)
        rank.load(state, checkpoint_id=tmp_path)
        for key, value in expected.items():
            assert_holds(state[key], value, f"{key} on rank {rank.rank}")

    FakeRanks(4).run(save)
    FakeRanks(world).run(load)


@pytest.mark.parametrize("call", ["save", "load"])
def test_what_a_rank_holds_is_worked_out_once_for_each_layout(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def count(value: Any) -> Any:
        asked.append(value)
        return held_pieces(value)

    def run(rank: FakeRank, tensors: int) -> None:
        wholes = [matrix(number, (4, 2)) for number in range(tensors)]
        state = {f"{n}": rank.distribute(w, rank.mesh(), [Shard(n % 2)]) for n, w in enumerate(wholes)}
        (rank.load if call == "load" else rank.save)(state, checkpoint_id=tmp_path / f"{tensors}")

    monkeypatch.setattr(layout_table, "held_pieces", count)
    counts = []
    for tensors in (2, 40):
        if call == "load":
            whole = {f"{number}": matrix(number, (4, 2)) for number in range(tensors)}
            holdfast.save(whole, checkpoint_id=tmp_path / f"{tensors}")
        asked.clear()
        FakeRanks(2).run(functools.partial(run, tensors=tensors))
        counts.append(len(asked))
    assert 0 < counts[0] == counts[1]


def check_reshard(
    source: tuple[tuple[int, ...], tuple[int, ...], list[Placement]], target: MeshAndPlacements, folder: str
) -> None:
    mesh, shape, placements = source
    target_mesh, target_placements = target
    whole = torch.arange(math.prod(shape), dtype=torch.int16).view(shape)

    def save(rank: FakeRank) -> None:
        value = rank.distribute(whole, rank.mesh(*mesh), placements)
        rank.save({"weight": value}, checkpoint_id=folder)

    def load(rank: FakeRank) -> None:
        made = rank.mesh(*target_mesh)
        state = {"weight": rank.distribute(torch.full_like(whole, -1), made, target_placements)}
        rank.load(state, checkpoint_id=folder)
        assert_holds(state["weight"], rank.distribute(whole, made, target_placements), f"rank {rank.rank}")

    try:
        FakeRanks(math.prod(mesh)).run(save)
        FakeRanks(math.prod(target_mesh)).run(load)
    except PlanError as refused:
        # The one thing that may be refused; the tests of layouts say when.
        if "two meanings" not in str(refused):
            raise


@st.composite
def journeys(draw: st.DrawFn) -> tuple[Any, MeshAndPlacements]:
    """A layout, and another one for a tensor of the same shape."""
    source = draw(layouts())
    mesh, _, placements = draw(layouts().filter(lambda layout: len(layout[1]) <= len(source[1])))
    return source, (mesh, placements)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(journeys())
def test_any_layout_loads_into_any_other(journey: tuple[Any, MeshAndPlacements]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_reshard(*journey, folder)


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(journeys())
def test_any_layout_loads_into_any_other_at_length(journey: tuple[Any, MeshAndPlacements]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_reshard(*journey, folder)


def test_a_default_device_of_the_program_is_not_used_for_plans_and_scratch(tmp_path: Path) -> None:
    weight = torch.arange(70_000.0).view(700, 100)

    def state(rank: FakeRank, content: torch.Tensor) -> dict[str, Any]:
        return {
            "sharded": rank.distribute(content, rank.mesh(), [Shard(0)]),
            "columns": rank.distribute(content, rank.mesh(), [Shard(1)]),
            "turned": content.t().clone().t(),
            "small": content[0].clone(),
            "half": content[1].half(),
            "sparse": content[:2, :4].to_sparse(),
            "pair": (content[:2].clone(), 3),
        }

    def save_and_load(rank: FakeRank) -> None:
        saved = state(rank, weight)
        blanks = [state(rank, torch.zeros_like(weight)) for _ in range(2)]
        crossed = {"sharded": blanks[1]["columns"], "columns": blanks[1]["sharded"]}
        with torch.device("meta"):
            rank.save(saved, checkpoint_id=tmp_path / "c")
            for loaded in (blanks[0], crossed):
                rank.load(loaded, checkpoint_id=tmp_path / "c")
        assert same(blanks[0]["pair"], saved["pair"])
        for kind, found in (("sharded", blanks[0]), ("columns", blanks[0])):
            assert_holds(found[kind], saved[kind], kind)
        assert_holds(crossed["sharded"], saved["columns"], "crossed")

    FakeRanks(2).run(save_and_load)
    plain = {"turned": weight.t().clone().t(), "small": weight[0], "sparse": weight[:2, :4].to_sparse()}
    found: dict[str, Any] = {"turned": torch.zeros(700, 100), "small": torch.zeros(100), "sparse": None}
    with torch.device("meta"):
        future: Any = holdfast.async_save(plain, checkpoint_id=tmp_path / "d")
        future.result()
        holdfast.load(found, checkpoint_id=tmp_path / "d")
        holdfast.convert(tmp_path / "d", tmp_path / "all.pt", keys=["turned", "small"])
    assert all(torch.equal(found[key].to_dense(), plain[key].to_dense()) for key in plain)
    assert torch.equal(torch.load(tmp_path / "all.pt")["turned"], weight)

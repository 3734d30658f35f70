"""The boxes that we say a rank holds, against where torch really put each element."""

import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.reshard.layouts import strided
from tests.support.stock_torch import IS_NEWEST
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, _dtensor_spec, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast._tensors.chunks import find_box, find_chunk, global_shape, local_chunks
from holdfast.errors import PlanError
from holdfast.metadata import ChunkStorageMetadata, MetadataIndex
from holdfast.testing import FakeRank, FakeRanks

AMBIGUOUS = "two meanings"
CAN_DISTRIBUTE_ALONE = "src_data_rank" in inspect.signature(distribute_tensor).parameters


@st.composite
def meshes(draw: st.DrawFn) -> tuple[int, ...]:
    shape: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        shape.append(draw(st.integers(1, max(1, 12 // math.prod(shape)))))
    return tuple(shape)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Placement]]:
    """A mesh, a tensor's shape, and placements of the one on the other."""
    mesh = draw(meshes())
    shape = tuple(draw(st.lists(st.one_of(st.integers(2, 12), st.integers(0, 3)), max_size=3)))
    placements: list[Placement] = []
    for _ in mesh:
        kinds: list[st.SearchStrategy[Placement]] = [st.just(Replicate())]
        if shape:
            dims = st.integers(-len(shape), len(shape) - 1)
            kinds.append(dims.map(Shard))
            kinds.append(
                st.tuples(st.integers(0, len(shape) - 1), st.integers(2, 6)).map(lambda a: strided(*a))
            )
        placements.append(draw(st.one_of(kinds)))
    return mesh, shape, placements


def refusal_of(value: DTensor) -> str:
    try:
        local_chunks(value)
    except PlanError as refused:
        return str(refused)
    return ""


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.int32).view(shape)


def check_boxes(value: DTensor, whole: torch.Tensor, local: torch.Tensor) -> None:
    """Each chunk is its box of the whole, and each element of the local tensor is in exactly one."""
    assert global_shape(value) == whole.shape
    seen: list[int] = []
    for chunk in local_chunks(value):
        box = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
        memory = find_chunk(value, MetadataIndex("key", chunk.offsets))
        assert torch.equal(memory, whole[box])
        assert (
            memory.numel() == 0 or memory.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        )
        seen += memory.flatten().tolist()
    assert sorted(seen) == sorted(local.flatten().tolist())


@pytest.mark.skipif(not CAN_DISTRIBUTE_ALONE, reason="this torch distributes by messages only")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(layouts())
def test_chunks_are_where_torch_puts_the_elements(
    layout: tuple[tuple[int, ...], tuple[int, ...], list[Placement]],
) -> None:
    mesh_shape, shape, placements = layout
    whole = numbered(shape)
    is_strided = any(type(placement) is _StridedShard for placement in placements)
    # The distribute_tensor of older torch divides an uneven dimension with a stride otherwise than its FSDP.
    assume(IS_NEWEST or not is_strided)

    def look(rank: FakeRank) -> None:
        value = distribute_tensor(whole, rank.mesh(*mesh_shape), placements, src_data_rank=None)
        local = value.to_local()
        refused = refusal_of(value)
        if refused:
            assert is_strided
            assert AMBIGUOUS in refused
        else:
            check_boxes(value, whole, local)
        ours = rank.distribute(whole, rank.mesh(*mesh_shape), placements)
        assert torch.equal(ours.to_local(), local), "FakeRank.distribute and torch disagree"

    FakeRanks(math.prod(mesh_shape)).run(look)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(layouts())
def test_all_ranks_together_hold_each_element(
    layout: tuple[tuple[int, ...], tuple[int, ...], list[Placement]],
) -> None:
    mesh_shape, shape, placements = layout
    whole = numbered(shape)

    def hold(rank: FakeRank) -> list[int] | None:
        value = rank.distribute(whole, rank.mesh(*mesh_shape), placements)
        if refusal_of(value):
            return None
        chunks = local_chunks(value)
        found = [find_chunk(value, MetadataIndex("key", chunk.offsets)) for chunk in chunks]
        assert all(0 not in chunk.sizes for chunk in chunks) or 0 in shape
        return [number for part in found for number in part.flatten().tolist()]

    held = FakeRanks(math.prod(mesh_shape)).run(hold)
    if None not in held:
        assert {number for part in held for number in part or ()} == set(range(whole.numel()))


def test_any_box_within_a_chunk_is_found_and_no_other() -> None:
    whole = numbered((7, 5))

    def look(rank: FakeRank) -> None:
        value = rank.distribute(whole, rank.mesh(), [strided(0, 2)])
        for chunk in local_chunks(value):
            (top, left), (rows, columns) = chunk.offsets, chunk.sizes
            inner = ChunkStorageMetadata(torch.Size([top + rows - 1, left + 1]), torch.Size([1, columns - 2]))
            found = find_box(value, "key", inner)
            assert torch.equal(found, whole[top + rows - 1 : top + rows, left + 1 : left + columns - 1])
            found += 100
            outer = ChunkStorageMetadata(chunk.offsets, torch.Size([rows + 1, columns]))
            with pytest.raises(PlanError, match="key"):
                find_box(value, "key", outer)
        assert (value.to_local() >= 100).sum() == 3 * len(local_chunks(value)), "views, not copies"

    FakeRanks(2).run(look)
    plain = whole.clone()
    box = ChunkStorageMetadata(torch.Size([3, 1]), torch.Size([2, 2]))
    assert torch.equal(find_box(plain, "key", box), whole[3:5, 1:3])


@pytest.mark.parametrize("tensor", [1, 2, 3, 4])
@pytest.mark.parametrize("data", [1, 2, 3, 4])
def test_fsdp_over_tensor_parallelism_is_where_fsdp_cut_it(data: int, tensor: int) -> None:
    """The cuts as FSDP2 makes them; torch's own offsets for these placements differ where it is uneven."""
    for rows in (1, 5, 9, 12, 17, 27):
        whole = numbered((rows, 2))

        def look(rank: FakeRank, whole: torch.Tensor = whole) -> str:
            mesh = rank.mesh(data, tensor)
            coordinate = mesh.get_coordinate()
            assert coordinate is not None
            local = nth(nth(whole, tensor, coordinate[1]), data, coordinate[0])
            placements = [strided(0, tensor) if tensor > 1 else Shard(0), Shard(0)]
            value = rank.assemble(local, mesh, placements, whole.shape)
            if not refusal_of(value):
                check_boxes(value, whole, local)
            return refusal_of(value)

        refused = [text for text in FakeRanks(data * tensor).run(look) if text]
        assert all(AMBIGUOUS in text for text in refused)
        # The one size here at which a rank cannot tell by its shape which of the two meanings it is.
        assert bool(refused) == ((rows, data, tensor) == (27, 3, 4))


def nth(tensor: torch.Tensor, count: int, position: int) -> torch.Tensor:
    found = tensor.chunk(count)
    return found[position] if position < len(found) else tensor[:0]


@pytest.fixture
def as_rank() -> Iterator[Any]:
    """Starts torch's fake process group as one rank, in which FSDP2 shards without a message."""

    def start(rank: int, world_size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.skipif(not CAN_DISTRIBUTE_ALONE, reason="this torch distributes by messages only")
@pytest.mark.parametrize(("rows", "data", "tensor"), [(12, 2, 2), (9, 4, 2), (10, 2, 3)])
def test_a_module_sharded_by_fsdp_over_tensor_parallelism(
    as_rank: Any, rows: int, data: int, tensor: int
) -> None:
    whole = numbered((rows, 3)).float()
    made: list[tuple[torch.Tensor, tuple[Placement, ...]]] = []
    for number in range(data * tensor):
        as_rank(number, data * tensor)
        mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))
        module = torch.nn.Linear(3, rows, bias=False)
        divided = distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None)
        module.weight = torch.nn.Parameter(divided)
        fully_shard(module, mesh=mesh["dp"])
        weight: Any = module.weight
        made.append((weight.to_local().detach().clone(), weight.placements))

    def look(rank: FakeRank) -> int:
        local, placements = made[rank.rank]
        value = rank.assemble(local, rank.mesh(data, tensor), placements, whole.shape)
        check_boxes(value, whole, local)
        return local.numel()

    assert sum(FakeRanks(data * tensor).run(look)) == whole.numel()


def test_a_recorded_order_of_cuts_is_followed() -> None:
    if not hasattr(_dtensor_spec, "ShardOrderEntry"):
        pytest.skip("this torch cuts from left to right only")
    whole = numbered((8,))

    def look(rank: FakeRank) -> list[int]:
        mesh: DeviceMesh = rank.mesh(2, 2)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        local = nth(nth(whole, 2, coordinate[1]), 2, coordinate[0])
        meta = _dtensor_spec.TensorMeta(whole.shape, (1,), whole.dtype)
        order = (_dtensor_spec.ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
        spec = _dtensor_spec.DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=order)
        value: DTensor = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
        check_boxes(value, whole, local)
        return local.tolist()

    assert FakeRanks(4).run(look) == [[0, 1], [4, 5], [2, 3], [6, 7]]

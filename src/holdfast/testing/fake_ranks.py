"""Many ranks in one process: real saves and loads of sharded states, without a process group."""

import inspect
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor, ShardedTensorBase
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from holdfast._engine.adapt import adapt_load_planner, adapt_reader, adapt_save_planner, adapt_writer
from holdfast._engine.load_into import load_into
from holdfast._engine.save import run_save
from holdfast._engine.stateful_objects import open_states
from holdfast._storage_choice import choose_reader, choose_writer
from holdfast.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from holdfast.load_result import LoadResult
from holdfast.metadata import Metadata
from holdfast.planner import LoadPlanner, SavePlanner
from holdfast.storage import StorageReader, StorageWriter
from holdfast.testing.fake_exchange import FakeExchange, FakeGroup

__all__ = ["FakeRank", "FakeRanks"]

T = TypeVar("T")


class FakeRanks:
    """A group of ranks that are threads of this process.

    Guaranteed: saves and loads run the package's own engine, each rank with its own planner and storage.
    Messages between ranks are pickled. A failure on one rank is raised on all. No rank waits for one that has
    ended.

    Ranks take turns, in no particular order: one rank works until it waits for the others in an exchange. So
    a rank must not wait for another rank in any other way.

    Not guaranteed: collectives of ``torch.distributed`` (there is no process group; ``full_tensor`` and
    ``redistribute`` fail), and anything about processes that die.

    Args:
        world_size: How many ranks there are.
        timeout: Seconds that a rank waits in an exchange for another before it raises. A guard against tests
            that hang; ``run`` still waits until every rank has ended.

    Example:
        >>> def save(rank):
        ...     weight = rank.distribute(torch.arange(12.0), rank.mesh(), [Shard(0)])
        ...     rank.save({"weight": weight}, checkpoint_id=folder)
        >>> FakeRanks(4).run(save)
    """

    def __init__(self, world_size: int, *, timeout: float = 60) -> None:
        self.world_size = world_size
        self._timeout = timeout

    def run(self, work: Callable[["FakeRank"], T]) -> list[T]:
        """Call ``work`` once for each rank, at the same time.

        Returns:
            What each rank returned, in rank order, when all have ended.

        Raises:
            BaseException: What the first rank to fail raised.
        """
        results, failures = self._run(work)
        for _, error in failures:
            raise error
        return [results[rank] for rank in range(self.world_size)]

    def attempt(self, work: Callable[["FakeRank"], T]) -> list[T | BaseException]:
        """As ``run``, with what a rank raised in the place of what it returned."""
        results, failures = self._run(work)
        raised = dict(failures)
        return [raised[rank] if rank in raised else results[rank] for rank in range(self.world_size)]

    def _run(self, work: Callable[["FakeRank"], T]) -> tuple[dict[int, T], list[tuple[int, BaseException]]]:
        group = FakeGroup(self.world_size, self._timeout)
        results: dict[int, T] = {}
        failures: list[tuple[int, BaseException]] = []

        def be(rank: int) -> None:
            group.take_turn(rank)
            try:
                results[rank] = work(FakeRank(rank, group))
                why = "has ended"
            except BaseException as error:  # noqa: BLE001 - raised again, or returned, on the caller's thread
                failures.append((rank, error))
                why = f"ended with {type(error).__name__}: {error}"
            group.leave(rank, why)

        threads = [
            threading.Thread(target=be, args=(rank,), name=f"fake rank {rank}", daemon=True)
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results, failures


class FakeRank:
    """One rank of a :class:`FakeRanks`, as its work sees it.

    Attributes:
        rank: Its number.
        world_size: How many ranks there are.
    """

    def __init__(self, rank: int, group: FakeGroup) -> None:
        self.rank = rank
        self.world_size = group.world_size
        self._group = group
        self._opened = 0
        self._meshes: dict[Any, DeviceMesh] = {}

    def open_exchange(self) -> FakeExchange:
        """Open this rank's end of a new exchange, for tests that run steps of their own.

        Every rank must open its end, in the same order among other exchanges, saves and loads.
        """
        self._opened += 1
        return FakeExchange(self._group, self.rank, self._opened)

    def save(
        self,
        state_dict: dict[str, Any],
        *,
        checkpoint_id: str | os.PathLike[str] | None = None,
        storage_writer: StorageWriter | None = None,
        planner: SavePlanner | None = None,
    ) -> Metadata:
        """This rank's part of ``holdfast.save``; every rank must call it."""
        with self.open_exchange() as exchange:
            opened, _ = open_states(state_dict)
            return run_save(
                opened,
                adapt_save_planner(DefaultSavePlanner() if planner is None else planner),
                adapt_writer(choose_writer(storage_writer, checkpoint_id)),
                exchange,
            )

    def load(
        self,
        state_dict: dict[str, Any],
        *,
        checkpoint_id: str | os.PathLike[str] | None = None,
        storage_reader: StorageReader | None = None,
        planner: LoadPlanner | None = None,
    ) -> LoadResult:
        """This rank's part of ``holdfast.load``; every rank must call it."""
        with self.open_exchange() as exchange:
            return load_into(
                state_dict,
                adapt_load_planner(DefaultLoadPlanner() if planner is None else planner),
                adapt_reader(choose_reader(storage_reader, checkpoint_id)),
                exchange,
            )

    def mesh(
        self, *shape: int, ranks: Sequence[Any] | None = None, names: tuple[str, ...] | None = None
    ) -> DeviceMesh:
        """A mesh as this rank sees it: its coordinate is this rank's. It has no process groups.

        Args:
            *shape: The mesh's shape over ranks 0, 1, 2 ...; one dimension over all ranks if there is none.
            ranks: Which ranks are where, nested as the mesh, instead of ``shape``. A rank that is not among
                them is outside of the mesh.
            names: The names of the mesh's dimensions.
        """
        if ranks is not None:
            numbers = torch.tensor(ranks)
        else:
            shape = shape or (self.world_size,)
            numbers = torch.arange(torch.Size(shape).numel()).view(shape)
        known = (tuple(numbers.shape), tuple(numbers.flatten().tolist()), names)
        if known not in self._meshes:
            self._meshes[known] = _mesh_as_seen_by(self.rank, numbers, names)
        return self._meshes[known]

    def distribute(self, whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
        """This rank's part of ``whole``, in memory of its own: ``distribute_tensor`` without a message."""
        coordinate = mesh.get_coordinate()
        local = whole.new_empty(0)
        if coordinate is not None:
            local = whole
            for shares, position, placement in zip(mesh.shape, coordinate, placements, strict=True):
                local = _share(local, shares, position, placement)
            local = local.clone(memory_format=torch.contiguous_format)
        return self.assemble(local, mesh, placements, whole.shape)

    def assemble(
        self, local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
    ) -> DTensor:
        """A DTensor of ``shape`` of which this rank holds ``local``, which is neither copied nor checked."""
        strides = [torch.Size(shape[dim + 1 :]).numel() for dim in range(len(shape))]
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
        )

    def sharded_tensor(
        self, whole: torch.Tensor, boxes: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]]
    ) -> ShardedTensor:
        """This rank's part of ``whole``, in memory of its own, as a ShardedTensor such as FSDP1 makes.

        Args:
            whole: The whole tensor.
            boxes: For each rank the offsets and sizes of its shards. Together they must cover the tensor.
        """
        described = [
            [ShardMetadata(list(offsets), list(sizes), f"rank:{rank}/cpu") for offsets, sizes in of_rank]
            for rank, of_rank in enumerate(boxes)
        ]
        shards = [LocalShard(_box(whole, shard), shard) for shard in described[self.rank]]
        properties = TensorProperties(dtype=whole.dtype, requires_grad=whole.requires_grad)
        every = [shard for of_rank in described for shard in of_rank]
        # The base class's way to make one is the only one that does not ask a process group.
        made = ShardedTensorBase._init_from_local_shards_and_global_metadata(  # noqa: SLF001
            shards, ShardedTensorMetadata(every, whole.shape, properties)
        )
        assert isinstance(made, ShardedTensor)
        vars(made)["_process_group"] = None  # size() and dtype look for it
        return made


def _mesh_as_seen_by(rank: int, numbers: torch.Tensor, names: tuple[str, ...] | None) -> DeviceMesh:
    if "_rank" in inspect.signature(DeviceMesh.__init__).parameters:
        mesh = DeviceMesh("cpu", numbers, mesh_dim_names=names, _init_backend=False, _rank=rank)
    else:
        # Older ones ask a process group for the rank, except on a device that has no groups.
        mesh = DeviceMesh("xla", numbers, mesh_dim_names=names, _init_backend=False)
        found = (numbers == rank).nonzero()
        coordinate = found[0].tolist() if len(found) else None
        vars(mesh).update(device_type="cpu", _coordinate_on_dim=coordinate)
    # Else the meshes of all ranks are equal, and torch's caches give one rank's tensors another's mesh.
    vars(mesh)["_thread_id"] = rank
    return mesh


def _share(tensor: torch.Tensor, shares: int, position: int, placement: Placement) -> torch.Tensor:
    dim: int | None = getattr(placement, "dim", None)
    if dim is None:
        return tensor
    parts = _chunks(tensor, getattr(placement, "split_factor", 1), dim)
    return torch.cat([_chunks(part, shares, dim)[position] for part in parts], dim)


def _chunks(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """As many chunks as asked for, where torch.chunk gives fewer."""
    found = list(tensor.chunk(count, dim))
    return found + [tensor.narrow(dim, 0, 0)] * (count - len(found))


def _box(whole: torch.Tensor, shard: ShardMetadata) -> torch.Tensor:
    box = whole.detach()
    for dim, (start, length) in enumerate(zip(shard.shard_offsets, shard.shard_sizes, strict=True)):
        box = box.narrow(dim, start, length)
    return box.clone(memory_format=torch.contiguous_format)

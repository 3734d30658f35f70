"""Owns what is handed to the helper: a plan, what it writes from and what it writes with, in one pickle.

Tensors in the staged memory are numbers of places in it. The default planner is asked here: what it finds are
such tensors. Other planners go along and are asked there, because what they make of a tensor may be as large
as the tensor; except for shards, which mean nothing in a process that has neither the mesh nor the group.
"""

import copy
import io
import pickle
from collections.abc import Callable
from types import FunctionType, MappingProxyType
from typing import Any

import torch

from holdfast._io.store import Claim
from holdfast._objects import StoredObject
from holdfast._plan.planner_values import HasOwnValues, own_values
from holdfast._plan.write_columns import BYTE_IO, SHARD, TENSOR, columns_of, is_open
from holdfast._staging.layout import Place, place_in
from holdfast._tensors.chunks import is_sharded, is_tensor
from holdfast.errors import CheckpointError, UsageError
from holdfast.metadata import MetadataIndex
from holdfast.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from holdfast.storage import StorageWriter

__all__ = ["Handed", "pack", "refuse_unportable", "unpack"]

_OF_THE_COORDINATOR = ("global_plan", "metadata", "_cache")
"""What default planners know of all ranks, and a write does not ask for."""


class Handed(SavePlanner):
    """Stands for the trainer's planner in the helper: answers ``resolve_data``, and nothing else.

    Attributes:
        whole: Tensors by key.
        parts: Chunks of tensors, by key and offset.
        objects: Other values, in the form that is stored, by key.
        planner: Is asked for everything else.
    """

    def __init__(self, planner: SavePlanner | None) -> None:
        self.whole: dict[str, torch.Tensor] = {}
        self.parts: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self.objects: dict[str, io.BytesIO] = {}
        self.planner = planner
        self._count: Callable[[int], None] | None = None

    def be_counted(self, count: Callable[[int], None]) -> None:
        """Have ``count`` called with the size of each tensor that is asked for, 0 for other values."""
        self._count = count
        self.whole = _CountedTensors(self.whole)
        self.whole.count = count

    def add(self, line: WriteItem, data: Any) -> None:
        """Keep what a planner gave for a line."""
        if line.type == WriteItemType.BYTE_IO:
            self.objects[line.index.fqn] = data
        else:
            self.parts[_part(line.index)] = data

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The data of a line, on the memory that was handed over."""
        key = write_item.index.fqn
        found: Any = None
        if write_item.type == WriteItemType.BYTE_IO:
            found = self.objects.get(key)
        elif write_item.type == WriteItemType.TENSOR:
            found = dict.get(self.whole, key)  # not counted yet
        if found is None:
            found = self.parts.get(_part(write_item.index))
        if found is None:
            assert self.planner is not None, f"{key} was not handed over"
            found = self.planner.resolve_data(write_item)
        if self._count is not None:
            self._count(found.nbytes if isinstance(found, torch.Tensor) else 0)
        data: torch.Tensor | io.BytesIO = found
        return data

    def _is_elsewhere(self, *_: Any, **__: Any) -> Any:
        raise UsageError("planning is the trainer's; a helper process only writes")

    set_up_planner = create_local_plan = create_global_plan = finish_plan = _is_elsewhere


class _CountedTensors(dict[str, torch.Tensor]):
    __slots__ = ("count",)
    count: Callable[[int], None]

    def __getitem__(self, key: str) -> torch.Tensor:
        tensor = super().__getitem__(key)
        self.count(tensor.nbytes)
        return tensor


def _part(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


class _HandedWhole(Handed, HasOwnValues):
    """All tensors were handed over, so that those of them that are whole need no question each."""

    resolvers = MappingProxyType({"resolve_data": ("resolve_data",)})

    @property
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return self.whole


def pack(
    plan: SavePlan, planner: SavePlanner, writer: StorageWriter, base: torch.Tensor
) -> list[bytes | memoryview]:
    """What ``unpack`` makes a write of, in another process.

    Args:
        plan: What to write.
        planner: Knows the data.
        writer: Writes it.
        base: The memory that tensors lie in, all of it. Others are copied into the pickle.

    Raises:
        UsageError: Writer or planner cannot be pickled; it is named.
        PlanError: An object cannot be saved; its key is named.
    """
    handed = _hand_over(plan, planner)
    stream = io.BytesIO()
    pickler = _Pickler(stream, base)
    try:
        pickler.dump((plan, writer, handed))
    except CheckpointError:
        raise
    except Exception as error:
        refuse_unportable(writer, "storage writer", base)
        if handed.planner is not None:
            refuse_unportable(handed.planner, "planner", base)
        raise UsageError(
            f"the plan cannot be pickled, and so not be written by another process: {error}"
        ) from error
    places = pickle.dumps((base.numel(), pickler.places), pickle.HIGHEST_PROTOCOL)
    return [len(places).to_bytes(8, "little"), places, stream.getbuffer()]


def _hand_over(plan: SavePlan, planner: SavePlanner) -> Handed:
    columns = columns_of(plan)
    values = own_values(planner, "resolve_data")
    handed = _HandedWhole(None) if values is not None else Handed(_without_other_ranks(planner))
    here = {SHARD} if values is None else {SHARD, BYTE_IO, TENSOR}
    opened = plan.items if is_open(plan) else None
    for number, kind in enumerate(columns.kinds):
        if kind not in here:
            continue
        if kind == TENSOR and values is not None:
            handed.whole[columns.keys[number]] = values[columns.keys[number]]
        else:
            line = columns.item(number) if opened is None else opened[number]
            handed.add(line, planner.resolve_data(line))
    return handed


def _without_other_ranks(planner: SavePlanner) -> SavePlanner:
    if not isinstance(planner, HasOwnValues):
        return planner
    mine = copy.copy(planner)
    for name in _OF_THE_COORDINATOR:
        vars(mine).pop(name, None)
    return mine


def refuse_unportable(part: Any, role: str, base: torch.Tensor | None = None) -> None:
    """Raise if something cannot be handed to another process.

    Raises:
        UsageError: It cannot be pickled, or is of a class that only this program's main module has.
    """
    try:
        _Pickler(io.BytesIO(), torch.empty(0, dtype=torch.uint8) if base is None else base).dump(part)
    except Exception as error:
        name = f"{type(part).__module__}.{type(part).__qualname__}"
        raise UsageError(
            f"the {role}, a {name}, cannot be handed to the process that writes: {error}. Make it picklable, "
            "or save in a thread of this process.",
            found=name,
        ) from error


class _Pickler(pickle.Pickler):
    """Writes numbers for tensors of the staged memory, and leaves behind what belongs to this process."""

    def __init__(self, stream: io.BytesIO, base: torch.Tensor) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self.places: list[Place] = []
        self._numbers: dict[int, int] = {}
        self._start = base.data_ptr()
        self._stop = self._start + base.numel()

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if is_sharded(obj):
            return -1
        if not self._is_staged(obj):
            return None
        number = self._numbers.get(id(obj))
        if number is None:
            number = self._numbers[id(obj)] = len(self.places)
            offset = obj.data_ptr() - self._start if obj.numel() else 0
            self.places.append((offset, obj.dtype, tuple(obj.shape), obj.stride()))
        return number

    def _is_staged(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or not tensor.is_cpu or not is_tensor(tensor):
            return False
        if tensor.is_conj() or tensor.is_neg():
            return False
        return tensor.numel() == 0 or self._start <= tensor.data_ptr() < self._stop

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
            raise UsageError(
                f"{obj.__qualname__} is defined in the program's main module, which no other process has; "
                "put it into a module of its own",
                found=obj.__qualname__,
            )
        if isinstance(obj, Claim):
            # The trainer keeps others out of the folder, also when the helper is gone.
            return Claim, ()
        if type(obj) is StoredObject:
            return _stored, (obj.item, pickle.PickleBuffer(obj.payload))
        if type(obj) is torch.Tensor and is_tensor(obj) and obj.untyped_storage().nbytes() > obj.nbytes:
            # The pickle of a view holds everything that it is a view of.
            alone: Any = obj.clone()
            return alone.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _stored(item: Any, payload: Any) -> StoredObject:
    return StoredObject(item, memoryview(payload))


def unpack(body: memoryview, memory: Callable[[int], Any]) -> tuple[SavePlan, StorageWriter, Handed]:
    """The plan, writer and planner that were packed, around the same memory.

    Args:
        body: From ``pack``, of a process that is trusted.
        memory: Makes a writable buffer of so many bytes of the staged memory.

    Raises:
        UsageError: Something in it cannot be imported here.
    """
    nbytes = int.from_bytes(body[:8], "little")
    size, places = pickle.loads(body[8 : 8 + nbytes])
    tensors = place_in(torch.frombuffer(memory(size), dtype=torch.uint8), places) if places else []
    try:
        plan, writer, handed = _Unpickler(io.BytesIO(body[8 + nbytes :]), tensors).load()
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"the process that writes cannot import what the save needs: {error}. Nothing was written; put "
            "it into a module that can be imported from sys.path, or save in a thread of the trainer."
        ) from error
    return plan, writer, handed


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor | None:
        # A sharded tensor: its chunks were asked for by the trainer.
        return None if pid < 0 else self._tensors[pid]

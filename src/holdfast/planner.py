"""Planners decide what is saved and loaded: the records of a plan, and the interfaces of both planners."""

import abc
import io
import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar

import torch

from holdfast.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)

__all__ = [
    "BytesIOWriteData",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
]


class WriteItemType(Enum):
    """The kind of an item of a save: a whole tensor, one chunk of a sharded tensor, or another value."""

    TENSOR = auto()
    SHARD = auto()
    BYTE_IO = auto()


class LoadItemType(Enum):
    """The kind of an item of a load: part of a tensor, or another value."""

    TENSOR = auto()
    BYTE_IO = auto()


@dataclass(frozen=True)
class BytesIOWriteData:
    """The size of a value that is not a tensor, if it is known before the value is written."""

    nbytes: int


# The records that a plan has one of for each tensor write their instance's dict themselves: a frozen
# dataclass's own __init__ goes through object.__setattr__ and takes twice as long, which counts at a
# million chunks.


@dataclass(frozen=True)
class TensorWriteData:
    """Which part of which tensor an item holds: its chunk, the tensor's properties and whole shape."""

    chunk: ChunkStorageMetadata
    properties: TensorProperties
    size: torch.Size

    def __init__(self, chunk: ChunkStorageMetadata, properties: TensorProperties, size: torch.Size) -> None:
        fields = self.__dict__
        fields["chunk"] = chunk
        fields["properties"] = properties
        fields["size"] = size


@dataclass(frozen=True)
class WriteItem:
    """One line of a save plan: one thing that one rank will write.

    Attributes:
        index: The item's name in the checkpoint.
        type: What it holds.
        bytes_io_data: The size of a value that is not a tensor, where known.
        tensor_data: What is known of the tensor and its chunk; None for other values.
    """

    index: MetadataIndex
    type: WriteItemType
    bytes_io_data: BytesIOWriteData | None = None
    tensor_data: TensorWriteData | None = None

    def __init__(
        self,
        index: MetadataIndex,
        type: WriteItemType,
        bytes_io_data: BytesIOWriteData | None = None,
        tensor_data: TensorWriteData | None = None,
    ) -> None:
        fields = self.__dict__
        fields["index"] = index
        fields["type"] = type
        fields["bytes_io_data"] = bytes_io_data
        fields["tensor_data"] = tensor_data

    def tensor_storage_size(self) -> int | None:
        """The bytes of the whole tensor that this item is a part of, or None if it is not of a tensor.

        This is the tensor, not the chunk: what this item itself writes is
        ``prod(tensor_data.chunk.sizes) * dtype.itemsize``.
        """
        if self.tensor_data is None:
            return None
        return math.prod(self.tensor_data.size) * self.tensor_data.properties.dtype.itemsize


@dataclass(frozen=True)
class ReadItem:
    """One line of a load plan: one box of one stored chunk, and where it goes.

    Attributes:
        type: Whether it is part of a tensor or another value.
        dest_index: The destination's name in the state that is loaded into.
        dest_offsets: Where the box begins in the destination. For a sharded destination this counts from
            the beginning of the local shard that ``dest_index`` names.
        storage_index: The stored item's name in the checkpoint.
        storage_offsets: Where the box begins in the stored chunk, counted from the chunk's own beginning.
        lengths: The box's length in each dimension, the same on both sides.
    """

    type: LoadItemType
    dest_index: MetadataIndex
    dest_offsets: torch.Size
    storage_index: MetadataIndex
    storage_offsets: torch.Size
    lengths: torch.Size

    def __init__(
        self,
        type: LoadItemType,
        dest_index: MetadataIndex,
        dest_offsets: torch.Size,
        storage_index: MetadataIndex,
        storage_offsets: torch.Size,
        lengths: torch.Size,
    ) -> None:
        fields = self.__dict__
        fields["type"] = type
        fields["dest_index"] = dest_index
        fields["dest_offsets"] = dest_offsets
        fields["storage_index"] = storage_index
        fields["storage_offsets"] = storage_offsets
        fields["lengths"] = lengths


@dataclass(frozen=True)
class SavePlan:
    """The items that one rank will write.

    Attributes:
        items: The lines of the plan. Each is written exactly once.
        storage_data: Belongs to the storage: put there by ``prepare_local_plan`` or
            ``prepare_global_plan``, seen by ``write_data``.
        planner_data: Belongs to the planner: put there by ``create_local_plan``, seen by
            ``create_global_plan``.
        usable: False says "as last time": the plan is empty because the rank's cached one is to be used.
    """

    items: list[WriteItem]
    storage_data: Any = None
    planner_data: Any = None
    usable: bool = True


@dataclass
class LoadPlan:
    """The items that one rank will read; the fields are as in :class:`SavePlan`."""

    items: list[ReadItem]
    storage_data: Any = None
    planner_data: Any = None


class SavePlanner(abc.ABC):
    """Decides what a save writes, and hands out the data while it is written.

    One instance lives on each rank and stands between the state and the storage: whatever it shows is
    what gets saved. It may be used for several saves, one after the other. A save calls, in this order:

    ======================  ===============  =========================================================
    call                    on               purpose
    ======================  ===============  =========================================================
    ``set_up_planner``      every rank       a new save begins; receives the state
    ``create_local_plan``   every rank       returns what this rank can write
    ``create_global_plan``  the coordinator  returns what each rank must write, and the metadata
    ``finish_plan``         every rank       receives what this rank must write; may still reorder it
    ``resolve_data``        every rank       returns the data of one item; many calls, several threads
    ======================  ===============  =========================================================

    Before each call the previous one has returned on every rank that it was made on. If a call raises
    on one rank, no later call is made on any, and nothing is committed.

    Local plans and the coordinator's answers travel between ranks by pickle. They must not hold
    tensors' data.

    Most planners are a few lines on top of ``DefaultSavePlanner``. Rename keys by showing another state::

        class PrefixPlanner(DefaultSavePlanner):
            def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
                renamed = {"model." + key: value for key, value in state_dict.items()}
                super().set_up_planner(renamed, storage_meta, is_coordinator)

    Cast on save: the plan and the data must tell the same story, so both change::

        class HalfPlanner(DefaultSavePlanner):
            def create_local_plan(self):
                plan = super().create_local_plan()
                for item in plan.items:
                    if item.tensor_data is not None:
                        item.tensor_data.properties.dtype = torch.float16
                return plan

            def resolve_data(self, write_item):
                data = super().resolve_data(write_item)
                return data.to(torch.float16) if isinstance(data, torch.Tensor) else data

    Decide for all ranks at once, for example deal rank 0's items round among the ranks that hold them::

        class RoundRobinPlanner(DefaultSavePlanner):
            def create_global_plan(self, all_plans):
                items, count = all_plans[0].items, len(all_plans)
                dealt = [replace(plan, items=items[rank::count]) for rank, plan in enumerate(all_plans)]
                return super().create_global_plan(dealt)

    Keep something extra in the metadata, for the planner that loads to find::

        class NotesPlanner(DefaultSavePlanner):
            def create_global_plan(self, all_plans):
                plans, metadata = super().create_global_plan(all_plans)
                noted = metadata.planner_data | {"saved by ranks": len(all_plans)}
                return plans, replace(metadata, planner_data=noted)
    """

    # The plan cache of planners made with plan caching on, shared by all planners of a process and keyed
    # by the planner. On every rank: the last local plan and the last finished plan. On the coordinator:
    # all ranks' local plans, the global plan and the metadata made from them.
    _cached_save_plan: ClassVar[dict[str, SavePlan]] = {}
    _cached_final_save_plan: ClassVar[dict[str, SavePlan]] = {}
    _cached_all_plans: ClassVar[dict[str, list[SavePlan]]] = {}
    _cached_global_plan: ClassVar[dict[str, list[SavePlan]]] = {}
    _cached_metadata: ClassVar[dict[str, Metadata]] = {}

    @abc.abstractmethod
    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,  # type: ignore[type-arg]
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Begin a save of ``state_dict``; called on every rank, first.

        Keep what is needed of the arguments: they are not given again. Forget what an earlier save left.
        Stateful objects have been replaced by their state already. The state must not be changed.

        Args:
            state_dict: The state of this rank.
            storage_meta: What the storage says of itself; None if it says nothing.
            is_coordinator: Whether this rank is the one that makes the global plan.
        """

    @abc.abstractmethod
    def create_local_plan(self) -> SavePlan:
        """Return what this rank can write; called on every rank.

        Values that several ranks hold alike are in the plans of all of them: the global plan keeps one.
        Copies no data and moves none between devices.
        """

    @abc.abstractmethod
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Turn what ranks can write into what each must write; called on the coordinator only.

        Args:
            all_plans: The local plans in rank order.

        Returns:
            One plan for each rank, in rank order, in which every item stands exactly once; and the
            metadata of the checkpoint, whose ``storage_data`` is left to the storage.
        """

    @abc.abstractmethod
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take this rank's part of the global plan and return what will be written; on every rank.

        Items may be reordered here, but not added or left out: the coordinator counts them.
        """

    @abc.abstractmethod
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the data of one item of the finished plan; called on every rank while it writes.

        Called at least once for each item, in any order, from several threads at once, and again for
        the same item if the storage needs it again: it must be thread-safe and give the same bytes each
        time. Whatever takes memory, such as a cast or a pickle, belongs here and not into the plan, so
        that only the items in flight take it.

        Returns:
            A tensor of the planned shape and dtype, on any device, of any strides, possibly a view: the
            storage saves the elements that it shows and nothing else of the memory behind it. Or, for
            an item of type BYTE_IO, a stream that stands at its beginning. The storage changes neither.
        """


class LoadPlanner:
    """Decides what a load reads, and hands out the memory that it goes into.

    One instance lives on each rank and stands between the storage and the state that is loaded into.
    A load calls, in this order:

    ======================  ===============  =========================================================
    call                    on               purpose
    ======================  ===============  =========================================================
    ``set_up_planner``      every rank       a load begins; receives the state and the metadata
    ``create_local_plan``   every rank       returns what this rank needs to read
    ``create_global_plan``  the coordinator  may change all ranks' plans together
    ``finish_plan``         every rank       receives what this rank must read; may still change it
    ``load_bytes``          every rank       receives a value that is not a tensor
    ``resolve_tensor``      every rank       returns the memory that a box of a tensor is read into
    ``commit_tensor``       every rank       the box is there now; once after each ``resolve_tensor``
    ======================  ===============  =========================================================

    The last three come in any order among items and may come from several threads at once, but never
    twice for one item. All problems that can be known from the metadata are to be raised by
    ``create_local_plan``, before anything has been changed.

    Rename on load: show the planner the names that the checkpoint has. Tensors are filled in place; what
    is replaced goes through ``put``, and must find its way back::

        class StripPrefixPlanner(DefaultLoadPlanner):
            def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
                self.target = state_dict
                renamed = {"model." + key: value for key, value in state_dict.items()}
                super().set_up_planner(renamed, metadata, is_coordinator)

            def put(self, key, value):
                super().put(key, value)
                if (name := key.removeprefix("model.")) in self.target:
                    self.target[name] = value

    Materialise what is on the meta device, on a device of your choice (the default planner takes the
    current one)::

        class MaterializePlanner(DefaultLoadPlanner):
            def finish_plan(self, central_plan):
                for item in central_plan.items:
                    key = item.dest_index.fqn
                    value = self.state_dict[key]
                    if isinstance(value, torch.Tensor) and value.is_meta:
                        self.put(key, torch.empty_like(value, device="cpu"))
                return super().finish_plan(central_plan)

    The class is not abstract, as torch's is not: what a subclass leaves out fails when it is called.
    """

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,  # type: ignore[type-arg]
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Begin a load into ``state_dict``; called on every rank, first.

        Keep what is needed of the arguments: they are not given again. Change nothing yet.

        Args:
            state_dict: The state to load into, in place.
            metadata: The checkpoint's metadata. It is shared between calls and must not be changed.
            is_coordinator: Whether this rank is the one that sees all plans.
        """
        raise self._left_out("set_up_planner")

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank needs to read; called on every rank. Reads no data, changes nothing."""
        raise self._left_out("create_local_plan")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Take all ranks' plans in rank order and return one for each rank; on the coordinator only."""
        raise self._left_out("create_global_plan")

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Take this rank's part of the global plan and return what will be read; on every rank."""
        raise self._left_out("finish_plan")

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take over a value that is not a tensor, into the state, in place.

        Called once for each item of type BYTE_IO. ``value`` stands at its beginning and holds what the
        ``resolve_data`` of the planner that saved it gave; it belongs to the caller again after return.
        """
        raise self._left_out("load_bytes")

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """Return the stream that the storage must fill for ``read_item``; only some storages call this."""
        raise self._left_out("resolve_bytes")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the tensor that the box of ``read_item`` goes into; its shape is ``read_item.lengths``.

        It should share memory with the state, on any device and of any strides: the storage writes
        straight into it. Where that cannot be, return another tensor and copy in ``commit_tensor``.
        """
        raise self._left_out("resolve_tensor")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Learn that ``tensor``, as ``resolve_tensor`` returned it, now holds the data of ``read_item``.

        On a device the copy has been queued on the current stream, and may not have ended. Does nothing
        by default: that is right wherever ``resolve_tensor`` returned the state's own memory.
        """

    def _left_out(self, method: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} does not implement LoadPlanner.{method}")

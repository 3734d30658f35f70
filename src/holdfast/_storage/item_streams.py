"""Items into open streams, for writers that make their files themselves; in torch's terms."""

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import itemgetter
from typing import IO, Any, cast

import torch

from holdfast._io.blocks import BlockSums
from holdfast._io.file_access import FileWriter
from holdfast._io.streams import stream_name, write_all
from holdfast._plan.write_columns import columns_of
from holdfast._storage.item_writer import ItemWriter
from holdfast._storage.writing import deal_by_size
from holdfast._torch_compat.torch_records import to_ours
from holdfast.errors import UsageError
from holdfast.extension import StreamTransformExtension
from holdfast.planner import SavePlan, WriteItem, WriteItemType
from holdfast.storage import WriteResult

DEFAULT_SUFFIX = ".distcp"
"""How the names of data files end."""

# What is copied at a time of a tensor that is not in the memory of the host as it is stored.
_COPY_AT_ONCE = 8 << 20


class SerializationFormat(Enum):
    """How tensors are stored: as ``torch.load`` reads them, or as safetensors files."""

    TORCH_SAVE = "torch_save"
    SAFETENSORS = "safetensors"


@dataclass
class StoragePrefix:
    """How the names of a rank's data files begin: what a writer may put into ``SavePlan.storage_data``."""

    prefix: str


class TensorLoader:
    """Tensors on the host, one after the other, for writers that resolve the items of a plan themselves.

    Args:
        resolve_fun: Gives the tensor of an object, as ``SavePlanner.resolve_data`` does of an item.
        stream: Accepted for compatibility: tensors are copied on the stream of the caller.
        inflight_threshhold: Accepted for compatibility: one tensor is copied at a time.
    """

    def __init__(
        self,
        resolve_fun: Callable[[Any], torch.Tensor],
        stream: Any = None,  # noqa: ARG002
        inflight_threshhold: int = 1_000_000,  # noqa: ARG002
    ) -> None:
        self.resolve_fun = resolve_fun
        self.items: list[tuple[int, Any]] = []

    def add(self, size: int, obj: Any) -> None:
        """Take an object; smaller sizes come first."""
        self.items.append((size, obj))

    def start_loading(self) -> None:
        """Does nothing: ``values`` loads."""

    def values(self) -> Iterator[tuple[torch.Tensor, Any]]:
        """Each tensor with its object. Tensors share their memory with no others."""
        for _, obj in sorted(self.items, key=itemgetter(0)):
            tensor = self.resolve_fun(obj).detach().cpu()
            is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
            yield tensor if is_whole else tensor.clone(), obj


class StorageWriterTransforms:
    """The stream transforms of a writer; the first one stands next to the file."""

    def __init__(self, extensions: Sequence[StreamTransformExtension] | None = None) -> None:
        self.extensions = () if extensions is None else extensions

    def transform_save_stream(
        self,
        write_item: WriteItem,  # noqa: ARG002 - for subclasses
        raw_stream: io.IOBase,
    ) -> tuple[IO[bytes], list[str]]:
        """A stream for one item, and the descriptors of what it goes through, in the order of undoing.

        Closing the stream ends the item. ``raw_stream`` stays open.
        """
        stream = cast("IO[bytes]", _OneItem(raw_stream))
        for extension in self.extensions:
            stream = extension.transform_to(stream)
        return stream, [extension.get_descriptor() for extension in self.extensions]


class _OneItem(io.RawIOBase):
    """A stream that others write after it was closed."""

    def __init__(self, below: Any) -> None:
        self._below = below

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return int(self._below.write(data))

    def close(self) -> None:
        if not self.closed:
            self._below.flush()
        super().close()


def item_size(item: WriteItem) -> int:
    """The bytes of the whole tensor that an item is a part of."""
    nbytes = item.tensor_storage_size()
    if nbytes is None:
        raise UsageError(f"{item.index.fqn} is not a tensor: its size is not known before it is written")
    return nbytes


def split_by_size_and_type(bins: int, items: list[WriteItem]) -> list[list[WriteItem]]:
    """Deal items into lists of about the same number of bytes; values that are not tensors come first."""
    if bins == 1:
        return [items]
    dealt: list[list[WriteItem]] = [[] for _ in range(bins)]
    values = [item for item in items if item.type == WriteItemType.BYTE_IO]
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    for number, item in enumerate(values):
        dealt[number % bins].append(item)
    for taken, group in zip(dealt, deal_by_size(list(map(item_size, tensors)), bins), strict=True):
        taken += [tensors[number] for number in group]
    return dealt


def write_item(
    transforms: StorageWriterTransforms,
    stream: io.IOBase,
    data: io.BytesIO | torch.Tensor,
    write_item: WriteItem,
    storage_key: str,
    serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
) -> WriteResult:
    """Append an item to an open file, in the form that all our files have: loads check every byte of it.

    Args:
        transforms: What the item goes through.
        stream: The file, open for writing.
        data: What the planner's ``resolve_data`` gave; a tensor may be on any device.
        write_item: The item.
        storage_key: The name of the file in the checkpoint.
        serialization_format: Only ``TORCH_SAVE``.
    """
    if serialization_format.value != SerializationFormat.TORCH_SAVE.value:
        raise UsageError(
            "items are written as TORCH_SAVE only; safetensors files are not written item by item"
        )
    lines = columns_of(SavePlan([to_ours(write_item)]))
    applied = _Applied(transforms, write_item)
    writer = ItemWriter(
        _CallersFile(stream), 0, lines, [applied] if transforms.extensions else [], _COPY_AT_ONCE
    )
    writer.add(0, data)
    lists: dict[str, list[Any]] = {"file_names": [storage_key], "transforms": [applied.descriptors]}
    (result,) = writer.finish().sealed(lines.offsets, lists).results()
    return result


class _Applied:
    """The transforms of a writer as one, for one item.

    Attributes:
        descriptors: Those of the transforms that were applied; None before.
    """

    def __init__(self, transforms: StorageWriterTransforms, item: WriteItem) -> None:
        self._transforms, self._item = transforms, item
        self.descriptors: tuple[str, ...] | None = None

    def transform_to(self, output: Any) -> IO[bytes]:
        stream, descriptors = self._transforms.transform_save_stream(self._item, output)
        self.descriptors = tuple(descriptors)
        return stream


class _CallersFile(FileWriter):
    """A file that somebody else has opened, and will close."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream_name(stream) or "a stream")
        self._stream = stream
        self.position = stream.tell()

    def _append(self, view: memoryview, sums: BlockSums | None) -> None:
        write_all(self._stream, view)
        if sums is not None:
            sums.update(view)

    def _complete(self) -> None:
        self._stream.flush()

    def _discard(self) -> None:
        """Nothing: the file is not ours to remove."""

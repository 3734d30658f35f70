"""Items into open streams as torch writes them, for writers that make their files themselves."""

import heapq
import io
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import IO, Any, cast

import torch

from holdfast._format.item_table import StorageInfo
from holdfast.errors import UsageError
from holdfast.extension import StreamTransformExtension
from holdfast.planner import WriteItem, WriteItemType
from holdfast.storage import WriteResult

DEFAULT_SUFFIX = ".distcp"
"""How the names of data files end."""


class SerializationFormat(Enum):
    """How tensors are stored: as ``torch.load`` reads them, or as safetensors files."""

    TORCH_SAVE = "torch_save"
    SAFETENSORS = "safetensors"


@dataclass
class StoragePrefix:
    """How the names of a rank's data files begin: what a writer may put into ``SavePlan.storage_data``."""

    prefix: str

    def name(self, number: int) -> str:
        """The name of the rank's file ``number``."""
        return f"{self.prefix}{number}{DEFAULT_SUFFIX}"


class StorageWriterTransforms:
    """The stream transforms of a writer; the first one stands next to the file."""

    def __init__(self, extensions: Sequence[StreamTransformExtension] | None = None) -> None:
        self.extensions = () if extensions is None else extensions

    def transform_save_stream(
        self,
        write_item: WriteItem,  # noqa: ARG002 - for subclasses
        raw_stream: io.IOBase,
    ) -> tuple[IO[bytes], list[str]]:
        """A stream for one item, and the descriptors of what it goes through, as a reader undoes them.

        Closing the stream ends the item. ``raw_stream`` stays open.
        """
        stream = cast("IO[bytes]", _OneItem(raw_stream))
        for extension in self.extensions:
            stream = extension.transform_to(stream)
        return stream, [extension.get_descriptor() for extension in reversed(self.extensions)]


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
    # Of lists with the same number of bytes the first one is taken.
    heap = [(0, number) for number in range(bins)]
    for item in sorted(tensors, key=item_size, reverse=True):
        nbytes, number = heap[0]
        dealt[number].append(item)
        heapq.heapreplace(heap, (nbytes + item_size(item), number))
    return dealt


def write_item(
    transforms: StorageWriterTransforms,
    stream: io.IOBase,
    data: io.BytesIO | torch.Tensor,
    write_item: WriteItem,
    storage_key: str,
    serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
) -> WriteResult:
    """Append an item to an open file, as torch does: nothing is checked when it is read again.

    Args:
        transforms: What the item goes through.
        stream: The file, open for writing.
        data: What the planner's ``resolve_data`` gave; a tensor must be in the memory of the host.
        write_item: The item.
        storage_key: The name of the file in the checkpoint.
        serialization_format: With SAFETENSORS a tensor is not written here: the caller writes all of the
            file at once.
    """
    offset = stream.tell()
    target, descriptors = transforms.transform_save_stream(write_item, stream)
    if isinstance(data, io.BytesIO):
        target.write(data.getbuffer())
    elif not data.is_cpu:
        raise UsageError(
            f"{write_item.index.fqn} is on {data.device}: copy it to the CPU before it is written"
        )
    elif serialization_format is SerializationFormat.TORCH_SAVE:
        # torch.save stores the whole memory that a view is a part of.
        is_part = data.untyped_storage().nbytes() != data.nbytes
        torch.save(data.clone() if is_part else data, target)
    target.close()
    in_stream = isinstance(data, io.BytesIO) or serialization_format is SerializationFormat.TORCH_SAVE
    nbytes = stream.tell() - offset if in_stream else cast("torch.Tensor", data).nbytes
    place = StorageInfo(storage_key, offset, nbytes, descriptors or None)
    return WriteResult(write_item.index, nbytes, place)

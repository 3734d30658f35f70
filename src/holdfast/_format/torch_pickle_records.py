"""The contents of torch's checkpoint metadata as plain, torch-free records."""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

# Named tuples, because there may be millions of them: frozen dataclasses take twice as long to make.

Ints: TypeAlias = tuple[int, ...]
Chunk: TypeAlias = tuple[Ints, Ints]
"""A box of a tensor: its offsets and its lengths."""

StorageKey: TypeAlias = tuple[str, Ints | None]
"""The flat name, and the offsets of the chunk; None for an object."""


class TorchProperties(NamedTuple):
    """What torch notes about a tensor besides its shape; names are torch's, without the ``torch.``."""

    dtype: str
    layout: str = "strided"
    requires_grad: bool = False
    memory_format: str = "contiguous_format"
    pin_memory: bool = False


class TorchTensor(NamedTuple):
    """A tensor and the chunks it was saved in; every chunk lies within the shape."""

    properties: TorchProperties
    shape: Ints
    chunks: list[Chunk]


@dataclass(frozen=True)
class TorchObject:
    """A value that is not a tensor; torch notes nothing about it."""

    __slots__ = ()


class TorchStorage(NamedTuple):
    """Where one chunk or object is: ``nbytes`` bytes at ``offset`` of the file at the relative ``path``.

    ``descriptors`` names the stream transforms in the order in which the file has them.
    """

    path: str
    offset: int
    nbytes: int
    descriptors: tuple[str, ...] = ()


class TorchStorageMeta(NamedTuple):
    """Where and by which save the checkpoint was written; all of it is for people, not for readers."""

    checkpoint_id: str | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: tuple[str, ...] = ()


class TorchMetadata(NamedTuple):
    """A whole ``.metadata`` file of torch.

    ``planner_data`` is plain data: dict, list, tuple, set, str, bytes, numbers, None. A field that the
    torch that wrote the file did not have yet is None.
    """

    entries: dict[str, TorchTensor | TorchObject]
    storage: dict[StorageKey, TorchStorage]
    planner_data: Any = None
    storage_meta: TorchStorageMeta | None = None
    version: str | None = None

"""Owns what the jobs of one load share, and what they know of a stored chunk."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast._contents.item_bytes import ItemBytes
from holdfast._format.item_table import StorageInfo
from holdfast._io.pool import Budget, Cancellation
from holdfast._storage.destinations import PlannerCalls
from holdfast._storage.open_files import SharedFile
from holdfast.extension import ExtensionRegistry


@dataclass(frozen=True)
class ReadContext:
    """What all jobs of one load share.

    Attributes:
        calls: How the planner is called.
        registry: Makes transforms from their descriptors.
        budget: Bounds the scratch memory of all jobs together.
        cancellation: Says that another job failed.
        verify: Whether checksums are compared.
    """

    calls: PlannerCalls
    registry: ExtensionRegistry
    budget: Budget
    cancellation: Cancellation
    verify: bool = True


class Chunk(NamedTuple):
    """A stored chunk: where it lies and what it is."""

    info: StorageInfo
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class ItemReader(ItemBytes[ReadContext]):
    """Reads one item of a file for a load."""

    file: SharedFile

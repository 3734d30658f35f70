"""Owns what the jobs of one load share, and what they know of a stored chunk."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast._contents.item_bytes import ItemRules
from holdfast._format.item_table import StorageInfo
from holdfast._storage.destinations import PlannerCalls


@dataclass(frozen=True, kw_only=True)
class ReadContext(ItemRules):
    """What all jobs of one load share.

    Attributes:
        calls: How the planner is called.
    """

    calls: PlannerCalls


class Chunk(NamedTuple):
    """A stored chunk: where it lies and what it is."""

    info: StorageInfo
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

"""The two sides of every case: holdfast and stock torch, called as users call them, with their defaults."""

import inspect
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem as stock_files
from torch.distributed.checkpoint import state_dict_loader as stock_loader
from torch.distributed.checkpoint import state_dict_saver as stock_saver

import holdfast

__all__ = ["ALONE", "Side", "both_sides"]

ALONE: dict[str, Any] = (
    {"no_dist": True} if "no_dist" in inspect.signature(stock_saver.save).parameters else {}
)
"""What tells stock torch to save alone. Older torch has no such argument, and does so without a group."""


@dataclass(frozen=True)
class Side:
    """One who saves and loads, as functions of a state and a folder.

    Attributes:
        name: What the table calls it.
        save: Save a state into a folder; durable when it returns.
        load: Load into a state, in place.
        only_tensors: It saves nothing else.
    """

    name: str
    save: Callable[[dict[str, Any], Path], object]
    load: Callable[[dict[str, Any], Path], None]
    only_tensors: bool = False

    def save_anew(self, state: dict[str, Any], folder: Path) -> None:
        """Save into a folder that does not exist yet, whatever was there."""
        shutil.rmtree(folder, ignore_errors=True)
        self.save(state, folder)

    def warm_up(self, folder: Path) -> None:
        """Save and load next to nothing, so that imports and first calls are in nobody's time or memory."""
        place = folder / f"warm-up-{self.name}"
        rest = {} if self.only_tensors else {"step": 1}
        self.save({"x": torch.ones(4), **rest}, place)
        self.load({"x": torch.zeros(4), **rest}, place)
        shutil.rmtree(place)


def both_sides(*, zstd: bool = False, together: bool = False) -> tuple[Side, Side]:
    """Both, in the order of ``case.SIDES``.

    Args:
        zstd: Each compresses by its own extension.
        together: The ranks of the process group save and load together; otherwise each process alone.
    """
    alone = {} if together else ALONE

    def save_ours(state: dict[str, Any], folder: Path) -> object:
        extensions = [holdfast.extension.ZStandard()] if zstd else None
        writer = holdfast.FileSystemWriter(folder, _extensions=extensions)
        return holdfast.save(state, storage_writer=writer, no_dist=not together)

    def load_ours(state: dict[str, Any], folder: Path) -> None:
        holdfast.load(state, checkpoint_id=folder, no_dist=not together)

    def save_theirs(state: dict[str, Any], folder: Path) -> object:
        options: dict[str, Any] = {}
        if zstd:
            # Not every torch that we work with has it.
            from torch.distributed.checkpoint._extension import ZStandard  # noqa: PLC0415

            options["_extensions"] = [ZStandard()]
        writer = stock_files.FileSystemWriter(folder, **options)
        return stock_saver.save(state, storage_writer=writer, **alone)

    def load_theirs(state: dict[str, Any], folder: Path) -> None:
        stock_loader.load(state, checkpoint_id=folder, **alone)

    return Side("holdfast", save_ours, load_ours), Side("torch", save_theirs, load_theirs)

"""What a simulated coordinator went through, stage by stage, and what it cost."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from typing_extensions import ParamSpec

__all__ = ["SAMPLED_RANKS", "Stages"]

SAMPLED_RANKS = 16
"""Packing and unpacking is measured for so many ranks, and counted for all."""

T = TypeVar("T")
P = ParamSpec("P")


@dataclass
class Stages:
    """The cost of a simulated save and load.

    Attributes:
        seconds: By stage.
        nbytes: The size of one rank's messages, by their name.
        memory: The coordinator's peak in bytes from the first offer to the commit.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    memory: int = 0

    def time(self, stage: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the work of a stage, and note how long it takes."""
        gc.collect()
        start = time.perf_counter()
        done = work(*args, **kwargs)
        self.seconds[stage] = self.seconds.get(stage, 0) + time.perf_counter() - start
        return done

    def note_file(self, folder: Path, name: str) -> None:
        """Note the size of the ``.metadata`` that was written."""
        self.nbytes[name] = (folder / ".metadata").stat().st_size

"""A planner that kills its own process in the middle of a save, for showing what the other ranks do then."""

import os
import signal
from pathlib import Path
from typing import Any

import holdfast

_LAST_WORDS = "killed; bytes in the file:"


class FatalPlanner(holdfast.DefaultSavePlanner):
    """Plans as usual, and dies of SIGKILL when it is asked for a tensor while its rank's file is growing.

    It dies at the last tensor at the latest: in any case before this rank has written its part.

    Args:
        folder: Where the checkpoint is being saved.
        rank: The rank of this process, by which its files are called.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__()
        self.folder, self.rank = folder, rank
        self.files_before = self._files()
        self.items_left = 0

    def finish_plan(self, new_plan: holdfast.SavePlan) -> holdfast.SavePlan:
        """Learn how many items there are to write."""
        self.items_left = len(new_plan.items)
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: holdfast.WriteItem) -> Any:
        """The item's data, or death."""
        self.items_left -= 1
        nbytes = sum(file.stat().st_size for file in self._files() - self.files_before)
        if nbytes or self.items_left == 0:
            print(f"{_LAST_WORDS} {nbytes}", flush=True)
            # No handler, no clean-up, no word to the others: as when a machine runs out of memory.
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)

    def _files(self) -> set[Path]:
        return set(self.folder.glob(f"__{self.rank}_*"))


def bytes_at_death(output: str) -> int:
    """How many bytes a process had written that died so, by what it printed; 0 if it did not."""
    said = output.rpartition(_LAST_WORDS)[2].split()
    return int(said[0]) if _LAST_WORDS in output else 0

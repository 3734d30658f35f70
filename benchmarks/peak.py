"""The process of one memory measurement: one save or load, and its peak of memory besides the state.

``python -m benchmarks.peak CASE SIDE save|load FOLDER SCALE`` prints a number of bytes.
"""

import sys
import warnings
from pathlib import Path

from benchmarks.case import SIDES
from benchmarks.footprint import Footprint
from benchmarks.memory import memory_contents
from benchmarks.sides import both_sides
from benchmarks.states import State

__all__ = ["extra_memory"]


def extra_memory(contents: State, side_name: str, operation: str, folder: Path) -> int:
    """Bytes between the process's memory before the call and its peak during the call.

    Before it, the state is there and touched, and the code has run once. What a load makes for its
    caller to keep does not count.
    """
    side = both_sides()[SIDES.index(side_name)]
    side.warm_up(folder.parent)
    state = contents.filled() if operation == "save" else contents.blank()
    footprint = Footprint()
    if operation == "save":
        side.save(state, folder)
    else:
        side.load(state, folder)
    extra = footprint.extra()
    if operation == "load":
        contents.check(state)
        extra -= contents.made_by_load
    return max(0, extra)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    case, side_, operation_, folder_, scale_ = sys.argv[1:]
    ours, theirs = memory_contents(float(scale_))[case][1:]
    given = dict(zip(SIDES, (ours, theirs), strict=True))[side_]
    print(extra_memory(given, side_, operation_, Path(folder_)))

"""The process of one memory measurement: one save or load, and its peak of memory besides the state.

``python -m benchmarks.peak CASE SIDE save|load FOLDER SCALE`` prints a number of bytes.
"""

import ctypes
import gc
import sys
import warnings
from pathlib import Path

from benchmarks.case import SIDES
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
    gc.collect()
    _return_free_memory()
    _forget_peak()
    before = _status("VmRSS")
    if operation == "save":
        side.save(state, folder)
    else:
        side.load(state, folder)
    extra = _status("VmHWM") - before
    if operation == "load":
        contents.check(state)
        extra -= contents.made_by_load
    return max(0, extra)


def _return_free_memory() -> None:
    """Give back what the allocator keeps: a call that takes its memory from there would seem to take none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        # Then an earlier peak may hide a part. Making the state peaks at 64 MiB above it, no more.
        pass


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    case, side_, operation_, folder_, scale_ = sys.argv[1:]
    ours, theirs = memory_contents(float(scale_))[case][1:]
    given = dict(zip(SIDES, (ours, theirs), strict=True))[side_]
    print(extra_memory(given, side_, operation_, Path(folder_)))

"""How much memory a piece of work takes: the kernel's record of a process's peak, begun anew."""

import ctypes
import gc
from pathlib import Path

__all__ = ["Footprint"]


class Footprint:
    """Watches the memory of this process from its making on.

    Whatever is there when it is made, imports and all, does not count; what is freed later still does. The
    page cache is not part of it.
    """

    def __init__(self) -> None:
        gc.collect()
        _return_free_memory()
        _forget_peak()
        self._before = _status("VmRSS")

    def extra(self) -> int:
        """Bytes between the memory at the start and the peak since then."""
        return max(0, _status("VmHWM") - self._before)


def _return_free_memory() -> None:
    """Give back what the allocator keeps: work that takes its memory from there would seem to take none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        # Then an earlier peak may hide a part. Making a state peaks at 64 MiB above it, no more.
        pass


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status has no {field}")

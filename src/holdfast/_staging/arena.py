"""Owns one piece of memory that staged tensors lie in: its pages, and who may still look at them."""

import contextlib
import ctypes
import itertools
import mmap
import os
import tempfile
import weakref
from typing import Any

import torch

from holdfast._staging.copying import touch

__all__ = ["Arena"]

_LARGE_PAGE = 2 << 20
_numbers = itertools.count()


class Arena:
    """Memory that is taken from the system once and then lent again and again.

    It is mapped as shared in any case: of private memory a fork would make copies, page by page, in the
    middle of the next staging.

    Args:
        shared: Back it by a file without a name, whose descriptor another process can map. Nothing of it is
            left when the last process that has it ends, however that ends.
        pinned: Register it with CUDA, so that devices copy into it by themselves.
        threads: How many threads take its pages.

    Attributes:
        identity: Names it among all arenas of this machine.
        nbytes: Its size.
        fd: The descriptor, if it is shared.
    """

    def __init__(self, *, shared: bool, pinned: bool, threads: int) -> None:
        self.owner_pid = os.getpid()
        self.identity = f"{self.owner_pid}-{next(_numbers)}"
        self.nbytes = 0
        self.fd = _nameless_file() if shared else None
        self._pinned = pinned
        self._threads = threads
        self._map: mmap.mmap | None = None
        self._close_fd = weakref.finalize(self, os.close, self.fd) if self.fd is not None else None

    def grow(self, nbytes: int) -> None:
        """Make it at least so large, with all of its pages there. Nobody may look at it meanwhile.

        Raises:
            MemoryError: The system has not that much. The arena is empty then.
        """
        if nbytes <= self.nbytes and self._map is not None:
            return
        unit = _LARGE_PAGE if nbytes >= _LARGE_PAGE else mmap.PAGESIZE
        # What lies between tensors differs from state to state: 1 in 64 more, and the next one fits too.
        capacity = max(unit, -(-(nbytes + nbytes // 64) // unit) * unit)
        self._map, self.nbytes = None, 0
        try:
            self._map = self._mapped(capacity)
            touch(_address_of(self._map), capacity, threads=self._threads)
        except (OSError, MemoryError) as error:
            self._map = None
            if self.fd is not None:
                os.ftruncate(self.fd, 0)
            raise MemoryError(f"staging needs {nbytes:,} bytes of host memory: {error}") from error
        self.nbytes = capacity
        if self._pinned:
            _pin(self._map, capacity)

    def _mapped(self, capacity: int) -> mmap.mmap:
        if self.fd is None:
            made = mmap.mmap(-1, capacity)
        else:
            os.ftruncate(self.fd, capacity)
            made = mmap.mmap(self.fd, capacity)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Heeded where /sys/kernel/mm/transparent_hugepage/shmem_enabled is "advise".
            with contextlib.suppress(OSError):
                made.madvise(mmap.MADV_HUGEPAGE)
        return made

    def lend(self) -> tuple[torch.Tensor, Any]:
        """All of it as a tensor of bytes, and an object that lives as long as any tensor made of that one."""
        assert self._map is not None
        hold = (ctypes.c_ubyte * self.nbytes).from_buffer(self._map)
        return torch.frombuffer(hold, dtype=torch.uint8), hold

    def close(self) -> None:
        """Let go of the memory; it returns to the system when the last tensor in it does."""
        self._map, self.nbytes = None, 0
        if self._close_fd is not None:
            self._close_fd()
            self.fd = None


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("holdfast-staging", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="holdfast-staging-") as file:
        return os.dup(file.fileno())


def _address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(mapping))


def _pin(mapping: mmap.mmap, nbytes: int) -> None:
    """Register with CUDA until the mapping is gone. Never run by the tests: they have no device."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = _address_of(mapping)
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, nbytes, 0)))
    unpin = weakref.finalize(mapping, runtime.cudaHostUnregister, address)
    # At exit the driver may be gone before us, and it takes its registrations along.
    unpin.atexit = False

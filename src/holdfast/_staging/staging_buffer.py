"""One staging buffer: host memory that copies of tensors are put into, and that is reused."""

import contextlib
import ctypes
import mmap
import os
import sys
import weakref
from typing import Any

import torch

from holdfast._staging.anonymous_file import make_anonymous_file
from holdfast._staging.staging_copy import touch

_LARGE_PAGE = 2 << 20


class StagingBuffer:
    """Memory that is taken from the system once and then used for one staged state after the other.

    It is always mapped as shared memory. With private memory, a fork would make the next staging copy page
    after page.

    Args:
        shared: Back the buffer by a file without a name, whose descriptor another process can map.
        pinned: Register the buffer with CUDA, so that devices copy into it directly.
        threads: How many threads take its pages.

    Attributes:
        owner_pid: The process that made the buffer.
        nbytes: Its size; 0 until ``grow`` is called.
        fd: The descriptor of the file, if the buffer is shared.
    """

    def __init__(self, *, shared: bool, pinned: bool, threads: int) -> None:
        self.owner_pid = os.getpid()
        self.nbytes = 0
        self.fd = make_anonymous_file("staging") if shared else None
        self._pinned = pinned
        self._threads = threads
        self._map: mmap.mmap | None = None
        self._close_fd = weakref.finalize(self, os.close, self.fd) if self.fd is not None else None

    def grow(self, nbytes: int) -> None:
        """Make the buffer at least ``nbytes`` large and take all of its pages. It must not be in use.

        Raises:
            MemoryError: There is not enough memory. The buffer is empty then.
        """
        if nbytes <= self.nbytes and self._map is not None:
            return
        unit = _LARGE_PAGE if nbytes >= _LARGE_PAGE else mmap.PAGESIZE
        # The gaps between tensors differ from state to state. With 1/64 more, the next state fits too.
        capacity = max(unit, -(-(nbytes + nbytes // 64) // unit) * unit)
        self._map, self.nbytes = None, 0
        try:
            self._map = self._mapped(capacity)
            touch(_address_of(self._map), capacity, threads=self._threads)
        except (OSError, MemoryError) as error:
            self._map = None
            if self.fd is not None:
                self._replace_file(self.fd)
            raise MemoryError(f"staging needs {nbytes:,} bytes of host memory: {error}") from error
        self.nbytes = capacity
        if self._pinned:
            _pin(self._map, capacity)

    def _replace_file(self, fd: int) -> None:
        """Use a new, empty file. The old one may still have readers, whom truncating it would kill."""
        fresh = make_anonymous_file("staging")
        os.dup2(fresh, fd, inheritable=False)
        os.close(fresh)

    def _mapped(self, capacity: int) -> mmap.mmap:
        if self.fd is not None:
            os.ftruncate(self.fd, capacity)
        made = mmap.mmap(-1 if self.fd is None else self.fd, capacity)
        if sys.platform == "linux":
            # Has an effect where /sys/kernel/mm/transparent_hugepage/shmem_enabled is "advise".
            with contextlib.suppress(OSError):
                made.madvise(mmap.MADV_HUGEPAGE)
        return made

    def lend(self) -> tuple[torch.Tensor, Any]:
        """The whole buffer as a tensor of bytes, and an object that lives as long as any view of it."""
        assert self._map is not None
        hold = (ctypes.c_ubyte * self.nbytes).from_buffer(self._map)
        return torch.frombuffer(hold, dtype=torch.uint8), hold

    def close(self) -> None:
        """Give the memory up. The system gets it back when the last tensor in it is gone."""
        self._map, self.nbytes = None, 0
        if self._close_fd is not None:
            self._close_fd()
            self.fd = None


def _address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(mapping))


def _pin(mapping: mmap.mmap, nbytes: int) -> None:
    """Register the mapping with CUDA until it is gone. Our tests never run this: they have no device."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = _address_of(mapping)
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, nbytes, 0)))
    unpin = weakref.finalize(mapping, runtime.cudaHostUnregister, address)
    # At exit the driver may be gone already, and its registrations with it.
    unpin.atexit = False

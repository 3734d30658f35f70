"""What the page cache has of a file, as the kernel tells it."""

import ctypes
import mmap
import os
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)


def cached_share(path: Path) -> float:
    """Which part of a file's pages is in memory."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
        pages = -(-len(memory) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        if _LIBC.mincore(address, ctypes.c_size_t(len(memory)), found):
            raise OSError(ctypes.get_errno(), "mincore failed", str(path))
        return sum(byte & 1 for byte in found) / pages


def forget(folder: Path) -> None:
    """Take all files of a folder out of the page cache."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_from_disk() -> int:
    """How many bytes this process has caused to be read from disks."""
    return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])

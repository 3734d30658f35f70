"""A folder claimed for one save: two that write into it at once would remove each other's files."""

import contextlib
import errno
import fcntl
import os
import weakref

from holdfast._io.store import Claim
from holdfast.errors import StorageError

__all__ = ["claim_folder"]

# What a file system that cannot lock a folder answers: NFS wants it open for writing, others know no locks.
_CANNOT = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class FolderClaim(Claim):
    """A folder that is this save's alone, until it is released, dropped, or its process ends."""

    def __init__(self, fd: int) -> None:
        self._release = weakref.finalize(self, _close, fd)

    def release(self) -> None:
        """Let others in. Does nothing the second time."""
        self._release()


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


def claim_folder(path: str, *, shared: bool) -> Claim:
    """Claim a folder. The lock is on the folder itself: nothing is left behind, whatever happens.

    Args:
        path: The folder.
        shared: For ranks that write their own parts: they may be several, but not beside a joint save.

    Raises:
        StorageError: Another save has it. Where the file system has no locks for folders, that is not
            noticed.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise StorageError(
            f"{path}: another save is writing a checkpoint into this folder right now; two at once would "
            "damage each other. Give each its own folder, or save one after the other. (If every rank calls "
            "save with no_dist=True, each is such a save.)",
            path=path,
        ) from error
    except OSError as error:
        os.close(fd)
        if error.errno not in _CANNOT:
            raise
        return Claim()
    return FolderClaim(fd)

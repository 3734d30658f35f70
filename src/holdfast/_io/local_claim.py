"""Owns the lock on a folder that keeps two saves of one machine apart."""

import contextlib
import errno
import fcntl
import os
import weakref

from holdfast._io.store import Claim

# What a file system that cannot lock a folder answers: NFS wants it open for writing, others know no locks.
_CANNOT = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}

_held: set[int] = set()
"""The descriptors of all claims of this process."""


class FolderClaim(Claim):
    """A folder that is locked for one save, until it is released, dropped, or its process ends.

    A forked child shares the lock. So the child closes its descriptor at once, lest the lock outlive a parent
    that is killed; and the parent unlocks before it closes, should a child hold a copy all the same.
    """

    def __init__(self, fd: int) -> None:
        _held.add(fd)
        self._release = weakref.finalize(self, _unlock, fd, os.getpid())

    def release(self) -> None:
        """Let others in. Does nothing the second time, and nothing in a forked child."""
        self._release()


def _unlock(fd: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # unlocking in a child would let others into the parent's folder
    _held.discard(fd)
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):
        os.close(fd)


def _close_in_child() -> None:
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)


def claim_folder(path: str, *, shared: bool) -> Claim | None:
    """Lock a folder. The lock is on the folder itself: nothing is left behind, whatever happens.

    Args:
        path: The folder.
        shared: For ranks that write their own parts: they may be several, but not beside a joint save.

    Returns:
        The claim; None if another save has locked the folder. Where the file system has no locks for
        folders, a claim that keeps nobody out.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            return None
        if error.errno not in _CANNOT:
            raise OSError(error.errno, error.strerror, path) from error
        return Claim()
    return FolderClaim(fd)

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
    """A folder that is open to be locked for one save, until it is released, dropped, or its process ends.

    A forked child shares the lock. So the child closes its descriptor at once: otherwise the folder would
    stay locked after the parent was killed. The parent unlocks before it closes, in case a child still has a
    copy.
    """

    def __init__(self, fd: int) -> None:
        _held.add(fd)
        self._fd, self._owner = fd, os.getpid()
        self._drop = weakref.finalize(self, _unlock, fd, self._owner)

    def lock(self, *, shared: bool) -> None:
        """Lock the folder, beside other shared locks or alone.

        Raises:
            OSError: It is locked, or the file system cannot lock folders.
        """
        fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)

    def release(self) -> None:
        """Let others in. Does nothing the second time, unless a signal's exception has cut off the first."""
        if self._drop.alive:
            _unlock(self._fd, self._owner)
            self._drop.detach()


def _unlock(fd: int, owner: int) -> None:
    if os.getpid() != owner or fd not in _held:
        return  # unlocking in a child would let others into the parent's folder
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    _held.discard(fd)
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
        shared: Let in others that lock it so, too: ranks that each write their own part. A joint save
            is kept out.

    Returns:
        The claim; None if another save has locked the folder. Where the file system has no locks for
        folders, a claim that keeps nobody out.
    """
    # It has an owner before it is locked: an exception of a signal may come between any two calls.
    claim = FolderClaim(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        claim.lock(shared=shared)
    except BaseException as error:
        claim.release()
        if isinstance(error, BlockingIOError):
            return None
        if not isinstance(error, OSError):
            raise
        if error.errno not in _CANNOT:
            raise OSError(error.errno, error.strerror, path) from error
        return Claim()
    return claim

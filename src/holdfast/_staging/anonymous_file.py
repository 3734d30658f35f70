"""Makes files without a name: memory that two processes can map, and that no crash can leave behind."""

import os
import sys
import tempfile


def make_anonymous_file(purpose: str) -> int:
    """Make an empty file that is in no folder, in memory where the system can do that.

    Args:
        purpose: A word that tools such as ``/proc/PID/maps`` show for it.

    Returns:
        Its descriptor, which child processes do not inherit. The file is gone when the last process that has
        it open or mapped ends.
    """
    if sys.platform == "linux":
        return os.memfd_create(f"holdfast-{purpose}", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile(prefix=f"holdfast-{purpose}-") as file:
            return os.dup(file.fileno())

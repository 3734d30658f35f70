"""How a command ends that failed, on one path or on several, and what it looks at before it begins."""

import os
import sys
from collections.abc import Callable, Sequence

from holdfast.cli.exit_codes import UNREADABLE, exit_code
from holdfast.cli.text import printable
from holdfast.errors import CheckpointError, UsageError

__all__ = ["check_output", "complain", "explain", "run_each"]


def complain(message: str, code: int) -> int:
    """Print an error in one line, and return the exit code."""
    print("holdfast:", " ".join(printable(line) for line in message.splitlines()), file=sys.stderr)
    return code


def explain(error: CheckpointError | OSError) -> int:
    """Print what went wrong, and return the exit code for it."""
    # Some of ours are of the system's classes too.
    if isinstance(error, CheckpointError):
        return complain(str(error), exit_code(error))
    where = f"{error.filename}: " if error.filename else ""
    return complain(f"{where}{error.strerror or error}", UNREADABLE)


def check_output(path: str) -> None:
    """Raise before a command reads gigabytes if the file that it is to write cannot be made.

    Raises:
        UsageError: It has no folder, or is one.
    """
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise UsageError(f"{path}: there is no folder {folder} to write it to", path=path)
    if os.path.isdir(path):
        raise UsageError(f"{path}: is a folder: name a file to write", path=path)


def run_each(paths: Sequence[str], action: Callable[[str], int]) -> int:
    """Do something with each path, whatever happens with the others, and return the highest exit code."""
    if len(paths) == 1:
        return action(paths[0])
    code = 0
    for path in paths:
        try:
            code = max(code, action(path))
        except BrokenPipeError:  # noqa: PERF203 - each path on its own
            raise
        except (CheckpointError, OSError) as error:
            code = max(code, explain(error))
    return code

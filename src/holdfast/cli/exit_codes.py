"""How a command ends: its exit code, and the line that says what went wrong."""

import os
import sys
from collections.abc import Callable, Sequence

from holdfast._contents.findings import says_damaged
from holdfast.cli.text import printable
from holdfast.errors import CheckpointError, CheckpointExistsError, PlanError, UsageError

__all__ = [
    "DAMAGED",
    "FINE",
    "INTERRUPTED",
    "NOBODY_READS",
    "TERMINATED",
    "UNREADABLE",
    "WRONG_USAGE",
    "check_output",
    "complain",
    "exit_code",
    "explain",
    "run_each",
]

FINE, DAMAGED, WRONG_USAGE, UNREADABLE = 0, 1, 2, 3
"""Wrong usage is mostly told by argparse. What else is refused, a command's own errors tell."""

# The words, the target, a key that is not there, a value that the target cannot hold.
_REFUSALS = (UsageError, CheckpointExistsError, PlanError)

# As a shell reports a program that was ended by SIGINT, SIGPIPE or SIGTERM.
INTERRUPTED, NOBODY_READS, TERMINATED = 130, 141, 143


def exit_code(error: Exception) -> int:
    """The exit code for an error: a refusal, a damaged checkpoint, or one that could not be read at all."""
    if says_damaged(error):
        return DAMAGED
    return WRONG_USAGE if isinstance(error, _REFUSALS) else UNREADABLE


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
    """Call ``action`` with each path, also after errors of others; returns the highest exit code."""
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

"""What the exit codes of ``holdfast`` mean, and which of them an error leads to."""

from holdfast._contents.findings import says_damaged
from holdfast.errors import CheckpointExistsError, PlanError, UsageError

__all__ = [
    "DAMAGED",
    "FINE",
    "INTERRUPTED",
    "NOBODY_READS",
    "TERMINATED",
    "UNREADABLE",
    "WRONG_USAGE",
    "exit_code",
]

FINE, DAMAGED, WRONG_USAGE, UNREADABLE = 0, 1, 2, 3
"""Wrong usage is mostly told by argparse. What else is refused, a command's own errors tell."""

# The words, the target, a key that is not there, a value that the target cannot hold.
_REFUSALS = (UsageError, CheckpointExistsError, PlanError)

# As a shell reports a program that was ended by SIGINT, SIGPIPE or SIGTERM.
INTERRUPTED, NOBODY_READS, TERMINATED = 130, 141, 143


def exit_code(error: Exception) -> int:
    """What an error says: a refusal, a checkpoint that is damaged, or one that could not be read at all."""
    if says_damaged(error):
        return DAMAGED
    return WRONG_USAGE if isinstance(error, _REFUSALS) else UNREADABLE

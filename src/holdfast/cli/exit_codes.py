"""What the exit codes of ``holdfast`` mean, and which of them an error leads to."""

from holdfast._contents.findings import says_damaged
from holdfast.errors import CheckpointExistsError, PlanError, UsageError

__all__ = ["DAMAGED", "FINE", "INTERRUPTED", "NOBODY_READS", "UNREADABLE", "WRONG_USAGE", "exit_code"]

FINE, DAMAGED, WRONG_USAGE, UNREADABLE = 0, 1, 2, 3
"""Wrong usage is mostly told by argparse. Other words that make no sense are a UsageError. Words that ask for
what cannot be are wrong usage, too: the target exists, no key matches, a format cannot hold a value."""

# As a shell reports a program that was ended by SIGINT or SIGPIPE.
INTERRUPTED, NOBODY_READS = 130, 141


def exit_code(error: Exception) -> int:
    """What an error says: wrong words, a checkpoint that is damaged, or one that could not be read at all."""
    if isinstance(error, UsageError | CheckpointExistsError | PlanError):
        return WRONG_USAGE
    return DAMAGED if says_damaged(error) else UNREADABLE

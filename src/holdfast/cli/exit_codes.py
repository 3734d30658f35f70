"""What the exit codes of ``holdfast`` mean, and which of them an error leads to."""

from holdfast._contents.findings import says_damaged

__all__ = ["DAMAGED", "FINE", "INTERRUPTED", "NOBODY_READS", "UNREADABLE", "exit_code"]

FINE, DAMAGED, UNREADABLE = 0, 1, 3
"""2 is wrong usage, and argparse's."""

# As a shell reports a program that was ended by SIGINT or SIGPIPE.
INTERRUPTED, NOBODY_READS = 130, 141


def exit_code(error: Exception) -> int:
    """What an error says of the checkpoint: that it is damaged, or that it could not be read at all."""
    return DAMAGED if says_damaged(error) else UNREADABLE

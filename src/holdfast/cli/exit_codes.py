"""What the exit codes of ``holdfast`` mean, and which of them an error leads to."""

from holdfast.errors import IntegrityError, UnsafeMetadataError

__all__ = ["DAMAGED", "FINE", "INTERRUPTED", "NOBODY_READS", "UNREADABLE", "WRONG_USAGE", "exit_code"]

FINE, DAMAGED, WRONG_USAGE, UNREADABLE = 0, 1, 2, 3
"""Wrong usage is mostly told by argparse."""

# As a shell reports a program that was ended by SIGINT or SIGPIPE.
INTERRUPTED, NOBODY_READS = 130, 141


def exit_code(error: Exception) -> int:
    """What an error says of the checkpoint: that it is damaged, or that it could not be read at all."""
    if isinstance(error, UnsafeMetadataError) or not isinstance(error, IntegrityError):
        return UNREADABLE
    # Metadata of a format newer than this program is sound: only then something else was expected.
    return DAMAGED if error.expected is None else UNREADABLE

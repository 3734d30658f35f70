"""What the exit codes of ``holdfast`` mean, and which of them an error leads to."""

from holdfast.errors import IntegrityError, MetadataFormatError, UnsafeMetadataError

__all__ = ["DAMAGED", "FINE", "INTERRUPTED", "NOBODY_READS", "UNREADABLE", "exit_code"]

FINE, DAMAGED, UNREADABLE = 0, 1, 3
"""2 is wrong usage, and argparse's."""

# As a shell reports a program that was ended by SIGINT or SIGPIPE.
INTERRUPTED, NOBODY_READS = 130, 141


def exit_code(error: Exception) -> int:
    """What an error says of the checkpoint: that it is damaged, or that it could not be read at all."""
    if isinstance(error, UnsafeMetadataError) or not isinstance(error, IntegrityError):
        return UNREADABLE
    # Metadata of a format newer than this program is sound: only then another one was expected.
    is_newer = isinstance(error, MetadataFormatError) and error.expected is not None
    return UNREADABLE if is_newer else DAMAGED

"""The names of a checkpoint's files, and which of them belong to whom."""

import re

from holdfast._format.metadata_file import FILE_NAME

__all__ = ["is_data_file", "is_leftover", "is_rank_metadata", "shows_a_checkpoint"]

_DATA_FILE = re.compile(r"__\d+_\d+(-[0-9a-f]+)?\.distcp")
_RANK_METADATA = re.compile(r"__\d+\.metadata")
_LEFTOVER = re.compile(r"(__\d+)?\.metadata\.(.*\.)?tmp")


def is_data_file(name: str, rank: int | None = None) -> bool:
    """Whether a file holds items: of any save, ours or torch's; of ``rank`` only, if one is given."""
    return bool(_DATA_FILE.fullmatch(name)) and (rank is None or name.startswith(f"__{rank}_"))


def is_rank_metadata(name: str) -> bool:
    """Whether it is the metadata of one rank's own part."""
    return bool(_RANK_METADATA.fullmatch(name))


def is_leftover(name: str) -> bool:
    """Whether it is metadata that a crash kept from getting its name."""
    return bool(_LEFTOVER.fullmatch(name))


def shows_a_checkpoint(name: str) -> bool:
    """Whether a file of that name means that there is a checkpoint, of whatever form."""
    return name == FILE_NAME or is_rank_metadata(name) or name.endswith(".safetensors")

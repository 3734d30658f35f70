"""Owns the names of a checkpoint's files: how they are made, and what a name tells of a file.

| name | file |
|---|---|
| ``.metadata`` | the checkpoint that ranks wrote together |
| ``__{rank}.metadata`` | the part that a rank wrote for itself |
| ``__{rank}_{n}-{save}.distcp`` | data; torch's own data files have no ``-{save}``; a save may put two
hexadecimal digits before it, which differ from file to file |
| ``.{save}.lease`` | a save that is under way, see ``holdfast._io.lease`` |
| ``{name}.{random}.tmp`` | a file that has not got its name yet |

``{save}`` is the beginning of the save's id, ``SAVE_DIGITS`` hexadecimal digits.
"""

import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast._human_units import some_of

METADATA = ".metadata"
"""The file that makes a checkpoint exist."""

SAVE_DIGITS = 12

_DATA_FILE = re.compile(r"(?:[0-9a-f]{2})?__(\d+)_(\d+)(?:-([0-9a-f]+))?\.distcp")
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_LEASE = re.compile(r"\.([0-9a-f]+)\.lease")
# torch's temporary files have no random part.
_LEFTOVER = re.compile(r"(?:(?:__\d+)?\.metadata|\.[0-9a-f]+\.lease)\.(?:.*\.)?tmp")


@dataclass(frozen=True)
class DataFile:
    """What the name of a data file tells.

    Attributes:
        rank: The rank that wrote it.
        number: Its number among the files of that rank.
        save: The save that it belongs to; None in torch's naming.
    """

    rank: int
    number: int
    save: str | None


def metadata_name(rank: int | None = None) -> str:
    """The name of the metadata of a joint checkpoint, or of the part of one rank."""
    return METADATA if rank is None else f"__{rank}{METADATA}"


def metadata_rank(name: str) -> int | None:
    """The rank whose own part ``name`` is the metadata of; None if it is not such a name."""
    found = _RANK_METADATA.fullmatch(name)
    return int(found[1]) if found else None


def data_file_name(rank: int, number: int, save_id: str, *, spread: bool = False) -> str:
    """The name of data file ``number`` of a rank in a save.

    Args:
        rank: The rank.
        number: The number of the file.
        save_id: The save.
        spread: Whether to put two digits before it that differ from file to file.
    """
    name = f"__{rank}_{number}-{save_id[:SAVE_DIGITS]}.distcp"
    return f"{zlib.crc32(name.encode()) & 0xFF:02x}{name}" if spread else name


def parse_data_file(name: str) -> DataFile | None:
    """What the name of a data file tells, ours or torch's; None if it is no such name."""
    found = _DATA_FILE.fullmatch(name)
    return DataFile(int(found[1]), int(found[2]), found[3]) if found else None


def describe_data_files(names: Iterable[str]) -> str | None:
    """The data files among ``names`` in words: how many, of which saves; None if there are none."""
    files = {name: file for name in names if (file := parse_data_file(name))}
    if not files:
        return None
    saves = sorted({file.save for file in files.values() if file.save})
    of = [f"of save {', '.join(saves)}"] if saves else []
    strangers = sorted(name for name, file in files.items() if not file.save)
    if strangers:
        of.append(f"in torch's naming ({some_of(strangers, 3)})")
    return f"{len(files)} data file{'s' if len(files) > 1 else ''} {' and '.join(of)}"


def is_plain_name(name: str) -> bool:
    """Whether a file name stays in the checkpoint's folder wherever it is joined."""
    return name not in ("", ".", "..") and not any(character in name for character in "/\\\0")


def lease_name(save_id: str) -> str:
    """The name of the lease of a save."""
    return f".{save_id[:SAVE_DIGITS]}.lease"


def save_of_lease(name: str) -> str | None:
    """The save whose lease ``name`` is, as in the names of its data files; None if it is no lease."""
    found = _LEASE.fullmatch(name)
    return found[1] if found else None


def temporary_name(name: str) -> str:
    """A new name for a file that is to be renamed to ``name``."""
    return f"{name}.{os.urandom(8).hex()}.tmp"


def is_leftover(name: str) -> bool:
    """Whether ``name`` is that of metadata or a lease that did not get its name, in our naming or torch's."""
    return _LEFTOVER.fullmatch(name) is not None


def is_read_through_links(name: str) -> bool:
    """Whether a file is read through a symbolic link, too: caches of downloads keep models so."""
    return name.endswith((".safetensors", ".safetensors.index.json"))


def shows_a_checkpoint(name: str) -> bool:
    """Whether a file of that name means that there is a checkpoint, of whatever form."""
    return name == METADATA or metadata_rank(name) is not None or name.endswith(".safetensors")

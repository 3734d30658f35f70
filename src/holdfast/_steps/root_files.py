"""Owns the small files of a run's root: what they are called, what they say, and how they are written.

| name | says |
|---|---|
| ``.holdfast-pinned-{folder}`` | the step is not to be deleted |
| ``.holdfast-damaged-{version}-{folder}`` | a restore found it damaged; for that commit file only |
| ``.holdfast-deleting-{folder}`` | which files of a folder are being deleted |
| ``.holdfast-abandoned.json`` | the steps that the run had before it went back to an earlier one |
| ``.holdfast-run.json`` | what the user wants to keep of the run |
| ``.holdfast-index.json`` | metrics of the steps; only a cache |

A checkpoint is sound and complete without any of them. ``{version}`` is 8 digits that differ after the
checkpoint was saved again.
"""

import json
import logging
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from holdfast._io.store import ByteStore, FileFacts, FileSource
from holdfast.errors import CheckpointError, MetadataFormatError

logger = logging.getLogger(__name__)

PREFIX = ".holdfast-"
ABANDONED, RUN, INDEX = f"{PREFIX}abandoned.json", f"{PREFIX}run.json", f"{PREFIX}index.json"
_PINNED, _DAMAGED, _DELETING = f"{PREFIX}pinned-", f"{PREFIX}damaged-", f"{PREFIX}deleting-"
_MOST_BYTES = 64 << 20


def pinned_name(folder: str) -> str:
    """The file that pins a step."""
    return f"{_PINNED}{folder}"


def damaged_name(folder: str, version: str) -> str:
    """The file that says that a step is damaged, as long as its commit file is of this version."""
    return f"{_DAMAGED}{zlib.crc32(version.encode()):08x}-{folder}"


def marks_of_damage(folder: str, files: Iterable[str]) -> list[str]:
    """The files among those of a root that say that a folder is damaged, or was."""
    return [name for name in files if name.startswith(_DAMAGED) and name[len(_DAMAGED) + 9 :] == folder]


def deleting_name(folder: str) -> str:
    """The file that says that a step is being deleted."""
    return f"{_DELETING}{folder}"


def steps_being_deleted(files: Iterable[str]) -> list[str]:
    """The folders whose deletion has begun, given the files of a root."""
    return [name.removeprefix(_DELETING) for name in files if name.startswith(_DELETING)]


@dataclass(frozen=True)
class Abandoned:
    """The steps that a run left behind when it went back to an earlier one.

    Attributes:
        steps: Folders, with the versions of their commit files.
        pending: Those that the save of ``folder`` leaves behind, once it has committed.
        folder: The step that the run goes back to, if that may not have been committed.
        before: The version of its commit file before that save; None if there was none.
    """

    steps: dict[str, str] = field(default_factory=dict)
    pending: dict[str, str] = field(default_factory=dict)
    folder: str | None = None
    before: str | None = None

    def has_committed(self, folders: Mapping[str, FileFacts | None]) -> bool:
        """Whether the step that the run goes back to was saved since, given the commit files."""
        commit = folders.get(self.folder) if self.folder else None
        return commit is not None and commit.version != self.before

    def settled(self, folders: Mapping[str, FileFacts | None]) -> dict[str, str]:
        """The steps that are left behind, given the commit files that there are."""
        return {**self.steps, **(self.pending if self.has_committed(folders) else {})}


def read_abandoned(root: FileSource, files: Iterable[str]) -> Abandoned:
    """Read which steps the run left behind when it went back.

    Raises:
        MetadataFormatError: The note is damaged. Without it nobody knows which step is the newest, and the
            newest must not be deleted.
        OSError: It cannot be read.
    """
    if ABANDONED not in files:
        return Abandoned()
    path = f"{root.url}/{ABANDONED}"
    try:
        return msgspec.json.decode(bytes(root.read(ABANDONED, max_bytes=_MOST_BYTES)), type=Abandoned)
    except FileNotFoundError:
        return Abandoned()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MetadataFormatError(
            f"{path} is damaged ({error}). It says which steps the run left behind when it went back to an "
            "earlier one. Delete it if the step with the highest number is the newest; otherwise delete the "
            "steps that were left behind first.",
            path=path,
        ) from None


def write_abandoned(root: ByteStore, abandoned: Abandoned) -> None:
    """Note what the run has left behind."""
    write_json(root, ABANDONED, asdict(abandoned))


def read_json(root: FileSource, name: str) -> dict[str, Any]:
    """A file of a root as a dict; empty if there is none, or if it cannot be read, which is logged."""
    try:
        found = json.loads(bytes(root.read(name, max_bytes=_MOST_BYTES)))
    except FileNotFoundError:
        return {}
    except (OSError, CheckpointError, ValueError, RecursionError) as error:
        logger.warning("%s/%s cannot be read, and is ignored: %s", root.url, name, error)
        return {}
    return found if isinstance(found, dict) else {}


def write_json(root: ByteStore, name: str, document: dict[str, Any], *, durable: bool = True) -> None:
    """Replace a file of a root, in one step."""
    root.replace(name, json.dumps(document).encode(), durable=durable)

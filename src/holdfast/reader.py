"""Looking into any checkpoint: keys, tensors by slice, objects; without a process group or a model."""

import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from typing_extensions import Self

from holdfast._any_format import open_checkpoint
from holdfast._contents.findings import Damage, Findings
from holdfast._contents.inventory import Inventory, ObjectEntry, TensorEntry
from holdfast._contents.nested_state import build_nested
from holdfast._contents.opening import Checkpoint
from holdfast._contents.value_reader import ObjectPart, Part, ValueReader
from holdfast._contents.verifying import check_checkpoint, limits
from holdfast._transfer_record import TransferRecord
from holdfast._view.array_kinds import Framework, arrays_of
from holdfast._view.checkpoint_facts import (
    CheckpointMetadata,
    ChunkInfo,
    ObjectInfo,
    TensorInfo,
    VerifyResult,
    as_html,
    as_text,
    info_of,
    metadata_of,
)
from holdfast._view.indexing import select
from holdfast._view.object_values import ObjectDecoder
from holdfast._view.saved_tensor import SavedTensor, plan_read
from holdfast.errors import IncompleteCheckpointError, UnknownKeyError, UsageError
from holdfast.progress_display import ProgressOption

__all__ = [
    "CheckpointMetadata",
    "CheckpointView",
    "ChunkInfo",
    "Damage",
    "ObjectInfo",
    "SavedTensor",
    "TensorInfo",
    "VerifyResult",
    "open",
]

_MOST_COMPARED = 10_000
"""Among how many keys one is looked for that is like a misspelt one."""


def open(  # noqa: A001 - read as holdfast.open; nothing here opens a file by that name
    place: str | os.PathLike[str],
    *,
    framework: Framework = "torch",
    rank: int | None = None,
    verify: bool = True,
    allow_pickle: bool = False,
    safe_globals: Iterable[Callable[..., Any] | type] = (),
) -> "CheckpointView":
    """Open a checkpoint for reading, whatever wrote it. Its metadata is read now, values when asked for.

    Four formats are read: checkpoints of Holdfast, of ``torch.distributed.checkpoint``, files of
    ``torch.save``, and safetensors, a folder or one file. Neither a process group nor a model is needed. No
    code of the checkpoint is run.

    With ``framework="numpy"`` torch is not imported, but for files of ``torch.save`` and for objects that are
    more than plain data.

    Args:
        place: A folder, a file, or a URL.
        framework: What tensors are returned as: tensors of torch, or arrays of numpy.
        rank: For a checkpoint that ranks saved each for itself: whose part to open.
        verify: Whether what is read is compared with checksums. Without that, a small slice reads only its
            own bytes, and not the whole blocks that it lies in.
        allow_pickle: Let objects be unpickled freely, running whatever code the checkpoint holds.
        safe_globals: Classes and functions that objects of the checkpoint may use.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        UsageError: Ranks saved each for itself, and no rank is given; or no storage serves such a place.
        IntegrityError: Its metadata is damaged.
        UnsafeMetadataError: Its metadata asks for code to be run.

    Example:
        >>> with holdfast.open("run/step-1000") as ckpt:  # doctest: +SKIP
        ...     rows = ckpt["model.embed.weight"][10:20, :]
    """
    allowed = tuple(safe_globals)
    checkpoint = open_checkpoint(place, verify=verify, allow_pickle=allow_pickle, safe_globals=allowed)
    names = dict(checkpoint.metadata_names)
    if rank is None and None not in names and len(names) > 1:
        raise UsageError(
            f"{checkpoint.url}: ranks saved each for itself: say whose part to open, rank= one of "
            f"{', '.join(map(str, sorted(number for number in names if number is not None)))}",
            path=checkpoint.url,
        )
    wanted = rank if rank is not None else next(iter(names))
    if wanted not in names:
        raise UsageError(f"{checkpoint.url} has no part of rank {rank}", path=checkpoint.url, found=rank)
    part = checkpoint.read(wanted, names[wanted])
    objects = ObjectDecoder(framework, allow_pickle=allow_pickle, safe_globals=allowed)
    return CheckpointView(checkpoint, part, framework=framework, verify=verify, objects=objects)


class CheckpointView(Mapping[str, Any]):
    """A checkpoint, for reading: a mapping from flat keys to values; ``holdfast.open`` makes one.

    ``view[key]`` is a ``SavedTensor``, of which nothing is read until it is indexed, or the value of an
    object, which is read at once. Every byte that is read is checked, as far as the format has checksums: of
    a tensor that torch wrote only if all of it is read, of safetensors files if Holdfast wrote them.

    Any number of threads may use a view at the same time. It is a context manager that closes its files.

    Attributes:
        url: Where the checkpoint is.
        metadata: What is known of the checkpoint as a whole.
        record: What the save did, by phase and rank; None if that is not recorded.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        part: Inventory,
        *,
        framework: Framework,
        verify: bool,
        objects: ObjectDecoder,
    ) -> None:
        self._checkpoint = checkpoint
        self._part = part
        self._framework = framework
        self._arrays = arrays_of(framework)
        self._objects = objects
        self._reader = ValueReader(checkpoint.store, verify=verify)
        self._entries = {entry.key: entry for entry in part.entries}
        self.url = checkpoint.url
        self.metadata: CheckpointMetadata = metadata_of(part)
        self.record: TransferRecord | None = part.record

    def __getitem__(self, key: str) -> Any:
        """The tensor under a key, which is read when it is indexed, or the value of an object.

        Raises:
            UnknownKeyError: There is no such key. It is a KeyError.
            UnsafeMetadataError: The object needs something that is not allowed; nothing of it was run.
            IntegrityError: It is damaged.
        """
        entry = self._entry(key)
        if isinstance(entry, TensorEntry):
            return SavedTensor(entry, self._reader, self._framework)
        part = _object_part(entry)
        self._reader.read([part])
        return self._objects.decode(part, self.url)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def info(self, key: str) -> TensorInfo | ObjectInfo:
        """What is known of a key without reading its value: shape, dtype, size, chunks, which rank wrote it.

        Raises:
            UnknownKeyError: There is no such key.
        """
        return info_of(self._part, self._entry(key))

    def find(self, *patterns: str) -> list[str]:
        """The keys that match one of these, in the order of the checkpoint.

        A pattern is a key, a name with keys below it (``model.layers.0``), or a glob with ``*``, ``?`` and
        ``[...]``; ``*`` also matches dots.

        Raises:
            UnknownKeyError: A pattern matches no key.
        """
        found: set[str] = set()
        for pattern in patterns:
            is_wanted = re.compile(fnmatch.translate(pattern)).match
            matching = [
                key
                for key in self._entries
                if key == pattern or key.startswith(f"{pattern}.") or is_wanted(key) is not None
            ]
            if not matching:
                raise self._missing(pattern)
            found.update(matching)
        return [key for key in self._entries if key in found]

    def read(self, keys: str | Iterable[str] | None = None) -> dict[Any, Any]:
        """Read many values at once, in parallel, as the nested state that was saved.

        Args:
            keys: Keys, names with keys below them, or globs, as for ``find``. None for everything.

        Returns:
            Dicts and lists as they were saved, with tensors and other values. Of a list of which only some
            entries are read, the others are None.

        Raises:
            UnknownKeyError: One of them matches no key.
            IntegrityError: A value is damaged.
            IncompleteCheckpointError: A file is missing.
        """
        patterns = [keys] if isinstance(keys, str) else keys
        entries = [self._entries[key] for key in (self if patterns is None else self.find(*patterns))]
        leaves: dict[str, Any] = {}
        parts: list[Part] = []
        objects: list[ObjectPart] = []
        for entry in entries:
            if isinstance(entry, ObjectEntry):
                objects.append(_object_part(entry))
                leaves[entry.key] = None
            else:
                leaves[entry.key], wanted = plan_read(entry, select(entry.shape, ...), self._arrays)
                parts += wanted
        self._reader.read([*parts, *objects])
        for each in objects:
            leaves[each.key] = self._objects.decode(each, self.url)
        return self._nested(leaves, whole=patterns is None)

    def tree(self) -> dict[Any, Any]:
        """The nested state with a ``TensorInfo`` or ``ObjectInfo`` for each value. Nothing is read."""
        return self._nested({key: self.info(key) for key in self}, whole=True)

    def verify(self, *, progress: ProgressOption = None) -> VerifyResult:
        """Read every byte of the checkpoint, and tell of all that is not as it was saved.

        Args:
            progress: As for ``holdfast.load``.
        """
        found = Findings()
        parts = check_checkpoint(self._checkpoint, found, progress=progress)
        return VerifyResult(found.sorted_damages(), found.notes, limits(parts, found), found.checked_nbytes)

    def close(self) -> None:
        """Close the files. Whatever is read after this raises UsageError. Does nothing the second time."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return as_text(self.url, self._part)

    def _repr_html_(self) -> str:
        return as_html(self.url, self._part)

    def _entry(self, key: str) -> TensorEntry | ObjectEntry:
        try:
            return self._entries[key]
        except KeyError:
            raise self._missing(key) from None

    def _missing(self, key: str) -> UnknownKeyError:
        # Only a misspelt key needs it. Comparing 10,000 keys takes a tenth of a second.
        import difflib  # noqa: PLC0415

        if any(other.startswith(f"{key}.") for other in self._entries):
            text = f"{self.url}: {key!r} has other keys below it: read({key!r}) gives all of them"
            return UnknownKeyError(text, key=str(key), path=self.url)
        asked = str(key).casefold()
        last = asked.rpartition(".")[2]
        folded = {other.casefold(): other for other in self._entries}
        if not any(last in other for other in folded):
            ends = {other.rpartition(".")[2]: None for other in folded}
            last = next(iter(difflib.get_close_matches(last, [*ends][:_MOST_COMPARED], n=1)), "")
        alike = [other for other in folded if last in other]
        near = difflib.get_close_matches(asked, alike[:_MOST_COMPARED], n=3, cutoff=0.5) or alike[:3]
        shown = ", ".join(folded[other] for other in near)
        hint = f"; there {'is' if len(near) == 1 else 'are'} {shown}" if near else ": it is empty"
        if len(near) < len(self):
            hint += f" and {len(self) - len(near):,} more"
        return UnknownKeyError(f"{self.url} has no key {key!r}{hint}", key=str(key), path=self.url)

    def _nested(self, leaves: dict[str, Any], *, whole: bool) -> dict[Any, Any]:
        paths, containers = self._part.paths, self._part.containers
        if not whole:
            above = {path[:depth] for key in leaves if (path := paths.get(key)) for depth in range(len(path))}
            containers = {path: known for path, known in containers.items() if path in above}
        return build_nested(leaves, paths, containers, hold_parts=self._objects.hold_parts)


def _object_part(entry: ObjectEntry) -> ObjectPart:
    if entry.item is None:
        raise IncompleteCheckpointError(
            f"{entry.key} is named by the metadata, but stored nowhere: the save was not complete",
            key=entry.key,
        )
    return ObjectPart(entry.key, entry.item)

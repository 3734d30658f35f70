"""The manifest: what a checkpoint holds, and where each item lies and how it is checked, as columns.

``docs/format.md`` describes every column.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import add, gt, mul, ne
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast._format.description import OBJECT, TENSOR, Description, find_bad_box, ints
from holdfast._format.item_table import COLUMNS, Column, StorageInfo
from holdfast._format.names import is_plain_name
from holdfast._format.stored_record import StoredRecord
from holdfast.errors import MetadataFormatError, NewerFormatError, UsageError

FORMAT_MAJOR = 1
"""Raised when an older reader would misread; a reader refuses a newer one."""
FORMAT_MINOR = 3
"""Raised when something is added that an older reader may ignore."""
CHECKSUM_ALGORITHM = "crc32"
"""How blocks and containers are checked: the CRC-32 of zlib and zip."""
MOST_USER_BYTES = 1 << 20
"""How much the caller of a save may keep in the manifest: every load reads it."""

_ITEMSIZE = {"q": 8, "I": 4}
_BY_NAME = {declared.name: declared for declared in COLUMNS.values()}


if TYPE_CHECKING:

    class _ItemColumns(Description):
        """Has a column ``item_*`` of bytes for each entry of ``COLUMNS``."""

        def __getattr__(self, name: str) -> bytes: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

else:
    _ItemColumns = msgspec.defstruct(
        "_ItemColumns",
        [
            (declared.in_manifest, bytes, b"") if declared.may_be_left_out else (declared.in_manifest, bytes)
            for declared in COLUMNS.values()
        ],
        bases=(Description,),
        kw_only=True,
    )


class Manifest(_ItemColumns, kw_only=True):
    """Everything about a checkpoint: what it holds, and where each item lies.

    Columns are ``bytes``. Those of items, ``item_*``, are declared by the item table.
    """

    version: tuple[int, int] = (FORMAT_MAJOR, FORMAT_MINOR)
    save_id: str
    created_ns: int
    software: str
    world_size: int
    block_size: int
    checksum_algorithm: str = CHECKSUM_ALGORITHM
    checkpoint_id: str | None = None
    modules: list[str] = msgspec.field(default_factory=list)
    file_names: list[str]
    file_nbytes: bytes
    transforms: list[list[str]]
    saves: list[str | None] = msgspec.field(default_factory=lambda: [None])
    checksums: bytes
    paths: list[Any]
    containers: list[Any]
    planner_pickle: bytes | None = None
    record: StoredRecord | None = None
    user_metadata: bytes = b""

    def item_column(self, name: str) -> "memoryview[int]":
        """A column of the item table by its name there, as integers."""
        declared = _BY_NAME[name]
        data = getattr(self, declared.in_manifest)
        if not data and declared.may_be_left_out:
            data = bytes(len(self.item_offsets) // 8 * _ITEMSIZE[declared.typecode])
        return ints(data, declared.typecode)

    def items(self) -> Iterator[StorageInfo]:
        """Every item, in the order of the keys and, within a key, of its chunks."""
        return StoredItems(self).records()


class StoredItems:
    """The items of a manifest by the number of their row.

    Attributes:
        manifest: Where they are described.
        files: For each row the number of its file in ``manifest.file_names``.
        offsets: Where its item begins.
        nbytes: How long it is; -1 where torch's metadata has a chunk and no place for it.
        payload_offsets: Where the checked bytes begin in it.
        payload_nbytes: How many they are; -1 for what torch wrote.
        checksums: The checksums of all blocks of all items.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.files = manifest.item_column("files")
        self.offsets = manifest.item_column("offsets")
        self.nbytes = manifest.item_column("nbytes")
        self.payload_offsets = manifest.item_column("payload_offsets")
        self.payload_nbytes = manifest.item_column("payload_nbytes")
        self.checksums = ints(manifest.checksums, "I")
        self._values = [self._reader(*field) for field in COLUMNS.items()]

    def _reader(self, field: str, declared: Column) -> Callable[[int], Any]:
        """Gives the value of a field for a row."""
        numbers = self.manifest.item_column(declared.name)
        if field == "checksums":
            return self._checksums_of
        if declared.listed_in is None:
            return numbers.__getitem__
        values = self._listed(declared.listed_in)
        return lambda row: values[numbers[row]]

    def _column(self, field: str, declared: Column) -> Iterable[Any]:
        """The values of a field for all rows: a pass in C where that can be had."""
        if field == "checksums":
            checksums = self.manifest.checksums
            return map(self._checksums_of, range(len(self))) if checksums else itertools.repeat(b"")
        numbers = self.manifest.item_column(declared.name)
        if declared.listed_in is None:
            return numbers
        return map(self._listed(declared.listed_in).__getitem__, numbers)

    def _listed(self, name: str) -> list[Any]:
        """What the numbers of a column refer to."""
        # An item without transforms says so by having no descriptors, as torch does.
        return [
            (tuple(entry) or None) if isinstance(entry, list) else entry
            for entry in getattr(self.manifest, name)
        ]

    def __len__(self) -> int:
        return len(self.offsets)

    @functools.cached_property
    def block_at(self) -> list[int]:
        """For each row the number of its first checksum; the last entry is the number of all."""
        return [0, *itertools.accumulate(self.manifest.item_column("blocks"))]

    def _checksums_of(self, row: int) -> bytes:
        return self.manifest.checksums[4 * self.block_at[row] : 4 * self.block_at[row + 1]]

    def record(self, row: int) -> StorageInfo:
        """An item as a record."""
        values: list[Any] = [*[value(row) for value in self._values], self.manifest.block_size]
        return StorageInfo(*values)

    def records(self) -> Iterator[StorageInfo]:
        """All items as records."""
        columns = [self._column(*field) for field in COLUMNS.items()]
        return map(StorageInfo, *columns, itertools.repeat(self.manifest.block_size))


def encode(manifest: Manifest) -> bytes:
    """The manifest as MessagePack."""
    return msgspec.msgpack.encode(manifest)


def decode(data: bytes | memoryview, *, path: str) -> Manifest:
    """Read a manifest and check that it makes sense, so that nobody after this needs to.

    Args:
        data: The manifest.
        path: Where it was found, for errors.

    Raises:
        MetadataFormatError: It is damaged, of a newer major version, or has checksums of another kind.
    """
    _check_version(data, path)
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from error
    if manifest.checksum_algorithm != CHECKSUM_ALGORITHM:
        raise NewerFormatError(
            f"{path} has checksums of the kind {manifest.checksum_algorithm!r}; this version of holdfast "
            f"knows {CHECKSUM_ALGORITHM!r} only. Update holdfast to read it.",
            path=path,
            expected=CHECKSUM_ALGORITHM,
            found=manifest.checksum_algorithm,
        )
    problem = (
        _find_bad_table(manifest)
        or _find_bad_name(manifest)
        or _find_bad_reference(manifest)
        or _find_bad_item(manifest)
        or find_bad_box(manifest)
        or (manifest.record and manifest.record.find_problem())
    )
    if problem:
        raise _damaged(path, problem)
    return manifest


def file_sizes_in(data: bytes | memoryview, *, path: str) -> dict[str, int]:
    """The data files that a manifest speaks of, each with the bytes that it must have at least.

    Raises:
        MetadataFormatError: It is damaged, or of a newer major version.
    """
    head = _check_version(data, path)
    if len(head.file_nbytes) != 8 * len(head.file_names):
        raise _damaged(path, "its files and their sizes do not match")
    return dict(zip(head.file_names, ints(head.file_nbytes, "q"), strict=True))


def encode_user_metadata(values: Mapping[str, Any] | None) -> bytes:
    """What the caller of a save wants to keep with the checkpoint, as the manifest has it.

    Raises:
        UsageError: It is not a dict of plain values, or is too large.
    """
    if not values:
        return b""
    try:
        data = msgspec.msgpack.encode(dict(values))
        msgspec.msgpack.decode(data, type=dict[str, Any])
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise UsageError(
            "user_metadata must be a dict of names with plain values (numbers, text, bytes, lists, dicts): "
            f"{error}"
        ) from error
    if len(data) > MOST_USER_BYTES:
        raise UsageError(
            f"user_metadata has {len(data)} bytes, and at most {MOST_USER_BYTES} are kept in the metadata of "
            "a checkpoint. Put large values into the state.",
            expected=MOST_USER_BYTES,
            found=len(data),
        )
    return data


def decode_user_metadata(data: bytes, *, path: str) -> dict[str, Any]:
    """What ``encode_user_metadata`` was given.

    Raises:
        MetadataFormatError: It is damaged.
    """
    try:
        return msgspec.msgpack.decode(data, type=dict[str, Any]) if data else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, f"its user metadata is not readable: {error}") from error


def user_metadata_in(data: bytes | memoryview, *, path: str) -> dict[str, Any]:
    """What the caller of the save has kept in a manifest, without a look at anything else in it.

    Raises:
        MetadataFormatError: It is damaged, or of a newer major version.
    """
    return decode_user_metadata(_check_version(data, path).user_metadata, path=path)


class _Head(msgspec.Struct):
    version: tuple[int, int]
    file_names: list[str] = msgspec.field(default_factory=list)
    file_nbytes: bytes = b""
    user_metadata: bytes = b""


def _check_version(data: bytes | memoryview, path: str) -> _Head:
    try:
        head = msgspec.msgpack.decode(data, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from error
    if head.version[0] > FORMAT_MAJOR:
        raise NewerFormatError(
            f"{path} is of format {head.version[0]}.{head.version[1]}; this version of holdfast reads up to "
            f"{FORMAT_MAJOR}.x. Update holdfast to read it.",
            path=path,
            expected=FORMAT_MAJOR,
            found=head.version[0],
        )
    return head


def _damaged(path: str, problem: str) -> MetadataFormatError:
    return MetadataFormatError(f"{path} does not describe a checkpoint: {problem}", path=path)


def _find_bad_table(m: Manifest) -> str | None:
    """The first thing that cannot be about a manifest as a whole; None if there is nothing."""
    if m.block_size <= 0 or m.world_size < 0:
        return "its block size or world size is not a positive number"
    tensors = m.kinds.count(TENSOR)
    if len(m.kinds) != len(m.keys) or tensors + m.kinds.count(OBJECT) != len(m.keys):
        return "its keys and kinds do not match"
    if len(set(m.keys)) != len(m.keys):
        return "a key stands in it twice"
    if len(m.tensor_ndims) != tensors or len(m.tensor_chunks) != 4 * tensors:
        return "its tensor columns are of different lengths"
    counts = ints(m.tensor_chunks, "I")
    boxes = sum(map(mul, counts, m.tensor_ndims))
    rows = sum(counts) + len(m.keys) - tensors
    wanted: list[tuple[str, str, int]] = [
        ("file_nbytes", "q", len(m.file_names)),
        ("tensor_properties", "I", tensors),
        ("tensor_shapes", "q", sum(m.tensor_ndims)),
        ("chunk_offsets", "q", boxes),
        ("chunk_lengths", "q", boxes),
    ]
    wanted += [
        (declared.in_manifest, declared.typecode, rows)
        for declared in COLUMNS.values()
        if getattr(m, declared.in_manifest) or not declared.may_be_left_out
    ]
    for name, typecode, length in wanted:
        data = getattr(m, name)
        if len(data) != length * _ITEMSIZE[typecode]:
            return f"its column {name} has {len(data)} bytes, expected {length * _ITEMSIZE[typecode]}"
        # The highest byte of a little-endian number holds its sign: a hundredth of the time of min().
        if typecode == "q" and not data[7::8].isascii():
            return f"its column {name} has a negative number"
    return None


def _find_bad_name(m: Manifest) -> str | None:
    foreign = next((name for name in m.file_names if not is_plain_name(name)), None)
    if foreign is not None:
        return f"the file name {foreign!r} leads out of the checkpoint"
    if len(m.paths) not in (0, len(m.keys)):
        return "its paths do not match its keys"
    return None


def _find_bad_reference(m: Manifest) -> str | None:
    if max(ints(m.tensor_properties, "I"), default=-1) >= len(m.properties):
        return "a tensor refers to properties that are not there"
    for declared in COLUMNS.values():
        listed_in = declared.listed_in
        if listed_in and max(m.item_column(declared.name), default=-1) >= len(getattr(m, listed_in)):
            return f"an item refers to {listed_in} that are not there"
    blocks = sum(m.item_column("blocks"))
    if len(m.checksums) != 4 * blocks:
        return f"it has {len(m.checksums)} bytes of checksums, expected {4 * blocks}"
    return None


def _find_bad_item(m: Manifest) -> str | None:
    # Each check is one pass in C over a million rows; which row it was is looked for only if one is bad.
    files, sizes = m.item_column("files"), ints(m.file_nbytes, "q").tolist()
    nbytes, payloads = m.item_column("nbytes").tolist(), m.item_column("payload_nbytes").tolist()
    ends = map(add, m.item_column("offsets"), nbytes)
    if (row := _first(map(gt, ends, map(sizes.__getitem__, files)))) is not None:
        return f"an item reaches beyond the end of {m.file_names[files[row]]}"
    payload_ends = map(add, m.item_column("payload_offsets"), payloads)
    if (row := _first(map(gt, payload_ends, nbytes))) is not None:
        return f"a payload reaches beyond its item in {m.file_names[files[row]]}"
    blocks = [-(-nbytes // m.block_size) for nbytes in payloads]
    if (row := _first(map(ne, blocks, m.item_column("blocks")))) is not None:
        return f"an item in {m.file_names[files[row]]} has the wrong number of checksums"
    return None


def _first(bad: Iterable[bool]) -> int | None:
    return next(itertools.compress(itertools.count(), bad), None)

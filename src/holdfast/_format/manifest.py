"""The manifest: what a checkpoint holds, and where each item lies and how it is checked, as columns.

``docs/format.md`` describes every column.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from operator import add, gt, mul, ne
from typing import Any, NamedTuple

import msgspec

from holdfast._format.description import (
    OBJECT,
    TENSOR,
    Description,
    column,
    concatenated,
    find_bad_box,
    ints,
)
from holdfast.errors import MetadataFormatError

__all__ = [
    "FORMAT_MAJOR",
    "FORMAT_MINOR",
    "OBJECT",
    "TENSOR",
    "Item",
    "Manifest",
    "column",
    "concatenated",
    "decode",
    "encode",
    "ints",
]

FORMAT_MAJOR = 1
"""Raised when an older reader would misread; a reader refuses a newer one."""
FORMAT_MINOR = 0
"""Raised when something is added that an older reader may ignore."""

_ITEMSIZE = {"q": 8, "I": 4, "B": 1}


class Item(NamedTuple):
    """Where one chunk or one object lies, and how to check it.

    Attributes:
        file: The name of its file, relative to the checkpoint.
        offset: Where the item begins in the file.
        nbytes: How long it is, container and all.
        descriptors: The transforms, in the order in which a reader undoes them; None if there are none.
        payload_offset: Where the checked bytes begin, counted from the item's beginning. For a tensor
            that is stored raw these are its elements in row-major order.
        payload_nbytes: How many they are.
        raw_nbytes: The item's length once its transforms are undone.
        checksums: CRC-32 of each block of the checked bytes, as little-endian 32-bit integers.
        wrap_checksum: CRC-32 of what is around them: the item's bytes before the payload, then after.
    """

    file: str
    offset: int
    nbytes: int
    descriptors: tuple[str, ...] | None
    payload_offset: int
    payload_nbytes: int
    raw_nbytes: int
    checksums: bytes
    wrap_checksum: int


class Manifest(Description, kw_only=True):
    """Everything about a checkpoint: what it holds, and where each item lies. Columns are ``bytes``."""

    version: tuple[int, int] = (FORMAT_MAJOR, FORMAT_MINOR)
    save_id: str
    created_ns: int
    software: str
    world_size: int
    block_size: int
    checkpoint_id: str | None = None
    modules: list[str] = msgspec.field(default_factory=list)
    file_names: list[str]
    file_nbytes: bytes
    transforms: list[list[str]]
    item_files: bytes
    item_offsets: bytes
    item_nbytes: bytes
    item_payload_offsets: bytes
    item_payload_nbytes: bytes
    item_raw_nbytes: bytes
    item_transforms: bytes
    item_blocks: bytes
    item_wrap_checksums: bytes
    checksums: bytes
    paths: list[Any]
    containers: list[Any]
    planner_pickle: bytes | None = None

    def items(self) -> Iterator[Item]:
        """Every item, in the order of the keys and, within a key, of its chunks."""
        return map(Item, *self.item_columns())

    def item_columns(self) -> list[Iterable[Any]]:
        """The fields of all items, field by field in the order of :class:`Item`."""
        # An item without transforms says so by having no descriptors, as torch does.
        descriptors = [tuple(stack) or None for stack in self.transforms]
        ends = itertools.accumulate(4 * blocks for blocks in ints(self.item_blocks, "I"))
        starts_and_ends = itertools.pairwise(itertools.chain([0], ends))
        return [
            map(self.file_names.__getitem__, ints(self.item_files, "I")),
            ints(self.item_offsets, "q"),
            ints(self.item_nbytes, "q"),
            map(descriptors.__getitem__, ints(self.item_transforms, "I")),
            ints(self.item_payload_offsets, "q"),
            ints(self.item_payload_nbytes, "q"),
            ints(self.item_raw_nbytes, "q"),
            (self.checksums[start:end] for start, end in starts_and_ends),
            ints(self.item_wrap_checksums, "I"),
        ]


def encode(manifest: Manifest) -> bytes:
    """The manifest as MessagePack."""
    return msgspec.msgpack.encode(manifest)


def decode(
    data: bytes | memoryview, *, path: str, rows_are_sound: Callable[[Manifest], bool] | None = None
) -> Manifest:
    """Read a manifest and check that it makes sense, so that nobody after this needs to.

    Args:
        data: The manifest.
        path: Where it was found, for errors.
        rows_are_sound: A quicker way than ours to know that no row is bad, given columns of the right
            lengths without negative numbers. Whatever it does not call sound is looked at here.

    Raises:
        MetadataFormatError: It is damaged, or of a newer major version.
    """
    try:
        version = msgspec.msgpack.decode(data, type=_Version).version
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from error
    if version[0] > FORMAT_MAJOR:
        raise MetadataFormatError(
            f"{path} is of format {version[0]}.{version[1]}; this version of holdfast reads up to "
            f"{FORMAT_MAJOR}.x. Update holdfast to read it.",
            path=path,
            expected=FORMAT_MAJOR,
            found=version[0],
        )
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from error
    problem = _find_bad_table(manifest) or _find_bad_name(manifest)
    if problem is None and not (rows_are_sound and rows_are_sound(manifest)):
        problem = _find_bad_reference(manifest) or _find_bad_item(manifest) or find_bad_box(manifest)
    if problem:
        raise _damaged(path, problem)
    return manifest


class _Version(msgspec.Struct):
    version: tuple[int, int]


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
    wanted = {
        "file_nbytes": ("q", len(m.file_names)),
        "tensor_properties": ("I", tensors),
        "tensor_shapes": ("q", sum(m.tensor_ndims)),
        "chunk_offsets": ("q", boxes),
        "chunk_lengths": ("q", boxes),
        "item_files": ("I", rows),
        "item_offsets": ("q", rows),
        "item_nbytes": ("q", rows),
        "item_payload_offsets": ("q", rows),
        "item_payload_nbytes": ("q", rows),
        "item_raw_nbytes": ("q", rows),
        "item_transforms": ("I", rows),
        "item_blocks": ("I", rows),
        "item_wrap_checksums": ("I", rows),
    }
    for name, (typecode, length) in wanted.items():
        data = getattr(m, name)
        if len(data) != length * _ITEMSIZE[typecode]:
            return f"its column {name} has {len(data)} bytes, expected {length * _ITEMSIZE[typecode]}"
        # The highest byte of a little-endian number holds its sign: a thirtieth of the time of min().
        if typecode == "q" and max(data[7::8], default=0) >= 0x80:
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
    if max(ints(m.item_transforms, "I"), default=-1) >= len(m.transforms):
        return "an item refers to transforms that are not there"
    if max(ints(m.item_files, "I"), default=-1) >= len(m.file_names):
        return "an item refers to a file that is not there"
    blocks = sum(ints(m.item_blocks, "I"))
    if len(m.checksums) != 4 * blocks:
        return f"it has {len(m.checksums)} bytes of checksums, expected {4 * blocks}"
    return None


def is_plain_name(name: str) -> bool:
    """Whether a file name stays in the checkpoint's folder wherever it is joined."""
    return name not in ("", ".", "..") and not any(character in name for character in "/\\\0")


def _find_bad_item(m: Manifest) -> str | None:
    # Each check is one pass in C over a million rows; which row it was is looked for only if one is bad.
    files, sizes = ints(m.item_files, "I"), ints(m.file_nbytes, "q").tolist()
    payloads = ints(m.item_payload_nbytes, "q").tolist()
    ends = map(add, ints(m.item_offsets, "q"), ints(m.item_nbytes, "q"))
    if (row := _first(map(gt, ends, map(sizes.__getitem__, files)))) is not None:
        return f"an item reaches beyond the end of {m.file_names[files[row]]}"
    payload_ends = map(add, ints(m.item_payload_offsets, "q"), payloads)
    if (row := _first(map(gt, payload_ends, ints(m.item_nbytes, "q")))) is not None:
        return f"a payload reaches beyond its item in {m.file_names[files[row]]}"
    blocks = [-(-nbytes // m.block_size) for nbytes in payloads]
    if (row := _first(map(ne, blocks, ints(m.item_blocks, "I")))) is not None:
        return f"an item in {m.file_names[files[row]]} has the wrong number of checksums"
    return None


def _first(bad: Iterable[bool]) -> int | None:
    return next(itertools.compress(itertools.count(), bad), None)

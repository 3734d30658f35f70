"""Owns small neighbours of a file that are read at once: which items, and the piece of the file in memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from typing_extensions import Buffer

from holdfast._contents.open_files import StoredFile
from holdfast._format.item_table import StorageInfo
from holdfast._io.file_access import FileReader
from holdfast._io.store import StoreTraits
from holdfast._io.streams import byte_view

_SMALL = 256 << 10

T = TypeVar("T")


def group_neighbours(
    items: Iterable[T], info_of: Callable[[T], StorageInfo], traits: StoreTraits
) -> Iterator[list[T]]:
    """Items in the order of their files and offsets: small neighbours together, everything else alone."""
    group: list[T] = []
    first = last = None
    for item in items:
        info = info_of(item)
        if first is not None and last is not None:
            is_near = (
                info.relative_path == first.relative_path
                and info.offset - last.end <= traits.read_gap_nbytes
                and info.end - first.offset <= traits.read_nbytes
            )
            if info.length > _SMALL or last.length > _SMALL or not is_near:
                yield group
                group, first = [], None
        group.append(item)
        first, last = first or info, info
    if group:
        yield group


class ReadWindow(FileReader):
    """A piece of a file that is in memory.

    Args:
        path: The file.
        begin: Where in the file the piece begins. Offsets of reads are those of the file.
        content: The piece.
    """

    def __init__(self, path: str, begin: int, content: bytearray) -> None:
        self.path = path
        self.nbytes = begin + len(content)
        self._begin = begin
        self._content = memoryview(content)

    def read_into(self, offset: int, buffer: Buffer) -> None:
        """Fill ``buffer``; see FileReader. What lies before the piece must not be asked for."""
        view = byte_view(buffer)
        self._check_range(offset, len(view))
        at = offset - self._begin
        view[:] = self._content[at : at + len(view)]


def read_window(file: StoredFile, infos: Sequence[StorageInfo], *, verify: bool) -> ReadWindow:
    """Read items of a file that are neighbours at once. Each must still be checked when it is taken out."""
    begin, end = infos[0].offset, max(info.end for info in infos)
    content = bytearray(end - begin)
    file.read_neighbours(
        begin,
        memoryview(content),
        lambda: [info.payload for info in infos if verify and info.is_checked],
    )
    return ReadWindow(file.path, begin, content)

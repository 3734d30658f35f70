"""Owns finding out what a torch.save file holds: its values, and where the bytes of each lie."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from holdfast._format.torch_item_zip import Archive, ArchiveRecord
from holdfast._io import pool
from holdfast._io.file_access import FileReader
from holdfast._objects.encode import encode_object
from holdfast._objects.saved_state import SavedState, StorageRecord
from holdfast._plan.flatten import Structure, flatten
from holdfast._storage.strided_bytes import StridedTensor
from holdfast.errors import MetadataFormatError, UnsafeMetadataError

_MOST_RECORDS = 1 << 24
_LONGEST_PICKLE = 4 << 30
_IN_FILE = True
# An expanded tensor has more elements than are stored. More than this, and the file is an attack.
_MOST_REPEATED = 1 << 30


class SavedItem(NamedTuple):
    """One value of the file.

    Attributes:
        in_file: Whether its bytes are a run of the file itself; else they lie in the second file.
        offset: Where they begin.
        nbytes: How many they are.
        crc32: Their CRC-32; None if it is not known.
        tensor: If the value is a tensor: where its elements lie in the file.
        requires_grad: Whether it is a tensor that gets a gradient.
    """

    in_file: bool
    offset: int
    nbytes: int
    crc32: int | None = None
    tensor: StridedTensor | None = None
    requires_grad: bool = False


class SavedContents(NamedTuple):
    """All that a file holds.

    Attributes:
        nbytes: The size of the file.
        structure: How its values are nested.
        items: The values by flat key.
        others: What the second file consists of: where each part begins, and what it is.
        others_nbytes: The size of the second file.
        storages: The storages of its tensors, in the order of the file.
    """

    nbytes: int
    structure: Structure
    items: dict[str, SavedItem]
    others: list[tuple[int, "StridedTensor | bytes | UnsafeMetadataError"]]
    others_nbytes: int
    storages: list["StoredRun"]


class StoredRun(NamedTuple):
    """A storage in the file: where it begins, how long it is, and its CRC-32, or None if it has none."""

    start: int
    nbytes: int
    crc32: int | None


def read_contents(
    file: FileReader,
    path: str,
    *,
    safe_globals: Sequence[Callable[..., Any] | type] = (),
    allow_pickle: bool = False,
) -> SavedContents:
    """What a file holds; see ``TorchSaveSource`` for the arguments and errors."""
    return _Reading(file, path, safe_globals, allow_pickle=allow_pickle).contents()


class _Reading:
    """Finds out what a file holds; see ``SavedContents``."""

    def __init__(
        self,
        file: FileReader,
        path: str,
        safe_globals: Sequence[Callable[..., Any] | type],
        *,
        allow_pickle: bool,
    ) -> None:
        self.file = file
        self.path = path
        _refuse_other_formats(file, path)
        self.archive = Archive(self._read_at, file.nbytes, path=path, key=None, most_records=_MOST_RECORDS)
        self.state = SavedState(
            self._read_pickle(), path=path, safe_globals=safe_globals, allow_pickle=allow_pickle
        )
        self.has_checksums = self.archive.records["data.pkl"].crc32 != 0
        self.starts: dict[str, int] = {}
        self.others: list[tuple[int, StridedTensor | bytes | UnsafeMetadataError]] = []
        self.others_nbytes = 0

    def contents(self) -> SavedContents:
        root = self.state.root
        if self.state.refused is not None:
            raise UnsafeMetadataError(
                f"{self.path}: holds a {self.state.refused} as a whole, which only its own code can make; "
                "no code of a file is run. Save its state_dict() instead. If you trust the file, pass "
                "safe_globals=[...] or allow_pickle=True.",
                path=self.path,
                found=self.state.refused,
            )
        if not isinstance(root, dict):
            raise MetadataFormatError(
                f"{self.path}: holds a {type(root).__name__}, and only a dict can be taken for a checkpoint. "
                'Save {"name": value} instead.',
                path=self.path,
                expected="dict",
                found=type(root).__name__,
            )
        leaves, structure, _ = flatten(root, lambda value: self.state.storage_of(value) is not None)
        self._find_storages(leaves)
        items = {key: self._item(key, value) for key, value in leaves.items()}
        storages = [self._run(key, start) for key, start in self.starts.items()]
        return SavedContents(
            self.file.nbytes, structure, items, self.others, self.others_nbytes, sorted(storages)
        )

    def _run(self, key: str, start: int) -> StoredRun:
        record = self.archive.records[f"data/{key}"]
        return StoredRun(start, record.nbytes, record.crc32 if self.has_checksums else None)

    def _read_at(self, offset: int, nbytes: int) -> bytes:
        data = bytearray(min(nbytes, self.file.nbytes - offset))
        self.file.read_into(offset, data)
        return bytes(data)

    def _read_pickle(self) -> bytes:
        records = self.archive.records
        if "constants.pkl" in records or "data.pkl" not in records:
            raise MetadataFormatError(
                f"{self.path}: is a zip archive, but not one of torch.save (TorchScript and other archives "
                "are not read)",
                path=self.path,
                expected="torch.save",
            )
        order = records.get("byteorder")
        if order is not None and order.nbytes < 16 and self.archive.read_record(order) != b"little":
            raise MetadataFormatError(
                f"{self.path}: was written on a machine with another byte order. Load it with torch.load, "
                "and save it here.",
                path=self.path,
                expected="little",
            )
        pickled = records["data.pkl"]
        if not pickled.plain or pickled.nbytes > _LONGEST_PICKLE:
            self.archive.damaged("data.pkl is compressed, or far too long")
        return self.archive.read_record(pickled)

    def _find_storages(self, leaves: dict[str, Any]) -> None:
        """Find where the storages of all tensors begin, several at a time: each is a request or two."""
        wanted = {record.key: record for value in leaves.values() if (record := self.state.storage_of(value))}
        checked = [self._record_of(record) for record in wanted.values()]
        jobs = [partial(self.archive.content_at, record) for record in checked]
        self.starts = dict(zip(wanted, pool.run(jobs, threads=8), strict=True))

    def _record_of(self, storage: StorageRecord) -> ArchiveRecord:
        record = self.archive.records.get(f"data/{storage.key}")
        if record is None:
            self.archive.damaged(f"record data/{storage.key} is missing")
        if not record.plain or record.nbytes != storage.nbytes:
            self.archive.damaged(
                f"record data/{storage.key} has {record.nbytes} bytes, its storage needs {storage.nbytes}"
            )
        return record

    def _item(self, key: str, value: Any) -> SavedItem:
        storage = self.state.storage_of(value)
        if storage is None:
            return self._object(key, value)
        tensor = StridedTensor(
            self.starts[storage.key] + value.storage_offset() * value.dtype.itemsize,
            value.dtype,
            tuple(value.shape),
            tuple(value.stride()),
            value.is_conj(),
            value.is_neg(),
        )
        if not tensor.is_row_major:
            return SavedItem(*self._place(tensor, tensor.nbytes), None, tensor, value.requires_grad)
        run = self._run(storage.key, self.starts[storage.key])
        crc32 = run.crc32 if tensor.nbytes == storage.nbytes else None
        return SavedItem(_IN_FILE, tensor.start, tensor.nbytes, crc32, tensor, value.requires_grad)

    def _object(self, key: str, value: Any) -> SavedItem:
        try:
            content = encode_object(key, self.state.with_elements(key, value, self._read_storage)).getvalue()
        except UnsafeMetadataError as refused:
            # Reading its one byte raises the error: the rest of the file can still be read.
            return SavedItem(*self._place(refused, 1))
        return SavedItem(*self._place(content, len(content)))

    def _read_storage(self, storage: StorageRecord) -> bytearray:
        content = bytearray(storage.nbytes)
        self.file.read_into(self.archive.content_at(self._record_of(storage)), content)
        return content

    def _place(
        self, what: "StridedTensor | bytes | UnsafeMetadataError", nbytes: int
    ) -> tuple[bool, int, int]:
        """A place for it in the second file."""
        begin = self.others_nbytes
        self.others.append((begin, what))
        self.others_nbytes += nbytes
        if self.others_nbytes > _MOST_REPEATED + 8 * self.file.nbytes:
            self.archive.damaged(
                f"its expanded tensors have {self.others_nbytes} bytes, and the file {self.file.nbytes}"
            )
        return False, begin, nbytes


def _refuse_other_formats(file: FileReader, path: str) -> None:
    head = bytearray(min(4, file.nbytes))
    file.read_into(0, head)
    if head.startswith(b"PK\3\4"):
        return
    is_old = head.startswith(b"\x80\x02")
    hint = (
        "It may be one of torch before 1.6: load it with torch.load, and save it again."
        if is_old
        else "It is damaged, or something else."
    )
    raise MetadataFormatError(
        f"{path}: is not a file that torch.save writes today. {hint}",
        path=path,
        expected="zip archive" if is_old else None,
    )

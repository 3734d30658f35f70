"""Reads torch's ``.metadata`` pickles into checked, torch-free records, without running anything in them."""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from holdfast._format.dtypes import DTYPES
from holdfast._format.torch_pickle_machine import DAMAGE, Machine
from holdfast._format.torch_pickle_names import (
    ALLOWED,
    CHUNK,
    INDEX,
    METADATA,
    OBJECT,
    PROPERTIES,
    STORAGE_INFO,
    STORAGE_META,
    TENSOR,
    Built,
    IndexKey,
    Record,
    Symbol,
    make_size,
)
from holdfast._format.torch_pickle_records import (
    Chunk,
    Ints,
    StorageKey,
    TorchMetadata,
    TorchObject,
    TorchProperties,
    TorchStorage,
    TorchStorageMeta,
    TorchTensor,
)
from holdfast._format.torch_pickle_rows import Rows
from holdfast.errors import IntegrityError, MetadataFormatError, UnsafeMetadataError

_T = TypeVar("_T")

_LIMIT = 2**63
_MAX_DEPTH = 100
_SCALARS = frozenset({str, int, bool, float, bytes, bytearray, type(None)})
_SEQUENCES = frozenset({list, tuple, set, frozenset})
_MAPPINGS = frozenset({dict, OrderedDict})
_AN_OBJECT = TorchObject()


def read_torch_metadata(data: bytes | memoryview, *, path: str = ".metadata") -> TorchMetadata:
    """Read the pickle that torch 2.0 or later, or ``write_torch_metadata``, wrote; protocols 2 to 5.

    Whatever the bytes are, no code of theirs runs, nothing is imported, and time and memory stay in
    proportion to their number. What follows the pickle is ignored. Guaranteed of the result: every type
    is as declared; every number is in 0 to 2**63 - 1, also the bytes of a whole tensor and the end of
    every stored range; each chunk has its tensor's number of dimensions and lies within its shape; each path
    is relative, without ``..``, and names nothing outside its folder. Not checked: whether the chunks
    cover the tensor, and whether every chunk has a storage row.

    Args:
        data: The content of the file.
        path: The file's name, for messages.

    Raises:
        UnsafeMetadataError: The pickle asks for a class or function outside the allow-list, or a file
            outside the checkpoint. An unknown class in ``planner_data`` counts too.
        TruncatedFileError: The pickle has no end.
        MetadataFormatError: Anything else is wrong.
    """
    return _read(data, path, _Checker.metadata)


def read_plain_pickle(data: bytes | memoryview, *, path: str) -> Any:
    """Read a pickle of plain data: dict, list, tuple, set, str, bytes, numbers, None, nested up to 100 deep.

    As safe as ``read_torch_metadata``, and with the same errors; a ``torch.Size`` comes as a tuple, a path
    as a str.
    """
    return _read(data, path, _Checker.plain_data)


def _read(data: bytes | memoryview, path: str, check: Callable[["_Checker", Any], _T]) -> _T:
    try:
        machine = Machine(bytes(data), path, ALLOWED)
        rows = Rows(machine.data, machine.stack, machine.marks, machine.memo)
        machine.read_rows = rows.read
        return check(_Checker(path, len(data), rows.checked_sizes), machine.run())
    except IntegrityError:
        raise
    except DAMAGE as error:
        raise MetadataFormatError(
            f"{path} is not a pickle of plain data as torch writes it: {type(error).__name__}: {error}. The "
            "file is damaged, or something else wrote it.",
            path=path,
        ) from error


class _Checker:
    """Turns what the machine built into records, and raises for all that torch would not have written."""

    def __init__(self, path: str, size: int, checked_sizes: set[int]) -> None:
        self._path = path
        self._size = self._uncharged = size
        self._checked_sizes = checked_sizes
        self._checked_paths: set[str] = set()

    def metadata(self, root: object) -> TorchMetadata:
        fields = self._fields(root, METADATA, None)
        entries = self._typed(fields.get("state_dict_metadata"), dict, None, "state_dict_metadata")
        storage = fields.get("storage_data")
        version = fields.get("version")
        return TorchMetadata(
            {key: self._entry(key, value) for key, value in entries.items()},
            {} if storage is None else self._storage_table(self._typed(storage, dict, None, "storage_data")),
            self.plain_data(fields.get("planner_data")),
            self._storage_meta(fields.get("storage_meta")),
            None if version is None else self._typed(version, str, None, "version"),
        )

    def _entry(self, key: object, value: object) -> TorchTensor | TorchObject:
        if type(key) is not str:
            self._refuse(None, f"a key is a {type(key).__name__}, expected a str")
        if type(value) is Built and value.record is OBJECT:
            return _AN_OBJECT
        fields = self._fields(value, TENSOR, key)
        properties = self._tensor_properties(fields.get("properties"), key)
        shape = self._checked_dims(fields.get("size"), key, "shape")
        if DTYPES[properties.dtype].itemsize * math.prod(shape) >= _LIMIT:
            self._refuse(key, f"its shape {_shown(shape)} takes more than 2**63 bytes")
        chunks = self._typed(fields.get("chunks"), list, key, "chunks")
        self._charge(key, len(chunks))
        return TorchTensor(properties, shape, [self._chunk(chunk, shape, key) for chunk in chunks])

    def _chunk(self, value: object, shape: Ints, key: str) -> Chunk:
        if type(value) is tuple:
            raw_offsets, raw_lengths = value
        else:
            fields = self._fields(value, CHUNK, key)
            raw_offsets, raw_lengths = fields.get("offsets"), fields.get("sizes")
        offsets = self._checked_dims(raw_offsets, key, "offsets")
        lengths = self._checked_dims(raw_lengths, key, "lengths")
        if not len(offsets) == len(lengths) == len(shape):
            self._refuse(
                key, f"a chunk has {len(offsets)} offsets and {len(lengths)} lengths, its shape {len(shape)}"
            )
        for offset, length, dim in zip(offsets, lengths, shape, strict=True):
            if offset + length > dim:
                self._refuse(
                    key,
                    f"the chunk at {_shown(offsets)} of {_shown(lengths)} reaches outside {_shown(shape)}",
                )
        return offsets, lengths

    def _charge(self, key: str, count: int) -> None:
        # In an honest pickle each member of a list takes a byte at least, and the list belongs to one record.
        # Through the memo, one list could be given to every key, and be checked and copied for each.
        self._uncharged -= count
        if self._uncharged < 0:
            self._refuse(key, "its lists have more members than a file of this size can hold")

    def _checked_dims(self, value: Any, key: str | None, name: str) -> Ints:
        if id(value) in self._checked_sizes:
            return value  # type: ignore[no-any-return]
        try:
            return make_size(value)
        except (TypeError, ValueError) as error:
            self._refuse(key, f"its {name} are not a torch.Size: {error}")

    def _tensor_properties(self, value: object, key: str) -> TorchProperties:
        if type(value) is TorchProperties:
            return value
        if (
            type(value) is not Built
            or value.record is not PROPERTIES
            or value.state is None
            or len(value.state) != 5
        ):
            self._refuse(key, "its properties are not TensorProperties")
        dtype, layout, requires_grad, memory_format, pin_memory = value.state
        return TorchProperties(
            self._symbol(dtype, "dtype", key),
            self._symbol(layout, "layout", key),
            self._typed(requires_grad, bool, key, "requires_grad"),
            self._symbol(memory_format, "memory_format", key),
            self._typed(pin_memory, bool, key, "pin_memory"),
        )

    def _storage_table(self, rows: dict[Any, Any]) -> dict[StorageKey, TorchStorage]:
        table: dict[StorageKey, TorchStorage] = {}
        for index, info in rows.items():
            if type(index) is IndexKey:
                key, offsets = index
                found: StorageKey = (key, offsets)
            else:
                found = self._storage_key(index)
            if found in table:
                self._refuse(found[0], f"its chunk at {_shown(found[1])} is stored twice")
            table[found] = self._storage(info, found[0])
        return table

    def _storage_key(self, value: object) -> StorageKey:
        fields = self._fields(value, INDEX, None)
        key = self._typed(fields.get("fqn"), str, None, "the fqn of a MetadataIndex")
        offsets = fields.get("offset")
        return key, None if offsets is None else self._checked_dims(offsets, key, "offsets")

    def _storage(self, value: object, key: str) -> TorchStorage:
        if type(value) is not TorchStorage:
            fields = self._fields(value, STORAGE_INFO, key)
            descriptors = fields.get("transform_descriptors") or ()
            if type(descriptors) not in (list, tuple):
                self._refuse(key, "its transform_descriptors are not a list")
            self._charge(key, len(descriptors))
            if not all(type(name) is str for name in descriptors):
                self._refuse(key, "its transform_descriptors are not all str")
            value = TorchStorage(
                self._typed(fields.get("relative_path"), str, key, "relative_path"),
                self._typed(fields.get("offset"), int, key, "the offset in the file"),
                self._typed(fields.get("length"), int, key, "the length in the file"),
                tuple(descriptors),
            )
        path, offset, nbytes, _ = value
        if path not in self._checked_paths:
            self._check_path(path, key)
            self._checked_paths.add(path)
        if offset < 0 or nbytes < 0 or offset + nbytes >= _LIMIT:
            self._refuse(
                key, f"it is stored in {_shown(nbytes)} bytes at {_shown(offset)}, which no file has"
            )
        return value

    def _check_path(self, path: str, key: str) -> None:
        parts = path.split("/")
        try:
            path.encode()
        except UnicodeEncodeError:
            parts = [""]
        if (
            not {"", ".", ".."}.isdisjoint(parts)
            or not {"\0", "\\"}.isdisjoint(path)
            # A drive's letter makes a path on Windows leave the folder.
            or path[1:2] == ":"
        ):
            raise UnsafeMetadataError(
                f"{self._path} stores {_shown(key)} in {_shown(path)}, which is not a plain path inside the "
                "checkpoint's folder. Nothing was read from there.",
                key=key,
                path=self._path,
                found=path,
            )

    def _storage_meta(self, value: object) -> TorchStorageMeta | None:
        if value is None:
            return None
        fields = self._fields(value, STORAGE_META, None)
        names = (fields.get("checkpoint_id"), fields.get("save_id"), fields.get("load_id"))
        modules = self._typed(fields.get("modules", []), list, None, "modules")
        if any(type(name) is not str for name in modules) or any(
            type(name) not in (str, type(None)) for name in names
        ):
            self._refuse(None, "its storage_meta has something else than str")
        return TorchStorageMeta(names[0], names[1], names[2], tuple(modules))

    def plain_data(self, data: Any) -> Any:
        """Return the data if it is plain, does not contain itself, and is not far larger than the file."""
        # Through the memo, a few bytes can stand for a tree that has more leaves than there are atoms.
        budget = 1_000_000 + 4 * self._size
        level = [data]
        for _ in range(_MAX_DEPTH):
            deeper: list[Any] = []
            for value in level:
                kind = type(value)
                if kind in _SCALARS:
                    continue
                if kind in _MAPPINGS:
                    deeper.extend(value)
                    deeper.extend(value.values())
                elif kind in _SEQUENCES:
                    deeper.extend(value)
                else:
                    raise UnsafeMetadataError(
                        f"{self._path} has {_described(value)} where only dict, list, tuple, set, str, "
                        "bytes, numbers and None may be. Nothing was run.",
                        path=self._path,
                        found=_described(value),
                    )
                if len(deeper) > budget:
                    self._refuse(None, "its plain data is far larger than the file")
            if not deeper:
                return data
            budget -= len(deeper)
            level = deeper
        return self._refuse(None, f"its plain data is nested more than {_MAX_DEPTH} deep")

    def _fields(self, value: object, record: Record, key: str | None) -> dict[str, Any]:
        if type(value) is not Built or value.record is not record or value.state is None:
            self._refuse(key, f"it has {_described(value)} where a {record.name} should be")
        return value.state  # type: ignore[no-any-return]

    def _symbol(self, value: object, kind: str, key: str) -> str:
        if type(value) is not Symbol or value.kind != kind:
            self._refuse(key, f"its {kind} is {_described(value)}")
        return value.name

    def _typed(self, value: Any, kind: type[_T], key: str | None, name: str) -> _T:
        if type(value) is not kind:
            self._refuse(key, f"{name} is {_described(value)}, expected a {kind.__name__}")
        return value

    def _refuse(self, key: str | None, reason: str) -> NoReturn:
        about = "" if key is None else f", key {_shown(key)}"
        raise MetadataFormatError(
            f"{self._path}{about}: {reason}. The file is damaged, or something else than torch wrote it.",
            key=key,
            path=self._path,
        )


def _described(value: object) -> str:
    if type(value) is Built:
        return f"a {value.record.name}"
    return f"a {type(value).__name__}"


def _shown(value: object) -> str:
    # Hostile numbers may have more digits than Python is willing to print.
    if type(value) is int and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    text = repr(value[:200]) if type(value) is str else repr(value)
    return text if len(text) <= 300 else text[:300] + "..."

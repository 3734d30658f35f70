"""Owns the way from an item, ours or torch's, to where its tensor's bytes lie and what they mean.

An item is a zip archive with a pickle in it, which describes the tensor. Nothing that the pickle names is
imported or called: stand-ins note the facts that torch's calls carry. A pickle that asks for anything else
does not describe a plain tensor.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from holdfast._format.dtypes import DTYPES, TYPED_STORAGES, UNTYPED_STORAGE
from holdfast._format.torch_item_zip import Archive
from holdfast._format.torch_pickle_machine import DAMAGE, Machine
from holdfast._format.torch_pickle_names import ORDERED_DICT, SIZE, Call, Symbol, make_size
from holdfast._geometry import reach_of
from holdfast.errors import IntegrityError

# The pickle of a plain tensor takes some 200 bytes, and 20 more for each dimension.
_LONGEST_PICKLE = 64 * 1024


class TensorLayout(NamedTuple):
    """Where a tensor's elements lie in an item.

    Element ``i`` is at ``payload_offset + itemsize * (storage_offset + sum(i * strides))`` of the item, and
    every element is inside the payload.

    Attributes:
        dtype: The dtype's name, without ``torch.``.
        shape: Elements per dimension.
        strides: Elements between neighbours; torch keeps the memory format, so not always row-major.
        storage_offset: The payload's element at which the tensor begins.
        conj: The elements stand for their complex conjugates.
        neg: The elements stand for their negatives.
        payload_offset: The payload's first byte, counted from the item's.
        payload_nbytes: How long the payload is.
        crc32: The CRC-32 of the whole payload, or None if the item was saved without checksums.
        byteorder: The byte order of each element.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    conj: bool
    neg: bool
    payload_offset: int
    payload_nbytes: int
    crc32: int | None
    byteorder: Literal["little", "big"]


def read_item_layout(
    read_at: Callable[[int, int], bytes], nbytes: int, *, path: str, key: str | None = None
) -> TensorLayout | None:
    """Find a tensor's bytes in an item, without reading them.

    Two or three reads of about a kilobyte, one for an item of up to 2560 bytes. Nothing of the item is
    run; whatever it declares is checked against ``nbytes``. The container is checked by its own
    checksums, the payload is not: compare ``crc32`` once it has been read.

    Args:
        read_at: Gives that many bytes from that offset in the item; fewer mean that the file ends there.
        nbytes: The item's length, transforms undone.
        path: The item's file, for messages.
        key: The item's key, for messages.

    Returns:
        None if the item holds something else than one plain strided tensor stored without compression:
        sparse, quantized, a subclass, with attributes of its own, or no tensor at all. Then
        ``torch.load(..., weights_only=True)`` decides.

    Raises:
        IntegrityError: The item is damaged or cut off; a subclass says how.
    """
    archive = Archive(read_at, nbytes, path=path, key=key)
    pickle_record = archive.records.get("data.pkl")
    if pickle_record is None:
        if not archive.records:
            return None
        archive.damaged("record data.pkl is missing")
    if not pickle_record.plain or pickle_record.nbytes > _LONGEST_PICKLE:
        return None
    tensor = _parse_tensor(archive.read_record(pickle_record))
    if tensor is None:
        return None
    byteorder = _read_byteorder(archive)
    payload = archive.records.get(f"data/{tensor.storage.key}")
    if payload is None:
        archive.damaged(f"record data/{tensor.storage.key} is missing")
    if byteorder is None or not payload.plain:
        return None
    itemsize = DTYPES[tensor.dtype].itemsize
    expected = tensor.storage.numel * (1 if tensor.storage.dtype is None else itemsize)
    if payload.nbytes != expected:
        archive.damaged(f"record {payload.name} has {payload.nbytes} bytes, its storage needs {expected}")
    needed = 0 if 0 in tensor.shape else tensor.storage_offset + reach_of(tensor.shape, tensor.strides)
    if needed * itemsize > payload.nbytes:
        archive.damaged(
            f"a tensor of shape {tensor.shape} and strides {tensor.strides} from element "
            f"{tensor.storage_offset} on does not fit {payload.nbytes} bytes"
        )
    crc32 = payload.crc32 if pickle_record.crc32 else None
    return TensorLayout(*tensor[1:], archive.content_at(payload), payload.nbytes, crc32, byteorder)


def _read_byteorder(archive: Archive) -> Literal["little", "big"] | None:
    record = archive.records.get("byteorder")
    if record is None:
        return "little"  # as torch takes it, unless it is told otherwise
    if not record.plain or record.nbytes > 16:
        return None
    content = archive.read_record(record)
    if content not in {b"little", b"big"}:
        archive.damaged(f"the byte order is {content!r}, not little or big")
    return "little" if content == b"little" else "big"


class _PickledStorage(NamedTuple):
    """A storage by reference: its record's key, and its length in elements; untyped ones count bytes."""

    dtype: str | None
    key: str
    numel: int


class _PickledTensor(NamedTuple):
    """What the pickle says of the tensor; numbers are in range, but not checked against the storage.

    All but the storage are the first fields of a ``TensorLayout``.
    """

    storage: _PickledStorage
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    conj: bool
    neg: bool


# Tensors of one dtype and shape have the same pickle: 0.1 microseconds in place of 40. Pickles of
# at most 64 KiB come here, so the cache takes 16 MiB at the very worst.
@lru_cache(maxsize=256)
def _parse_tensor(data: bytes) -> _PickledTensor | None:
    """What the pickle of a plain tensor says; None for any other pickle, and for what is no pickle."""
    try:
        found = Machine(data, "data.pkl", _ALLOWED, persistent=_find_storage).run()
    except (IntegrityError, *DAMAGE):
        return None
    return found if type(found) is _PickledTensor else None


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError("not a plain tensor")


def _find_storage(identity: Any) -> _PickledStorage:
    tag, storage, key, location, numel = identity
    _require(tag == "storage" and type(storage) is Symbol and storage.kind == "storage")
    _require(type(key) is str and type(location) is str)
    make_size((numel,))
    return _PickledStorage(_DTYPES_OF_STORAGES[storage.name], key, numel)


def _tensor_v2(storage: Any, *facts: Any) -> _PickledTensor:
    _require(type(storage) is _PickledStorage and storage.dtype is not None)
    return _tensor(storage, storage.dtype, *facts)


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *metadata: Any
) -> _PickledTensor:
    _require(type(storage) is _PickledStorage and storage.dtype is None)
    _require(type(dtype) is Symbol and dtype.kind == "dtype")
    return _tensor(storage, dtype.name, offset, shape, strides, grad, hooks, *metadata)


def _tensor(
    storage: _PickledStorage,
    dtype: str,
    offset: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any,
    hooks: Any,
    metadata: Any = None,
) -> _PickledTensor:
    _require(len(make_size(shape)) == len(make_size(strides)))
    make_size((offset,))
    _require(type(requires_grad) is bool and not hooks)
    bits = {} if metadata is None else metadata
    _require(type(bits) is dict and bits.keys() <= {"conj", "neg"})
    conj, neg = bits.get("conj", False) is True, bits.get("neg", False) is True
    return _PickledTensor(storage, dtype, shape, strides, offset, conj, neg)


def _parameter(tensor: Any, requires_grad: Any, hooks: Any, state: Any = None) -> _PickledTensor:
    _require(type(tensor) is _PickledTensor and type(requires_grad) is bool and not hooks and not state)
    return tensor  # type: ignore[no-any-return]


def _from_type(function: Any, tensor_type: Any, arguments: Any, state: Any) -> _PickledTensor:
    # With attributes of its own the tensor is more than its bytes.
    _require(type(tensor_type) is Symbol and tensor_type.kind == "class" and not state)
    # Not this function again: that could go on without end.
    _require(function in _REBUILD_TENSOR and type(arguments) is tuple)
    return function.make(*arguments)  # type: ignore[no-any-return]


_DTYPES_OF_STORAGES = {**{storage: dtype for dtype, storage in TYPED_STORAGES.items()}, UNTYPED_STORAGE: None}
_REBUILD_TENSOR = (Call("_rebuild_tensor_v2", _tensor_v2), Call("_rebuild_tensor_v3", _tensor_v3))
_ALLOWED: dict[tuple[str, str], Call | Symbol] = {
    **{("torch", name): Symbol("storage", name) for name in TYPED_STORAGES.values()},
    ("torch.storage", UNTYPED_STORAGE): Symbol("storage", UNTYPED_STORAGE),
    **{("torch", name): Symbol("dtype", name) for name, dtype in DTYPES.items() if dtype.storage},
    ("torch", "Tensor"): Symbol("class", "Tensor"),
    ("torch.nn.parameter", "Parameter"): Symbol("class", "Parameter"),
    ("torch", "Size"): SIZE,
    ("collections", "OrderedDict"): ORDERED_DICT,
    **{("torch._utils", rebuild.name): rebuild for rebuild in _REBUILD_TENSOR},
    ("torch._utils", "_rebuild_parameter"): Call("_rebuild_parameter", _parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Call("_rebuild_parameter_with_state", _parameter),
    ("torch._tensor", "_rebuild_from_type_v2"): Call("_rebuild_from_type_v2", _from_type),
}

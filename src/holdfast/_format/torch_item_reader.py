"""Owns the way from an item, ours or torch's, to where its tensor's bytes lie and what they mean."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from holdfast._format.dtypes import DTYPES
from holdfast._format.torch_item_pickle import NotPlainError, PickledTensor, parse_tensor
from holdfast._format.torch_item_zip import Archive

__all__ = ["TensorLayout", "read_item_layout"]

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
        payload_offset: The payload's first byte, counted from the item's.
        payload_nbytes: How long the payload is.
        crc32: The CRC-32 of the whole payload, or None if the item was saved without checksums.
        byteorder: The byte order of each element.
        conj: The elements stand for their complex conjugates.
        neg: The elements stand for their negatives.
        requires_grad: What the tensor said of itself; a checkpoint has no use for it.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    payload_offset: int
    payload_nbytes: int
    crc32: int | None
    byteorder: Literal["little", "big"]
    conj: bool
    neg: bool
    requires_grad: bool


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
    try:
        tensor = parse_tensor(archive.read_record(pickle_record))
    except NotPlainError:
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
    if _elements_needed(tensor) * itemsize > payload.nbytes:
        archive.damaged(
            f"a tensor of shape {tensor.shape} and strides {tensor.strides} from element "
            f"{tensor.storage_offset} on does not fit {payload.nbytes} bytes"
        )
    return TensorLayout(
        tensor.dtype,
        tensor.shape,
        tensor.strides,
        tensor.storage_offset,
        archive.content_at(payload),
        payload.nbytes,
        payload.crc32 if pickle_record.crc32 else None,
        byteorder,
        tensor.conj,
        tensor.neg,
        tensor.requires_grad,
    )


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


def _elements_needed(tensor: PickledTensor) -> int:
    """How many elements the storage must have for the tensor to lie in it."""
    if 0 in tensor.shape:
        return 0
    reach = sum([(length - 1) * stride for length, stride in zip(tensor.shape, tensor.strides, strict=True)])
    return tensor.storage_offset + reach + 1

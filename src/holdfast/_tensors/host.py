"""The bytes of tensors in the memory of the host, copied only where they do not lie there already."""

import ctypes
from collections.abc import Iterator, Sequence

import torch

from holdfast._io.streams import memory_at


def has_its_memory(tensor: torch.Tensor) -> bool:
    """Whether the storage of a tensor has all bytes of its elements: False if it was freed or cut.

    Then there is nothing at its address, or memory of others. It takes 0.4 microseconds.
    """
    nbytes: int = tensor.nbytes
    if nbytes == 0:
        return True
    if not tensor.is_contiguous():
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        nbytes = (last + 1) * tensor.itemsize
    end = tensor.storage_offset() * tensor.itemsize + nbytes
    return tensor.untyped_storage().nbytes() >= end and (tensor.data_ptr() != 0 or not tensor.is_cpu)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable; it keeps the tensor alive."""
    nbytes = tensor.numel() * tensor.itemsize
    if nbytes == 0:
        return memoryview(bytearray())
    # Not by numpy, which does not know every dtype.
    return memory_at(tensor.data_ptr(), nbytes, tensor)


def elements_of(
    content: memoryview, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], first: int = 0
) -> torch.Tensor:
    """Bytes as a tensor: elements from number ``first`` on that are ``strides`` apart."""
    # torch warns of memory that cannot be written.
    raw = torch.frombuffer(bytearray(content) if content.readonly else content, dtype=torch.uint8)
    whole = raw[: len(content) // dtype.itemsize * dtype.itemsize].view(dtype)
    return whole.as_strided(shape, strides, first)


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are its memory, in row-major order, readable by the host."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def copy_of(tensor: torch.Tensor) -> bytes:
    """The elements of a small tensor in row-major order."""
    if not is_plain_memory(tensor):
        return b"".join(host_pieces(tensor, tensor.nbytes))
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""


def host_pieces(tensor: torch.Tensor, max_bytes: int) -> Iterator[memoryview]:
    """The tensor's elements in row-major order, as one piece after the other.

    A contiguous CPU tensor is one piece, and is not copied. Of any other, at most ``max_bytes`` are copied
    at a time (or one element of the first dimensions, if that is larger and cannot be split): let go of a
    piece before asking for the next.
    """
    tensor = tensor.detach()
    if is_plain_memory(tensor):
        yield memory_of(tensor)
        return
    if tensor.dim() == 0 or tensor.numel() * tensor.itemsize <= max_bytes:
        # resolve_conj and resolve_neg write out what a lazy bit only promises.
        copied = tensor.resolve_conj().resolve_neg().to("cpu").contiguous()
        yield memory_of(copied)
        return
    row_bytes = tensor[0].numel() * tensor.itemsize
    rows = max(1, max_bytes // max(1, row_bytes))
    for start in range(0, tensor.shape[0], rows):
        part = tensor[start : start + rows]
        if rows == 1:
            yield from host_pieces(part[0], max_bytes)
        else:
            yield from host_pieces(part, max_bytes)

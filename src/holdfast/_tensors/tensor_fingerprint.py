"""Fingerprints of tensors: whether two ranks hold the same elements, without sending them.

A fingerprint is 16 bytes: 12 of a hash of dtype, shape and what was looked at, and the CRC-32 of the bytes
that were looked at. A difference of up to 32 bits in a row never goes unseen in them; any other one does with
a chance of 1 in 4 billion. It is no defence against someone who wants two tensors to look alike.
"""

import ctypes
import functools
import hashlib
from typing import Any

import torch

from holdfast._io.blocks import crc32
from holdfast._tensors.host import copy_of, host_pieces, is_plain_memory

SMALL = 64 << 10
"""Of a tensor of up to this many bytes, every element counts."""

_MOST_COPIED = 32 << 20
_RUNS = 64
_RUN_BYTES = 64  # a line of the cache: 64 of them are read in the time that 64 single elements take
_END_BYTES = 4096

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint_tensor(tensor: torch.Tensor, *, full: bool) -> bytes:
    """16 bytes that are equal for equal elements, dtypes and shapes.

    The elements count, bit by bit, in row-major order; where they lie (device, strides, conjugation still to
    be done) does not, nor does requires_grad. At most 32 MiB are copied at a time, and nothing of what lies
    contiguous in the memory of the host.

    Args:
        tensor: A strided tensor that has memory: not sparse, quantized, nested, sharded or meta.
        full: True looks at every byte, at the speed of CRC-32. False looks at no more than some 12 KiB of a
            tensor that is larger than :data:`SMALL`: both ends, and 64 places in between, which are the same
            for every tensor of that shape and dtype. A difference elsewhere is not seen.
    """
    if tensor.nbytes <= SMALL:
        head, memory = _small_form(tensor.dtype, tensor.shape)
        if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
            # 100,000 small tensors: 1.5 microseconds each, of which nearly all is spent on asking.
            crc = crc32(memory.from_address(tensor.data_ptr())) if tensor.numel() else 0
        else:
            crc = crc32(copy_of(tensor.detach()))
        return head + crc.to_bytes(4, "little")
    if full:
        crc = 0
        for piece in host_pieces(tensor, _MOST_COPIED):
            crc = crc32(piece, crc)
    elif is_plain_memory(tensor):
        crc = _sample_of_memory(tensor.detach())
    else:
        crc = _sample_of_elements(tensor.detach())
    return _head(tensor.dtype, tensor.shape, full=full) + crc.to_bytes(4, "little")


@functools.lru_cache(maxsize=4096)
def _small_form(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, "type[ctypes.Array[Any]]"]:
    """The first 12 bytes of the fingerprint, and a ctypes type for the memory, which takes long to make."""
    return _head(dtype, shape, full=True), ctypes.c_ubyte * (shape.numel() * dtype.itemsize)


def _head(dtype: torch.dtype, shape: torch.Size, *, full: bool) -> bytes:
    described = f"{dtype} {tuple(shape)} {full}"
    return hashlib.blake2b(described.encode(), digest_size=12).digest()


def _sample_of_memory(tensor: torch.Tensor) -> int:
    """The checksum of the sample, read from the memory of the host: some 10 microseconds."""
    count, itemsize = tensor.numel(), tensor.itemsize
    run, end, stride = _sample_sizes(count, itemsize)
    start = tensor.data_ptr()
    runs = tensor.as_strided((_RUNS, run), (stride, 1)).contiguous()
    crc = crc32(ctypes.string_at(start, end * itemsize))
    crc = crc32(ctypes.string_at(runs.data_ptr(), runs.nbytes), crc)
    return crc32(ctypes.string_at(start + (count - end) * itemsize, end * itemsize), crc)


def _sample_of_elements(tensor: torch.Tensor) -> int:
    """The checksum of the same sample of a tensor of any strides on any device."""
    if tensor.itemsize in _INTEGERS and not tensor.is_neg() and not tensor.is_complex():
        # Not every dtype can be indexed on every device; integers can.
        tensor = tensor.view(_INTEGERS[tensor.itemsize])
    places = _sample_places(tensor.shape, tensor.itemsize)
    return crc32(copy_of(tensor[tuple(places.to(tensor.device))]))


def _sample_sizes(count: int, itemsize: int) -> tuple[int, int, int]:
    """In elements: the length of a run, the length of each end, and from one run to the next."""
    run = max(1, _RUN_BYTES // itemsize)
    return run, _END_BYTES // itemsize, (count - run) // (_RUNS - 1)


@functools.lru_cache(maxsize=64)
def _sample_places(shape: torch.Size, itemsize: int) -> torch.Tensor:
    """For each dimension the indices of the sample's elements."""
    count = shape.numel()
    run, end, stride = _sample_sizes(count, itemsize)
    runs = torch.arange(_RUNS, device="cpu").unsqueeze(1) * stride + torch.arange(run, device="cpu")
    flat = torch.cat(
        [torch.arange(end, device="cpu"), runs.flatten(), torch.arange(count - end, count, device="cpu")]
    )
    return torch.stack(torch.unravel_index(flat, shape))

"""Owns the way of a staged state into another process: descriptors of shared memory instead of bytes."""

import io
import mmap
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast._staging.layout import Place, place_in
from holdfast._staging.structure import key_of, leaves_of
from holdfast._tensors.chunks import (
    dtype_of,
    find_chunk,
    global_shape,
    is_sharded,
    is_tensor,
    local_chunks,
    refuse_undescribable,
)
from holdfast.errors import PlanError, UsageError
from holdfast.metadata import MetadataIndex

__all__ = ["Descriptors", "HeldChunk", "HeldTensor", "describe", "rebuild"]


@dataclass(frozen=True)
class HeldChunk:
    """A box of a sharded tensor, and its elements."""

    offsets: torch.Size
    tensor: torch.Tensor


@dataclass(frozen=True)
class HeldTensor:
    """What stands for a sharded tensor in another process, which has neither the mesh nor the group.

    Attributes:
        shape: Of the whole tensor.
        dtype: Of its elements.
        chunks: What this rank holds of it.
    """

    shape: torch.Size
    dtype: torch.dtype
    chunks: tuple[HeldChunk, ...]


@dataclass(frozen=True)
class Descriptors:
    """A staged state without its tensors' bytes: pickles small, whatever the size of the tensors.

    Attributes:
        arena: The name of the memory: what ``rebuild`` looks up the file descriptor by.
        nbytes: The size of that memory.
        structure: The state as a pickle in which numbers stand for tensors.
        places: Where each tensor lies.
    """

    arena: str
    nbytes: int
    structure: bytes
    places: list[Place]


def describe(state: Any, base: torch.Tensor, arena: str) -> Descriptors:
    """Describe a state whose tensors lie in the memory of ``base``.

    Objects, and tensors that are not in that memory, are pickled by value.

    Raises:
        PlanError: A value cannot be pickled, or it cannot be known what a sharded tensor holds.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, base, state)
    try:
        pickler.dump(state)
    except PlanError:
        raise
    except Exception as error:
        raise _named(state, error) from error
    return Descriptors(arena, base.numel(), stream.getvalue(), pickler.places)


class _Pickler(pickle.Pickler):
    """Notes where each tensor lies, and writes its number instead."""

    def __init__(self, stream: io.BytesIO, base: torch.Tensor, state: Any) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self.places: list[Place] = []
        self._known: dict[int, Any] = {}
        self._state = state
        self._start = base.data_ptr()
        self._stop = self._start + base.numel()

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        known = self._known.get(id(obj))
        if known is None and is_sharded(obj):
            known = self._known[id(obj)] = self._sharded(obj)
        elif known is None and self._is_inside(obj):
            known = self._known[id(obj)] = self._number_of(obj)
        return known

    def _is_inside(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or not is_tensor(tensor):
            return False
        return tensor.numel() == 0 or self._start <= tensor.data_ptr() < self._stop

    def _number_of(self, tensor: torch.Tensor) -> int:
        offset = tensor.data_ptr() - self._start if tensor.numel() else 0
        self.places.append((offset, tensor.dtype, tuple(tensor.shape), tensor.stride()))
        return len(self.places) - 1

    def _sharded(self, value: torch.Tensor) -> tuple[Any, ...]:
        try:
            held = local_chunks(value)
        except PlanError:
            refuse_undescribable(key_of(self._state, value), value)
            raise
        chunks = [
            (tuple(chunk.offsets), self._number_of(find_chunk(value, MetadataIndex("", chunk.offsets))))
            for chunk in held
        ]
        return tuple(global_shape(value)), dtype_of(value), chunks


def _named(state: Any, error: Exception) -> PlanError:
    """The error that names the first value which cannot be pickled."""
    for key, value in leaves_of(state):
        if not isinstance(value, torch.Tensor) and not _is_picklable(value):
            return PlanError(
                f"{key}: a {type(value).__module__}.{type(value).__qualname__} cannot be pickled, and so not "
                f"be saved by another process: {error}. Leave it out of the state, or save in a thread.",
                key=key,
            )
    return PlanError(f"the state cannot be pickled, and so not be saved by another process: {error}")


def _is_picklable(value: Any) -> bool:
    try:
        pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - __reduce__ of strangers may raise anything
        return False
    return True


def rebuild(descriptors: Descriptors, fds: Mapping[str, int]) -> Any:
    """The state, around the same memory, in a process that has its descriptor. Nothing is copied.

    Sharded tensors become ``HeldTensor``. What is written to the tensors here is seen nowhere else. What the
    stager copies into the same memory later is seen here: drop the tensors before the lease is released.

    Args:
        descriptors: From ``StagedState.descriptors``, of a process that is trusted: they hold a pickle.
        fds: By the name of the arena, a descriptor of its memory in this process.

    Raises:
        UsageError: There is no descriptor of that arena.
    """
    if descriptors.arena not in fds:
        raise UsageError(
            f"no descriptor of the memory {descriptors.arena} was given", expected=descriptors.arena
        )
    memory = mmap.mmap(fds[descriptors.arena], descriptors.nbytes, access=mmap.ACCESS_COPY)
    tensors = place_in(torch.frombuffer(memory, dtype=torch.uint8), descriptors.places)
    return _Unpickler(io.BytesIO(descriptors.structure), tensors).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, int):
            return self._tensors[pid]
        shape, dtype, chunks = pid
        held = tuple(HeldChunk(torch.Size(offsets), self._tensors[number]) for offsets, number in chunks)
        return HeldTensor(torch.Size(shape), dtype, held)

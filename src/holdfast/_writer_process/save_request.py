"""A request to the writer process: a plan, a planner and a storage writer in one pickle.

Tensors in the staged memory are pickled as numbers of places in it, so that their bytes are never sent.
"""

import io
import logging
import os
import pickle
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch

from holdfast._context import SaveContext
from holdfast._io.progress import ProgressTracker
from holdfast._io.store import Claim
from holdfast._objects.object_streams import StoredObject
from holdfast._staging.buffer_layout import Place, place_in
from holdfast._tensors.chunks import is_sharded, is_tensor
from holdfast._writer_process.request_planner import RequestPlanner
from holdfast._writer_process.returned_state import pickling_error
from holdfast.errors import CheckpointError, UsageError
from holdfast.planner import SavePlan
from holdfast.storage import StorageWriter


class RequestHeader(NamedTuple):
    """What the writer process must know before it can unpack a request.

    Attributes:
        folder: The trainer's working folder; None if it was removed.
        log_level: The level of the trainer's ``holdfast`` logger.
        nbytes: The size of the staged memory.
        places: Where the tensors of the request lie in it.
    """

    folder: str | None
    log_level: int
    nbytes: int
    places: list[Place]


class SaveRequest(NamedTuple):
    """What the writer process is asked to do: ``writer.write_data(plan, planner)``.

    Attributes:
        plan: The items to write.
        planner: Has their values.
        writer: Writes them. It was set up in the trainer, and is not set up again.
    """

    plan: SavePlan
    planner: RequestPlanner
    writer: StorageWriter


class _Parts(list[bytes]):
    """A file that keeps what is written to it in parts, so that large bytes are not copied."""

    def write(self, part: Any) -> None:
        self.append(part if type(part) is bytes else bytes(part))


def pack(request: SaveRequest, base: torch.Tensor) -> list[bytes]:
    """Pickle a request for another process.

    Args:
        request: The request.
        base: The staged memory, all of it. Tensors outside of it are copied into the pickle.

    Raises:
        UsageError: Writer or planner cannot be pickled, or belong to a class of the main module; the error
            names the class.
    """
    parts = _Parts()
    pickler = _RequestPickler(parts, base)
    try:
        pickler.dump(request)
    except CheckpointError:
        raise
    except Exception as error:
        raise _unpicklable(request, base, error) from error
    level = logging.getLogger("holdfast").getEffectiveLevel()
    header = pickle.dumps(
        RequestHeader(current_folder(), level, base.numel(), pickler.places), pickle.HIGHEST_PROTOCOL
    )
    return [len(header).to_bytes(8, "little"), header, *parts]


def _unpicklable(request: SaveRequest, base: torch.Tensor, error: Exception) -> UsageError:
    """The error that names the part of a request that cannot be pickled."""
    for role, part in (("storage writer", request.writer), ("planner", request.planner.planner)):
        if reason := pickling_error(part, _RequestPickler(_Parts(), base).dump):
            name = f"{type(part).__module__}.{type(part).__qualname__}"
            return UsageError(
                f"the {role}, a {name}, cannot be sent to the process that writes: {reason}. Make it "
                "picklable, or save in a thread.",
                found=name,
            )
    return UsageError(f"the plan cannot be sent to the process that writes: {error}. Save in a thread.")


class _RequestPickler(pickle.Pickler):
    """Leaves out what the other process has or must not have.

    Tensors of the staged memory become numbers. Of a SaveContext only its facts are sent: the other process
    makes one of its own from them, with its own progress.
    """

    def __init__(self, parts: _Parts, base: torch.Tensor) -> None:
        super().__init__(parts, pickle.HIGHEST_PROTOCOL)
        self.places: list[Place] = []
        # With the tensor, which keeps its id from being used again: a mapping may make tensors when asked.
        self._numbers: dict[int, tuple[int, torch.Tensor]] = {}
        self._start = base.data_ptr()
        self._stop = self._start + base.numel()

    def persistent_id(self, obj: Any) -> int | tuple[Any, ...] | None:
        if not isinstance(obj, torch.Tensor):
            if type(obj) is SaveContext:
                return obj.rank, obj.world_size, obj.is_coordinator, obj.use_collectives
            return None
        if is_sharded(obj):
            return -1
        if not self._is_staged(obj):
            return None
        known = self._numbers.get(id(obj))
        if known is None:
            known = self._numbers[id(obj)] = len(self.places), obj
            offset = obj.data_ptr() - self._start if obj.numel() else 0
            self.places.append((offset, obj.dtype, tuple(obj.shape), obj.stride()))
        return known[0]

    def _is_staged(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or not tensor.is_cpu or not is_tensor(tensor):
            return False
        if tensor.is_conj() or tensor.is_neg():
            return False
        return tensor.numel() == 0 or self._start <= tensor.data_ptr() < self._stop

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
            raise UsageError(
                f"{obj.__qualname__} is defined in the program's main module, which no other process can "
                "import; put it into a module of its own",
                found=obj.__qualname__,
            )
        if isinstance(obj, Claim):
            # The trainer holds the lock of the folder, also when the writer process has died.
            return Claim, ()
        if type(obj) is StoredObject:
            return _stored_object, (obj.item, pickle.PickleBuffer(obj.payload))
        if type(obj) is torch.Tensor and is_tensor(obj) and obj.untyped_storage().nbytes() > obj.nbytes:
            # The pickle of a view would contain the whole storage.
            alone: Any = obj.clone()
            return alone.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _stored_object(item: Any, payload: Any) -> StoredObject:
    return StoredObject(item, memoryview(payload))


def unpack_header(body: bytearray) -> tuple[RequestHeader, memoryview]:
    """The header of a packed request, and the rest of its bytes. The sender must be trusted."""
    start = 8 + int.from_bytes(body[:8], "little")
    header: RequestHeader = pickle.loads(body[8:start])
    return header, memoryview(body)[start:]


def unpack(
    header: RequestHeader, rest: memoryview, memory: Callable[[int], Any], progress: ProgressTracker
) -> SaveRequest:
    """The request that was packed, with its tensors in the same memory.

    Args:
        header: From ``unpack_header``.
        rest: From ``unpack_header``.
        memory: Maps the given number of bytes of the staged memory, as a writable buffer.
        progress: Takes the place of the trainer's in each SaveContext that the writer has kept.

    Raises:
        UsageError: A class of the request cannot be imported here.
    """
    tensors: list[torch.Tensor] = []
    if header.places:
        tensors = place_in(torch.frombuffer(memory(header.nbytes), dtype=torch.uint8), header.places)
    try:
        request: SaveRequest = _RequestUnpickler(io.BytesIO(rest), tensors, progress).load()
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"the process that writes cannot import what the save needs: {error}. Nothing was written. Put "
            "it into a module that can be imported from sys.path, or save in a thread."
        ) from error
    return request


class _RequestUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, tensors: list[torch.Tensor], progress: ProgressTracker) -> None:
        super().__init__(stream)
        self._tensors = tensors
        self._progress = progress

    def persistent_load(self, pid: Any) -> SaveContext | torch.Tensor | None:
        if isinstance(pid, tuple):
            rank, world_size, is_coordinator, use_collectives = pid
            return SaveContext(rank, world_size, is_coordinator, use_collectives, self._progress)
        # -1 is a sharded tensor: the trainer has resolved its chunks.
        return None if pid < 0 else self._tensors[pid]


def current_folder() -> str | None:
    """The working folder of this process; None if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None

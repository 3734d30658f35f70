"""Values that are not tensors, in the container that ``torch.load`` reads."""

import io
import logging
import pickle
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any

import torch

from holdfast._format.torch_item import ItemFrame, bytes_item
from holdfast._io.blocks import crc32_combine
from holdfast._objects.allowed import is_allowed, is_stand_in
from holdfast._objects.allowed_numpy import is_refused_dtype
from holdfast._objects.decode import rehearse
from holdfast._objects.object_streams import StoredObject
from holdfast._objects.rebuild_tensors import NeedsTorchError
from holdfast._objects.torch_archive import pickle_record
from holdfast.errors import PlanError
from holdfast.stateful import Stateful

logger = logging.getLogger(__name__)

# Protocol 4 keeps bytes as bytes; torch's own protocol 2 spells them out as text, 9 bytes of memory each.
_PROTOCOL = 4


def encode_object(key: str, value: Any) -> io.BytesIO:
    """The stream that stands for ``value`` in a checkpoint.

    Bytes are stored as they are. What holds tensors goes through ``torch.save``; everything else is a
    pickle in the same kind of container. A warning is logged for what a load refuses by default.

    Raises:
        PlanError: The value cannot be pickled.
    """
    if type(value) in (bytes, bytearray):
        item = bytes_item(len(value), combine=crc32_combine, kind=type(value))
        return StoredObject(item, memoryview(value))
    pickled = io.BytesIO()
    pickler = _Pickler(pickled, _PROTOCOL)
    try:
        pickler.dump(value)
    except NeedsTorchError:
        return _save_by_torch(key, value)
    except Exception as error:
        raise _refused(key, value, error) from error
    # Not getbuffer: a view of a BytesIO must not stay behind in the traceback of a failed save.
    payload = memoryview(pickled.getvalue())
    stream = StoredObject(ItemFrame([(b"a/version", b"3\n")], b"a/data.pkl", len(payload)), payload)
    if pickler.unusual and rehearse(payload.tobytes()) is not None:
        _say_what_loading_needs(key, pickler.unusual)
    return stream


class _Pickler(pickle.Pickler):
    """Stops at the first tensor, and notes what the reader may have to allow."""

    def __init__(self, stream: io.BytesIO, protocol: int) -> None:
        super().__init__(stream, protocol)
        self.unusual: set[str] = set()
        self._before: Any = None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor | torch.UntypedStorage | torch.TypedStorage):
            raise NeedsTorchError
        if isinstance(obj, Stateful) and not isinstance(obj, type):
            raise TypeError(
                f"it holds a {type(obj).__qualname__}, which is saved by its state_dict: put it into a dict "
                "or a list instead"
            )
        if isinstance(obj, torch.memory_format):
            raise TypeError(f"{obj} has no name of its own in a pickle; save str(value)")
        named = obj if isinstance(obj, type | FunctionType | BuiltinFunctionType) else type(obj)
        module, name = str(named.__module__), named.__qualname__
        before, self._before = self._before, obj
        if not is_allowed(module, name) or (is_stand_in(obj) and not _is_named_for(obj, before)):
            self.unusual.add(f"{module}.{name}")
        elif is_refused_dtype(obj):
            self.unusual.add(f"the numpy dtype {obj}")
        return NotImplemented


def _is_named_for(cls: type, before: Any) -> bool:
    """Whether a class is named to make an instance, not as a value, given what was pickled before it."""
    return (
        isinstance(before, cls)
        # Bytearrays are not seen themselves; numpy's arrays name their class in an argument.
        or cls is bytearray
        or (
            cls.__name__ == "ndarray"
            and isinstance(before, BuiltinFunctionType)
            and before.__name__ == "_reconstruct"
        )
    )


class _PicklerForTorch(pickle.Pickler):
    """Cuts tensors out of memory that is not torch's, such as a staging buffer with the whole state."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.layout is torch.strided and obj.is_cpu and not obj.is_quantized:
            storage = obj.untyped_storage()
            if storage.nbytes() > obj.nbytes and not storage.resizable():
                # The pickle of a view would contain all of it.
                alone: Any = obj.detach().clone().requires_grad_(obj.requires_grad)
                return alone.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


_PICKLE_FOR_TORCH = SimpleNamespace(__name__="pickle", Pickler=_PicklerForTorch)


def _save_by_torch(key: str, value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    try:
        torch.save(value, stream, pickle_module=_PICKLE_FOR_TORCH)
    except Exception as error:
        raise _refused(key, value, error) from error
    refused = rehearse(pickle_record(stream) or b"")
    if refused is not None:
        stream.seek(0)
        unknown = set(torch.serialization.get_unsafe_globals_in_checkpoint(stream))
        if not isinstance(refused, NeedsTorchError):
            unknown = {str(refused), *(name for name in unknown if not is_allowed(*name.rsplit(".", 1)))}
        if unknown:
            _say_what_loading_needs(key, unknown)
    stream.seek(0)
    return stream


def _refused(key: str, value: Any, error: Exception) -> PlanError:
    return PlanError(
        f"{key}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved: {error}. Leave it "
        "out of the state, or give it a state_dict and a load_state_dict method.",
        key=key,
    )


def _say_what_loading_needs(key: str, classes: set[str]) -> None:
    logger.warning(
        "%s: this value needs %s to be loaded, which is not run by default: pass it in safe_globals, or "
        "allow_pickle=True, to load",
        key,
        ", ".join(sorted(classes)),
    )

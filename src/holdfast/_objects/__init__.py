"""Values that are not tensors: into the form that torch.load reads, and back without running their code."""

from holdfast._objects.decode import decode_object, is_bytearray
from holdfast._objects.encode import encode_object
from holdfast._objects.object_streams import LoadedObject, StoredObject, StreamedPayload

__all__ = [
    "LoadedObject",
    "StoredObject",
    "StreamedPayload",
    "decode_object",
    "encode_object",
    "is_bytearray",
]

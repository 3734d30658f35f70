"""Owns how the objects of a view become values: plain data without torch, all else by the allow-list."""

import io
from collections.abc import Callable, Sequence
from typing import Any

from holdfast._contents.object_bytes import NotPlainError, plain_value
from holdfast._contents.value_reader import ObjectPart
from holdfast._view.array_kinds import Framework


class ObjectDecoder:
    """Makes the values of objects that were read.

    Args:
        framework: For numpy, plain data is decoded without torch.
        allow_pickle: Unpickle freely.
        safe_globals: What objects may use besides data types.
    """

    def __init__(
        self,
        framework: Framework,
        *,
        allow_pickle: bool = False,
        safe_globals: Sequence[Callable[..., Any] | type] = (),
    ) -> None:
        self._framework = framework
        self._allow_pickle = allow_pickle
        self._safe_globals = safe_globals

    def decode(self, part: ObjectPart, path: str) -> Any:
        """The value of an object that was read.

        Raises:
            UnsafeMetadataError: It needs something that is not allowed; nothing of it was run.
            IntegrityError: The bytes are not a stored object.
        """
        assert part.stored is not None
        if self._framework == "numpy" and not self._allow_pickle:
            try:
                return plain_value(part.stored, path=path)
            except NotPlainError:
                pass
        # It brings torch.
        from holdfast._objects.decode import decode_object  # noqa: PLC0415
        from holdfast._objects.object_streams import LoadedObject  # noqa: PLC0415

        stored = part.stored
        stream = LoadedObject(*stored) if stored.head else io.BytesIO(stored.payload)
        return decode_object(
            part.key, stream, allow_pickle=self._allow_pickle, safe_globals=self._safe_globals
        )

    def hold_parts(self, about: dict[str, Any]) -> dict[str, Any]:
        """The empty dict for the parts of a tensor subclass."""
        if self._framework == "numpy":
            return {}
        from holdfast._tensors.tensor_parts import TensorParts  # noqa: PLC0415

        return TensorParts(about=about)

"""Owns the memory of what is read: arrays of numpy, or tensors of torch. Each is imported when it is used."""

import io
from typing import Any, Literal, TypeAlias

from holdfast._contents.box_reader import Arrays
from holdfast._contents.inventory import Ints
from holdfast._format.dtypes import DTYPES
from holdfast._geometry import Box
from holdfast._io.streams import byte_view
from holdfast.errors import IntegrityError, UsageError

Framework: TypeAlias = Literal["torch", "numpy"]

_NUMPY = {
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}


def arrays_of(framework: Framework) -> Arrays:
    """What makes the memory for a framework.

    Raises:
        UsageError: It is neither ``"torch"`` nor ``"numpy"``.
    """
    if framework not in ("torch", "numpy"):
        raise UsageError(f'framework must be "torch" or "numpy", not {framework!r}', found=framework)
    return TorchArrays() if framework == "torch" else NumpyArrays()


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + length) for begin, length in zip(*box, strict=True))


class NumpyArrays:
    """Arrays of numpy. bfloat16 and float8 need the package ml_dtypes."""

    def __init__(self) -> None:
        import numpy as np  # noqa: PLC0415 - whoever looks at keys alone does not wait for it

        self._np: Any = np

    def empty(self, shape: Ints, dtype: str) -> Any:
        """An array; see ``Arrays``."""
        return self._np.empty(shape, self._dtype(dtype))

    def memory_of(self, array: Any) -> memoryview:
        """Its bytes; see ``Arrays``."""
        return byte_view(array.reshape(-1).view(self._np.uint8))

    def put(self, array: Any, box: Box, content: memoryview, strides: Ints, first: int) -> None:
        """Copy; see ``Arrays``."""
        size = array.dtype.itemsize
        steps = tuple(stride * size for stride in strides)
        array[_slices(box)] = self._np.ndarray(box.lengths, array.dtype, content, first * size, steps)

    def put_loaded(self, array: Any, box: Box, content: bytes, at: Ints) -> None:  # noqa: ARG002
        """Refused; see ``Arrays``."""
        raise UsageError("only torch can read how this tensor is stored: use its torch(), not numpy()")

    def _dtype(self, name: str) -> Any:
        if name in _NUMPY:
            return self._np.dtype(name)
        try:
            import ml_dtypes  # noqa: PLC0415
        except ImportError as error:
            raise UsageError(
                f"numpy has no {name}: pip install ml_dtypes, which adds bfloat16 and float8, or read it as "
                'a tensor of torch with framework="torch"',
                found=name,
            ) from error
        found = getattr(ml_dtypes, name, None)
        if found is None or self._np.dtype(found).itemsize != DTYPES[name].itemsize:
            raise UsageError(f'numpy has no {name}: read it with framework="torch"', found=name)
        return self._np.dtype(found)


class TorchArrays:
    """Tensors of torch, in the memory of the host."""

    def empty(self, shape: Ints, dtype: str) -> Any:
        """A tensor; see ``Arrays``."""
        import torch  # noqa: PLC0415 - it takes seconds

        return torch.empty(shape, dtype=getattr(torch, dtype))

    def memory_of(self, array: Any) -> memoryview:
        """Its bytes; see ``Arrays``."""
        from holdfast._tensors.host import memory_of  # noqa: PLC0415

        return memory_of(array)

    def put(self, array: Any, box: Box, content: memoryview, strides: Ints, first: int) -> None:
        """Copy; see ``Arrays``."""
        import torch  # noqa: PLC0415

        # torch warns of memory that cannot be written.
        raw = torch.frombuffer(bytearray(content) if content.readonly else content, dtype=torch.uint8)
        size = array.dtype.itemsize
        values = raw[: len(content) // size * size].view(array.dtype)
        array[_slices(box)].copy_(values.as_strided(box.lengths, strides, first))

    def put_loaded(self, array: Any, box: Box, content: bytes, at: Ints) -> None:
        """Let torch read a container under its weights-only rules; see ``Arrays``."""
        import torch  # noqa: PLC0415

        from holdfast._objects.torch_archive import refuse_compressed  # noqa: PLC0415

        stream = io.BytesIO(content)
        refuse_compressed(stream)
        try:
            tensor = torch.load(stream, map_location="cpu", weights_only=True)
            wanted = tensor.detach()[_slices(Box(at, box.lengths))]
        except Exception as error:
            raise IntegrityError(f"it cannot be read: {error}") from error
        if wanted.dtype != array.dtype or tuple(wanted.shape) != box.lengths:
            raise IntegrityError(f"it holds a {tensor.dtype} tensor of shape {list(tensor.shape)}")
        array[_slices(box)].copy_(wanted)

"""Owns the memory of what is read: arrays of numpy, or tensors of torch. Each is imported when it is used."""

from typing import Any, Literal, Protocol, TypeAlias

from holdfast._contents.box_target import BoxTarget
from holdfast._contents.inventory import Ints
from holdfast._format.dtypes import DTYPES
from holdfast._geometry import Box
from holdfast._io.streams import byte_view
from holdfast.errors import UsageError

Framework: TypeAlias = Literal["torch", "numpy"]

_NUMPY = {
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}


class Arrays(Protocol):
    """How tensors are held in memory: as arrays of numpy, or as tensors of torch."""

    def empty(self, shape: Ints, dtype: str) -> Any:
        """Memory for a tensor, row-major, with anything in it."""

    def target(self, key: str, array: Any, box: Box) -> BoxTarget:
        """A box of what ``empty`` made, to be filled."""


def arrays_of(framework: Framework) -> Arrays:
    """The factory of arrays for a framework.

    Raises:
        UsageError: It is neither ``"torch"`` nor ``"numpy"``.
    """
    if framework not in ("torch", "numpy"):
        raise UsageError(f'framework must be "torch" or "numpy", not {framework!r}', found=framework)
    return TorchArrays() if framework == "torch" else NumpyArrays()


def _view_of(array: Any, box: Box) -> Any:
    """A box of an array, which is an array also if it has no dimensions."""
    index: Any = (..., *(slice(begin, begin + length) for begin, length in zip(*box, strict=True)))
    return array[index]


class NumpyArrays:
    """Arrays of numpy. bfloat16 and float8 need the package ml_dtypes."""

    def __init__(self) -> None:
        import numpy as np  # noqa: PLC0415 - whoever looks at keys alone does not wait for it

        self._np: Any = np

    def empty(self, shape: Ints, dtype: str) -> Any:
        """An array; see ``Arrays``."""
        return self._np.empty(shape, self._dtype(dtype))

    def target(self, key: str, array: Any, box: Box) -> BoxTarget:
        """A box of it; see ``Arrays``."""
        return _NumpyBox(key, _view_of(array, box))

    def _dtype(self, name: str) -> Any:
        if name in _NUMPY:
            return self._np.dtype(name)
        try:
            import ml_dtypes  # noqa: PLC0415
        except ImportError as error:
            if "float" not in name:  # such as complex32, which it does not add
                raise UsageError(f'numpy has no {name}: read it with framework="torch"', found=name) from None
            raise UsageError(
                f"numpy has no {name}: pip install ml_dtypes, which adds bfloat16 and float8, or read it as "
                'a tensor of torch with framework="torch"',
                found=name,
            ) from error
        found = getattr(ml_dtypes, name, None)
        if found is None or self._np.dtype(found).itemsize != DTYPES[name].itemsize:
            raise UsageError(f'numpy has no {name}: read it with framework="torch"', found=name)
        return self._np.dtype(found)


class _NumpyBox(BoxTarget):
    """A box of an array of numpy."""

    def __init__(self, key: str, array: Any) -> None:
        self.key = key
        self.lengths = array.shape
        self._array = array

    def memory(self) -> memoryview | None:
        if not self._array.flags.c_contiguous:
            return None
        return byte_view(self._array.reshape(-1).view("uint8"))

    def put(self, offsets: Ints, lengths: Ints, content: memoryview, strides: Ints, first: int) -> None:
        import numpy as np  # noqa: PLC0415

        dtype = self._array.dtype
        steps = tuple(stride * dtype.itemsize for stride in strides)
        values: Any = np.ndarray(lengths, dtype, content, first * dtype.itemsize, steps)
        _view_of(self._array, Box(offsets, lengths))[...] = values

    def put_loaded(self, content: bytes, shape: Ints, at: Ints) -> None:  # noqa: ARG002
        raise UsageError("only torch can read how this tensor is stored: use its torch(), not numpy()")


class TorchArrays:
    """Tensors of torch, in the memory of the host."""

    def empty(self, shape: Ints, dtype: str) -> Any:
        """A tensor; see ``Arrays``."""
        import torch  # noqa: PLC0415 - it takes seconds

        return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")

    def target(self, key: str, array: Any, box: Box) -> BoxTarget:
        """A box of it; see ``Arrays``."""
        from holdfast._storage.destinations import TensorTarget  # noqa: PLC0415

        return TensorTarget(key, _view_of(array, box), array.dtype)

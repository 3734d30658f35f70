"""The functions that a pickle gets for numpy's names: they make arrays and scalars of plain numbers only.

numpy's own ``ndarray`` makes an array of objects out of any bytes when it is called so, and follows them as
pointers. Nothing here gives a pickle that call.
"""

import functools
import re
import sys
from typing import Any

_NAMES = {
    *(
        (f"numpy.{core}.multiarray", name)
        for core in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    ),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}
_SCALARS = {"bool", "bool_", "str_", "bytes_"} | {
    f"{kind}{bits}"
    for kind, widths in {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64)}.items()
    for bits in widths
}
# Numbers, text, bytes and times; neither objects nor records.
_PLAIN_DTYPE = re.compile(r"[<>=|]?(\?|b1|[iufcbB][0-9]{0,2}|[SUVa][0-9]{0,9}|[mM]8?(\[[0-9a-zA-Z]+\])?)")


def is_numpy(module: str, name: str) -> bool:
    """Whether this is one of the names that numpy's arrays, scalars and dtypes are pickled with."""
    return (module, name) in _NAMES or (module == "numpy" and name in _SCALARS)


def find_numpy(module: str, name: str) -> Any:
    """The function that a pickle gets for a name of numpy's.

    Raises:
        KeyError: numpy is not installed, or the name is only ever mentioned, never used.
    """
    try:
        import numpy as np  # noqa: PLC0415 - only for pickles that name it
    except ImportError:
        raise KeyError(f"{module}.{name}") from None
    if name == "ndarray":
        return ArrayName()
    made: Any = {
        "dtype": _make_dtype,
        "_reconstruct": _reconstruct,
        "scalar": _make_scalar,
        "_frombuffer": _make_from_buffer,
    }.get(name)
    if made is None:
        raise KeyError(f"{module}.{name}")
    return functools.partial(made, np)


class RefusedError(TypeError):
    """A load needs the caller's leave for what this names."""


class ArrayName:
    """The word ndarray, as an argument of ``_reconstruct``; it cannot be called."""


def _make_dtype(np: Any, spec: Any, *_: Any) -> Any:
    if not isinstance(spec, str) or not _PLAIN_DTYPE.fullmatch(spec):
        raise RefusedError(f"a numpy dtype {spec!r}")
    # A copy, since the state that the pickle sets next must not reach numpy's own instance.
    return np.dtype(spec, copy=True)


def _reconstruct(np: Any, cls: Any, shape: Any, code: Any) -> Any:
    if not isinstance(cls, ArrayName) or shape != (0,) or code not in (b"b", "b"):
        raise TypeError("an array of numpy's was expected")
    return np.empty((0,), np.int8)


def _make_scalar(np: Any, dtype: Any, content: Any) -> Any:
    if not _is_plain(np, dtype) or not isinstance(content, bytes) or len(content) != dtype.itemsize:
        raise TypeError("a scalar of numpy's was expected")
    return np.frombuffer(content, dtype)[0]


def _make_from_buffer(np: Any, content: Any, dtype: Any, shape: Any, order: Any) -> Any:
    if not isinstance(content, bytes | bytearray) or order not in ("C", "F"):
        raise TypeError("the bytes of an array were expected")
    check_array_state((1, shape, dtype, order == "F", bytes(content)), np)
    return np.frombuffer(bytearray(content), dtype).reshape(shape, order=order)


def _is_plain(np: Any, dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and not dtype.hasobject and dtype.fields is None


def is_refused_dtype(value: object) -> bool:
    """Whether a value that is about to be pickled is a dtype of numpy's that a pickle may not have."""
    np = sys.modules.get("numpy")
    return (
        np is not None
        and isinstance(value, np.dtype)
        and not (_is_plain(np, value) and value.subdtype is None)
    )


def check_dtype_state(state: Any) -> None:
    """Raise unless the state of a dtype adds nothing but a byte order or a unit of time."""
    if not isinstance(state, tuple) or len(state) < 7 or state[2:5] != (None, None, None):
        raise RefusedError("a numpy dtype with fields or objects")


def check_array_state(state: Any, np: Any = None) -> None:
    """Raise unless the state of an array is plain numbers that fill its shape."""
    np = np or sys.modules["numpy"]
    if not isinstance(state, tuple) or len(state) != 5:
        raise TypeError("an array with an unknown state")
    _, shape, dtype, _, content = state
    if not _is_plain(np, dtype):
        raise RefusedError("a numpy array of objects or records")
    if not isinstance(shape, tuple) or not all(type(extent) is int and extent >= 0 for extent in shape):
        raise TypeError("an array with an impossible shape")
    count = 1
    for extent in shape:
        count *= extent
    if not isinstance(content, bytes) or len(content) != count * dtype.itemsize:
        raise TypeError("an array whose bytes do not fill its shape")

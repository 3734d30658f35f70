"""The dtypes of torch by name, without torch: their sizes, and how torch stores a tensor of each.

A new dtype of torch is one line here.
"""

from typing import NamedTuple

UNTYPED_STORAGE = "UntypedStorage"
"""The class of storages that do not say the dtype of their elements."""


class Dtype(NamedTuple):
    """How torch stores one element.

    Attributes:
        itemsize: What ``torch.dtype.itemsize`` says.
        storage: The class of the storage that torch saves: one that implies the dtype, or
            ``UNTYPED_STORAGE``, beside which the dtype is named. None where torch cannot load what it saves.
    """

    itemsize: int
    storage: str | None = None


DTYPES: dict[str, Dtype] = {
    "bool": Dtype(1, "BoolStorage"),
    "uint8": Dtype(1, "ByteStorage"),
    "uint16": Dtype(2, UNTYPED_STORAGE),
    "uint32": Dtype(4, UNTYPED_STORAGE),
    "uint64": Dtype(8, UNTYPED_STORAGE),
    "int8": Dtype(1, "CharStorage"),
    "int16": Dtype(2, "ShortStorage"),
    "int32": Dtype(4, "IntStorage"),
    "int64": Dtype(8, "LongStorage"),
    "float16": Dtype(2, "HalfStorage"),
    "bfloat16": Dtype(2, "BFloat16Storage"),
    "float32": Dtype(4, "FloatStorage"),
    "float64": Dtype(8, "DoubleStorage"),
    "float8_e4m3fn": Dtype(1, UNTYPED_STORAGE),
    "float8_e4m3fnuz": Dtype(1, UNTYPED_STORAGE),
    "float8_e5m2": Dtype(1, UNTYPED_STORAGE),
    "float8_e5m2fnuz": Dtype(1, UNTYPED_STORAGE),
    "float8_e8m0fnu": Dtype(1, UNTYPED_STORAGE),
    # Two numbers, but torch counts the pair as one element.
    "float4_e2m1fn_x2": Dtype(1, UNTYPED_STORAGE),
    "complex32": Dtype(4, UNTYPED_STORAGE),
    "complex64": Dtype(8, "ComplexFloatStorage"),
    "complex128": Dtype(16, "ComplexDoubleStorage"),
    "qint8": Dtype(1),
    "qint32": Dtype(4),
    "quint8": Dtype(1),
    "quint4x2": Dtype(1),
    "quint2x4": Dtype(1),
    "bits8": Dtype(1, UNTYPED_STORAGE),
    "bits16": Dtype(2, UNTYPED_STORAGE),
    "bits1x8": Dtype(1, UNTYPED_STORAGE),
    "bits2x4": Dtype(1, UNTYPED_STORAGE),
    "bits4x2": Dtype(1, UNTYPED_STORAGE),
    # Narrow integers take a whole byte each.
    **{f"int{width}": Dtype(1) for width in range(1, 8)},
    **{f"uint{width}": Dtype(1) for width in range(1, 8)},
}


def why_not_stored(dtype: str) -> str | None:
    """Why a tensor of this dtype cannot be stored, and what to do; None if it can."""
    if dtype in DTYPES and DTYPES[dtype].storage is not None:
        return None
    return (
        f"tensors of dtype {dtype} cannot be stored: torch.load has no storage for them. Save a tensor of "
        "another dtype that holds the same bytes, such as uint8."
    )


TYPED_STORAGES = {
    name: dtype.storage for name, dtype in DTYPES.items() if dtype.storage not in (None, UNTYPED_STORAGE)
}
"""The dtypes that torch saves with a storage class that implies them, with that class."""

"""The dtypes of torch by name, with the size and the kind of their elements, without torch."""

from typing import Literal, NamedTuple, TypeAlias

__all__ = ["DTYPES", "Dtype", "DtypeKind"]

DtypeKind: TypeAlias = Literal["float", "int", "uint", "complex", "bool", "quantized", "bits"]


class Dtype(NamedTuple):
    """How torch stores one element.

    Attributes:
        itemsize: What ``torch.dtype.itemsize`` says.
        kind: Values of one kind can be cast into each other without changing what they mean.
        nbytes: Bytes that one element takes in a storage; None where several share a byte, in which case
            the bytes of a tensor cannot be found by multiplication.
    """

    itemsize: int
    kind: DtypeKind
    nbytes: int | None


def _plain(itemsize: int, kind: DtypeKind) -> Dtype:
    return Dtype(itemsize, kind, itemsize)


DTYPES: dict[str, Dtype] = {
    "bool": _plain(1, "bool"),
    "uint8": _plain(1, "uint"),
    "uint16": _plain(2, "uint"),
    "uint32": _plain(4, "uint"),
    "uint64": _plain(8, "uint"),
    "int8": _plain(1, "int"),
    "int16": _plain(2, "int"),
    "int32": _plain(4, "int"),
    "int64": _plain(8, "int"),
    "float16": _plain(2, "float"),
    "bfloat16": _plain(2, "float"),
    "float32": _plain(4, "float"),
    "float64": _plain(8, "float"),
    "float8_e4m3fn": _plain(1, "float"),
    "float8_e4m3fnuz": _plain(1, "float"),
    "float8_e5m2": _plain(1, "float"),
    "float8_e5m2fnuz": _plain(1, "float"),
    "float8_e8m0fnu": _plain(1, "float"),
    # Two numbers, but torch counts the pair as one element.
    "float4_e2m1fn_x2": _plain(1, "float"),
    "complex32": _plain(4, "complex"),
    "complex64": _plain(8, "complex"),
    "complex128": _plain(16, "complex"),
    "qint8": _plain(1, "quantized"),
    "qint32": _plain(4, "quantized"),
    "quint8": _plain(1, "quantized"),
    "quint4x2": Dtype(1, "quantized", None),
    "quint2x4": Dtype(1, "quantized", None),
    "bits8": _plain(1, "bits"),
    "bits16": _plain(2, "bits"),
    "bits1x8": _plain(1, "bits"),
    "bits2x4": _plain(1, "bits"),
    "bits4x2": _plain(1, "bits"),
    # Narrow integers take a whole byte each.
    **{f"int{width}": _plain(1, "int") for width in range(1, 8)},
    **{f"uint{width}": _plain(1, "uint") for width in range(1, 8)},
}

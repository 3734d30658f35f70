"""Tensor subclasses that are made of plain tensors, such as libraries for quantization have them."""

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

aten = torch.ops.aten


class Rounding(enum.Enum):
    NEAREST = 1
    DOWN = 2


class Granularity(NamedTuple):
    rows: int
    columns: int


@dataclass(frozen=True)
class Layout:
    name: str
    padding: float = 0.0


class BlockScaled(torch.Tensor):
    """Codes of the tensor's shape, a scale for each block of its elements, and a table for all blocks."""

    codes: torch.Tensor
    scale: torch.Tensor
    table: torch.Tensor
    context: Any

    @staticmethod
    def __new__(cls, codes: Any, scale: Any, table: Any, context: Any, dtype: Any = torch.float32) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made.codes, made.scale, made.table, made.context = codes, scale, table, context
        return made

    def __init__(self, *_: Any, **__: Any) -> None: ...

    @classmethod
    def random(cls, *shape: int, block: int = 4, context: Any = None, seed: int = 0) -> "BlockScaled":
        source = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 255, shape, dtype=torch.uint8, generator=source)
        scale = torch.rand(codes.numel() // block, generator=source)
        return cls(codes, scale, torch.rand(16, generator=source), context)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale", "table"], {"context": self.context, "dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(parts["codes"], parts["scale"], parts["table"], context["context"], context["dtype"])

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"BlockScaled({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, _: Any, args: Any = (), __: Any = None) -> Any:  # type: ignore[override]
        if function is aten.slice.Tensor:
            value, dim, start, end = (*args, 0, 0)[:4]
            block = value.codes.numel() // value.scale.numel()
            row = value.codes[0].numel()
            if dim or start * row % block or end * row % block:
                raise NotImplementedError("only whole blocks of rows")
            scale = value.scale[start * row // block : end * row // block]
            return cls(value.codes[start:end], scale, value.table, value.context, value.dtype)
        if function is aten.copy_.default and isinstance(args[1], BlockScaled):
            for name in ("codes", "scale", "table"):
                getattr(args[0], name).copy_(getattr(args[1], name))
            return args[0]
        if function is aten.is_pinned.default:  # stock torch asks before it saves
            return False
        if function in (aten.detach.default, aten.view.default, aten.clone.default):
            value = args[0]
            parts = (function(value.codes, *args[1:]), *map(_same_way(function), (value.scale, value.table)))
            return cls(*parts, value.context, value.dtype)
        raise NotImplementedError(str(function))


def _same_way(function: Any) -> Any:
    return (lambda part: part) if function is aten.view.default else function


class RowScaled(torch.Tensor):
    """Rows and a scale for each row; it can neither be cut nor copied. Its parts may be of any kind."""

    rows: torch.Tensor
    scale: torch.Tensor
    context: Any

    @staticmethod
    def __new__(cls, rows: Any, scale: Any, context: Any = None) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, rows.shape, dtype=scale.dtype, device=rows.device)
        made.rows, made.scale, made.context = rows, scale, context
        return made

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["rows", "scale"], self.context

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, size: Any, stride: Any) -> Any:
        return RowScaled(parts["rows"], parts["scale"], context)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"RowScaled({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, _: Any, args: Any = (), __: Any = None) -> Any:  # type: ignore[override]
        if function is aten.detach.default:
            return cls(args[0].rows.detach(), args[0].scale.detach(), args[0].context)
        raise NotImplementedError(str(function))


def parts_of(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """The plain tensors that a tensor is made of, by name."""
    if not hasattr(type(value), "__tensor_flatten__"):
        return {name: value}
    inner: dict[str, torch.Tensor] = {}
    for part in value.__tensor_flatten__()[0]:
        inner |= parts_of(getattr(value, part), f"{name}.{part}")
    return inner


def assert_same_parts(found: Any, expected: Any) -> None:
    """Whether two tensors are of one class and their parts have the same bits."""
    assert type(found) is type(expected)
    ours, theirs = parts_of(found), parts_of(expected)
    assert ours.keys() == theirs.keys()
    for name, part in ours.items():
        assert part.dtype == theirs[name].dtype
        assert torch.equal(part, theirs[name]), name

"""States for files of ``torch.save``, and what is equal in them."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

import holdfast as dcp
from holdfast.default_planner import _EmptyStateDictLoadPlanner
from holdfast.format_utils import TorchSaveReader

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def tensors() -> dict[str, torch.Tensor]:
    """Tensors of every dtype and many shapes and strides."""
    base = torch.arange(24.0).view(4, 6)
    large = torch.arange(600_000.0).view(600, 1000)
    return {
        **{f"as_{str(dtype)[6:]}": torch.arange(9).to(dtype) for dtype in DTYPES},
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "plain": base,
        "shared": base[1:3],
        "transposed": base.t(),
        "columns": base[:, 1:3],
        "every_second": large[:, ::2],
        "large_transposed": large.t(),
        "expanded": base[:1].expand(5, 6),
        "channels_last": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    }


def nested() -> dict[Any, Any]:
    """A state with containers, keys that are not strings, and values that are not tensors."""
    weight = torch.arange(6.0).view(2, 3)
    return {
        "model": OrderedDict(weight=weight, tied=weight, inner={"bias": torch.ones(2)}),
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        7: torch.tensor([7]),
        "list": [weight, {"deep": weight[0]}, 3],
        "tuple": (weight, 1),
        "parameter": torch.nn.Parameter(weight),
        "nothing": {},
        "step": 5,
        "name": "run",
        "blob": b"\0\1",
        "none": None,
    }


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal: structure, dtypes, shapes and every bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return torch.equal(_bits(one), _bits(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def read(path: str | Path, **options: Any) -> dict[Any, Any]:
    """What a file of ``torch.save`` holds, read as a checkpoint."""
    state: dict[Any, Any] = {}
    reader = TorchSaveReader(path, **options)
    dcp.load(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state

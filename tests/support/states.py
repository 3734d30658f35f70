"""States to save, and exact comparison of what was loaded with what was saved."""

import copy
import random
from typing import Any

import numpy as np
import torch

MIB = 1 << 20


def small_state(seed: int) -> dict[str, Any]:
    """A state of a few KB with every kind of item; two seeds differ in every value that can differ."""
    bits = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(24, 8, generator=bits),
            "half": torch.randn(19, generator=bits).bfloat16(),
            "count": torch.tensor(seed),
            "nothing": torch.empty(0, 3),
        },
        "blob": random.Random(seed).randbytes(64),
        "step": seed,
        "names": [f"first-{seed}", {"second": (seed, 2.5 * seed)}],
    }


def large_state(seed: int, mib: int = 3) -> dict[str, Any]:
    """As ``small_state``, with tensors of more than one block."""
    bits = torch.Generator().manual_seed(seed)
    rows = {f"rows{n}": torch.randn(mib * MIB // 4 + n, generator=bits) for n in range(3)}
    return {**small_state(seed), "rows": rows}


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of random bits; its values may be NaN or infinite."""
    made = torch.empty(shape, dtype=dtype)
    _storage_bytes(made).random_(0, 2 if dtype == torch.bool else 256)
    return made


def blank(value: Any) -> Any:
    """The same structure with memory of its own: tensors of zeros, and other values replaced."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        # torch has no zeros of its rarest dtypes.
        made = torch.empty(value.shape, dtype=value.dtype)
        _storage_bytes(made).zero_()
        return made
    if isinstance(value, dict):
        emptied = copy.copy(value)
        for key, entry in value.items():
            emptied[key] = blank(entry)
        return emptied
    if isinstance(value, list):
        return [blank(entry) for entry in value]
    return "not loaded"


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The elements that a tensor shows, bit for bit and in row-major order, whatever its strides."""
    plain = tensor.detach().to_dense().resolve_conj().resolve_neg().contiguous()
    start = plain.storage_offset() * plain.itemsize
    return _storage_bytes(plain).numpy().tobytes()[start : start + plain.numel() * plain.itemsize]


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def differing(found: Any, expected: Any, prefix: str = "") -> set[str]:
    """The flat keys under which two states differ in structure, in types or in any bit.

    Tensors are equal if layout, dtype, shape and elements are; a Parameter may be equal to a plain tensor.
    """
    if isinstance(expected, dict | list) and type(found) is type(expected):
        pairs, others = _entries(found), _entries(expected)
        inside = [
            differing(pairs[key], others[key], f"{prefix}.{key}" if prefix else str(key))
            for key in pairs.keys() & others.keys()
        ]
        return set().union(*inside, {prefix} if list(pairs) != list(others) else set())
    return set() if same(found, expected) else {prefix}


def same(found: Any, expected: Any) -> bool:
    """Whether two states are equal in structure, in types and in every bit."""
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and _form(found) == _form(expected)
    if type(found) is not type(expected):
        return False
    if isinstance(expected, np.ndarray):
        return bool(found.dtype == expected.dtype and found.tobytes() == expected.tobytes()) and (
            found.shape == expected.shape
        )
    if isinstance(expected, dict | list | tuple):
        pairs, others = _entries(found), _entries(expected)
        return list(pairs) == list(others) and all(same(pairs[key], others[key]) for key in pairs)
    return bool(found == expected)


def assert_same(found: Any, expected: Any) -> None:
    """Fail with the keys under which the states differ."""
    keys = differing(found, expected)
    assert not keys, f"these values differ: {', '.join(sorted(keys))}"


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.layout, tensor.dtype, tensor.shape, tensor_bytes(tensor)


def _entries(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else dict(enumerate(value))

"""What the tests of safetensors files share: states of every dtype, and exact comparison."""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tests.support.stock_torch import IS_NEWEST

import holdfast as dcp
from holdfast._format.safetensors import TORCH_NAMES

DTYPES = [
    vars(torch)[name]
    for name in TORCH_NAMES.values()
    if name in vars(torch) and (IS_NEWEST or name != "float4_e2m1fn_x2")
]
"""Every dtype that the format and torch have; older torch cannot copy 4-bit numbers."""


def of_dtype(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """A tensor whose bytes are random; for bool they are 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = shape[-1] * dtype.itemsize
    most = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, most, (*shape[:-1], nbytes), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def some_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of all dtypes, and of every kind that is easily forgotten."""
    state = {str(dtype)[6:]: of_dtype(dtype, 3, 8, seed=seed) for dtype in DTYPES}
    generator = torch.Generator().manual_seed(seed)
    large = torch.randn(700, 800, generator=generator)
    return {
        **state,
        "scalar": torch.tensor(3.5 + seed),
        "empty": torch.zeros(0, 4),
        "transposed": torch.randn(30, 50, generator=generator).t(),
        "every second": torch.arange(20 + seed)[::2],
        "large": large,
        "tied": large,
    }


def room_for(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state to load into: zeros."""
    return {
        key: torch.zeros(value.nbytes, dtype=torch.uint8).view(value.dtype).view(value.shape)
        if value.dim()
        else torch.zeros_like(value)
        for key, value in state.items()
    }


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    raw = [tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor for tensor in (one, other)]
    return torch.equal(raw[0], raw[1])


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two flat states have the same keys and bits."""
    return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)


def export(state: dict[str, Any], folder: str | os.PathLike[str], **options: Any) -> None:
    """Save a state as safetensors files."""
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(folder, **options))


def load(
    folder: str | os.PathLike[str], state: dict[str, torch.Tensor], **options: Any
) -> dict[str, torch.Tensor]:
    """Load into zeros of the form of a state."""
    room = room_for(state)
    dcp.load(room, storage_reader=dcp.HuggingFaceStorageReader(folder, **options))
    return room


def with_safetensors(folder: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """What the safetensors package finds in all files of a folder."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"
            found.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 - not a dict
    return found


def model_files(folder: str | os.PathLike[str]) -> list[str]:
    """The names of all files of a folder but the checksums."""
    return sorted(name for name in os.listdir(folder) if name != ".holdfast.safetensors.checksums")

"""Quantised models are read as the numbers that they stand for, as stock torch reads them."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.support.stock_torch import IS_NEWEST
from torch.distributed.checkpoint import state_dict_loader as stock

import holdfast as dcp
from holdfast._storage import quantized_reading
from holdfast.errors import InvalidPlanError
from holdfast.quantized_hf_storage import QuantizedHuggingFaceStorageReader


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with matrices in blocks of 16, MXFP4 tensors, and a plain tensor, in two files."""
    generator = torch.Generator().manual_seed(3)
    first = {
        "a.weight": torch.randn(40, 50, generator=generator).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.rand(3, 4, generator=generator),
        "norm.weight": torch.randn(7, generator=generator),
        "experts_blocks": torch.randint(0, 256, (3, 5, 4, 16), dtype=torch.uint8, generator=generator),
    }
    second = {
        "b.weight": torch.randn(32, 16, generator=generator).to(torch.float8_e4m3fn),
        "b.weight_scale_inv": torch.rand(2, 1, generator=generator),
        "experts_scales": torch.randint(120, 135, (3, 5, 4), dtype=torch.uint8, generator=generator),
    }
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate((first, second), 1):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file(tensors, tmp_path / name)
        weight_map |= dict.fromkeys(tensors, name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def room(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "a.weight": torch.zeros(40, 50, dtype=dtype),
        "b.weight": torch.zeros(32, 16, dtype=dtype),
        "experts_blocks": torch.zeros(3, 5, 128, dtype=dtype),
        "norm.weight": torch.zeros(7),
    }


@pytest.mark.skipif(not IS_NEWEST, reason="older versions of torch have no such reader, or another one")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strip", [1 << 20, 64])
def test_numbers_are_those_of_stock_torch(
    model: Path, dtype: torch.dtype, strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_reading, "STRIP", strip)
    ours, theirs = room(dtype), room(dtype)
    options: dict[str, Any] = {"target_dtype": dtype, "block_size": 16, "thread_count": 2}
    dcp.load(ours, storage_reader=QuantizedHuggingFaceStorageReader(model, **options))
    stocks = importlib.import_module("torch.distributed.checkpoint.quantized_hf_storage")
    stock.load(theirs, storage_reader=stocks.QuantizedHuggingFaceStorageReader(str(model), **options))
    for key in ("a.weight", "b.weight", "norm.weight"):
        assert torch.equal(ours[key], theirs[key]), key
    # Stock torch fills only the first numbers of each row, as many as there are groups.
    assert torch.equal(ours["experts_blocks"][..., :4], theirs["experts_blocks"][..., :4])


def test_mxfp4_is_two_numbers_in_each_byte_the_low_one_first(model: Path) -> None:
    found = {"experts_blocks": torch.zeros(3, 5, 128)}
    dcp.load(found, storage_reader=QuantizedHuggingFaceStorageReader(model))
    with safe_open(model / "model-00001-of-00002.safetensors", "pt") as file:
        packed = file.get_tensor("experts_blocks")
    with safe_open(model / "model-00002-of-00002.safetensors", "pt") as file:
        scales = file.get_tensor("experts_scales")
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for at in ((0, 0, 0), (1, 2, 33), (2, 4, 127)):
        byte = int(packed[at[0], at[1], at[2] // 32, at[2] % 32 // 2])
        nibble = byte >> 4 if at[2] % 2 else byte & 15
        value = table[nibble & 7] * (-1 if nibble & 8 else 1)
        assert found["experts_blocks"][at] == value * 2.0 ** (int(scales[at[0], at[1], at[2] // 32]) - 127)


def test_a_wrong_block_size_is_named(model: Path) -> None:
    with pytest.raises(InvalidPlanError, match="block_size"):
        dcp.load(room(torch.float32), storage_reader=QuantizedHuggingFaceStorageReader(model, block_size=8))

"""A model that FSDP2 shards on the meta device, loaded for real by the ranks."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast

pytestmark = pytest.mark.slow


def build() -> nn.Module:
    # 5 and 1 rows over 3 ranks: padded shards, and ranks that hold nothing of a tensor.
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(8.0).view(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, Any]:
    return {name: value.full_tensor().tolist() for name, value in model.state_dict().items()}


def load_on_meta(folder: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    warnings.simplefilter("error")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = build()
    for layer in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = list(model.parameters())
    result = holdfast.load({"model": model}, checkpoint_id=folder)
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))
    assert len(result.loaded) == 4
    loaded = whole(model)
    train(model, optimizer)
    return loaded, whole(model), sorted({str(one.device) for one in model.parameters()})


def test_a_model_sharded_on_the_meta_device_is_loaded_and_trains_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build()
    holdfast.save({"model": model}, checkpoint_id=tmp_path)
    saved = {name: value.tolist() for name, value in model.state_dict().items()}
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for kind, value in run_ranks(load_on_meta, 3, str(tmp_path)):
        assert kind == "returned", value
        loaded, trained, devices = value
        assert loaded == saved
        assert devices == ["cpu"]
        for name, expected in model.state_dict().items():
            torch.testing.assert_close(torch.tensor(trained[name]), expected)

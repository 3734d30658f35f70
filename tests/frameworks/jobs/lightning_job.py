"""Trains with Lightning's Fabric and ModelParallelStrategy, which shards by FSDP2."""

import torch
from job_settings import SETTINGS, WORLD, batch, make_model, tell, watch_for_kill
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard


def shard(model: torch.nn.Module, mesh: object) -> torch.nn.Module:
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


strategy = ModelParallelStrategy(shard, data_parallel_size=WORLD, tensor_parallel_size=1)
fabric = Fabric(accelerator="cpu", devices=WORLD, strategy=strategy)
fabric.launch()
model = fabric.setup(make_model())
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
state = {"model": model, "optimizer": optimizer, "step": 0}
if SETTINGS.resume:
    fabric.load(SETTINGS.folder, state)
first, losses = state["step"], []
while state["step"] < first + SETTINGS.steps:
    loss = model(batch(state["step"])).square().mean()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    state["step"] += 1
watch_for_kill()
fabric.save(SETTINGS.folder, state)
tell(losses, first=first)

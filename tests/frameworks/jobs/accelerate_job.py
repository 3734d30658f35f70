"""Trains with accelerate's FSDP2; save_state, load_state and merge_fsdp_weights are accelerate's own."""

import os

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import merge_fsdp_weights
from job_settings import SETTINGS, batch, make_model, tell, watch_for_kill
from sharding_on_cpus import shard_on_cpus
from torch import optim

shard_on_cpus()
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    state_dict_type="FULL_STATE_DICT" if SETTINGS.plain else "SHARDED_STATE_DICT",
    reshard_after_forward=True,
    auto_wrap_policy="NO_WRAP",
)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
model = make_model()
model, optimizer = accelerator.prepare(model, optim.AdamW(model.parameters(), lr=0.01))
step = 0
if SETTINGS.resume:
    accelerator.load_state(SETTINGS.folder)
    step = int(optimizer.state[next(model.parameters())]["step"])
first, losses = step, []
while step < first + SETTINGS.steps:
    loss = model(batch(step)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    step += 1
watch_for_kill()
accelerator.save_state(SETTINGS.folder)
if SETTINGS.export:
    merge_fsdp_weights(os.path.join(SETTINGS.folder, "pytorch_model_fsdp_0"), SETTINGS.export)
tell(losses, first=first)

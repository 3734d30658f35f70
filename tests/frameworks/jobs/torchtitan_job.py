"""Trains by hand, and saves with torchtitan's CheckpointManager, as torchtitan's trainer does."""

import os

import torch
import torch.distributed as dist
from job_settings import SETTINGS, WORLD, batch, make_model, tell, watch_for_kill
from torch.distributed.checkpoint.state_dict import StateDictOptions as Options
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torchtitan.components.checkpoint import CheckpointManager


class Optimizers:
    options = Options(flatten_optimizer_state_dict=True)

    def state_dict(self) -> dict:
        return get_optimizer_state_dict(model, optimizer, options=self.options)

    def load_state_dict(self, loaded: dict) -> None:
        set_optimizer_state_dict(model, optimizer, optim_state_dict=loaded, options=self.options)


class Progress:
    step = 0

    def state_dict(self) -> dict:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, loaded: dict) -> None:
        self.step = int(loaded["step"])


class Loader:
    """Each rank has a state of its own, as torchtitan's data loaders do."""

    def __init__(self) -> None:
        self.rank, self.seen = dist.get_rank(), 0

    def state_dict(self) -> dict:
        return {f"dp_rank_{self.rank}": self.seen, "world_size": WORLD}

    def load_state_dict(self, loaded: dict) -> None:
        self.seen = loaded[f"dp_rank_{self.rank}"]


class Adapter:
    """Names of Hugging Face, in two files."""

    fqn_to_index_mapping = {"x.0.weight": 1, "x.0.bias": 1, "x.2.weight": 2, "x.2.bias": 2}

    def to_hf(self, state: dict) -> dict:
        return {f"x.{key}": value for key, value in state.items()}


dist.init_process_group("gloo")
model = make_model()
fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
progress, loader = Progress(), Loader()
manager = CheckpointManager(
    CheckpointManager.Config(
        enable=True,
        folder=SETTINGS.folder,
        interval=1,
        keep_latest_k=2,
        async_mode="async" if SETTINGS.in_background else "disabled",
        last_save_in_hf=bool(SETTINGS.export),
        exclude_from_loading=["dataloader"] if SETTINGS.resume == "elsewhere" else [],
    ),
    dataloader=loader,
    model_parts=[model],
    optimizers=Optimizers(),
    lr_schedulers=Progress(),
    states={"train_state": progress},
    sd_adapter=Adapter(),
)
if SETTINGS.resume:
    assert manager.load()
first, losses = progress.step, []
watch_for_kill()
while progress.step < first + SETTINGS.steps:
    loss = model(batch(progress.step)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    progress.step += 1
    loader.seen += 1
    is_last = bool(SETTINGS.export) and progress.step == first + SETTINGS.steps
    manager.save(progress.step, last_step=is_last)
if SETTINGS.in_background:
    manager.maybe_wait_for_saving()
manager.close()
tell(losses, first=first, seen=loader.seen, folders=sorted(os.listdir(SETTINGS.folder)))

"""Trains with Lightning's Trainer and ModelParallelStrategy: save_checkpoint and ckpt_path are its own."""

from typing import Any

import torch
from job_settings import SETTINGS, WORLD, batch, make_model, tell, watch_for_kill
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.losses, self.model = 0, [], None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = make_model()
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def on_train_start(self) -> None:
        self.first = self.global_step

    def training_step(self, _: Any, __: int) -> torch.Tensor:
        loss = self.model(batch(self.global_step)).square().mean()
        self.losses.append(loss.item())
        self.trainer.should_stop = len(self.losses) == SETTINGS.steps
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
strategy = ModelParallelStrategy(data_parallel_size=WORLD, tensor_parallel_size=1)
trainer = Trainer(accelerator="cpu", devices=WORLD, strategy=strategy, use_distributed_sampler=False, **quiet)
module = Module()
trainer.fit(module, DataLoader(range(100)), ckpt_path=SETTINGS.folder if SETTINGS.resume else None)
watch_for_kill()
trainer.save_checkpoint(SETTINGS.folder)
tell(module.losses, first=module.first)

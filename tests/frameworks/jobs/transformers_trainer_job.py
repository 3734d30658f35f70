"""Trains a tiny Llama with transformers' Trainer, which saves and resumes, sharded by accelerate's FSDP2."""

import os
from typing import Any

import torch
from job_settings import SETTINGS, WORLD, tell, watch_for_kill
from sharding_on_cpus import shard_on_cpus
from tiny_llama import make_llama, tokens_of
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8 * 100

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = tokens_of(number // 8)[number % 8]
        return {"input_ids": row, "labels": row}


class InOrder(Trainer):
    losses: list[float] = []

    def _get_train_sampler(self, *_: Any) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


class End(TrainerCallback):
    """Saves after the given number of steps, and stops."""

    first = 0

    def on_train_begin(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        self.first = state.global_step

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        if state.global_step == self.first + SETTINGS.steps:
            control.should_training_stop = control.should_save = True
            watch_for_kill()


sharded = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
shard_on_cpus()
arguments = TrainingArguments(
    SETTINGS.folder,
    use_cpu=True,
    per_device_train_batch_size=8 // WORLD,
    max_steps=100,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    **({} if SETTINGS.plain else sharded),
)
end = End()
trainer = InOrder(make_llama(), arguments, train_dataset=Rows(), callbacks=[end])
newest = get_last_checkpoint(SETTINGS.folder) if SETTINGS.resume else None
if SETTINGS.resume == "first":
    newest = os.path.join(SETTINGS.folder, "checkpoint-2")
trainer.train(resume_from_checkpoint=newest)
tell(trainer.losses, first=end.first, folders=sorted(os.listdir(SETTINGS.folder)))

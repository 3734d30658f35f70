"""A model in pipeline stages: every rank has layers, and so keys, of its own."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.training.fingerprints import fingerprint
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import holdfast
from holdfast.state_dict import StateDictOptions, get_state_dict, set_state_dict

SIZES = (6, 10, 7, 9, 3)
LAYERS = len(SIZES) - 1
BEFORE, AFTER = 3, 2
"""Steps before and after the checkpoint."""
MICRO_BATCHES, BATCH = 2, 8
# With a list of groups every rank would save its own parameters' names under the same key.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Stage(nn.Module):
    """The layers of one rank, under the names that they have in the whole model."""

    def __init__(self, layers: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): nn.Linear(SIZES[n], SIZES[n + 1]) for n in layers})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            inputs = torch.tanh(layer(inputs))
        return inputs


class StageTraining:
    """A stage with its optimizer; there are as many stages as ranks."""

    def __init__(self, seed: int) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed + rank)
        self.model = Stage([n for n in range(LAYERS) if n * world_size // LAYERS == rank])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=_FLAT)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_FLAT,
        )

    def train(self, first: int, last: int) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        stage = PipelineStage(self.model, rank, world_size, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(BATCH, SIZES[0], generator=generator)
            targets = torch.randn(BATCH, SIZES[-1], generator=generator)
            if rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=targets if rank == world_size - 1 else None)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def fingerprints(self) -> dict[str, str]:
        """Parameters and optimizer state of this rank's layers."""
        found: dict[str, Any] = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter
            found |= {f"{name}.{kind}": value for kind, value in self.optimizer.state[parameter].items()}
        return {name: fingerprint(value) for name, value in found.items()}


def save_and_train_on(folder: Path) -> dict[str, dict[str, str]]:
    training = StageTraining(seed=10)
    training.train(0, BEFORE)
    saved = training.fingerprints()
    holdfast.save({"training": training, "step": BEFORE}, checkpoint_id=folder / "stages")
    training.train(BEFORE, BEFORE + AFTER)
    return {"saved": saved, "end": training.fingerprints()}


def load_stages(folder: Path) -> StageTraining:
    training = StageTraining(seed=20)
    state = {"training": training, "step": 0}
    holdfast.load(state, checkpoint_id=folder / "stages")
    assert state["step"] == BEFORE
    return training


def resume_and_train_on(folder: Path) -> dict[str, dict[str, str]]:
    training = load_stages(folder)
    loaded = training.fingerprints()
    training.train(BEFORE, BEFORE + AFTER)
    return {"loaded": loaded, "end": training.fingerprints()}

"""What the ranks of the training tests do: train and save, resume and train on, or load in another world."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from tests.training import fsdp1_states, stages
from tests.training.fingerprints import fingerprint
from tests.training.fsdp1_states import FORMS, TARGETS
from tests.training.layouts import CLASSES, FEATURES, LAYOUTS, build
from torch import nn

import holdfast
from holdfast.state_dict import get_state_dict, set_state_dict

Case: TypeAlias = tuple[str, ...]
BEFORE, AFTER = 3, 2
"""Steps before and after the checkpoint."""
BATCH = 6
FSDP1_PAIRS = [
    *TARGETS.items(),
    ("sharded", "mesh"),
    ("sharded", "everywhere"),
    ("mesh", "sharded"),
    ("flat", "everywhere"),
]
"""As what a form was saved, and as what it is loaded."""


def layout_pairs(world_size: int) -> list[tuple[str, str]]:
    """The layout saved and the one loaded into: each into itself, and into another, by the world size."""
    others = [LAYOUTS[(place + world_size) % len(LAYOUTS)] for place in range(len(LAYOUTS))]
    return [*zip(LAYOUTS, LAYOUTS, strict=True), *zip(LAYOUTS, others, strict=True)]


class Training:
    """Model, optimizer and schedule: what a user hands to save and load."""

    def __init__(self, layout: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model, self.batches, self.mine = build(layout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, amsgrad=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.schedule.load_state_dict(state["schedule"])

    def train(self, steps: int) -> None:
        """Data and dropout come from the process's generator, so that its state matters."""
        for _ in range(steps):
            batches = torch.randn(self.batches, BATCH, FEATURES).unbind()
            classes = torch.randint(CLASSES, (self.batches, BATCH)).unbind()
            loss = nn.functional.cross_entropy(self.model(batches[self.mine]), classes[self.mine])
            torch.autograd.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def fingerprints(self) -> dict[str, str]:
        """Every value that training depends on, read from the objects and not from a state dict."""
        named = {name.removeprefix("module."): value for name, value in self.model.named_parameters()}
        found: dict[str, Any] = {f"model.{name}": value for name, value in named.items()}
        found |= {name.removeprefix("module."): value for name, value in self.model.named_buffers()}
        for name, parameter in named.items():
            for kind, value in self.optimizer.state[parameter].items():
                found[f"optimizer.{name}.{kind}"] = value
        for option, value in self.optimizer.param_groups[0].items():
            if option != "params":
                found[f"optimizer.{option}"] = value
        found |= {f"schedule.{name}": value for name, value in self.schedule.state_dict().items()}
        found["rng"] = torch.get_rng_state()
        return {name: fingerprint(value) for name, value in found.items()}


def save_and_train_on(folder: Path, layout: str) -> dict[str, dict[str, str]]:
    training = Training(layout, seed=1)
    training.train(BEFORE)
    saved = training.fingerprints()
    state = {"training": training, "rng": torch.get_rng_state(), "step": BEFORE}
    holdfast.save(state, checkpoint_id=folder / layout)
    training.train(AFTER)
    return {"saved": saved, "end": training.fingerprints()}


def load(folder: Path, saved_layout: str, layout: str) -> Training:
    """A new model in ``layout``, with everything from the checkpoint of ``saved_layout``."""
    training = Training(layout, seed=2)
    state: dict[str, Any] = {"training": training, "rng": torch.get_rng_state(), "step": 0}
    holdfast.load(state, checkpoint_id=folder / saved_layout, strict=True)
    torch.set_rng_state(state["rng"])
    assert state["step"] == BEFORE
    return training


def resume_and_train_on(folder: Path, layout: str) -> dict[str, dict[str, str]]:
    training = load(folder, layout, layout)
    loaded = training.fingerprints()
    training.train(AFTER)
    return {"loaded": loaded, "end": training.fingerprints()}


def attempt(work: Callable[..., Any], *args: Any) -> Any:
    """What it returns, or the text of what it raises: one case that fails leaves the others alone."""
    try:
        return work(*args)
    except Exception:
        return traceback.format_exc()


def first_job(folder: Path) -> dict[Case, Any]:
    """Every case, trained and saved, and trained on; and states of FSDP1, saved."""
    torch.set_num_threads(1)
    found: dict[Case, Any] = {(layout,): attempt(save_and_train_on, folder, layout) for layout in LAYOUTS}
    found["stages",] = attempt(stages.save_and_train_on, folder)
    return found | {("fsdp1", form): attempt(fsdp1_states.save_form, folder, form) for form in FORMS}


def resumed_job(folder: Path) -> dict[Case, Any]:
    """Every case that trains, loaded by new processes and trained on."""
    torch.set_num_threads(1)
    found: dict[Case, Any] = {(layout,): attempt(resume_and_train_on, folder, layout) for layout in LAYOUTS}
    return found | {("stages",): attempt(stages.resume_and_train_on, folder)}


def loading_job(folder: Path) -> dict[Case, Any]:
    """The checkpoints of the first job, loaded into a layout each, by as many ranks as there are here."""
    torch.set_num_threads(1)
    found: dict[Case, Any] = {
        pair: attempt(lambda pair=pair: load(folder, *pair).fingerprints())
        for pair in layout_pairs(dist.get_world_size())
    }
    found["stages",] = attempt(lambda: stages.load_stages(folder).fingerprints())
    return found | {("fsdp1", *pair): attempt(fsdp1_states.load_form, folder, *pair) for pair in FSDP1_PAIRS}

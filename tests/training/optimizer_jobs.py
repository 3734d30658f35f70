"""What the ranks do to resume optimizers: model and fresh optimizer are handed to load as they are."""

from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from tests.training.fingerprints import fingerprint
from tests.training.jobs import BATCH, attempt
from tests.training.layouts import CLASSES, FEATURES, Model, build
from torch import nn

import holdfast

Case: TypeAlias = tuple[str, str]
"""A layout and the name of an optimizer."""


class Factored(torch.optim.Optimizer):
    """Keeps a number for each row beside a momentum, as optimizers of strangers do."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in [value for value in group["params"] if value.grad is not None]:
                state = self.state[parameter]
                if not state:
                    state["rows"] = parameter.new_zeros(len(parameter), *[1] * (parameter.ndim - 1))
                    state["moments"] = {"first": torch.zeros_like(parameter)}
                    state["count"] = 0
                state["count"] += 1
                state["rows"].add_(state["count"])
                state["moments"]["first"].add_(parameter.grad)
                parameter.data.add_(state["moments"]["first"] * state["rows"], alpha=-group["lr"] / 100)


class LocalParts(torch.optim.Optimizer):
    """Keeps plain tensors for the part of a parameter that this rank has, and computes with these alone."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in [value for value in group["params"] if value.grad is not None]:
                mine, gradient = parameter.data.to_local(), parameter.grad.to_local()
                state = self.state[parameter]
                if not state:
                    state["moments"] = {"first": torch.zeros_like(mine)}
                state["moments"]["first"].add_(gradient)
                mine.add_(state["moments"]["first"], alpha=-group["lr"])


STRANGERS = {"Factored": Factored, "LocalParts": LocalParts}


class Run:
    """A model in a layout and its optimizer, with two groups, an empty group and a frozen parameter."""

    def __init__(self, layout: str, optimizer: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model, self.batches, self.mine = build(layout)
        named = {name.removeprefix("module."): value for name, value in self.model.named_parameters()}
        named["scales"].requires_grad_(False)
        self.named = named
        head = [value for name, value in named.items() if name.startswith("head.")]
        rest = [value for name, value in named.items() if not name.startswith("head.")]
        groups = [{"params": head, "lr": 0.02}, {"params": []}, {"params": rest}]
        options = {"momentum": 0.9} if optimizer in ("SGD", "RMSprop") else {}
        kind: Any = STRANGERS.get(optimizer) or getattr(torch.optim, optimizer)
        self.optimizer: torch.optim.Optimizer = kind(groups, lr=0.01, **options)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(self.batches, BATCH, FEATURES, generator=generator).unbind()
            classes = torch.randint(CLASSES, (self.batches, BATCH), generator=generator).unbind()
            # Dropout draws from the generator of the process.
            torch.manual_seed(step)
            loss = nn.functional.cross_entropy(self.model(inputs[self.mine]), classes[self.mine])
            torch.autograd.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def states(self) -> dict[str, Any]:
        """Every value of the optimizer's state by its name."""
        found: dict[str, Any] = {}
        for name, parameter in self.named.items():
            for kind, value in self.optimizer.state.get(parameter, {}).items():
                parts = value if isinstance(value, dict) else {"": value}
                found |= {f"optimizer.{name}.{kind}.{part}": entry for part, entry in parts.items()}
        return found

    def fingerprints(self) -> dict[str, str]:
        found = {f"model.{name}": value for name, value in self.named.items()} | self.states()
        for number, group in enumerate(self.optimizer.param_groups):
            found |= {f"{number}.{option}": value for option, value in group.items() if option != "params"}
        return {name: fingerprint(value) for name, value in found.items()}

    def layouts(self) -> dict[str, str]:
        """How this rank holds each tensor of the optimizer's state: what training on would trip over."""
        return {name: _layout(value) for name, value in self.states().items()}


def _layout(value: Any) -> str:
    if isinstance(value, torch.distributed.tensor.DTensor):
        return f"{value.placements} {value.to_local().stride()} {value.dtype}"
    if isinstance(value, torch.Tensor):
        return f"{value.stride()} {value.dtype} {value.device}"
    return repr(value)


def save_and_train_on(folder: Path, layout: str, optimizer: str) -> dict[str, Any]:
    run = Run(layout, optimizer, seed=1)
    try:
        run.train(range(2))
    except Exception as error:
        return {"untrainable": f"{type(error).__name__}: {error}"}
    found = {"saved": run.fingerprints(), "layouts": run.layouts()}
    state = {"model": run.model, "optimizer": run.optimizer}
    holdfast.save(state, checkpoint_id=folder / layout / optimizer)
    return found | {"losses": run.train(range(2, 4)), "end": run.fingerprints()}


def resume(folder: Path, layout: str, optimizer: str) -> dict[str, Any]:
    run = Run(layout, optimizer, seed=2)
    holdfast.load({"model": run.model, "optimizer": run.optimizer}, checkpoint_id=folder / layout / optimizer)
    found = {"loaded": run.fingerprints(), "layouts": run.layouts()}
    if dist.get_world_size() < 4:
        return found
    return found | {"losses": run.train(range(2, 4)), "end": run.fingerprints()}


def first_job(folder: Path, cases: list[Case]) -> dict[Case, Any]:
    torch.set_num_threads(1)
    return {case: attempt(save_and_train_on, folder, *case) for case in cases}


def resumed_job(folder: Path, cases: list[Case]) -> dict[Case, Any]:
    torch.set_num_threads(1)
    return {case: attempt(resume, folder, *case) for case in cases}


def save_apart(folder: Path) -> dict[str, str]:
    """Each rank trains a whole model of its own, and all save theirs under the same keys."""
    torch.manual_seed(dist.get_rank())
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer)
    holdfast.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    return _moments(model, optimizer)


def load_into_shards(folder: Path) -> dict[str, str]:
    model, _, _ = build("fsdp")
    optimizer = torch.optim.AdamW(model.parameters())
    holdfast.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    found = _moments(model, optimizer)
    _step(model, optimizer)  # the state is of a form that a step takes
    return found


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    return {name: fingerprint(optimizer.state[value]["exp_avg"]) for name, value in model.named_parameters()}

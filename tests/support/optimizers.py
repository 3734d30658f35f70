"""Optimizers that keep their state in unusual tensors."""

from typing import Any

import torch
from tests.support.subclasses import BlockScaled


class LowBit(torch.optim.Optimizer):
    """Keeps what it knows of a parameter in a tensor of a subclass, made in the first step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            state["exp_avg"] = BlockScaled.random(*parameter.shape, seed=state["step"])

    def load_state_dict(self, state_dict: Any) -> None:
        parameters = self.param_groups[0]["params"]
        for number, state in state_dict["state"].items():
            self.state[parameters[number]] = state

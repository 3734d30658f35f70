"""What ranks do to test a TrainingState on other numbers of ranks."""

import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.errors import PlanError


class Position:
    """A position in the data."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


def _state(position: Position, **options: Any) -> holdfast.TrainingState:
    torch.manual_seed(1)
    model = nn.Linear(2, 2)
    return holdfast.TrainingState(model, torch.optim.Adam(model.parameters()), data=position, **options)


def save(folder: Path) -> dict[str, Any]:
    state = _state(Position(10 + dist.get_rank()))
    torch.manual_seed(100 + dist.get_rank())
    random.seed(100 + dist.get_rank())
    holdfast.save({"training": state}, checkpoint_id=folder)
    return {"drawn": _draw()}


def load(folder: Path) -> dict[str, Any]:
    refused = None
    try:
        holdfast.load({"training": _state(Position(0))}, checkpoint_id=folder)
    except PlanError as error:
        refused = str(error)
    position = Position(0)
    holdfast.load({"training": _state(position, data_resize=_first)}, checkpoint_id=folder)
    return {"drawn": _draw(), "position": position.value, "refused": refused}


def _first(states: list[Any], rank: int, world_size: int) -> Any:
    assert world_size == dist.get_world_size()
    assert rank == dist.get_rank()
    return states[0]


def _draw() -> list[float]:
    return [random.random(), float(torch.rand(()))]

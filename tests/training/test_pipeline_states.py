"""TrainingState over the stages of a pipeline: other layers on each rank, dealt out anew by a resume."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.states import assert_same
from torch import nn

import holdfast
from holdfast import TrainingState
from holdfast.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from holdfast.testing import FakeRank, FakeRanks


class Stage(nn.Module):
    """Some layers of a model."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(3, 3) for number in numbers})


def test_parts_of_a_pipeline_are_one_model(tmp_path: Path) -> None:
    def make(*stages: tuple[int, ...]) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        parts: list[nn.Module] = [Stage(*numbers) for numbers in stages]
        return parts, [torch.optim.AdamW(part.parameters()) for part in parts]

    parts, optimizers = make((0, 1), (2, 3))
    for part, optimizer in zip(parts, optimizers, strict=True):
        for parameter in part.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    holdfast.save({"training": TrainingState(parts, optimizers)}, checkpoint_id=tmp_path)
    (whole,), (resumed,) = make((0, 1, 2, 3))
    holdfast.load({"training": TrainingState(whole, resumed)}, checkpoint_id=tmp_path)
    names = {name: value for part in parts for name, value in part.named_parameters()}
    states = {id(value): state for one in optimizers for value, state in one.state.items()}
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, names[name])
        assert_same(resumed.state[parameter], states[id(names[name])])


def stages(rank: int, world_size: int, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The layers of one rank, with groups of weights and biases whose options tell where they were."""
    model = Stage(*[number for number in range(4) if number * world_size // 4 == rank])
    weights = [value for value in model.parameters() if value.ndim == 2]
    biases = [value for value in model.parameters() if value.ndim == 1]
    groups = [{"params": weights, "lr": lr}, {"params": biases, "lr": 2 * lr, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups)


def trained_stages(rank: int, world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = stages(rank, world_size, 0.25)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_stages_on_ranks_resume_in_any_arrangement(world_size: int, tmp_path: Path) -> None:
    saved: dict[str, Any] = {}

    def save(rank: FakeRank) -> None:
        model, optimizer = trained_stages(rank.rank, 2)
        saved.update({name: (value, optimizer.state[value]) for name, value in model.named_parameters()})
        rank.save({"training": TrainingState(model, optimizer, rng=False)}, checkpoint_id=tmp_path)

    def load(rank: FakeRank) -> None:
        model, optimizer = stages(rank.rank, world_size, 0.5)
        rank.load({"training": TrainingState(model, optimizer, rng=False)}, checkpoint_id=tmp_path)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, saved[name][0])
            assert_same(optimizer.state[parameter], saved[name][1])
        assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]

    with warnings.catch_warnings():
        # No value is kept for one rank alone.
        warnings.simplefilter("error")
        FakeRanks(2).run(save)
        FakeRanks(world_size).run(load)


@pytest.mark.filterwarnings("ignore:ranks save different values", "ignore:each rank now has rank 0's value")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_state_dicts_of_stages_load_in_any_arrangement(world_size: int, tmp_path: Path) -> None:
    saved: dict[str, Any] = {}

    def save(rank: FakeRank) -> None:
        model, optimizer = trained_stages(rank.rank, 2)
        saved.update({name: optimizer.state[value] for name, value in model.named_parameters()})
        rank.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path)

    def load(rank: FakeRank) -> None:
        model, optimizer = stages(rank.rank, world_size, 0.5)
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        rank.load(state, checkpoint_id=tmp_path)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        for name, parameter in model.named_parameters():
            assert_same(optimizer.state[parameter], saved[name])
        assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]

    FakeRanks(2).run(save)
    FakeRanks(world_size).run(load)

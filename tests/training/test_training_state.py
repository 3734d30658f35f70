"""TrainingState: a whole run in one object, saved and loaded in one line."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.ranks import run_ranks
from tests.support.states import assert_same
from tests.training import training_state_ranks
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

import holdfast
from holdfast import TrainingState
from holdfast.errors import UsageError
from holdfast.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from holdfast.state_dict_saver import SaveFuture


class Loader:
    """A data loader that knows its position."""

    def __init__(self) -> None:
        self.position = 0
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, **({"seen": self.seen} if self.seen else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position, self.seen = state_dict["position"], list(state_dict.get("seen", ()))

    def __next__(self) -> torch.Tensor:
        self.position += 1
        self.seen.append(self.position)
        return torch.randn(4, 6, generator=torch.Generator().manual_seed(self.position))


class Run:
    """A small run with dropout, so that random numbers matter."""

    def __init__(self, device: str = "cpu", **options: Any) -> None:
        torch.manual_seed(1)
        with torch.device(device):
            self.model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.3), nn.Linear(5, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.schedule = CosineAnnealingLR(self.optimizer, T_max=20)
        self.loader = Loader()
        self.state = TrainingState(
            self.model, self.optimizer, self.schedule, data=self.loader, extra={"best": 1.0}, **options
        )

    def train(self, until: int) -> list[float]:
        losses = []
        for step in range(self.state.step + 1, until + 1):
            self.state.step = step
            noise = random.random() + float(np.random.rand())
            loss = (self.model(next(self.loader)) ** 2).mean() * noise
            torch.autograd.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            losses.append(loss.item())
            self.state.extra["best"] = min(self.state.extra["best"], loss.item())
        return losses

    def values(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "loader": self.loader.state_dict(),
            "extra": self.state.extra,
            "step": self.state.step,
        }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def test_a_run_goes_on_exactly(folder: Path) -> None:
    run = Run()
    run.train(3)
    holdfast.save({"training": run.state}, checkpoint_id=folder)
    losses = run.train(6)

    resumed = Run()
    holdfast.load({"training": resumed.state}, checkpoint_id=folder)
    assert resumed.state.step == 3
    assert resumed.train(6) == losses
    assert_same(resumed.values(), run.values())


def test_saving_after_each_step_changes_nothing(folder: Path) -> None:
    def losses(*, save: bool) -> list[float]:
        run = Run()
        random.seed(3)
        np.random.seed(3)
        found = []
        for step in range(1, 5):
            found += run.train(step)
            if save:
                saving = holdfast.async_save({"training": run.state}, checkpoint_id=folder)
                assert isinstance(saving, SaveFuture)
                saving.result()
        return found

    assert losses(save=True) == losses(save=False)


@pytest.mark.parametrize("parts", [("model",), ("model", "step"), ("optimizer", "schedulers")])
def test_parts_alone(parts: tuple[str, ...], folder: Path) -> None:
    run = Run()
    run.train(3)
    holdfast.save({"training": run.state}, checkpoint_id=folder)
    resumed, fresh = Run(), Run()
    random_state = torch.get_rng_state()
    holdfast.load({"training": resumed.state.only(*parts)}, checkpoint_id=folder, strict=False)
    names = {"schedulers": "schedule"}
    loaded = {names.get(part, part) for part in parts}
    for name, value in resumed.values().items():
        expected = run if name in loaded else fresh
        assert_same({name: value}, {name: expected.values()[name]})
    assert torch.equal(torch.get_rng_state(), random_state)


def test_everything_but_a_part(folder: Path) -> None:
    run = Run()
    run.train(3)
    holdfast.save({"training": run.state}, checkpoint_id=folder)
    resumed = Run()
    holdfast.load({"training": resumed.state.without("optimizer", "rng")}, checkpoint_id=folder, strict=False)
    assert not resumed.optimizer.state
    assert resumed.state.step == 3
    assert_same(resumed.model.state_dict(), run.model.state_dict())


@pytest.mark.parametrize("method", ["only", "without"])
def test_a_part_that_there_is_not_is_named_at_once(method: str) -> None:
    choose = getattr(Run().state, method)
    with pytest.raises(UsageError, match="no part 'weights'; it has model, optimizer"):
        choose("weights")
    with pytest.raises(UsageError, match=r"no part 'modle' .did you mean 'model'"):
        choose("step", "modle")


def test_an_argument_that_there_is_not_is_named() -> None:
    options: dict[str, Any] = {"optimizers": None}
    with pytest.raises(
        TypeError, match=r"no argument 'optimizers' .did you mean 'optimizer'.*; it has model, o"
    ):
        TrainingState(nn.Linear(2, 2), **options)


def test_adapters_alone(folder: Path) -> None:
    def make() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model[0].requires_grad_(False)
        return model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)

    model, optimizer = make()
    torch.autograd.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    holdfast.save({"training": TrainingState(model, optimizer, trainable_only=True)}, checkpoint_id=folder)
    stored = holdfast.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert not [key for key in stored if ".model.0." in key]

    other, resumed = make()
    with torch.no_grad():
        other[0].weight.fill_(7)
    holdfast.load({"training": TrainingState(other, resumed, trainable_only=True)}, checkpoint_id=folder)
    assert_same(other[1].state_dict(), model[1].state_dict())
    assert_same(resumed.state_dict(), optimizer.state_dict())
    assert torch.equal(other[0].weight, torch.full((4, 4), 7.0))


def test_groups_and_parameters_in_another_order(folder: Path) -> None:
    def make(*, turned: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        groups: list[dict[str, Any]] = [
            {"params": list(model[0].parameters()), "lr": 0.1},
            {"params": list(model[1].parameters()), "lr": 0.2},
        ]
        if turned:
            groups = [{**group, "params": group["params"][::-1]} for group in groups[::-1]]
        return model, torch.optim.AdamW(groups)

    model, optimizer = make(turned=False)
    torch.autograd.backward(model(torch.arange(8.0).reshape(2, 4)).pow(2).sum())
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    holdfast.save({"training": TrainingState(model, optimizer)}, checkpoint_id=folder)
    other, resumed = make(turned=True)
    holdfast.load({"training": TrainingState(other, resumed)}, checkpoint_id=folder)
    for old, new in zip(model.parameters(), other.parameters(), strict=True):
        assert_same(resumed.state[new], optimizer.state[old])
    assert [group["lr"] for group in resumed.param_groups] == [0.2, 0.5]


@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("head", ["before", "after", "within"])
def test_parameters_that_were_added_stay_as_they_are(head: str, has_stepped: bool, folder: Path) -> None:
    def make(*, grown: bool, lr: float) -> tuple[Any, torch.optim.Optimizer]:
        model = nn.ModuleDict({"body": nn.Linear(4, 4)} | ({"head": nn.Linear(4, 2)} if grown else {}))
        groups: list[dict[str, Any]] = [{"params": list(model["body"].parameters()), "lr": lr}]
        if grown and head == "within":
            groups[0]["params"] += model["head"].parameters()
        elif grown:
            groups.insert(int(head == "after"), {"params": list(model["head"].parameters()), "lr": 0.125})
        return model, torch.optim.AdamW(groups)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    model, optimizer = make(grown=False, lr=0.5)
    step(model, optimizer)
    holdfast.save({"training": TrainingState(model, optimizer)}, checkpoint_id=folder)
    other, resumed = make(grown=True, lr=0.25)
    if has_stepped:
        step(other, resumed)
    added = copy.deepcopy([(value, resumed.state.get(value)) for value in other["head"].parameters()])
    holdfast.load({"training": TrainingState(other, resumed)}, checkpoint_id=folder, allow_partial_load=True)
    for old, new in zip(model.parameters(), other["body"].parameters(), strict=True):
        assert torch.equal(old, new)
        assert_same(resumed.state[new], optimizer.state[old])
    for new, (value, state) in zip(other["head"].parameters(), added, strict=True):
        assert torch.equal(new, value)
        assert_same(resumed.state.get(new), state)
    rates = {"before": [0.125, 0.5], "after": [0.5, 0.125], "within": [0.5]}
    assert [group["lr"] for group in resumed.param_groups] == rates[head]


def test_several_models_and_optimizers_by_name(folder: Path) -> None:
    def make() -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
        torch.manual_seed(1)
        models: dict[str, nn.Module] = {"generator": nn.Linear(3, 3), "critic": nn.Linear(3, 1)}
        return models, {name: torch.optim.Adam(model.parameters()) for name, model in models.items()}

    models, optimizers = make()
    for name, model in models.items():
        torch.autograd.backward(model(torch.ones(1, 3)).sum())
        optimizers[name].step()
    holdfast.save({"training": TrainingState(models, optimizers)}, checkpoint_id=folder)
    others, resumed = make()
    holdfast.load({"training": TrainingState(others, resumed)}, checkpoint_id=folder)
    for name in models:
        assert_same(others[name].state_dict(), models[name].state_dict())
        assert_same(resumed[name].state_dict(), optimizers[name].state_dict())


def test_a_checkpoint_of_model_and_optimizer_by_numbers(folder: Path) -> None:
    run = Run()
    run.train(3)
    holdfast.save({"model": run.model, "optimizer": run.optimizer, "step": 3}, checkpoint_id=folder)
    resumed = Run()
    state = resumed.state.only("model", "optimizer", "step").state_dict()
    holdfast.load(state, checkpoint_id=folder)
    resumed.state.load_state_dict(state)
    assert_same(resumed.optimizer.state_dict(), run.optimizer.state_dict())
    assert_same(resumed.model.state_dict(), run.model.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 3}, "model must be a Module"),
        ({"optimizer": "adam"}, "optimizer must be an Optimizer"),
        ({"model": nn.Linear(2, 2).state_dict()}, "Pass the module itself, not its state_dict"),
        ({"schedulers": 3}, "schedulers must have state_dict"),
        ({"data": DataLoader([1])}, "torchdata.stateful_dataloader.StatefulDataLoader"),  # type: ignore[arg-type]
        ({"data": [1, 2]}, "data must have state_dict"),
    ],
)
def test_what_cannot_be_saved_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainingState(**{"model": nn.Linear(2, 2), **options})


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(
        UsageError, match=r"SGD.* has parameters that are not in the model: 2 of 2.*fully_shard"
    ):
        TrainingState(nn.Linear(2, 2), other).state_dict()


def test_a_model_on_the_meta_device_gets_its_memory(folder: Path) -> None:
    run = Run()
    run.train(3)
    holdfast.save({"training": run.state}, checkpoint_id=folder)
    losses = run.train(5)
    resumed = Run(device="meta")
    holdfast.load({"training": resumed.state}, checkpoint_id=folder)
    assert resumed.train(5) == losses
    assert_same(resumed.values(), run.values())


def test_a_model_that_would_stay_on_the_meta_device_is_refused_before_anything_is_changed(
    folder: Path,
) -> None:
    holdfast.save({"training": TrainingState(nn.Linear(2, 2), step=3)}, checkpoint_id=folder)
    with torch.device("meta"):
        model = nn.Linear(2, 2)
        model.register_buffer("scratch", torch.zeros(2), persistent=False)
    resumed = TrainingState(model)
    drawn = torch.get_rng_state()
    torch.rand(1)
    changed = torch.get_rng_state()
    with pytest.raises(UsageError, match="scratch"):
        holdfast.load({"training": resumed}, checkpoint_id=folder)
    assert resumed.step == 0
    assert torch.equal(torch.get_rng_state(), changed)
    assert not torch.equal(changed, drawn)


def test_groups_as_earlier_versions_saved_them(folder: Path) -> None:
    run = Run()
    run.train(3)
    whole = run.state.state_dict()
    whole["optimizer"] = get_optimizer_state_dict(run.model, run.optimizer)
    assert isinstance(whole["optimizer"]["param_groups"], list)
    holdfast.save({"training": whole}, checkpoint_id=folder)
    losses = run.train(5)
    resumed = Run()
    resumed.optimizer.param_groups[0]["lr"] = 7.0
    holdfast.load({"training": resumed.state}, checkpoint_id=folder, strict=True)
    assert resumed.train(5) == losses


def test_groups_load_into_state_dicts_and_optimizers_too(folder: Path) -> None:
    run = Run()
    run.train(3)
    holdfast.save(run.state.only("model", "optimizer"), checkpoint_id=folder)
    resumed, third = Run(), Run()
    holdfast.load({"model": resumed.model, "optimizer": resumed.optimizer}, checkpoint_id=folder)
    assert_same(resumed.optimizer.state_dict(), run.optimizer.state_dict())
    state = {"optimizer": get_optimizer_state_dict(third.model, third.optimizer)}
    holdfast.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(third.model, third.optimizer, state["optimizer"])
    assert_same(third.optimizer.state_dict(), run.optimizer.state_dict())


def test_two_optimizers_in_a_list_must_not_share_parameters() -> None:
    model = nn.Linear(2, 2)
    both = [torch.optim.SGD(model.parameters()), torch.optim.Adam(model.parameters())]
    with pytest.raises(UsageError, match="two optimizers both have 'bias'"):
        TrainingState(model, both).state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 4), (4, 2), (3, 3)])
def test_random_numbers_and_positions_on_other_numbers_of_ranks(
    saved_by: int, loaded_by: int, folder: Path
) -> None:
    saved = [value for _, value in run_ranks(training_state_ranks.save, saved_by, folder)]
    loaded = [value for _, value in run_ranks(training_state_ranks.load, loaded_by, folder)]
    again = [value for _, value in run_ranks(training_state_ranks.load, loaded_by, folder)]
    assert loaded == again
    for before, after in zip(saved, loaded, strict=False):
        assert after["drawn"] == before["drawn"]
    assert len({str(found["drawn"]) for found in loaded}) == loaded_by
    positions = [found["position"] for found in loaded]
    assert positions == ([10 + rank for rank in range(3)] if saved_by == 3 else [10] * loaded_by)
    refused = "data_resize=" if saved_by != loaded_by else None
    assert all((refused in found["refused"]) if refused else found["refused"] is None for found in loaded)

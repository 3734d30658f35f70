"""Checkpoints of other optimizers than the one that is loaded into: refused before anything is changed."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.states import assert_same
from torch import nn

import holdfast
from holdfast import TrainingState
from holdfast.errors import PlanError
from holdfast.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

State = Callable[[nn.Module, torch.optim.Optimizer], dict[str, Any]]


def make_model(seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def as_objects(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer}


def by_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model, "optimizer": get_optimizer_state_dict(model, optimizer)}


def flattened(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model, "optimizer": get_optimizer_state_dict(model, optimizer, options=_FLAT)}


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"training": TrainingState(model, optimizer, step=0)}


def state_dicts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


FORMS = [as_objects, by_names, flattened, training, state_dicts]
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("saved", "loaded"), [("SGD", "AdamW"), ("AdamW", "SGD"), ("AdamW", "NAdam"), ("RMSprop", "SGD")]
)
def test_an_optimizer_of_another_kind_is_refused_before_anything_is_changed(
    saved: str, loaded: str, form: State, tmp_path: Path
) -> None:
    model = make_model()
    optimizer = MAKERS[saved](model.parameters())
    step(model, optimizer)
    holdfast.save(form(model, optimizer), checkpoint_id=tmp_path)

    other = make_model(seed=2)
    resumed = MAKERS[loaded](other.parameters())
    before = {name: value.clone() for name, value in other.state_dict().items()}
    options = dict(resumed.param_groups[0])
    name = loaded if form is not state_dicts else r"of which the state has the state_dict\(\)"
    message = rf"(?s)optimizer: .*another kind \(nothing was changed\).*{name}, has 1 group"
    with pytest.raises(PlanError, match=message) as caught:
        holdfast.load(form(other, resumed), checkpoint_id=tmp_path)
    kept = {"SGD": "momentum_buffer", "AdamW": "exp_avg", "RMSprop": "square_avg"}[saved]
    assert f"{kept}" in str(caught.value)
    assert "without(" in str(caught.value)
    assert_same(dict(other.state_dict()), before)
    assert not resumed.state
    assert resumed.param_groups[0] == options


@pytest.mark.parametrize("form", FORMS)
def test_options_of_other_versions_and_of_schedulers_do_not_make_another_kind(
    form: State, tmp_path: Path
) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    step(model, optimizer)
    group = optimizer.param_groups[0]
    for switch in ("fused", "capturable", "maximize"):
        del group[switch]
    group |= {"initial_lr": 0.5, "future_switch": False}
    holdfast.save(form(model, optimizer), checkpoint_id=tmp_path)
    other = make_model()
    resumed = torch.optim.AdamW(other.parameters())
    if form is not state_dicts:  # it does not tell an option of the user's own from one that is needed
        resumed.param_groups[0]["lr_scale"] = 2.0
    state = form(other, resumed)
    holdfast.load(state, checkpoint_id=tmp_path)
    if form in (as_objects, training):
        assert resumed.param_groups[0]["lr"] == 0.5
        assert resumed.param_groups[0]["lr_scale"] == 2.0
        assert len(resumed.state) == 4


@pytest.mark.parametrize("options", [StateDictOptions(), _FLAT, StateDictOptions(strict=False)])
@pytest.mark.parametrize(("saved", "loaded"), [("SGD", "AdamW"), ("AdamW", "SGD")])
def test_the_state_dict_of_another_kind_of_optimizer_is_not_set(
    saved: str, loaded: str, options: StateDictOptions
) -> None:
    model, other = make_model(), make_model(seed=2)
    optimizer, resumed = MAKERS[saved](model.parameters()), MAKERS[loaded](other.parameters())
    step(model, optimizer)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError, match=rf"another kind \(nothing was changed\).*{loaded}, has 1 group"):
        set_state_dict(
            other,
            resumed,
            model_state_dict=get_model_state_dict(model),
            optim_state_dict=get_optimizer_state_dict(model, optimizer, options=options),
            options=options,
        )
    assert_same(dict(other.state_dict()), before)
    assert not resumed.state


def test_an_optimizer_that_changes_what_it_loads_decides_for_itself(tmp_path: Path) -> None:
    model = make_model()
    optimizer = MAKERS["SGD"](model.parameters())
    step(model, optimizer)
    holdfast.save({"optimizer": optimizer}, checkpoint_id=tmp_path)
    resumed = MAKERS["AdamW"](make_model().parameters())

    def convert(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "state": {}}

    resumed.register_load_state_dict_pre_hook(convert)
    holdfast.load({"optimizer": resumed}, checkpoint_id=tmp_path)
    assert not resumed.state


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": parameters[:2]},
        {"params": parameters[2:], "lr": 0.25, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.5, weight_decay=0.125)


def one_group(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.75, weight_decay=0.125)


@pytest.mark.parametrize(("saved", "loaded"), [(one_group, two_groups), (two_groups, one_group)])
def test_groups_of_other_sizes_are_refused_before_anything_is_changed(
    saved: Callable[[nn.Module], torch.optim.Optimizer],
    loaded: Callable[[nn.Module], torch.optim.Optimizer],
    tmp_path: Path,
) -> None:
    model = make_model()
    optimizer = saved(model)
    step(model, optimizer)
    holdfast.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
    other = make_model(seed=2)
    resumed = loaded(other)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(PlanError, match=r"optimizer: the checkpoint has .* Nothing was changed"):
        holdfast.load({"model": other, "optimizer": resumed}, checkpoint_id=tmp_path)
    assert_same(dict(other.state_dict()), before)
    assert not resumed.state


def test_options_of_groups_that_were_one_stay_where_they_differ_and_it_is_said(tmp_path: Path) -> None:
    model = make_model()
    optimizer = one_group(model)
    step(model, optimizer)
    optimizer.param_groups[0]["eps"] = 1e-3
    holdfast.save(training(model, optimizer), checkpoint_id=tmp_path)
    other = make_model()
    resumed = two_groups(other)
    with pytest.warns(UserWarning, match=r"group 0: lr 0.5, weight_decay 0.125; group 1: lr 0.25, weight_d"):
        holdfast.load(training(other, resumed), checkpoint_id=tmp_path)
    assert [group["lr"] for group in resumed.param_groups] == [0.5, 0.25]
    assert [group["eps"] for group in resumed.param_groups] == [1e-3, 1e-3]
    assert len(resumed.state) == 4


def test_options_of_groups_that_become_one_stay_where_they_differed_and_it_is_said(tmp_path: Path) -> None:
    model = make_model()
    optimizer = two_groups(model)
    step(model, optimizer)
    for group in optimizer.param_groups:
        group["eps"] = 1e-3
    holdfast.save(training(model, optimizer), checkpoint_id=tmp_path)
    other = make_model()
    resumed = one_group(other)
    with pytest.warns(UserWarning, match=r"group 0: lr 0.75, weight_decay 0.125"):
        holdfast.load(training(other, resumed), checkpoint_id=tmp_path)
    assert resumed.param_groups[0]["lr"] == 0.75
    assert resumed.param_groups[0]["eps"] == 1e-3


def test_one_group_for_each_part_of_what_was_one_says_nothing(tmp_path: Path) -> None:
    model = make_model()
    optimizer = one_group(model)
    step(model, optimizer)
    holdfast.save(training(model, optimizer), checkpoint_id=tmp_path)
    other = make_model()
    each = [torch.optim.AdamW([parameter], weight_decay=0.5) for parameter in other.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        holdfast.load({"training": TrainingState(other, each)}, checkpoint_id=tmp_path)
    assert {one.param_groups[0]["lr"] for one in each} == {0.75}
    assert {one.param_groups[0]["weight_decay"] for one in each} == {0.125}


def test_an_optimizer_of_parameters_that_the_model_has_replaced_is_told_of(tmp_path: Path) -> None:
    model = make_model()
    optimizer = one_group(model)
    for module in (model[0], model[1]):
        module.weight = nn.Parameter(module.weight.detach().clone())
    with pytest.warns(UserWarning, match=r"AdamW has 2 of 4 parameters that no module .*after that"):
        holdfast.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
    with pytest.warns(UserWarning, match=r"AdamW has 2 of 4 parameters that no module"):
        holdfast.load({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)


def test_optimizers_of_other_modules_and_frozen_modules_are_not_told_of(tmp_path: Path) -> None:
    model, other, frozen = make_model(), nn.Linear(9, 9), make_model().requires_grad_(False)
    state = {"model": model, "optimizer": one_group(model), "other": torch.optim.SGD(other.parameters())}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        holdfast.save(state, checkpoint_id=tmp_path / "1")
        holdfast.save({"average": frozen, "optimizer": one_group(model)}, checkpoint_id=tmp_path / "2")


def test_lists_in_flattened_state_come_back_as_lists(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.LBFGS:
        return torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).pow(2).sum()
        torch.autograd.backward(loss)
        return loss.item()

    model = make_model()
    optimizer = make(model)
    optimizer.step(closure)  # type: ignore[no-untyped-call]
    holdfast.save(flattened(model, optimizer), checkpoint_id=tmp_path)
    other = make_model()
    resumed = make(other)
    state = {"optimizer": get_optimizer_state_dict(other, resumed, options=_FLAT)}
    holdfast.load(state, checkpoint_id=tmp_path, strict=False)
    set_optimizer_state_dict(other, resumed, state["optimizer"], options=_FLAT)
    assert_same(resumed.state_dict()["state"], optimizer.state_dict()["state"])


class Nested(torch.optim.Optimizer):
    """Keeps dicts with keys of all kinds, as Shampoo does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            sides = {axis: torch.randn(length, length) for axis, length in enumerate(parameter.shape)}
            state["preconditioners"] = {"plain": {"root": torch.randn(2), "sides": sides, "empty": {}}}
            state["blocks"] = {
                (0, 1): {True: torch.randn(3), None: "text"},
                2.5: [torch.randn(1), {"a.b": 2}],
            }
            if parameter.dim() == 1:
                state[7] = torch.randn(2)


@pytest.mark.parametrize("has_stepped", [False, True])
def test_keys_of_nested_flattened_state_keep_their_types(tmp_path: Path, has_stepped: bool) -> None:
    model, other = make_model(), make_model()
    optimizer, resumed = Nested(model.parameters()), Nested(other.parameters())
    optimizer.step()
    if has_stepped:
        resumed.step()
    state = flattened(model, optimizer)
    assert "state.0.weight.preconditioners.plain.root" in state["optimizer"], "strings are flattened"
    set_optimizer_state_dict(other, Nested(other.parameters()), state["optimizer"], options=_FLAT)
    holdfast.save(state, checkpoint_id=tmp_path)
    into = flattened(other, resumed)
    result = holdfast.load(into, checkpoint_id=tmp_path, strict=True)
    assert not result.left_alone
    set_optimizer_state_dict(other, resumed, into["optimizer"], options=_FLAT)
    assert_same(resumed.state_dict(), optimizer.state_dict())


def test_a_failed_load_leaves_flattened_state_as_it_was(tmp_path: Path) -> None:
    model, other = make_model(), make_model()
    optimizer, resumed = Nested(model.parameters()), Nested(other.parameters())
    optimizer.step()
    holdfast.save(flattened(model, optimizer), checkpoint_id=tmp_path)
    into = flattened(other, resumed)
    before = dict(into["optimizer"])
    with pytest.raises(PlanError, match="epoch"):
        holdfast.load({**into, "epoch": 0}, checkpoint_id=tmp_path)
    assert dict(into["optimizer"]) == before


def test_state_that_belongs_to_no_parameter_is_not_flattened() -> None:
    model = make_model()
    optimizer = MAKERS["AdamW"](model.parameters())
    optimizer.state["all"] = {"steps": 7}  # type: ignore[index]
    with pytest.raises(ValueError, match=r"state under 'all'.* Leave out flatten_optimizer_state_dict"):
        flattened(model, optimizer)


class PartOptimizers:
    """The optimizers of the parts of a model, whose flattened state dicts are joined, as pipelines do it."""

    def __init__(self, parts: nn.ModuleDict, lr: float) -> None:
        # Each part is a model with names of its own.
        self.parts = [nn.ModuleDict({name: part}) for name, part in parts.items()]
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=lr) for part in self.parts]

    def state_dict(self) -> dict[str, Any]:
        pairs = zip(self.parts, self.optimizers, strict=True)
        states = [get_optimizer_state_dict(*pair, options=_FLAT) for pair in pairs]
        return {key: value for state in states for key, value in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, state_dict, options=_FLAT)


def trained_parts(steps: int) -> dict[str, Any]:
    """Two models whose parameters have the same names."""
    state: dict[str, Any] = {}
    for name in ("generator", "critic"):
        parts = nn.ModuleDict({"0": nn.Linear(4, 3), "1": nn.Linear(3, 2)})
        optimizers = PartOptimizers(parts, lr=0.1 if steps else 0.2)
        for _ in range(steps):
            for part, optimizer in zip(optimizers.parts, optimizers.optimizers, strict=True):
                for parameter in part.parameters():
                    parameter.grad = torch.randn_like(parameter)
                optimizer.step()
        state[name] = {"parts": parts, "optimizer": optimizers}
    return state


def test_joined_flattened_states_of_new_optimizers_are_restored(tmp_path: Path) -> None:
    trained, resumed = trained_parts(steps=2), trained_parts(steps=0)
    holdfast.save(trained, checkpoint_id=tmp_path)
    with pytest.raises(PlanError, match="epoch"):
        holdfast.load({**resumed, "epoch": 0}, checkpoint_id=tmp_path)
    assert not resumed["critic"]["optimizer"].optimizers[0].state
    holdfast.load(resumed, checkpoint_id=tmp_path, strict=True)
    for name, state in trained.items():
        pairs = zip(state["optimizer"].optimizers, resumed[name]["optimizer"].optimizers, strict=True)
        for before, after in pairs:
            assert_same(after.state_dict(), before.state_dict())

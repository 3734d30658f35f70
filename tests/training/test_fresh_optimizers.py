"""A run that resumes in a new process: the optimizer has never taken a step, and goes on as if it had."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.states import assert_same
from tests.support.stock_torch import stock_save
from torch import nn

import holdfast
from holdfast.errors import PlanError
from holdfast.state_dict import get_optimizer_state_dict

Make = Callable[[nn.Module], torch.optim.Optimizer]


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(inputs) ** 2).mean()
            torch.autograd.backward(loss)
            return loss

        losses.append(closure().item())
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        else:
            optimizer.step()
    return losses


def check_resume(tmp_path: Path, make: Make, make_model: Callable[[], nn.Module] = make_model) -> None:
    """Train, save, train on; then the same from the checkpoint with a new model and optimizer."""
    model = make_model()
    optimizer = make(model)
    train(model, optimizer, range(3))
    holdfast.save({"model": model, "optimizer": optimizer, "step": 3}, checkpoint_id=tmp_path)
    losses = train(model, optimizer, range(3, 6))

    resumed_model = make_model()
    resumed = make(resumed_model)
    state: dict[str, Any] = {"model": resumed_model, "optimizer": resumed, "step": 0}
    random_state = torch.get_rng_state()
    holdfast.load(state, checkpoint_id=tmp_path)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in resumed_model.parameters())
    assert train(resumed_model, resumed, range(state["step"], 6)) == losses
    assert_same(resumed.state_dict(), optimizer.state_dict())
    assert_same(resumed_model.state_dict(), model.state_dict())


def optimizers() -> Iterator[Any]:
    """Every optimizer of torch, in every form that runs on a CPU."""
    for name in sorted(dir(torch.optim)):
        made = getattr(torch.optim, name)
        if not inspect.isclass(made) or not issubclass(made, torch.optim.Optimizer) or name == "Optimizer":
            continue
        if name == "SparseAdam":
            continue
        known = inspect.signature(made).parameters
        forms: list[dict[str, Any]] = [{}]
        forms += [{form: True} for form in ("foreach", "fused", "amsgrad", "maximize") if form in known]
        forms += [{"momentum": 0.9}] if "momentum" in known else []
        forms += [{"lr": torch.tensor(0.01)}] if "capturable" in known and name != "Rprop" else []
        for form in forms:
            yield pytest.param(made, form, id="-".join([name, *form]))


@pytest.mark.parametrize(("kind", "form"), list(optimizers()))
def test_a_fresh_optimizer_goes_on_exactly(
    kind: type[torch.optim.Optimizer], form: dict[str, Any], tmp_path: Path
) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        options = copy.deepcopy({"lr": 0.01, **form})
        chosen = [p for p in model.parameters() if p.ndim == 2 or kind.__name__ != "Muon"]
        return kind(chosen, **options)

    if isinstance(form.get("lr"), torch.Tensor):
        # On a CPU some optimizers take a tensor only if they go through parameters one by one.
        form = {**form, "foreach": False}
        try:
            train(model := make_model(), make(model), range(1))
        except (RuntimeError, ValueError, TypeError) as error:
            pytest.skip(f"this torch does not take a learning rate that is a tensor here: {error}")
    check_resume(tmp_path, make)


def test_sparse_gradients(tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            words: torch.Tensor = self.table((inputs.abs() * 3).long() % 10)
            return words

    def make_words() -> nn.Module:
        torch.manual_seed(1)
        return Words()

    check_resume(tmp_path, lambda model: torch.optim.SparseAdam(list(model.parameters())), make_words)


@pytest.mark.parametrize("form", ["capturable", "differentiable"])
def test_forms_that_take_no_step_on_a_cpu_get_their_state(form: str, tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), **{form: True})  # type: ignore[arg-type]
    for number, parameter in enumerate(model.parameters()):
        names = ("exp_avg", "exp_avg_sq")
        optimizer.state[parameter] = {
            "step": torch.tensor(float(number)),
            **{name: torch.randn_like(parameter) for name in names},
        }
    holdfast.save({"optimizer": optimizer}, checkpoint_id=tmp_path)
    resumed = torch.optim.Adam(make_model().parameters(), **{form: True})  # type: ignore[arg-type]
    holdfast.load({"optimizer": resumed}, checkpoint_id=tmp_path)
    assert_same(resumed.state_dict(), optimizer.state_dict())


def with_groups(model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.ndim == 2]
    biases = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": biases, "lr": 0.02},
        {"params": []},
        {"params": weights, "weight_decay": 0.1},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def with_frozen(model: nn.Module) -> torch.optim.Optimizer:
    next(model.parameters()).requires_grad_(False)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("make", [with_groups, with_frozen])
def test_groups_empty_groups_and_frozen_parameters(make: Make, tmp_path: Path) -> None:
    check_resume(tmp_path, make)


def test_empty_groups_get_the_options_of_saved_ones_in_their_order(tmp_path: Path) -> None:
    def make(model: nn.Module, *rates: float) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": [], "lr": rate} for rate in rates]
        return torch.optim.AdamW([*groups, {"params": list(model.parameters())}])

    model, resumed = make_model(), make_model()
    saved = holdfast.state_dict.get_optimizer_state_dict(model, make(model, 0.1, 0.2))
    holdfast.save({"model": model, "optimizer": saved}, checkpoint_id=tmp_path)
    optimizer = make(resumed, 0.8, 0.9)
    holdfast.load({"model": resumed, "optimizer": optimizer}, checkpoint_id=tmp_path)
    assert [group["lr"] for group in optimizer.param_groups][:2] == [0.1, 0.2]


def test_tied_weights(tmp_path: Path) -> None:
    def make_tied() -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        model[2].weight = model[0].weight
        return model

    check_resume(tmp_path, lambda model: torch.optim.AdamW(model.parameters()), make_tied)


def test_channels_last_state_keeps_its_strides(tmp_path: Path) -> None:
    def make_conv() -> nn.Module:
        torch.manual_seed(1)
        made = nn.Sequential(nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 4, 3, padding=1))
        made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return made

    check_resume(tmp_path, lambda model: torch.optim.AdamW(model.parameters()), make_conv)


def test_two_optimizers_that_share_parameters(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = make_model()
        return model, [
            torch.optim.AdamW(model.parameters()),
            torch.optim.SGD(model[2].parameters(), momentum=0.5),
        ]

    model, both = make()
    for optimizer in both:
        train(model, optimizer, range(2))
    holdfast.save({"model": model, "optimizers": both}, checkpoint_id=tmp_path)
    resumed_model, resumed = make()
    holdfast.load({"model": resumed_model, "optimizers": resumed}, checkpoint_id=tmp_path)
    for one, other in zip(resumed, both, strict=True):
        assert_same(one.state_dict(), other.state_dict())


class Stranger(torch.optim.Optimizer):
    """Keeps nested state of its own shapes and dtypes, as Shampoo does, and something for all parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "d": 1.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["d"] = torch.tensor(float(group["d"])) * 1.5
            for parameter in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[parameter]
                state.setdefault("count", torch.tensor(0, dtype=torch.int64)).add_(1)
                state.setdefault("kind", "full")
                state.setdefault("rounds", 0)
                state["rounds"] += 1
                sides = state.setdefault("preconditioners", {})
                for axis, length in enumerate(parameter.shape):
                    sides.setdefault(axis, torch.zeros(length, length, dtype=torch.float64)).add_(
                        torch.eye(length), alpha=float(parameter.grad.sum())
                    )
                state.setdefault("history", []).append(parameter.grad.clone())
                parameter.data.add_(parameter.grad, alpha=-group["lr"])
        self.state["all"] = {"steps": 7}  # type: ignore[index]


def test_an_optimizer_of_a_stranger(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_resume(tmp_path, lambda model: Stranger(model.to(torch.bfloat16).float().parameters()))


def test_state_keeps_its_dtype_beside_parameters_of_another(tmp_path: Path) -> None:
    def make() -> torch.optim.Optimizer:
        torch.manual_seed(1)
        return Stranger(nn.Linear(4, 4, dtype=torch.bfloat16).parameters())

    optimizer = make()
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    holdfast.save({"optimizer": optimizer}, checkpoint_id=tmp_path)
    resumed = make()
    holdfast.load({"optimizer": resumed}, checkpoint_id=tmp_path)
    assert_same(resumed.state_dict(), optimizer.state_dict())


def test_parameters_added_since_stay_fresh(tmp_path: Path) -> None:
    model = make_model()
    optimizer = with_groups(model)
    train(model, optimizer, range(3))
    holdfast.save({"optimizer": optimizer}, checkpoint_id=tmp_path)

    resumed = with_groups(make_model())
    resumed.param_groups[0]["params"].append(nn.Parameter(torch.zeros(2)))
    with pytest.raises(PlanError, match=r"optimizer: the checkpoint has 3 groups of 2, 0, 2 parameters"):
        holdfast.load({"optimizer": resumed}, checkpoint_id=tmp_path)
    assert not resumed.state

    holdfast.load({"optimizer": resumed}, checkpoint_id=tmp_path, allow_partial_load=True)
    before = [p for group in optimizer.param_groups for p in group["params"]]
    after = [p for n, group in enumerate(resumed.param_groups) for p in group["params"][: None if n else 2]]
    for old, new in zip(before, after, strict=True):
        assert_same(resumed.state[new], optimizer.state[old])
    assert resumed.param_groups[0]["params"][2] not in resumed.state


def test_named_parameters_are_found_by_their_names(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.named_parameters())
    train(model, optimizer, range(3))
    holdfast.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)

    other = make_model()
    reordered = torch.optim.AdamW(reversed(list(other.named_parameters())))
    holdfast.load({"model": other, "optimizer": reordered}, checkpoint_id=tmp_path)
    for (name, old), (_, new) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert_same({name: reordered.state[new]}, {name: optimizer.state[old]})
    names = [name for name, _ in other.named_parameters()]
    assert reordered.param_groups[0]["param_names"] == names[::-1]


def test_a_checkpoint_of_stock_torch(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(3))
    stock_save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
    other = make_model()
    resumed = torch.optim.AdamW(other.parameters())
    holdfast.load({"model": other, "optimizer": resumed}, checkpoint_id=tmp_path)
    assert_same(resumed.state_dict(), optimizer.state_dict())


def test_an_option_that_the_checkpoint_does_not_have_keeps_its_value(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    train(model, optimizer, range(1))
    del optimizer.param_groups[0]["weight_decay"]
    holdfast.save({"optimizer": optimizer}, checkpoint_id=tmp_path)
    resumed = torch.optim.AdamW(make_model().parameters(), weight_decay=0.25)
    holdfast.load({"optimizer": resumed}, checkpoint_id=tmp_path)
    assert resumed.param_groups[0]["weight_decay"] == 0.25
    assert resumed.param_groups[0]["lr"] == 0.5


def test_a_failed_load_leaves_a_fresh_optimizer_fresh(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(3))
    holdfast.save({"optimizer": optimizer}, checkpoint_id=tmp_path)
    resumed = torch.optim.AdamW(make_model().parameters())
    with pytest.raises(PlanError, match="epoch"):
        holdfast.load({"optimizer": resumed, "epoch": 0}, checkpoint_id=tmp_path)
    assert not resumed.state


def test_the_plain_state_dict_of_a_new_optimizer_is_filled(tmp_path: Path) -> None:
    model = make_model()
    optimizer = with_groups(model)
    train(model, optimizer, range(3))
    holdfast.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
    resumed = with_groups(make_model())
    state = {"optimizer": resumed.state_dict()}
    holdfast.load(state, checkpoint_id=tmp_path, strict=True)
    resumed.load_state_dict(state["optimizer"])
    assert_same(resumed.state_dict(), optimizer.state_dict())


def test_the_plain_state_dict_of_an_optimizer_that_has_some_state_is_filled(tmp_path: Path) -> None:
    model = make_model()
    optimizer = with_groups(model)
    train(model, optimizer, range(3))
    holdfast.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
    other = make_model()
    resumed = with_groups(other)
    first = resumed.param_groups[0]["params"][0]
    first.grad = torch.ones_like(first)
    resumed.step()
    state = {"optimizer": resumed.state_dict()}
    holdfast.load(state, checkpoint_id=tmp_path, strict=True)
    resumed.load_state_dict(state["optimizer"])
    assert_same(resumed.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("kept", [["2.weight"], ["2.bias", "0.weight"], ["0.bias", "2.weight", "0.weight"]])
def test_named_parameters_that_are_left_keep_their_own_state(kept: list[str], tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.named_parameters())
    train(model, optimizer, range(3))
    holdfast.save({"optimizer": optimizer}, checkpoint_id=tmp_path)
    named, saved = dict(make_model().named_parameters()), dict(model.named_parameters())
    new = nn.Parameter(torch.zeros(2))
    resumed = torch.optim.AdamW([("new", new), *((name, named[name]) for name in kept)])
    holdfast.load({"optimizer": resumed}, checkpoint_id=tmp_path)
    for name in kept:
        assert_same(resumed.state[named[name]], optimizer.state[saved[name]])
    assert not resumed.state.get(new)


def test_numbers_are_not_taken_for_names_if_the_groups_differ(tmp_path: Path) -> None:
    model = make_model()
    optimizer = with_groups(model)
    train(model, optimizer, range(3))
    holdfast.save({"optimizer": optimizer}, checkpoint_id=tmp_path)
    other = make_model()
    resumed = torch.optim.AdamW(other.parameters())
    state = {"optimizer": get_optimizer_state_dict(other, resumed)}
    with pytest.raises(PlanError, match="3 groups of 2, 0, 2 parameters, the optimizer 1 group of 4"):
        holdfast.load(state, checkpoint_id=tmp_path)
    assert not state["optimizer"]["state"]

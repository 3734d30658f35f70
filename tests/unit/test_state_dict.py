"""State dicts of models and optimizers in one process: reading changes nothing, and setting is exact."""

import copy
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.states import assert_same
from tests.support.stock_torch import IS_NEWEST, stock_record
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as torchs

import holdfast
from holdfast import state_dict as ours
from holdfast._parameter_states import ParameterStates
from holdfast.errors import MissingKeyError
from holdfast.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
LENIENT = StateDictOptions(strict=False)


class Pair(NamedTuple):
    a: torch.Tensor
    b: int


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def train(model: nn.Module, *optimizers: Any, steps: int = 2) -> None:
    """Steps with gradients that depend on the parameters, made by hand."""

    def loss() -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = parameter.detach().sin() + 0.1
        return torch.stack([parameter.detach().sum() for parameter in model.parameters()]).sum()

    for _ in range(steps):
        for optimizer in optimizers:
            loss()
            optimizer.step(loss)


def contents(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that a step depends on, copied, without asking the optimizer for its state dict."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return copy.deepcopy(
        {
            "state": {n: optimizer.state[p] for n, p in enumerate(parameters) if p in optimizer.state},
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
            "sizes": [len(g["params"]) for g in optimizer.param_groups],
        }
    )


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    hooks = {
        name: sum(len(v) for k, v in vars(m).items() if "hooks" in k) for name, m in model.named_modules()
    }
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {
        "model": copy.deepcopy(dict(model.state_dict())),
        "gradients": copy.deepcopy(gradients),
        "optimizer": contents(optimizer),
        "entries": len(optimizer.state),
        "hooks": hooks,
        "optimizer hooks": sum(len(v) for k, v in vars(optimizer).items() if "hooks" in k),
        "rng": torch.get_rng_state(),
    }


def optimizer_makers() -> Iterator[Any]:
    """Every optimizer of this torch, in every variant that runs on the CPU."""
    for name, kind in sorted(vars(torch.optim).items()):
        if not inspect.isclass(kind) or not issubclass(kind, torch.optim.Optimizer):
            continue
        if kind in {torch.optim.Optimizer, torch.optim.SparseAdam}:
            continue
        known = inspect.signature(kind).parameters
        settings: dict[str, dict[str, Any]] = {"": {"max_iter": 2} if "max_iter" in known else {}}
        if "foreach" in known:
            settings["foreach"] = {"foreach": True}
        if "fused" in known:
            settings["fused"] = {"fused": True}
        if "differentiable" in known:
            settings["differentiable"] = {"differentiable": True}
        if "momentum" in known:
            settings["momentum"] = {"momentum": 0.9}
        if "amsgrad" in known:
            settings["amsgrad"] = {"amsgrad": True}
        for label, more in settings.items():
            yield pytest.param(kind, more, id=f"{name}-{label}" if label else name)


def make_optimizer(kind: Callable[..., torch.optim.Optimizer], more: dict[str, Any], model: nn.Module) -> Any:
    parameters = [p for p in model.parameters() if p.dim() == 2 or kind.__name__ != "Muon"]
    # A differentiable step may not change a leaf of a graph.
    return kind([p.requires_grad_(not more.get("differentiable")) for p in parameters], lr=0.01, **more)


@pytest.mark.parametrize(("kind", "more"), list(optimizer_makers()))
@pytest.mark.parametrize("options", [None, FLAT], ids=["nested", "flat"])
def test_a_fresh_optimizer_continues_exactly_and_reading_changes_nothing(
    kind: Callable[..., torch.optim.Optimizer], more: dict[str, Any], options: StateDictOptions | None
) -> None:
    alone, read = make_model(), make_model()
    optimizers = make_optimizer(kind, more, alone), make_optimizer(kind, more, read)
    for _ in range(2):
        before = everything(read, optimizers[1])
        get_state_dict(read, optimizers[1], options=options)
        assert_same(everything(read, optimizers[1]), before)
        train(alone, optimizers[0], steps=1)
        train(read, optimizers[1], steps=1)
    assert_same(everything(read, optimizers[1]), everything(alone, optimizers[0]))

    resumed = make_model(seed=1)
    fresh = make_optimizer(kind, more, resumed)
    model_state, optimizer_state = copy.deepcopy(get_state_dict(read, optimizers[1], options=options))
    set_state_dict(
        resumed, fresh, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options
    )
    assert_same(contents(fresh), contents(optimizers[1]))
    train(alone, optimizers[0], steps=1)
    train(resumed, fresh, steps=1)
    assert_same(contents(fresh), contents(optimizers[0]))
    assert_same(dict(resumed.state_dict()), dict(alone.state_dict()))


@pytest.mark.parametrize("options", [None, FLAT, StateDictOptions(full_state_dict=True, cpu_offload=True)])
def test_the_state_knows_the_parameters_of_the_optimizers(options: StateDictOptions | None) -> None:
    model = make_model()
    optimizers = [torch.optim.Adam(model[3].parameters()), torch.optim.SGD([model[0].bias, model[0].weight])]
    found = get_optimizer_state_dict(model, optimizers, options=options)
    states = found if options is FLAT else found["state"]
    assert isinstance(states, ParameterStates)
    assert list(states.parameters) == ["3.weight", "3.bias", "0.bias", "0.weight"]
    assert states.parameters["0.bias"] is model[0].bias
    is_full = options is not None and options.full_state_dict
    assert (states.is_whole, states.device) == ((True, torch.device("cpu")) if is_full else (False, None))
    assert not any(key.startswith("state.") for key in found) if options is FLAT else states == {}


@pytest.mark.parametrize("options", [None, FLAT, StateDictOptions(full_state_dict=True, cpu_offload=True)])
def test_the_state_goes_through_torch_save_and_its_safe_load(
    options: StateDictOptions | None, tmp_path: Path
) -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    for steps in (0, 1):  # without and with entries
        train(model, optimizer, steps=steps)
        states = get_state_dict(model, optimizer, options=options)
        torch.save(states, tmp_path / "states.pt")
        loaded = torch.load(tmp_path / "states.pt", weights_only=True)
        for one, other in zip(loaded, states, strict=True):
            assert_same(dict(one.get("state", one)), dict(other.get("state", other)))
        copied = copy.deepcopy(states[1])
        assert type(copied.get("state", copied)) is dict


class Odd(torch.optim.Optimizer):
    """Keeps values of every kind, and some under a key that is no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.tensor(3, dtype=torch.int64),
                    "half": torch.ones(parameter.shape, dtype=torch.float64) / 3,
                    "seen": torch.tensor([2**40 + 1]),
                    "text": "a word",
                    "pair": Pair(torch.tensor(0.1, dtype=torch.float64), 2),
                    "blocks": {0: {"exp": [torch.zeros(2, dtype=torch.int32), None]}},
                    "none": None,
                }
        self.state["all"] = {"count": 5}  # type: ignore[index]


def test_values_of_every_kind_and_dtype_are_restored_as_they_were() -> None:
    model = make_model(dtype=torch.bfloat16)
    optimizer, fresh = Odd(model.parameters()), Odd(model.parameters())
    optimizer.step()
    found = get_optimizer_state_dict(model, optimizer)
    set_optimizer_state_dict(model, fresh, found)
    assert_same(contents(fresh), contents(optimizer))
    assert fresh.state["all"] == {"count": 5}  # type: ignore[index]
    set_optimizer_state_dict(model, fresh, optimizer.state_dict())
    assert_same(contents(fresh), contents(optimizer))

    found["state"]["0.weight"]["blocks"][0]["exp"].append("more")
    found["param_groups"][0]["lr"] = 9
    assert_same(contents(fresh), contents(optimizer))
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_hooks_of_users_see_the_values_and_have_the_last_word() -> None:
    model = make_model(dtype=torch.bfloat16)
    optimizer, fresh = torch.optim.Adam(model.parameters()), torch.optim.Adam(model.parameters())
    train(model, optimizer)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float()

    def doubled(_: Any, state: dict[str, Any]) -> None:
        for one in state["state"].values():
            one["exp_avg"] = one["exp_avg"] * 2

    def without_step(_: Any) -> None:
        for one in fresh.state.values():
            one["step"].zero_()

    fresh.register_load_state_dict_pre_hook(doubled)
    fresh.register_load_state_dict_post_hook(without_step)
    set_optimizer_state_dict(model, fresh, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
    for parameter in model.parameters():
        assert fresh.state[parameter]["step"] == 0
        expected = optimizer.state[parameter]["exp_avg"] * 2
        assert_same(fresh.state[parameter]["exp_avg"], expected)


def test_fused_optimizers_get_their_step_as_torch_wants_it() -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    train(model, optimizer)
    found = get_optimizer_state_dict(model, optimizer)
    for state in found["state"].values():
        state["step"] = state["step"].double()
    fresh = torch.optim.Adam(model.parameters(), fused=True)
    set_optimizer_state_dict(model, fresh, found)
    assert all(state["step"].dtype == torch.float32 for state in fresh.state.values())


def tied_model() -> Any:
    model: Any = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5)})
    model["head"].weight = model["embed"].weight
    model["again"] = model["head"]
    return model


def step_with_ones(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def torchs_options(options: StateDictOptions | None) -> Any:
    """The same options as torch's own record, of which older versions know fewer."""
    return None if options is None else stock_record(torchs.StateDictOptions, **vars(options))


@pytest.mark.parametrize("helpers", [ours, torchs], ids=["ours", "torchs"])
@pytest.mark.parametrize("options", [None, FLAT], ids=["nested", "flat"])
def test_tied_weights_have_one_state(helpers: Any, options: StateDictOptions | None) -> None:
    model = tied_model()
    optimizer, fresh = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    step_with_ones(optimizer)
    known = options if helpers is ours else torchs_options(options)
    found = helpers.get_optimizer_state_dict(model, optimizer, options=known)
    assert list(get_optimizer_state_dict(model, fresh)["state"].parameters) == ["embed.weight", "head.bias"]
    set_optimizer_state_dict(model, fresh, found)
    assert_same(contents(fresh), contents(optimizer))
    by_other_name = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    by_other_name["state"]["again.weight"] = by_other_name["state"].pop("embed.weight")
    by_other_name["param_groups"][0]["params"][0] = "again.weight"
    fresh = torch.optim.AdamW(model.parameters())
    set_optimizer_state_dict(model, fresh, by_other_name)
    assert_same(contents(fresh), contents(optimizer))


def test_state_of_frozen_parameters_stays_and_what_has_none_gets_none() -> None:
    model = make_model()
    optimizer, fresh = (torch.optim.Adam(model.parameters()) for _ in range(2))
    step_with_ones(optimizer)
    del optimizer.state[model[3].bias]
    model[0].requires_grad_(False)
    for options in (None, FLAT):
        step_with_ones(fresh)
        set_optimizer_state_dict(model, fresh, get_optimizer_state_dict(model, optimizer, options=options))
        assert_same(contents(fresh), contents(optimizer))
        assert model[3].bias not in fresh.state


def test_groups_get_their_options_by_their_parameters_and_empty_ones_in_order() -> None:
    model = make_model()

    def grouped(order: list[int], lr: float) -> torch.optim.Optimizer:
        groups = [{"params": list(model[n].parameters()) if n >= 0 else [], "lr": lr + n} for n in order]
        return torch.optim.SGD(groups, momentum=0.5)

    optimizer, fresh = grouped([0, -1, 3, -2], 10.0), grouped([-2, 3, -1, 0], 90.0)
    step_with_ones(optimizer)
    fresh.param_groups[0]["initial_lr"] = 4
    for helpers in (ours, torchs):
        found: Any = helpers.get_optimizer_state_dict(model, optimizer)
        set_optimizer_state_dict(model, fresh, found)
        assert [group["lr"] for group in fresh.param_groups] == [9.0, 13.0, 8.0, 10.0]
        assert fresh.param_groups[0]["initial_lr"] == 4
        assert_same(fresh.state[model[3].bias], optimizer.state[model[3].bias])
    fresh = grouped([-1, 3, 0], 90.0)
    set_optimizer_state_dict(model, fresh, get_optimizer_state_dict(model, optimizer, options=FLAT))
    assert [group["lr"] for group in fresh.param_groups] == [89.0, 13.0, 10.0]


def test_names_of_parameters_in_groups_stay_those_of_the_optimizer() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.named_parameters(), momentum=0.1)
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    assert flat["param_groups.3.bias.param_names"] == ["3.bias"]
    turned = torch.optim.SGD(reversed(list(model.named_parameters())), momentum=0.2)
    for found in (flat, get_optimizer_state_dict(model, optimizer)):
        set_optimizer_state_dict(model, turned, found)
        assert turned.param_groups[0]["param_names"][0] == "3.bias"
        assert turned.param_groups[0]["momentum"] == 0.1


@pytest.mark.parametrize("options", [None, FLAT])
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_a_group_lists_twice_has_one_state(options: StateDictOptions | None) -> None:
    model = nn.Linear(2, 3)
    listed = [model.weight, model.bias, model.weight]
    optimizer = torch.optim.SGD(listed, lr=0.1, momentum=0.9)
    train(model, optimizer)
    read = get_optimizer_state_dict(model, optimizer, options=options)
    if options is None:
        assert list(read["state"]) == ["weight", "bias"]
        assert read["param_groups"][0]["params"] == ["weight", "bias", "weight"]
    assert not [key for key in read if "@" in key]
    fresh = torch.optim.SGD(listed, lr=0.2, momentum=0.9)
    set_optimizer_state_dict(model, fresh, copy.deepcopy(read))
    assert_same(contents(fresh), contents(optimizer))
    once = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    set_optimizer_state_dict(model, once, copy.deepcopy(read))
    for parameter in model.parameters():
        assert_same(once.state[parameter], optimizer.state[parameter])


def test_reading_leaves_a_state_dict_alone_that_a_model_keeps() -> None:
    class Keeping(nn.Linear):
        kept: Any = None

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            self.kept = self.kept or super().state_dict(*args, **kwargs)
            return self.kept

    plain: Any = nn.Linear(2, 2)
    kept = plain.state_dict()
    plain._register_state_dict_hook(lambda *_: kept)
    for model in (Keeping(2, 2), plain):
        before = dict(model.state_dict())
        assert list(get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))) == list(before)
        get_model_state_dict(model).clear()
        assert list(model.state_dict()) == list(before)


@pytest.mark.parametrize("options", [None, FLAT], ids=["nested", "flat"])
def test_several_optimizers_keep_their_own_state_of_a_parameter_that_they_share(
    options: StateDictOptions | None,
) -> None:
    model = make_model()

    def both() -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(model.parameters()), torch.optim.Adam(model[3].parameters(), lr=0.5)]

    optimizers, fresh = both(), both()
    train(model, *optimizers)
    set_optimizer_state_dict(model, iter(fresh), get_optimizer_state_dict(model, optimizers, options=options))
    for one, other in zip(fresh, optimizers, strict=True):
        assert_same(contents(one), contents(other))
    assert not torch.equal(fresh[0].state[model[3].bias]["exp_avg"], fresh[1].state[model[3].bias]["exp_avg"])
    set_optimizer_state_dict(model, fresh, get_optimizer_state_dict(model, optimizers[0], options=options))
    assert_same(fresh[1].state[model[3].bias], optimizers[0].state[model[3].bias])
    averages = [one.state[model[3].bias]["exp_avg"] for one in fresh]
    assert averages[0].data_ptr() != averages[1].data_ptr()


@pytest.mark.parametrize("options", [None, FLAT], ids=["nested", "flat"])
def test_an_unknown_parameter_is_refused_or_stays_as_it_is(options: StateDictOptions | None) -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model[0].parameters(), lr=0.5)
    step_with_ones(optimizer)
    found = get_optimizer_state_dict(model, optimizer, options=options)
    larger = torch.optim.Adam([*model[0].parameters(), model[3].weight])
    step_with_ones(larger)
    before = contents(larger)
    with pytest.raises(RuntimeError, match=r"Missing optimizer state for parameter\(s\) 3.weight"):
        set_optimizer_state_dict(model, larger, found)
    assert_same(contents(larger), before)
    set_optimizer_state_dict(model, larger, found, options=LENIENT)
    assert_same(larger.state[model[3].weight], before["state"][2])
    assert_same(larger.state[model[0].weight], optimizer.state[model[0].weight])
    stranger = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=r"parameter 0 of the Adam, of shape \(2,\), is not a parameter"):
        get_optimizer_state_dict(model, stranger)


def test_numbers_instead_of_names_must_fit_one_optimizer() -> None:
    model = make_model()
    optimizer, fresh = (torch.optim.Adam(reversed(list(model.parameters()))) for _ in range(2))
    step_with_ones(optimizer)
    set_optimizer_state_dict(model, fresh, optimizer.state_dict())
    assert_same(contents(fresh), contents(optimizer))
    with pytest.raises(ValueError, match=r"it has \[6\], the optimizer \[2\]"):
        set_optimizer_state_dict(model, torch.optim.Adam(model[0].parameters()), optimizer.state_dict())
    with pytest.raises(ValueError, match="belongs to one optimizer"):
        set_optimizer_state_dict(model, [fresh, optimizer], optimizer.state_dict())
    with pytest.raises(RuntimeError, match="no optimizer"):
        set_optimizer_state_dict(model, (), optimizer.state_dict())
    with pytest.raises(RuntimeError, match="is empty"):
        set_optimizer_state_dict(model, fresh, {})


@pytest.mark.parametrize("options", [None, FLAT], ids=["nested", "flat"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_state_dicts_of_torchs_helpers_are_accepted(options: Any, momentum: float) -> None:
    model = make_model()
    optimizer, fresh = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum) for _ in range(2))
    train(model, optimizer)
    model.zero_grad()
    found = torchs.get_optimizer_state_dict(model, optimizer, options=torchs_options(options))
    set_optimizer_state_dict(model, fresh, found, options=options)
    assert_same(contents(fresh), contents(optimizer))
    torchs_own = torch.optim.SGD(model.parameters(), lr=0.3, momentum=momentum)
    mine = get_optimizer_state_dict(model, optimizer, options=options)
    if momentum:
        known = torchs_options(options)
        torchs.set_optimizer_state_dict(model, torchs_own, copy.deepcopy(mine), options=known)
        assert_same(contents(torchs_own), contents(optimizer))


# Models


class Extra(nn.Module):
    """Everything that a module can do to its state dict."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("kept", torch.full((2,), value))
        self.register_buffer("not_kept", torch.full((2,), value), persistent=False)
        self.value = value
        self._register_state_dict_hook(self._rename)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(self._rename_back)  # type: ignore[no-untyped-call]

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}renamed.weight"] = state.pop(f"{prefix}linear.weight")

    @staticmethod
    def _rename_back(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}renamed.weight" in state:
            state[f"{prefix}linear.weight"] = state.pop(f"{prefix}renamed.weight")

    def get_extra_state(self) -> float:
        return self.value

    def set_extra_state(self, state: float) -> None:
        self.value = state


class Own(nn.Module):
    """Has methods of its own."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value]))

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"mine": self.weight.detach()}

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.weight.copy_(state["mine"])


def wrapped(model: Any) -> Any:
    """Every wrapper that needs no process group, at every depth."""
    inner = nn.Sequential(
        checkpoint_wrapper(compiled(model[0])), compiled(checkpoint_wrapper(model[1])), *model[2:]
    )
    outer = compiled(checkpoint_wrapper(inner))
    outer.compile(backend="eager")
    return outer


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def test_names_do_not_show_wrappers() -> None:
    model, other = make_model(), make_model(seed=1)
    shell = wrapped(model)
    plain = get_model_state_dict(make_model())
    found = get_model_state_dict(shell)
    assert list(found) == list(plain) == list(model.state_dict())
    assert vars(found)["_metadata"].keys() == vars(plain)["_metadata"].keys()
    assert_same(dict(found), dict(plain))
    set_model_state_dict(shell, other.state_dict())
    assert_same(dict(model.state_dict()), dict(other.state_dict()))

    optimizer, fresh = torch.optim.Adam(shell.parameters()), torch.optim.Adam(other.parameters())
    step_with_ones(optimizer)
    states = get_optimizer_state_dict(shell, optimizer)
    assert list(states["state"]) == [name for name, _ in model.named_parameters()]
    assert_same(states, get_optimizer_state_dict(model, optimizer))
    set_optimizer_state_dict(other, fresh, states)
    assert_same(contents(fresh), contents(optimizer))

    del found["3.bias"]
    found["3.more"] = torch.ones(1)
    keys = set_model_state_dict(shell, found, options=LENIENT)
    assert keys.missing_keys == ["3.bias"]
    assert keys.unexpected_keys == ["3.more"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\): 3.bias.\s+Unexpected key\(s\): 3.more."):
        set_model_state_dict(shell, found)
    set_model_state_dict(shell, shell.state_dict())


@pytest.mark.parametrize("saved", [0, 1, 2])
@pytest.mark.parametrize("asked", [0, 1, 2])
def test_a_model_that_was_saved_in_other_wrappers_is_refused_with_both_names_and_the_remedy(
    saved: int, asked: int, tmp_path: Path
) -> None:
    def make(kind: int) -> Any:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if kind == 1:
            return compiled(model)
        return nn.Sequential(compiled(model[0]), model[1]) if kind == 2 else model

    keys = ["model.0.weight", "model._orig_mod.0.weight", "model.0._orig_mod.weight"]
    holdfast.save({"model": make(saved)}, checkpoint_id=tmp_path)
    state = {"model": make(asked)}
    if saved == asked:
        holdfast.load(state, checkpoint_id=tmp_path)
        return
    with pytest.raises(MissingKeyError) as caught:
        holdfast.load(state, checkpoint_id=tmp_path)
    assert f"{keys[asked]}: Missing key in checkpoint (it has {keys[saved]})" in str(caught.value)
    assert "get_model_state_dict(model)" in str(caught.value)


def test_a_child_may_have_the_name_of_a_wrapper() -> None:
    model = nn.ModuleDict({"_orig_mod": nn.Linear(1, 1), "module": nn.Linear(1, 1)})
    shell = compiled(model)
    names = ["_orig_mod.weight", "_orig_mod.bias", "module.weight", "module.bias"]
    assert list(get_model_state_dict(shell)) == names
    set_model_state_dict(
        shell, {name: torch.full_like(value, 5) for name, value in model.state_dict().items()}
    )
    assert all(bool((value == 5).all()) for value in model.state_dict().values())


@pytest.mark.parametrize("options", [None, StateDictOptions(full_state_dict=True)])
def test_what_a_module_does_to_its_state_dict_is_done(options: StateDictOptions | None) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), compiled(Extra(1.0)))
    found = get_model_state_dict(model, options=options)
    expected = {key.replace("_orig_mod.", ""): value for key, value in model.state_dict().items()}
    assert_same(dict(found), expected)
    assert {"1.renamed.weight", "1.kept", "1._extra_state"} <= found.keys()
    assert "1.not_kept" not in found
    other = nn.Sequential(nn.BatchNorm1d(3), Extra(2.0))
    set_model_state_dict(other, found, options=options)
    assert_same(dict(other.state_dict()), expected)
    assert other[1].value == 1.0
    assert list(found) == list(expected)


def test_own_methods_of_a_model_are_used() -> None:
    model = Own(3.0)
    found = get_model_state_dict(model)
    assert_same(dict(found), {"mine": torch.tensor([3.0])})
    other = Own(4.0)
    assert set_model_state_dict(other, found) == ([], [])
    assert other.weight.item() == 3.0


def test_frozen_parameters_may_be_left_out() -> None:
    options = StateDictOptions(ignore_frozen_params=True)
    model = tied_model()
    model["embed"].requires_grad_(False)
    found = get_model_state_dict(model, options=options)
    assert list(found) == ["head.bias", "again.bias"]
    assert set_model_state_dict(model, found, options=options) == ([], [])


def test_a_model_on_the_meta_device_is_not_left_there_with_success() -> None:
    with torch.device("meta"):
        model = tied_model()
    optimizer, trained = torch.optim.AdamW(model.parameters()), tied_model()
    trained_optimizer = torch.optim.AdamW(trained.parameters())
    train(trained, trained_optimizer)
    state = holdfast.TrainingState(trained, trained_optimizer, step=7).state_dict()
    resumed = holdfast.TrainingState(model, optimizer)
    resumed.load_state_dict(copy.deepcopy(state))
    assert resumed.step == 7
    for _ in range(2):
        assert_same(dict(model.state_dict()), dict(trained.state_dict()))
        assert_same(contents(optimizer), contents(trained_optimizer))
        train(model, optimizer)
        train(trained, trained_optimizer)


def test_a_model_on_the_meta_device_gets_memory_and_stays_tied() -> None:
    with torch.device("meta"):
        model = tied_model()
    model["head"].bias.requires_grad_(False)
    state = {name: torch.randn_like(value) for name, value in tied_model().state_dict().items()}
    state["head.weight"] = state["again.weight"] = state["embed.weight"]
    state["again.bias"] = state["head.bias"]
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    assert_same(dict(model.state_dict()), state)
    assert model["head"].weight is model["embed"].weight
    assert model["head"].weight.requires_grad
    assert not model["head"].bias.requires_grad
    assert model["embed"].weight.data_ptr() != state["embed.weight"].data_ptr()


def test_submodules_can_be_read_and_set() -> None:
    model = make_model()
    with pytest.warns(FutureWarning, match="Getting submodules only"):
        found = get_model_state_dict(model, submodules={model[3]})
    assert list(found) == ["3.weight", "3.bias"]
    with pytest.warns(FutureWarning, match="Getting submodules only"):
        found = get_model_state_dict(
            model, submodules={model[3]}, options=StateDictOptions(keep_submodule_prefixes=False)
        )
    other = make_model(seed=1)
    with pytest.warns(FutureWarning, match="Passing model_state_dict as a "):
        set_model_state_dict(other, {other[3]: found}, options=LENIENT)
    assert_same(dict(other[3].state_dict()), dict(model[3].state_dict()))


def test_methods_can_be_patched() -> None:
    model, other = make_model(), make_model(seed=1)
    shell = compiled(model)
    optimizer = torch.optim.Adam(shell.parameters())
    step_with_ones(optimizer)
    ours._patch_model_state_dict(shell)
    ours._patch_optimizer_state_dict(shell, optimizers=(optimizer,))
    assert list(shell.state_dict()) == list(other.state_dict())
    shell.load_state_dict(other.state_dict())
    assert_same(dict(get_model_state_dict(shell)), dict(other.state_dict()))
    state = copy.deepcopy(optimizer.state_dict())
    step_with_ones(optimizer)
    optimizer.load_state_dict(state)
    assert_same(dict(get_optimizer_state_dict(shell, optimizer)["state"]), dict(state["state"]))


@pytest.mark.parametrize("helpers", [ours, torchs], ids=["ours", "torch's"])
def test_patched_models_and_optimizers_are_saved_and_loaded(helpers: Any, tmp_path: Path) -> None:
    def patched(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        model = make_model(seed=seed)
        optimizer = torch.optim.Adam(model.parameters())
        helpers._patch_model_state_dict(model)
        helpers._patch_optimizer_state_dict(model, optimizers=optimizer)
        return model, optimizer

    model, optimizer = patched(0)
    step_with_ones(optimizer)
    holdfast.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
    other, fresh = patched(1)
    holdfast.load({"model": other, "optimizer": fresh}, checkpoint_id=tmp_path)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(dict(fresh.state_dict()["state"]), dict(optimizer.state_dict()["state"]))


def test_shapes_that_differ_are_reported_and_options_must_fit() -> None:
    model = make_model()
    with pytest.raises(RuntimeError, match=r"size mismatch for 3.bias"):
        set_model_state_dict(model, {**model.state_dict(), "3.bias": torch.ones(7)})
    with pytest.raises(ValueError, match="full_state_dict must be True"):
        get_model_state_dict(model, options=StateDictOptions(broadcast_from_rank0=True))


def parameters_of(function: Any) -> list[tuple[Any, ...]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_the_interface_is_torchs() -> None:
    for name in ours.__all__:
        mine, theirs = parameters_of(getattr(ours, name)), parameters_of(getattr(torchs, name))
        assert mine == theirs if IS_NEWEST else [one for one in mine if one in theirs] == theirs
    assert ours._get_fqns is torchs._get_fqns
    model = make_model()
    options: Any = torchs.StateDictOptions(full_state_dict=True)
    assert get_optimizer_state_dict(model, torch.optim.SGD(model.parameters()), options=options)[
        "state"
    ].is_whole

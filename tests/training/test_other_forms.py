"""Runs go on exactly if optimizers keep more than torch's do, and modules have another form at the start."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.states import assert_same
from torch import nn

import holdfast
from holdfast import TrainingState
from holdfast.errors import UsageError
from holdfast.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Counting(torch.optim.SGD):
    """Keeps a value and a tensor of its own beside ``state`` and ``param_groups``."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.count, self.distance = 0, torch.zeros(2)

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        self.distance = self.distance + 0.5
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"count": self.count, "distance": self.distance}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count, self.distance = state_dict["count"], state_dict["distance"]
        super().load_state_dict(state_dict)


def stepped(kind: Any = Counting) -> tuple[nn.Module, Any]:
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters())
    train(model, optimizer, 3)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 3)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [None, FLAT, StateDictOptions(full_state_dict=True, cpu_offload=True)])
def test_what_an_optimizer_has_beside_its_state_is_read_and_set(options: StateDictOptions | None) -> None:
    model, optimizer = stepped()
    state = get_optimizer_state_dict(model, optimizer, options=options)
    fresh = Counting(model.parameters())
    set_optimizer_state_dict(model, fresh, state, options=options)
    assert_same(fresh.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("way", ["training", "names", "flat"])
def test_a_run_goes_on_with_what_the_optimizer_has_beside_its_state(way: str, tmp_path: Path) -> None:
    model, optimizer = stepped()
    options = FLAT if way == "flat" else None

    def state_of(model: nn.Module, optimizer: Any) -> Any:
        if way == "training":
            return {"training": TrainingState(model, optimizer)}
        return dict(
            zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True)
        )

    holdfast.save(state_of(model, optimizer), checkpoint_id=tmp_path)
    expected = train(model, optimizer, 3), optimizer.state_dict()
    fresh = nn.Linear(3, 2)
    resumed = Counting(fresh.parameters())
    state = state_of(fresh, resumed)
    holdfast.load(state, checkpoint_id=tmp_path, strict=True)
    if way != "training":
        model_state, optimizer_state = state["model"], state["optimizer"]
        set_state_dict(fresh, resumed, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert_same((train(fresh, resumed, 3), resumed.state_dict()), expected)


def test_values_beside_the_state_of_two_optimizers_are_not_mixed_up() -> None:
    model = nn.Linear(3, 2)
    both = [Counting([model.weight]), Counting([model.bias])]
    with pytest.raises(ValueError, match="several optimizers have values under 'count', 'distance' beside"):
        get_optimizer_state_dict(model, both)
    halves = [nn.Linear(3, 2), nn.Bilinear(3, 3, 2, bias=False)]
    del halves[1].weight
    halves[1].register_parameter("other", nn.Parameter(torch.ones(2)))
    training = TrainingState(halves, [Counting(half.parameters()) for half in halves])
    with pytest.raises(holdfast.errors.UsageError, match="beside their state and groups; pass them by name"):
        training.state_dict()


class Counted(nn.Module):
    """Its extra state has another form, or another size, before the first step."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.seen = form, 0
        self.inner = nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        outputs: torch.Tensor = self.inner(inputs)
        return outputs / self.seen

    def get_extra_state(self) -> Any:
        if self.form == "none":
            return {"seen": self.seen, "list": [torch.full((self.seen,), 1.0)]} if self.seen else None
        if self.form == "nested":
            return {"seen": [torch.tensor([self.seen] * (1 + self.seen))]}
        if self.form == "object":
            return {"seen": self.seen} if not self.seen else (self.seen, "steps")
        data = pickle.dumps(self.seen) if self.seen else b""
        return torch.tensor(list(data), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        if self.form == "none":
            assert state is None or len(state["list"][0]) == state["seen"]
            self.seen = state["seen"] if state else 0
        elif self.form == "nested":
            self.seen = int(state["seen"][0][0])
        elif self.form == "object":
            self.seen = state[0] if isinstance(state, tuple) else state["seen"]
        else:
            self.seen = pickle.loads(bytes(state.tolist())) if len(state) else 0


class Lazy(nn.Sequential):
    def __init__(self, form: str) -> None:
        super().__init__(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.LazyLinear(2))


@pytest.mark.parametrize("way", ["objects", "training", "names"])
@pytest.mark.parametrize(
    ("kind", "form"),
    [(Counted, "none"), (Counted, "nested"), (Counted, "object"), (Counted, "bytes"), (Lazy, "")],
)
def test_modules_that_take_their_form_later_go_on_exactly(
    kind: Any, form: str, way: str, tmp_path: Path
) -> None:
    def start() -> tuple[Any, Any]:
        module = kind(form)
        return module, torch.optim.AdamW(module.parameters())

    def state_of(model: nn.Module, optimizer: Any) -> Any:
        if way == "training":
            return {"training": TrainingState(model, optimizer)}
        if way == "objects":
            return {"model": model, "optimizer": optimizer}
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    model, optimizer = start()
    train(model, optimizer, 3)
    holdfast.save(state_of(model, optimizer), checkpoint_id=tmp_path)
    expected = train(model, optimizer, 3), model.state_dict(), optimizer.state_dict()
    fresh, resumed = start()
    state = state_of(fresh, resumed)
    holdfast.load(state, checkpoint_id=tmp_path, strict=True)
    if way == "names":
        set_state_dict(fresh, resumed, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_same((train(fresh, resumed, 3), fresh.state_dict(), resumed.state_dict()), expected)


def test_a_load_that_fails_leaves_extra_state_as_it_was(tmp_path: Path) -> None:
    model = Counted("bytes")
    model(torch.ones(1, 3))
    holdfast.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    state = {"model": Counted("bytes").state_dict() | {"missing": torch.zeros(1)}}
    before = state["model"]["_extra_state"]
    with pytest.raises(holdfast.errors.CheckpointException, match="missing"):
        holdfast.load(state, checkpoint_id=tmp_path)
    assert state["model"]["_extra_state"] is before


class Lookahead(torch.optim.SGD):
    """Has a form of its own for all that it keeps."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict(), "count": 3}


def test_an_optimizer_whose_state_dict_has_a_form_of_its_own_cannot_be_named_and_it_is_said() -> None:
    model = nn.Linear(3, 2)
    optimizer = Lookahead(model.parameters())
    with pytest.raises(UsageError, match=r"Lookahead has 'inner', 'count' and not .* the optimizer itself"):
        get_optimizer_state_dict(model, optimizer)

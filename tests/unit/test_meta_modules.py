"""Modules on the meta device: filled for real by ``load``, or refused before anything is read."""

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.errors import MissingKeyError, PlanError, UsageError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.norm.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.embed(tokens)))
        return out


def on_meta() -> Tied:
    with torch.device("meta"):
        return Tied()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.tensor([0, 3, 5])).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    writer = hf.FileSystemWriter(tmp_path, sync_files=False)
    hf.save({"model": model, "optimizer": optimizer, "app": Wrapper(model)}, storage_writer=writer)
    return model, optimizer


class Wrapper:
    """Copies into the module that it has."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model = model
        self.options = options

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"], **self.options)


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_a_module_on_the_meta_device_is_filled_and_trains_on(
    tmp_path: Path, trained: tuple[Tied, torch.optim.Optimizer]
) -> None:
    model = on_meta()
    weight = model.embed.weight
    weight.note = "kept"  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    result = hf.load({"model": model}, checkpoint_id=tmp_path, strict=False)
    assert "model.head.weight" in result.loaded
    assert_equal(model, trained[0])
    assert model.embed.weight is weight is model.head.weight
    assert weight.note == "kept"  # type: ignore[attr-defined]
    assert isinstance(weight, nn.Parameter)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in Tied().parameters()]
    # The optimizer was made before the parameters had memory.
    step(model, optimizer)
    assert not torch.equal(weight, trained[0].embed.weight)


@pytest.mark.parametrize("has_stepped", [True, False])
def test_an_optimizer_over_meta_parameters_is_loaded_with_its_module(
    tmp_path: Path, trained: tuple[Tied, torch.optim.Optimizer], has_stepped: bool
) -> None:
    model = on_meta()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if has_stepped:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        optimizer.zero_grad()
    # The optimizer's name comes first: its state must not be cast to parameters that are still on meta.
    hf.load({"an optimizer": optimizer, "model": model}, checkpoint_id=_renamed(tmp_path), strict=False)
    step(model, optimizer)
    step(*trained)
    assert_equal(model, trained[0])


def _renamed(folder: Path) -> Path:
    state = hf.state_dict_loader._load_state_dict_from_keys(checkpoint_id=folder)
    state["an optimizer"] = state.pop("optimizer")
    hf.save(state, checkpoint_id=folder / "renamed")
    return folder / "renamed"


def test_an_optimizer_whose_parameters_stay_on_meta_is_refused(
    tmp_path: Path, trained: tuple[Tied, torch.optim.Optimizer]
) -> None:
    optimizer = torch.optim.AdamW(on_meta().parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"AdamW was made for 3 parameters on the meta device"):
        hf.load({"optimizer": optimizer}, checkpoint_id=tmp_path, strict=False)


def add_buffer(model: nn.Module) -> None:
    model.register_buffer("angles", torch.ones(4, device="meta"), persistent=False)


def add_parameter(model: nn.Module) -> None:
    model.register_parameter("new", nn.Parameter(torch.ones(2, device="meta")))


def hide_parameter(model: nn.Module) -> None:
    def hide(_: Any, state: dict[str, Any], *__: Any) -> None:
        del state["norm.weight"]

    model._register_state_dict_hook(hide)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("change", "error", "name"),
    [
        (add_buffer, UsageError, "angles"),
        (add_parameter, MissingKeyError, "new"),
        (hide_parameter, UsageError, "norm.weight"),
    ],
)
def test_what_would_stay_on_meta_is_refused_and_nothing_is_changed(
    tmp_path: Path,
    trained: tuple[Tied, torch.optim.Optimizer],
    change: Callable[[nn.Module], Any],
    error: type[Exception],
    name: str,
) -> None:
    model = on_meta()
    change(model)
    other = torch.zeros(6, 4)
    state = {"model": model, "app": {"model": {"embed.weight": other}}}
    with pytest.raises(error, match=rf"Tied is on the meta device.* {name}.*to_empty"):
        hf.load(state, checkpoint_id=tmp_path, allow_partial_load=True, strict=False)
    assert model.embed.weight.is_meta
    assert not other.any()


def test_a_parameter_of_another_shape_does_not_stay_on_meta(
    tmp_path: Path, trained: tuple[Tied, torch.optim.Optimizer]
) -> None:
    model = on_meta()
    model.norm.weight = nn.Parameter(torch.empty(5, device="meta"))
    options: dict[str, Any] = {"strict": False, "ignore_mismatched_sizes": True}
    with pytest.raises(MissingKeyError, match=r"norm\.weight"):
        hf.load({"model": model}, checkpoint_id=tmp_path, **options)
    model.norm.weight = nn.Parameter(torch.full((5,), 3.0))
    result = hf.load({"model": model}, checkpoint_id=tmp_path, **options)
    assert result.left_alone == ("model.norm.weight",)
    assert model.norm.weight.tolist() == [3.0] * 5
    assert torch.equal(model.embed.weight, trained[0].embed.weight)


def test_names_that_hooks_change_are_followed(
    tmp_path: Path, trained: tuple[Tied, torch.optim.Optimizer]
) -> None:
    inner = on_meta()
    wrapped = nn.Sequential(inner)

    def shorten(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
        for name in list(state):
            state[name.removeprefix(f"{prefix}0.")] = state.pop(name)

    def lengthen(_: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for name in list(state):
            state[f"{prefix}0.{name}"] = state.pop(name)

    wrapped._register_state_dict_hook(shorten)  # type: ignore[no-untyped-call]
    wrapped.register_load_state_dict_pre_hook(lengthen)  # type: ignore[no-untyped-call]
    hf.load({"model": wrapped}, checkpoint_id=tmp_path, strict=False)
    assert_equal(inner, trained[0])


def test_a_parameter_that_torch_cannot_replace_is_named(
    tmp_path: Path, trained: tuple[Tied, torch.optim.Optimizer]
) -> None:
    model = on_meta()
    watched = weakref.ref(model.norm.weight)
    with pytest.raises(PlanError, match=r"norm\.weight.*weakref.*to_empty"):
        hf.load({"model": model}, checkpoint_id=tmp_path, strict=False)
    assert watched() is not None


def test_an_object_that_keeps_its_tensors_on_meta_is_refused(
    tmp_path: Path, trained: tuple[Tied, torch.optim.Optimizer]
) -> None:
    model = on_meta()
    hf.load({"app": Wrapper(model, assign=True)}, checkpoint_id=tmp_path, strict=False)
    assert torch.equal(model.norm.weight, trained[0].norm.weight)
    with (
        pytest.warns(UserWarning, match="no-op"),
        pytest.raises(PlanError, match="Wrapper has tensors on the meta"),
    ):
        hf.load({"app": Wrapper(on_meta())}, checkpoint_id=tmp_path, strict=False)


def test_a_module_in_a_per_rank_is_filled_too(tmp_path: Path) -> None:
    saved = nn.Linear(2, 2)
    hf.save({"own": hf.PerRank({"model": saved})}, checkpoint_id=tmp_path)
    model = nn.Linear(2, 2, device="meta")
    hf.load({"own": hf.PerRank({"model": model})}, checkpoint_id=tmp_path)
    assert_equal(model, saved)


def test_tensors_that_share_memory_share_it_after(tmp_path: Path) -> None:
    hf.save({"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(3)}, checkpoint_id=tmp_path)
    tied = torch.empty(3, device="meta")
    state = {"a": tied, "b": tied, "c": torch.empty(3, device="meta")}
    hf.load(state, checkpoint_id=tmp_path, device="cpu")
    assert state["a"] is state["b"]
    assert state["c"].data_ptr() != state["a"].data_ptr()
    assert state["c"].tolist() == [1.0] * 3


def test_parameters_that_are_aliases_stay_aliases(tmp_path: Path) -> None:
    def build() -> nn.Module:
        one, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        other.weight = nn.Parameter(one.weight)  # another Parameter on the same memory
        return nn.Sequential(one, other)

    saved = build()
    hf.save({"model": saved}, checkpoint_id=tmp_path)
    with torch.device("meta"):
        model = build()
    hf.load({"model": model}, checkpoint_id=tmp_path)
    assert_equal(model, saved)
    first, second = model.parameters()
    assert first is not second
    assert first.data_ptr() == second.data_ptr()


def test_the_meta_device_is_no_place_to_load_to(tmp_path: Path) -> None:
    hf.save({"a": torch.ones(3)}, checkpoint_id=tmp_path)
    with pytest.raises(UsageError, match="no memory to load into"):
        hf.load({"a": torch.empty(3, device="meta")}, checkpoint_id=tmp_path, device="meta")


def test_a_copy_of_a_filled_module_is_independent(
    tmp_path: Path, trained: tuple[Tied, torch.optim.Optimizer]
) -> None:
    model = on_meta()
    hf.load({"model": model}, checkpoint_id=tmp_path, strict=False)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.embed.weight.zero_()
    assert copied.head.weight is copied.embed.weight
    assert_equal(model, trained[0])

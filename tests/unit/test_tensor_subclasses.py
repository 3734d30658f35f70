"""Tensor subclasses that are made of tensors: stored as their parts, and come back as what they were."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.optimizers import LowBit
from tests.support.stock_torch import stock_load
from tests.support.subclasses import (
    BlockScaled,
    Granularity,
    Layout,
    Rounding,
    RowScaled,
    assert_same_parts,
)
from torch.distributed.checkpoint import default_planner as stock

import holdfast
from holdfast.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from holdfast.errors import PlanError
from holdfast.state_dict_loader import _load_state_dict_from_keys
from holdfast.state_dict_saver import AsyncCheckpointerType, SaveFuture

CONTEXT = [
    True, 3, 1 << 70, 0.5, "text", b"bytes", None, (1, 2), torch.Size([3]), {"a": torch.bfloat16, 1: [8, 4]},
    torch.strided, torch.device("cpu"), Rounding.DOWN, Granularity(1, 128), Layout("plain", 0.25),
]  # fmt: skip


def nested(seed: int, context: Any = None) -> RowScaled:
    """A tensor that is made of a tensor that is made of tensors."""
    scale = torch.rand(8, 1, generator=torch.Generator().manual_seed(seed))
    return RowScaled(BlockScaled.random(8, 4, context=context, seed=seed), scale)


class Quantized(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(BlockScaled.random(8, 4, context=CONTEXT, seed=seed))
        self.bias = torch.nn.Parameter(torch.full((8,), float(seed)))


def state_of(seed: int) -> dict[str, Any]:
    model = Quantized(seed)
    tied = BlockScaled.random(4, 4, seed=seed)
    return {
        "model": model,
        "optimizer": {"state": {0: {"step": seed, "exp_avg": nested(seed)}}, "tied": [tied, {"again": tied}]},
        "mine": holdfast.PerRank(BlockScaled.random(2, 4, seed=seed)),
    }


def assert_loaded(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_same_parts(found["model"].weight, expected["model"].weight)
    assert torch.equal(found["model"].bias, expected["model"].bias)
    ours, theirs = found["optimizer"], expected["optimizer"]
    assert ours["state"][0]["step"] == theirs["state"][0]["step"]
    assert_same_parts(ours["state"][0]["exp_avg"], theirs["state"][0]["exp_avg"])
    assert_same_parts(ours["tied"][0], theirs["tied"][0])
    assert ours["tied"][1]["again"] is ours["tied"][0]
    assert_same_parts(found["mine"].value, expected["mine"].value)


def _wait(saving: Any) -> None:
    if isinstance(saving, SaveFuture):
        saving.result()


@pytest.mark.parametrize("how", ["save", "thread", pytest.param("process", marks=pytest.mark.slow)])
def test_it_comes_back_wherever_it_stands_in_the_tensors_that_were_there(tmp_path: Path, how: str) -> None:
    saved = state_of(1)
    if how == "save":
        holdfast.save(saved, checkpoint_id=tmp_path)
    else:
        kind = AsyncCheckpointerType(how)
        _wait(holdfast.async_save(saved, checkpoint_id=tmp_path, async_checkpointer_type=kind))
    target = state_of(2)
    moment = target["optimizer"]["state"][0]["exp_avg"]
    places = target["model"].weight, target["model"].weight.codes, moment, moment.rows.scale
    holdfast.load(target, checkpoint_id=tmp_path, strict=True)
    assert_loaded(target, state_of(1))
    moment = target["optimizer"]["state"][0]["exp_avg"]
    after = target["model"].weight, target["model"].weight.codes, moment, moment.rows.scale
    assert all(one is other for one, other in zip(places, after, strict=True))
    assert isinstance(target["model"].weight, torch.nn.Parameter)


def test_what_is_saved_in_the_background_is_what_was_there_at_the_call(tmp_path: Path) -> None:
    weight = BlockScaled.random(8, 4, seed=1)
    saving = holdfast.async_save({"w": weight}, checkpoint_id=tmp_path)
    weight.codes.zero_()
    _wait(saving)
    target = BlockScaled.random(8, 4, seed=2)
    holdfast.load({"w": target}, checkpoint_id=tmp_path)
    assert_same_parts(target, BlockScaled.random(8, 4, seed=1))


def test_a_template_on_the_meta_device_is_given_memory(tmp_path: Path) -> None:
    holdfast.save({"w": nested(1)}, checkpoint_id=tmp_path)
    inner: Any = nested(2).rows
    empty = BlockScaled(inner.codes.to("meta"), inner.scale.to("meta"), inner.table.to("meta"), None)
    target = {"w": torch.nn.Parameter(RowScaled(empty, torch.empty(8, 1, device="meta")))}
    holdfast.load(target, checkpoint_id=tmp_path)
    assert isinstance(target["w"], torch.nn.Parameter)
    assert_same_parts(target["w"], nested(1))


def test_parts_are_tensors_of_their_own_for_stock_torch(tmp_path: Path) -> None:
    saved: Any = nested(1)
    holdfast.save({"model": {"w": saved, "b": torch.ones(3)}, "n": 3}, checkpoint_id=tmp_path)
    found: dict[str, Any] = {
        "model": {
            "w": {"rows": {"codes": torch.zeros(8, 4, dtype=torch.uint8)}, "scale": torch.zeros(8, 1)},
            "b": torch.zeros(3),
        }
    }
    stock_load(found, checkpoint_id=tmp_path)
    assert torch.equal(found["model"]["w"]["rows"]["codes"], saved.rows.codes)
    assert torch.equal(found["model"]["w"]["scale"], saved.scale)
    assert torch.equal(found["model"]["b"], torch.ones(3))
    # And a dict of them is a state to load into for us, too.
    ours = {"model": {"w": {"scale": torch.zeros(8, 1)}}}
    holdfast.load(ours, checkpoint_id=tmp_path, strict=False)
    assert torch.equal(ours["model"]["w"]["scale"], saved.scale)


def test_without_a_template_it_is_a_dict_of_parts_that_can_be_rebuilt(tmp_path: Path) -> None:
    holdfast.save({"w": nested(1, CONTEXT)}, checkpoint_id=tmp_path / "1")
    found = _load_state_dict_from_keys(checkpoint_id=tmp_path / "1")
    assert found["w"].class_name == "tests.support.subclasses.RowScaled"
    assert torch.equal(found["w"]["scale"], nested(1).scale)
    rebuilt = found["w"].rebuild()
    assert_same_parts(rebuilt, nested(1))
    assert rebuilt.rows.context == CONTEXT
    assert [type(one) for one in rebuilt.rows.context] == [type(one) for one in CONTEXT]
    # It is saved again as what it was.
    holdfast.save(found, checkpoint_id=tmp_path / "2")
    target = {"w": nested(2, CONTEXT)}
    holdfast.load(target, checkpoint_id=tmp_path / "2")
    assert_same_parts(target["w"], nested(1))


def scaled(**changes: Any) -> BlockScaled:
    return BlockScaled.random(8, 4, **changes)


def looking_like(dtype: torch.dtype) -> BlockScaled:
    whole = scaled()
    return BlockScaled(whole.codes, whole.scale, whole.table, None, dtype)


@pytest.mark.parametrize(
    ("found", "expected", "words"),
    [
        (scaled(), torch.zeros(8, 4), r"w: .* parts of a .*BlockScaled here, the state a Tensor"),
        (scaled(), None, "parts of a .*BlockScaled here, the state a NoneType"),
        (torch.zeros(8, 4), scaled(), r"w: .* one value here, the state a .*BlockScaled, which"),
        (scaled(), nested(0), "class .*BlockScaled here, the state .*RowScaled"),
        (nested(0), nested(0, 5), r"w\.rows: .*context \{'context': None.*one with \{'context': 5"),
        (nested(0, [1]), nested(0, [True]), r"context': \(1\).*context': \(True\)"),
        (nested(0, Layout("a")), nested(0, Layout("b")), r"Layout\(name='a'.*Layout\(name='b'"),
        (scaled(), BlockScaled.random(4, 4), r"the shape \(8, 4\) here.*\(4, 4\)"),
        (scaled(), scaled(block=8), r"w\.scale: Size mismatch"),
        (
            scaled(),
            looking_like(torch.int32),
            r"w: the checkpoint has torch\.float32, the state torch\.int32",
        ),
    ],
)
def test_what_does_not_fit_is_reported_before_anything_is_changed(
    tmp_path: Path, found: Any, expected: Any, words: str
) -> None:
    holdfast.save({"w": found, "other": torch.ones(2)}, checkpoint_id=tmp_path)
    other = torch.zeros(2)
    with pytest.raises(PlanError, match=words) as caught:
        holdfast.load({"w": expected, "other": other}, checkpoint_id=tmp_path)
    assert "nothing was changed" in str(caught.value)
    assert caught.value.failures[0][0].key.startswith("w")  # type: ignore[attr-defined]
    assert not other.any()


def test_the_dtype_that_it_shows_may_differ_as_any_dtype(tmp_path: Path) -> None:
    holdfast.save({"w": scaled()}, checkpoint_id=tmp_path)
    target = looking_like(torch.bfloat16)
    with pytest.raises(PlanError, match=r"float32, the state torch\.bfloat16; pass cast=True"):
        holdfast.load({"w": target}, checkpoint_id=tmp_path, cast=False)
    for part in (target.codes, target.scale):
        part.zero_()
    with pytest.warns(UserWarning, match=r"w from torch\.float32 to torch\.bfloat16"):
        holdfast.load({"w": target}, checkpoint_id=tmp_path)
    assert target.dtype == torch.bfloat16
    assert_same_parts(target, scaled())


def test_it_is_loaded_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    holdfast.save({"w": scaled(), "other": torch.ones(2)}, checkpoint_id=tmp_path)
    target = scaled(block=8, seed=2)
    with pytest.raises(PlanError, match=r"w\.scale: Size mismatch"):
        holdfast.load(
            {"w": target, "other": torch.ones(2)}, checkpoint_id=tmp_path, ignore_mismatched_sizes=True
        )
    assert_same_parts(target, scaled(block=8, seed=2))
    holdfast.save({"w": {"codes": scaled().codes}, "other": torch.ones(2)}, checkpoint_id=tmp_path)
    with pytest.raises(PlanError, match=r"w\.scale: the checkpoint has other parts"):
        holdfast.load({"w": target, "other": torch.ones(2)}, checkpoint_id=tmp_path, allow_partial_load=True)
    holdfast.save({"other": torch.ones(2)}, checkpoint_id=tmp_path)
    holdfast.load({"w": target, "other": torch.ones(2)}, checkpoint_id=tmp_path, allow_partial_load=True)
    assert_same_parts(target, scaled(block=8, seed=2))


class NoProtocol(torch.Tensor):
    """A wrapper without memory, and without a way to take it apart."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function: Any, _: Any, args: Any = (), __: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(str(function))


class OnlyParts(BlockScaled):
    """One of its parts is no tensor."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "context"], None


@pytest.mark.parametrize("save", [holdfast.save, holdfast.async_save])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: NoProtocol(torch.ones(3)), r"m\.w: a .*NoProtocol"),
        (lambda: torch.ones(3).as_subclass(type("Own", (torch.Tensor,), {})), r"m\.w: a .*Own"),
        (
            lambda: BlockScaled.random(8, 4, context=object()),
            r"m\.w: .*BlockScaled cannot .* builtins\.object",
        ),
        (lambda: nested(1, {1, 2}), r"m\.w\.rows: .*BlockScaled cannot .* builtins\.set"),
        (lambda: OnlyParts.random(8, 4, context=1), r"m\.w: .*its part context is no tensor, but a int"),
        (lambda: RowScaled(NoProtocol(torch.ones(3)), torch.ones(3)), r"m\.w\.rows: a .*NoProtocol"),
    ],
)
def test_what_cannot_be_brought_back_is_refused_with_its_key(
    tmp_path: Path, save: Any, value: Any, words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        _wait(save({"m": {"w": value()}}, checkpoint_id=tmp_path))
    assert not (tmp_path / ".metadata").exists()


def test_two_values_of_one_name_are_refused(tmp_path: Path) -> None:
    state = {"w": BlockScaled.random(8, 4), "w.codes": torch.ones(3)}
    with pytest.raises(holdfast.CheckpointError, match=r"two values would both be called 'w\.codes'"):
        holdfast.save(state, checkpoint_id=tmp_path)


def test_a_checkpoint_cannot_make_what_is_not_imported_or_no_such_class(tmp_path: Path) -> None:
    holdfast.save({"w": BlockScaled.random(8, 4, context=Path)}, checkpoint_id=tmp_path)
    parts = _load_state_dict_from_keys(checkpoint_id=tmp_path)["w"]
    with pytest.raises(PlanError, match="not made from what a checkpoint says"):
        parts.rebuild()
    for where, words in (
        (["antigravity", "geohash"], "antigravity.geohash is not imported"),
        (["os", "system"], "os.system is no tensor subclass"),
        (["torch", "Tensor"], "torch.Tensor is no tensor subclass"),
    ):
        parts.about["class"] = where
        with pytest.raises(PlanError, match=words):
            parts.rebuild()


def test_a_planner_that_caches_plans_notices_another_context(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for number in (1, 2):
        holdfast.save(
            {"w": BlockScaled.random(8, 4, context=number)}, checkpoint_id=tmp_path, planner=planner
        )
    target = {"w": BlockScaled.random(8, 4, context=2, seed=3)}
    holdfast.load(target, checkpoint_id=tmp_path)
    assert_same_parts(target["w"], BlockScaled.random(8, 4))


def test_planners_of_torch_save_and_load_parts(tmp_path: Path) -> None:
    holdfast.save({"w": nested(1)}, checkpoint_id=tmp_path, planner=stock.DefaultSavePlanner())  # type: ignore[arg-type]
    target = {"w": nested(2)}
    holdfast.load(target, checkpoint_id=tmp_path, planner=stock.DefaultLoadPlanner())  # type: ignore[arg-type]
    assert_same_parts(target["w"], nested(1))


def test_a_planner_that_does_not_flatten_refuses_it(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    with pytest.raises(PlanError, match=r"w: a tensor of the class .*BlockScaled"):
        holdfast.save({"w": BlockScaled.random(8, 4)}, checkpoint_id=tmp_path, planner=planner)
    holdfast.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, planner=planner)
    found = {"w": torch.zeros(3)}
    holdfast.load(found, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(flatten_state_dict=False))
    assert torch.equal(found["w"], torch.ones(3))


@pytest.mark.parametrize("steps", [0, 2])
def test_an_optimizer_gets_its_state_before_and_after_its_first_step(tmp_path: Path, steps: int) -> None:
    weights = [torch.nn.Parameter(torch.ones(8, 4)) for _ in range(2)]
    saved, fresh = LowBit(weights[:1]), LowBit(weights[1:])
    saved.step()
    holdfast.save({"optimizer": saved}, checkpoint_id=tmp_path)
    for _ in range(steps):
        fresh.step()
    before = fresh.state[weights[1]].get("exp_avg")
    holdfast.load({"optimizer": fresh}, checkpoint_id=tmp_path, strict=True)
    assert fresh.state[weights[1]]["step"] == 1
    moment = fresh.state[weights[1]]["exp_avg"]
    assert_same_parts(moment, BlockScaled.random(8, 4, seed=1))
    assert before is None or before is moment

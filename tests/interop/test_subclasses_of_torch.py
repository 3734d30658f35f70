"""Tensor subclasses in checkpoints of stock torch, which has each of them as one pickled tensor."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.optimizers import LowBit
from tests.support.stock_torch import stock_load, stock_save
from tests.support.subclasses import BlockScaled, RowScaled, assert_same_parts

import holdfast
from holdfast.errors import IntegrityError, PlanError, UnsafeMetadataError
from holdfast.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

CLASSES: list[Any] = [BlockScaled, RowScaled]


class Quantized(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(BlockScaled.random(64, 32, context=("a", 1), seed=seed))
        self.bias = torch.nn.Parameter(torch.full((64,), float(seed)))


def state_of(seed: int) -> dict[str, Any]:
    model, tied = Quantized(seed), BlockScaled.random(64, 32, seed=seed)
    return {"model": model.state_dict(), "tied": [tied, {"again": tied}], "number": seed}


def test_they_are_copied_into_the_tensors_of_the_state(tmp_path: Path) -> None:
    stock_save(state_of(1), checkpoint_id=tmp_path)
    found, by_torch = state_of(2), state_of(3)
    with torch.serialization.safe_globals(CLASSES):
        stock_load(by_torch, checkpoint_id=tmp_path)
    weight, tied = found["model"]["weight"], found["tied"][0]
    before = weight.codes, tied.scale
    result = holdfast.load(found, checkpoint_id=tmp_path, strict=True, safe_globals=CLASSES)
    for state in (by_torch, found):
        assert_same_parts(state["model"]["weight"], state_of(1)["model"]["weight"])
        assert_same_parts(state["tied"][1]["again"], state_of(1)["tied"][0])
    assert (found["number"], found["model"]["bias"].tolist()) == (1, [1.0] * 64)
    assert "model.weight" in result.loaded
    assert found["model"]["weight"] is weight
    assert found["tied"][0] is found["tied"][1]["again"] is tied
    assert all(one is other for one, other in zip((weight.codes, tied.scale), before, strict=True))


def test_a_module_gets_its_parameters_and_torch_is_asked_what_is_safe(tmp_path: Path) -> None:
    stock_save({"model": Quantized(1).state_dict()}, checkpoint_id=tmp_path)
    model = Quantized(2)
    weight = model.weight
    with torch.serialization.safe_globals(CLASSES):
        holdfast.load({"model": model}, checkpoint_id=tmp_path)
    assert model.weight is weight
    assert isinstance(weight, torch.nn.Parameter)
    assert_same_parts(weight, Quantized(1).weight)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("form", ["object", "plain", "named"])
def test_an_optimizer_gets_its_state_before_and_after_its_first_step(
    tmp_path: Path, steps: int, form: str
) -> None:
    models = [torch.nn.Linear(32, 64, bias=False) for _ in range(2)]
    saved, fresh = (LowBit(model.parameters()) for model in models)
    saved.step()
    for _ in range(steps):
        fresh.step()
    kept: Any = get_optimizer_state_dict(models[0], saved) if form == "named" else saved.state_dict()
    stock_save({"optimizer": kept}, checkpoint_id=tmp_path)
    state: dict[str, Any] = {"optimizer": fresh}
    if form == "plain":
        state = {"optimizer": fresh.state_dict()}
    elif form == "named":
        state = {"optimizer": get_optimizer_state_dict(models[1], fresh)}
    holdfast.load(state, checkpoint_id=tmp_path, safe_globals=CLASSES)
    if form == "plain":
        fresh.load_state_dict(state["optimizer"])
    elif form == "named":
        set_optimizer_state_dict(models[1], fresh, state["optimizer"])
    loaded = fresh.state[models[1].weight]
    assert loaded["step"] == 1
    assert_same_parts(loaded["exp_avg"], BlockScaled.random(64, 32, seed=1))


@pytest.mark.parametrize("steps", [0, 1])
def test_what_its_pickle_names_must_be_allowed(tmp_path: Path, steps: int) -> None:
    weights = [torch.nn.Parameter(torch.ones(64, 32)) for _ in range(2)]
    saved, target = LowBit(weights[:1]), LowBit(weights[1:])
    saved.step()
    stock_save({"optimizer": saved.state_dict(), "other": torch.ones(2), "n": 1}, checkpoint_id=tmp_path)
    for _ in range(steps):
        target.step()
        target.step()
    state: dict[str, Any] = {"other": torch.zeros(2), "n": 0, "optimizer": target}
    with pytest.raises(UnsafeMetadataError, match=r"exp_avg: .*BlockScaled.*safe_globals") as caught:
        holdfast.load(state, checkpoint_id=tmp_path)
    assert "may have changed" not in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert (state["n"], state["other"].tolist()) == (0, [0, 0])
    assert target.state_dict()["state"].keys() == ({0} if steps else set())
    if steps:
        assert_same_parts(target.state[weights[1]]["exp_avg"], BlockScaled.random(64, 32, seed=2))
    holdfast.load(state, checkpoint_id=tmp_path, allow_pickle=True)
    assert_same_parts(target.state[weights[1]]["exp_avg"], BlockScaled.random(64, 32, seed=1))


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise AssertionError('it was run')",)


def test_nothing_else_that_its_pickle_names_is_run(tmp_path: Path) -> None:
    stock_save({"w": scaled(context=Evil())}, checkpoint_id=tmp_path)
    with pytest.raises(UnsafeMetadataError, match=r"w: .*exec"):
        holdfast.load({"w": scaled()}, checkpoint_id=tmp_path, safe_globals=CLASSES)


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_a_flipped_byte_is_noticed(tmp_path: Path, allow_pickle: bool) -> None:
    saved = scaled()
    stock_save({"w": saved}, checkpoint_id=tmp_path)
    [file] = tmp_path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[content.index(saved.codes.numpy().tobytes()) + 100] ^= 1
    file.write_bytes(content)
    target = scaled(seed=2)
    with pytest.raises(IntegrityError, match=r"w: .*checksum"):
        holdfast.load({"w": target}, checkpoint_id=tmp_path, safe_globals=CLASSES, allow_pickle=allow_pickle)
    assert_same_parts(target, scaled(seed=2))


def test_what_torch_saved_without_checksums_is_loaded(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        stock_save({"w": scaled(), "object": (1, torch.ones(2))}, checkpoint_id=tmp_path)
    finally:
        torch.serialization.set_crc32_options(before)
    state: dict[str, Any] = {"w": scaled(seed=2), "object": None}
    holdfast.load(state, checkpoint_id=tmp_path, safe_globals=CLASSES)
    assert_same_parts(state["w"], scaled())
    assert state["object"][1].tolist() == [1, 1]


def scaled(**changes: Any) -> BlockScaled:
    return BlockScaled.random(64, 32, **changes)


def on_meta() -> BlockScaled:
    whole = scaled()
    return BlockScaled(*(part.to("meta") for part in (whole.codes, whole.scale, whole.table)), None)


def looking_like(dtype: torch.dtype) -> BlockScaled:
    whole = scaled()
    return BlockScaled(whole.codes, whole.scale, whole.table, None, dtype)


@pytest.mark.parametrize(
    ("found", "expected", "words"),
    [
        (
            scaled(),
            RowScaled(torch.ones(64, 32), torch.ones(64, 1)),
            "BlockScaled here, the state .*RowScaled",
        ),
        (torch.ones(64, 32), scaled(), "torch.Tensor here, the state .*BlockScaled"),
        (scaled(context=1), scaled(context=2), r"context \{'context': 1.*'context': 2"),
        (scaled(), scaled(block=8), r"as its part w\.scale"),
        (
            scaled(),
            BlockScaled.random(32, 32),
            r"BlockScaled, .* shape \(64, 32\), in 1 piece.* shape \(32, 32\)",
        ),
        (
            scaled(),
            looking_like(torch.int32),
            r"has torch\.float32, the state torch\.int32; pass cast",
        ),
        (scaled(), on_meta(), "on the meta device"),
    ],
)
def test_what_does_not_fit_is_reported_before_anything_is_changed(
    tmp_path: Path, found: Any, expected: Any, words: str
) -> None:
    stock_save({"w": found, "other": torch.ones(2), "n": 1}, checkpoint_id=tmp_path)
    state = {"other": torch.zeros(2), "n": 0, "w": expected}
    with pytest.raises(PlanError, match=f"w: .*{words}") as caught:
        holdfast.load(state, checkpoint_id=tmp_path, safe_globals=CLASSES)
    assert "nothing was changed" in str(caught.value)
    assert state["w"] is expected
    assert (state["n"], state["other"].tolist()) == (0, [0, 0])

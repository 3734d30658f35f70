"""A tensor that the state has under two keys is filled once, or refused if the checkpoint has two values."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.stock_torch import stock_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import holdfast as hf
from holdfast.errors import PlanError

SIZES = pytest.mark.parametrize("size", [4, 3 << 20], ids=["small", "of many blocks"])


class Ends(torch.nn.Module):
    def __init__(self, *, tied: bool, size: int = 64) -> None:
        super().__init__()
        self.first = torch.nn.Linear(size, size, bias=False)
        self.last = torch.nn.Linear(size, size, bias=False)
        if tied:
            self.last.weight = self.first.weight


@SIZES
def test_two_values_for_one_tensor_are_refused_and_nothing_is_changed(tmp_path: Path, size: int) -> None:
    hf.save({"a": torch.ones(size), "b": torch.zeros(size)}, checkpoint_id=tmp_path)
    shared = torch.full((size,), 5.0)
    with pytest.raises(PlanError, match="b: the state has one tensor here and at a") as caught:
        hf.load({"a": shared, "b": shared.view(size)}, checkpoint_id=tmp_path)
    assert caught.value.key == "b"
    assert (shared == 5).all()


@SIZES
def test_one_value_for_one_tensor_is_loaded_under_all_its_keys(tmp_path: Path, size: int) -> None:
    hf.save({"a": torch.ones(size), "b": torch.ones(size), "c": 1}, checkpoint_id=tmp_path)
    shared = torch.zeros(size)
    result = hf.load({"a": shared, "b": shared, "c": 0}, checkpoint_id=tmp_path)
    assert (shared == 1).all()
    assert result.loaded == ("a", "b", "c")
    assert result.left_alone == result.not_asked_for == ()


@SIZES
def test_of_two_values_that_others_saved_the_last_one_is_loaded_whole(tmp_path: Path, size: int) -> None:
    stock_save({"a": torch.ones(size), "b": torch.zeros(size)}, checkpoint_id=tmp_path)
    shared = torch.full((size,), 5.0)
    hf.load({"a": shared, "b": shared}, checkpoint_id=tmp_path)
    assert (shared == 0).all()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_with_tied_weights_is_loaded_from_one_and_not_from_another(
    tmp_path: Path, device: str
) -> None:
    saved, other = Ends(tied=True), Ends(tied=False)
    hf.save({"model": saved}, checkpoint_id=tmp_path / "tied")
    hf.save({"model": other}, checkpoint_id=tmp_path / "untied")
    with torch.device(device):
        model = Ends(tied=True)
    with pytest.raises(PlanError, match=r"model\.last\.weight: .* here and at model\.first"):
        hf.load({"model": model}, checkpoint_id=tmp_path / "untied")
    result = hf.load({"model": model}, checkpoint_id=tmp_path / "tied")
    assert model.first.weight is model.last.weight
    assert torch.equal(model.first.weight, saved.first.weight)
    assert result.left_alone == ()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_with_tied_weights_is_loaded_if_one_of_their_names_is_stored(
    tmp_path: Path, device: str
) -> None:
    saved = Ends(tied=True)
    hf.save({"first.weight": saved.first.weight}, checkpoint_id=tmp_path)
    with torch.device(device):
        model, untied = Ends(tied=True), Ends(tied=False)
    result = hf.load(model, checkpoint_id=tmp_path)
    assert (result.loaded, result.left_alone) == (("first.weight", "last.weight"), ())
    assert model.first.weight is model.last.weight
    assert torch.equal(model.first.weight, saved.first.weight)
    with pytest.raises(PlanError, match=r"last\.weight: Missing key"):
        hf.load(untied, checkpoint_id=tmp_path)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_rank_without_elements_of_a_tied_tensor_has_loaded_it(tmp_path: Path, device: str) -> None:
    hf.save({"a": torch.ones(1, 2)}, checkpoint_id=tmp_path)
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        tied = DTensor.from_local(
            torch.empty(0, 2, device=device), mesh, [Shard(0)], shape=torch.Size((1, 2)), stride=(2, 1)
        )
        state = {"a": tied, "b": tied}
        result = hf.load(state, checkpoint_id=tmp_path, no_dist=True)
    finally:
        dist.destroy_process_group()
    assert (result.loaded, result.left_alone) == (("a", "b"), ())
    assert state["a"] is state["b"]
    assert not state["b"].is_meta


def test_a_tied_tensor_is_missing_if_its_stored_name_has_another_shape(tmp_path: Path) -> None:
    hf.save({"a": torch.ones(3), "c": torch.ones(1)}, checkpoint_id=tmp_path)
    shared = torch.zeros(2)
    with pytest.raises(PlanError, match="b: Missing key"):
        hf.load(
            {"a": shared, "b": shared, "c": torch.zeros(1)},
            checkpoint_id=tmp_path,
            ignore_mismatched_sizes=True,
        )


def test_views_of_different_parts_are_loaded_each(tmp_path: Path) -> None:
    hf.save({"a": torch.ones(2), "b": torch.zeros(2)}, checkpoint_id=tmp_path)
    whole = torch.full((4,), 5.0)
    hf.load({"a": whole[:2], "b": whole[2:]}, checkpoint_id=tmp_path)
    assert whole.tolist() == [1, 1, 0, 0]

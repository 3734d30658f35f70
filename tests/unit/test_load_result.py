"""What ``load`` says that it did, and the loads that it refuses because nothing would come of them."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.default_planner import EmptyStateDictLoadPlanner
from holdfast.errors import MissingKeyError, ShapeMismatchError, UsageError
from holdfast.planner import LoadPlan, LoadPlanner, ReadItem
from holdfast.state_dict_loader import _load_state_dict_from_keys
from holdfast.testing import FakeRank, FakeRanks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {
        "model": {"0.weight": torch.ones(2, 3), "0.bias": torch.ones(2), "head.weight": torch.ones(5, 2)},
        "optimizer": {"lr": 0.5, "betas": (0.9, 0.99)},
        "step": 7,
    }
    save(state, tmp_path)
    return tmp_path


def save(state: dict[str, Any], folder: Path) -> None:
    hf.save(state, storage_writer=hf.FileSystemWriter(folder, sync_files=False))


def model(**others: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"0.weight": torch.zeros(2, 3), "0.bias": torch.zeros(2), **others}


def test_a_load_says_what_it_loaded_left_alone_and_was_not_asked_for(folder: Path) -> None:
    state: dict[str, Any] = {"step": 0, "model": model(new=torch.zeros(1)), "ema": {"0.bias": torch.zeros(2)}}
    result = hf.load(state, checkpoint_id=folder, allow_partial_load=True, strict=False)
    assert result == hf.LoadResult(
        loaded=("step", "model.0.weight", "model.0.bias"),
        left_alone=("model.new", "ema.0.bias"),
        not_asked_for=("model.head.weight", "optimizer.lr", "optimizer.betas"),
    )
    assert pickle.loads(pickle.dumps(result)) == result


def test_the_result_of_a_whole_load_has_every_key(folder: Path) -> None:
    state: dict[str, Any] = {}
    result = hf.load(state, checkpoint_id=folder, planner=EmptyStateDictLoadPlanner())
    assert set(result.loaded) == {
        *("model.0.weight", "model.0.bias", "model.head.weight"),
        *("optimizer.lr", "optimizer.betas", "step"),
    }
    assert result == hf.LoadResult(result.loaded)


def test_a_printed_result_is_short_however_many_keys_there_are() -> None:
    keys = tuple(f"model.layers.{number}.weight" for number in range(100_000))
    many = tuple(f"key{number}" for number in range(100))
    result = hf.LoadResult((*keys, "step"), ("ema.weight",), many)
    text = str(result)
    assert "loaded: 100,001 keys" in text
    assert "  model: 100,000 keys: model.layers.0.weight, model.layers.1.weight" in text
    assert "  step\n" in text
    assert "left alone: 1 key\n  ema: 1 key: ema.weight" in text
    assert "and 92 more names" in text
    assert len(text) < 500
    assert "loaded=100001 keys" in repr(result)


class Renaming(hf.DefaultLoadPlanner):
    """Fills ``new`` with what is stored as ``step``."""

    def create_local_plan(self) -> LoadPlan:
        plan = hf.DefaultLoadPlanner()
        plan.set_up_planner({"step": 0}, self.metadata)
        (item,) = plan.create_local_plan().items
        dest = hf.MetadataIndex("new")
        return LoadPlan(
            [
                ReadItem(
                    item.type, dest, item.dest_offsets, item.storage_index, item.storage_offsets, item.lengths
                )
            ]
        )


class Stranger(LoadPlanner):
    """Keeps nothing that says what it fills."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.inner = hf.DefaultLoadPlanner()
        self.inner.set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        return self.inner.create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.inner.load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.inner.resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize(("planner", "key"), [(Renaming(), "new"), (Stranger(), "step")])
def test_planners_of_others_are_told_of_by_their_plans(folder: Path, planner: LoadPlanner, key: str) -> None:
    state = {key: 0}
    result = hf.load(state, checkpoint_id=folder, planner=planner)
    assert state == {key: 7}
    assert result.loaded == (key,)
    assert result.left_alone == ()
    assert "step" not in result.not_asked_for
    assert "optimizer.lr" in result.not_asked_for


def test_values_of_other_ranks_are_not_listed_as_not_asked_for(tmp_path: Path) -> None:
    def run(rank: FakeRank) -> hf.LoadResult:
        rank.save({"own": hf.PerRank(rank.rank), "all": 1}, checkpoint_id=tmp_path)
        return rank.load({"own": hf.PerRank(0)}, checkpoint_id=tmp_path)

    assert FakeRanks(2).run(run) == [
        hf.LoadResult((f"own.@rank-{rank}-of-2",), (), ("all",)) for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("state", "there", "wanted"),
    [
        ({"step": 0, "model": {"module.0.weight": 1, "module.0.bias": 1}}, "model.0.weight", "model.module"),
        ({"step": 0, "model": {"weight": 1}}, "model.0.weight", "model.weight"),
        ({"step": 0, "module.model.0.weight": 1, "module.model.0.bias": 1}, "model.0.weight", "module.model"),
        ({"step": 0, "0.weight": 1, "0.bias": 1}, "model.0.weight", "0.weight"),
        ({"step": 0, "app": {"model": {"0.weight": 1, "new": 1}}}, "model.0.weight", "app.model.0.weight"),
    ],
    ids=["a prefix more", "another name", "a prefix before all", "a prefix less", "one level deeper"],
)
def test_a_partial_load_that_finds_nothing_of_a_group_raises_with_the_names(
    folder: Path, state: dict[str, Any], there: str, wanted: str
) -> None:
    with pytest.raises(MissingKeyError, match=f"the checkpoint has '{there}'; the state asks for '{wanted}"):
        hf.load(state, checkpoint_id=folder, allow_partial_load=True)
    assert state["step"] == 0


def test_groups_are_those_below_the_only_key_of_a_state(tmp_path: Path) -> None:
    save({"app": {"model": {"a": 1, "b": 2}, "step": 3}}, tmp_path)
    with pytest.raises(MissingKeyError, match=r"2 keys under 'app\.model'.*'app\.model\.a'"):
        hf.load(
            {"app": {"model": {"m.a": 0, "m.b": 0}, "step": 0}},
            checkpoint_id=tmp_path,
            allow_partial_load=True,
        )


@pytest.mark.parametrize(
    "new",
    [
        {"ema": {"0.weight": 1}},
        {"lr": 1},
        {"scheduler": {"step": 1, "last": 2}},
        {"model": {"0.weight": torch.zeros(2, 3), "new": 1}},
        {"0": {"1": 5}},
    ],
    ids=str,
)
def test_a_partial_load_leaves_alone_what_is_new(folder: Path, new: dict[str, Any]) -> None:
    state: dict[str, Any] = {"step": 0, **new}
    result = hf.load(state, checkpoint_id=folder, allow_partial_load=True, strict=False)
    assert state["step"] == 7
    assert result.left_alone


def test_a_layer_of_a_flat_state_dict_may_be_replaced(tmp_path: Path) -> None:
    save({"body.weight": torch.ones(2), "head.weight": torch.ones(3)}, tmp_path)
    state = {"body.weight": torch.zeros(2), "head.0.weight": torch.zeros(1), "head.1.weight": torch.zeros(1)}
    result = hf.load(state, checkpoint_id=tmp_path, allow_partial_load=True)
    assert result == hf.LoadResult(("body.weight",), ("head.0.weight", "head.1.weight"), ("head.weight",))


def test_a_partial_load_of_nothing_raises(folder: Path) -> None:
    with pytest.raises(MissingKeyError, match=r"asks for 'ema\.a'; the checkpoint has 'model\."):
        hf.load({"ema": {"a": 1}}, checkpoint_id=folder, allow_partial_load=True)


def test_ranks_find_a_group_together(folder: Path) -> None:
    """The rank of a pipeline that holds only a new layer is not the one to complain."""

    def load(rank: FakeRank) -> hf.LoadResult:
        states: list[dict[str, Any]] = [{"step": 0, "model": model()}, {"model": {"new": 1}}, {}]
        return rank.load(states[rank.rank], checkpoint_id=folder, planner=planner())

    def planner() -> hf.DefaultLoadPlanner:
        return hf.DefaultLoadPlanner(allow_partial_load=True, strict=False)

    results = FakeRanks(3).run(load)
    assert [len(result.loaded) for result in results] == [3, 0, 0]
    assert results[1].left_alone == ("model.new",)

    wrong: list[dict[str, Any]] = [{"step": 0}, {"model": {"new": 1}}]
    for error in FakeRanks(2).attempt(
        lambda rank: rank.load(wrong[rank.rank], checkpoint_id=folder, planner=planner())
    ):
        assert isinstance(error, MissingKeyError)


def test_tensors_of_another_shape_can_be_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    state: dict[str, Any] = {"model": model(**{"head.weight": torch.full((3, 2), 4.0)}), "step": 0}
    with pytest.raises(ShapeMismatchError):
        hf.load(state, checkpoint_id=folder)
    result = hf.load(state, checkpoint_id=folder, ignore_mismatched_sizes=True)
    assert "head.weight has (5, 2) in the checkpoint, (3, 2) here" in caplog.text
    assert result.left_alone == ("model.head.weight",)
    assert state["model"]["head.weight"].tolist() == [[4.0, 4.0]] * 3
    assert state["model"]["0.bias"].tolist() == [1.0, 1.0]
    assert "model.head.weight" not in result.not_asked_for


def test_missing_keys_raise_also_where_other_shapes_are_ignored(folder: Path) -> None:
    state = {"model": model(**{"head.weight": torch.zeros(3, 2), "new": torch.zeros(1)})}
    with pytest.raises(MissingKeyError, match=r"model\.new"):
        hf.load(state, checkpoint_id=folder, ignore_mismatched_sizes=True)


def test_a_load_of_other_shapes_alone_raises(folder: Path) -> None:
    with pytest.raises(ShapeMismatchError, match=r"model\.0\.bias"):
        hf.load({"model": {"0.bias": torch.zeros(3)}}, checkpoint_id=folder, ignore_mismatched_sizes=True)


@pytest.mark.parametrize("state", [{}, {"model": {}}, {"model": torch.nn.ReLU()}])
def test_a_load_into_nothing_is_refused(folder: Path, state: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="EmptyStateDictLoadPlanner"):
        hf.load(state, checkpoint_id=folder)
    with pytest.raises(UsageError, match="EmptyStateDictLoadPlanner"):
        hf.load(state, checkpoint_id=folder, planner=hf.DefaultLoadPlanner())


def test_a_load_into_none_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="is None"):
        hf.load(None, checkpoint_id=folder)  # type: ignore[arg-type]


def test_an_object_without_state_has_nothing_to_load(folder: Path) -> None:
    assert hf.load({"activation": torch.nn.ReLU()}, checkpoint_id=folder, strict=False).loaded == ()


def test_a_state_may_be_empty_on_some_ranks_but_not_on_all(folder: Path) -> None:
    def load(states: list[dict[str, Any]]) -> list[Any]:
        return FakeRanks(2).attempt(lambda rank: rank.load(states[rank.rank], checkpoint_id=folder))

    assert load([{}, {"step": 0}])[1].loaded == ("step",)
    assert all(isinstance(error, UsageError) for error in load([{}, {}]))


def test_keys_that_the_checkpoint_does_not_have_are_not_loaded_as_nothing(folder: Path) -> None:
    with pytest.raises(MissingKeyError, match="none of the keys asked for: modle"):
        _load_state_dict_from_keys("modle", checkpoint_id=folder)
    assert list(_load_state_dict_from_keys({"modle", "step"}, checkpoint_id=folder)) == ["step"]

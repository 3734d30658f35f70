"""The default planners: what they report before anything changes, and their options one by one."""

import copy
import gc
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.stock_torch import IS_NEWEST

import holdfast as hf
from holdfast.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    EmptyStateDictLoadPlanner,
    create_default_global_save_plan,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from holdfast.errors import (
    DtypeMismatchError,
    InvalidPlanError,
    MissingKeyError,
    PlanError,
    ShapeMismatchError,
    UsageError,
)
from holdfast.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from holdfast.state_dict_saver import SaveFuture
from holdfast.testing import drive_save


def save(state: dict[str, Any], folder: Path, planner: SavePlanner | None = None) -> Metadata:
    writer = hf.FileSystemWriter(folder, sync_files=False)
    return hf.save(state, storage_writer=writer, planner=planner)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(
        {
            "model": {
                "encoder.weight": torch.ones(2, 3),
                "encoder.bias": torch.ones(3),
                "half": torch.ones(2).half(),
            },
            "count": torch.tensor(3),
            "note": "text",
        },
        tmp_path,
    )
    return tmp_path


def misfit() -> dict[str, Any]:
    return {
        "model": {
            "encoder.wieght": torch.zeros(2, 3),
            "encoder.bias": torch.zeros(4),
            "half": torch.zeros(2, dtype=torch.int32),
        },
        "count": 0,
        "note": torch.zeros(1),
        "nothing like it": 5,
    }


def test_all_problems_are_in_one_report_and_nothing_is_changed(folder: Path) -> None:
    state = misfit()
    with pytest.raises(MissingKeyError) as caught:
        hf.load(state, checkpoint_id=folder)
    text = str(caught.value)
    assert "6 problems" in text
    assert "model.encoder.wieght: Missing key in checkpoint (it has model.encoder.weight)" in text
    assert "nothing like it: Missing key in checkpoint\n" in text
    assert "model.encoder.bias" in text
    assert "(3,)" in text
    assert "(4,)" in text
    assert "model.half" in text
    assert "torch.float16" in text
    assert "count: the checkpoint has a tensor here, the state a value of type int" in text
    assert "note: the checkpoint has an object here, the state a tensor" in text
    assert state["count"] == 0
    assert all(not tensor.any() for tensor in (*state["model"].values(), state["note"]))


def test_the_report_is_an_instance_of_what_torch_raises(folder: Path) -> None:
    with pytest.raises(RuntimeError):
        hf.load({"absent": torch.ones(1)}, checkpoint_id=folder)
    with pytest.raises(ValueError, match="Size mismatch"):
        hf.load({"count": torch.ones(2, dtype=torch.int64)}, checkpoint_id=folder)


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({"absent": 1, "count": torch.ones(2)}, MissingKeyError),
        ({"count": torch.ones(2)}, ShapeMismatchError),
        ({"count": torch.tensor(1.0)}, DtypeMismatchError),
        ({"note": torch.tensor(1.0)}, PlanError),
    ],
    ids=["missing", "shape", "dtype", "kind"],
)
def test_the_class_of_the_error_tells_the_gravest_problem(
    folder: Path, state: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        hf.load(state, checkpoint_id=folder)


def test_a_long_report_names_the_first_problems_and_counts_the_others(folder: Path) -> None:
    with pytest.raises(MissingKeyError, match="and 94 more") as caught:
        hf.load({f"absent {number}": 1 for number in range(100)}, checkpoint_id=folder)
    assert len(str(caught.value).splitlines()) <= 9
    assert caught.value.found[99] == "absent 99: Missing key in checkpoint"


@pytest.mark.parametrize(
    ("saved", "asked", "says"),
    [
        ("model.", "net.", "(it has m.model.0.weight)"),
        ("", "module.", "(it has m.0.weight)"),
        ("module.", "", "(it has m.module.0.weight)"),
    ],
)
def test_another_prefix_is_one_line_that_names_both(
    tmp_path: Path, saved: str, asked: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"{number}.{kind}" for number in range(30) for kind in ("weight", "bias")]
    hf.save({"m": {f"{saved}{name}": torch.ones(1) for name in names}}, checkpoint_id=tmp_path)
    state = {"m": {f"{asked}{name}": torch.ones(1) for name in names}}
    with pytest.raises(MissingKeyError, match="60 problems") as caught:
        hf.load(state, checkpoint_id=tmp_path)
    lines = str(caught.value).splitlines()
    told = lines[[("does not fit" in line) for line in lines].index(True) + 1 :]
    assert told[0].startswith(f"  m.{asked}0.weight: Missing key in checkpoint {says}, and 59 more")
    # Names that wrappers have changed come with what to do.
    remedy = "get_model_state_dict" if "module." in saved + asked else "allow_partial_load=True"
    assert [remedy in line for line in told[1:]] == [True]
    assert not caplog.records  # the error has told it all


def test_a_name_that_the_state_has_itself_is_no_hint(tmp_path: Path) -> None:
    hf.save({"layer.weight": torch.ones(1)}, checkpoint_id=tmp_path)
    with pytest.raises(MissingKeyError, match=r"layer2.weight: Missing key in checkpoint\n"):
        hf.load({"layer.weight": torch.ones(1), "layer2.weight": torch.ones(1)}, checkpoint_id=tmp_path)


def neighbours() -> dict[str, Any]:
    return {"model": {"encoder.weight": torch.zeros(2, 3)}}


def test_keys_forgotten_beside_loaded_ones_are_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    hf.load(neighbours(), checkpoint_id=folder)
    (record,) = [r for r in caplog.records if r.name.startswith("holdfast")]
    assert record.levelno == logging.WARNING
    assert "model.encoder.bias" in record.getMessage()
    assert "model.half" in record.getMessage()
    assert "count" not in record.getMessage()


def test_whole_parts_that_nobody_asked_for_are_not_worth_a_word(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf.load({"count": torch.tensor(0)}, checkpoint_id=folder)
    assert not caplog.records


def test_strict_false_is_silent(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = neighbours()
    hf.load(state, checkpoint_id=folder, strict=False)
    assert not caplog.records
    assert state["model"]["encoder.weight"].all()


def test_strict_true_raises_and_names_every_unexpected_key(folder: Path) -> None:
    state = neighbours()
    with pytest.raises(PlanError, match="4 problems") as caught:
        hf.load(state, checkpoint_id=folder, strict=True)
    for key in ("model.encoder.bias", "model.half", "count", "note"):
        assert key in str(caught.value)
    assert not state["model"]["encoder.weight"].any()


def test_momentum_that_a_plain_dict_has_no_place_for_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save({"optimizer": optimizer}, tmp_path)
    # Without groups it is not known to be the state dict of an optimizer.
    fresh = {"state": {1: {"momentum_buffer": torch.zeros(2)}}}
    hf.load({"optimizer": fresh}, checkpoint_id=tmp_path)
    assert "optimizer.state.0.momentum_buffer" in caplog.text
    with pytest.raises(PlanError, match="momentum_buffer"):
        hf.load({"optimizer": fresh}, checkpoint_id=tmp_path, strict=True)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.float32, torch.int32),
        (torch.int64, torch.float64),
        (torch.bool, torch.int8),
        (torch.uint8, torch.bool),
        (torch.complex64, torch.float32),
        (torch.float32, torch.complex64),
    ],
    ids=str,
)
def test_a_cast_across_kinds_raises_unless_it_is_asked_for(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    save({"t": torch.ones(3, dtype=stored)}, tmp_path)
    state = {"t": torch.zeros(3, dtype=wanted)}
    with pytest.raises(DtypeMismatchError, match="pass cast=True"):
        hf.load(state, checkpoint_id=tmp_path)
    assert not state["t"].any()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Casting complex values to real")
        hf.load(state, checkpoint_id=tmp_path, cast=True)
    assert state["t"].all()


def test_a_cast_within_a_kind_warns_once_with_all_keys(tmp_path: Path) -> None:
    save({"a": torch.full((3,), 1.5), "b": torch.ones(2, dtype=torch.int64), "c": torch.ones(1)}, tmp_path)
    state = {
        "a": torch.zeros(3, dtype=torch.bfloat16),
        "b": torch.zeros(2, dtype=torch.int16),
        "c": torch.zeros(1),
    }
    with pytest.warns(UserWarning, match="tensors are cast on load") as caught:
        hf.load(state, checkpoint_id=tmp_path)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "a from torch.float32 to torch.bfloat16" in message
    assert "b from torch.int64 to torch.int16" in message
    assert "c from" not in message
    assert state["a"].tolist() == [1.5] * 3
    assert state["b"].tolist() == [1, 1]


@pytest.mark.skipif(not IS_NEWEST, reason="this torch cannot copy 4-bit numbers, or has none")
@pytest.mark.parametrize("cast", [None, True, False])
def test_numbers_of_four_bits_are_never_cast(tmp_path: Path, cast: bool | None) -> None:
    hf.save({"x": torch.zeros(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, checkpoint_id=tmp_path)
    state = {"x": torch.ones(8, dtype=torch.float16)}
    with pytest.raises(DtypeMismatchError, match="torch cannot cast them"):
        hf.load(state, checkpoint_id=tmp_path, cast=cast)
    assert torch.equal(state["x"], torch.ones(8, dtype=torch.float16))


def test_cast_true_is_silent_and_cast_false_raises(tmp_path: Path) -> None:
    save({"a": torch.full((3,), 1.5)}, tmp_path)
    state = {"a": torch.zeros(3, dtype=torch.float64)}
    with pytest.raises(DtypeMismatchError, match=r"a: .*float32.*float64"):
        hf.load(state, checkpoint_id=tmp_path, cast=False)
    assert not state["a"].any()
    hf.load(state, checkpoint_id=tmp_path, cast=True)
    assert state["a"].tolist() == [1.5] * 3


def test_a_partial_load_leaves_alone_what_is_missing_and_checks_the_rest(folder: Path) -> None:
    state: dict[str, Any] = {"count": torch.tensor(0), "absent": torch.full((2,), 7.0), "gone": "as it was"}
    hf.load(state, checkpoint_id=folder, allow_partial_load=True)
    assert state["count"] == 3
    assert state["absent"].tolist() == [7.0, 7.0]
    assert state["gone"] == "as it was"
    with pytest.raises(ShapeMismatchError):
        hf.load({"count": torch.zeros(2), "absent": 1}, checkpoint_id=folder, allow_partial_load=True)


@pytest.mark.parametrize(
    "options",
    [
        {"strict": True},
        {"cast": True},
        {"allow_partial_load": True},
        {"allow_pickle": True},
        {"safe_globals": [set]},
    ],
    ids=str,
)
def test_options_beside_a_planner_of_ones_own_are_refused(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        hf.load({"count": torch.tensor(0)}, checkpoint_id=folder, planner=DefaultLoadPlanner(), **options)


@pytest.mark.parametrize("options", [{"strict": False}, {"cast": False}], ids=str)
def test_options_that_say_no_beside_a_planner_are_refused_too(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        hf.load({"count": torch.tensor(0)}, checkpoint_id=folder, planner=DefaultLoadPlanner(), **options)


@pytest.mark.parametrize(
    ("options", "state"),
    [
        ({"strict": True}, {"count": torch.tensor(0)}),
        ({"cast": False}, {"count": torch.tensor(0, dtype=torch.int8)}),
    ],
    ids=str,
)
def test_the_planner_takes_the_same_options_as_load(
    folder: Path, options: dict[str, Any], state: dict[str, Any]
) -> None:
    with pytest.raises(PlanError) as by_planner:
        hf.load(state, checkpoint_id=folder, planner=DefaultLoadPlanner(**options))
    with pytest.raises(PlanError) as by_load:
        hf.load(state, checkpoint_id=folder, **options)
    assert str(by_planner.value) == str(by_load.value)
    assert type(by_planner.value) is type(by_load.value)


def test_a_failed_load_does_not_call_load_state_dict(folder: Path) -> None:
    class Watched:
        loaded = False

        def state_dict(self) -> dict[str, Any]:
            return {"absent": torch.zeros(1)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = True

    watched = Watched()
    with pytest.raises(MissingKeyError):
        hf.load({"watched": watched}, checkpoint_id=folder)
    assert not watched.loaded


def test_without_flattening_nested_values_are_one_object(tmp_path: Path) -> None:
    state = {"tensor": torch.ones(2), "nested": {"t": torch.full((2,), 3.0), 5: "x"}}
    metadata = save(state, tmp_path, DefaultSavePlanner(flatten_state_dict=False))
    assert set(metadata.state_dict_metadata) == {"tensor", "nested"}
    loaded: dict[str, Any] = {"tensor": torch.zeros(2), "nested": None}
    hf.load(loaded, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(flatten_state_dict=False))
    assert loaded["tensor"].tolist() == [1.0, 1.0]
    assert loaded["nested"]["t"].tolist() == [3.0, 3.0]
    assert loaded["nested"][5] == "x"


def test_a_deprecated_argument_warns() -> None:
    with pytest.warns(DeprecationWarning, match="dedup_replicated_tensors has no effect"):
        DefaultSavePlanner(dedup_replicated_tensors=True)


@pytest.mark.parametrize("size", [3, 1 << 20])
def test_autograd_knows_that_a_load_has_changed_a_tensor(tmp_path: Path, size: int) -> None:
    hf.save({"weight": torch.zeros(size)}, checkpoint_id=tmp_path)
    weight = torch.ones(size, requires_grad=True)
    loss = (weight * weight).sum()
    hf.load({"weight": weight}, checkpoint_id=tmp_path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, weight)


@pytest.mark.parametrize(
    ("shape", "strides"), [((5, 4), (0, 1)), ((3, 3), (1, 1)), ((4, 3), (2, 3))], ids=str
)
def test_tensors_whose_elements_share_memory_are_refused(
    tmp_path: Path, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    hf.save({"weight": torch.ones(shape)}, checkpoint_id=tmp_path)
    memory = torch.zeros(20)
    with pytest.raises(PlanError, match=r"weight: several elements .* share one place"):
        hf.load({"weight": memory.as_strided(shape, strides)}, checkpoint_id=tmp_path)
    assert not memory.any()


def test_tensors_whose_elements_are_entangled_but_apart_are_loaded(tmp_path: Path) -> None:
    hf.save({"weight": torch.arange(1.0, 10).view(3, 3)}, checkpoint_id=tmp_path)
    weight = torch.zeros(20).as_strided((3, 3), (2, 3))
    hf.load({"weight": weight}, checkpoint_id=tmp_path)
    assert weight.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def _sparse(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(size, size, dtype=dtype).to_sparse()


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        (_sparse(4, torch.float32), ShapeMismatchError),
        (_sparse(3, torch.int32), DtypeMismatchError),
    ],
    ids=["shape", "dtype"],
)
def test_sparse_tensors_are_not_replaced_by_others(
    tmp_path: Path, wanted: torch.Tensor, error: type[Exception]
) -> None:
    hf.save({"sparse": _sparse(3, torch.float32)}, checkpoint_id=tmp_path)
    state = {"sparse": wanted}
    with pytest.raises(error, match=r"sparse: the checkpoint has the .* leave the key out"):
        hf.load(state, checkpoint_id=tmp_path)
    assert state["sparse"] is wanted
    state = {"sparse": _sparse(3, torch.float32) * 2}
    hf.load(state, checkpoint_id=tmp_path)
    assert state["sparse"].to_dense().tolist() == [[1, 1, 1]] * 3


def _nested(lengths: Sequence[int], layout: torch.layout, value: float) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.full((n, 2), value) for n in lengths], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_nested_tensor_is_replaced_by_one_of_the_same_parts(
    tmp_path: Path, layout: torch.layout, in_background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    saved = {"ragged": _nested([2, 3], layout, 1.0)}
    if in_background:
        saving = hf.async_save(saved, checkpoint_id=tmp_path)
        assert isinstance(saving, SaveFuture)
        saving.result()
    else:
        hf.save(saved, checkpoint_id=tmp_path)
    assert caplog.messages == []
    state = {"ragged": _nested([2, 3], layout, 0.0)}
    hf.load(state, checkpoint_id=tmp_path)
    assert [part.tolist() for part in state["ragged"].unbind()] == [[[1, 1]] * 2, [[1, 1]] * 3]
    other = _nested([3, 2], layout, 0.0)
    with pytest.raises(ShapeMismatchError, match=r"ragged: .* the shape .* leave the key out"):
        hf.load({"ragged": other}, checkpoint_id=tmp_path)


def test_an_empty_state_is_asked_for_where_the_checkpoint_builds_it(folder: Path) -> None:
    with pytest.raises(UsageError, match="must be empty"):
        hf.load({"count": 1}, checkpoint_id=folder, planner=EmptyStateDictLoadPlanner())
    state: dict[str, Any] = {}
    hf.load(state, checkpoint_id=folder, planner=EmptyStateDictLoadPlanner({"model"}))
    assert set(state) == {"model"}
    assert state["model"]["encoder.weight"].tolist() == [[1.0] * 3] * 2


def test_a_model_on_the_meta_device_gets_memory(folder: Path) -> None:
    with torch.device("meta"):
        state: dict[str, Any] = {
            "model": {"encoder.weight": torch.empty(2, 3)},
            "count": torch.empty((), dtype=torch.int64),
        }
    hf.load(state, checkpoint_id=folder, strict=False)
    assert state["count"].item() == 3
    assert state["model"]["encoder.weight"].tolist() == [[1.0] * 3] * 2


# Plans of several ranks, made in one process.


def shard(key: str, offset: int, length: int, size: int, dtype: torch.dtype = torch.float32) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([offset]), torch.Size([length]))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size([size]))
    return WriteItem(MetadataIndex(key, [offset]), WriteItemType.SHARD, tensor_data=data)


def merged(*plans: list[WriteItem], **options: Any) -> tuple[list[SavePlan], Metadata]:
    return DefaultSavePlanner(flatten_state_dict=False, **options).create_global_plan(
        [SavePlan(p) for p in plans]
    )


@pytest.mark.parametrize(
    ("plans", "problem"),
    [
        ([[shard("t", 0, 5, 8)], [shard("t", 4, 4, 8)]], "overlap"),
        ([[shard("t", 0, 4, 8)], [shard("t", 4, 5, 8)]], "out of bounds"),
        ([[shard("t", 0, 4, 8)], [shard("t", 5, 3, 8)]], "4"),
        ([[shard("t", 0, 4, 8)], [shard("t", 4, 4, 9)]], "disagree"),
        ([[shard("t", 0, 4, 8)], [shard("t", 4, 4, 8, torch.float16)]], "disagree"),
        (
            [[shard("t", 0, 4, 8)], [WriteItem(MetadataIndex("t"), WriteItemType.BYTE_IO)]],
            "t",
        ),
    ],
    ids=["overlap", "out-of-bounds", "gap", "shape", "dtype", "kind"],
)
def test_plans_that_do_not_make_one_tensor_are_refused(plans: list[list[WriteItem]], problem: str) -> None:
    with pytest.raises(InvalidPlanError, match=problem) as caught:
        merged(*plans)
    assert "t" in str(caught.value)


def test_chunks_that_tile_a_tensor_are_listed_in_rank_order() -> None:
    plans, metadata = merged([shard("t", 4, 4, 8)], [shard("t", 0, 4, 8)])
    entry = metadata.state_dict_metadata["t"]
    assert isinstance(entry, TensorStorageMetadata)
    assert [tuple(chunk.offsets) for chunk in entry.chunks] == [(4,), (0,)]
    assert [item.index.index for plan in plans for item in plan.items] == [0, 1]


def replicated(key: str, count: int) -> WriteItem:
    (item,) = create_default_local_save_plan({key: torch.zeros(count)}, is_coordinator=False).items
    return item


def test_replicated_items_are_spread_over_the_ranks_by_bytes() -> None:
    items = [replicated(f"t{number}", 100) for number in range(8)]
    plans, _ = merged(items, list(items), list(items), list(items))
    assert [len(plan.items) for plan in plans] == [2, 2, 2, 2]


def test_a_rank_with_much_of_its_own_gets_fewer_replicated_items() -> None:
    items = [replicated(f"t{number}", 100) for number in range(4)]
    plans, _ = merged([replicated("own", 10_000), *items], list(items))
    assert [len(plan.items) for plan in plans] == [1, 4]


def test_replicated_items_go_to_the_lowest_rank_that_has_them_if_asked() -> None:
    items = [replicated(f"t{number}", 100) for number in range(4)]
    plans, _ = merged(items, [*items, replicated("only here", 1)], dedup_save_to_lowest_rank=True)
    assert [item.index.fqn for item in plans[0].items] == ["t0", "t1", "t2", "t3"]
    assert [item.index.fqn for item in plans[1].items] == ["only here"]


def test_dealing_out_items_changes_no_input() -> None:
    items = [replicated("a", 1), replicated("b", 1)]
    offered = [SavePlan(list(items)), SavePlan(list(items))]
    DefaultSavePlanner(flatten_state_dict=False).create_global_plan(offered)
    assert [plan.items for plan in offered] == [items, items]


def test_two_items_of_one_whole_tensor_in_merged_plans_are_refused() -> None:
    item = replicated("t", 3)
    with pytest.raises(InvalidPlanError, match="t: two items"):
        create_default_global_save_plan([SavePlan([item]), SavePlan([item])])


def test_a_checkpoint_whose_chunks_leave_a_hole_is_refused_before_anything_is_read() -> None:
    entry = TensorStorageMetadata(
        TensorProperties(torch.float32),
        torch.Size([8]),
        [
            ChunkStorageMetadata(torch.Size([0]), torch.Size([3])),
            ChunkStorageMetadata(torch.Size([4]), torch.Size([4])),
        ],
    )
    with pytest.raises(InvalidPlanError, match=r"t: no chunk .*3") as caught:
        create_default_local_load_plan({"t": torch.zeros(8)}, Metadata({"t": entry}))
    assert caught.value.key == "t"


# The plan cache.


@pytest.fixture
def cache() -> Iterator[type[DefaultSavePlanner]]:
    """A planner class with a cache of its own."""

    class Caching(DefaultSavePlanner):
        def __init__(self) -> None:
            super().__init__(enable_plan_caching=True)
            self._cached_plans_key = f"tests {id(Caching)}"

    caches = [value for name, value in vars(SavePlanner).items() if name.startswith("_cached")]
    before = [dict(each) for each in caches]
    yield Caching
    for each, content in zip(caches, before, strict=True):
        each.clear()
        each.update(content)


def round_trip(state: dict[str, Any], folder: Path, cache: type[DefaultSavePlanner]) -> dict[str, Any]:
    save(state, folder, cache())
    loaded: dict[str, Any] = {}
    hf.load(loaded, checkpoint_id=folder, planner=EmptyStateDictLoadPlanner())
    return loaded


def test_an_unchanged_state_is_planned_once_and_saved_with_its_new_values(
    tmp_path: Path, cache: type[DefaultSavePlanner], monkeypatch: pytest.MonkeyPatch
) -> None:
    merges = []

    def merge(self: DefaultSavePlanner, plans: list[SavePlan]) -> Any:
        merges.append(len(plans))
        return DefaultSavePlanner._merge(self, plans)

    monkeypatch.setattr(cache, "_merge", merge)
    for number in range(3):
        state = {"t": torch.full((3,), float(number)), "n": number}
        loaded = round_trip(state, tmp_path / str(number), cache)
        assert loaded["t"].tolist() == [number] * 3
        assert loaded["n"] == number
    assert len(merges) == 1


STEPS: dict[str, tuple[dict[Any, Any], dict[Any, Any]]] = {
    "dtype": ({"t": torch.ones(3)}, {"t": torch.ones(3, dtype=torch.float64)}),
    "same width": ({"t": torch.ones(3)}, {"t": torch.ones(3, dtype=torch.int32)}),
    "shape": ({"t": torch.ones(3)}, {"t": torch.ones(4)}),
    "same count": ({"t": torch.ones(2, 3)}, {"t": torch.ones(3, 2)}),
    "key added": ({"t": torch.ones(3)}, {"t": torch.ones(3), "u": torch.ones(1)}),
    "key removed": ({"t": torch.ones(3), "u": 1}, {"t": torch.ones(3)}),
    "kind": ({"t": torch.ones(3)}, {"t": 5}),
    "nesting": ({"a": {"b": 1}}, {"a.b": 1}),
    "order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_cached_plan_is_not_used_when_anything_changed(
    tmp_path: Path, cache: type[DefaultSavePlanner], name: str
) -> None:
    for number, state in enumerate((*STEPS[name], *STEPS[name])):
        loaded = round_trip(state, tmp_path / str(number), cache)
        assert str(loaded) == str(state)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"d": {1: 5}}, {"d": {"1": 5}}),
        ({"a": 1, "e": {}}, {"a": 1}),
        ({"a": 1}, {"a": 1, "e": {}}),
        ({"a": {0.0: 5}}, {"a": {"0.0": 5}}),
    ],
    ids=str,
)
def test_a_cached_plan_is_not_used_when_the_structure_changed(
    tmp_path: Path, cache: type[DefaultSavePlanner], first: dict[Any, Any], second: dict[Any, Any]
) -> None:
    round_trip(first, tmp_path / "first", cache)
    assert str(round_trip(second, tmp_path / "second", cache)) == str(second)


class BreaksOnce(hf.FileSystemWriter):
    broken = False

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self.broken:
            raise OSError("no")
        return super().prepare_global_plan(plans)


def cached_plans() -> list[dict[str, Any]]:
    return [value for name, value in vars(SavePlanner).items() if name.startswith("_cached")]


def test_planners_of_one_class_do_not_use_each_others_plans() -> None:
    """Two ranks hold the same tensors; only one of the two planners lets the lower rank write them all."""

    def plan(planner: DefaultSavePlanner) -> list[int]:
        planner.set_up_planner({f"t{n}": torch.ones(4) for n in range(4)}, is_coordinator=True)
        offer = planner.create_local_plan()
        plans, _ = planner.create_global_plan([offer, offer])
        planner.finish_plan(plans[0])
        return [len(each.items) for each in plans]

    spreading = DefaultSavePlanner(enable_plan_caching=True)
    lowest = DefaultSavePlanner(enable_plan_caching=True, dedup_save_to_lowest_rank=True)
    assert [plan(spreading), plan(lowest)] == [[2, 2], [4, 0]]


def test_plans_are_forgotten_with_their_planner(tmp_path: Path) -> None:
    before = [set(plans) for plans in cached_plans()]
    planner = DefaultSavePlanner(enable_plan_caching=True)
    save({"t": torch.ones(2)}, tmp_path, planner)
    assert all(planner._cached_plans_key in plans for plans in cached_plans())
    del planner
    gc.collect()
    assert [set(plans) for plans in cached_plans()] == before


def test_a_save_that_failed_leaves_nothing_in_the_cache(
    tmp_path: Path, cache: type[DefaultSavePlanner]
) -> None:
    writer = BreaksOnce(tmp_path / "a", sync_files=False)
    hf.save({"old": torch.ones(2)}, storage_writer=writer, planner=cache())
    writer.broken = True
    with pytest.raises(hf.CheckpointException):
        hf.save({"new": torch.ones(3), "more": 1}, storage_writer=writer, planner=cache())
    loaded = round_trip({"old": torch.full((2,), 5.0)}, tmp_path / "b", cache)
    assert loaded["old"].tolist() == [5.0, 5.0]


def test_a_coordinator_that_failed_last_does_not_take_older_plans_of_other_ranks() -> None:
    """The other rank has planned the save that failed on the coordinator, and says "as last time"."""
    ranks = [DefaultSavePlanner(enable_plan_caching=True) for _ in range(2)]

    def plan(size: int, *, coordinator_fails: bool = False) -> tuple[SavePlan, Metadata]:
        for rank, planner in enumerate(ranks):
            planner.set_up_planner({f"t{rank}": torch.ones(size if rank else 2)}, is_coordinator=rank == 0)
        plans, metadata = ranks[0].create_global_plan([planner.create_local_plan() for planner in ranks])
        if not coordinator_fails:
            ranks[0].finish_plan(plans[0])
        return ranks[1].finish_plan(plans[1]), metadata

    plan(3)
    plan(5, coordinator_fails=True)
    written, metadata = plan(5)
    described, (item,) = metadata.state_dict_metadata["t1"], written.items
    assert isinstance(described, TensorStorageMetadata)
    assert item.tensor_data is not None
    assert described.size == item.tensor_data.size == torch.Size([5])


def test_a_coordinator_of_an_older_save_does_not_take_the_plans_of_that_one() -> None:
    ranks = [DefaultSavePlanner(enable_plan_caching=True) for _ in range(2)]

    def plan(size: int, coordinator: int) -> None:
        for rank, planner in enumerate(ranks):
            planner.set_up_planner({f"t{rank}": torch.ones(size)}, is_coordinator=rank == coordinator)
        offers = [planner.create_local_plan() for planner in ranks]
        plans, _ = ranks[coordinator].create_global_plan(offers)
        for planner, answer in zip(ranks, plans, strict=True):
            planner.finish_plan(answer)

    plan(3, 0)
    plan(5, 1)
    with pytest.raises(InvalidPlanError, match="save again"):
        plan(5, 0)
    plan(5, 0)
    described = ranks[0].metadata.state_dict_metadata["t1"]
    assert isinstance(described, TensorStorageMetadata)
    assert described.size == torch.Size([5])


def test_a_coordinator_that_does_not_know_the_cached_plan_does_not_save_nothing(
    tmp_path: Path, cache: type[DefaultSavePlanner]
) -> None:
    state = {"t": torch.ones(2)}
    save(state, tmp_path / "a", cache())
    # As on a rank that saved as one of many before, and now saves alone.
    for name in ("_cached_all_plans", "_cached_global_plan", "_cached_metadata"):
        getattr(SavePlanner, name).clear()
    metadata = save(state, tmp_path / "b", cache())
    assert "t" in metadata.state_dict_metadata


def test_ranks_of_one_process_save_one_checkpoint(tmp_path: Path) -> None:
    states = [{"same": torch.arange(4.0), f"rank {rank}": rank} for rank in range(3)]
    writers = [hf.FileSystemWriter(tmp_path, sync_files=False) for _ in states]
    drive_save(states, [DefaultSavePlanner() for _ in states], writers)
    loaded: dict[str, Any] = {}
    hf.load(loaded, checkpoint_id=tmp_path, planner=EmptyStateDictLoadPlanner())
    assert loaded["same"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert [loaded[f"rank {rank}"] for rank in range(3)] == [0, 1, 2]


def test_a_copy_of_a_planner_has_a_cache_of_its_own(tmp_path: Path) -> None:
    planner = hf.DefaultSavePlanner(enable_plan_caching=True)
    copied = copy.deepcopy(planner)
    assert copied._cached_plans_key != planner._cached_plans_key
    hf.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "a", planner=copied)
    key = str(copied._cached_plans_key)
    assert key in SavePlanner._cached_save_plan
    del copied
    gc.collect()
    assert key not in SavePlanner._cached_save_plan


def test_each_save_with_a_cached_plan_has_metadata_of_its_own(tmp_path: Path) -> None:
    planner = hf.DefaultSavePlanner(enable_plan_caching=True)
    first = hf.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "a", planner=planner)
    files = {info.relative_path for info in first.storage_data.values()}
    second = hf.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "b", planner=planner)
    assert first is not second
    assert {info.relative_path for info in first.storage_data.values()} == files
    for metadata, name in ((first, "a"), (second, "b")):
        assert metadata.storage_meta is not None
        assert str(metadata.storage_meta.checkpoint_id) == str(tmp_path / name)

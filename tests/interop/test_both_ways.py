"""Checkpoints between stock torch and Holdfast, in both directions, value by value."""

import argparse
import collections
import datetime as dt
import importlib
import pathlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from tests.support.states import assert_same, blank, random_tensor, same
from tests.support.stock_torch import needs_extensions, stock_load, stock_save

import holdfast as hf
from holdfast._format import dtypes
from holdfast.extension import ZStandard
from holdfast.testing import FakeRank, FakeRanks

# Its types say that it exports nothing.
dcp: Any = torch_checkpoint
pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

DTYPES = [name for name, dtype in dtypes.DTYPES.items() if dtype.storage and hasattr(torch, name)]


# Waiting for the disk is most of the time of these small saves, and nothing here depends on it.
UNSYNCED = {"sync_files": False}


def torch_saves(state: dict[str, Any], folder: Path, **options: Any) -> None:
    options = {**UNSYNCED, **options}
    stock_save(state, storage_writer=dcp.FileSystemWriter(folder, **options))


def we_save(state: dict[str, Any], folder: Path, **options: Any) -> None:
    options = {**UNSYNCED, **options}
    hf.save(state, storage_writer=hf.FileSystemWriter(folder, **options))


def torch_loads(state: dict[str, Any], folder: Path) -> None:
    stock_load(state, checkpoint_id=folder)


def we_load(state: dict[str, Any], folder: Path) -> None:
    hf.load(state, checkpoint_id=folder)


Save = Callable[..., None]
Load = Callable[[dict[str, Any], Path], None]
WAYS = [
    pytest.param(torch_saves, we_load, id="torch-to-us"),
    pytest.param(we_save, torch_loads, id="us-to-torch"),
    pytest.param(we_save, we_load, id="us-to-us"),
]
both_ways = pytest.mark.parametrize(("save", "load"), WAYS)


@pytest.fixture(autouse=True)
def _same_values_each_time() -> None:
    torch.manual_seed(7)
    random.seed(7)


def is_savable_by_torch(dtype: torch.dtype) -> bool:
    try:
        torch._utils._element_size(dtype)  # type: ignore[no-untyped-call]
    except TypeError:
        return False
    return True


def is_copied_by_torch(dtype: torch.dtype) -> bool:
    """torch 2.9 has float4, but no copy of it."""
    try:
        torch.empty(1, dtype=dtype).copy_(torch.empty(1, dtype=dtype))
    except NotImplementedError:
        return False
    return True


def tensors_of_every_dtype(save: Save, load: Load) -> dict[str, torch.Tensor]:
    made = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        if (save is torch_saves and not is_savable_by_torch(dtype)) or (
            load is torch_loads and not is_copied_by_torch(dtype)
        ):
            continue
        made[name] = random_tensor(dtype, (3, 5))
        made[f"{name} scalar"] = random_tensor(dtype, ())
        made[f"{name} empty"] = random_tensor(dtype, (0, 4))
    return made


@both_ways
@pytest.mark.parametrize(
    "options",
    [{}, {"single_file_per_rank": False}, {"thread_count": 3}, {"sync_files": True}],
    ids=["plain", "file-per-item", "threads", "synced"],
)
def test_tensors_of_every_dtype_arrive_bit_for_bit(
    tmp_path: Path, save: Save, load: Load, options: dict[str, Any]
) -> None:
    state = tensors_of_every_dtype(save, load)
    save(state, tmp_path, **options)
    loaded = blank(state)
    load(loaded, tmp_path)
    for key, value in state.items():
        assert same(loaded[key], value), key


def torch_zstandard() -> Any:
    return importlib.import_module("torch.distributed.checkpoint._extension").ZStandard()


@pytest.mark.parametrize(
    ("save", "transform", "load"),
    [
        pytest.param(torch_saves, torch_zstandard, we_load, id="torch-to-us", marks=needs_extensions),
        pytest.param(we_save, ZStandard, torch_loads, id="us-to-torch", marks=needs_extensions),
        pytest.param(we_save, ZStandard, we_load, id="us-to-us"),
    ],
)
def test_compressed_tensors_and_objects_arrive(
    tmp_path: Path, save: Save, transform: Callable[[], Any], load: Load
) -> None:
    state: dict[str, Any] = {
        **tensors_of_every_dtype(save, load),
        "large": torch.randn(700, 1000),
        "words": ["a" * 5000, 3, b"x"],
    }
    save(state, tmp_path, _extensions=[transform()])
    loaded = blank(state)
    load(loaded, tmp_path)
    for key, value in state.items():
        assert same(loaded[key], value), key


def awkward_tensors() -> dict[str, torch.Tensor]:
    base = torch.randn(6, 8)
    image = torch.randn(2, 3, 4, 5)
    pairs = torch.randn(4, 3, dtype=torch.complex64)
    return {
        "scalar": torch.tensor(-0.0),
        "no elements": torch.empty(3, 0, 2),
        "rows of a view": base[1:3],
        "steps of a view": base[::2, 1::3],
        "one column": base[:, 4],
        "transposed": base.t(),
        "permuted": image.permute(3, 1, 0, 2),
        "expanded": torch.randn(1, 4).expand(5, 4),
        "expanded scalar": torch.tensor(2.5).expand(2, 3),
        "conjugate": pairs.conj(),
        "transposed conjugate": pairs.mH,
        "negated imaginary part": pairs.conj().imag,
        "real part": torch.view_as_real(pairs),
        "channels last": image.to(memory_format=torch.channels_last),
        "one of many in a storage": torch.arange(100_000.0)[40_000:40_010],
        "as strided": torch.arange(30.0).as_strided((3, 4), (2, 5), 1),
        "unfolded": torch.arange(10.0).unfold(0, 4, 2),
        "nans": torch.tensor([float("nan"), float("inf"), -float("inf"), 5e-324], dtype=torch.float64),
        "requires grad": torch.randn(3, requires_grad=True),
        "result of a computation": torch.randn(3, requires_grad=True) * 2,
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "frozen parameter": torch.nn.Parameter(torch.randn(2), requires_grad=False),
        "larger than a block": torch.randn(600, 1000)[:, 1:],
    }


@both_ways
def test_views_and_lazy_tensors_arrive_as_the_elements_that_they_show(
    tmp_path: Path, save: Save, load: Load
) -> None:
    state = awkward_tensors()
    save(state, tmp_path)
    loaded = blank(state)
    load(loaded, tmp_path)
    for key, value in state.items():
        assert same(loaded[key], value), key


def test_of_a_view_only_its_own_elements_are_stored(tmp_path: Path) -> None:
    large = torch.zeros(1 << 20)
    we_save({"part": large[:10], "step": large[:: 1 << 18]}, tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 20_000


@pytest.mark.parametrize("save", [torch_saves, we_save])
def test_destinations_of_any_layout_are_filled_in_place(tmp_path: Path, save: Save) -> None:
    whole = torch.randn(4, 6)
    image = torch.randn(2, 3, 4, 5)
    save({"t": whole, "image": image, "large": torch.ones(700, 1000)}, tmp_path)
    behind, around, wide = torch.zeros(6, 4), torch.zeros(10, 12), torch.zeros(700, 2000)
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    channels_last = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for target in (behind.t(), around[2:6, ::2], parameter):
        hf.load({"t": target}, checkpoint_id=tmp_path)
        assert torch.equal(target, whole)
    hf.load({"image": channels_last, "large": wide[:, ::2]}, checkpoint_id=tmp_path)
    assert torch.equal(channels_last, image)
    assert channels_last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(behind, whole.t())
    assert around.count_nonzero() == whole.count_nonzero()
    assert wide.sum() == 700 * 1000
    assert parameter.requires_grad


def lazy_destinations() -> dict[str, torch.Tensor]:
    return {
        "conjugate": torch.zeros(3, 4, dtype=torch.complex64).conj(),
        "negated": torch.zeros(3, 4, dtype=torch.complex64).conj().imag,
    }


@pytest.mark.parametrize("save", [torch_saves, we_save])
def test_destinations_behind_a_lazy_bit_show_what_was_saved(tmp_path: Path, save: Save) -> None:
    state = {"conjugate": torch.randn(3, 4, dtype=torch.complex64), "negated": torch.randn(3, 4)}
    save(state, tmp_path)
    loaded = lazy_destinations()
    hf.load(loaded, checkpoint_id=tmp_path)
    for key, value in state.items():
        assert torch.equal(loaded[key], value)


def plain_objects() -> dict[str, Any]:
    return {
        "zero": 0,
        "huge": 3**400,
        "negative": -(2**63),
        "float": 0.1,
        "infinite": float("-inf"),
        "tiny": 5e-324,
        "text": "grüße \U0001f600 \0 end",
        "empty text": "",
        "bytes": bytes(range(256)),
        "no bytes": b"",
        "bytearray": bytearray(b"\x80\x00abc"),
        "none": None,
        "true": True,
        "complex": complex(-0.0, 2.5),
        "set": {1, "a", (2, 3)},
        "empty set": set(),
        "frozenset": frozenset({b"x", None}),
        "tuple": (1, ("a", (None, 2.5)), []),
        "empty tuple": (),
        "list": [1, "two", 3.0, None, b"five"],
        "list of lists": [[1], [], [[2]]],
        "empty list": [],
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "in a tuple": (collections.OrderedDict([("b", 1), ("a", 2)]), {"k": {3: 4}}),
        "default": (collections.defaultdict(list, {"x": [1]}),),
        "deque": collections.deque([1, 2, 3], maxlen=5),
        "datetime": dt.datetime(2024, 2, 29, 12, 30, 5, 7, tzinfo=dt.timezone.utc),
        "naive": dt.datetime(2024, 2, 29, 1, 2, 3),  # noqa: DTZ001 - without a zone on purpose
        "date": dt.date(1999, 12, 31),
        "timedelta": dt.timedelta(days=-3, microseconds=7),
        "path": pathlib.PurePosixPath("a/b.c"),
        "namespace": argparse.Namespace(lr=0.1, layers=[1, 2], inner=argparse.Namespace(x=None)),
        "range": range(3, 30, 4),
        "slice": slice(1, None, 2),
        "size": torch.Size([3, 4]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "indexed device": torch.device("cuda", 3),
        "python random": random.getstate(),
    }


@both_ways
@pytest.mark.parametrize("key", list(plain_objects()))
def test_objects_arrive_equal_and_of_the_same_type(tmp_path: Path, save: Save, load: Load, key: str) -> None:
    value = plain_objects()[key]
    save({"value": value}, tmp_path)
    loaded = {"value": blank(value)}
    load(loaded, tmp_path)
    assert loaded["value"] == value
    assert type(loaded["value"]) is type(value)
    # The order in which a set is printed depends on the run.
    if not isinstance(value, set | frozenset):
        assert repr(loaded["value"]) == repr(value)


@both_ways
def test_not_a_number_arrives_as_such(tmp_path: Path, save: Save, load: Load) -> None:
    save({"value": float("nan")}, tmp_path)
    loaded = {"value": 0.0}
    load(loaded, tmp_path)
    assert loaded["value"] != loaded["value"]


@both_ways
@pytest.mark.parametrize(
    "value",
    [
        np.arange(12).reshape(3, 4).astype(dtype)
        for dtype in ("int8", "uint16", "int64", "float16", "float32", "float64", "complex128", "bool")
    ]
    + [
        np.float32(1.5),
        np.int64(-7),
        np.bool_(True),
        np.array(5.0),
        np.zeros((0, 3)),
        np.array(["a", "bcd"]),
        np.arange(12).reshape(3, 4).T,
        np.datetime64("2024-02-29"),
    ],
    ids=lambda value: f"{type(value).__name__}-{value.dtype.str}-{value.shape}",
)
def test_numpy_arrays_and_scalars_arrive(tmp_path: Path, save: Save, load: Load, value: Any) -> None:
    save({"value": value}, tmp_path)
    loaded: dict[str, Any] = {"value": None}
    load(loaded, tmp_path)
    assert type(loaded["value"]) is type(value)
    assert loaded["value"].dtype == value.dtype
    assert np.array_equal(loaded["value"], value)


@both_ways
def test_states_of_random_generators_continue_where_they_were(tmp_path: Path, save: Save, load: Load) -> None:
    def states() -> dict[str, Any]:
        return {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        }

    save({"rng": states()}, tmp_path)
    expected = (torch.rand(3).tolist(), random.random(), np.random.rand())
    loaded = {"rng": states()}
    load(loaded, tmp_path)
    torch.set_rng_state(loaded["rng"]["torch"])
    random.setstate(loaded["rng"]["python"])
    np.random.set_state(loaded["rng"]["numpy"])
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == expected


@both_ways
def test_tuples_that_hold_tensors_arrive(tmp_path: Path, save: Save, load: Load) -> None:
    inside = (torch.arange(3.0), ("a", torch.ones(2, dtype=torch.bfloat16)), [torch.tensor(5)])
    save({"value": inside}, tmp_path)
    loaded: dict[str, Any] = {"value": None}
    load(loaded, tmp_path)
    arrived = loaded["value"]
    assert type(arrived) is tuple
    assert same(arrived[0], inside[0])
    assert arrived[1][0] == "a"
    assert same(arrived[1][1], torch.ones(2, dtype=torch.bfloat16))
    assert same(arrived[2][0], torch.tensor(5))


@pytest.mark.parametrize(
    "companion",
    [
        {1, 2},
        1 + 2j,
        bytearray(b"x"),
        collections.OrderedDict(a=1),
        np.arange(3),
        np.float32(2),
        dt.date(2020, 1, 1),
        pathlib.PurePosixPath("x"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tuples_of_tensors_and_other_data_load_under_the_same_rules(tmp_path: Path, companion: Any) -> None:
    we_save({"value": (torch.arange(3.0), companion)}, tmp_path)
    loaded: dict[str, Any] = {"value": None}
    we_load(loaded, tmp_path)
    tensor, other = loaded["value"]
    assert torch.equal(tensor, torch.arange(3.0))
    assert type(other) is type(companion)
    assert np.all(other == companion)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("load", [torch_loads, we_load])
def test_sparse_and_quantized_tensors_arrive_as_objects(tmp_path: Path, load: Load) -> None:
    quantized = torch.quantize_per_tensor(torch.randn(4), 0.25, 3, torch.quint8)
    we_save({"sparse": torch.eye(3).to_sparse(), "quantized": quantized}, tmp_path)
    loaded: dict[str, Any] = {"sparse": None, "quantized": None}
    load(loaded, tmp_path)
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(loaded["quantized"], quantized)
    assert loaded["quantized"].q_scale() == 0.25


def nested_state() -> dict[str, Any]:
    return {
        "model": {"layer": {"weight": torch.randn(3, 4), "bias": torch.randn(3)}, "depth": 2},
        "list": [torch.randn(2), {"deep": torch.randn(1), "n": 5}, "text"],
        "lists": [[torch.randn(2)], [torch.randn(3), 4]],
        "plain": [1, 2, 3],
        "no tensor": {"a": {"b": 1}, "c": "d"},
        "step": 17,
    }


@both_ways
@pytest.mark.parametrize("options", [{}, {"single_file_per_rank": False}])
def test_nested_states_arrive(tmp_path: Path, save: Save, load: Load, options: dict[str, Any]) -> None:
    state = nested_state()
    save(state, tmp_path, **options)
    loaded = blank(state)
    load(loaded, tmp_path)
    assert_same(loaded, state)


def trained(optimizer_class: Callable[..., torch.optim.Optimizer], **options: Any) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
    return model, optimizer


@both_ways
@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [(torch.optim.AdamW, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9})],
    ids=["AdamW", "SGD"],
)
def test_modules_and_optimizers_go_on_exactly_where_they_were(
    tmp_path: Path,
    save: Save,
    load: Load,
    optimizer_class: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
) -> None:
    model, optimizer = trained(optimizer_class, **options)
    expected_state = {key: value.clone() for key, value in model.state_dict().items()}
    save({"model": model, "optimizer": optimizer}, tmp_path)
    other, other_optimizer = trained(optimizer_class, **options)
    weight = other[0].weight
    state: dict[str, Any] = {"model": other, "optimizer": other_optimizer}
    load(state, tmp_path)
    assert state["model"] is other
    assert other[0].weight is weight
    for key, value in expected_state.items():
        assert same(other.state_dict()[key], value), key
    batch = torch.randn(8, 3)
    for one, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        its_optimizer.zero_grad()
        one(batch).square().mean().backward()
        its_optimizer.step()
    assert same(model[0].weight, other[0].weight)


def test_a_module_inside_a_dict_is_saved_as_its_state_and_restored_in_place(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    hf.save({"train": {"model": model, "step": 3}, "all": [model]}, checkpoint_id=tmp_path)
    read = hf.FileSystemReader(tmp_path).read_metadata()
    assert {"train.model.weight", "train.model.bias", "train.step"} <= set(read.state_dict_metadata)
    other = torch.nn.Linear(2, 3)
    weight = other.weight
    state: dict[str, Any] = {"train": {"model": other, "step": 0}, "all": [other]}
    train = state["train"]
    hf.load(state, checkpoint_id=tmp_path)
    assert state["train"] is train
    assert state["train"]["model"] is other
    assert state["all"][0] is other
    assert other.weight is weight
    assert torch.equal(other.weight, model.weight)
    assert train["step"] == 3


class Trainer:
    """A Stateful whose state holds another Stateful."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 3)
        self.epoch = 0

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


def test_a_module_inside_the_state_of_a_stateful_object_is_never_pickled_whole(tmp_path: Path) -> None:
    trainer, other = Trainer(), Trainer()
    trainer.epoch = 5
    hf.save({"trainer": trainer}, checkpoint_id=tmp_path)
    kept = other.model
    hf.load({"trainer": other}, checkpoint_id=tmp_path)
    assert other.epoch == 5
    assert other.model is kept
    assert torch.equal(other.model.weight, trainer.model.weight)


def test_a_module_inside_a_tuple_is_refused(tmp_path: Path) -> None:
    with pytest.raises(hf.CheckpointError, match="pair"):
        hf.save({"pair": (torch.nn.Linear(1, 1), 3)}, checkpoint_id=tmp_path)
    assert not (tmp_path / ".metadata").exists()


def test_a_memory_format_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(hf.CheckpointError, match="value"):
        we_save({"value": torch.channels_last}, tmp_path)


@pytest.mark.filterwarnings("ignore:ranks save different values")
@pytest.mark.parametrize("writer", [hf.FileSystemWriter, dcp.FileSystemWriter], ids=["ours", "torch's"])
def test_stock_torch_loads_the_coordinators_of_values_that_differ(tmp_path: Path, writer: Any) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {"model": {"mean": torch.full((4,), float(rank)), "w": torch.ones(2)}, "loss": 0.5 + rank}

    FakeRanks(3).run(lambda rank: rank.save(state(rank.rank), storage_writer=writer(tmp_path)))
    found = blank(state(0))
    stock_load(found, checkpoint_id=tmp_path)
    assert_same(found, state(0))
    for rank, mine in enumerate(FakeRanks(3).run(lambda rank: _loaded(rank, blank(state(0)), tmp_path))):
        assert_same(mine, state(rank))
    # Without a template, torch shows the other ranks' values beside the state, not in it.
    everything: dict[str, Any] = {}
    stock = "torch.distributed.checkpoint"
    planner = importlib.import_module(f"{stock}.default_planner")._EmptyStateDictLoadPlanner()
    load = importlib.import_module(f"{stock}.state_dict_loader")._load_state_dict
    load(everything, storage_reader=dcp.FileSystemReader(tmp_path), planner=planner, no_dist=True)
    assert everything.keys() == {"model", "loss", "@kept-for-rank-1-of-3", "@kept-for-rank-2-of-3"}
    assert_same({key: everything[key] for key in ("model", "loss")}, state(0))


def _loaded(rank: FakeRank, state: dict[str, Any], folder: Path) -> dict[str, Any]:
    rank.load(state, checkpoint_id=folder)
    return state


def test_without_torch_compatibility_we_still_load_and_torch_does_not(tmp_path: Path) -> None:
    state = nested_state()
    we_save(state, tmp_path, torch_compatible=False)
    loaded = blank(state)
    we_load(loaded, tmp_path)
    assert_same(loaded, state)
    with pytest.raises(BaseException):  # noqa: B017 - torch's exception is a BaseException
        torch_loads(blank(state), tmp_path)


@both_ways
def test_a_second_save_to_the_same_place_is_the_one_that_loads(
    tmp_path: Path, save: Save, load: Load
) -> None:
    torch_saves({"a": torch.zeros(3), "old": torch.ones(2)}, tmp_path)
    we_save({"a": torch.ones(3)}, tmp_path)
    save({"a": torch.full((3,), 5.0), "n": 2}, tmp_path)
    loaded: dict[str, Any] = {"a": torch.zeros(3), "n": 0}
    load(loaded, tmp_path)
    assert torch.equal(loaded["a"], torch.full((3,), 5.0))
    assert loaded["n"] == 2


def test_a_state_without_anything_round_trips(tmp_path: Path) -> None:
    we_save({}, tmp_path)
    hf.load({}, checkpoint_id=tmp_path)
    stock_load({}, checkpoint_id=tmp_path)

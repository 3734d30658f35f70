"""A staged state holds the values of the moment of the call, whatever is done to the original afterwards."""

import collections
import copy
import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import staging as stock
from torch.distributed.checkpoint import state_dict_saver as stock_saver
from torch.distributed.tensor import DTensor, Replicate, Shard

import holdfast
from holdfast import errors, staging
from holdfast._staging.stage import Staging
from holdfast.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from holdfast.testing.fake_ranks import FakeRank, FakeRanks

Pair = collections.namedtuple("Pair", ["first", "second"])  # noqa: PYI024 - as users make them


@dataclasses.dataclass
class Progress:
    step: int
    scores: list[float]
    weights: torch.Tensor


needs_stock_stager = pytest.mark.skipif(
    not hasattr(stock, "DefaultStager"), reason="this torch has no DefaultStager"
)


def blocking() -> DefaultStager:
    return DefaultStager(StagingOptions(use_async_staging=False))


def staged(state: dict[str, Any]) -> dict[str, Any]:
    made = blocking().stage(state)
    assert isinstance(made, dict)
    return made


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


# --- values


def test_tensors_of_every_dtype_are_copied_bit_for_bit() -> None:
    state = {
        str(dtype): torch.randint(0, 2, (16 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
        for dtype in DTYPES
    }
    before = {key: bits(value) for key, value in state.items()}
    copied = staged(state)
    for value in state.values():
        value.view(torch.uint8).fill_(77)
    assert {key: bits(value) for key, value in copied.items()} == before
    assert {key: (value.dtype, value.shape) for key, value in copied.items()} == {
        key: (value.dtype, value.shape) for key, value in state.items()
    }


AWKWARD: dict[str, Callable[[], torch.Tensor]] = {
    "no dimensions": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 3),
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "channels last": lambda: torch.arange(48.0).view(1, 3, 4, 4).to(memory_format=torch.channels_last),
    "with holes": lambda: torch.arange(24.0).view(4, 6)[::2, 1::2],
    "a column": lambda: torch.arange(24.0).view(4, 6)[:, 2],
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negated and dense": lambda: torch._neg_view(torch.ones(3)),
    "negated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "misaligned": lambda: torch.frombuffer(bytearray(range(17)), dtype=torch.float32, offset=1),
    "a result": lambda: torch.ones(3, requires_grad=True) * 2,
    "a parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "not a number": lambda: torch.tensor([float("nan"), -0.0, float("inf")]),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", AWKWARD)
def test_awkward_tensors_are_copied_with_their_values(kind: str) -> None:
    original = AWKWARD[kind]()
    before = original.detach().clone()
    state = {"before": torch.ones(2), "it": original, "after": torch.ones(2)}
    copied = staged(state)["it"]
    with torch.no_grad():
        if kind not in ("expanded", "sparse", "sparse rows"):
            original.fill_(9)
    assert torch.equal(copied.to_dense(), before.to_dense()) or kind == "not a number"
    assert bits(copied.to_dense().resolve_conj().resolve_neg()) == bits(
        before.to_dense().resolve_conj().resolve_neg()
    )
    assert not copied.is_conj()
    assert not copied.is_neg()
    assert not copied.requires_grad


def test_attributes_of_tensors_are_copied_as_far_as_they_are_plain() -> None:
    """Planners of frameworks tell by them how a tensor is divided, or who shares it."""
    marked: Any = torch.ones(3)
    marked.is_divided, marked.dim, marked.gradient = True, 1, torch.zeros(3)
    copied = staged({"layers": [marked], "pair": (marked, 1)})
    assert copied["layers"][0] is copied["pair"][0]
    assert vars(copied["layers"][0]) == {"is_divided": True, "dim": 1}


@needs_stock_stager
def test_parameters_become_plain_tensors_as_with_torch() -> None:
    model = torch.nn.Linear(2, 2)
    ours = staged({"weight": model.weight})["weight"]
    theirs = stock.DefaultStager(stock.StagingOptions(False, False, False, False)).stage(
        {"weight": model.weight}
    )
    assert isinstance(theirs, dict)
    assert type(ours) is type(theirs["weight"]) is torch.Tensor


def test_dense_tensors_keep_their_strides_and_others_become_row_major() -> None:
    dense = torch.arange(12.0).view(3, 4).t()
    holey = torch.arange(12.0).view(3, 4)[:, ::2]
    copied = staged({"dense": dense, "holey": holey})
    assert copied["dense"].stride() == dense.stride()
    assert copied["holey"].is_contiguous()


def test_tied_weights_stay_tied_and_views_stay_views() -> None:
    whole = torch.arange(100_000.0)
    state = {"whole": whole, "tied": whole, "again": whole.view(100, 1000), "part": whole[500:1500]}
    copied = staged(state)
    assert copied["whole"] is copied["tied"]
    copied["whole"].zero_()
    assert copied["again"].sum() == 0
    assert copied["part"].sum() == 0
    assert whole.sum() > 0


def test_tensors_that_share_memory_are_copied_once() -> None:
    whole = torch.zeros(1 << 20)
    with Staging().stage({f"view {n}": whole[n:] for n in range(20)}) as result:
        assert result.nbytes < whole.nbytes + 4096


def test_twenty_thousand_small_tensors_all_arrive() -> None:
    state = {"all": [torch.full((n % 40,), float(n)) for n in range(20_000)]}
    copied = staged(state)["all"]
    for original in state["all"]:
        original.zero_()
    assert all(value.tolist() == [n] * (n % 40) for n, value in enumerate(copied))


def test_a_tensor_larger_than_a_piece_is_copied_whole() -> None:
    original = torch.arange(40 << 20, dtype=torch.int32)
    copied = staged({"large": original})["large"]
    assert torch.equal(copied, original)


# --- structure


def test_containers_keep_their_kind_and_are_new() -> None:
    state: dict[Any, Any] = {
        "list": [1, [torch.ones(1)]],
        "tuple": (torch.ones(1), {"x": 2}),
        "pair": Pair(torch.ones(1), [3]),
        "ordered": collections.OrderedDict([("b", 1), ("a", torch.ones(1))]),
        "default": collections.defaultdict(list, {"k": [torch.ones(1)]}),
        "set": {1, 2},
        5: {("a", 1): None},
    }
    copied = staged(state)
    assert repr(copied) == repr(state)
    state["list"][1].append("late")
    state["tuple"][1]["x"] = "late"
    state["pair"].second.append("late")
    state["ordered"]["late"] = 1
    state["default"]["k"].append("late")
    state["set"].add(3)
    state[5]["late"] = 1
    assert "late" not in repr(copied)
    assert copied["set"] == {1, 2}
    assert type(copied["pair"]) is Pair
    assert type(copied["default"]) is collections.defaultdict


def test_objects_are_copied_with_the_tensors_in_them() -> None:
    weights = torch.ones(3)
    state = {"progress": Progress(7, [0.5], weights), "weights": weights, "raw": bytearray(b"abc")}
    copied = staged(state)
    state["progress"].step = 8  # type: ignore[attr-defined]
    state["progress"].scores.append(1.0)  # type: ignore[attr-defined]
    weights.zero_()
    state["raw"][0] = 0  # type: ignore[index]
    assert copied["progress"].step == 7
    assert copied["progress"].scores == [0.5]
    assert copied["progress"].weights is copied["weights"]
    assert copied["weights"].tolist() == [1, 1, 1]
    assert copied["raw"] == b"abc"


def test_what_cannot_change_is_shared() -> None:
    blob, name = b"x" * 1000, "a name of some length"
    copied = staged({"blob": blob, "name": name})
    assert copied["blob"] is blob
    assert copied["name"] is name


def test_what_stands_in_two_places_stands_in_two_places_of_the_copy() -> None:
    shared: list[Any] = [torch.ones(1)]
    shared.append(shared)
    copied = staged({"a": shared, "b": {"c": shared}})
    assert copied["a"] is copied["b"]["c"]
    assert copied["a"][1] is copied["a"]


# --- sharded tensors


def test_sharded_tensors_are_rebuilt_around_the_copy_without_talking_to_other_ranks() -> None:
    whole = torch.arange(35.0).view(7, 5)

    def work(rank: FakeRank) -> None:
        mesh = rank.mesh(2, 2)
        state: dict[str, Any] = {
            "rows": rank.distribute(whole, mesh, [Replicate(), Shard(0)]),
            "parameter": torch.nn.Parameter(rank.distribute(whole, mesh, [Shard(1), Shard(0)])),
            "shards": rank.sharded_tensor(
                whole, [[((0, 0), (3, 5))], [((3, 0), (4, 2)), ((3, 2), (4, 3))], [], []]
            ),
        }
        before = {key: [part.clone() for part in parts_of(value)] for key, value in state.items()}
        copied = staged(state)
        for value in state.values():
            for part in parts_of(value):
                part.zero_()
        for key, value in copied.items():
            assert type(value) is type(state[key])
            assert all(torch.equal(a, b) for a, b in zip(parts_of(value), before[key], strict=True))
        for key in ("rows", "parameter"):
            assert copied[key].placements == state[key].placements
            assert copied[key].device_mesh is state[key].device_mesh
            assert copied[key].shape == whole.shape
            assert not copied[key].requires_grad
        assert copied["shards"].metadata().size == whole.shape
        assert len(copied["shards"].local_shards()) == len(state["shards"].local_shards())

    FakeRanks(4).run(work)


def parts_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, DTensor):
        return [value._local_tensor.detach()]
    return [shard.tensor for shard in value.local_shards()]


# --- refusals


class Uncopyable:
    def __deepcopy__(self, memo: object) -> "Uncopyable":
        raise TypeError("it is unique")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Uncopyable(), "cannot be copied: it is unique"),
        (threading.Lock(), "cannot be copied"),
        (torch.ones(3, device="meta"), "meta device"),
    ],
)
def test_what_cannot_be_copied_is_refused_with_its_key(value: object, reason: str) -> None:
    with pytest.raises(errors.PlanError, match=reason) as caught:
        staged({"model": {"fine": torch.ones(1), "odd": [0, value]}})
    assert caught.value.key == "model.odd.1"


def test_a_tensor_whose_storage_was_freed_is_refused_with_its_key() -> None:
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    with pytest.raises(errors.PlanError, match="storage") as caught:
        staged({"shard": freed})
    assert caught.value.key == "shard"


def test_a_state_nested_too_deeply_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(errors.UsageError, match="nested too deeply"):
        staged({"deep": deep})
    while deep:  # or Python takes it apart by recursion
        deep = deep.pop()


def test_a_failed_staging_does_not_keep_the_buffers() -> None:
    stager = Staging()
    failures = []  # whose tracebacks hold all that the calls held
    for odd in (Uncopyable(), torch.ones(2, device="meta")):
        with pytest.raises(errors.PlanError) as caught:
            stager.stage({"w": torch.ones(5), "odd": odd}, when_busy="raise")
        failures.append(caught)
    stager.stage({"w": torch.ones(5)}, when_busy="raise").release()


# --- the debug mode


class ChangesItsNeighbour:
    """Its copying changes a tensor, as a thread that goes on training would."""

    def __init__(self, neighbour: torch.Tensor) -> None:
        self.neighbour = neighbour

    def __deepcopy__(self, memo: dict[int, Any]) -> "ChangesItsNeighbour":
        with torch.no_grad():
            self.neighbour.view(-1)[-1] += 1
        return copy.copy(self)


@pytest.mark.parametrize("original", [torch.ones(3000), torch.ones(10, 10).t()[::2].t()])
def test_compare_names_the_tensor_that_was_changed_meanwhile(original: torch.Tensor) -> None:
    neighbour = original.contiguous() if original.dim() == 1 else original
    state = {"a": torch.ones(3), "b": {"w": neighbour}, "c": ChangesItsNeighbour(neighbour[..., -1:])}
    with pytest.raises(errors.PlanError, match="changed while it was staged") as caught:
        DefaultStager(StagingOptions(use_async_staging=False), compare=True).stage(state)
    assert caught.value.key == "b.w"


def test_compare_finds_nothing_where_nothing_changed() -> None:
    state = {kind: make() for kind, make in AWKWARD.items()}
    DefaultStager(StagingOptions(use_async_staging=False), compare=True).stage(state)


# --- the stagers


def test_the_default_stager_returns_a_future_that_is_done() -> None:
    stager = DefaultStager()
    weight = torch.ones(3)
    future = stager.stage({"w": weight})
    weight.zero_()
    assert isinstance(future, Future)
    assert future.done()
    stager.synchronize_staging()
    assert future.result()["w"].tolist() == [1, 1, 1]


def test_a_failed_staging_is_told_by_its_future() -> None:
    stager = DefaultStager()
    future = stager.stage({"odd": Uncopyable()})
    assert isinstance(future, Future)
    with pytest.raises(errors.PlanError, match="odd"):
        future.result()
    with pytest.raises(errors.PlanError, match="odd"):
        stager.synchronize_staging()


@needs_stock_stager
def test_options_have_the_fields_and_defaults_of_torch() -> None:
    assert dataclasses.asdict(StagingOptions()) == dataclasses.asdict(stock.StagingOptions())
    assert [field.name for field in dataclasses.fields(StagingOptions)] == [
        field.name for field in dataclasses.fields(stock.StagingOptions)
    ]
    assert set(staging.__all__) == set(stock.__all__)


@pytest.mark.parametrize("stager", [DefaultStager(), BlockingAsyncStager(), BlockingAsyncStager(True)])
def test_our_stagers_are_stagers_for_both(stager: Any) -> None:
    assert isinstance(stager, AsyncStager)
    assert hasattr(stager, "should_synchronize_after_execute")
    assert stager.should_synchronize_after_execute is isinstance(stager, DefaultStager)
    stager.close()
    stager.close()


def test_stagers_written_for_torch_are_stagers() -> None:
    class OfTorch(stock.AsyncStager):
        _synchronize_after_execute = False

        def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            return copy.deepcopy(state_dict)

        def synchronize_staging(self) -> None:
            pass

    class OfNobody:
        should_synchronize_after_execute = True

        def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            return copy.deepcopy(state_dict)

        def synchronize_staging(self) -> None:
            pass

        def close(self) -> None:
            pass

    class OfOurs(AsyncStager):
        _synchronize_after_execute = False

    assert isinstance(OfNobody(), AsyncStager)
    for of_torch in (OfTorch(), stock.BlockingAsyncStager()):  # type: ignore[abstract]
        # Those of torch 2.6 have no close(); async_save does not need one.
        assert isinstance(of_torch, AsyncStager) is hasattr(of_torch, "close")
    ours = OfOurs()  # type: ignore[abstract]
    assert not ours.should_synchronize_after_execute
    with pytest.raises(NotImplementedError, match="OfOurs"):
        ours.stage({})
    assert not isinstance(object(), AsyncStager)


@pytest.mark.parametrize("cached", [False, True])
def test_a_blocking_stager_never_changes_a_state_that_is_held(cached: bool) -> None:
    stager = BlockingAsyncStager(cache_staged_state_dict=cached)
    weight = torch.ones(3)
    first = stager.stage({"w": weight})
    weight.fill_(2)
    second = stager.stage({"w": weight})
    assert (first["w"].tolist(), second["w"].tolist()) == ([1, 1, 1], [2, 2, 2])
    stager.close()
    assert first["w"].tolist() == [1, 1, 1]


def test_a_type_check_refuses_objects_and_names_them() -> None:
    stager = BlockingAsyncStager(type_check=True)
    stager.stage({"a": [torch.ones(1), 1, 1.5, "x", b"y", None, (True,)]})
    with pytest.raises(ValueError, match=r"a\.b: a .*Progress") as caught:
        stager.stage({"a": {"b": Progress(1, [], torch.ones(1))}})
    assert getattr(caught.value, "key", None) == "a.b"


def test_a_closed_stager_says_so() -> None:
    stager = blocking()
    stager.close()
    with pytest.raises(errors.UsageError, match="closed"):
        stager.stage({"w": torch.ones(1)})


# Stock torch warns that there is only one process.
@needs_stock_stager
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_stock_torch_saves_in_the_background_through_our_stager(tmp_path: Path) -> None:
    stager: Any = DefaultStager(StagingOptions(use_async_staging=False))
    weight = torch.zeros(1 << 20)
    saves: list[Any] = []
    for number in range(3):
        weight.fill_(number)
        state = {"weight": weight, "step": number}
        saves.append(
            stock_saver.async_save(
                state, checkpoint_id=tmp_path / str(number), async_stager=stager, no_dist=True
            )
        )
    weight.fill_(-1)
    for number, save in enumerate(saves):
        save.result(60)
        target: dict[str, Any] = {"weight": torch.zeros(1 << 20), "step": -1}
        holdfast.load(target, checkpoint_id=tmp_path / str(number), no_dist=True)
        assert target["step"] == number
        assert bool((target["weight"] == number).all())
    stager.close()

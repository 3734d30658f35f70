"""Small values that differ between ranks: each rank gets its own back, and one warning says so."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import run_ranks
from tests.support.stock_torch import stock_load
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner as TorchLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader as TorchReader
from torch.distributed.tensor import Shard

import holdfast
from holdfast import PerRank
from holdfast._engine import replica_check
from holdfast._plan import kept_values
from holdfast.errors import PlanError, UsageError
from holdfast.per_rank import kept_key
from holdfast.state_dict_loader import _load_state_dict_from_keys
from holdfast.testing import FakeRank, FakeRanks
from holdfast.testing.fake_exchange import FakeExchange


@contextlib.contextmanager
def one_warning(about: str, *keys: str) -> Iterator[None]:
    """Exactly one warning, which says something about all the keys."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    assert len(seen) == 1, [str(warning.message) for warning in seen]
    assert about in str(seen[0].message)
    assert all(key in str(seen[0].message) for key in keys)
    assert seen[0].filename == __file__
    assert len(str(seen[0].message).split()) < 60


def saving(*keys: str) -> Any:
    return one_warning("ranks save different values", *keys)


def falling_back(*keys: str) -> Any:
    return one_warning("each rank now has rank 0's value of", *keys)


def save(rank: FakeRank, state: dict[str, Any], folder: Path, **options: Any) -> None:
    rank.save(state, checkpoint_id=folder, planner=holdfast.DefaultSavePlanner(**options))


def load(rank: FakeRank, folder: Path, **state: Any) -> dict[str, Any]:
    planner = holdfast.DefaultLoadPlanner(strict=True, allow_pickle=True)
    rank.load(state, checkpoint_id=folder, planner=planner)
    return state


DIFFERENT: dict[str, Any] = {
    "a number": lambda rank: rank,
    "a nested value": lambda rank: [1, (2, {"x": rank})],
    "bytes": lambda rank: b"x" * 1000 + bytes([rank]),
    "a tensor": lambda rank: torch.full((3,), float(rank)),
    "the last byte of a tensor of 64 KiB": lambda rank: (torch.arange(1 << 16) == 65535).byte() * rank,
    "a state of random numbers": lambda rank: torch.Generator().manual_seed(rank).get_state(),
    "a tensor without elements on one rank": lambda rank: torch.full((rank,), 1.0),
    "tensors of other dtypes": lambda rank: torch.ones(2, dtype=[torch.int8, torch.float64][rank % 2]),
    "a tensor on one rank, None on others": lambda rank: torch.ones(2) if rank == 1 else None,
}


@pytest.mark.parametrize("value", DIFFERENT.values(), ids=DIFFERENT)
def test_each_rank_gets_its_own_value_back(tmp_path: Path, value: Any) -> None:
    def of(number: int) -> Any:
        made = value(number)
        return torch.zeros_like(made) if isinstance(made, torch.Tensor) else None

    def is_of(number: int, found: Any) -> bool:
        expected = value(number)
        if not isinstance(expected, torch.Tensor):
            return bool(found == expected)
        return found.dtype == expected.dtype and torch.equal(found, expected)

    with saving(" a.other"):
        FakeRanks(3).run(
            lambda rank: save(rank, {"same": 5, "a": {"other": value(rank.rank), "n": 1}}, tmp_path)
        )
    found = FakeRanks(3).run(lambda rank: load(rank, tmp_path, same=0, a={"other": of(rank.rank), "n": 0}))
    for number, state in enumerate(found):
        assert is_of(number, state["a"]["other"])
        assert (state["same"], state["a"]["n"]) == (5, 1)
    with falling_back("a.other"):
        found = FakeRanks(2).run(lambda rank: load(rank, tmp_path, same=0, a={"other": of(0), "n": 0}))
    assert all(is_of(0, state["a"]["other"]) for state in found)


def test_running_statistics_are_kept_and_explained(tmp_path: Path) -> None:
    def statistics(number: int) -> dict[str, Any]:
        model = torch.nn.BatchNorm1d(2)
        model(torch.full((3, 2), float(number)))
        return dict(model.state_dict())

    with one_warning("broadcast the buffers", "model.running_mean"):
        FakeRanks(3).run(lambda rank: save(rank, {"model": statistics(rank.rank)}, tmp_path))

    def resume(rank: FakeRank) -> None:
        model = torch.nn.BatchNorm1d(2)
        load(rank, tmp_path, model=model)
        expected = statistics(rank.rank)
        assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())

    FakeRanks(3).run(resume)


def test_a_rank_with_the_coordinators_value_stores_no_other(tmp_path: Path) -> None:
    with saving("x"):
        FakeRanks(4).run(lambda rank: save(rank, {"x": rank.rank == 2, "y": 1}, tmp_path))
    keys = holdfast.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert set(keys) == {"x", "y", "@kept-for-rank-2-of-4.x"}
    assert [found["x"] for found in FakeRanks(4).run(lambda rank: load(rank, tmp_path, x=None, y=0))] == [
        False,
        False,
        True,
        False,
    ]


def test_values_that_only_some_ranks_hold_are_kept_for_these(tmp_path: Path) -> None:
    def state(number: int) -> dict[str, Any]:
        return {f"of{number % 2}": number, f"stage{number}": {"loss": torch.tensor(number)}, "step": 3}

    with saving("of0", "of1"):
        FakeRanks(4).run(lambda rank: save(rank, state(rank.rank), tmp_path))

    def resume(rank: FakeRank) -> tuple[Any, Any]:
        found = {"of0": None, "of1": None, f"stage{rank.rank}": {"loss": torch.tensor(-1)}, "step": 0}
        rank.load(found, checkpoint_id=tmp_path)
        assert found[f"stage{rank.rank}"] == {"loss": torch.tensor(rank.rank)}
        return found["of0"], found["of1"]

    # The first rank that has a key stands in for those that have not.
    assert FakeRanks(4).run(resume) == [(0, 1), (0, 1), (2, 1), (0, 3)]


def test_lists_typed_keys_and_empty_containers_stay_where_they_are(tmp_path: Path) -> None:
    def state(number: int) -> dict[Any, Any]:
        return {1: {"none": {}, ("a", 2): number}, "l": [torch.tensor(number), {"deep": number}], "z": {}}

    with saving("l.0", "l.1.deep"):
        FakeRanks(2).run(lambda rank: save(rank, state(rank.rank), tmp_path))
    with falling_back():
        assert _load_state_dict_from_keys(checkpoint_id=tmp_path) == state(0)

    def build(rank: FakeRank) -> Any:
        built: dict[Any, Any] = {}
        planner = holdfast.default_planner.EmptyStateDictLoadPlanner()
        rank.load(built, checkpoint_id=tmp_path, planner=planner)
        return built

    assert FakeRanks(2).run(build) == [state(0), state(1)]


def test_a_state_that_is_not_flattened_keeps_its_objects(tmp_path: Path) -> None:
    with saving("a"):
        FakeRanks(2).run(
            lambda rank: save(rank, {"a": {"b": rank.rank}, "c": 1}, tmp_path, flatten_state_dict=False)
        )

    def resume(rank: FakeRank) -> Any:
        state: dict[str, Any] = {"a": None, "c": 0}
        planner = holdfast.DefaultLoadPlanner(flatten_state_dict=False, strict=True)
        rank.load(state, checkpoint_id=tmp_path, planner=planner)
        return state

    assert FakeRanks(2).run(resume) == [{"a": {"b": 0}, "c": 1}, {"a": {"b": 1}, "c": 1}]


def test_saves_of_one_planner_with_cached_plans_keep_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = []
    merge = holdfast.DefaultSavePlanner._merge

    def noted(self: Any, plans: Any) -> Any:
        merged.append(len(plans))
        return merge(self, plans)

    monkeypatch.setattr(holdfast.DefaultSavePlanner, "_merge", noted)
    planners = [holdfast.DefaultSavePlanner(enable_plan_caching=True) for _ in range(2)]

    def once(folder: str, differ: bool) -> None:
        def work(rank: FakeRank) -> None:
            state = {"w": torch.ones(3), "x": rank.rank * differ, "y": torch.tensor(rank.rank * differ)}
            rank.save(state, checkpoint_id=tmp_path / folder, planner=planners[rank.rank])

        FakeRanks(2).run(work)

    def found(folder: str) -> list[Any]:
        def read(rank: FakeRank) -> Any:
            state = load(rank, tmp_path / folder, w=torch.zeros(3), x=-1, y=torch.tensor(-1))
            assert state["w"].tolist() == [1, 1, 1]
            return state["x"], state["y"].item()

        return FakeRanks(2).run(read)

    for number, differ in enumerate((False, True, True, False, False, True)):
        with saving("x", "y") if differ else contextlib.nullcontext():
            once(str(number), differ)
        assert found(str(number)) == [(0, 0), (1, 1) if differ else (0, 0)]
    # The third and the fifth save have the plan of the one before.
    assert len(merged) == 4


def steps_of(monkeypatch: pytest.MonkeyPatch, folder: Path, state: Any) -> list[str]:
    """The steps that rank 0 takes with the others to save."""
    steps: list[str] = []
    decide = FakeExchange.decide

    def noted(self: FakeExchange, step: str, *rest: Any) -> Any:
        if self.rank == 0:
            steps.append(step)
        return decide(self, step, *rest)

    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched.setattr(FakeExchange, "decide", noted)
        FakeRanks(2).run(lambda rank: save(rank, state(rank.rank), folder))
    return steps


def test_equal_values_cost_no_step_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps_of(monkeypatch, tmp_path, lambda _: {"a": 1}) == ["plan", "write"]
    stages = steps_of(monkeypatch, tmp_path, lambda rank: {f"a{rank}": 1})
    assert stages == ["plan", "plan", "write"]
    assert len(steps_of(monkeypatch, tmp_path, lambda rank: {"a": rank})) == 4


@pytest.mark.parametrize("value", DIFFERENT.values(), ids=DIFFERENT)
def test_nothing_is_kept_if_that_is_not_wanted(tmp_path: Path, value: Any) -> None:
    def work(rank: FakeRank) -> None:
        save(rank, {"other": value(rank.rank), "c": 1}, tmp_path, check_replicas="raise")

    for error in FakeRanks(3).attempt(work):
        assert isinstance(error, PlanError)
        assert error.failures[0][0].key == "other"  # type: ignore[attr-defined]
        assert "check_replicas='raise'" in str(error)
    assert not (tmp_path / ".metadata").exists()


def test_one_value_is_kept_if_nothing_is_compared(tmp_path: Path) -> None:
    FakeRanks(2).run(lambda rank: save(rank, {"x": rank.rank}, tmp_path, check_replicas=False))
    assert set(holdfast.FileSystemReader(tmp_path).read_metadata().state_dict_metadata) == {"x"}
    with pytest.raises(UsageError, match="'full' or 'raise', not 'never'"):
        holdfast.DefaultSavePlanner(check_replicas="never")  # type: ignore[arg-type]


def test_a_comparison_of_every_byte_keeps_small_values_too(tmp_path: Path) -> None:
    with saving("x"):
        FakeRanks(2).run(lambda rank: save(rank, {"x": rank.rank}, tmp_path, check_replicas="full"))


@pytest.mark.parametrize(
    ("module", "bound", "message"),
    [
        (replica_check, "MOST_VALUES", "6 values would be kept for single ranks, and at most 5"),
        (kept_values, "MOST_BYTES", "take 20 bytes on one rank, and at most 5 are kept"),
    ],
)
def test_more_than_the_bounds_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, bound: str, message: str
) -> None:
    monkeypatch.setattr(module, bound, 5)
    state = {"x": torch.float32, "y": torch.float64, "z": torch.int64}

    def work(rank: FakeRank) -> None:
        values = {key: torch.tensor(rank.rank, dtype=dtype) for key, dtype in state.items()}
        save(rank, values, tmp_path)

    for error in FakeRanks(3).attempt(work):
        assert isinstance(error, PlanError)
        assert "x: ranks 0 and 1 and 2 have different values" in str(error)
        assert message in str(error)


class Counts:
    """Looks different each time that somebody looks."""

    made = 0

    def __reduce__(self) -> Any:
        Counts.made += 1
        return int, (Counts.made + 1000,)


def test_a_value_that_cannot_be_compared_is_kept_beside_others(tmp_path: Path) -> None:
    with saving("x"):
        FakeRanks(3).run(lambda rank: save(rank, {"x": 5 if rank.rank == 1 else Counts()}, tmp_path))
    found = [state["x"] for state in FakeRanks(3).run(lambda rank: load(rank, tmp_path, x=None))]
    assert found[1] == 5
    assert found[0] > 1000
    assert found[2] > 1000
    assert found[0] != found[2]


class Doubling(holdfast.DefaultSavePlanner):
    """Finds values in a way of its own, and plans them in another precision."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float64
        return plan

    def lookup_object(self, index: Any) -> Any:
        return super().lookup_object(index) * 2

    def transform_object(self, write_item: Any, object: Any) -> Any:
        made = super().transform_object(write_item, object)
        return made.double() if isinstance(made, torch.Tensor) else made


class Renaming(holdfast.DefaultSavePlanner):
    """Has other names for values than the state."""

    def set_up_planner(self, state_dict: Any, *rest: Any, **more: Any) -> None:
        super().set_up_planner({f"my_{key}": value for key, value in state_dict.items()}, *rest, **more)


class OwnTable(holdfast.DefaultSavePlanner):
    """Looks values up by names that it knows from the start."""

    def set_up_planner(self, *rest: Any, **more: Any) -> None:
        super().set_up_planner(*rest, **more)
        self.table = dict(self.state_dict)

    def lookup_object(self, index: Any) -> Any:
        return self.table[index.fqn]


class OwnPlan(holdfast.DefaultSavePlanner):
    """Plans only what it knows."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        plan.items[:] = [item for item in plan.items if item.index.fqn in ("x", "w")]
        return plan


def test_planners_with_ways_of_their_own_keep_values(tmp_path: Path) -> None:
    def read(rank: FakeRank, prefix: str, dtype: torch.dtype) -> Any:
        state = load(rank, tmp_path, **{f"{prefix}x": 0, f"{prefix}w": torch.zeros(2, dtype=dtype)})
        return [state[f"{prefix}x"], state[f"{prefix}w"].tolist()]

    def work(rank: FakeRank, planner: Any) -> None:
        state = {"x": rank.rank, "w": torch.full((2,), float(rank.rank))}
        rank.save(state, checkpoint_id=tmp_path, planner=planner())

    with saving("x", "w"):
        FakeRanks(2).run(lambda rank: work(rank, Doubling))
    assert FakeRanks(2).run(lambda rank: read(rank, "", torch.float64)) == [[0, [0, 0]], [2, [2, 2]]]
    with saving("my_x", "my_w"):
        FakeRanks(2).run(lambda rank: work(rank, Renaming))
    assert FakeRanks(2).run(lambda rank: read(rank, "my_", torch.float32)) == [[0, [0, 0]], [1, [1, 1]]]
    for planner, why in ((OwnTable, "does not find it"), (OwnPlan, "did not plan it")):
        for error in FakeRanks(2).attempt(lambda rank, planner=planner: work(rank, planner)):  # type: ignore[misc]
            assert isinstance(error, PlanError)
            assert why in str(error)


def test_readers_and_planners_of_torch_give_each_rank_its_own(tmp_path: Path) -> None:
    with saving("x", "w"):
        FakeRanks(3).run(
            lambda rank: save(rank, {"x": rank.rank, "w": torch.full((2,), float(rank.rank))}, tmp_path)
        )

    def read(rank: FakeRank, **options: Any) -> Any:
        state = {"x": -1, "w": torch.zeros(2)}
        rank.load(state, **options)
        return state["x"], state["w"].tolist()  # type: ignore[attr-defined]

    expected = [(rank, [float(rank)] * 2) for rank in range(3)]
    assert FakeRanks(3).run(lambda rank: read(rank, storage_reader=TorchReader(tmp_path))) == expected
    loaded = FakeRanks(3).run(lambda rank: read(rank, checkpoint_id=tmp_path, planner=TorchLoadPlanner()))
    assert loaded == expected
    with falling_back("x", "w"):
        FakeRanks(2).run(lambda rank: read(rank, storage_reader=TorchReader(tmp_path)))


def test_a_sharded_tensor_is_not_put_together_from_values_of_several_ranks(tmp_path: Path) -> None:
    with saving("w"):
        FakeRanks(2).run(
            lambda rank: save(rank, {"m": {"w": torch.full((4,), float(rank.rank))}, "x": 1}, tmp_path)
        )

    def read(rank: FakeRank) -> list[float]:
        weight = rank.distribute(torch.full((4,), -1.0), rank.mesh(), [Shard(0)])
        load(rank, tmp_path, m={"w": weight}, x=0)
        local: list[float] = weight.to_local().tolist()
        return local

    with falling_back("m.w"):
        assert FakeRanks(2).run(read) == [[0, 0], [0, 0]]


def test_a_fallback_is_only_mentioned_where_it_is_loaded(tmp_path: Path) -> None:
    with saving("x"):
        FakeRanks(2).run(lambda rank: save(rank, {"x": rank.rank, "y": 1}, tmp_path))

    def read(rank: FakeRank, **state: Any) -> dict[str, Any]:
        rank.load(state, checkpoint_id=tmp_path)
        return state

    assert FakeRanks(3).run(lambda rank: read(rank, y=0)) == [{"y": 1}] * 3
    # Nor does it matter which rank loads it.
    with falling_back("x"):
        found = FakeRanks(3).run(lambda rank: read(rank, **({"x": -1} if rank.rank == 1 else {"y": 0})))
    assert found == [{"y": 1}, {"x": 0}, {"y": 1}]


def test_a_per_rank_takes_what_was_kept(tmp_path: Path) -> None:
    with saving("x", "d.w"):
        FakeRanks(2).run(
            lambda rank: save(rank, {"x": rank.rank, "d": {"w": torch.tensor([rank.rank])}}, tmp_path)
        )

    def read(rank: FakeRank) -> Any:
        state = load(rank, tmp_path, x=PerRank(-1), d=PerRank({"w": torch.tensor([-1])}))
        return state["x"].value, state["d"].value["w"].item()

    assert FakeRanks(2).run(read) == [(0, 0), (1, 1)]
    with falling_back("x", "d.w"):
        assert FakeRanks(1).run(read) == [(0, 0)]


def test_the_value_of_another_rank_can_be_asked_for_by_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with saving("x"):
        FakeRanks(12).run(lambda rank: save(rank, {"x": rank.rank, "y": rank.rank}, tmp_path))
    state = {"@kept-for-rank-07-of-12": {"x": None}}
    holdfast.load(state, checkpoint_id=tmp_path)
    assert state == {"@kept-for-rank-07-of-12": {"x": 7}}
    assert not caplog.records
    with pytest.raises(UsageError, match="names that begin with @kept-for-rank-"):
        holdfast.save(state, checkpoint_id=tmp_path / "again")


@pytest.mark.parametrize(
    "key",
    [
        *("x", "@kept-for-rank-1-of-2", "a.@kept-for-rank-1-of-2.x", "@kept-for-rank-2-of-2.x"),
        *("@kept-for-rank-1-of-12.x", "@kept-for-rank-x-of-2.x", "@kept-for-rank-.x"),
    ],
)
def test_other_keys_are_not_taken_for_kept_ones(key: str) -> None:
    assert kept_key(key) is None
    assert kept_key(f"@kept-for-rank-01-of-12.{key}") == (key, 1, 12)


class Job:
    """DDP with BatchNorm, on data of each rank's own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout())
        self.model = torch.nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def train(self) -> None:
        torch.manual_seed(dist.get_rank() + 1)
        self.loss = 0.0
        for _ in range(2):
            loss = self.model(torch.randn(8, 4) + dist.get_rank()).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.loss = loss.item()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loss": self.loss,
            "rng": torch.get_rng_state(),
        }


def blank(value: Any) -> Any:
    """A state of the same structure, without its values."""
    if isinstance(value, dict):
        return {key: blank(entry) for key, entry in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [blank(entry) for entry in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and one and isinstance(one[0], dict):
        return all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def train_and_save(folder: str) -> tuple[float, list[Any]]:
    job = Job()
    job.train()
    state = job.state()
    kinds = holdfast.state_dict_saver.AsyncCheckpointerType
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        holdfast.save(state, checkpoint_id=f"{folder}/save")
        for kind in kinds:
            saving: Any = holdfast.async_save(
                state, checkpoint_id=f"{folder}/{kind.value}", async_checkpointer_type=kind
            )
            saving.result()
    said = [str(warning.message) for warning in seen if "different values" in str(warning.message)]
    assert not said or seen[0].filename == __file__
    results: list[Any] = [len(said), [all(k in s for k in ("running_mean", "loss", "rng")) for s in said]]
    for name in ("save", "thread", "process"):
        found = blank(state)
        holdfast.load(found, checkpoint_id=f"{folder}/{name}", strict=True)
        results.append(equal(found, state))
    return job.loss, results


@pytest.mark.slow
def test_a_job_with_batch_norm_saves_in_every_way_and_goes_on_exactly(tmp_path: Path) -> None:
    (_, (loss, first)), (_, (other, second)) = run_ranks(train_and_save, 2, str(tmp_path))
    # The coordinator says it, once for each save; the other ranks say nothing.
    assert first == [3, [True] * 3, True, True, True]
    assert second == [0, [], True, True, True]
    assert loss != other
    for folder in tmp_path.iterdir():
        with falling_back("loss", "rng", "running_mean"):
            alone = _load_state_dict_from_keys(checkpoint_id=folder)
        assert alone["loss"] == loss
        stock = blank(alone)
        stock_load(stock, checkpoint_id=folder)
        assert equal(stock, alone)

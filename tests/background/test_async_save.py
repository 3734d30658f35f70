"""async_save: the values of the moment of the call, one save at a time, each result with its own request."""

import concurrent.futures
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.background.gated import (
    HANG_GUARD,
    Failing,
    Gated,
    GatedCommit,
    GatedStream,
    cancel_within_one_value,
)
from tests.support.stock_torch import IS_NEWEST, stock_load
from torch.distributed.checkpoint import filesystem as stock_files
from torch.distributed.checkpoint import staging as stock_staging
from torch.distributed.checkpoint import state_dict_saver as stock_saver

import holdfast
from holdfast import async_save, state_dict_loader
from holdfast._background.short_turns import short_turns
from holdfast.default_planner import DefaultSavePlanner
from holdfast.errors import UsageError
from holdfast.filesystem import FileSystemWriter
from holdfast.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from holdfast.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, SaveFuture


def state(value: float = 1.0, size: int = 64) -> dict[str, Any]:
    return {
        "weight": torch.full((size, size), float(value)),
        "progress": {"step": int(value), "seen": [value]},
    }


def loaded(folder: Path, size: int = 64) -> float:
    """The one value that fills a checkpoint; raises if it is a mixture."""
    found = state(-1, size)
    holdfast.load(found, checkpoint_id=folder)
    value = found["weight"].unique().item()
    assert found["progress"] == {"step": int(value), "seen": [value]}
    return float(value)


def saving(*args: Any, **kwargs: Any) -> SaveFuture:
    future = async_save(*args, **kwargs)
    assert isinstance(future, SaveFuture)
    return future


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("holdfast-save"):
            thread.join(HANG_GUARD)
            assert not thread.is_alive()


def test_the_signature_is_torchs_and_ours_has_more_keywords_at_the_end() -> None:
    ours, theirs = (
        list(inspect.signature(f).parameters.values()) for f in (async_save, stock_saver.async_save)
    )
    assert [(p.name, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.kind) for p in theirs]
    more = ["overwrite", "page_cache", "check_replicas", "when_busy", "peer_timeout", "user_metadata"]
    assert [p.name for p in ours[-len(more) :]] == more
    if IS_NEWEST:
        assert len(ours) == len(theirs) + len(more)
        assert {m.name: m.value for m in AsyncCheckpointerType} == {
            m.name: m.value for m in stock_saver.AsyncCheckpointerType
        }


def test_the_future_gives_the_metadata_of_a_checkpoint_that_torch_reads(tmp_path: Path) -> None:
    future = saving(state(), checkpoint_id=tmp_path / "c")
    assert isinstance(future, concurrent.futures.Future)
    metadata = future.result(HANG_GUARD)
    assert isinstance(metadata, holdfast.Metadata)
    assert "weight" in metadata.state_dict_metadata
    stock = {"weight": torch.zeros(64, 64)}
    stock_load(stock, checkpoint_id=tmp_path / "c")
    assert torch.equal(stock["weight"], torch.ones(64, 64))


def test_the_checkpoint_has_the_values_of_the_moment_of_the_call(tmp_path: Path) -> None:
    writer = Gated(tmp_path / "c")
    original = state(1)
    future = saving(original, storage_writer=writer)
    assert writer.reached.wait(HANG_GUARD)
    original["weight"].fill_(9)
    original["progress"]["seen"].append(9)
    original["progress"]["step"] = 9
    del original["progress"]
    writer.may_go.set()
    future.result(HANG_GUARD)
    assert loaded(tmp_path / "c") == 1.0


def test_threads_take_turns_more_often_only_while_a_save_runs(tmp_path: Path) -> None:
    before = sys.getswitchinterval()
    writer = Gated(tmp_path)
    future = saving(state(1), storage_writer=writer)
    assert writer.reached.wait(HANG_GUARD)
    with short_turns():
        pass  # another save that ends earlier
    assert sys.getswitchinterval() == 0.0005
    writer.may_go.set()
    future.result(HANG_GUARD)
    assert sys.getswitchinterval() == before


def test_a_switch_interval_that_the_program_sets_during_a_save_stays(tmp_path: Path) -> None:
    before = sys.getswitchinterval()
    writer = Gated(tmp_path)
    future = saving(state(1), storage_writer=writer)
    assert writer.reached.wait(HANG_GUARD)
    try:
        sys.setswitchinterval(0.01)
        writer.may_go.set()
        future.result(HANG_GUARD)
        assert sys.getswitchinterval() == 0.01
    finally:
        sys.setswitchinterval(before)


def test_modules_and_optimizers_are_saved_as_they_were(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    before = model.weight.detach().clone()
    future = saving({"model": model}, checkpoint_id=tmp_path / "c")
    with torch.no_grad():
        model.weight.add_(1)
    future.result(HANG_GUARD)
    holdfast.load({"model": model}, checkpoint_id=tmp_path / "c")
    assert torch.equal(model.weight, before)


def test_two_saves_to_one_place_are_made_in_order_and_the_second_call_says_that_it_waited(
    tmp_path: Path,
) -> None:
    writer = Gated(tmp_path / "c")
    first = saving(state(1), storage_writer=writer, async_stager=DefaultStager(SYNCHRONOUS))
    assert writer.reached.wait(HANG_GUARD)
    assert first.waited == 0.0
    threading.Timer(0.05, writer.may_go.set).start()
    other_way = tmp_path / "x" / ".." / "c"
    (tmp_path / "x").mkdir()
    second = saving(state(2), checkpoint_id=other_way, async_stager=DefaultStager(SYNCHRONOUS))
    assert (tmp_path / "c" / ".metadata").exists()
    assert second.waited > 0.0
    second.result(HANG_GUARD)
    first.result()
    assert loaded(tmp_path / "c") == 2.0


SYNCHRONOUS = StagingOptions(use_async_staging=False)


@pytest.mark.parametrize("shared", ["stager", "our stager", "writer", "planner"])
def test_saves_that_share_something_do_not_overlap(tmp_path: Path, shared: str) -> None:
    gated = Gated(tmp_path / "a")
    planner = holdfast.DefaultSavePlanner() if shared == "planner" else None
    stagers: list[Any] = [DefaultStager(SYNCHRONOUS), DefaultStager(SYNCHRONOUS)]
    stagers = {"stager": [stagers[0]] * 2, "our stager": [None, None]}.get(shared, stagers)
    first = saving(state(1), storage_writer=gated, planner=planner, async_stager=stagers[0])
    assert gated.reached.wait(HANG_GUARD)
    second_writer = gated if shared == "writer" else holdfast.FileSystemWriter(tmp_path / "b")
    arguments: dict[str, Any] = {
        "storage_writer": second_writer,
        "planner": planner,
        "async_stager": stagers[1],
    }
    skipped = saving(state(2), checkpoint_id=tmp_path / "b", when_busy="skip", **arguments)
    assert skipped.skipped
    assert skipped.result() is None
    assert not (tmp_path / "b").exists()
    with pytest.raises(ValueError, match="earlier save is not done"):
        async_save(state(2), checkpoint_id=tmp_path / "b", when_busy="raise", **arguments)
    gated.may_go.set()
    second = saving(state(2), checkpoint_id=tmp_path / "b", **arguments)
    assert (tmp_path / "a" / ".metadata").exists()
    first.result(HANG_GUARD)
    second.result(HANG_GUARD)
    assert (loaded(tmp_path / "a"), loaded(tmp_path / "b")) == (1.0, 2.0)


def test_saves_that_share_nothing_overlap(tmp_path: Path) -> None:
    writers = [Gated(tmp_path / str(n)) for n in range(3)]
    futures = [
        saving(state(n), storage_writer=writer, async_stager=DefaultStager(SYNCHRONOUS), when_busy="raise")
        for n, writer in enumerate(writers)
    ]
    for writer in writers:
        assert writer.reached.wait(HANG_GUARD)
    for writer in writers:
        writer.may_go.set()
    for future in futures:
        future.result(HANG_GUARD)
    assert [loaded(tmp_path / str(n)) for n in range(3)] == [0.0, 1.0, 2.0]


def test_a_plain_save_waits_for_the_one_in_the_background(tmp_path: Path) -> None:
    writer = Gated(tmp_path / "c")
    first = saving(state(1), storage_writer=writer)
    assert writer.reached.wait(HANG_GUARD)
    threading.Timer(0.05, writer.may_go.set).start()
    holdfast.save(state(2), checkpoint_id=tmp_path / "c")
    assert first.exception(HANG_GUARD) is None
    assert loaded(tmp_path / "c") == 2.0


def test_each_result_of_a_failing_and_a_succeeding_save_reaches_its_own_future(tmp_path: Path) -> None:
    check_pairs(tmp_path, 20)


@pytest.mark.slow
def test_a_thousand_pairs_of_overlapping_saves_keep_their_results_apart(tmp_path: Path) -> None:
    check_pairs(tmp_path, 1000)


def check_pairs(folder: Path, count: int) -> None:
    stagers = [DefaultStager(SYNCHRONOUS), DefaultStager(SYNCHRONOUS)]
    (folder / "file").touch()
    for number in range(count):
        bad = saving({"x": torch.zeros(3)}, checkpoint_id=folder / "file" / "c", async_stager=stagers[0])
        good = saving(
            {"x": torch.full((3,), float(number))},
            storage_writer=holdfast.FileSystemWriter(folder / str(number % 4), sync_files=False),
            async_stager=stagers[1],
        )
        with pytest.raises(FileExistsError):
            bad.result(HANG_GUARD)
        assert good.exception(HANG_GUARD) is None
        found = {"x": torch.zeros(3)}
        holdfast.load(found, checkpoint_id=folder / str(number % 4))
        assert found["x"].tolist() == [number] * 3


def test_progress_goes_from_nothing_to_everything(tmp_path: Path) -> None:
    writer, reached, may_go = holdfast.FileSystemWriter(tmp_path / "c"), threading.Event(), threading.Event()
    seen: list[str] = []

    class Halfway(holdfast.DefaultSavePlanner):
        def resolve_data(self, write_item: holdfast.WriteItem) -> Any:
            seen.append(write_item.index.fqn)
            if len(seen) == 3:
                reached.set()
                assert may_go.wait(HANG_GUARD)
            return super().resolve_data(write_item)

    mib = 1 << 20
    tensors = {str(n): torch.ones(mib // 4) for n in range(4)}
    future = saving(tensors, storage_writer=writer, planner=Halfway())
    assert reached.wait(HANG_GUARD)
    halfway = future.progress()
    # Two values are written, each with a small container around it.
    assert 2 * mib <= halfway.nbytes_done < 2 * mib + (64 << 10)
    assert halfway.nbytes_total == 4 * mib
    assert halfway.rate > 0
    may_go.set()
    future.result(HANG_GUARD)
    assert future.progress()[:2] == (4 * mib, 4 * mib)


def test_a_load_waits_for_the_save_to_its_place(tmp_path: Path) -> None:
    holdfast.save(state(1), checkpoint_id=tmp_path / "c")
    writer = Gated(tmp_path / "c")
    future = saving(state(2), storage_writer=writer)
    assert writer.reached.wait(HANG_GUARD)
    found: list[float] = []
    loading = threading.Thread(target=lambda: found.append(loaded(tmp_path / "c")))
    loading.start()
    loading.join(0.5)  # a load that does not wait is done within this time
    writer.may_go.set()
    loading.join(HANG_GUARD)
    assert found == [2.0]
    assert future.done()


@pytest.mark.parametrize("form", ["load_state_dict", "from keys"])
def test_every_form_of_load_raises_a_failure_that_nobody_has_seen(tmp_path: Path, form: str) -> None:
    holdfast.save(state(1), checkpoint_id=tmp_path / "c")
    saving(state(2), storage_writer=Failing(tmp_path / "c"))
    reader = holdfast.FileSystemReader(tmp_path / "c")

    def call() -> None:
        if form == "from keys":
            state_dict_loader._load_state_dict_from_keys("weight", checkpoint_id=tmp_path / "c")
        else:
            state_dict_loader._load_state_dict(state(), reader)

    with pytest.raises(holdfast.CheckpointException, match="earlier save in the background"):
        call()
    call()


def test_a_failure_that_a_thread_waits_for_is_not_raised_by_a_load_of_another(tmp_path: Path) -> None:
    holdfast.save(state(1), checkpoint_id=tmp_path / "good")

    class GatedFailure(Gated):
        def finish(self, *_: Any) -> None:
            raise OSError("on purpose")

    # The system decides which thread goes on first when the save has failed: often enough it is this one.
    for number in range(30):
        writer = GatedFailure(tmp_path / str(number))
        future = saving(state(2), storage_writer=writer)
        told: list[BaseException | None] = []
        asks = threading.Event()

        def ask(future: Any = future, asks: Any = asks, told: Any = told) -> None:
            asks.set()
            told.append(future.exception(HANG_GUARD))

        waiting = threading.Thread(target=ask)
        waiting.start()
        assert asks.wait(HANG_GUARD)
        writer.may_go.set()
        concurrent.futures.wait([future], HANG_GUARD)
        holdfast.load(state(), checkpoint_id=tmp_path / "good")
        waiting.join(HANG_GUARD)
        assert isinstance(told[0], OSError)


def test_progress_is_seen_and_cancelling_works_within_one_value(tmp_path: Path) -> None:
    cancel_within_one_value(saving, tmp_path)


def test_a_save_that_a_call_has_waited_for_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    returned, set_result = threading.Event(), SaveFuture.set_result

    def late(future: SaveFuture, value: Any) -> None:
        returned.wait(0.5)  # long enough for a call that does not wait for the future
        set_result(future, value)

    monkeypatch.setattr(SaveFuture, "set_result", late)
    first = saving(state(1), checkpoint_id=tmp_path / "c")
    second = saving(state(2), checkpoint_id=tmp_path / "c")
    assert first.done()
    returned.set()
    second.result(HANG_GUARD)


def test_a_save_that_gets_no_thread_holds_up_no_other(tmp_path: Path) -> None:
    before = threading.stack_size(1 << 62)  # which no machine has
    try:
        with pytest.raises(RuntimeError, match="thread") as caught:  # and keeps what it had begun
            saving(state(1), checkpoint_id=tmp_path / "c")
    finally:
        threading.stack_size(before)
    saving(state(2), checkpoint_id=tmp_path / "c", when_busy="raise").result(HANG_GUARD)
    assert loaded(tmp_path / "c") == 2.0
    assert caught.traceback


@pytest.mark.parametrize("count", [1, 3000])
def test_progress_is_told_with_the_default_planner_too(tmp_path: Path, count: int) -> None:
    future = saving({str(n): torch.ones(10) for n in range(count)}, checkpoint_id=tmp_path / "c")
    future.result(HANG_GUARD)
    assert future.progress()[:2] == (40 * count, 40 * count)


def test_a_cancelled_save_leaves_the_old_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    holdfast.save(state(1), checkpoint_id=tmp_path / "c")
    before = sorted(os.listdir(tmp_path / "c"))
    writer = Gated(tmp_path / "c")
    future = saving(state(2), storage_writer=writer)
    assert writer.reached.wait(HANG_GUARD)
    assert future.running()
    assert future.cancel()
    writer.may_go.set()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(HANG_GUARD)
    assert future.cancelled()
    done, waiting = concurrent.futures.wait([future], 0)
    assert (len(done), len(waiting)) == (1, 0)
    assert sorted(os.listdir(tmp_path / "c")) == before
    assert loaded(tmp_path / "c") == 1.0  # and nobody raises: cancelling is no failure
    holdfast.save(state(3), checkpoint_id=tmp_path / "c")


def test_a_save_that_is_being_committed_cannot_be_cancelled(tmp_path: Path) -> None:
    writer = GatedCommit(tmp_path / "c")
    future = saving(state(2), storage_writer=writer)
    assert writer.reached.wait(HANG_GUARD)
    assert not future.cancel()
    writer.may_go.set()
    assert future.result(HANG_GUARD) is not None
    assert not future.cancel()
    assert loaded(tmp_path / "c") == 2.0


def test_an_asynchronous_stager_gives_two_futures(tmp_path: Path) -> None:
    response = async_save(state(), checkpoint_id=tmp_path / "c", async_stager=DefaultStager())
    assert isinstance(response, AsyncSaveResponse)
    assert response.staging_completion.result(HANG_GUARD) is None
    assert response.upload_completion.result(HANG_GUARD) is not None
    assert loaded(tmp_path / "c") == 1.0


class Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("not to be copied")


def test_staging_that_failed_is_told_by_both_futures_of_an_asynchronous_stager(tmp_path: Path) -> None:
    response = async_save({"x": Uncopyable()}, checkpoint_id=tmp_path / "c", async_stager=DefaultStager())
    assert isinstance(response, AsyncSaveResponse)
    for future in (response.staging_completion, response.upload_completion):
        with pytest.raises(holdfast.CheckpointError, match="not to be copied"):
            future.result(HANG_GUARD)
    assert not (tmp_path / "c").exists()


def test_staging_that_fails_in_the_call_is_raised_by_it_and_the_next_save_works(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x"):
        async_save({"x": Uncopyable()}, checkpoint_id=tmp_path / "c")
    saving(state(4), checkpoint_id=tmp_path / "c").result(HANG_GUARD)
    assert loaded(tmp_path / "c") == 4.0


def test_an_object_that_cannot_be_pickled_is_named_by_the_future(tmp_path: Path) -> None:
    holdfast.save({"f": 1}, checkpoint_id=tmp_path / "c")
    future = saving({"f": lambda: None}, checkpoint_id=tmp_path / "c")
    with pytest.raises(holdfast.CheckpointError, match="f: "):
        future.result(HANG_GUARD)
    found = {"f": 0}
    holdfast.load(found, checkpoint_id=tmp_path / "c")
    assert found == {"f": 1}


class LateStager(AsyncStager):
    """Stages when it is told to, in another thread."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_go = threading.Event()
        self.error = error

    def stage(self, state_dict: dict[str, Any]) -> Any:
        future: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()

        def work() -> None:
            assert self.may_go.wait(HANG_GUARD)
            if self.error is None:
                future.set_result(BlockingAsyncStager().stage(state_dict))
            else:
                future.set_exception(self.error)

        threading.Thread(target=work).start()
        return future

    def synchronize_staging(self) -> None:
        raise AssertionError("not asked of a stager that gives futures")

    def close(self) -> None:
        raise AssertionError("it is its owner's to close")


def test_a_custom_stager_may_be_done_later(tmp_path: Path) -> None:
    stager = LateStager()
    response = async_save(state(), checkpoint_id=tmp_path / "c", async_stager=stager)
    assert isinstance(response, AsyncSaveResponse)
    assert not response.staging_completion.done()
    stager.may_go.set()
    assert response.staging_completion.result(HANG_GUARD) is None
    response.upload_completion.result(HANG_GUARD)
    assert loaded(tmp_path / "c") == 1.0


def test_a_custom_stager_that_fails_later_fails_both_futures(tmp_path: Path) -> None:
    stager = LateStager(OSError(12, "no memory"))
    stager.may_go.set()
    response = async_save(state(), checkpoint_id=tmp_path / "c", async_stager=stager)
    assert isinstance(response, AsyncSaveResponse)
    for future in (response.staging_completion, response.upload_completion):
        with pytest.raises(OSError, match="no memory"):
            future.result(HANG_GUARD)


@pytest.mark.parametrize("synchronize", [True, False])
def test_a_custom_stager_is_synchronized_before_the_call_returns_if_it_wants(
    tmp_path: Path, synchronize: bool
) -> None:
    calls: list[str] = []

    class Notes(AsyncStager):
        _synchronize_after_execute = synchronize

        def stage(self, state_dict: dict[str, Any]) -> Any:
            calls.append("stage")
            return BlockingAsyncStager().stage(state_dict)

        def synchronize_staging(self) -> None:
            calls.append("synchronize")

        def close(self) -> None:
            calls.append("close")

    saving(state(), checkpoint_id=tmp_path / "c", async_stager=Notes()).result(HANG_GUARD)
    assert calls == (["stage", "synchronize"] if synchronize else ["stage"])


def test_a_storage_writer_that_stages_is_used_as_stager(tmp_path: Path) -> None:
    calls: list[str] = []

    class Both(holdfast.FileSystemWriter, BlockingAsyncStager):
        def stage(self, state_dict: dict[str, Any]) -> Any:
            calls.append("stage")
            return BlockingAsyncStager().stage({**state_dict, "weight": state_dict["weight"] + 1})

    saving(state(1), storage_writer=Both(tmp_path / "c")).result(HANG_GUARD)
    assert calls == ["stage"]
    found = {"weight": torch.zeros(64, 64)}
    holdfast.load(found, checkpoint_id=tmp_path / "c", strict=False)
    assert torch.equal(found["weight"], torch.full((64, 64), 2.0))


def test_torchs_own_writer_and_stager_work(tmp_path: Path) -> None:
    writer: Any = stock_files.FileSystemWriter(tmp_path / "c")
    saving(state(3), storage_writer=writer).result(HANG_GUARD)
    assert loaded(tmp_path / "c") == 3.0
    stager: Any = stock_staging.BlockingAsyncStager()
    saving(state(4), checkpoint_id=tmp_path / "d", async_stager=stager).result(HANG_GUARD)
    assert loaded(tmp_path / "d") == 4.0


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="when_busy"):
        async_save(state(), checkpoint_id=tmp_path / "c", when_busy="later")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="checkpoint_id"):
        async_save(state())
    with pytest.raises(ValueError, match="peer_timeout"):
        async_save(state(), checkpoint_id=tmp_path / "c", peer_timeout=0)


def test_a_failure_names_the_step_and_the_cause(tmp_path: Path) -> None:
    future = saving(state(), storage_writer=Failing(tmp_path / "c"))
    with pytest.raises(OSError, match="on purpose") as caught:
        future.result(HANG_GUARD)
    assert isinstance(caught.value, holdfast.CheckpointException)
    assert caught.value.step == "write"
    assert not (tmp_path / "c" / ".metadata").exists()


def test_a_callback_may_begin_the_next_save(tmp_path: Path) -> None:
    later: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def go_on(_: Any) -> None:
        later.set_result(async_save(state(2), checkpoint_id=tmp_path / "c"))

    saving(state(1), checkpoint_id=tmp_path / "c").add_done_callback(go_on)
    later.result(HANG_GUARD).result(HANG_GUARD)
    assert loaded(tmp_path / "c") == 2.0


@pytest.mark.skipif(
    not hasattr(stock_files, "SerializationFormat"), reason="this torch has no such enumerations"
)
def test_the_kinds_of_torch_are_taken_for_ours(tmp_path: Path) -> None:
    kind: Any = stock_saver.AsyncCheckpointerType.THREAD
    saving = holdfast.async_save({"a": 1}, checkpoint_id=tmp_path / "a", async_checkpointer_type=kind)
    assert isinstance(saving, SaveFuture)
    saving.result()
    unknown: Any = "proces"
    with pytest.raises(UsageError, match="not 'proces'"):
        holdfast.async_save({"a": 1}, checkpoint_id=tmp_path / "b", async_checkpointer_type=unknown)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        form: Any = stock_files.SerializationFormat.TORCH_SAVE
        holdfast.FileSystemWriter(tmp_path / "c", serialization_format=form)


class Interrupted(Exception):
    """What a handler of a signal may raise in the middle of a call."""


@pytest.mark.parametrize("before", [True, False], ids=["before the thread runs", "while the thread runs"])
@pytest.mark.parametrize("kind", AsyncCheckpointerType)
def test_an_interrupt_while_a_save_begins_leaves_its_copy_to_one_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: AsyncCheckpointerType, before: bool
) -> None:
    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    folder, size = tmp_path / "c", 1024
    gate = GatedStream(1 << 20, tmp_path)
    writer = FileSystemWriter(folder, _extensions=[gate])
    saving(state(1, size), checkpoint_id=folder, async_checkpointer_type=kind).result(HANG_GUARD)
    start = threading.Thread.start

    def start_and_interrupt(thread: threading.Thread) -> None:
        if not thread.name.startswith("holdfast-save"):
            start(thread)
            return
        if not before:
            start(thread)
            while not (tmp_path / "reached").exists():
                os.sched_yield()
        raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_and_interrupt)
        with pytest.raises(Interrupted):
            async_save(state(2, size), storage_writer=writer, async_checkpointer_type=kind)
    try:
        other = saving(state(3, size), checkpoint_id=folder, when_busy="skip", async_checkpointer_type=kind)
        assert other.skipped == (not before)
    finally:
        if not before:
            gate.let_go()
    other.result(HANG_GUARD)
    saving(state(4, size), checkpoint_id=tmp_path / "d", async_checkpointer_type=kind).result(HANG_GUARD)
    assert loaded(folder, size) == (3 if before else 1)  # the save that was interrupted is cancelled
    assert loaded(tmp_path / "d", size) == 4
    assert not failures


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
@pytest.mark.parametrize("flatten", [True, False])
def test_tensors_in_values_that_are_stored_whole_take_only_their_own_bytes(
    tmp_path: Path, kind: AsyncCheckpointerType, flatten: bool
) -> None:
    inner = {"pair": (torch.ones(3), torch.arange(2)), "many": (torch.ones(5), torch.zeros(2).half())}
    saving(
        {"weight": torch.zeros(1 << 20), "inner": inner},
        checkpoint_id=tmp_path,
        planner=DefaultSavePlanner(flatten_state_dict=flatten),
        async_checkpointer_type=kind,
    ).result(HANG_GUARD)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < (4 << 20) + 20_000
    with holdfast.open(tmp_path) as saved:
        found = saved["inner"] if not flatten else {name: saved[f"inner.{name}"] for name in inner}
    assert repr(found) == repr(inner)

"""Writers and planners that fail, lose, repeat or invent: nothing committed, no thread left (A1, A2)."""

import dataclasses
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoints import committed_files, contents, failure_of, load
from tests.support.process import assert_no_more_threads_than, living_threads
from tests.support.states import same, small_state
from tests.support.sweeps import sweep
from torch.futures import Future

import holdfast as hf
from holdfast.errors import CheckpointException, CheckpointExistsError, IncompleteWriteError
from holdfast.extension import ZStandard
from holdfast.filesystem import FileSystemWriter
from holdfast.metadata import MetadataIndex
from holdfast.planner import SavePlan, SavePlanner, WriteItem
from holdfast.storage import WriteResult

WRITERS: dict[str, dict[str, Any]] = {
    "1 thread": {},
    "2 threads": {"thread_count": 2},
    "4 threads": {"thread_count": 4},
    "a file per item": {"single_file_per_rank": False, "thread_count": 3},
    "zstd": {"_extensions": [ZStandard()]},
}
ITEMS = 8


class _Refusal(Exception):
    """Nothing that anybody else raises."""


class _FailingPlanner(hf.DefaultSavePlanner):
    """Fails at the n-th item that it is asked for."""

    def __init__(self, fail_at: int, error: BaseException) -> None:
        super().__init__()
        self.left = fail_at
        self.error = error

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return super().resolve_data(write_item)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hf.save(small_state(1), checkpoint_id=tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def _assert_old_is_whole(folder: Path, before: dict[str, bytes]) -> None:
    after = contents(folder)
    assert {name: after.get(name) for name in before} == before
    assert same(load(folder, small_state(99)), small_state(1))


@pytest.mark.parametrize("options", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("n", range(1, ITEMS + 1))
def test_a_planner_that_fails_at_any_item_commits_nothing(
    folder: Path, options: dict[str, Any], n: int
) -> None:
    before, threads = contents(folder), living_threads()
    planner = _FailingPlanner(n, _Refusal(f"item {n}"))
    with pytest.raises(_Refusal) as caught:
        hf.save(small_state(2), storage_writer=FileSystemWriter(folder, **options), planner=planner)
    assert isinstance(caught.value, CheckpointException)
    assert f"item {n}" in str(caught.value)
    assert_no_more_threads_than(threads)
    _assert_old_is_whole(folder, before)
    hf.save(small_state(3), storage_writer=FileSystemWriter(folder, **options))
    assert same(load(folder, small_state(99)), small_state(3))
    assert set(os.listdir(folder)) == committed_files(folder)


@pytest.mark.parametrize("options", [WRITERS["a file per item"], WRITERS["2 threads"]])
def test_a_failed_save_leaves_nothing_behind(folder: Path, options: dict[str, Any]) -> None:
    before = contents(folder)
    planner = _FailingPlanner(ITEMS, _Refusal())
    with pytest.raises(_Refusal):
        hf.save(small_state(2), storage_writer=FileSystemWriter(folder, **options), planner=planner)
    assert contents(folder) == before


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_interrupt_in_a_writer_is_raised_as_it_is_and_commits_nothing(
    folder: Path, threads: int, interrupt: type[BaseException]
) -> None:
    before, alive = contents(folder), living_threads()
    planner = _FailingPlanner(3, interrupt())
    with pytest.raises(interrupt):
        hf.save(
            small_state(2), storage_writer=FileSystemWriter(folder, thread_count=threads), planner=planner
        )
    assert_no_more_threads_than(alive)
    _assert_old_is_whole(folder, before)


class _WrongTensors(hf.DefaultSavePlanner):
    """Gives something else than it planned."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.change = change

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return self.change(data) if write_item.index.fqn == "model.weight" else data


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[:-1],
        lambda t: t.double(),
        lambda t: t.flatten(),
        lambda t: t.t(),
        lambda t: None,
        lambda t: 3,
    ],
    ids=["fewer rows", "another dtype", "another shape", "transposed", "nothing", "a number"],
)
def test_a_planner_that_gives_something_else_than_it_planned_commits_nothing(
    folder: Path, change: Callable[[Any], Any]
) -> None:
    before = contents(folder)
    raised = failure_of(lambda: hf.save(small_state(2), checkpoint_id=folder, planner=_WrongTensors(change)))
    assert raised is not None
    assert raised.key == "model.weight"
    _assert_old_is_whole(folder, before)


Change = Callable[[list[WriteResult]], list[WriteResult]]
STRANGER = MetadataIndex("model.stranger", torch.Size([0]))
REPORTS: dict[str, Change] = {
    "loses the first": lambda results: results[1:],
    "loses the last": lambda results: results[:-1],
    "loses all": lambda results: [],
    "reports one twice": lambda results: [*results, results[0]],
    "reports one twice for another": lambda results: [results[0], *results[:-1]],
    "invents one": lambda results: [*results, dataclasses.replace(results[0], index=STRANGER)],
    "invents one for another": lambda results: [
        dataclasses.replace(results[0], index=STRANGER),
        *results[1:],
    ],
    "moves a chunk": lambda results: [
        dataclasses.replace(r, index=MetadataIndex(r.index.fqn, torch.Size([1, 1])))
        if r.index.fqn == "model.weight"
        else r
        for r in results
    ],
}


class _WrongReport(FileSystemWriter):
    """Writes everything and does not report what it wrote."""

    change: Change

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        results = super().write_data(plan, planner).wait()
        changed: Future[list[WriteResult]] = Future()
        changed.set_result(type(self).change(results))
        return changed


@pytest.mark.parametrize("report", REPORTS)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_writer_that_does_not_report_each_item_once_commits_nothing(
    folder: Path, report: str, threads: int
) -> None:
    before = contents(folder)
    kind = type("Wrong", (_WrongReport,), {"change": staticmethod(REPORTS[report])})
    with pytest.raises(IncompleteWriteError) as caught:
        hf.save(small_state(2), storage_writer=kind(folder, thread_count=threads))
    assert isinstance(caught.value, CheckpointException)
    _assert_old_is_whole(folder, before)
    assert same(load(folder, small_state(99)), small_state(1))


def test_a_future_that_fails_commits_nothing(folder: Path) -> None:
    class Broken(FileSystemWriter):
        def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
            future: Future[list[WriteResult]] = Future()
            future.set_exception(RuntimeError("the future says no"))  # type: ignore[arg-type]
            return future

    before = contents(folder)
    with pytest.raises(RuntimeError, match="the future says no"):
        hf.save(small_state(2), storage_writer=Broken(folder))
    assert contents(folder) == before


@pytest.mark.parametrize("there", [".metadata", "__0.metadata", "model-00001-of-00001.safetensors"])
def test_overwrite_false_refuses_a_checkpoint_of_any_form_and_touches_nothing(
    tmp_path: Path, there: str
) -> None:
    (tmp_path / there).write_bytes(b"whatever it is")
    before = contents(tmp_path)
    with pytest.raises(CheckpointExistsError, match="already exists"):
        hf.save(small_state(2), storage_writer=FileSystemWriter(tmp_path, overwrite=False))
    assert contents(tmp_path) == before


def test_overwrite_false_refuses_a_checkpoint_behind_a_link(tmp_path: Path) -> None:
    hf.save(small_state(1), checkpoint_id=tmp_path / "real")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".metadata").symlink_to(tmp_path / "real" / ".metadata")
    with pytest.raises(CheckpointExistsError):
        hf.save(small_state(2), storage_writer=FileSystemWriter(tmp_path / "linked", overwrite=False))


def test_a_ranks_own_save_over_a_shared_checkpoint_is_loaded_or_refused(folder: Path) -> None:
    """What was saved last is there, or the save says that it cannot be."""
    before = contents(folder)
    if failure_of(hf.save, small_state(2), checkpoint_id=folder, use_collectives=False) is None:
        assert same(load(folder, small_state(99)), small_state(2))
    else:
        _assert_old_is_whole(folder, before)


CHANGING_CALLS = ("open", "pwritev", "fsync", "close", "rename", "unlink", "scandir", "mkdir")


class _FailingCall:
    """Lets the n-th of the calls that a save makes to the system fail with EIO."""

    def __init__(self, patch: pytest.MonkeyPatch, fail_at: int) -> None:
        self.left = fail_at
        self.failed: str | None = None
        self.seen: list[str] = []
        for name in CHANGING_CALLS:
            patch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left != 0:
                self.seen.append(name)
                return call(*args, **kwargs)
            self.failed = name
            if name == "close":
                call(*args)  # a close that fails has closed all the same
            # The system names the file where the call does.
            named = args[0] if name not in ("pwritev", "fsync", "close") else None
            raise OSError(errno.EIO, "the disk is broken", named)

        return watched


@sweep(stride=4)
@pytest.mark.slow
@pytest.mark.parametrize("options", WRITERS.values(), ids=WRITERS)
def test_whichever_call_of_a_save_fails_the_old_checkpoint_or_the_new_is_whole(
    tmp_path: Path, options: dict[str, Any], stride: int
) -> None:
    alive = living_threads()
    for n in range(1, 1000, stride):
        folder = tmp_path / str(n)
        hf.save(small_state(1), checkpoint_id=folder)
        with pytest.MonkeyPatch.context() as patch:
            calls = _FailingCall(patch, n)
            raised = failure_of(hf.save, small_state(2), storage_writer=FileSystemWriter(folder, **options))
        assert_no_more_threads_than(alive)
        found = load(folder, small_state(99))
        if raised is None:
            # Of what fails after the commit, nothing may make a complete checkpoint look like a failure.
            assert same(found, small_state(2)), f"call {n}, {calls.failed}"
        else:
            assert isinstance(raised, OSError)
            assert raised.errno == errno.EIO
            assert raised.filename, f"call {n}, {calls.failed}: no file is named"
            renamed = calls.seen.count("rename") == 2  # that of the lease comes first
            assert same(found, small_state(2 if renamed else 1)), f"call {n}, {calls.failed}"
        hf.save(small_state(3), storage_writer=FileSystemWriter(folder, **options))
        assert same(load(folder, small_state(99)), small_state(3))
        assert set(os.listdir(folder)) == committed_files(folder), f"call {n}, {calls.failed}"
        if calls.failed is None:
            break
    assert n > 15, "the calls of a save were not seen"


def test_a_clean_up_that_fails_does_not_make_a_committed_save_raise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    rename = os.rename

    def renamed(*names: Any, **folders: Any) -> None:
        rename(*names, **folders)
        if names[1] == ".metadata":
            monkeypatch.setattr(os, "scandir", broken)

    monkeypatch.setattr(os, "rename", renamed)
    hf.save(small_state(2), checkpoint_id=folder)
    monkeypatch.undo()
    assert same(load(folder, small_state(99)), small_state(2))

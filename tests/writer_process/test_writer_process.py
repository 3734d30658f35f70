"""The writer process writes what a direct save writes, and its end is always reported (G3, H2)."""

import contextlib
import errno
import gc
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.writer_process.support import (
    MIB,
    Background,
    Gate,
    GatedPlanner,
    HalvingPlanner,
    LockedWriter,
    NotingWriter,
    ReportingWriter,
    ToldWriter,
    die_beside_a_blocked_writer_process,
    save_in_process,
    staged,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast._engine.adapt import adapt_save_planner, adapt_writer
from holdfast._staging.stage import Staging
from holdfast._staging.staged import StagedState
from holdfast._writer_process.client import (
    ready_writer_process,
    start_writer_process,
    stop_writer_process,
)
from holdfast._writer_process.process_writer import ProcessWriter
from holdfast.default_planner import DefaultSavePlanner
from holdfast.errors import CheckpointException, RemoteError, StorageError, UsageError
from holdfast.extension import ZStandard
from holdfast.filesystem import FileSystemWriter
from holdfast.per_rank import PerRank

pytestmark = pytest.mark.slow

WRITERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "3 threads": {"thread_count": 3},
    "zstd": {"_extensions": [ZStandard()]},
    "a file per item": {"single_file_per_rank": False},
}


@pytest.fixture(scope="module", autouse=True)
def _writer_process() -> Iterator[None]:
    start_writer_process(wait=False)
    yield
    stop_writer_process()


def _pid() -> int:
    pid = start_writer_process()
    assert pid is not None
    return pid


def _state() -> dict[str, Any]:
    bits = torch.Generator().manual_seed(7)
    weight = torch.randn(600, 500, generator=bits)
    return {
        "model": {"weight": weight, "turned": weight.t(), "tied": weight, "half": weight[:300].bfloat16()},
        "small": {f"s{n}": torch.randn(3, generator=bits) for n in range(50)},
        "big": torch.randn(3 * MIB, generator=bits),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "own": PerRank({"t": torch.arange(5)[1:3]}),
        "objects": {"step": 7, "name": "run", "raw": bytes(range(256)) * 2000, "list": [1, (2, 3)]},
    }


def _data_files(folder: Path) -> list[bytes]:
    names = sorted(path.name for path in folder.iterdir() if path.suffix == ".distcp")
    return [(folder / name).read_bytes() for name in sorted(names, key=lambda name: name.split("-")[0])]


@pytest.mark.parametrize("options", WRITERS.values(), ids=WRITERS)
def test_the_writer_process_writes_what_a_direct_save_writes(tmp_path: Path, options: dict[str, Any]) -> None:
    holdfast.save(_state(), storage_writer=FileSystemWriter(tmp_path / "direct", **options), no_dist=True)
    made = save_in_process(_state(), FileSystemWriter(tmp_path / "remote", **options))
    files = _data_files(tmp_path / "remote")
    assert sum(map(len, files)) > 12 * MIB
    assert files == _data_files(tmp_path / "direct")
    assert made.nbytes_done > (10 * MIB if "_extensions" in options else 12 * MIB)
    read: dict[str, Any] = {"big": torch.zeros(3 * MIB), "objects": {"step": 0, "list": [0, (0, 0)]}}
    holdfast.load(read, checkpoint_id=tmp_path / "remote", no_dist=True, planner=_lenient())
    assert torch.equal(read["big"], _state()["big"])
    assert read["objects"] == {"step": 7, "list": [1, (2, 3)]}


def _lenient() -> Any:
    return holdfast.DefaultLoadPlanner(strict=False)


def test_a_sharded_tensor_is_written_chunk_by_chunk(tmp_path: Path) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = torch.arange(600.0).view(20, 30)
        state = {"weight": distribute_tensor(whole, mesh, [Shard(0)])}
        for planner in (DefaultSavePlanner(), HalvingPlanner(), GatedPlanner(Gate(tmp_path))):
            save_in_process(state, FileSystemWriter(tmp_path / "c"), planner)
            read = {"weight": torch.zeros(20, 30, dtype=torch.float32)}
            halved = isinstance(planner, HalvingPlanner)
            loader = holdfast.DefaultLoadPlanner(cast=halved or None)
            holdfast.load(read, checkpoint_id=tmp_path / "c", planner=loader)
            expected = whole.bfloat16().float() if halved else whole
            assert torch.equal(read["weight"], expected)
    finally:
        dist.destroy_process_group()


def test_a_planner_with_a_way_of_its_own_is_asked_in_the_writer_process(tmp_path: Path) -> None:
    weight = torch.randn(1000)
    state = {"weight": weight, "pid": 0}
    save_in_process(state, FileSystemWriter(tmp_path / "c"), HalvingPlanner())
    read: dict[str, Any] = {"weight": torch.zeros(1000, dtype=torch.bfloat16), "pid": 0}
    holdfast.load(read, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(read["weight"], weight.bfloat16())
    assert read["pid"] == _pid()


def test_what_cannot_be_sent_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    state, folder = {"weight": torch.ones(3)}, tmp_path / "c"
    with pytest.raises(UsageError, match=r"storage writer, a tests\.writer_process\.support\.LockedWriter"):
        save_in_process(state, LockedWriter(folder))
    planner = GatedPlanner(Gate(tmp_path))
    planner.gate = lambda: None  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"planner, a tests\.writer_process\.support\.GatedPlanner"):
        save_in_process(state, FileSystemWriter(folder), planner)
    main_only = type("OnlyInMain", (FileSystemWriter,), {"__module__": "__main__"})
    with pytest.raises(UsageError, match=r"OnlyInMain is defined in the program's main module"):
        save_in_process(state, main_only(folder))
    foreign = type("Unknown", (FileSystemWriter,), {"__module__": "tests.writer_process.support"})
    with pytest.raises(UsageError, match="Unknown"):
        save_in_process(state, foreign(folder))
    with pytest.raises(UsageError, match="use_shared_memory"):
        ProcessWriter(adapt_writer(FileSystemWriter(folder)), Staging().stage(state))
    assert list(folder.iterdir()) == []


def test_an_error_of_the_writer_process_arrives_with_its_class_and_its_traceback() -> None:
    with pytest.raises(OSError, match="raise this") as caught:
        save_in_process({"a": 1}, ToldWriter("raise this"))
    assert caught.value.errno == errno.EIO
    cause = caught.value.__cause__
    assert cause is not None
    assert isinstance(cause.__cause__, RemoteError)
    assert "in write_data" in str(cause.__cause__)
    with pytest.raises(CheckpointException, match=r"UnpicklableError: on purpose"):
        save_in_process({"a": 1}, ToldWriter("raise what cannot be pickled"))


def test_what_a_writer_notes_while_it_writes_is_there_for_the_commit() -> None:
    writer = NotingWriter()
    shared = writer.unchanged
    save_in_process({"a": 1}, writer)
    assert writer.committed == {
        "set": ["new"],
        "list": [1, 2],
        "dict": {"a": [3]},
        "object": 4,
        "again": True,
    }
    assert writer.unchanged is shared


def test_a_writer_is_pickled_once_a_save_and_what_it_leaves_as_it_is_does_not_come_back() -> None:
    writer = NotingWriter()
    save_in_process({"a": 1}, writer)
    assert writer.unchanged.pickled == 1


@pytest.mark.parametrize("told", ["attribute", "result"])
def test_notes_that_cannot_be_sent_back_are_named(told: str) -> None:
    expected = r"NotingWriter\.lock" if told == "attribute" else "its results"
    with pytest.raises(UsageError, match=f"write_data has set {expected} in the process that writes"):
        save_in_process({"a": 1}, NotingWriter(told))


def test_a_writer_decides_by_its_pickled_state_what_other_processes_see() -> None:
    writer = NotingWriter("attribute", private=("lock",))
    save_in_process({"a": 1}, writer)
    assert not hasattr(writer, "lock")


def test_a_writer_is_told_of_the_save_and_reports_how_far_it_is(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    save = Background({"weight": torch.zeros(MIB)}, ReportingWriter(gate), DefaultSavePlanner())
    gate.pid_of_who_waits()
    assert save.writer.nbytes_done == 3 * MIB
    save.writer.cancel()
    gate.open()
    save.join()
    assert isinstance(save.error, CancelledError)


def test_nothing_looks_into_a_stream_after_a_request_that_failed(tmp_path: Path) -> None:
    stop_writer_process()
    with _executable(str(tmp_path / "none")), pytest.raises(StorageError, match="No such file") as caught:
        save_in_process({"weight": torch.ones(3)}, FileSystemWriter(tmp_path / "c"))
    assert caught.tb is not None  # and with it every frame of the failed call
    views = [view for view in gc.get_objects() if type(view) is memoryview]
    assert not [view for view in views if type(view.obj).__name__ == "_BytesIOBuffer"]


def test_a_full_disk_is_raised_with_errno_and_file_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    save_in_process({"big": torch.ones(MIB)}, FileSystemWriter(folder))
    before = sorted(os.listdir(folder))
    limits = resource.prlimit(_pid(), resource.RLIMIT_FSIZE)
    resource.prlimit(_pid(), resource.RLIMIT_FSIZE, (10 * MIB, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            save_in_process({"big": torch.zeros(10 * MIB)}, FileSystemWriter(folder))
    finally:
        resource.prlimit(_pid(), resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename is not None
    assert caught.value.filename.startswith(str(folder))
    assert sorted(os.listdir(folder)) == before
    read = {"big": torch.zeros(MIB)}
    holdfast.load(read, checkpoint_id=folder, no_dist=True)
    assert torch.equal(read["big"], torch.ones(MIB))


def test_a_save_that_fails_after_the_write_removes_what_the_writer_process_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with pytest.raises(CheckpointException, match="on purpose"):
        save_in_process({"big": torch.ones(MIB)}, _FailsToCommit(folder))
    assert os.listdir(folder) == []


class _FailsToCommit(FileSystemWriter):
    def finish(self, metadata: Any, results: Any) -> None:
        assert _data_files(Path(self.path))
        raise OSError(errno.EIO, "on purpose")


def _writing(pool: ThreadPoolExecutor, writer: ToldWriter, copy: StagedState) -> Future[Any]:
    """The result of a write in a thread."""
    planner = adapt_save_planner(DefaultSavePlanner())
    planner.set_up(copy.state, None, is_coordinator=True)
    return pool.submit(
        ProcessWriter(adapt_writer(writer), copy).write, planner.plugin.create_local_plan(), planner
    )


def test_a_hundred_overlapping_writes_half_of_them_failing_each_get_their_own_answer() -> None:
    with staged({f"k{n}": n for n in range(3)}) as copy, ThreadPoolExecutor(100) as pool:
        told = [f"raise {n}" if n % 2 else f"result {n}" for n in range(100)]
        futures = [_writing(pool, ToldWriter(text), copy) for text in told]
        for text, future in reversed(list(zip(told, futures, strict=True))):
            if text.startswith("raise"):
                with pytest.raises(OSError) as caught:
                    future.result()
                assert caught.value.strerror == text
            else:
                assert [result.storage_data for result in future.result()] == [text] * 3


def test_a_later_request_may_be_answered_first(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with staged({"a": 1}) as copy, ThreadPoolExecutor() as pool:
        first = _writing(pool, ToldWriter("first", gate), copy)
        gate.pid_of_who_waits()
        assert _writing(pool, ToldWriter("second"), copy).result()[0].storage_data == "second"
        assert not first.done()
        gate.open()
        assert first.result()[0].storage_data == "first"


def test_progress_is_seen_within_a_save_and_a_cancelled_one_leaves_nothing(tmp_path: Path) -> None:
    folder, gate = tmp_path / "c", Gate(tmp_path)
    state = {"first": torch.zeros(20 * MIB), "last": torch.zeros(MIB)}
    save = Background(state, FileSystemWriter(folder), GatedPlanner(gate))
    gate.pid_of_who_waits()
    # The ring of buffers may hold some of it back.
    assert 40 * MIB <= save.writer.nbytes_done < 84 * MIB
    save.writer.cancel()
    gate.open()
    save.join()
    assert isinstance(save.error, CancelledError)
    assert os.listdir(folder) == []


def test_a_relative_folder_is_where_the_trainer_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        save_in_process({"a": torch.ones(3)}, FileSystemWriter("c"))
        assert _data_files(tmp_path / name / "c")


def test_the_writer_process_logs_as_the_trainer_does(capfd: pytest.CaptureFixture[str]) -> None:
    stop_writer_process()  # it prints where the trainer printed when it was started, and that is captured now
    logger = logging.getLogger("holdfast")
    level = logger.level
    try:
        for wanted in (logging.WARNING, logging.INFO):
            logger.setLevel(wanted)
            save_in_process({"a": 1}, ToldWriter("log"))
            assert ("INFO:holdfast.told:said by the writer" in capfd.readouterr().err) == (
                wanted == logging.INFO
            )
    finally:
        logger.setLevel(level)
        stop_writer_process()


def test_every_thread_of_the_writer_process_has_a_low_priority(tmp_path: Path) -> None:
    save_in_process(_state(), FileSystemWriter(tmp_path / "c", thread_count=3))
    threads = [int(name) for name in os.listdir(f"/proc/{_pid()}/task")]
    assert len(threads) > 1
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {15}


def test_signals_for_the_whole_terminal_or_job_do_not_end_the_writer_process(tmp_path: Path) -> None:
    pid = _pid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    save_in_process(_state(), FileSystemWriter(tmp_path / "c"))
    assert _pid() == pid


def test_a_forked_child_leaves_the_writer_process_alone(tmp_path: Path) -> None:
    pid = _pid()
    child = os.fork()
    if child == 0:
        stop_writer_process()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    save_in_process({"a": torch.ones(3)}, FileSystemWriter(tmp_path / "c"))
    assert _pid() == pid


def test_the_end_of_a_writer_process_is_noticed_though_a_child_was_forked_while_it_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop_writer_process()
    is_starting, open_pipe = threading.Event(), os.pipe

    def slow_pipe() -> tuple[int, int]:
        made = open_pipe()
        is_starting.set()
        time.sleep(0.1)  # the process is about to be started, and its pipe is open
        return made

    monkeypatch.setattr(os, "pipe", slow_pipe)
    start_writer_process(wait=False)
    is_starting.wait()
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        process = ready_writer_process()
        assert os.waitpid(child, os.WNOHANG) == (0, 0)  # nobody has waited for it
        process.kill()
        process._thread.join(20)
        assert process.has_ended
        assert not process._thread.is_alive()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_killed_writer_process_is_named_nothing_is_committed_and_the_next_save_has_another(
    tmp_path: Path,
) -> None:
    folder, gate = tmp_path / "c", Gate(tmp_path)
    save_in_process({"first": torch.ones(4)}, FileSystemWriter(folder))
    committed = (folder / ".metadata").read_bytes()
    state = {"first": torch.zeros(20 * MIB), "last": torch.zeros(4)}
    save = Background(state, FileSystemWriter(folder), GatedPlanner(gate))
    pid = gate.pid_of_who_waits()
    os.kill(pid, signal.SIGKILL)
    save.join()
    assert isinstance(save.error, StorageError)
    assert f"writer process {pid}" in str(save.error)
    assert "killed by SIGKILL" in str(save.error)
    assert (folder / ".metadata").read_bytes() == committed
    save_in_process({"first": torch.full((4,), 2.0)}, FileSystemWriter(folder))
    assert _pid() != pid
    read = {"first": torch.zeros(4)}
    holdfast.load(read, checkpoint_id=folder, no_dist=True)
    assert torch.equal(read["first"], torch.full((4,), 2.0))
    assert len(_data_files(folder)) == 1


def test_what_a_killed_writer_process_has_half_written_is_removed_when_its_save_fails(tmp_path: Path) -> None:
    folder, gate = tmp_path / "c", Gate(tmp_path)
    state = {"first": torch.zeros(20 * MIB), "last": torch.zeros(4)}
    save = Background(state, FileSystemWriter(folder), GatedPlanner(gate))
    os.kill(gate.pid_of_who_waits(), signal.SIGKILL)
    save.join()
    assert os.listdir(folder) == []


def test_a_stopped_writer_process_is_waited_for_and_can_be_killed() -> None:
    pid = _pid()
    with staged({"a": 1}) as copy, ThreadPoolExecutor() as pool:
        os.kill(pid, signal.SIGSTOP)
        slow = _writing(pool, ToldWriter("slow"), copy)
        os.kill(pid, signal.SIGCONT)
        assert slow.result()[0].storage_data == "slow"
    os.kill(pid, signal.SIGSTOP)
    save = Background({"a": torch.ones(3)}, ToldWriter("never"), DefaultSavePlanner())
    save.writer.cancel()
    os.kill(pid, signal.SIGKILL)
    save.join()
    assert isinstance(save.error, CancelledError)


@contextlib.contextmanager
def _executable(path: str) -> Iterator[None]:
    """Have another program run as the interpreter of processes that are started inside a with-block."""
    before = spawn.get_executable()
    spawn.set_executable(path)
    try:
        yield
    finally:
        spawn.set_executable(before)


def test_a_writer_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    stop_writer_process()
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho the library is missing >&2\nexit 3\n")
    broken.chmod(0o755)
    for executable, expected in (
        (str(broken), "status 3 before it was ready. It printed: the library is missing"),
        (str(tmp_path / "none"), "could not be started: .*No such file"),
    ):
        with _executable(executable), pytest.raises(StorageError, match=expected):
            start_writer_process()


def _descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def _children() -> set[int]:
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(name))
    return found


def test_nothing_is_left_of_a_writer_process_and_saves_add_nothing_to_it(tmp_path: Path) -> None:
    stop_writer_process()
    descriptors, children = _descriptors(), _children()
    pid = _pid()
    assert _children() == children | {pid}
    counts = []
    for number in range(6):
        told = save_in_process(_state(), FileSystemWriter(tmp_path / "c"))
        with pytest.raises(OSError):
            save_in_process({"a": number}, ToldWriter("raise"))
        del told
        counts.append((_descriptors(), len(os.listdir(f"/proc/{pid}/fd")), _mapped(pid)))
    assert len(set(counts[1:])) == 1, counts
    assert not _open_in_shared_memory(pid) | _open_in_shared_memory(os.getpid())
    stop_writer_process()
    assert (_descriptors(), _children()) == (descriptors, children)


def _open_in_shared_memory(pid: int) -> set[str]:
    """The files with a name that a process has open there, which it would leave behind if it were killed."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return {path for path in found if path.startswith("/dev/shm/")}


def _mapped(pid: int) -> int:
    """How many pieces of staged memory a process has mapped."""
    with open(f"/proc/{pid}/maps") as file:
        return sum("holdfast-staging" in line for line in file)


def test_a_writer_process_whose_trainer_is_killed_ends_in_the_middle_of_its_write(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"print('main was run', flush=True)\n"
        f"from tests.writer_process.support import {die_beside_a_blocked_writer_process.__name__} as run\n"
        f"run({str(tmp_path)!r})\n"
    )
    root = Path(__file__).parents[2]
    trainer = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
    )
    assert trainer.stdout is not None
    try:
        assert trainer.stdout.readline() == b"main was run\n"
        pid = int(trainer.stdout.readline())
        watched = os.pidfd_open(pid)
    finally:
        trainer.kill()
    assert select.select([watched], [], [], 30)[0], "the writer process outlived its trainer"
    os.close(watched)
    # All who could still print have ended: this returns only then.
    assert trainer.communicate()[0] == b""
    assert not (tmp_path / "checkpoint" / ".metadata").exists()
    save_in_process({"a": torch.ones(3)}, FileSystemWriter(tmp_path / "checkpoint"))
    assert len(_data_files(tmp_path / "checkpoint")) == 1

"""Saves into one folder at the same time, from several processes: with locks, and where folders have none."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints import committed_files, data_files, load
from tests.support.states import same, small_state

import holdfast as hf
from holdfast.errors import CheckpointException, IncompleteCheckpointError, StorageError

GOLDEN = Path(__file__).parents[1] / "golden" / "torch-2.13"
NO_LOCKS = pytest.mark.parametrize("locks", ["no locks"], indirect=True)

PROGRAM = """
    import errno, fcntl, os, signal, sys
    folder, seed, options = sys.argv[1], int(sys.argv[2]), sys.argv[3].split()
    import holdfast as hf
    from holdfast._io import lease, process_identity
    from tests.support.states import small_state

    if "no locks" in sys.argv[3]:
        def no_locks(*_):
            raise OSError(errno.ENOLCK, "no locks here")
        fcntl.flock = no_locks
    if "elsewhere" in options:
        process_identity._machine = lambda: ("another machine", "pid:[1]")
    if "often" in options:
        lease.RENEWAL_SECONDS = 0.02

    def say(word):
        print(word, flush=True)
        sys.stdin.readline()

    class Paused(hf.FileSystemWriter):
        def finish(self, metadata, results):
            if "forks" in options and os.fork() == 0:
                os.closerange(0, 3)
                signal.alarm(30)
                signal.pause()
            say("written")
            super().finish(metadata, results)

    writer = Paused(folder)
    state = small_state(seed)
    if "often" in options:  # a save of few items is over before its lease need be renewed
        state["many"] = {f"value {n}": n for n in range(1000)}
    try:
        hf.save(state, storage_writer=writer, use_collectives="own" not in options)
    except Exception as error:
        say(f"raised {type(error.__cause__).__name__}: {error.__cause__}")
    else:
        say("saved")
"""

# Each test starts a process that imports torch.
pytestmark = [pytest.mark.slow, pytest.mark.one_core]


class _Save:
    """A save in a process of its own, which waits before its commit."""

    def __init__(self, folder: Path, seed: int, options: str = "") -> None:
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder), str(seed), options]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        assert self.hear() == "written"

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> str:
        """Let it commit; returns how that ended."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def begin() -> Iterator[Callable[..., _Save]]:
    saves: list[_Save] = []

    def begin(*args: Any) -> _Save:
        saves.append(_Save(*args))
        return saves[-1]

    yield begin
    for save in saves:
        save.end()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hf.save(small_state(1), checkpoint_id=tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture(params=["locks", "no locks"])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "no locks":
        monkeypatch.setattr(fcntl, "flock", _no_locks)
    return str(request.param)


def _no_locks(*_: Any) -> None:
    raise OSError(errno.ENOLCK, "no locks here")


def _found(folder: Path) -> dict[str, Any]:
    return load(folder, small_state(99))


def _leases(folder: Path) -> list[Path]:
    return list(folder.glob(".*.lease"))


def test_a_second_save_is_refused_and_names_the_first(
    folder: Path, locks: str, begin: Callable[..., _Save]
) -> None:
    first = begin(folder, 2, locks)
    with pytest.raises(StorageError, match=f"another save is writing .* {first.process.pid} on "):
        hf.save(small_state(3), checkpoint_id=folder)
    assert same(_found(folder), small_state(1))
    assert first.go_on() == "saved"
    assert same(_found(folder), small_state(2))
    assert set(os.listdir(folder)) == committed_files(folder)


def test_a_killed_save_is_not_in_the_way_and_its_files_go(
    folder: Path, locks: str, begin: Callable[..., _Save]
) -> None:
    begin(folder, 2, locks).end()
    assert len(data_files(folder)) == 2
    hf.save(small_state(3), checkpoint_id=folder)
    assert same(_found(folder), small_state(3))
    assert set(os.listdir(folder)) == committed_files(folder)


@NO_LOCKS
def test_a_killed_save_that_is_not_reaped_is_dead(
    folder: Path, locks: str, begin: Callable[..., _Save]
) -> None:
    process = begin(folder, 2, "no locks").process
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie from now on
    hf.save(small_state(3), checkpoint_id=folder)
    assert same(_found(folder), small_state(3))


def test_a_process_with_the_number_of_a_dead_one_is_another(
    folder: Path, begin: Callable[..., _Save]
) -> None:
    begin(folder, 2).end()
    (lease,) = _leases(folder)
    # As if this process had got the number of the one that is gone.
    lease.write_text(json.dumps({**json.loads(lease.read_text()), "pid": os.getpid()}))
    hf.save(small_state(3), checkpoint_id=folder)
    assert same(_found(folder), small_state(3))


@pytest.mark.parametrize("survivor", ["parent", "child"])
def test_a_process_forked_during_a_save_does_not_keep_the_folder(
    folder: Path, locks: str, begin: Callable[..., _Save], survivor: str
) -> None:
    """Workers of a DataLoader, say, live on after the save is over, or after the trainer was killed."""
    save = begin(folder, 2, f"forks {locks}")
    if survivor == "parent":
        assert save.go_on() == "saved"
    else:
        save.process.kill()
        save.process.wait()
    hf.save(small_state(3), checkpoint_id=folder)
    assert same(_found(folder), small_state(3))
    assert set(os.listdir(folder)) == committed_files(folder)


def test_the_end_of_a_forked_child_does_not_free_the_folder(tmp_path: Path) -> None:
    writer = hf.FileSystemWriter(tmp_path)
    writer.reset()
    writer.set_up_storage_writer(True, rank=0)
    writer.store.make()
    writer.prepare_global_plan([])
    child = os.fork()
    if child == 0:
        writer.reset()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(StorageError, match="another save"):
        hf.save(small_state(1), checkpoint_id=tmp_path)
    writer.reset()
    hf.save(small_state(1), checkpoint_id=tmp_path)


def test_a_save_that_was_taken_for_dead_commits_nothing(folder: Path, begin: Callable[..., _Save]) -> None:
    """On another machine, and stopped for a minute."""
    stopped = begin(folder, 2, "elsewhere no locks")
    with pytest.raises(StorageError, match="another save"):
        hf.save(small_state(3), checkpoint_id=folder)
    stopped.process.send_signal(signal.SIGSTOP)
    (lease,) = _leases(folder)
    _make_older(lease, seconds=61)
    hf.save(small_state(3), checkpoint_id=folder)
    assert set(os.listdir(folder)) == committed_files(folder)
    stopped.process.send_signal(signal.SIGCONT)
    assert stopped.go_on().startswith("raised StorageError")
    assert same(_found(folder), small_state(3))
    assert set(os.listdir(folder)) == committed_files(folder)


def test_a_lease_is_renewed_while_its_save_runs(folder: Path, begin: Callable[..., _Save]) -> None:
    begin(folder, 2, "often")
    (lease,) = _leases(folder)
    _make_older(lease, seconds=100)
    deadline = time.monotonic() + 30
    while time.time() - lease.stat().st_mtime > 50:
        assert time.monotonic() < deadline, "it is not renewed"
        os.sched_yield()


def _make_older(path: Path, *, seconds: float) -> None:
    times = path.stat()
    os.utime(path, (times.st_atime - seconds, times.st_mtime - seconds))


@NO_LOCKS
def test_files_of_a_living_save_survive_the_clean_up_of_another(
    tmp_path: Path, locks: str, begin: Callable[..., _Save]
) -> None:
    """Saves of ranks' own parts may run side by side; here even two of the same rank."""
    first = begin(tmp_path, 2, "own no locks")
    for seed in (3, 4):
        hf.save(small_state(seed), checkpoint_id=tmp_path, use_collectives=False)
        assert same(_found(tmp_path), small_state(seed))
        assert len(data_files(tmp_path)) == 2
    assert first.go_on() == "saved"
    assert same(_found(tmp_path), small_state(2))
    assert len(data_files(tmp_path)) == 1


@NO_LOCKS
def test_a_joint_save_is_refused_beside_one_of_a_ranks_own_part(
    tmp_path: Path, locks: str, begin: Callable[..., _Save]
) -> None:
    first = begin(tmp_path, 2, "own no locks")
    with pytest.raises(StorageError, match="another save"):
        hf.save(small_state(3), checkpoint_id=tmp_path)
    assert first.go_on() == "saved"
    assert same(_found(tmp_path), small_state(2))


SAVE_AGAIN_AND_AGAIN = """
    import errno, fcntl, sys
    import holdfast as hf
    from holdfast.errors import StorageError
    from tests.support.states import small_state
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "no locks here")
    fcntl.flock = no_locks
    folder, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    print("ready", flush=True)
    sys.stdin.readline()
    done = 0
    for seed in range(first, first + count):
        try:
            hf.save(small_state(seed), checkpoint_id=folder)
            done += 1
        except StorageError as error:
            assert "another save" in str(error), error
    print("saved", done, flush=True)
"""


def test_saves_that_race_where_there_are_no_locks_never_break_the_folder(folder: Path) -> None:
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SAVE_AGAIN_AND_AGAIN), str(folder), str(first), "40"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for first in (1000, 2000)
    ]
    try:
        for program in programs:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
        for program in programs:
            assert program.stdin is not None
            program.stdin.write("\n")
            program.stdin.flush()
        while any(program.poll() is None for program in programs):
            try:
                found = _found(folder)
            except CheckpointException as error:
                # Whoever reads while a checkpoint is replaced may find its files gone, and is told so.
                if isinstance(error, IncompleteCheckpointError):
                    continue
                raise
            assert same(found, small_state(found["step"]))
        results = [program.communicate()[0] for program in programs]
    finally:
        for program in programs:
            program.kill()
            program.communicate()
    assert [program.returncode for program in programs] == [0, 0]
    assert all(int(result.split()[1]) > 0 for result in results), results
    found = _found(folder)
    assert same(found, small_state(found["step"]))
    assert set(os.listdir(folder)) == committed_files(folder)


def test_files_in_torchs_naming_go_only_if_they_were_part_of_the_checkpoint(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "plain", tmp_path / "checkpoint")
    folder = tmp_path / "checkpoint"
    assert data_files(folder) == ["__0_0.distcp"]
    (folder / "__7_7.distcp").write_bytes(b"of a save of torch's that is under way, perhaps")
    hf.save(small_state(1), checkpoint_id=folder)
    assert set(os.listdir(folder)) == {*committed_files(folder), "__7_7.distcp"}

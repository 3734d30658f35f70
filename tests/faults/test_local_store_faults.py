"""Local files under real failures: full disks, limits, planted links, failing calls, kill -9."""

import errno
import fcntl
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.process import file_size_limit
from tests.support.tools import as_nobody, small_disk, traced_calls

from holdfast._io.blocks import BlockSums
from holdfast._io.local import LocalStore
from holdfast._io.page_cache import PageCache
from holdfast.errors import StorageError, TruncatedFileError

pytestmark = pytest.mark.one_core

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_is_leaked() -> Iterator[None]:
    gc.collect()  # what earlier tests have left in cycles may hold files open
    before = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    yield
    assert (set(threading.enumerate()), len(os.listdir("/proc/self/fd"))) == before


@pytest.fixture(params=["bypass", "keep", "auto"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path, page_cache=request.param)


def test_a_file_size_limit_is_raised_with_errno_and_path(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, file_size_limit(20 * MIB):
        _write_mibs(store, 60)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "f"))
    assert caught.value.strerror
    assert store.list() == {}


def test_no_thread_is_alive_when_a_write_raises(store: LocalStore) -> None:
    before = set(threading.enumerate())
    file = store.create("f")
    with file_size_limit(10 * MIB), pytest.raises(OSError):
        file.write(bytes(60 * MIB))
    assert set(threading.enumerate()) == before
    assert store.list() == {}
    with pytest.raises(ValueError, match="aborted"):
        file.finish()


def test_errors_that_are_kept_do_not_hurt_later_writes(store: LocalStore) -> None:
    """Their tracebacks refer to the buffers that were being written, and the buffers are used again."""
    kept = []
    for _ in range(3):
        with file_size_limit(10 * MIB), pytest.raises(OSError) as caught:
            _write_mibs(store, 60)
        kept.append(caught)
    files = [store.create(f"f{n}") for n in range(3)]
    for file in files:
        file.write(bytes(40 * MIB))
    for file in reversed(files):
        file.finish()
    assert store.list() == {f"f{n}": 40 * MIB for n in range(3)}


def test_a_limit_that_the_last_bytes_meet_is_not_lost(store: LocalStore) -> None:
    for limit in (16 * MIB, 16 * MIB + 4096, 16 * MIB + 4096 + 10):
        with file_size_limit(limit), pytest.raises(OSError) as caught, store.create("f") as file:
            file.write(bytes(16 * MIB + 4096 + 11))
        assert caught.value.errno == errno.EFBIG
        assert store.list() == {}


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB of its own."""
    with small_disk(request.param, tmp_path / "disk") as folder:
        yield folder


@pytest.mark.parametrize("page_cache", ["bypass", "keep"])
def test_a_full_disk_is_raised_with_errno_and_path(disk: Path, page_cache: PageCache) -> None:
    store = LocalStore(disk / "checkpoint", page_cache=page_cache)
    store.make()
    store.replace(".metadata", b"old" * 1000)
    with pytest.raises(OSError) as caught:
        _write_mibs(store, 40)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(disk / "checkpoint" / "f"))
    assert store.list() == {".metadata": 3000}
    with store.create("f") as file:
        file.write(bytes(10 * MIB))
    assert store.list()["f"] == 10 * MIB


def test_a_commit_on_a_full_disk_leaves_the_old_file(disk: Path) -> None:
    store = LocalStore(disk)
    store.replace(".metadata", b"old" * 1000)
    with pytest.raises(OSError) as caught:
        store.replace(".metadata", b"\x02" * 30 * MIB)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(disk / ".metadata"))
    assert store.list() == {".metadata": 3000}
    assert store.read(".metadata", max_bytes=3000) == b"old" * 1000


@pytest.mark.parametrize("target", ["victim", "nowhere"])
def test_a_planted_link_is_neither_followed_nor_overwritten(tmp_path: Path, target: str) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    folder = tmp_path / "checkpoint"
    store = LocalStore(folder)
    store.make()
    (folder / "f").symlink_to(tmp_path / target)
    with pytest.raises(StorageError):
        store.create("f")
    if target == "victim":
        with pytest.raises(StorageError, match="link"):
            store.open("f")
    assert (store.list(), store.exists("f")) == ({}, False)
    store.replace("f", b"new")
    assert not (folder / "f").is_symlink()
    (folder / "f").unlink()
    (folder / "f").symlink_to(tmp_path / target)
    store.delete(["f"])
    assert os.listdir(folder) == []
    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert not (tmp_path / "nowhere").exists()


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    store = LocalStore(tmp_path)
    for name in ("pipe", "folder"):
        with pytest.raises(StorageError, match="regular"):
            store.open(name)
        assert not store.exists(name)
    assert store.list() == {}


def test_reading_needs_read_access_only() -> None:
    parent = tempfile.mkdtemp()
    try:
        store = LocalStore(os.path.join(parent, "checkpoint"))
        store.make()
        with store.create("f") as file:
            file.write(b"x" * 9 * MIB)
        os.chmod(store.url, 0o555)
        os.chmod(parent, 0o555)
        with as_nobody():
            assert store.read("f", max_bytes=9 * MIB) == b"x" * 9 * MIB
            assert (store.list(), store.exists("f")) == ({"f": 9 * MIB}, True)
            with pytest.raises(PermissionError):
                store.create("g")
    finally:
        shutil.rmtree(parent)


def test_a_file_cut_short_after_it_was_opened_is_noticed(tmp_path: Path) -> None:
    for store in (LocalStore(tmp_path), LocalStore(tmp_path, page_cache="keep")):
        with store.create("f") as file:
            file.write(bytes(9 * MIB))
        with store.open("f") as reader:
            os.truncate(tmp_path / "f", 5 * MIB + 1)
            with pytest.raises(TruncatedFileError) as caught:
                reader.read_into(0, bytearray(9 * MIB))
        assert caught.value.found == 5 * MIB + 1
        store.delete(["f"])


CALLS = ["open", "pwritev", "fsync", "close", "rename", "mkdir"]


class _CallCounter:
    """Lets the n-th of the calls that change a file system fail, and counts them all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int) -> None:
        self.count = 0
        self.fail_at = fail_at
        self.failed = ""
        for name in CALLS:
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.fail_at:
                self.failed = name
                if name == "close":
                    call(*args)  # a close that fails has closed all the same
                raise OSError(errno.EIO, "the disk is broken", args[0] if name == "open" else None)
            return call(*args, **kwargs)

        return counted


def test_whichever_call_of_a_commit_fails_the_old_file_stays(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    seen = []
    for n in range(1, 100):
        store.replace("f", b"old")
        with pytest.MonkeyPatch.context() as patch:
            calls = _CallCounter(patch, fail_at=n)
            raised = _failure_of(lambda: store.replace("f", b"new"))
        if not calls.failed:
            break
        assert raised == (errno.EIO, str(tmp_path / "f"))
        seen.append(calls.failed)
        renamed = "rename" in seen[:-1]
        assert (bytes(store.read("f", max_bytes=3)), store.list()) == (
            b"new" if renamed else b"old",
            {"f": 3},
        )
    assert seen == ["open", "open", "pwritev", "fsync", "close", "rename", "fsync", "close"]


def test_whichever_call_of_a_write_fails_it_is_raised_and_nothing_stays(store: LocalStore) -> None:
    seen = set()
    for n in range(1, 100):
        with pytest.MonkeyPatch.context() as patch:
            calls = _CallCounter(patch, fail_at=n)
            raised = _failure_of(lambda: _write_mibs(store, 33, b"tail"))
        if not calls.failed:
            break
        seen.add(calls.failed)
        assert raised == (errno.EIO, os.path.join(store.url, "f"))
        assert store.list() == {}
    assert seen == {"open", "pwritev", "fsync", "close"}
    assert store.list() == {"f": 33 * MIB + 4}


def test_a_disk_that_fails_while_a_file_is_read_is_named_also_if_the_file_cannot_be_closed(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.replace("f", b"content")
    with store.open("f") as file:
        close = os.close

        def forgotten(fd: int, *reading: Any) -> None:
            if not reading:
                close(fd)  # a close that fails has closed all the same
            raise OSError(errno.ESTALE, "the server has forgotten the file")

        monkeypatch.setattr(os, "preadv", forgotten)
        monkeypatch.setattr(os, "close", forgotten)
        assert _failure_of(lambda: file.read_into(0, bytearray(7))) == (errno.ESTALE, str(tmp_path / "f"))
    monkeypatch.undo()


def test_a_folder_that_cannot_be_locked_is_named(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError) as caught:
        store.claim(shared=False)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path))


@pytest.mark.parametrize("most", [1, 4096, 100_000, 3 * MIB])
def test_a_system_that_takes_few_bytes_at_a_time_gets_them_all(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    data = os.urandom(100 if most == 1 else 17 * MIB + 7)
    pwritev, preadv = os.pwritev, os.preadv

    def lazy(call: Callable[..., int]) -> Callable[..., int]:
        return lambda fd, views, offset, *flags: call(fd, [memoryview(views[0])[:most]], offset, *flags)

    monkeypatch.setattr(os, "pwritev", lazy(pwritev))
    with store.create("f") as file:
        file.write(data)
    monkeypatch.setattr(os, "preadv", lazy(preadv))
    assert store.read("f", max_bytes=len(data)) == data


def test_a_file_system_that_refuses_direct_writes_late_gets_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev, refused = os.pwritev, []

    def picky(fd: int, views: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "no direct writes here")
        return pwritev(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", picky)
    store, data = LocalStore(tmp_path, page_cache="bypass"), os.urandom(40 * MIB + 1)
    with store.create("f") as file:
        file.write(data)
    assert refused == [0]
    assert store.read("f", max_bytes=len(data)) == data


SAVE = """
    import os, sys
    from holdfast._io.local import LocalStore
    store = LocalStore(sys.argv[1])
    def save(name, fill):
        with store.create(name) as file:
            file.write(fill * (9 << 20))
        store.sync()
        store.replace(".metadata", name.encode())
"""


def test_the_order_of_calls_survives_a_power_cut(tmp_path: Path) -> None:
    """Data, its flush, the folder's, then the metadata, its flush, the rename, and the folder's again."""
    calls = ["mkdir", "pwrite64", "pwritev", "pwritev2", "fsync", "fdatasync"]
    calls += ["rename", "renameat", "renameat2"]
    program = textwrap.dedent(SAVE) + "store.make()\nsave('data', b'x')\n"
    folder = tmp_path / "new" / "checkpoint"
    steps: list[str] = []
    for line in traced_calls(program, str(folder), calls=calls, log=tmp_path / "trace"):
        call = re.match(r"\d+ +(\w+)\((.*)", line)
        if call and str(tmp_path) in line:
            where = (
                "temporary" if ".tmp" in call[2].split(">")[0] else "data" if "/data>" in line else "folder"
            )
            step = "mkdir" if call[1] == "mkdir" else f"{re.sub('v?2?(64)?$|at2?$', '', call[1])} {where}"
            if not steps or steps[-1] != step:
                steps.append(step)
    assert steps == [
        *["mkdir", "fsync folder", "mkdir", "fsync folder"],
        *["pwrite data", "fsync data", "fsync folder"],
        *["pwrite temporary", "fsync temporary", "rename folder", "fsync folder"],
    ]


@pytest.mark.slow
def test_a_kill_at_any_call_leaves_the_old_checkpoint_or_the_new(tmp_path: Path) -> None:
    """A child is killed before, and after, each call that changes the file system, one child for each."""
    program = textwrap.dedent(SAVE) + textwrap.dedent("""
        import json, signal
        CALLS = ["open", "pwritev", "fsync", "close", "rename", "unlink"]

        def die_at(n):
            count = 0
            def counted(call):
                def run(*args, **kwargs):
                    nonlocal count
                    count += 1
                    if count == n:
                        os.kill(os.getpid(), signal.SIGKILL)
                    result = call(*args, **kwargs)
                    count += 1
                    if count == n:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return result
                return run
            for name in CALLS:
                setattr(os, name, counted(getattr(os, name)))

        def state():
            name = store.read(".metadata", max_bytes=100).decode()
            data = store.read(name, max_bytes=9 << 20)
            return name if data == {"old": b"a", "new": b"b"}[name] * (9 << 20) else "a mix"

        outcomes = []
        for n in range(1, 1000):
            store.delete(store.list())
            save("old", b"a")
            child = os.fork()
            if child == 0:
                die_at(n)
                save("new", b"b")
                store.delete(["old"])
                os._exit(0)
            killed = os.waitpid(child, 0)[1] == signal.SIGKILL
            outcomes.append(state())
            if not killed:
                break
        print(json.dumps(outcomes))
    """)
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert len(outcomes) > 30, "most of the calls were not reached"
    commit = outcomes.index("new")
    assert outcomes == ["old"] * commit + ["new"] * (len(outcomes) - commit)
    assert commit > 20


def _write_mibs(store: LocalStore, count: int, end: bytes = b"") -> None:
    with store.create("f") as file:
        for _ in range(count):
            file.write(b"\x01" * MIB, BlockSums())
        file.write(end)


def _failure_of(call: Callable[[], None]) -> tuple[Any, Any] | None:
    try:
        call()
    except OSError as error:
        return error.errno, error.filename
    return None

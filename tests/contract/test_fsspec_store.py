"""The store over fsspec: commits are all or nothing, aborts leave nothing, listings are true."""

import gc
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from tests.contract.fsspec_file_systems import (
    OtherLocalFileSystem,
    RememberingFileSystem,
    UploadingFileSystem,
    forget_memory,
)

import holdfast
from holdfast._io import fsspec_files, fsspec_store
from holdfast._io.fsspec_store import FsspecStore, open_fsspec, open_fsspec_url
from holdfast._io.local import LocalStore
from holdfast._io.store import ByteStore
from holdfast.errors import StorageError, UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    yield
    forget_memory()
    RememberingFileSystem.store.clear()
    UploadingFileSystem.forget()


@pytest.fixture
def uploads() -> FsspecStore:
    store = open_fsspec(UploadingFileSystem(), "s3://bucket/run")
    assert isinstance(store, FsspecStore)
    store.make()
    return store


def content(store: ByteStore) -> dict[str, bytes]:
    return {name: bytes(store.read(name, max_bytes=1 << 30)) for name in store.names()}


def run_python(code: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_put_that_fails_leaves_the_old_file_and_deletes_nothing(
    uploads: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads.replace(".metadata", b"old")
    monkeypatch.setattr(UploadingFileSystem, "fail_at", "put")
    with pytest.raises(ConnectionError):
        uploads.replace(".metadata", b"new")
    assert content(uploads) == {".metadata": b"old"}
    monkeypatch.setattr(UploadingFileSystem, "fail_at", "")
    uploads.replace(".metadata", b"n", b"ew")
    assert content(uploads) == {".metadata": b"new"}
    assert UploadingFileSystem.deleted == []


def test_an_aborted_upload_is_stopped_and_never_appears(uploads: FsspecStore) -> None:
    file = uploads.create("f")
    file.write(bytes(20 << 20))
    file.abort()
    del file
    gc.collect()  # an upload whose stream is closed late must not be completed by that
    assert (UploadingFileSystem.discarded, UploadingFileSystem.completed) == (["f"], [])
    assert uploads.names() == set()


def test_an_upload_that_fails_when_it_is_completed_leaves_nothing(
    uploads: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = uploads.create("f")
    file.write(b"abc")
    monkeypatch.setattr(UploadingFileSystem, "fail_at", "upload")
    with pytest.raises(ConnectionError):
        file.finish()
    assert UploadingFileSystem.discarded == ["f"]
    monkeypatch.setattr(UploadingFileSystem, "fail_at", "")
    gc.collect()
    assert uploads.names() == set()


def test_large_files_are_uploaded_in_few_enough_parts(uploads: FsspecStore) -> None:
    for announced, expected in ((None, 16 << 20), (1 << 40, 9 * (16 << 20))):
        with uploads._create_stream("/bucket/run/f", announced) as stream:
            assert stream.blocksize == expected


@pytest.mark.parametrize("at", ["mv", "open"])
def test_a_process_that_is_killed_during_a_commit_leaves_the_old_file(tmp_path: Path, at: str) -> None:
    store = open_fsspec(OtherLocalFileSystem(), str(tmp_path))
    store.replace(".metadata", b"old")
    code = f"""
        import os, signal
        from tests.contract.fsspec_file_systems import OtherLocalFileSystem
        from holdfast._io.fsspec_store import open_fsspec

        class Killed(OtherLocalFileSystem):
            def {at}(self, *args, **kwargs):
                os.kill(os.getpid(), signal.SIGKILL)

        open_fsspec(Killed(), {str(tmp_path)!r}).replace(".metadata", b"new")
    """
    done = run_python(code)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert store.read(".metadata", max_bytes=10) == b"old"


def test_a_rename_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "no")

    store = open_fsspec(OtherLocalFileSystem(), str(tmp_path))
    store.replace(".metadata", b"old")
    monkeypatch.setattr(OtherLocalFileSystem, "mv", fail)
    with pytest.raises(PermissionError):
        store.replace(".metadata", b"new")
    assert content(store) == {".metadata": b"old"}


def test_what_a_file_system_remembers_neither_hides_nor_invents_files() -> None:
    mine, other = (open_fsspec(RememberingFileSystem(), "remembering://bucket/run") for _ in range(2))
    fs: Any = mine._files.fs  # type: ignore[attr-defined]
    mine.make()
    other.replace("gone", b"1")
    fs.ls("/bucket/run")  # a listing that somebody else left
    other.delete(["gone"])
    other.replace("new", b"22")
    assert (mine.exists("gone"), mine.exists("new")) == (False, True)
    assert mine.read("new", max_bytes=2) == b"22"
    fs.ls("/bucket/run")
    other.replace("newer", b"333")
    other.delete(["new"])
    assert mine.list() == {"newer": 3}
    assert mine.modified_ns("new") is None
    fs.ls("/bucket/run")
    other.replace("newest", b"")
    with pytest.raises(StorageError, match="exists already"):
        mine.create("newest")


def test_a_listing_that_is_remembered_during_a_look_does_not_hide_a_file() -> None:
    class Meanwhile(RememberingFileSystem):
        """Another thread's listing, from before the file was made, ends just before the answer."""

        listings = 1

        def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
            if self.listings:
                self.listings -= 1
                self.dircache["/bucket/run"] = []
            return super().info(path, **kwargs)

    RememberingFileSystem().pipe_file("/bucket/run/f", b"x")
    assert open_fsspec(Meanwhile(), "remembering://bucket/run").exists("f")


def test_a_network_that_fails_is_not_taken_for_a_missing_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    store = open_fsspec_url("memory://run")
    store.replace("f", b"x")
    monkeypatch.setattr(MemoryFileSystem, "info", fail)
    for call in (store.exists, store.open, store.create):
        with pytest.raises(ConnectionError):
            call("f")


def test_metadata_that_is_replaced_while_it_is_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_fsspec_url("memory://run")
    store.replace(".metadata", b"old")
    cat_file, replaced = MemoryFileSystem.cat_file, [b"newer", b"newest"]

    def cat(self: Any, path: str, **kwargs: Any) -> Any:
        data = cat_file(self, path, **kwargs)
        if replaced:
            store.replace(".metadata", replaced.pop(0))
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat)
    assert store.read(".metadata", max_bytes=10) == b"newest"


def test_special_characters_in_a_path_are_no_pattern() -> None:
    store, other = open_fsspec_url("memory://run[1]"), open_fsspec_url("memory://run1")
    for place in (store, other):
        place.replace("f*", b"x")
        place.replace("fa", b"x")
    store.delete(["f*"])
    assert (store.names(), other.names()) == ({"fa"}, {"f*", "fa"})


def test_files_in_folders_below_are_no_files_of_the_place() -> None:
    store = open_fsspec_url("memory://run")
    open_fsspec_url("memory://run/1").replace(".metadata", b"x")
    open_fsspec_url("memory://run/2").replace("f", b"x")
    open_fsspec_url("memory://run/3").replace(".metadata", b"x")
    store.replace("f", b"x")
    assert store.list() == {"f": 1}
    assert store.folders_with([".metadata"]) == (["3", "1"], ["2"])
    with pytest.raises(StorageError, match="is a directory"):
        store.open("1")
    assert open_fsspec_url("memory://run/f").names() == set()  # some list a file as its own folder


def test_a_file_system_that_is_not_known_to_take_threads_is_called_by_one_at_a_time() -> None:
    found_free: list[bool] = []

    class Watching(MemoryFileSystem):  # type: ignore[misc]
        protocol = "watching"

        def look_around(self) -> None:
            lock = fsspec_files._turns[Watching]
            thread = threading.Thread(target=lambda: found_free.append(lock.acquire(blocking=False)))
            thread.start()
            thread.join()

        def cat_file(self, *args: Any, **kwargs: Any) -> Any:
            self.look_around()
            return super().cat_file(*args, **kwargs)

        def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
            stream = super()._open(path, mode, **kwargs)
            stream.flush = self.look_around
            return stream

    store = open_fsspec(Watching(), "memory://run")
    with store.create("f") as file:
        file.write(b"x")
    assert store.read("f", max_bytes=1) == b"x"
    assert found_free == [False, False]


def test_all_files_are_tried_before_a_failed_delete_is_raised(uploads: FsspecStore) -> None:
    def fail_at_f1(path: str) -> None:
        if path.endswith("f1"):
            raise PermissionError(path)
        MemoryFileSystem.rm_file(uploads._raw, path)

    for name in ("f0", "f1", "f2"):
        uploads.replace(name, b"x")
    uploads._raw.rm_file = fail_at_f1
    with pytest.raises(PermissionError):
        uploads.delete(["f0", "f1", "f2"])
    assert uploads.names() == {"f1"}


def test_the_plain_local_file_system_is_a_local_folder(tmp_path: Path) -> None:
    assert isinstance(open_fsspec_url(f"local://{tmp_path}"), LocalStore)
    assert isinstance(open_fsspec(OtherLocalFileSystem(), str(tmp_path)), FsspecStore)


def test_a_store_pickles_but_not_into_a_process_that_has_other_memory(tmp_path: Path) -> None:
    for store in (open_fsspec_url("memory://run"), open_fsspec(OtherLocalFileSystem(), str(tmp_path))):
        store.replace("f", b"x")
        copy = pickle.loads(pickle.dumps(store))
        assert (copy.url, copy.read("f", max_bytes=1)) == (store.url, b"x")
    done = run_python(f"import pickle; print(pickle.loads({pickle.dumps(store)!r}).names())")
    assert (done.stdout.strip(), done.returncode) == ("{'f'}", 0), done.stderr
    done = run_python(f"import pickle; pickle.loads({pickle.dumps(open_fsspec_url('memory://run'))!r})")
    assert "UsageError: memory://run: is in the memory of process" in done.stderr


def test_a_chain_with_a_cache_in_it_is_refused() -> None:
    for url in (
        "simplecache::memory://run",
        "filecache::s3://bucket/run",
        "zip://run::simplecache::memory://a",
    ):
        with pytest.raises(UsageError, match="does not notice that a checkpoint was replaced"):
            open_fsspec_url(url)
    with pytest.raises(UsageError, match="does not notice"):
        open_fsspec(MemoryFileSystem(), "simplecache::memory://run")


class WithoutRanges(MemoryFileSystem):  # type: ignore[misc]
    """What a web server without ranges is: whole files come, whatever is asked for."""

    protocol = "without-ranges"

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> Any:
        return super().cat_file(path, **kwargs)


def test_whole_files_in_the_place_of_ranges_are_cut_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_fsspec(WithoutRanges(), "without-ranges://run")
    store.replace("file", bytes(range(100)))
    found = bytearray(10)
    with store.open("file") as file:
        file.read_into(50, found)
        assert found == bytes(range(50, 60))
        monkeypatch.setattr(fsspec_store, "_REQUEST_NBYTES", 64)
        with pytest.raises(StorageError, match=r"10 bytes at 50 .* 100 came: .*Copy the checkpoint"):
            file.read_into(50, found)


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_is_loaded_and_refuses_to_be_saved_to(tmp_path: Path, kind: str) -> None:
    holdfast.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "step")
    archive = shutil.make_archive(str(tmp_path / "packed"), kind, tmp_path, "step")
    state, url = {"a": torch.zeros(3)}, f"{kind}://step::file://{archive}"
    holdfast.load(state, checkpoint_id=url)
    assert torch.equal(state["a"], torch.ones(3))
    with pytest.raises(StorageError, match=r"file system .* could not be written to: .*copy the checkpoint"):
        holdfast.save(state, checkpoint_id=url)


def test_what_cannot_be_opened_or_reached_is_told_with_its_url() -> None:
    with pytest.raises(UsageError, match="reference://x: fsspec cannot open it"):
        open_fsspec_url("reference://x")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(StorageError, match=f"ftp://127.0.0.1:{port}/x: cannot be reached"):
        open_fsspec_url(f"ftp://127.0.0.1:{port}/x")

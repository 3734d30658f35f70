"""Checkpoints under URLs that fsspec knows: saved, loaded, listed, and shared with stock torch."""

import inspect
import json
import os
import pickle
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint._fsspec_filesystem as stock_fsspec
from fsspec.implementations.memory import MemoryFileSystem
from tests.contract.fsspec_file_systems import (
    OtherLocalFileSystem,
    UploadingFileSystem,
    WebFileSystem,
    forget_memory,
)
from tests.support.stock_torch import HAS_EXTENSIONS, IS_NEWEST, stock_load, stock_save

import holdfast as hf
from holdfast._fsspec_filesystem import FileSystem
from holdfast._io import places
from holdfast._io.fsspec_store import FsspecStore, open_fsspec
from holdfast._io.local import LocalStore
from holdfast._storage.store_writer import StoreWriter
from holdfast.cli import main
from holdfast.errors import CheckpointException, CheckpointNotFoundError, UsageError, WrongFolderError
from holdfast.state_dict_saver import AsyncCheckpointerType

# Its types say that it exports nothing.
torchs: Any = stock_fsspec

URL = "memory://bucket/run/1"


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test runs in an empty folder, and leaves nothing there."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield
    forget_memory()
    UploadingFileSystem.forget()
    assert os.listdir(folder) == []


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((300, 200), value), "small": {"b": torch.full((3,), value)}, "step": int(value)}


def check(loaded: dict[str, Any], value: float) -> None:
    assert torch.equal(loaded["w"], state(value)["w"])
    assert (loaded["small"]["b"].tolist(), loaded["step"]) == ([value] * 3, int(value))


def load(value: float, **place: Any) -> None:
    loaded = state(-1.0)
    hf.load(loaded, **place)
    check(loaded, value)


def test_a_url_that_fsspec_knows_is_saved_to_and_loaded_from() -> None:
    for value in (1.0, 2.0):
        hf.save(state(value), checkpoint_id=URL)
        load(value, checkpoint_id=URL)
    hf.save(state(3.0), storage_writer=hf.FileSystemWriter(URL))
    load(3.0, storage_reader=hf.FileSystemReader(URL))
    hf.async_save(state(4.0), checkpoint_id=URL).result()  # type: ignore[union-attr]
    load(4.0, checkpoint_id=Path(URL))
    names = sorted(os.path.basename(path) for path in MemoryFileSystem().ls("/bucket/run/1", detail=False))
    assert [name.rpartition(".")[2] for name in names] == ["metadata", "distcp"]
    with pytest.raises(CheckpointNotFoundError, match="memory://bucket/none"):
        load(0.0, checkpoint_id="memory://bucket/none")
    with pytest.raises(WrongFolderError, match="memory://bucket/run/1"):
        load(0.0, checkpoint_id="memory://bucket/run")


@pytest.mark.parametrize("end", ["", "/", "/.metadata"])
def test_the_commands_take_such_a_url(end: str, capsys: pytest.CaptureFixture[str]) -> None:
    hf.save(state(1.0), checkpoint_id=URL)
    for command in ("ls", "show", "verify"):
        assert main([command, URL + end, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["path"] == URL + end


def test_writers_and_readers_have_the_arguments_of_torch() -> None:
    for ours, theirs in ((hf.FsspecWriter, torchs.FsspecWriter), (hf.FsspecReader, torchs.FsspecReader)):
        mine, stock = ([(p.name, p.kind) for p in _parameters(kind)] for kind in (ours, theirs))
        assert stock == [parameter for parameter in mine if parameter in stock]
        more = [p for p in _parameters(ours) if (p.name, p.kind) not in stock]
        assert all(p.kind is p.KEYWORD_ONLY for p in more) or not IS_NEWEST
    methods = [name for name in vars(torchs.FileSystem) if not name.startswith("_")]
    assert methods == [name for name in methods if callable(getattr(FileSystem, name))]


def _parameters(kind: type) -> list[inspect.Parameter]:
    return list(inspect.signature(kind).parameters.values())


def test_storages_keep_their_options_when_they_are_moved(tmp_path: Path) -> None:
    writer = hf.FsspecWriter(f"file://{tmp_path}/1", auto_mkdir=True)
    reader = hf.FsspecReader(f"file://{tmp_path}/1", auto_mkdir=True)
    hf.save(state(1.0), checkpoint_id=f"file://{tmp_path}/2", storage_writer=writer)
    load(1.0, checkpoint_id=f"file://{tmp_path}/2", storage_reader=reader)
    assert (writer.fs.fs.auto_mkdir, reader.fs.fs.auto_mkdir) == (True, True)
    assert os.path.exists(tmp_path / "2" / ".metadata")


def test_storages_pickle() -> None:
    writer = pickle.loads(pickle.dumps(hf.FsspecWriter(URL)))
    hf.save(state(1.0), storage_writer=pickle.loads(pickle.dumps(writer)))
    load(1.0, storage_reader=pickle.loads(pickle.dumps(hf.FsspecReader(URL))))


@pytest.mark.slow
def test_another_process_writes_where_it_can_and_refuses_what_only_this_one_sees(tmp_path: Path) -> None:
    def save(writer: hf.FsspecWriter) -> None:
        process = AsyncCheckpointerType.PROCESS
        future: Any = hf.async_save(state(1.0), storage_writer=writer, async_checkpointer_type=process)
        future.result()

    save(hf.FsspecWriter(f"file://{tmp_path}/checkpoint"))
    load(1.0, checkpoint_id=tmp_path / "checkpoint")
    with pytest.raises(Exception, match="is in the memory of process"):
        save(hf.FsspecWriter(URL))
    with pytest.raises(CheckpointNotFoundError):
        load(1.0, checkpoint_id=URL)


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning")
@pytest.mark.parametrize("kind", ["memory", "local"])
def test_checkpoints_are_shared_with_stock_torch_both_ways(kind: str, tmp_path: Path) -> None:
    ours, theirs = (f"memory://{n}" if kind == "memory" else str(tmp_path / str(n)) for n in (1, 2))
    hf.save(state(1.0), storage_writer=hf.FsspecWriter(ours))
    loaded = state(-1.0)
    stock_load(loaded, storage_reader=torchs.FsspecReader(ours))
    check(loaded, 1.0)
    if kind == "memory" and not HAS_EXTENSIONS:
        pytest.skip("the writer of this torch needs files of the system")
    stock_save(state(2.0), storage_writer=torchs.FsspecWriter(theirs))
    load(2.0, storage_reader=hf.FsspecReader(theirs))
    # torch's storages are plugins of ours, too.
    hf.save(state(3.0), storage_writer=torchs.FsspecWriter(theirs))
    load(3.0, storage_reader=torchs.FsspecReader(theirs))


def test_torchs_file_system_is_read_and_written_by_requests_of_ranges() -> None:
    class Subclass(torchs.FileSystem):  # type: ignore[misc]
        """May mean something else by writing, and so is used by its streams."""

    for kind, expected in ((torchs.FileSystem, True), (Subclass, False)):
        writer, reader = hf.FileSystemWriter(URL), hf.FileSystemReader(URL)
        storage: Any
        for storage in (writer, reader):
            storage.fs = kind()
            storage.path = storage.fs.init_path(URL)
        assert isinstance(writer.store, FsspecStore) is expected
        hf.save(state(float(expected)), storage_writer=writer)
        load(float(expected), storage_reader=reader)


@pytest.mark.parametrize("at", ["put", "upload"])
def test_a_save_that_fails_leaves_the_old_checkpoint(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_fsspec(UploadingFileSystem(), "s3://bucket/run")
    hf.save(state(1.0), storage_writer=StoreWriter(store))
    old = UploadingFileSystem.store.copy()
    fs: Any = UploadingFileSystem
    put = fs.pipe_file

    def fail(self: Any, path: str, value: bytes) -> None:
        if path.endswith(".metadata"):
            raise ConnectionError("the put failed")
        put(self, path, value)

    if at == "put":
        monkeypatch.setattr(fs, "pipe_file", fail)  # leases go on being written
    else:
        monkeypatch.setattr(fs, "fail_at", "upload")
    with pytest.raises(ConnectionError, match="failed"):
        hf.save(state(2.0), storage_writer=StoreWriter(store))
    assert {*fs.store} == {*old}
    assert all(fs.store[path] is file for path, file in old.items())


def test_the_file_system_removes_what_was_not_written_to_its_end(tmp_path: Path) -> None:
    for place in (str(tmp_path), "memory://place"):
        fs = FileSystem()
        path = fs.init_path(place)
        fs.mkdir(path)
        with pytest.raises(TypeError), fs.create_stream(fs.concat_path(path, "a"), "wb") as f:
            f.write("text")
        assert not fs.exists(fs.concat_path(path, "a"))
        with fs.create_stream(fs.concat_path(path, "a"), "wb") as f:
            f.write(b"aaa")
        with (
            pytest.raises(RuntimeError, match="stop"),
            fs.create_stream(fs.concat_path(path, "a"), "rb") as f,
        ):
            raise RuntimeError("stop")
        fs.rename(fs.concat_path(path, "a"), fs.concat_path(path, "b"))
        assert [os.path.basename(name) for name in fs.ls(path) if not name.endswith("here")] == ["b"]
        fs.rm_file(fs.concat_path(path, "b"))
        assert not fs.exists(fs.concat_path(path, "b"))
    with pytest.raises(UsageError, match="init_path first"):
        FileSystem().exists("x")


def test_which_places_fsspec_serves(tmp_path: Path) -> None:
    for kind in (FileSystem, hf.FsspecWriter, hf.FsspecReader):
        assert kind.validate_checkpoint_id(URL)
        assert kind.validate_checkpoint_id(str(tmp_path))
        assert not kind.validate_checkpoint_id(tmp_path)
        assert not kind.validate_checkpoint_id("nowhere://a")
        assert not kind.validate_checkpoint_id("simplecache::memory://a")


def test_without_fsspec_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "fsspec"]:
        monkeypatch.setitem(sys.modules, name, None)
    for call in (
        lambda: hf.save(state(1.0), checkpoint_id=URL),
        lambda: hf.load(state(1.0), checkpoint_id=URL),
        lambda: hf.FsspecWriter(URL),
        lambda: hf.FsspecReader(URL),
    ):
        with pytest.raises(UsageError, match=r"pip install holdfast\[fsspec\]") as caught:
            call()
        assert caught.value.path == URL
    assert not hf.FsspecReader.validate_checkpoint_id(URL)


def test_a_package_that_fsspec_lacks_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    fsspec.register_implementation(
        "lacking", "no_such_package.Files", errtxt="Install no_such_package", clobber=True
    )
    with pytest.raises(UsageError, match=r"lacking://run.*Install no_such_package"):
        hf.save(state(1.0), checkpoint_id="lacking://run")
    assert main(["ls", "lacking://run"]) == 2
    assert "no_such_package" in capsys.readouterr().err


def test_a_chain_leads_to_a_checkpoint_in_an_archive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf.save(state(1.0), checkpoint_id=tmp_path / "run")
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        for file in (tmp_path / "run").iterdir():
            archive.write(file, f"inside/{file.name}")
    url = f"zip://inside::file://{tmp_path}/run.zip"
    load(1.0, checkpoint_id=url)
    load(1.0, storage_reader=hf.FsspecReader(url))
    assert main(["ls", url]) == 0
    assert "[300, 200]" in capsys.readouterr().out


def test_a_web_server_that_shows_no_folders_is_read_by_the_usual_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fsspec.register_implementation("web", WebFileSystem, clobber=True)
    hf.save(state(1.0), checkpoint_id=tmp_path / "run")
    weights = {"w": state(1.0)["w"]}
    hf.save(weights, storage_writer=hf.HuggingFaceStorageWriter(str(tmp_path / "model")))
    load(1.0, checkpoint_id=f"web://{tmp_path}/run")
    for place in ("run", "model"):
        with hf.open(f"web://{tmp_path}/{place}") as view:
            assert torch.equal(view["w"][...], weights["w"])
        for command in ("ls", "show", "verify"):
            assert main([command, f"web://{tmp_path}/{place}"]) == 0
    loaded = {"w": torch.zeros_like(weights["w"])}
    hf.load(loaded, storage_reader=hf.HuggingFaceStorageReader(f"web://{tmp_path}/model"))
    assert torch.equal(loaded["w"], weights["w"])
    (tmp_path / "run" / next(n for n in os.listdir(tmp_path / "run") if n.endswith(".distcp"))).unlink()
    assert main(["verify", f"web://{tmp_path}/run"]) == 1
    with pytest.raises(CheckpointNotFoundError):
        hf.open(f"web://{tmp_path}/nothing")
    with pytest.raises(CheckpointException, match="cannot rename files"):
        hf.save(state(1.0), checkpoint_id=f"web://{tmp_path}/new")


def test_a_chain_with_a_cache_is_refused_and_a_folder_may_have_colons(tmp_path: Path) -> None:
    for call in (hf.save, hf.load):
        with pytest.raises(UsageError, match="simplecache::memory://run: a cache of files"):
            call(state(1.0), checkpoint_id="simplecache::memory://run")
    assert isinstance(places.open_place(tmp_path / "a::b"), LocalStore)
    assert isinstance(places.open_place("a::b"), LocalStore)


def test_a_url_with_an_empty_host_stays_what_it_is(tmp_path: Path) -> None:
    fsspec.register_implementation("other", OtherLocalFileSystem, clobber=True)
    hf.save(state(1.0), checkpoint_id=f"other://{tmp_path}/run")
    load(1.0, checkpoint_id=tmp_path / "run")
    store = places.open_place(f"other://{tmp_path}/run")
    assert (store.url, type(store)) == (f"other://{tmp_path}/run", FsspecStore)

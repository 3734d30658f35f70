"""Every store that comes with Holdfast passes the suite that its authors ship for others."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from tests.contract.fsspec_file_systems import (
    OtherLocalFileSystem,
    RefusingFileSystem,
    SilentFileSystem,
    forget_memory,
)
from tests.contract.memory_store import MemoryStore
from tests.contract.stream_file_systems import DiskFileSystem, ListedMemoryFileSystem

from holdfast._io.fsspec_store import FsspecStore, open_fsspec, open_fsspec_url
from holdfast._io.local import LocalStore
from holdfast._io.local_reader import LocalReader
from holdfast._io.store import ByteStore
from holdfast._io.stream_store import StreamStore
from holdfast.testing.store_contract import StoreContract


class TestLocalStore(StoreContract):
    def make_store(self, tmp_path: Path) -> ByteStore:
        return LocalStore(tmp_path / "checkpoint")


class _ColdStore(LocalStore):
    def open(self, name: str) -> LocalReader:
        reader = super().open(name)
        os.posix_fadvise(reader._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return reader


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no posix_fadvise")
@pytest.mark.slow
@pytest.mark.one_core
class TestLocalStoreWithColdFiles(StoreContract):
    def make_store(self, tmp_path: Path) -> ByteStore:
        return _ColdStore(tmp_path / "checkpoint")


@pytest.mark.slow
@pytest.mark.one_core
class TestLocalStoreThroughThePageCache(StoreContract):
    def make_store(self, tmp_path: Path) -> ByteStore:
        return LocalStore(tmp_path / "checkpoint", page_cache="keep")


@pytest.mark.slow
@pytest.mark.one_core
class TestLocalStoreNotDurable(StoreContract):
    durable = False

    def make_store(self, tmp_path: Path) -> ByteStore:
        return LocalStore(tmp_path / "checkpoint")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/shm")
@pytest.mark.slow
@pytest.mark.one_core
class TestLocalStoreInMemory(StoreContract):
    """tmpfs cannot say what is cached, and refuses O_DIRECT on older kernels."""

    @pytest.fixture(autouse=True)
    def memory(self, tmp_path: Path) -> Iterator[None]:
        yield
        shutil.rmtree(self.folder(tmp_path), ignore_errors=True)

    def make_store(self, tmp_path: Path) -> ByteStore:
        return LocalStore(self.folder(tmp_path))

    def folder(self, tmp_path: Path) -> Path:
        return Path("/dev/shm") / "-".join(["holdfast", *tmp_path.parts[-3:]])


class TestMemoryStore(StoreContract):
    def make_store(self, tmp_path: Path) -> ByteStore:
        return MemoryStore(f"memory:{tmp_path}")


class TestStreamsInMemory(StoreContract):
    def make_store(self, tmp_path: Path) -> ByteStore:
        return StreamStore(ListedMemoryFileSystem(), f"mem:/{tmp_path}")


@pytest.mark.slow
@pytest.mark.one_core
class TestStreamsOnDisk(StoreContract):
    def make_store(self, tmp_path: Path) -> ByteStore:
        return StreamStore(DiskFileSystem(), tmp_path / "checkpoint")


class TestFsspecInMemory(StoreContract):
    @pytest.fixture(autouse=True)
    def memory(self) -> Iterator[None]:
        yield
        forget_memory()

    def make_store(self, tmp_path: Path) -> ByteStore:
        return open_fsspec_url(f"memory:/{tmp_path}")


class TestFsspecLocal(StoreContract):
    def make_store(self, tmp_path: Path) -> ByteStore:
        return open_fsspec(LocalFileSystem(), f"file://{tmp_path}/checkpoint")


class TestFsspecWithRename(StoreContract):
    """What fsspec reaches by folders and renames, as on a server."""

    kind: type[OtherLocalFileSystem] = OtherLocalFileSystem

    def make_store(self, tmp_path: Path) -> ByteStore:
        store = open_fsspec(self.kind(), f"{tmp_path}/checkpoint")
        assert isinstance(store, FsspecStore)
        return store


@pytest.mark.slow
@pytest.mark.one_core
class TestFsspecWhoseRenameRefusesToReplace(TestFsspecWithRename):
    kind = RefusingFileSystem


@pytest.mark.slow
@pytest.mark.one_core
class TestFsspecWhoseRenameDoesNothingInSilence(TestFsspecWithRename):
    kind = SilentFileSystem

"""The shipped suites, on S3."""

import itertools
from pathlib import Path

import pytest
from tests.support.s3_server import BUCKET, S3Server

import holdfast
from holdfast._io.places import open_place
from holdfast._io.store import ByteStore
from holdfast.testing import StorageContract
from holdfast.testing.store_contract import StoreContract

pytestmark = [pytest.mark.slow, pytest.mark.one_core]

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def server(s3: S3Server) -> S3Server:
    """All tests of this file use it."""
    return s3


class TestS3Store(StoreContract):
    refuses_taken_names = False

    def make_store(self, tmp_path: Path) -> ByteStore:
        return open_place(f"s3://{BUCKET}/store-{next(_numbers)}")


def _url(place: Path) -> str:
    return f"s3://{BUCKET}/{'/'.join(place.parts[-3:])}"


class TestS3Storage(StorageContract):
    def make_writer(self, place: Path) -> holdfast.StorageWriter:
        return holdfast.ObjectStoreWriter(_url(place))

    def make_reader(self, place: Path) -> holdfast.StorageReader:
        return holdfast.ObjectStoreReader(_url(place))

    def stored_files(self, place: Path) -> dict[str, bytes]:
        store = open_place(_url(place))
        return {name: bytes(store.read(name, max_bytes=1 << 30)) for name in store.names()}

    def replace_stored_file(self, place: Path, name: str, data: bytes | None) -> None:
        store = open_place(_url(place))
        if data is None:
            store.delete([name])
        else:
            store.replace(name, data)


class TestS3StorageWithSpreadNames(TestS3Storage):
    def make_writer(self, place: Path) -> holdfast.StorageWriter:
        return holdfast.ObjectStoreWriter(_url(place), thread_count=3, spread_names=True)

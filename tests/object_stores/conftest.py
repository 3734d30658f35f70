"""A real S3 server for the tests in this folder, and a new place in its bucket for each test."""

import itertools
from collections.abc import Iterator

import pytest
from tests.support.s3_proxy import S3Proxy
from tests.support.s3_server import BUCKET, S3Server

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """The server, for tests that do not end it."""
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server; the environment of the test names it."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def place(s3: S3Server) -> str:
    """The URL of a place that no other test uses."""
    return f"s3://{BUCKET}/run-{next(_numbers)}/step-1"


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    """What stands between the test and the server, and can be told to fail."""
    with S3Proxy(s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy
    assert proxy.errors == []

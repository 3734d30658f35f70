"""An endpoint where nobody listens is told of within seconds; one that was there before keeps its time."""

import socket
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import holdfast
from holdfast._io import endpoint_probe
from holdfast._io.endpoint_probe import expect_listener
from holdfast.errors import StorageError


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_probe, "_asked", set())
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Of a port that is taken, and on which nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What is done in the next pauses between attempts, which take no time."""
    todo: list[Callable[[], object]] = []
    monkeypatch.setattr("holdfast._io.endpoint_probe.time.sleep", lambda _: todo.pop(0)() if todo else None)
    return todo


@pytest.mark.slow
def test_a_save_and_a_load_say_within_seconds_that_nobody_listens(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    for act in (holdfast.save, holdfast.load):
        begin = time.monotonic()
        with pytest.raises(StorageError, match=f"s3://bucket/run.*{endpoint}: Connection refused"):
            act({"a": torch.zeros(3)}, checkpoint_id="s3://bucket/run")
        assert time.monotonic() - begin < 15  # obstore alone takes 20 to 50


@pytest.mark.usefixtures("pauses")
def test_a_host_that_nobody_knows_is_named() -> None:
    with pytest.raises(StorageError, match=r"run: nobody listens at https://no-such-host\.invalid:"):
        expect_listener("https://no-such-host.invalid", path="run")


def test_a_server_may_come_up_late_and_go_away_again(pauses: list[Callable[[], object]]) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        pauses.extend([lambda: None, server.listen])
        expect_listener(endpoint, path="run")
        assert pauses == []
    expect_listener(endpoint, path="run")  # it was there: requests are tried again


def test_an_endpoint_behind_a_proxy_is_left_to_the_proxy(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    expect_listener(endpoint, path="run")

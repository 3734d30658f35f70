"""Saves in the background to an object store, in a thread and in the writer process."""

import concurrent.futures
import multiprocessing
import os
import threading
from typing import Any

import pytest
from tests.object_stores.states import load, save, state_of, store_of
from tests.support.s3_faults import Answer, S3Request
from tests.support.s3_proxy import S3Proxy
from tests.support.s3_server import S3Server

import holdfast
from holdfast.errors import StorageError
from holdfast.state_dict_saver import AsyncCheckpointerType

pytestmark = [pytest.mark.slow, pytest.mark.one_core]

LARGE = 40 << 20
KINDS = [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS]


def _begin(place: str, value: float, kind: AsyncCheckpointerType, nbytes: int) -> Any:
    return holdfast.async_save(state_of(value, nbytes), checkpoint_id=place, async_checkpointer_type=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_in_the_background_is_whole(s3: S3Server, place: str, kind: AsyncCheckpointerType) -> None:
    for value in (1.0, 2.0):
        _begin(place, value, kind, LARGE).result()
        assert load(place, LARGE) == value
    assert len(store_of(place, s3).names()) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_progress_counts_what_the_store_has_confirmed(
    proxy: S3Proxy, place: str, kind: AsyncCheckpointerType
) -> None:
    nbytes = 160 << 20  # more than the buffers of an upload
    gate = proxy.hold(method="PUT", query="partNumber")
    future = _begin(place, 1.0, kind, nbytes)
    try:
        assert gate.reached.wait(30)
        assert future.progress().nbytes_done == 0
    finally:
        gate.open()
    future.result()
    assert future.progress().nbytes_done == future.progress().nbytes_total >= nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_in_the_background_is_raised_and_keeps_the_old_checkpoint(
    proxy: S3Proxy, s3: S3Server, place: str, kind: AsyncCheckpointerType
) -> None:
    save(place, 1.0)
    proxy.on(Answer(400), method="PUT", query="partNumber", after=1)
    with pytest.raises(StorageError, match="distcp"):
        _begin(place, 2.0, kind, LARGE).result()
    proxy.rules.clear()
    assert load(place) == 1.0
    assert len(store_of(place, s3).names()) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_in_the_background_can_be_cancelled(
    proxy: S3Proxy, s3: S3Server, place: str, kind: AsyncCheckpointerType
) -> None:
    save(place, 1.0)
    gate = proxy.hold(method="PUT", query="partNumber")
    future = _begin(place, 2.0, kind, 160 << 20)
    assert gate.reached.wait(30)
    assert future.cancel()
    gate.open()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    assert load(place) == 1.0
    assert len(store_of(place, s3).names()) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancelled_save_is_cancelled_also_if_the_server_refuses_what_was_under_way(
    proxy: S3Proxy, s3: S3Server, place: str, kind: AsyncCheckpointerType
) -> None:
    """Cancelling is what one does if the server is ill. It is no failure that is told of later."""
    save(place, 1.0)
    all_sent, cancelled = threading.Event(), threading.Event()

    def refuse(request: S3Request) -> Answer | None:
        if "partNumber" not in request.query:
            return None
        if request.query["partNumber"] == "6":
            all_sent.set()  # the save has nothing more to do but to wait
        cancelled.wait()
        return Answer(403)

    proxy.rules.append(refuse)
    future = _begin(place, 2.0, kind, LARGE)
    assert all_sent.wait(30)
    assert future.cancel()
    cancelled.set()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    assert load(place) == 1.0
    assert len(store_of(place, s3).names()) == 2


def _load_in_a_child(place: str, pipe: Any) -> None:
    try:
        pipe.send(load(place))
    except StorageError as error:
        pipe.send(str(error))
    os._exit(0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_forked_child_is_told_to_be_spawned(s3: S3Server, place: str, method: str) -> None:
    """obstore would hang in it."""
    save(place, 4.0)
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=_load_in_a_child, args=(place, theirs))
    child.start()
    try:
        assert ours.poll(60)
        answer = ours.recv()
    finally:
        child.kill()
        child.join()
    assert answer == 4.0 if method == "spawn" else "spawn" in answer

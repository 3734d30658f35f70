"""The commit on an object store: whatever the answer to the put, the save knows whether it took place."""

from typing import Any

import pytest
from tests.object_stores.states import ONCE, load, rival_for, save, store_of
from tests.support.s3_faults import (
    Answer,
    ApplyThenAnswer,
    ApplyThenDrop,
    DropBefore,
    DropMidRequest,
    Fault,
    S3Request,
    Stall,
)
from tests.support.s3_proxy import S3Proxy
from tests.support.s3_server import S3Server

from holdfast.errors import AccessDeniedError, CheckpointExistsError, StorageError

pytestmark = [pytest.mark.slow, pytest.mark.one_core]

METADATA = "/.metadata"

FAULTS: dict[str, tuple[Fault, int]] = {
    "409, not applied": (Answer(409), 1),
    "409 twice, not applied": (Answer(409), 2),
    "applied, then 503": (ApplyThenAnswer(503), 1),
    "applied, then 500": (ApplyThenAnswer(500), 1),
    "applied, then the connection is dropped": (ApplyThenDrop(), 1),
    "applied, then dropped, four times": (ApplyThenDrop(), 4),
    "dropped before": (DropBefore(), 1),
    "dropped in the middle of the body": (DropMidRequest(100), 1),
    "stalled": (Stall(), 1),
    "429 twice": (Answer(429), 2),
    "503 twice": (Answer(503), 2),
}


def _with_rival(proxy: S3Proxy, act: Any) -> None:
    """Let the rival act once, directly before the first put of the metadata, whatever fault comes then."""
    done: list[bool] = []

    def rule(request: S3Request) -> None:
        if not done and request.method == "PUT" and request.key.endswith(METADATA):
            done.append(True)
            act(request)

    proxy.rules.insert(0, rule)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", FAULTS)
def test_a_commit_without_a_rival_succeeds(
    proxy: S3Proxy, s3: S3Server, place: str, name: str, overwrite: bool
) -> None:
    if overwrite:
        save(place, 1.0)
    fault, times = FAULTS[name]
    rule = proxy.on(fault, method="PUT", key=METADATA, times=times)
    save(place, 2.0, overwrite=overwrite, client_options=ONCE)
    assert rule.count >= 1
    assert load(place) == 2.0
    assert len(store_of(place, s3).names()) == 2


@pytest.mark.parametrize("name", FAULTS)
def test_a_commit_that_must_not_overwrite_loses_against_a_rival(
    proxy: S3Proxy, s3: S3Server, place: str, name: str
) -> None:
    fault, times = FAULTS[name]
    act = rival_for(place, 7.0, s3)
    _with_rival(proxy, act)
    rule = proxy.on(fault, method="PUT", key=METADATA, times=times)
    with pytest.raises(CheckpointExistsError, match="overwrite=False"):
        save(place, 2.0, overwrite=False, client_options=ONCE)
    assert rule.count >= 1
    assert load(place) == 7.0
    assert len(store_of(place, s3).names()) == 2, "the loser's data are gone"


@pytest.mark.parametrize("name", FAULTS)
def test_an_overwriting_commit_replaces_a_rival_whole(
    proxy: S3Proxy, s3: S3Server, place: str, name: str
) -> None:
    fault, times = FAULTS[name]
    _with_rival(proxy, rival_for(place, 7.0, s3))
    proxy.on(fault, method="PUT", key=METADATA, times=times)
    save(place, 2.0, client_options=ONCE)
    assert load(place) == 2.0


def test_a_server_that_never_answers_the_commit_leaves_the_old_checkpoint(
    proxy: S3Proxy, s3: S3Server, place: str
) -> None:
    save(place, 1.0)
    proxy.on(Answer(503), method="PUT", key=METADATA)
    with pytest.raises(StorageError, match=r"\.metadata.*503"):
        save(place, 2.0, retry={"max_retries": 1})
    proxy.rules.clear()
    assert load(place) == 1.0
    assert len(store_of(place, s3).names()) == 2


def test_a_commit_of_unknown_outcome_keeps_its_data(proxy: S3Proxy, s3: S3Server, place: str) -> None:
    """The put was applied, and nothing can be read back: the save raises, and the new checkpoint is there."""
    save(place, 1.0)
    proxy.on(ApplyThenDrop(), method="PUT", key=METADATA)
    proxy.on(DropBefore(), method="GET", key=METADATA, after=1)  # the first look is for what is replaced
    with pytest.raises(StorageError, match="not known"):
        save(place, 2.0, retry={"max_retries": 1})
    proxy.rules.clear()
    assert load(place) == 2.0
    save(place, 3.0)
    assert load(place) == 3.0
    assert len(store_of(place, s3).names()) == 2


def test_the_right_to_list_is_not_needed(proxy: S3Proxy, s3: S3Server, place: str) -> None:
    """Those who may not list are refused, also if they ask about what does not exist."""
    proxy.on(Answer(403), method="GET", query="list-type")
    absent = proxy.on(Answer(403), method="HEAD", key=METADATA)
    save(place, 1.0, overwrite=False)
    assert load(place) == 1.0
    with pytest.raises(CheckpointExistsError):
        save(place, 2.0, overwrite=False)
    save(place, 3.0)
    assert load(place) == 3.0
    assert len(store_of(place, s3).names()) == 2
    assert absent.count


def test_the_right_to_delete_is_not_needed(
    proxy: S3Proxy, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What would have been removed stays, the leases of the saves too."""
    proxy.on(Answer(403), method="POST", query="delete")
    for value in (1.0, 2.0, 3.0):
        save(place, value)
        assert load(place) == value
    assert "without the right to delete" in caplog.text


def test_a_first_load_without_the_right_to_list_is_not_a_first_start(proxy: S3Proxy, place: str) -> None:
    for method in ("GET", "HEAD"):
        proxy.on(Answer(403), method=method)
    with pytest.raises(AccessDeniedError, match="no such object"):
        load(place)

"""Requests that fail, stall, are cut or changed: right values, or an error that names the object."""

import re
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.object_stores.states import ONCE, load, save, store_of
from tests.support.ranks import run_ranks
from tests.support.s3_faults import (
    Answer,
    ApplyThenAnswer,
    ApplyThenDrop,
    CutAnswer,
    DropBefore,
    Fault,
    FlipAnswer,
    FlipRequest,
    S3Request,
    Stall,
    Trickle,
)
from tests.support.s3_proxy import S3Proxy
from tests.support.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast._io.bucket_client import BucketAccess, S3Keys
from holdfast._io.s3_uploads import S3Uploads
from holdfast.errors import AccessDeniedError, IntegrityError, StorageError
from holdfast.records import TransferRecord, add_listener

pytestmark = [pytest.mark.slow, pytest.mark.one_core]

DATA = re.compile(r"\.distcp$")
LARGE = 20 << 20
STORM: list[Fault] = [
    Answer(503),
    Answer(500),
    Answer(429),
    DropBefore(),
    ApplyThenDrop(),
    ApplyThenAnswer(503),
    CutAnswer(1000),
]
QUICK = {"max_retries": 20, "backoff": {"init_backoff": timedelta(milliseconds=10), "base": 2.0}}


def _unfinished(place: str, server: S3Server) -> list[str]:
    access = BucketAccess(place, {"endpoint": server.endpoint})
    keys = access.s3_keys()
    assert isinstance(keys, S3Keys)
    return [upload.key for upload in S3Uploads(access, keys).find(f"{access.prefix}/")]


@pytest.mark.parametrize("fault", STORM, ids=lambda fault: type(fault).__name__ + str(vars(fault)))
def test_three_of_ten_requests_fail_and_values_are_right(
    proxy: S3Proxy, s3: S3Server, place: str, fault: Fault
) -> None:
    save(place, 1.0, nbytes=LARGE)
    rule = proxy.on(fault, share=0.3)
    save(place, 2.0, nbytes=LARGE, client_options=ONCE)
    assert load(place, nbytes=LARGE, client_options=ONCE) == 2.0
    assert rule.count > 0
    assert len(store_of(place, s3).names()) == 2
    assert _unfinished(place, s3) == []


@pytest.mark.parametrize("fault", [Answer(403), Answer(400)])
def test_an_upload_that_is_refused_is_named_and_leaves_the_old_checkpoint(
    proxy: S3Proxy, s3: S3Server, place: str, fault: Fault
) -> None:
    save(place, 1.0)
    proxy.on(fault, method="PUT", key=DATA, after=1)
    with pytest.raises(StorageError, match=r"(?s)distcp.*PUT http.*while writing a") as caught:
        save(place, 2.0, nbytes=LARGE)
    assert caught.value.__cause__ is not None
    proxy.rules.clear()
    assert load(place) == 1.0
    assert len(store_of(place, s3).names()) == 2
    assert _unfinished(place, s3) == []


def test_an_upload_that_stalls_is_sent_again(proxy: S3Proxy, place: str) -> None:
    rule = proxy.on(Stall(), method="PUT", key=DATA, times=1)
    save(place, 2.0, nbytes=LARGE, client_options=ONCE)
    assert rule.count == 1
    assert load(place, nbytes=LARGE) == 2.0


def test_a_slow_link_is_not_a_failure(proxy: S3Proxy, place: str) -> None:
    proxy.on(Trickle(8 << 20), key=DATA)
    save(place, 2.0, nbytes=LARGE, client_options=ONCE)
    assert load(place, nbytes=LARGE, client_options=ONCE) == 2.0


@pytest.mark.parametrize("options", [{}, {"checksum_algorithm": "CRC64NVME", "unsigned_payload": True}])
@pytest.mark.parametrize("nbytes", [4096, LARGE])
def test_bytes_that_change_on_their_way_up_are_refused_by_the_server(
    proxy: S3Proxy, s3: S3Server, place: str, nbytes: int, options: dict[str, Any]
) -> None:
    save(place, 1.0)
    proxy.on(FlipRequest(1000), method="PUT", key=DATA)
    with pytest.raises(StorageError, match="distcp"):
        save(place, 2.0, nbytes=nbytes, options=options)
    proxy.rules.clear()
    assert load(place) == 1.0
    assert len(store_of(place, s3).names()) == 2


def test_bytes_that_change_on_their_way_down_are_asked_for_again_and_counted(
    proxy: S3Proxy, place: str
) -> None:
    save(place, 2.0, nbytes=LARGE)
    changed = list[str]()

    def rule(request: S3Request) -> Fault | None:
        first, _, last = request.headers.get("range", "").removeprefix("bytes=").partition("-")
        if changed or not last or int(last) - int(first) < 1 << 20:
            return None
        changed.append(request.key)
        return FlipAnswer(100_000)

    proxy.rules.append(rule)
    records = list[TransferRecord]()
    remove = add_listener(records.append)
    try:
        assert load(place, nbytes=LARGE) == 2.0
    finally:
        remove()
    assert changed
    assert [record.retries for record in records] == [1]


def test_small_values_that_change_on_their_way_down_are_asked_for_again(proxy: S3Proxy, place: str) -> None:
    texts = {f"text {n}": f"{n:02}" * 1000 for n in range(50)}
    tensors = {f"tensor {n}": torch.full((500,), float(n)) for n in range(50)}
    holdfast.save({**texts, **tensors}, checkpoint_id=place)
    for at in (1000, -1000):  # in one of the texts, in one of the tensors
        rule = proxy.on(FlipAnswer(at), method="GET", key=DATA, times=1)
        state: dict[str, Any] = {
            **dict.fromkeys(texts, ""),
            **{key: torch.zeros(500) for key in tensors},
        }
        holdfast.load(state, checkpoint_id=place)
        assert rule.count == 1
        assert {key: state[key] for key in texts} == texts
        assert all(torch.equal(state[key], value) for key, value in tensors.items())


@pytest.mark.parametrize("nbytes", [4096, LARGE])
def test_bytes_that_always_change_on_their_way_are_an_error_with_file_and_key(
    proxy: S3Proxy, place: str, nbytes: int
) -> None:
    save(place, 2.0, nbytes=nbytes)
    proxy.on(FlipAnswer(1500), method="GET", key=DATA)
    with pytest.raises(IntegrityError, match=r"s3://.*distcp"):
        load(place, nbytes=nbytes)


def test_metadata_that_change_on_their_way_are_an_error(proxy: S3Proxy, place: str) -> None:
    save(place, 2.0)
    for at in (10, -100, -3):
        rule = proxy.on(FlipAnswer(at), method="GET", key="/.metadata", times=1)
        with pytest.raises(IntegrityError, match=r"\.metadata"):
            load(place)
        assert rule.count == 1


def test_a_server_that_ignores_ranges_is_an_error(proxy: S3Proxy, place: str) -> None:
    save(place, 2.0, nbytes=LARGE)
    proxy.on(Answer(200, body=bytes(1000)), method="GET", key=DATA)
    with pytest.raises(StorageError, match="distcp"):
        load(place, nbytes=LARGE)


def _state(sharded_on: int) -> dict[str, Any]:
    whole = torch.arange(6 * 1024 * 64, dtype=torch.float32).reshape(6 * 64, 1024)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(whole, mesh, [Shard(sharded_on)]), "n": 5}


def save_on_ranks(place: str, endpoint: str) -> None:
    writer = holdfast.ObjectStoreWriter(place, options=_options(endpoint), retry=QUICK)
    holdfast.save(_state(0), storage_writer=writer)


def load_on_ranks(place: str, endpoint: str) -> bool:
    state = _state(1)
    expected = state["w"].to_local().clone()
    state["w"].to_local().zero_()
    state["n"] = 0
    reader = holdfast.ObjectStoreReader(place, options=_options(endpoint), retry=QUICK)
    holdfast.load(state, storage_reader=reader)
    return bool(torch.equal(state["w"].to_local(), expected)) and state["n"] == 5


def _options(endpoint: str) -> dict[str, str]:
    return {"endpoint": endpoint, "access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY}


def test_three_ranks_save_and_two_load_while_three_of_ten_requests_fail(proxy: S3Proxy, place: str) -> None:
    for seed, fault in enumerate(STORM):
        proxy.on(fault, share=0.3 / len(STORM), seed=seed)
    assert [kind for kind, _ in run_ranks(save_on_ranks, 3, place, proxy.endpoint)] == ["returned"] * 3
    assert run_ranks(load_on_ranks, 2, place, proxy.endpoint) == [("returned", True)] * 2
    assert sum(request.fault is not None for request in proxy.requests) > 5


def save_at_once(place: str, endpoint: str, overwrite: bool, rounds: int) -> list[str]:
    """Save alone into the same places as the other ranks, at the same moment; what came of each save."""
    found = []
    for number in range(rounds):
        writer = holdfast.ObjectStoreWriter(
            f"{place}-{number}", options=_options(endpoint), overwrite=overwrite
        )
        state = {"rank": torch.full((1000,), float(dist.get_rank()))}
        dist.barrier()
        try:
            holdfast.save(state, storage_writer=writer, no_dist=True)
            found.append("saved")
        except StorageError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_saves_at_once_one_wins_and_the_others_say_why(s3: S3Server, place: str, overwrite: bool) -> None:
    """With overwriting, one may also come after the other, and win as well."""
    rounds = 3
    outcomes = run_ranks(save_at_once, 3, place, s3.endpoint, overwrite, rounds)
    assert [kind for kind, _ in outcomes] == ["returned"] * 3, outcomes
    for number in range(rounds):
        came = [of_rank[number] for _, of_rank in outcomes]
        winners = [rank for rank, what in enumerate(came) if what == "saved"]
        assert winners
        assert len(winners) == 1 or overwrite, came
        assert all("another save" in what or "exists" in what for what in came if what != "saved"), came
        state = {"rank": torch.zeros(1000)}
        holdfast.load(state, checkpoint_id=f"{place}-{number}")
        assert int(state["rank"][0]) in winners
        assert torch.equal(state["rank"], state["rank"][:1].expand(1000))
        assert len(store_of(f"{place}-{number}", s3).names()) == 2


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (400, "ExpiredToken", "have expired: get new ones"),
        (403, "RequestTimeTooSkewed", "clock of this machine"),
        (403, "SignatureDoesNotMatch", "secret key is wrong"),
    ],
)
def test_credentials_that_fail_in_the_middle_are_told_with_a_remedy(
    proxy: S3Proxy, s3: S3Server, place: str, status: int, code: str, remedy: str
) -> None:
    save(place, 1.0)
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()
    proxy.on(Answer(status, body=body), key=DATA)
    with pytest.raises(AccessDeniedError, match=remedy):
        load(place)
    with pytest.raises(AccessDeniedError, match=remedy):
        save(place, 2.0)
    proxy.rules.clear()
    assert load(place) == 1.0
    assert len(store_of(place, s3).names()) == 2


@pytest.mark.parametrize(
    ("status", "code"), [(301, "PermanentRedirect"), (400, "AuthorizationHeaderMalformed")]
)
def test_a_bucket_of_another_region_is_told_at_once(
    proxy: S3Proxy, place: str, status: int, code: str
) -> None:
    """As AWS answers: without a place to go to."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()
    proxy.on(Answer(status, body=body, headers={"x-amz-bucket-region": "eu-west-1"}))
    for act in (load, lambda url: save(url, 1.0)):
        proxy.clear()
        with pytest.raises(StorageError, match="another region: set AWS_REGION"):
            act(place)
        assert len(proxy.requests) == 1

"""Kill -9 at any request to an object store: of a rank, of the writer process, and of the server.

Afterwards the old checkpoint loads or the new one, whole, and the next save leaves nothing else.
"""

import functools
import itertools
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import pytest
from tests.object_stores import kill_programs as programs
from tests.object_stores.kill_programs import (
    MIB,
    MOMENTS,
    AtRequest,
    Moment,
    at_request,
    is_from,
    kill,
    leftovers,
    load,
    save,
    state_of,
)
from tests.support.ranks import RankProcesses, rank_processes
from tests.support.s3_proxy import S3Proxy
from tests.support.s3_server import S3Server
from tests.support.sweeps import sweep

import holdfast
from holdfast._background.save_future import SaveFuture
from holdfast._io import bucket, bucket_errors
from holdfast._writer_process.client import start_writer_process, stop_writer_process
from holdfast.errors import StorageError
from holdfast.object_store import ObjectStoreWriter
from holdfast.state_dict_saver import AsyncCheckpointerType

# Most of the time one process waits for another.
pytestmark = pytest.mark.one_core

SECONDS_TO_RAISE = 20.0
FEW_RETRIES = {
    "max_retries": 2,
    "backoff": {"init_backoff": timedelta(seconds=0.05), "max_backoff": timedelta(seconds=0.2), "base": 2},
}
WORLD, NBYTES_OF_RANK = 3, 12 * MIB


@pytest.fixture(scope="module")
def processes() -> RankProcesses:
    return rank_processes()


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[S3Proxy]:
    """Only the killed processes use it: the environment of the test goes on naming the server itself."""
    with S3Proxy(s3.endpoint) as proxy:
        yield proxy
    assert proxy.errors == []


def cases(stride: int) -> Iterator[tuple[int, Moment]]:
    """Requests, counted from 1, and moments, without an end."""
    for case in itertools.count(0, stride):
        yield 1 + case // len(MOMENTS), MOMENTS[case % len(MOMENTS)]


def environment_of(server: S3Server, proxy: S3Proxy) -> dict[str, str]:
    return {**server.environment, "AWS_ENDPOINT_URL": proxy.endpoint}


# A process that saves alone


@pytest.mark.slow
@sweep(stride=13)
def test_a_process_killed_at_any_request_leaves_the_old_checkpoint_or_the_new(
    processes: RankProcesses, s3: S3Server, proxy: S3Proxy, place: str, stride: int
) -> None:
    """The next save works at once, and removes whatever the killed one left."""
    save(place, 0.0)
    environment, found = environment_of(s3, proxy), dict[str, str]()
    for value, (number, moment) in zip(itertools.count(10, 10), cases(stride), strict=False):
        with at_request(proxy, AtRequest(kill, number, moment)) as killed:
            (outcome,) = processes.run(programs.overwrite, 1, place, environment, float(value))
        if killed.point is None:
            assert outcome.kind == "returned", outcome
            break
        assert outcome.status == signal.SIGKILL, f"{killed.point}: {outcome}"
        found[killed.point] = {value: "new", value - 9: "old", 0: "old"}.get(int(load(place)), "another")
        save(place, value + 1.0)
        assert load(place) == value + 1, killed.point
        assert leftovers(place, s3) == [], f"the save after a kill {killed.point} left them"
    assert set(found.values()) == {"old", "new"}
    assert list(found.values()) == sorted(found.values(), reverse=True), "the commit is one step"
    if stride == 1:
        _check_points(found)


def _check_points(found: dict[str, str]) -> None:
    """That the kills came before, in and after all steps of a save that overwrites."""
    first_new = next(point for point, which in found.items() if which == "new")
    assert first_new.startswith(("during", "after"))
    assert first_new.endswith("PUT .metadata")
    seen = Counter(" ".join(point.split()[2:]) for point in found)
    assert seen["POST __0_0-*.distcp uploads"] == 3
    assert seen["PUT __0_0-*.distcp partNumber uploadId"] == 9
    assert seen["POST __0_0-*.distcp uploadId"] == 3
    assert seen["PUT .*.lease"] == 6
    assert seen["PUT .metadata"] == 3
    assert seen["POST  delete"] + seen["POST delete"] == 6, seen


@pytest.mark.slow
@sweep(stride=19)
def test_a_process_killed_while_it_removes_what_a_killed_one_left_leaves_that_to_the_next(
    processes: RankProcesses, s3: S3Server, proxy: S3Proxy, place: str, stride: int
) -> None:
    save(place, 0.0)
    environment, old, points = environment_of(s3, proxy), 0.0, list[str]()
    for value, (number, moment) in zip(itertools.count(10.0, 10.0), cases(stride), strict=False):
        _leave_an_upload(processes, s3, proxy, place, value)
        assert load(place) == old
        with at_request(proxy, AtRequest(kill, number, moment)) as killed:
            processes.run(programs.overwrite, 1, place, environment, value + 1)
        assert killed.point is not None
        points.append(killed.point)
        assert load(place) in {old, value + 1}, killed.point
        old = value + 2
        save(place, old)
        assert load(place) == old, killed.point
        assert leftovers(place, s3) == [], f"the save after a kill {killed.point} left them"
        if number >= 16:
            break
    if stride == 1:
        assert any("DELETE" in point for point in points), "none came when the upload was aborted"
        assert any("distcp uploads" in point for point in points), "the clean-up may have taken longer"


def _leave_an_upload(
    processes: RankProcesses, s3: S3Server, proxy: S3Proxy, place: str, value: float
) -> None:
    """Kill a save when its first part is uploaded."""
    is_part = lambda request: "partNumber" in request.query
    with at_request(proxy, AtRequest(kill, 1, "after", counts=is_part)):
        processes.run(programs.overwrite, 1, place, environment_of(s3, proxy), value)
    assert any(name.startswith("an upload of") for name in leftovers(place, s3))


@pytest.mark.slow
def test_a_process_killed_beside_its_writer_process_leaves_the_old_checkpoint(
    processes: RankProcesses, s3: S3Server, proxy: S3Proxy, place: str
) -> None:
    save(place, 1.0)
    is_part = lambda request: "partNumber" in request.query
    with at_request(proxy, AtRequest(kill, 2, "after", counts=is_part)) as killed:
        (outcome,) = processes.run(
            programs.overwrite_in_a_writer_process, 1, place, environment_of(s3, proxy), 2.0
        )
    assert killed.point is not None
    assert outcome.status == signal.SIGKILL, outcome
    assert load(place) == 1.0
    save(place, 3.0)
    assert load(place) == 3.0
    assert leftovers(place, s3) == []


# Ranks that save together


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@sweep(stride=17)
def test_a_rank_killed_at_any_request_is_named_by_the_others_and_nothing_of_it_stays(
    processes: RankProcesses, s3: S3Server, proxy: S3Proxy, place: str, rank: int, stride: int
) -> None:
    shape = {"ranks": range(WORLD), "nbytes": NBYTES_OF_RANK}
    save(place, 0.0, **shape)
    environment, old, found = environment_of(s3, proxy), 0.0, list[float]()
    # Rank 1 has few requests.
    for value, (number, moment) in zip(
        itertools.count(10.0, 10.0), cases(stride if rank == 0 else -(-stride // 3)), strict=False
    ):
        with at_request(proxy, AtRequest(kill, number, moment, counts=is_from(rank))) as killed:
            outcomes = processes.run(
                programs.overwrite_together, WORLD, place, environment, value, NBYTES_OF_RANK
            )
        if killed.point is None:
            assert [outcome.value for outcome in outcomes] == [None] * WORLD
            break
        assert outcomes[rank].status == signal.SIGKILL, killed.point
        for outcome in outcomes[:rank] + outcomes[rank + 1 :]:
            assert outcome.kind == "returned", f"{killed.point}: {outcome}"
            assert outcome.value is not None, f"the save returned on another rank after a kill {killed.point}"
            message, failed, at = outcome.value
            assert failed == [rank], f"{killed.point}: {message}"
            assert f"rank {rank}" in message
            assert at - killed.time < SECONDS_TO_RAISE, killed.point
        now = load(place, **shape)
        assert now in {old, value}, killed.point
        found.append(now - old)
        old = value + 1
        save(place, old, **shape)
        assert load(place, **shape) == old, killed.point
        assert leftovers(place, s3) == [], f"the save after a kill of rank {rank} {killed.point} left them"
    assert len(found) >= 2
    if rank:
        assert not any(found), "only the coordinator commits"
    else:
        assert found == sorted(found, key=bool), "the commit is one step"
        assert any(found)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 4])
def test_what_a_killed_rank_sent_and_the_store_gets_after_the_others_have_raised_is_removed(
    processes: RankProcesses, s3: S3Server, proxy: S3Proxy, place: str, number: int
) -> None:
    """The coordinator has removed what there was then; what comes later is left to the next save."""
    shape = {"ranks": range(WORLD), "nbytes": NBYTES_OF_RANK}
    save(place, 1.0, **shape)
    late = AtRequest(kill, number, "during", counts=is_from(1))
    late.sent_late.clear()
    with at_request(proxy, late):
        outcomes = processes.run(
            programs.overwrite_together, WORLD, place, environment_of(s3, proxy), 2.0, NBYTES_OF_RANK
        )
    assert [outcome.kind for outcome in outcomes] == ["returned", "ended", "returned"]
    assert load(place, **shape) == 1.0
    save(place, 3.0, **shape)
    assert load(place, **shape) == 3.0
    assert leftovers(place, s3) == [], f"a request {late.point} left them"


# The writer process


@pytest.mark.slow
@sweep(stride=11)
def test_a_writer_process_killed_at_any_request_fails_the_save_and_nothing_of_it_stays(
    s3: S3Server, place: str, stride: int
) -> None:
    save(place, 0.0)
    try:
        for value, (number, moment) in zip(itertools.count(10.0, 10.0), cases(stride), strict=False):
            pid = start_writer_process()
            assert pid is not None
            with S3Proxy(s3.endpoint) as proxy:
                act = functools.partial(_kill_other, pid)
                killed = AtRequest(act, number, moment, counts=lambda request: ".distcp" in request.key)
                proxy.rules.append(killed)
                error = _error_of_save_in_process(place, value, proxy)
            assert proxy.errors == []
            if killed.point is None:
                assert error is None
                assert load(place) == value
                break
            assert f"writer process {pid}" in str(error), killed.point
            assert "killed by SIGKILL" in str(error), killed.point
            assert load(place) == (value - 9 if value > 10 else 0), killed.point
            save(place, value + 1)
            assert load(place) == value + 1, killed.point
            assert leftovers(place, s3) == [], f"the save after a kill {killed.point} left them"
    finally:
        stop_writer_process()
    assert value > 10


def _kill_other(pid: int, _: int) -> None:
    kill(pid)


def _error_of_save_in_process(place: str, value: float, proxy: S3Proxy) -> BaseException | None:
    writer = ObjectStoreWriter(place, options={"endpoint": proxy.endpoint})
    future = holdfast.async_save(
        state_of(value),
        storage_writer=writer,
        no_dist=True,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    assert isinstance(future, SaveFuture)
    return future.exception(300)  # a new writer process imports torch, which a busy machine does slowly


# The server


@pytest.fixture(scope="module")
def own_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def mortal(own_server: S3Server, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A server that the test kills and starts again on the same data. Waits between tries are short."""
    for module in (bucket, bucket_errors):
        monkeypatch.setattr(module, "PAUSES", (0.1, 0.2))
    own_server.kill()
    own_server.start()
    return own_server


@pytest.mark.slow
@sweep(stride=16)
def test_a_server_killed_at_any_request_of_a_save_leaves_the_old_checkpoint_or_the_new(
    mortal: S3Server, place: str, stride: int
) -> None:
    """The next save, in the same process, works as soon as the server does."""
    past = {"options": {"endpoint": mortal.endpoint}}
    save(place, 0.0, **past)
    old, outcomes = 0.0, Counter[str]()
    for value, (number, moment) in zip(itertools.count(10.0, 10.0), cases(stride), strict=False):
        with S3Proxy(mortal.endpoint) as proxy:
            killed = AtRequest(lambda _: mortal.kill(), number, moment)
            proxy.rules.append(killed)
            error = _error_of_save(place, value, proxy, retry=FEW_RETRIES)
        assert proxy.errors == []
        if killed.point is None:
            assert error is None
            break
        mortal.start()
        now = load(place, **past)
        assert now in ({value} if error is None else {old, value}), f"{killed.point}: {error}"
        outcomes["returned" if error is None else "new" if now == value else "old"] += 1
        if error is not None:
            assert isinstance(error, StorageError), killed.point
            assert place in str(error)
            assert "Error performing" in str(error)
        old = value + 1
        save(place, old, **past)
        assert load(place, **past) == old, killed.point
        assert leftovers(place, mortal) == [], f"the save after a kill {killed.point} left them"
    assert outcomes["old"]
    assert outcomes["returned"]


@pytest.mark.slow
@sweep(stride=61)
def test_a_server_that_is_back_while_a_save_tries_again_fails_nothing(
    mortal: S3Server, place: str, stride: int
) -> None:
    past = {"options": {"endpoint": mortal.endpoint}}
    save(place, 0.0, **past)
    for value, (number, moment) in zip(itertools.count(10.0, 10.0), cases(stride), strict=False):
        start = threading.Thread(target=mortal.start)

        def restart(_: int, start: threading.Thread = start) -> None:
            mortal.kill()
            start.start()

        with S3Proxy(mortal.endpoint) as proxy:
            killed = AtRequest(restart, number, moment)
            proxy.rules.append(killed)
            error = _error_of_save(place, value, proxy)
        assert proxy.errors == []
        assert error is None, killed.point
        if killed.point is None:
            break
        start.join()
        assert load(place, **past) == value, killed.point
        save(place, value + 1, **past)
        assert load(place, **past) == value + 1, killed.point
        assert leftovers(place, mortal) == [], f"the save after a kill {killed.point} left them"
    assert value > 10


def _error_of_save(place: str, value: float, proxy: S3Proxy, **options: object) -> BaseException | None:
    try:
        save(place, value, options={"endpoint": proxy.endpoint}, **options)
    except holdfast.CheckpointException as error:
        return error
    return None


@pytest.mark.slow
@sweep(stride=11)
def test_a_server_killed_at_any_request_of_a_load_is_told_of_and_the_next_load_works(
    mortal: S3Server, place: str, stride: int
) -> None:
    past = {"options": {"endpoint": mortal.endpoint}}
    save(place, 1.0, **past)
    raised = 0
    for number, moment in cases(stride):
        with S3Proxy(mortal.endpoint) as proxy:
            killed = AtRequest(lambda _: mortal.kill(), number, moment)
            proxy.rules.append(killed)
            value, error = _load(place, proxy)
        assert proxy.errors == []
        if killed.point is None:
            assert value == 1.0
            break
        if error is None:
            assert value == 1.0, killed.point  # what was read before the kill was all
        else:
            raised += 1
            assert isinstance(error, StorageError), killed.point
            assert place in str(error), killed.point
            assert "GET http" in str(error), f"{killed.point}: {error}"
        mortal.start()
        assert load(place, **past) == 1.0, killed.point
    assert raised


def _load(place: str, proxy: S3Proxy) -> tuple[float | None, BaseException | None]:
    try:
        return load(place, options={"endpoint": proxy.endpoint}, retry=FEW_RETRIES), None
    except holdfast.CheckpointException as error:
        return None, error

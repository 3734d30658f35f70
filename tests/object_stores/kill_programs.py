"""Saves that are killed at a request: what they save, what kills them, and what must be true afterwards."""

import atexit
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from tests.support.s3_faults import Call, DropBefore, Fault, S3Request
from tests.support.s3_proxy import S3Proxy
from tests.support.s3_server import S3Server

import holdfast
from holdfast._io.bucket import BucketStore
from holdfast._io.bucket_client import BucketAccess, S3Keys
from holdfast._io.s3_uploads import S3Uploads
from holdfast._storage.cleanup import files_to_replace
from holdfast.object_store import ObjectStoreReader, ObjectStoreWriter
from holdfast.state_dict_saver import AsyncCheckpointerType

MIB = 1 << 20

Moment = Literal["before", "during", "after"]
"""When a kill happens, seen from a request: the server gets nothing of it; the server gets as much as was
sent already; the server has carried it out, and the client does not get the answer."""
MOMENTS: tuple[Moment, ...] = ("before", "during", "after")


def state_of(value: float, ranks: Iterable[int] = (0,), nbytes: int = 20 * MIB) -> dict[str, Any]:
    """A state whose every part tells the number: one tensor for each rank, and values that all ranks have."""
    return {
        "of_rank": {f"{rank}": torch.full((nbytes // 4,), value + rank) for rank in ranks},
        "small": [torch.full((n,), value) for n in (1, 10, 100)],
        "text": f"value {value}",
    }


def client(rank: int) -> dict[str, str]:
    """Settings that let the proxy see which process a request is from."""
    return {"user_agent": f"rank-{rank}/{os.getpid()}"}


def save(place: str, value: float, **options: Any) -> None:
    """Save in this process alone, all parts."""
    ranks, nbytes = options.pop("ranks", (0,)), options.pop("nbytes", 20 * MIB)
    holdfast.save(
        state_of(value, ranks, nbytes),
        storage_writer=ObjectStoreWriter(place, **options),
        no_dist=True,
    )


def load(place: str, **options: Any) -> float:
    """The number of the checkpoint in a place, all of which must agree."""
    ranks, nbytes = options.pop("ranks", (0,)), options.pop("nbytes", 20 * MIB)
    state = state_of(0.0, ranks, nbytes)
    holdfast.load(state, storage_reader=ObjectStoreReader(place, **options), no_dist=True)
    value = float(state["small"][0])
    for rank, tensor in state["of_rank"].items():
        assert torch.equal(tensor, torch.full_like(tensor, value + int(rank))), f"a mix, of rank {rank}"
    assert all(torch.equal(tensor, torch.full_like(tensor, value)) for tensor in state["small"]), "a mix"
    assert state["text"] == f"value {value}", "a mix"
    return value


def leftovers(place: str, server: S3Server) -> list[str]:
    """Objects and unfinished uploads at a place that are no part of the checkpoint there."""
    access = BucketAccess(place, options={"endpoint": server.endpoint})
    store = BucketStore(access)
    committed = {".metadata", *files_to_replace(store, rank=None)}
    names = store.names()
    assert committed <= names, f"missing: {committed - names}"
    keys = access.s3_keys()
    assert isinstance(keys, S3Keys)
    uploads = S3Uploads(access, keys).find(access.prefix)
    return sorted(names - committed) + [f"an upload of {upload.key}" for upload in uploads]


class AtRequest:
    """A rule for a proxy: acts once, at one of the requests that it counts.

    Args:
        act: What to do; it gets the id of the process that the request is from, or 0.
        number: At which one, from 1.
        moment: When, seen from that request.
        counts: Which requests are counted; all by default.

    Attributes:
        point: The moment and the request, once it has acted.
        time: When it acted, by the monotonic clock of the machine.
        sent_late: While this is not set, a request that the server gets after the act waits.
    """

    def __init__(
        self,
        act: Callable[[int], object],
        number: int,
        moment: Moment,
        *,
        counts: Callable[[S3Request], bool] = lambda _: True,
    ) -> None:
        self.point: str | None = None
        self.time = 0.0
        self.sent_late = threading.Event()
        self.sent_late.set()
        self._act, self._number, self._moment, self._counts = act, number, moment, counts
        self._count = self._sender = 0
        self._lock = threading.Lock()

    def __call__(self, request: S3Request) -> Fault | None:
        if not self._counts(request):
            return None
        with self._lock:
            # Uploads are aborted without obstore, and so without this header.
            if sender := re.match(r"rank-\d+/(\d+)", request.headers.get("user-agent", "")):
                self._sender = int(sender[1])
            self._count += 1
            if self._count != self._number:
                return None
        if self._moment == "before":
            self._do(request)
            return DropBefore()
        if self._moment == "during":
            return Call(before=self._do_and_wait)
        return Call(after=self._do)

    def _do(self, request: S3Request) -> None:
        # The name without the save, which is another one each time.
        name = re.sub(r"[0-9a-f]{12}", "*", request.key.rpartition("/")[2])
        query = " ".join(sorted(request.query))
        self.point = f"{self._moment} {self._number} {request.method} {name} {query}".rstrip()
        self._act(self._sender)
        self.time = time.monotonic()

    def _do_and_wait(self, request: S3Request) -> None:
        self._do(request)
        self.sent_late.wait()


@contextmanager
def at_request(proxy: S3Proxy, rule: AtRequest) -> Iterator[AtRequest]:
    """Use the rule in a with-block. When it is over, the server has all that was on its way to it."""
    proxy.rules.append(rule)
    try:
        yield rule
    finally:
        rule.sent_late.set()
        proxy.rules.remove(rule)
        for thread in threading.enumerate():
            if thread.name == "s3-proxy-connection":
                thread.join(30)
                assert not thread.is_alive(), "a client that should have ended is connected to the proxy"


def kill(pid: int) -> None:
    """End a process at once, wherever it is."""
    assert pid, "it is not known who has sent the request"
    os.kill(pid, signal.SIGKILL)


def is_from(rank: int) -> Callable[[S3Request], bool]:
    """Whether a request is from a rank."""
    return lambda request: request.headers.get("user-agent", "").startswith(f"rank-{rank}/")


# What follows runs in ranks.


def _begin(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    # The process is a fork that shares its memory. To tear torch down it would copy all of it, which takes
    # several times as long as the save.
    atexit.register(os._exit, 0)


def overwrite(place: str, environment: dict[str, str], value: float) -> None:
    """One process saves."""
    _begin(environment)
    save(place, value, client_options=client(0))


def overwrite_in_a_writer_process(place: str, environment: dict[str, str], value: float) -> None:
    """One process saves, and another one writes for it."""
    _begin(environment)
    writer = ObjectStoreWriter(place, client_options=client(0))
    kind = AsyncCheckpointerType.PROCESS
    future = holdfast.async_save(
        state_of(value), storage_writer=writer, no_dist=True, async_checkpointer_type=kind
    )
    future.result()  # type: ignore[union-attr]


def overwrite_together(
    place: str, environment: dict[str, str], value: float, nbytes: int
) -> tuple[str, Collection[int], float] | None:
    """Ranks save together: the error, the ranks that it names, and when it was raised; None for success."""
    _begin(environment)
    rank = dist.get_rank()
    writer = ObjectStoreWriter(place, client_options=client(rank))
    try:
        holdfast.save(state_of(value, [rank], nbytes), storage_writer=writer)
    except holdfast.CheckpointException as error:
        return str(error), list(error.failures), time.monotonic()
    return None

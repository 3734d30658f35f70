"""Cases of an object store: CPU time and memory of the client, and what parts of a state take of the network.

The store is a server on this machine. It shares the cores with its clients, so no time is measured: it
would be the server's.
"""

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from benchmarks.bucket_client import Layout, Operation, run_client, run_ranks
from benchmarks.bucket_server import BUCKET, bucket_server
from benchmarks.bucket_sides import BUCKET_SIDES, CONNECTOR
from benchmarks.case import SIDES, Case, Goal, Job, Quantity, Samples, SkippedError, interleave
from benchmarks.one_slice import RANK, RANKS
from benchmarks.ranks import RANKS as REAL_RANKS
from benchmarks.states import KIB, MIB, Tensors

__all__ = ["object_store_cases"]

_COUNT = 16
_SAVE = "CPU seconds of a save per GiB"
_LOAD = "CPU seconds of a load per GiB"
_AGAINST_CONNECTOR = f", against {CONNECTOR}"
_RECEIVED = "bytes received per byte needed"
_REQUESTS = "requests"
_GIB = 1 << 30


def object_store_cases(scale: float) -> list[Case]:
    """The cases of this module."""

    def tensors(count: int, nbytes: int) -> Tensors:
        # Every rank of eight has a part.
        rows = max(RANKS, int(nbytes * scale) // count // (4 * KIB)) // RANKS * RANKS
        return Tensors(count, (rows, KIB))

    many, large, one = tensors(_COUNT, 256 * MIB), tensors(_COUNT, 1024 * MIB), tensors(1, 256 * MIB)
    half, no_more = Goal(times=2), Goal(within=1, against=(CONNECTOR,))
    cpu = tuple(
        Quantity(name + suffix, "s/GiB", goal)
        for name in (_SAVE, _LOAD)
        for suffix, goal in (("", half), (_AGAINST_CONNECTOR, no_more))
    )
    memory = tuple(Quantity(name, "MiB", Goal(at_most=256)) for name in ("save", "load"))
    cases = [
        Case(
            "object-store",
            f"client of a local S3 server, {_size(many)}",
            cpu,
            3 * many.nbytes,
            3,
            lambda job: _run_cpu(job, many),
            "a new process for each save and load, which has done the same once before; user and system time "
            "of all its threads; torch is its FsspecWriter and FsspecReader over s3fs",
        ),
        Case(
            "object-store-memory",
            f"extra memory, a local S3 server, {_size(large)}",
            memory,
            3 * large.nbytes,
            1,
            lambda job: _run_memory(job, large),
        ),
        Case(
            "object-store-slice",
            f"rows of rank {RANK} of {RANKS}, Shard(0), out of one tensor of {one.nbytes / MIB:,.0f} MiB, a "
            "local S3 server",
            _of_the_network(one.nbytes // RANKS, one.count),
            2 * len(SIDES) * one.nbytes,
            3,
            lambda job: _run_counted(job, one, "whole", "slice"),
            "a proxy before the server counts all requests of the process, and the bytes of all answers, "
            "metadata too; at most one request for 8 MiB and one for 50 tensors are wanted",
        ),
    ]
    reshards: dict[str, tuple[Layout, Layout, str]] = {
        "object-store-reshard": ("rows", "columns", "saved as Shard(0), loaded as Shard(1)"),
        "object-store-reshard-back": ("columns", "rows", "saved as Shard(1), loaded as Shard(0)"),
    }
    for name, (saved, loaded, words) in reshards.items():
        title = f"{REAL_RANKS} ranks load from a local S3 server, {_size(many)}: {words}"
        run = partial(_run_counted, contents=many, saved=saved, loaded=loaded)
        network = _of_the_network(many.nbytes, many.count)
        cases.append(Case(name, title, network, 2 * len(SIDES) * many.nbytes, 3, run))
    return cases


def _size(contents: Tensors) -> str:
    return f"{contents.nbytes / MIB:,.0f} MiB in {contents.count} tensors"


def _of_the_network(nbytes: int, count: int) -> tuple[Quantity, ...]:
    most = round(nbytes / (8 * MIB) + count / 50, 2)
    return (
        Quantity(_RECEIVED, "bytes/byte", Goal(at_most=1.1)),
        Quantity(_REQUESTS, "requests", Goal(at_most=most)),
    )


def _run_cpu(job: Job, contents: Tensors) -> Samples:
    def act(side: str) -> dict[str, float]:
        found = {}
        operations: tuple[tuple[str, Operation], ...] = ((_SAVE, "save"), (_LOAD, "load"))
        with bucket_server(job.folder) as environment:
            for name, operation in operations:
                taken = run_client(operation, "whole", side, f"{BUCKET}/run/step", contents, environment)
                found[name] = found[name + _AGAINST_CONNECTOR] = taken["cpu"] * _GIB / contents.nbytes
        return found

    return _take_turns(job, tuple(BUCKET_SIDES), act)


def _run_memory(job: Job, contents: Tensors) -> Samples:
    def act(side: str) -> dict[str, float]:
        with bucket_server(job.folder) as environment:
            return {
                operation: run_client(operation, "whole", side, f"{BUCKET}/run/step", contents, environment)[
                    "extra"
                ]
                / MIB
                for operation in ("save", "load")
            }

    return _take_turns(job, SIDES[:1], act)


def _run_counted(job: Job, contents: Tensors, saved: Layout, loaded: Layout) -> Samples:
    """Save once, then count what each load asks for."""
    needed = contents.nbytes // RANKS if loaded == "slice" else contents.nbytes
    is_of_ranks = loaded in {"rows", "columns"}
    with bucket_server(job.folder) as environment, _proxy(environment) as (proxy, through_proxy):

        def save(side: str) -> None:
            url = f"{BUCKET}/{side}/step"
            if is_of_ranks:
                run_ranks("save", saved, side, url, contents, environment, job.folder)
            else:
                run_client("save", saved, side, url, contents, environment)

        def act(side: str) -> dict[str, float]:
            url = f"{BUCKET}/{side}/step"
            proxy.clear()
            if is_of_ranks:
                run_ranks("load", loaded, side, url, contents, through_proxy, job.folder)
            else:
                run_client("load", loaded, side, url, contents, through_proxy)
            if proxy.errors:
                raise RuntimeError(proxy.errors[0])
            requests = proxy.requests
            received = sum(request.nbytes_down for request in requests)
            return {_RECEIVED: received / needed, _REQUESTS: len(requests)}

        return _take_turns(job, SIDES, act, prepare=save)


@contextmanager
def _proxy(environment: Mapping[str, str]) -> Iterator[tuple[Any, dict[str, str]]]:
    """What counts, and the environment of clients that go through it."""
    proxy_class = import_module("tests.support.s3_proxy").S3Proxy
    with proxy_class(environment["AWS_ENDPOINT_URL"]) as proxy:
        yield proxy, {**environment, "AWS_ENDPOINT_URL": proxy.endpoint}


def _take_turns(
    job: Job,
    sides: Sequence[str],
    act: Callable[[str], dict[str, float]],
    *,
    prepare: Callable[[str], object] = lambda _: None,
) -> Samples:
    """As far as sides are installed; one that fails, holdfast excepted, takes no figures from the rest."""
    for side in sides:
        if find_spec(BUCKET_SIDES[side]) is None:
            job.absent[side] = f"{BUCKET_SIDES[side]} is not installed"
    if SIDES[0] in job.absent:
        raise SkippedError(job.absent[SIDES[0]])

    def unless_absent(work: Callable[[str], Any]) -> Callable[[str], dict[str, float]]:
        def guarded(side: str) -> dict[str, float]:
            if side in job.absent:
                return {}
            try:
                return work(side) or {}
            except subprocess.CalledProcessError as error:
                if side == SIDES[0]:
                    raise
                job.absent[side] = f"a process of it ended with status {error.returncode}"
                return {}

        return guarded

    for side in sides:
        unless_absent(prepare)(side)
    samples = interleave(sides, unless_absent(act), rounds=job.rounds, name_of=str, say=job.say)
    return {
        quantity: {side: numbers for side, numbers in of_sides.items() if side not in job.absent}
        for quantity, of_sides in samples.items()
    }

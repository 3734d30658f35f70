"""Owns which ranges of a file are read by one request: neighbours, on stores where a request costs much."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from holdfast._contents.item_bytes import naming
from holdfast._format.item_table import Payload
from holdfast._io.file_access import check_payloads
from holdfast._io.store import StoreTraits
from holdfast._storage.ranges import RangeRead
from holdfast._tensors.host import memory_of
from holdfast.errors import ChecksumError

_MOST_WASTE = 16
"""Of so many bytes that are read, one may lie between ranges."""


@dataclass(frozen=True)
class RangeJob:
    """The job that reads one range. It may be done by itself, or with its neighbours."""

    read: RangeRead

    def __call__(self) -> None:
        """Read it, and put it where it belongs."""
        with naming(self.read.destination.key):
            self.read.deliver()
            self.read.destination.arrived()

    def take(self, content: memoryview) -> None:
        """The same with bytes that were read and checked already."""
        with naming(self.read.destination.key):
            self.read.deliver_from(content)
            self.read.destination.arrived()


def join_neighbours(jobs: Iterable[Callable[[], None]], traits: StoreTraits) -> list[Callable[[], None]]:
    """The same work with fewer requests, as the traits of the store have it. The order stays.

    A range of columns is read by one request, too, instead of in strips.
    """
    if not traits.request_nbytes:
        return list(jobs)
    return [_joined(group) if isinstance(group, _Group) else group for group in _groups(jobs, traits)]


class _Group:
    """Neighbouring ranges of a file."""

    def __init__(self, job: RangeJob, source: Payload) -> None:
        self.jobs = [job]
        self.sources = [source]
        self.needed = source.nbytes
        self.end = source.offset + source.nbytes

    def takes(self, job: RangeJob, source: Payload, traits: StoreTraits) -> bool:
        """Add a range if one request should ask for it, too."""
        gap, needed = source.offset - self.end, self.needed + source.nbytes
        span = source.offset + source.nbytes - self.sources[0].offset
        if (
            not 0 <= gap <= traits.read_gap_nbytes
            or needed > traits.request_nbytes
            or (span - needed) * _MOST_WASTE > span
            or bool(source.crcs) != bool(self.sources[0].crcs)
        ):
            return False
        self.jobs.append(job)
        self.sources.append(source)
        self.needed, self.end = needed, source.offset + source.nbytes
        return True


def _groups(jobs: Iterable[Callable[[], None]], traits: StoreTraits) -> Iterator[_Group | Callable[[], None]]:
    group: _Group | None = None
    for job in jobs:
        source = job.read.source() if isinstance(job, RangeJob) else None
        if group is not None:
            if isinstance(job, RangeJob) and source is not None and group.takes(job, source, traits):
                continue
            yield group
            group = None
        if isinstance(job, RangeJob) and source is not None:
            group = _Group(job, source)
        else:
            yield job
    if group is not None:
        yield group


def _joined(group: _Group) -> Callable[[], None]:
    first = group.jobs[0]
    if len(group.jobs) == 1 and first.read.range.is_run:
        return first
    return partial(_read_joined, group)


def _read_joined(group: _Group) -> None:
    """Read the ranges at once, and put each where it belongs."""
    reader, begin = group.jobs[0].read.reader, group.sources[0].offset
    with reader.context.budget.hold(group.end - begin):
        scratch = memory_of(torch.empty(group.end - begin, dtype=torch.uint8))
        parts = [scratch[each.offset - begin : each.offset - begin + each.nbytes] for each in group.sources]
        try:
            with naming(group.jobs[0].read.destination.key):
                reader.file.read_together(begin, scratch, [each for each in group.sources if each.crcs])
        except ChecksumError:
            for job, source, part in zip(group.jobs, group.sources, parts, strict=True):
                with naming(job.read.destination.key):  # the one whose bytes they are
                    check_payloads([source], source.offset, part, path=reader.file.path)
            raise
        for job, part in zip(group.jobs, parts, strict=True):
            job.take(part)

"""Owns which ranges of a file are read by one request: neighbours, on stores where a request costs much."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from holdfast._contents.box_reader import RangeJob
from holdfast._contents.item_bytes import naming, new_memory
from holdfast._contents.open_files import StoredFile
from holdfast._format.item_table import Payload
from holdfast._io.file_access import check_payloads
from holdfast._io.store import StoreTraits
from holdfast.errors import ChecksumError

_MOST_WASTE = 16
"""Of so many bytes that are read, one may lie between ranges."""


def join_neighbours(jobs: Iterable[Callable[[], None]], file: StoredFile) -> list[Callable[[], None]]:
    """The same work on a file with fewer requests, as the traits of the store have it. The order stays.

    A range of columns is read by one request, too, instead of in strips.
    """
    traits = file.store.traits
    if not traits.request_nbytes:
        return list(jobs)
    return [_joined(group, file) if isinstance(group, _Group) else group for group in _groups(jobs, traits)]


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


def _joined(group: _Group, file: StoredFile) -> Callable[[], None]:
    first = group.jobs[0]
    if len(group.jobs) == 1 and first.read.range.is_run:
        return first
    return partial(_read_joined, group, file)


def _read_joined(group: _Group, file: StoredFile) -> None:
    """Read the ranges at once, and put each where it belongs."""
    begin = group.sources[0].offset
    with group.jobs[0].read.item.context.budget.hold(group.end - begin):
        scratch = new_memory(group.end - begin)
        parts = [scratch[each.offset - begin : each.offset - begin + each.nbytes] for each in group.sources]
        try:
            with naming(group.jobs[0].read.stored.target.key):
                file.read_together(begin, scratch, [each for each in group.sources if each.crcs])
        except ChecksumError:
            for job, source, part in zip(group.jobs, group.sources, parts, strict=True):
                with naming(job.read.stored.target.key):  # the one whose bytes they are
                    check_payloads([source], source.offset, part, path=file.path)
            raise
        for job, part in zip(group.jobs, parts, strict=True):
            job.take(part)

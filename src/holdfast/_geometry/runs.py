"""Owns the way from a box to bytes: its contiguous runs, and the reads that fetch them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from operator import mul
from typing import NamedTuple

from holdfast._geometry.boxes import row_major_strides

# A gap is read rather than skipped when reading it is cheaper than one more request. A request to a local
# file costs some 10 to 30 microseconds of call, queue and Python; 64 KiB take that long at 2.5 to 6 GB/s.
# A store with a round trip of milliseconds wants megabytes: pass its own number.
DEFAULT_MAX_GAP = 64 * 1024
# Large enough to hide the cost of the request, small enough that a byte budget can hold several.
DEFAULT_MAX_REQUEST = 32 * 1024 * 1024


class RunShape(NamedTuple):
    """The contiguous byte runs of a box: ``nbytes`` each, at ``start`` plus multiples of the strides.

    ``counts`` and ``strides`` (bytes) hold one entry for every dimension that repeats the run, outermost
    first; a box that is one run has none.
    """

    start: int
    nbytes: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def number(self) -> int:
        """How many runs there are; 0 for an empty box."""
        return prod(self.counts) if self.nbytes else 0


def run_shape(
    shape: Sequence[int], itemsize: int, offsets: Sequence[int], lengths: Sequence[int]
) -> RunShape:
    """How the box lies in the row-major array, without listing its runs.

    The runs are as long as they can be: two of them never touch. The box must lie in the shape.
    """
    strides = [stride * itemsize for stride in row_major_strides(shape)]
    start = sum(map(mul, offsets, strides))
    nbytes = itemsize
    dim = len(shape)
    while dim:
        dim -= 1
        nbytes *= lengths[dim]
        if lengths[dim] != shape[dim]:
            break
    repeated = [d for d in range(dim) if lengths[d] != 1]
    if 0 in lengths:
        return RunShape(start, 0, (), ())
    return RunShape(start, nbytes, tuple(lengths[d] for d in repeated), tuple(strides[d] for d in repeated))


def byte_runs(
    shape: Sequence[int], itemsize: int, offsets: Sequence[int], lengths: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Every contiguous run of the box as (first byte, nbytes), ascending; see `run_shape`."""
    start, nbytes, counts, strides = run_shape(shape, itemsize, offsets, lengths)
    if not nbytes:
        return
    steps = [range(0, count * stride, stride) for count, stride in zip(counts, strides, strict=True)]
    for shifts in product(*steps):
        yield start + sum(shifts), nbytes


class Span(NamedTuple):
    """``nbytes`` wanted bytes at ``start`` in the file: those of run number ``run`` from ``skip`` on."""

    run: int
    skip: int
    start: int
    nbytes: int


class ReadRequest(NamedTuple):
    """One read of ``nbytes`` at ``start``, and the wanted spans inside it in the order of the runs."""

    start: int
    nbytes: int
    spans: tuple[Span, ...]


def plan_reads(
    runs: Iterable[tuple[int, int]],
    *,
    max_gap: int = DEFAULT_MAX_GAP,
    max_request: int = DEFAULT_MAX_REQUEST,
) -> Iterator[ReadRequest]:
    """Turn wanted byte runs, sorted by their start, into as few reads as pay.

    Runs are read together when at most ``max_gap`` unwanted bytes lie between them and the read stays
    within ``max_request``. A run longer than ``max_request`` is split; no request is longer. Runs may
    overlap or repeat: each gets its own spans. Every byte of every run is in exactly one of its spans,
    and empty runs in none.
    """
    spans: list[Span] = []
    begin = end = 0
    for span in _split_runs(runs, max_request):
        span_end = span.start + span.nbytes
        # A run that starts inside an earlier, split one begins before the request that holds the rest of it.
        if spans and (
            span.start < begin or span.start - end > max_gap or max(end, span_end) - begin > max_request
        ):
            yield ReadRequest(begin, end - begin, tuple(spans))
            spans = []
        if not spans:
            begin = end = span.start
        spans.append(span)
        end = max(end, span_end)
    if spans:
        yield ReadRequest(begin, end - begin, tuple(spans))


def _split_runs(runs: Iterable[tuple[int, int]], most: int) -> Iterator[Span]:
    for run, (start, nbytes) in enumerate(runs):
        for skip in range(0, nbytes, most):
            yield Span(run, skip, start + skip, min(most, nbytes - skip))

"""Owns boxes in row-major arrays: where they meet and what they cover.

A box is a place (``offsets``) and an extent (``lengths``), one number per dimension. A box without
dimensions is a scalar: one element. A box with a length of 0 is legal and holds nothing. Everything here
is integers and tuples; no array is ever made.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from math import prod
from operator import add, itemgetter, lt, mul, sub
from typing import Literal, NamedTuple

# Two piles of n equal boxes overlap in n * n pairs; nobody reads more than a few.
_MOST_PROBLEMS = 16

_Corner = tuple[int, ...]
_Span = tuple[_Corner, _Corner]  # first corner, and the corner after the last element


class Box(NamedTuple):
    """A box of an array: where it begins and how long it is, in each dimension."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


def volume(lengths: Sequence[int]) -> int:
    """The number of elements in a box; 1 for a box without dimensions."""
    return prod(lengths)


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements between neighbours along each dimension.

    An empty dimension counts as one element, as torch counts it, so that strides are never 0.
    """
    steps = accumulate((length or 1 for length in shape[:0:-1]), mul, initial=1)
    return tuple(reversed([*steps][: len(shape)]))


def reach_of(lengths: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements lie between the first and the last one of a strided box, both included."""
    return 1 + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))


def outermost(lengths: Sequence[int], strides: Sequence[int]) -> int | None:
    """The dimension of a strided box whose elements are the furthest apart; None if it is one element."""
    long = [dimension for dimension, length in enumerate(lengths) if length > 1]
    return max(long, key=lambda d: (lengths[d] - 1) * strides[d], default=None)


def is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements that are ``strides`` apart lie in row-major order, without gaps."""
    # A dimension of one element may have any stride.
    return 0 in shape or all(
        length == 1 or stride == step
        for length, stride, step in zip(shape, strides, row_major_strides(shape), strict=True)
    )


def contains(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether the box has the shape's number of dimensions and lies in it, with no negative number."""
    if not len(shape) == len(offsets) == len(lengths):
        return False
    for size, offset, length in zip(shape, offsets, lengths, strict=True):
        if offset < 0 or length < 0 or offset + length > size:
            return False
    return True


def intersect(a: Box, b: Box) -> Box | None:
    """The elements that are in both boxes, or None if there are none.

    Both boxes have the same number of dimensions. Two boxes without dimensions meet in their one element.
    """
    starts = tuple(map(max, a.offsets, b.offsets))
    lengths = tuple(
        min(a_start + a_length, b_start + b_length) - start
        for a_start, a_length, b_start, b_length, start in zip(*a, *b, starts, strict=True)
    )
    return Box(starts, lengths) if all(length > 0 for length in lengths) else None


def row_major_boxes(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """A box in parts of at most ``limit`` bytes, which follow each other in row-major order."""
    offsets, lengths = box
    cut = next((d for d, length in enumerate(lengths) if length > 1), None)
    if cut is None or volume(lengths) * itemsize <= limit:
        yield box
        return
    row = volume(lengths[cut + 1 :]) * itemsize
    rows = max(1, limit // row)
    for start in range(0, lengths[cut], rows):
        count = min(rows, lengths[cut] - start)
        part = Box(
            (*offsets[:cut], offsets[cut] + start, *offsets[cut + 1 :]),
            (*lengths[:cut], count, *lengths[cut + 1 :]),
        )
        if row > limit:
            yield from row_major_boxes(part, itemsize, limit)
        else:
            yield part


@dataclass(frozen=True)
class CoverProblem:
    """One way in which boxes fail to cover a shape exactly once; ``str`` says it in words.

    Attributes:
        kind: ``"out of bounds"``, ``"overlap"`` or ``"gap"``.
        indices: The boxes at fault, as positions in the sequence that was checked.
        place: The box out of bounds, the elements covered twice, or a box of which nothing is covered.
        missing: For a gap, how many elements are covered by no box, or 0 where overlaps hide the number.
    """

    kind: Literal["out of bounds", "overlap", "gap"]
    indices: tuple[int, ...]
    place: Box
    missing: int = 0

    def __str__(self) -> str:
        where = f"offsets {self.place.offsets}, lengths {self.place.lengths}"
        if self.kind == "out of bounds":
            return f"chunk {self.indices[0]} ({where}) is out of bounds"
        if self.kind == "overlap":
            return f"chunks {self.indices[0]} and {self.indices[1]} overlap at {where}"
        count = f"{self.missing} elements are" if self.missing else "at least one element is"
        return f"{count} in no chunk, among them {where}"


def check_cover(shape: Sequence[int], boxes: Sequence[Box]) -> list[CoverProblem]:
    """Whether the boxes cover every element of the shape exactly once: an empty list if so.

    Exact for any boxes. Costs n log n for what shardings make: slices along any dimension, grids of any
    raggedness, nested splits. Boxes out of bounds are reported alone, as nothing else can be said then.
    At most 16 overlaps are listed.
    """
    if _is_grid(shape, boxes):
        return []
    outside = [i for i, box in enumerate(boxes) if not contains(shape, box.offsets, box.lengths)]
    if outside:
        return [
            CoverProblem("out of bounds", (i,), Box(*map(tuple, boxes[i]))) for i in outside[:_MOST_PROBLEMS]
        ]
    total = volume(shape)
    surplus = sum([prod(box.lengths) for box in boxes]) - total
    hole = cover_of(shape, boxes)
    if surplus == 0 and hole is None:
        # As many elements as the shape has, and each of its elements among them: none can be there twice.
        return []
    overlaps = list(islice(_overlapping_pairs(boxes), _MOST_PROBLEMS))
    if hole is None:
        return overlaps
    gap = CoverProblem("gap", (), hole, missing=0 if overlaps else -surplus)
    return [*overlaps, gap]


def _is_grid(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether the boxes are all cells of one grid over the shape; False proves nothing.

    The usual case, at half a microsecond a box where the general search takes 4.
    """
    cells = most_intervals = 1
    try:
        columns = [
            *zip(
                shape,
                zip(*[box[0] for box in boxes], strict=True),
                zip(*[box[1] for box in boxes], strict=True),
                strict=True,
            )
        ]
    except ValueError:  # not all of one number of dimensions
        return False
    for size, offsets, lengths in columns:
        reach = 0
        intervals = set(zip(offsets, lengths, strict=True))
        for offset, length in sorted(intervals):
            if offset != reach or length <= 0:
                return False
            reach += length
        if reach != size:
            return False
        cells *= len(intervals)
        most_intervals = max(most_intervals, len(intervals))
    # Different cells of the grid, and as many as it has: each of them once. Where one dimension alone tells
    # all boxes apart, hashing them is saved.
    return cells == len(boxes) and (most_intervals == cells or len(set(boxes)) == cells)


def cover_of(dest_lengths: Sequence[int], boxes: Iterable[Box]) -> Box | None:
    """A box of the destination of which nothing is in any of ``boxes``, or None if all of it is covered.

    None is the proof that writing these boxes writes every element. Boxes may overlap each other and may
    reach over the destination's edge; each has the destination's number of dimensions.
    """
    low = (0,) * len(dest_lengths)
    high = tuple(dest_lengths)
    if 0 in high:
        return None
    spans: list[_Span] = []
    for offsets, lengths in boxes:
        ends = tuple(map(add, offsets, lengths))
        if any(map(lt, offsets, low)) or any(map(lt, high, ends)):
            offsets, ends = tuple(map(max, offsets, low)), tuple(map(min, ends, high))  # noqa: PLW2901
        if all(map(lt, offsets, ends)):
            spans.append((tuple(offsets), ends))
    return _find_hole(low, high, spans)


def _find_hole(low: _Corner, high: _Corner, spans: list[_Span]) -> Box | None:
    """Look for uncovered elements between ``low`` and ``high``; spans lie inside and are not empty.

    The region is cut where no span is cut by it, into slabs, and each slab along the next dimension.
    Spans that cannot be told apart so (overlaps, pinwheels) are cut in two at an edge of one of them.
    """
    regions = [((low, high), spans)]
    while regions:
        region, spans = regions.pop()
        low, high = region
        if not spans:
            return Box(low, tuple(map(sub, high, low)))
        if region in spans:
            continue
        for dim in range(len(low)):
            slabs = _cut_into_slabs(low[dim], high[dim], dim, spans)
            if len(slabs) > 1:
                regions += [(_narrow(region, dim, begin, end), inside) for begin, end, inside in slabs]
                break
        else:
            regions += _split_at_an_edge(region, spans)
    return None


def _cut_into_slabs(low: int, high: int, dim: int, spans: list[_Span]) -> list[tuple[int, int, list[_Span]]]:
    """Cut along ``dim`` wherever no span is in the way; a slab without spans is a hole."""
    slabs: list[tuple[int, int, list[_Span]]] = []
    inside: list[_Span] = []
    begin = reach = low
    for start, end, span in sorted([(s[0][dim], s[1][dim], s) for s in spans], key=itemgetter(0)):
        if start >= reach and start > low:
            if inside:
                slabs.append((begin, reach, inside))
                inside = []
            if start > reach:
                slabs.append((reach, start, []))
            begin = start
        inside.append(span)
        reach = max(reach, end)
    slabs.append((begin, reach, inside))
    if reach < high:
        slabs.append((reach, high, []))
    return slabs


def _narrow(region: _Span, dim: int, begin: int, end: int) -> _Span:
    low, high = region
    return (*low[:dim], begin, *low[dim + 1 :]), (*high[:dim], end, *high[dim + 1 :])


def _split_at_an_edge(region: _Span, spans: list[_Span]) -> Iterator[tuple[_Span, list[_Span]]]:
    """Cut the region in two at the middle one of the edges inside it, and each span with it."""
    low, high = region
    edges_by_dim = [
        sorted({edge for span in spans for edge in (span[0][d], span[1][d]) if low[d] < edge < high[d]})
        for d in range(len(low))
    ]
    dim = max(range(len(low)), key=lambda d: len(edges_by_dim[d]))
    # No span is the whole region, so one of them has an edge inside it.
    edge = edges_by_dim[dim][len(edges_by_dim[dim]) // 2]
    for begin, end in ((low[dim], edge), (edge, high[dim])):
        part = [
            _narrow(span, dim, max(span[0][dim], begin), min(span[1][dim], end))
            for span in spans
            if span[0][dim] < end and span[1][dim] > begin
        ]
        yield _narrow(region, dim, begin, end), part


def _overlapping_pairs(boxes: Sequence[Box]) -> Iterator[CoverProblem]:
    """The pairs of boxes that share an element; the boxes lie in one shape."""
    full = [i for i, box in enumerate(boxes) if 0 not in box.lengths]
    # The dimension with most starts keeps the list of boxes that are still open short.
    ndim = len(boxes[full[0]].offsets) if full else 0
    dim = max(range(ndim), key=lambda d: len({boxes[i].offsets[d] for i in full}), default=None)
    still_open: list[int] = []
    for i in full if dim is None else sorted(full, key=lambda i: boxes[i].offsets[dim]):
        if dim is not None:
            start = boxes[i].offsets[dim]
            still_open = [j for j in still_open if boxes[j].offsets[dim] + boxes[j].lengths[dim] > start]
        for j in still_open:
            shared = intersect(boxes[i], boxes[j])
            if shared is not None:
                yield CoverProblem("overlap", (min(i, j), max(i, j)), shared)
        still_open.append(i)

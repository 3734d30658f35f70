from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._geometry import (
    Box,
    check_cover,
    contains,
    cover_of,
    intersect,
    row_major_strides,
    volume,
)


def places(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))))


@st.composite
def shapes_with_boxes(draw: st.DrawFn, *, margin: int = 0) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    boxes = []
    for _ in range(draw(st.integers(0, 7))):
        starts = [draw(st.integers(-margin, size + margin)) for size in shape]
        ends = [draw(st.integers(start, size + margin)) for start, size in zip(starts, shape, strict=True)]
        boxes.append(Box(tuple(starts), tuple(e - s for s, e in zip(starts, ends, strict=True))))
    return shape, boxes


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Boxes that cover a shape exactly once, made by cutting it again and again, in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 8), max_size=3)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 12)) if shape else 0):
        offsets, lengths = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, lengths[dim]))
        boxes.append(Box(offsets, (*lengths[:dim], cut, *lengths[dim + 1 :])))
        rest = (*offsets[:dim], offsets[dim] + cut, *offsets[dim + 1 :])
        boxes.append(Box(rest, (*lengths[:dim], lengths[dim] - cut, *lengths[dim + 1 :])))
    return shape, draw(st.permutations(boxes))


def test_volume_and_strides_count_a_scalar_as_one_element_and_an_empty_dimension_as_torch_does() -> None:
    assert volume(()) == 1
    assert volume((2, 0, 3)) == 0
    assert row_major_strides(()) == ()
    assert row_major_strides((2, 3, 4)) == (12, 4, 1)
    assert row_major_strides((2, 0, 3)) == (3, 3, 1)


def test_a_box_is_contained_only_with_the_same_dimensions_and_no_negative_number() -> None:
    assert contains((4, 5), (0, 5), (4, 0))
    assert contains((), (), ())
    assert not contains((4, 5), (1, 0), (4, 5))
    assert not contains((4, 5), (-1, 0), (1, 1))
    assert not contains((4, 5), (2, 0), (-1, 1))
    assert not contains((4, 5), (0,), (4,))


@given(shapes_with_boxes(margin=2))
def test_intersection_is_the_set_of_shared_elements(case: tuple[tuple[int, ...], list[Box]]) -> None:
    _, boxes = case
    for a, b in product(boxes, boxes):
        shared = intersect(a, b)
        assert (places(shared) if shared else set()) == places(a) & places(b)


@given(shapes_with_boxes())
@settings(max_examples=400)
def test_check_cover_agrees_with_counting_every_element(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    every_place = places(Box((0,) * len(shape), shape))
    counts = dict.fromkeys(every_place, 0)
    for box in boxes:
        for place in places(box):
            counts[place] += 1
    problems = check_cover(shape, boxes)
    overlaps = [p for p in problems if p.kind == "overlap"]
    gaps = [p for p in problems if p.kind == "gap"]

    assert bool(overlaps) == any(n > 1 for n in counts.values())
    assert len(gaps) == any(n == 0 for n in counts.values())
    assert len(problems) == len(overlaps) + len(gaps)
    for problem in overlaps:
        a, b = (places(boxes[i]) for i in problem.indices)
        assert places(problem.place) == a & b != set()
    for problem in gaps:
        assert places(problem.place)
        assert all(counts[place] == 0 for place in places(problem.place))
        assert problem.missing in ([0] if overlaps else [sum(n == 0 for n in counts.values())])


@given(shapes_with_boxes(margin=2))
@settings(max_examples=400)
def test_cover_of_finds_a_hole_exactly_when_the_union_has_one(
    case: tuple[tuple[int, ...], list[Box]],
) -> None:
    shape, boxes = case
    left = places(Box((0,) * len(shape), shape)).difference(*map(places, boxes))
    hole = cover_of(shape, boxes)
    assert (hole is None) == (not left)
    if hole:
        assert places(hole)
        assert places(hole) <= left


@given(tilings(), st.data())
@settings(max_examples=200)
def test_any_tiling_is_a_cover_and_stops_being_one_without_any_of_its_boxes(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = case
    assert check_cover(shape, boxes) == []
    dropped = data.draw(st.integers(0, len(boxes) - 1))
    problems = check_cover(shape, boxes[:dropped] + boxes[dropped + 1 :])
    assert [(p.kind, p.missing) for p in problems] == [("gap", volume(boxes[dropped].lengths))] * (
        volume(boxes[dropped].lengths) > 0
    )
    doubled = check_cover(shape, [*boxes, boxes[dropped]])
    assert [(p.kind, p.indices) for p in doubled] == [("overlap", (dropped, len(boxes)))] * (
        volume(boxes[dropped].lengths) > 0
    )


@given(tilings(), st.data())
@settings(max_examples=300)
def test_holes_are_found_among_boxes_that_overlap_in_any_way(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = case
    every_place = places(Box((0,) * len(shape), shape))
    dropped = data.draw(st.sets(st.integers(0, len(boxes) - 1), max_size=2))
    grown = [
        Box(
            tuple(offset - data.draw(st.integers(0, 2)) for offset in box.offsets),
            tuple(length + data.draw(st.integers(0, 3)) for length in box.lengths),
        )
        for i, box in enumerate(boxes)
        if i not in dropped
    ]
    left = every_place.difference(*map(places, grown))
    hole = cover_of(shape, grown)
    assert (hole is None) == (not left)
    assert hole is None or set() < places(hole) <= left


def test_a_grid_with_one_cell_twice_and_one_missing_is_not_a_cover() -> None:
    shape, cells = grid(3, 3, 2, 2)
    assert check_cover(shape, cells) == []
    problems = check_cover(shape, [*cells[:4], cells[8], *cells[5:]])
    assert [(p.kind, p.indices) for p in problems] == [("overlap", (4, 8)), ("gap", ())]
    assert problems[1].place == cells[4]


def test_a_pinwheel_that_no_straight_cut_divides_is_a_cover() -> None:
    wheel = [
        Box((0, 0), (1, 2)),
        Box((0, 2), (2, 1)),
        Box((2, 1), (1, 2)),
        Box((1, 0), (2, 1)),
        Box((1, 1), (1, 1)),
    ]
    assert check_cover((3, 3), wheel) == []
    (gap,) = check_cover((3, 3), wheel[:4])
    assert gap.place == Box((1, 1), (1, 1))
    assert str(gap) == "1 elements are in no chunk, among them offsets (1, 1), lengths (1, 1)"


def test_a_scalar_is_covered_by_exactly_one_chunk() -> None:
    scalar = Box((), ())
    assert check_cover((), [scalar]) == []
    assert [p.kind for p in check_cover((), [])] == ["gap"]
    assert [p.indices for p in check_cover((), [scalar, scalar])] == [(0, 1)]


def test_boxes_out_of_bounds_or_of_another_dimension_are_named() -> None:
    problems = check_cover((4,), [Box((0,), (4,)), Box((3,), (2,)), Box((0, 0), (1, 1)), Box((0,), (-1,))])
    assert [(p.kind, p.indices) for p in problems] == [("out of bounds", (i,)) for i in (1, 2, 3)]
    assert str(problems[0]) == "chunk 1 (offsets (3,), lengths (2,)) is out of bounds"


def test_equal_boxes_without_number_are_reported_in_a_short_list() -> None:
    problems = check_cover((8, 8), [Box((0, 0), (8, 8))] * 4096)
    assert {p.kind for p in problems} == {"overlap"}
    assert len(problems) == 16


def grid(rows: int, columns: int, height: int, width: int) -> tuple[tuple[int, int], list[Box]]:
    boxes = [Box((r * height, c * width), (height, width)) for c in range(columns) for r in range(rows)]
    return (rows * height, columns * width), boxes


@pytest.mark.parametrize(
    ("rows", "columns", "height", "width"),
    [(4096, 1, 1, 100_000), (1, 4096, 100_000, 1), (64, 64, 3, 7), (4096, 1, 100, 2), (1, 4096, 2, 100)],
)
def test_a_fault_among_4096_shards_is_found_in_any_orientation(
    rows: int, columns: int, height: int, width: int
) -> None:
    shape, boxes = grid(rows, columns, height, width)
    assert check_cover(shape, boxes) == []
    (gap,) = check_cover(shape, boxes[:2000] + boxes[2001:])
    assert gap.place == boxes[2000]
    assert [p.indices for p in check_cover(shape, [*boxes, boxes[7]])] == [(7, 4096)]

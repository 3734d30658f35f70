"""Owns the picture of who wrote what: each tensor as a sheet, its chunks in the colours of their ranks."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from holdfast._contents.inventory import Ints, TensorEntry
from holdfast._human_units import size_text
from holdfast.cli.pages.colours import RankColours
from holdfast.cli.pages.page import legend, scale_legend
from holdfast.cli.pages.svg import as_html, box, drawing, element, key_html
from holdfast.cli.text import counted, shape_text

__all__ = ["rank_legend", "shard_map"]

_MOST_LAYOUTS = 24
_MOST_BOXES = 128  # of one drawing
_MOST_EDGES = 20  # more would hide what they divide
_HEIGHT = 84.0


class _Piece(NamedTuple):
    """A box of a tensor and the rank that wrote it; None if the name of its file does not say."""

    offsets: Ints
    lengths: Ints
    rank: int | None


class _Layout(NamedTuple):
    """Tensors that are divided alike have one layout: the same shape, dtype and chunks."""

    shape: Ints
    dtype: str
    chunks: tuple[_Piece, ...]


def rank_legend(colours: RankColours) -> str:
    """The meaning of the colours of ranks: a name for each, or the ends of the scale."""
    ranks = colours.ranks
    if colours.is_scale:
        shades = dict.fromkeys(map(colours.of, ranks))
        return scale_legend(f"rank {ranks[0]}", shades, f"rank {ranks[-1]}")
    named = [(f"rank {rank}", colours.of(rank)) for rank in ranks]
    return legend(named or [("rank not recorded", colours.of(None))])


def shard_map(tensors: Iterable[TensorEntry], ranks: dict[str, int | None], colours: RankColours) -> str:
    """A figure for each way in which tensors were divided, those with the most bytes first.

    Args:
        tensors: All tensors.
        ranks: For each file the rank that wrote it.
        colours: Those of the ranks.
    """
    found: dict[_Layout, list[TensorEntry]] = {}
    for tensor in tensors:
        chunks = tuple(
            _Piece(chunk.offsets, chunk.lengths, ranks.get(chunk.item.relative_path) if chunk.item else None)
            for chunk in tensor.chunks
        )
        found.setdefault(_Layout(tensor.shape, tensor.dtype, chunks), []).append(tensor)
    order = sorted(found.items(), key=lambda pair: -sum(tensor.nbytes or 0 for tensor in pair[1]))
    # There is nothing to see in a scalar.
    drawn = [(layout, alike) for layout, alike in order if layout.shape][:_MOST_LAYOUTS]
    figures = [_figure(layout, alike, colours) for layout, alike in drawn]
    sheets = element("div", "".join(figures), class_="sheets")
    left = sum(map(len, found.values())) - sum(len(alike) for _, alike in drawn)
    return sheets + (element("p", _left_text(left, order), class_="dim") if left else "")


def _left_text(left: int, order: Sequence[tuple[_Layout, Sequence[TensorEntry]]]) -> str:
    scalars = sum(len(alike) for layout, alike in order if not layout.shape)
    kinds = [counted(scalars, "scalar")] if scalars else []
    if left > scalars:
        kinds.append(counted(left - scalars, "more tensor"))
    return f"Not drawn: {' and '.join(kinds)}."


def _figure(layout: _Layout, alike: Sequence[TensorEntry], colours: RankColours) -> str:
    shape = shape_text(layout.shape)
    size = size_text(sum(tensor.nbytes or 0 for tensor in alike))
    many = f"{len(alike):,} tensors, {size}: " if len(alike) > 1 else ""
    what = f"{many}{layout.dtype} {shape}" + ("" if many else f", {size}")
    ranks = len({chunk.rank for chunk in layout.chunks} - {None})
    who = counted(len(layout.chunks), "chunk") + (f" by {counted(ranks, 'rank')}" if ranks else "")
    name = _common_name([tensor.key for tensor in alike])
    caption = element("b", key_html(name), title=name) + "".join(
        element("span", as_html(fact), class_="dim") for fact in (what, who)
    )
    return element("figure", element("figcaption", caption) + _sheet(layout, colours))


def _common_name(keys: Sequence[str]) -> str:
    """The keys as one, with ``*`` for the steps in which they differ; the first one if they have too little
    in common.
    """
    steps = [key.split(".") for key in keys]
    if len({len(path) for path in steps}) > 1:
        return f"{keys[0]}, ..."
    common = [
        next(iter(names)) if len(names := set(column)) == 1 else "*" for column in zip(*steps, strict=True)
    ]
    return ".".join(common) if any(step != "*" for step in common) else f"{keys[0]}, ..."


def _sheet(layout: _Layout, colours: RankColours) -> str:
    """A tensor as a rectangle: its first dimension goes down, and all others together go across."""
    chunks = sorted(chunk for chunk in layout.chunks if prod(chunk.lengths))
    # More could not be told apart: neighbours become one.
    step = -(-len(chunks) // _MOST_BOXES)
    groups = [chunks[at : at + step] for at in range(0, len(chunks), step or 1)]
    kind = "chunk" if len(groups) <= _MOST_EDGES else "thin"
    shapes = [_box(group, layout.shape, f"{kind} {colours.of(group[0].rank)}") for group in groups]
    return drawing("".join(shapes), _HEIGHT, label="chunks of the tensor by rank")


def _box(group: Sequence[_Piece], shape: Ints, kind: str) -> str:
    """A chunk, or the box around a few neighbours."""
    offsets = tuple(min(of_one) for of_one in zip(*(chunk.offsets for chunk in group), strict=True))
    ends = tuple(
        max(of_one)
        for of_one in zip(
            *([at + n for at, n in zip(chunk.offsets, chunk.lengths, strict=True)] for chunk in group),
            strict=True,
        )
    )
    down, across = _span(offsets, tuple(end - at for at, end in zip(offsets, ends, strict=True)), shape)
    return box(
        across[0],
        down[0] * _HEIGHT,
        across[1],
        down[1] * _HEIGHT,
        kind=kind,
        hint=_hint(group, offsets, ends),
    )


def _hint(group: Sequence[_Piece], offsets: Ints, ends: Ints) -> str:
    ranks = [chunk.rank for chunk in group]
    if ranks[0] is None:
        who = "rank not recorded"
    elif ranks[0] == ranks[-1]:
        who = f"rank {ranks[0]}"
    else:
        who = f"ranks {ranks[0]} to {ranks[-1]}"
    where = ", ".join(f"{at}:{end}" for at, end in zip(offsets, ends, strict=True))
    return f"{who}\n[{where}]" if where else who


def _span(offsets: Ints, lengths: Ints, shape: Ints) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where a box begins and how long it is, down and across, as shares of one.

    A tensor of one dimension goes across. Of three or more, the second divided one goes across: a chunk that
    is cut in more dimensions is drawn too wide.
    """
    if not shape:
        return (0.0, 1.0), (0.0, 1.0)
    shares = [
        (offset / size, length / size) if size else (0.0, 1.0)
        for offset, length, size in zip(offsets, lengths, shape, strict=True)
    ]
    if len(shape) == 1:
        return (0.0, 1.0), shares[0]
    cut = next((share for share in shares[1:] if share != (0.0, 1.0)), (0.0, 1.0))
    return shares[0], cut

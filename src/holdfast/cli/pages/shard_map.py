"""Owns the picture of who wrote what: each tensor as a sheet, its chunks in the colours of their ranks."""

from collections.abc import Iterable, Sequence
from html import escape
from math import prod
from typing import NamedTuple

from holdfast._contents.inventory import Ints, TensorEntry
from holdfast._human_units import size_text
from holdfast.cli.pages.colours import rank_colour
from holdfast.cli.pages.svg import box, drawing, element

__all__ = ["shard_map"]

_MOST_LAYOUTS = 30
_MOST_CHUNKS = 256  # of one drawing


class _Chunk(NamedTuple):
    """A box of a tensor and the rank that wrote it; None if the name of its file does not say."""

    offsets: Ints
    lengths: Ints
    rank: int | None


class _Layout(NamedTuple):
    """What tensors have in common that are divided alike: their shape, dtype and chunks."""

    shape: Ints
    dtype: str
    chunks: tuple[_Chunk, ...]


def shard_map(tensors: Iterable[TensorEntry], ranks: dict[str, int | None]) -> str:
    """A figure for each way in which tensors were divided, those with the most bytes first.

    Args:
        tensors: All tensors.
        ranks: For each file the rank that wrote it.
    """
    found: dict[_Layout, list[TensorEntry]] = {}
    for tensor in tensors:
        chunks = tuple(
            _Chunk(chunk.offsets, chunk.lengths, ranks.get(chunk.item.relative_path) if chunk.item else None)
            for chunk in tensor.chunks
        )
        found.setdefault(_Layout(tensor.shape, tensor.dtype, chunks), []).append(tensor)
    order = sorted(found.items(), key=lambda pair: -sum(tensor.nbytes or 0 for tensor in pair[1]))
    figures = [_figure(layout, alike) for layout, alike in order[:_MOST_LAYOUTS]]
    left = order[_MOST_LAYOUTS:]
    if left:
        count = sum(len(alike) for _, alike in left)
        nbytes = sum(tensor.nbytes or 0 for _, alike in left for tensor in alike)
        figures.append(
            element(
                "p",
                f"{count:,} more tensors with {size_text(nbytes)} are not drawn: "
                f"they have {len(left):,} other shapes or divisions.",
                class_="dim",
            )
        )
    return element("div", "".join(figures), class_="sheets")


def _figure(layout: _Layout, alike: Sequence[TensorEntry]) -> str:
    name = alike[0].key if len(alike) == 1 else f"{alike[0].key} and {len(alike) - 1:,} alike"
    shape = " x ".join(map(str, layout.shape)) or "one number"
    ranks = {chunk.rank for chunk in layout.chunks}
    chunks = "1 chunk" if len(layout.chunks) == 1 else f"{len(layout.chunks):,} chunks"
    size = size_text(sum(tensor.nbytes or 0 for tensor in alike))
    caption = element(
        "figcaption",
        element("b", escape(name))
        + element(
            "span", f"{shape}, {escape(layout.dtype)}, {size}; {chunks}, {_ranks_text(ranks)}", class_="dim"
        ),
    )
    return element("figure", _sheet(layout) + caption)


def _ranks_text(ranks: set[int | None]) -> str:
    known = sorted(rank for rank in ranks if rank is not None)
    if not known:
        return "rank not recorded"
    if len(known) == 1:
        return f"by rank {known[0]}"
    return f"by {len(known):,} ranks, {known[0]} to {known[-1]}"


def _sheet(layout: _Layout) -> str:
    """A tensor as a rectangle: its first dimension goes down, and all others together go across."""
    height = 84.0
    shapes = [
        _chunk(chunk, layout.shape, height) for chunk in layout.chunks[:_MOST_CHUNKS] if prod(chunk.lengths)
    ]
    return drawing("".join(shapes), height, label="chunks of the tensor by rank")


def _chunk(chunk: _Chunk, shape: Ints, height: float) -> str:
    down, across = _span(chunk.offsets, chunk.lengths, shape)
    who = "rank not recorded" if chunk.rank is None else f"rank {chunk.rank}"
    begin = ", ".join(map(str, chunk.offsets))
    size = " x ".join(map(str, chunk.lengths))
    hint = f"{who}\n{size} from ({begin})" if shape else who
    return box(
        across[0],
        down[0] * height,
        across[1],
        down[1] * height,
        kind=f"chunk {rank_colour(chunk.rank)}",
        hint=hint,
    )


def _span(offsets: Ints, lengths: Ints, shape: Ints) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where a chunk begins and how long it is, down and across, as shares of one.

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

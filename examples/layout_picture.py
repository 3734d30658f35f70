"""A picture of who wrote what: every tensor of a checkpoint, each part in the colour of its writer."""

import html
import re
from typing import Any

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
_MODEL, _STATE = "training.model.", "training.optimizer.state."
_COLUMNS = ("parameter", "exp_avg", "exp_avg_sq", "step")
_LABEL, _WIDTH, _GAP, _TOP = 190, 230, 16, 34


def draw_layout(listing: dict[str, Any]) -> str:
    """An SVG of what ``holdfast ls --json`` tells: a line for each parameter, with its optimizer state.

    The first dimension goes from left to right. Hover over a part for its place, its file and its size.
    """
    tensors = {tensor["key"]: tensor for tensor in listing["tensors"]}
    names = [key.removeprefix(_MODEL) for key in tensors if key.startswith(_MODEL)]
    parts = [
        f'<text x="{_LABEL + place * (_WIDTH + _GAP)}" y="22" class="head">{title}</text>'
        for place, title in enumerate(_COLUMNS)
    ]
    top: float = _TOP
    for name in names:
        keys = [_MODEL + name, *(f"{_STATE}{name}.{kind}" for kind in _COLUMNS[1:])]
        shape = tensors[keys[0]]["shape"]
        height = _height(shape)
        parts.append(
            f'<text x="0" y="{top + height / 2 + 4:.1f}">{html.escape(name)} '
            f'<tspan class="faint">{" x ".join(map(str, shape))}</tspan></text>'
        )
        for place, key in enumerate(keys):
            if key in tensors:
                parts += _draw_tensor(tensors[key], _LABEL + place * (_WIDTH + _GAP), top, height)
        top += height + 7
    parts.append(f'<text x="0" y="{top + 13}">everything else</text>')
    parts += [
        _box(_LABEL + 15 * number, top + 2, 12, 12, item["file"], item["key"], item["stored_nbytes"])
        for number, item in enumerate(listing["objects"])
    ]
    width = _LABEL + 3 * (_WIDTH + _GAP) + 40
    return f'<svg viewBox="0 0 {width} {top + 20}" role="img">{"".join(parts)}</svg>'


def draw_legend(listing: dict[str, Any]) -> str:
    """For each rank its colour, and how much it wrote, as a line of HTML."""
    written: dict[int, list[int]] = {}
    for item in [chunk for tensor in listing["tensors"] for chunk in tensor["chunks"]] + listing["objects"]:
        written.setdefault(writer_of(item["file"]), []).append(item["stored_nbytes"])
    return " ".join(
        f'<span><i style="background:{COLOURS[rank % len(COLOURS)]}"></i>'
        f"rank {rank}: {len(sizes)} parts, {sum(sizes) / 1e6:.2f} MB</span>"
        for rank, sizes in sorted(written.items())
    )


def writer_of(file: str) -> int:
    """The rank that wrote a data file: its name begins with it."""
    found = re.match(r"__(\d+)_", file)
    if found is None:
        raise ValueError(f"{file} is not called as a data file of a checkpoint is")
    return int(found[1])


def _draw_tensor(tensor: dict[str, Any], left: float, top: float, height: float) -> list[str]:
    if not tensor["shape"]:
        (chunk,) = tensor["chunks"]
        return [_box(left, top, 12, min(12, height), chunk["file"], tensor["key"], chunk["stored_nbytes"])]
    boxes = []
    for chunk in tensor["chunks"]:
        (x, y), (w, h) = (
            (side[0] / tensor["shape"][0], (side[1] / tensor["shape"][1]) if len(side) > 1 else whole)
            for side, whole in ((chunk["offsets"], 0), (chunk["lengths"], 1))
        )
        where = ", ".join(
            f"{offset}:{offset + length}"
            for offset, length in zip(chunk["offsets"], chunk["lengths"], strict=True)
        )
        boxes.append(
            _box(
                left + x * _WIDTH,
                top + y * height,
                w * _WIDTH - 1,
                h * height,
                chunk["file"],
                f"{tensor['key']}[{where}]",
                chunk["stored_nbytes"],
            )
        )
    return boxes


def _box(x: float, y: float, width: float, height: float, file: str, what: str, nbytes: int) -> str:
    rank = writer_of(file)
    title = html.escape(f"rank {rank} wrote {what}: {nbytes:,} bytes in {file}")
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{COLOURS[rank % len(COLOURS)]}"><title>{title}</title></rect>'
    )


def _height(shape: list[int]) -> float:
    """Root of the second dimension, so that a matrix and a vector fit on one page."""
    return max(9.0, 1.7 * shape[1] ** 0.5) if len(shape) > 1 else 9.0

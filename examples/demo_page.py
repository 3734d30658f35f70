"""The page that the demo leaves behind: the loss curve and who wrote what, in one file on its own."""

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layout_picture import draw_layout, draw_legend
from loss_picture import draw_losses

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em;
  color: #222 }
svg { width: 100%; font: 12px system-ui, sans-serif; display: block } h2 { margin-top: 2em }
.head { font-weight: bold } .faint { fill: #888 } .axis { stroke: #888; fill: none }
.uninterrupted { stroke: #999; stroke-width: 1.5; fill: none } .again { fill: #f3eee3 }
.before { fill: #4477aa } .after { fill: #fff; stroke: #ee6677; stroke-width: 2 }
path.crash { stroke: #b00; stroke-width: 2; stroke-dasharray: 5 4 } text.crash { fill: #b00 }
.legend span { margin-right: 1.4em; white-space: nowrap }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
.ok { color: #27633a } .bad { color: #b00; font-weight: bold }
"""
_LOSS_LEGEND = """<p class="legend">
<span><i style="background: #999"></i>4 ranks, uninterrupted</span>
<span><i style="background: #4477aa"></i>4 ranks, until one was killed</span>
<span><i style="border: 2px solid #ee6677"></i>2 ranks, from the last complete checkpoint</span></p>"""


def write_page(
    target: Path,
    losses: tuple[Mapping[int, float], Mapping[int, float], Mapping[int, float]],
    crash: int,
    layouts: Mapping[str, dict[str, Any]],
    claims: Mapping[str, bool],
) -> Path:
    """Write the page.

    Args:
        target: The file.
        losses: Step to loss, of the uninterrupted run, of the run until the crash, and of the one after it.
        crash: The step in whose save a rank was killed.
        layouts: For each heading, what ``holdfast ls --json`` tells of a checkpoint.
        claims: What was claimed, and whether it held.
    """
    uninterrupted, before, after = losses
    lines = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Holdfast: the demo</title>",
        f"<style>{_STYLE}</style><h1>A rank dies in the middle of a save</h1>",
        f"<h2>The loss curve</h2>{_LOSS_LEGEND}",
        draw_losses(uninterrupted, before, after, crash=crash),
    ]
    for heading, listing in layouts.items():
        lines.append(f"<h2>{html.escape(heading)}</h2><p class='legend'>{draw_legend(listing)}</p>")
        lines.append(draw_layout(listing))
    lines.append("<h2>What was claimed, and checked</h2><ul>")
    lines += [
        f"<li class='{'ok' if held else 'bad'}'>{'✓' if held else '✗'} {html.escape(claim)}</li>"
        for claim, held in claims.items()
    ]
    target.write_text("\n".join([*lines, "</ul></html>", ""]), encoding="utf-8")
    return target

"""The page that the demo leaves behind: the loss curve and what was claimed, in one file on its own."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from loss_picture import draw_losses

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f27; --dim: #5d6675; --paper: #f4f5f8; --card: #fff;
  --line: #8d95a3; --run0: #3b6fb6; --run1: #2f9159; --run2: #c64a5c; --bad: #b3261e; --good: #1c6b3a }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaf0; --dim: #9ba4b5; --paper: #121418;
  --card: #1b1e25; --run0: #6a9ae2; --run1: #5fbd84; --run2: #e57b8a; --bad: #ff8a80; --good: #84d9a1 } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em;
  color: var(--ink); background: var(--paper) }
section { background: var(--card); border-radius: 10px; padding: 4px 18px 14px; margin: 16px 0 }
.picture { overflow-x: auto }
svg { width: 100%; min-width: 640px; font: 12px system-ui, sans-serif; display: block }
svg text { fill: var(--ink) }
.axis { stroke: var(--line); fill: none } .uninterrupted { stroke: var(--line); fill: none }
.run0 { fill: var(--run0) } .run1 { fill: var(--run1) } .run2 { fill: var(--run2) }
path.end { stroke: var(--bad); stroke-dasharray: 5 4 } svg text.end { fill: var(--bad) }
.legend span { margin-right: 1.4em; white-space: nowrap }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 50% }
ul { list-style: none; padding: 0 } .ok::before { content: "✓ "; color: var(--good) }
.bad::before { content: "✗ "; color: var(--bad) } a { color: var(--run0) }
"""


def write_page(
    target: Path,
    uninterrupted: Mapping[int, float],
    runs: Mapping[str, Mapping[int, float]],
    ends: Sequence[tuple[int, str]],
    reports: Mapping[str, str],
    claims: Mapping[str, bool],
) -> Path:
    """Write the page.

    Args:
        target: The file.
        uninterrupted: Step to loss of the run that nothing happened to.
        runs: The same of each part of the other run, by what it is.
        ends: The steps where a part ended, and why.
        reports: Pages of ``holdfast report`` beside this one, with the words that lead there.
        claims: What was claimed, and whether it held.
    """
    colours = [("uninterrupted", "--line"), *((name, f"--run{at}") for at, name in enumerate(runs))]
    legend = "".join(
        f'<span><i style="background: var({colour})"></i>{html.escape(name)}</span>'
        for name, colour in colours
    )
    lines = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Holdfast: the demo</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style><h1>A job that is killed, pre-empted and damaged goes on exactly</h1>",
        f'<section><h2>The loss of each step</h2><p class="legend">{legend}</p>',
        f'<div class="picture">{draw_losses(uninterrupted, list(runs.values()), ends)}</div>',
        "</section><section><h2>The checkpoints</h2><ul>",
        *(f'<li><a href="{name}">{html.escape(words)}</a></li>' for name, words in reports.items()),
        "</ul></section><section><h2>What was claimed, and checked</h2><ul>",
        *(
            f'<li class="{"ok" if held else "bad"}">{html.escape(claim)}</li>'
            for claim, held in claims.items()
        ),
    ]
    target.write_text("\n".join([*lines, "</ul></section></html>", ""]), encoding="utf-8")
    return target

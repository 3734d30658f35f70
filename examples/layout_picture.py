"""A picture of a checkpoint: each file a bar, each tensor a box in it, as an SVG made by hand."""

import html
from pathlib import Path

import holdfast

WIDTH, BAR, GAP = 1000, 46, 34


def draw_layout(checkpoint: Path, target: Path) -> Path:
    """Draw which key lies where in which file, to scale; hover over a box for its name."""
    metadata = holdfast.FileSystemReader(checkpoint).read_metadata()
    files: dict[str, list[tuple[int, int, str]]] = {}
    for index, place in metadata.storage_data.items():
        files.setdefault(place.relative_path, []).append((place.offset, place.length, index.fqn))
    parts = [f'<text x="0" y="16" font-size="15">{html.escape(str(checkpoint))}</text>']
    top = 40
    for name, items in sorted(files.items()):
        total = max(offset + length for offset, length, _ in items)
        parts.append(
            f'<text x="0" y="{top + 12}" font-size="12">{html.escape(name)} · {total:,} bytes</text>'
        )
        for offset, length, key in sorted(items):
            x, width = offset / total * WIDTH, max(0.5, length / total * WIDTH - 0.7)
            hue = hash_of(key.rsplit(".", 1)[0]) % 360
            title = html.escape(f"{key}: {length:,} bytes at {offset:,}")
            parts.append(
                f'<rect x="{x:.2f}" y="{top + 18}" width="{width:.2f}" height="{BAR}" '
                f'fill="hsl({hue},55%,62%)"><title>{title}</title></rect>'
            )
            if width > 7 * len(key):
                parts.append(f'<text x="{x + 4:.2f}" y="{top + 46}" font-size="11">{html.escape(key)}</text>')
        top += BAR + GAP
    target.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 0 {WIDTH + 20} {top}" '
        f'font-family="sans-serif">{"".join(parts)}</svg>\n'
    )
    return target


def hash_of(text: str) -> int:
    """A number that is the same in every run, unlike ``hash``."""
    return sum(ord(letter) * 31**place for place, letter in enumerate(text[-8:]))

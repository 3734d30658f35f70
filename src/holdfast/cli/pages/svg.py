"""Owns how drawings are written down: elements of SVG and HTML, with every text escaped.

Drawings have no fixed width. Places across are shares of the width, in percent; places down are pixels. So a
drawing fits a phone and a wide window alike, and its letters keep their size.
"""

import re
from html import escape

from holdfast.cli.text import printable

__all__ = ["as_html", "box", "drawing", "element", "key_html", "line", "nested", "percent", "text"]


def element(name: str, content: str = "", /, **attributes: object) -> str:
    """An element around a content that is written already.

    Args:
        name: Its name.
        content: What is in it.
        attributes: Its attributes. ``class_`` is ``class``, and ``_`` in a name is ``-``. None is left out.
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{as_html(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{said}>{content}</{name}>" if content else f"<{name}{said}/>"


def as_html(words: str) -> str:
    """A text, escaped. What nobody could see (control characters, directions of writing) is spelled out."""
    return escape(printable(words))


def key_html(key: str) -> str:
    """A key, escaped; a line may end behind each of its dots, but not within a number."""
    return re.sub(r"\.(?!\d)", ".<wbr>", as_html(key))


def _title(hint: str) -> str:
    """A text that is shown while the mouse is on an element."""
    return f"<title>{chr(10).join(map(as_html, hint.split(chr(10))))}</title>" if hint else ""


def percent(share: float) -> str:
    """A share of one as a length across."""
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def box(
    left: float, top: float, width: float, height: float, *, kind: str, hint: str = "", corner: int = 0
) -> str:
    """A rectangle: left edge and width as shares of one, the others in pixels.

    Args:
        left: Where it begins.
        top: Where it begins.
        width: How wide it is.
        height: How high it is.
        kind: Its class, which gives its colour.
        hint: What is shown while the mouse is on it.
        corner: How round its corners are, in pixels.
    """
    return element(
        "rect",
        _title(hint),
        x=percent(left),
        y=_pixels(top),
        width=percent(width),
        height=_pixels(height),
        class_=kind,
        rx=corner or None,
    )


def line(left: float, top: float, right: float, bottom: float, *, kind: str) -> str:
    """A line between two places: across as shares of one, down in pixels."""
    return element(
        "line", x1=percent(left), y1=_pixels(top), x2=percent(right), y2=_pixels(bottom), class_=kind
    )


def text(
    content: str, left: float | str, top: float, *, kind: str | None = None, anchor: str | None = None
) -> str:
    """A line of text that stands on ``top``, from ``left`` on: a share of one, or a length."""
    at = left if isinstance(left, str) else percent(left)
    return element("text", as_html(content), x=at, y=_pixels(top), class_=kind, text_anchor=anchor)


def nested(content: str, left: float, top: float, width: float, height: float, *, hint: str = "") -> str:
    """A drawing inside a drawing, which cuts off what reaches beyond it."""
    return element(
        "svg",
        _title(hint) + content,
        x=percent(left),
        y=_pixels(top),
        width=percent(width),
        height=_pixels(height),
    )


def drawing(content: str, height: float, *, label: str) -> str:
    """A whole drawing, as wide as its place.

    Args:
        content: What is in it.
        height: How high it is, in pixels.
        label: What it shows, for those who cannot see it.
    """
    return element("svg", content, width="100%", height=_pixels(height), role="img", aria_label=label)


def _pixels(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")

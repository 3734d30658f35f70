"""Owns the frame of a page: one HTML file with its rules inside, and nothing that is loaded."""

from collections.abc import Iterable, Sequence
from importlib import resources

from holdfast._version import __version__
from holdfast.cli.pages.svg import as_html, element, key_html

__all__ = ["columns", "facts", "legend", "page", "scale_legend", "section", "table", "verdict"]


def page(title: str, under: str, content: Iterable[str]) -> str:
    """A whole page.

    Args:
        title: What it is about.
        under: A line below the title.
        content: What stands on it, as HTML.
    """
    style = resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Nothing may be loaded and no script may run, whatever the names in a checkpoint say.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{as_html(title)}</title><style>\n{style}</style></head>\n<body><main>"
        f"<header><h1>{as_html(title)}</h1><p>{as_html(under)}</p></header>\n"
        f"{''.join(content)}"
        f"<footer>holdfast {as_html(__version__)}</footer></main></body></html>\n"
    )


def verdict(kind: str, word: str, sentence: str) -> str:
    """One word that everybody looks for first, and a sentence about it; ``kind`` is good, bad or dim."""
    return element("p", f"<b>{as_html(word)}</b> {as_html(sentence)}", class_=f"verdict {kind}") + "\n"


def section(title: str, about: str, *content: str) -> str:
    """A card with a title, a sentence about it, and what stands below."""
    sentence = element("p", as_html(about), class_="dim") if about else ""
    return element("section", f"<h2>{as_html(title)}</h2>{sentence}{''.join(content)}") + "\n"


def columns(*sections: str) -> str:
    """Sections side by side, where there is room."""
    return element("div", "".join(sections), class_="columns") + "\n"


def facts(rows: dict[str, str]) -> str:
    """A few facts, each with its name."""
    cells = (f"<div><dt>{as_html(name)}</dt><dd>{as_html(value)}</dd></div>" for name, value in rows.items())
    return element("dl", "".join(cells), class_="facts") + "\n"


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """The meaning of colours: names, each with the class of its colour."""
    cells = (f'<span><i class="{colour}"></i>{as_html(name)}</span>' for name, colour in entries)
    return element("div", "".join(cells), class_="legend")


def scale_legend(first: str, shades: Iterable[str], last: str) -> str:
    """The meaning of a scale of colours: the names of its ends."""
    strip = "".join(f'<i class="{shade}"></i>' for shade in shades)
    return element("div", f"<b>{as_html(first)}</b>{strip}<b>{as_html(last)}</b>", class_="legend strip")


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    keys: Sequence[int] = (0,),
    numbers: Sequence[int] = (),
    stacked: bool = False,
) -> str:
    """A table. Only columns of ``keys`` are wrapped; those of ``numbers`` are aligned to the right.

    On a phone a ``stacked`` one has a key on a line of its own, and the rest of its row below.
    """

    def cell(content: str, at: int, tag: str) -> str:
        kind = "k" if at in keys else "n" if at in numbers else "w"
        said = key_html(content) if kind == "k" else as_html(content)
        return f'<{tag} class="{kind}">{said}</{tag}>'

    def line(row: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(cell(content, at, tag) for at, content in enumerate(row))}</tr>"

    top = line(head, "th") if head else ""
    body = "".join(line(row, "td") for row in rows)
    start = '<table class="stacked">' if stacked else "<table>"
    return f'<div class="scroll">{start}{top}{body}</table></div>'

"""Owns the frame of a page: one HTML file with its rules inside, and nothing that is loaded."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from holdfast._version import __version__
from holdfast.cli.pages.svg import element

__all__ = ["facts", "legend", "page", "section", "table"]


def page(title: str, under: str, sections: Iterable[str]) -> str:
    """A whole page.

    Args:
        title: What it is about.
        under: A line below the title.
        sections: What stands on it, as HTML.
    """
    style = resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Nothing may be loaded and no script may run, whatever the names in a checkpoint say.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n<body><main>"
        f"<h1>{escape(title)}</h1>"
        f'<p class="dim">{escape(under)}</p>'
        f"{''.join(sections)}"
        f"<footer>Made by holdfast {escape(__version__)}.</footer></main></body></html>\n"
    )


def section(title: str, about: str, *content: str) -> str:
    """A card with a title, a sentence about it, and what stands below."""
    said = element("p", escape(about), class_="dim") if about else ""
    return element("section", f"<h2>{escape(title)}</h2>{said}{''.join(content)}") + "\n"


def facts(rows: dict[str, str]) -> str:
    """A few facts, each with its name."""
    return element(
        "dl",
        "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in rows.items()
        ),
        class_="facts",
    )


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """What colours mean: names, each with the class of its colour."""
    said = "".join(f'<span><i class="{colour}"></i>{escape(name)}</span>' for name, colour in entries)
    return element("div", said, class_="legend")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """A table; the columns of ``numbers`` are aligned to the right."""

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f'<{tag} class="{"n" if at in numbers else "k"}">{escape(cell)}</{tag}>'
            for at, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{cells(head, "th")}</tr>{body}</table></div>'

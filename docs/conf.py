"""Settings of the site that ``make docs`` builds from these pages with Sphinx."""

import re
from typing import Any

project = "Holdfast"
author = "the authors of Holdfast"
extensions = ["myst_parser"]
root_doc = "README"
html_theme = "furo"
html_title = "Holdfast"
# Headings can be linked to by their text, as on code hosts.
myst_heading_anchors = 4


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_contents)


def add_contents(_: Any, name: str, source: list[str]) -> None:
    """Give the index a table of contents: the links that it has, under the headings where they stand.

    So there is one list of pages, which also reads well where nobody builds a site.
    """
    if name != root_doc:
        return
    sections = re.split(r"^## +(.+)$", source[0], flags=re.MULTILINE)[1:]
    for title, text in zip(sections[::2], sections[1::2], strict=True):
        pages = re.findall(r"\]\(([\w/]+\.md)\)", text)
        if pages:
            listed = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{listed}\n```\n"

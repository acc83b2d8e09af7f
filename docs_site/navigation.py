"""The site's navigation: the lists of links in ``docs/index.md``, which say the same where there is no site."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

__all__ = ["add_navigation", "chapters"]

_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_ITEM = re.compile(r"^- \[[^\]]+\]\(([\w-]+)\.md\)", re.MULTILINE)
#: Where pages are that the index does not name yet.
_REST = "More"


def chapters(index: str, pages: set[str]) -> dict[str, list[str]]:
    """Pages by chapter, in the order of the index; those that it does not list come last.

    Parameters
    ----------
    index
        Text of the index: each heading of the second level is a chapter, of the pages that a list below it begins its items with.
    pages
        Names of all pages but the index, without their suffix.
    """
    parts = _HEADING.split(index)
    found = {title: _ITEM.findall(text) for title, text in zip(parts[1::2], parts[2::2], strict=True)}
    found = {title: names for title, names in found.items() if names}
    rest = sorted(pages - {name for names in found.values() for name in names})
    return {**found, _REST: rest} if rest else found


def add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Give the index Sphinx's tables of contents, which are what themes make navigation of."""
    if page != app.config.root_doc:
        return
    for title, names in chapters(source[0], app.project.docnames - {page}).items():
        lines = ["```{toctree}", ":hidden:", f":caption: {title}", "", *names, "```"]
        source[0] += "\n" + "\n".join(lines) + "\n"

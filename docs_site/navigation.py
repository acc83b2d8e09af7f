"""The site's navigation, made of the lists of links in ``docs/index.md``."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_ITEM = re.compile(r"^- \[[^\]]+\]\(([\w-]+)\.md\)", re.MULTILINE)
#: Chapter of pages that the index does not name.
_REST = "More"


def chapters(index: str, pages: set[str]) -> dict[str, list[str]]:
    """Return the pages by chapter, in the order of the index. Pages that it does not list come last.

    Parameters
    ----------
    index
        Text of the index. Each heading of the second level is a chapter; its pages are the links with which list items below it begin.
    pages
        Names of all pages but the index, without their suffix.
    """
    parts = _HEADING.split(index)
    listed = {title: _ITEM.findall(text) for title, text in zip(parts[1::2], parts[2::2], strict=True)}
    listed = {title: names for title, names in listed.items() if names}
    unlisted = sorted(pages - {name for names in listed.values() for name in names})
    return {**listed, _REST: unlisted} if unlisted else listed


def add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Give the index Sphinx's tables of contents, from which themes make their navigation."""
    if page != app.config.root_doc:
        return
    for title, names in chapters(source[0], app.project.docnames - {page}).items():
        lines = ["```{toctree}", ":hidden:", f":caption: {title}", "", *names, "```"]
        source[0] += "\n" + "\n".join(lines) + "\n"

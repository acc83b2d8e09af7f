"""What the site adds to its pages: navigation, made of the lists of links in ``docs/index.md``, and summaries of search results.

Summaries also work on pages that are opened as files: the search page brings the text of all pages.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_ITEM = re.compile(r"^- \[[^\]]+\]\(([\w-]+)\.md\)", re.MULTILINE)
#: Chapter of pages that the index does not name.
_REST = "More"
_FILE = "pages.js"
_MAIN = re.compile(r"<article[^>]*role=\"main\"[^>]*>.*?</article>", re.DOTALL)
#: Answers the fetches of Sphinx's search from the pages that came along.
_SCRIPT = """
const fetched = window.fetch;
window.fetch = (url, ...options) => {
  const name = new URL(url, location.href).pathname.split("/").pop();
  return name in PAGES ? Promise.resolve(new Response(PAGES[name])) : fetched(url, ...options);
};
"""


def chapters(index: str, pages: set[str]) -> dict[str, list[str]]:
    """Return `pages`, the names of all pages but the index without their suffix, by chapter, in the order of the index.

    Each heading of the second level in the index's text is a chapter; its pages are the links with which list items below it begin.
    Pages that it does not list come last.
    """
    parts = _HEADING.split(index)
    listed = {title: _ITEM.findall(text) for title, text in zip(parts[1::2], parts[2::2], strict=True)}
    listed = {title: names for title, names in listed.items() if names}
    unlisted = sorted(pages - {name for names in listed.values() for name in names})
    return {**listed, _REST: unlisted} if unlisted else listed


def _add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Give the index Sphinx's tables of contents, from which themes make their navigation."""
    if page != app.config.root_doc:
        return
    for title, names in chapters(source[0], app.project.docnames - {page}).items():
        lines = ["```{toctree}", ":hidden:", f":caption: {title}", "", *names, "```"]
        source[0] += "\n" + "\n".join(lines) + "\n"


def setup(app: Sphinx) -> None:
    """Set up this extension; Sphinx calls it."""
    app.connect("source-read", _add_navigation)
    app.connect("html-page-context", _include)
    app.connect("build-finished", _write)


def _include(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if page == "search":
        app.add_js_file(_FILE)


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.name != "html":
        return
    folder = Path(app.outdir)
    pages = {file.name: _MAIN.search(file.read_text()) for file in sorted(folder.glob("*.html"))}
    texts = {name: page[0] for name, page in pages.items() if page is not None}
    (folder / "_static" / _FILE).write_text(f"const PAGES = {json.dumps(texts)};{_SCRIPT}")

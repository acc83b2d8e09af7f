"""Summaries of search results. They also work on pages that are opened as files: the search page brings the text of all pages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

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


def add_summaries(app: Sphinx) -> None:
    """Make the search page of a site bring the text of the others."""
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

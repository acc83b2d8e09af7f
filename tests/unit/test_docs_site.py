"""The documentation site: it is built without a network, every link leads somewhere, and nothing is fetched from other sites."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from docs_site.navigation import chapters

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
#: Elements that make a browser fetch a file, and the attribute that names the file.
_FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "srcset", "object": "data", "embed": "src"}
#: Relations of ``link`` elements that a browser fetches.
_FETCHED_LINKS = {
    "stylesheet",
    "icon",
    "preload",
    "modulepreload",
    "prefetch",
    "preconnect",
    "dns-prefetch",
    "manifest",
}
_OF_STYLES = re.compile(r"""url\(\s*['"]?([^'")]+)|@import\s+['"]([^'"]+)""")
#: A script that would fetch something, directly or by an element.
_OF_SCRIPTS = re.compile(r"""(?:fetch|importScripts|import|\.src\s*=|\.open)\s*\(?\s*['"`](?:https?:)?//""")


class PageLinks(HTMLParser):
    """The links, fetched files and ids of an HTML file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.ids: set[str] = set()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.ids |= {attributes["id"]} if "id" in attributes else set()
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        if _FETCHED.get(tag) in attributes:
            self.fetched.append(attributes[_FETCHED[tag]])
        if tag == "link" and _FETCHED_LINKS & set(attributes.get("rel", "").split()):
            self.fetched.append(attributes["href"])
        self.fetched += _styled(attributes.get("style", ""))


def _styled(text: str) -> list[str]:
    """Return the addresses that styles make a browser fetch, except for pictures within them."""
    return [
        address
        for match in _OF_STYLES.findall(text)
        for address in match
        if address and not address.startswith("data:")
    ]


#: Builds sites, and prints what came of each.
BUILDS = """
import contextlib, io, json, sys
from pathlib import Path
from docs_site.__main__ import build
outcomes = []
for source, target in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = build(Path(source), Path(target))
    outcomes.append((code, errors.getvalue()))
json.dump(outcomes, sys.stdout)
"""


#: A built site: its folder, the exit code and the errors of the build.
Built = tuple[Path, int, str]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> list[Built]:
    """The site of this project, and one with links that lead nowhere."""
    broken = tmp_path_factory.mktemp("docs")
    (broken / "index.md").write_text("# One\n\n[a](#no-such-heading) [b](no-such-page.md)\n")
    folders = [(str(source), str(tmp_path_factory.mktemp("site"))) for source in (ROOT / "docs", broken)]
    # In another process, since Sphinx leaves docutils' registries changed.
    ran = subprocess.run(
        [sys.executable, "-c", BUILDS, json.dumps(folders)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    outcomes = json.loads(ran.stdout)
    return [(Path(target), code, errors) for (_, target), (code, errors) in zip(folders, outcomes, strict=True)]


@pytest.fixture(scope="module")
def site(builds: list[Built]) -> Path:
    folder, code, errors = builds[0]
    assert code == 0, errors
    return folder


def test_every_link_and_anchor_of_the_site_is_there(site: Path) -> None:
    pages = {file: PageLinks(file) for file in site.glob("*.html")}
    assert {f"{page.stem}.html" for page in PAGES} <= {file.name for file in pages}
    wrong = []
    for file, links_of_file in pages.items():
        for link in [*links_of_file.links, *links_of_file.fetched]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = file if not parts.path else (file.parent / unquote(parts.path)).resolve()
            anchors = pages[target].ids if target in pages else set()
            if not target.exists() or (parts.fragment and target in pages and unquote(parts.fragment) not in anchors):
                wrong.append((file.name, link))
    assert not wrong


def test_nothing_of_the_site_is_fetched_from_other_sites(site: Path) -> None:
    fetched = [(file, address) for file in site.rglob("*.html") for address in PageLinks(file).fetched]
    fetched += [
        (file, address)
        for file in [*site.rglob("*.css"), *site.rglob("*.svg")]
        for address in _styled(file.read_text())
    ]
    assert fetched, "the check sees nothing"
    assert not [(file.name, address) for file, address in fetched if urlsplit(address).netloc]
    assert not [file.name for file in site.rglob("*.js") if _OF_SCRIPTS.search(file.read_text())]


def test_a_search_has_the_text_of_every_page_and_nothing_is_fetched_for_it(site: Path) -> None:
    assert "_static/pages.js" in (site / "search.html").read_text()
    assert "_static/pages.js" not in (site / "index.html").read_text(), "half a megabyte that only a search needs"
    script = (site / "_static" / "pages.js").read_text()
    texts = json.JSONDecoder().raw_decode(script, len("const PAGES = "))[0]
    assert {f"{page.stem}.html" for page in PAGES} <= texts.keys()
    assert "withWatermark" in texts["operators.html"]


def test_every_page_is_one_click_away(site: Path) -> None:
    linked = {urlsplit(link).path for link in PageLinks(site / "index.html").links}
    assert {f"{page.stem}.html" for page in PAGES} <= linked | {"index.html"}


def test_a_link_that_leads_nowhere_fails_the_build(builds: list[Built]) -> None:
    _, code, errors = builds[1]
    assert code != 0
    assert "no-such-heading" in errors
    assert "no-such-page" in errors


def test_chapters_have_every_page_once() -> None:
    pages = [name for names in chapters((ROOT / "docs" / "index.md").read_text(), set()).values() for name in names]
    assert len(pages) == len(set(pages))
    index = "# S\n\n## One\n\n- [A](a.md): b, see [B](b.md).\n- [B](b.md)\n\n## Words\n\n[C](c.md)\n"
    assert chapters(index, {"a", "b", "c"}) == {"One": ["a", "b"], "More": ["c"]}
    assert chapters(index, {"a", "b"}) == {"One": ["a", "b"]}


# -- as the repository shows them ---------------------------------------------------------------------------------


def tokens(file: Path) -> Iterator[Token]:
    """Yield all tokens of a Markdown file, as GitHub reads it."""
    for token in MarkdownIt("gfm-like", {"linkify": False}).parse(file.read_text()):
        yield token
        yield from token.children or ()


def anchors(file: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a file."""
    names: set[str] = set()
    of_file = list(tokens(file))
    for opening, text in itertools.pairwise(of_file):
        if opening.type == "heading_open":
            words = "".join(child.content for child in text.children or ())
            names.add(re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-"))
    return names


@pytest.mark.parametrize("document", [ROOT / "README.md", *PAGES], ids=lambda document: document.name)
def test_every_link_of_the_files_is_there(document: Path) -> None:
    links = [str(token.attrs.get("href", token.attrs.get("src", ""))) for token in tokens(document) if token.attrs]
    for link in filter(None, links):
        parts = urlsplit(link)
        if parts.scheme in ("http", "https"):
            continue
        target = document if not parts.path else document.parent / parts.path
        assert target.exists(), link
        assert not parts.fragment or parts.fragment in anchors(target), link

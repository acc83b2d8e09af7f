"""The dashboard's page in a headless browser over a fleet of figures: keyboard, colours, hostile names, no fleet, trouble, size."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from benchmarks.dashboard import measure, served
from benchmarks.fed_fleet import FedFleet

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)")
EVIL = "<img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that may tell nothing on its console, but for what could not be loaded."""
    told: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light", reduced_motion="reduce")
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    yield page
    page.close()
    assert not [one for one in told if not one.startswith("Failed to load resource")]


class Told(FedFleet):
    """A fleet of which something else is told."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(1, 2)
        self.changes = changes

    def watch(self, known: Mapping[str, str]) -> dict[str, Any]:
        return {**super().watch(known), **self.changes}


def test_shards_are_reached_and_opened_by_keys_alone(page: Page) -> None:
    with served(FedFleet(2, 8)) as url:
        page.goto(url)
        cells = page.locator(".cell")
        expect(cells).to_have_count(8)
        assert page.locator('.cell[tabindex="0"]').count() == 1
        for _ in range(20):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.className").startswith("cell"):
                break
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        expect(cells.nth(2)).to_be_focused()
        page.wait_for_timeout(2500)
        expect(cells.nth(2)).to_be_focused()
        page.keyboard.press("End")
        expect(cells.last).to_be_focused()
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name="query-")
        expect(dialog).to_be_visible()
        expect(dialog).to_contain_text("10 deltas, 1 snapshot file")
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(cells.last).to_be_focused()


def test_queries_are_sorted_by_what_is_asked_for(page: Page) -> None:
    with served(FedFleet(4, 8)) as url:
        page.goto(f"{url}#/queries")
        names = page.locator("tbody .name-cell")
        expect(names).to_have_text([f"query-0{number}" for number in range(4)])
        page.get_by_role("button", name="query", exact=True).press("Enter")
        expect(names).to_have_text([f"query-0{number}" for number in reversed(range(4))])
        expect(page.get_by_role("columnheader", name="query", exact=True)).to_have_attribute("aria-sort", "descending")


def test_colours_are_the_systems_until_somebody_chooses_and_are_kept(page: Page) -> None:
    with served(FedFleet(1, 2)) as url:
        page.goto(url)
        html, button = page.locator("html"), page.locator("#theme")
        expect(html).to_have_attribute("data-theme", "light")
        page.emulate_media(color_scheme="dark")
        expect(html).to_have_attribute("data-theme", "dark")
        button.click()
        expect(html).to_have_attribute("data-theme", "light")
        expect(button).to_have_attribute("aria-label", "Colours: light")
        page.reload()
        expect(html).to_have_attribute("data-theme", "light")


def test_names_are_text_and_what_is_not_known_is_no_null(page: Page) -> None:
    fed = FedFleet(1, 2)
    (query,) = fed.watch({})["queries"]
    nothing = dict.fromkeys(("rows_per_second", "watermark_ms", "locality", "last_commit_ms", "batch_id"))
    shards = [
        {**one, **dict.fromkeys(("actor_name", "node_id", "executor", "epoch")), "operations": 0}
        for one in query["shards"]
    ]
    evil = {**query, **nothing, "name": EVIL, "shards": shards, "batches": []}
    actor = {**fed.actors[0], "host": EVIL, "memory_limit": None, "resident_bytes": None, "spilled_bytes": None}
    changes = {"queries": [evil], "stamps": {EVIL: "1"}, "store_actors": [actor], "uri": EVIL}
    with served(Told(**changes)) as url:
        page.goto(url)
        expect(page.locator("#uri")).to_have_text(EVIL)
        expect(page.locator("main")).to_contain_text("On no store actor")
        for section, selector in (
            ("#/queries", "tbody a"),
            (f"#/queries/{page.evaluate('encodeURIComponent', EVIL)}", "h1"),
        ):
            page.goto(url + section)
            expect(page.locator(selector)).to_have_text(EVIL)
            assert "null" not in page.locator("main").inner_text()
            assert "NaN" not in page.locator("main").inner_text()
        assert page.locator("main img").count() == 0
        assert page.title() == f"Statefleet: {EVIL}"


def test_a_fleet_that_nobody_has_used_is_said_to_be_empty_everywhere(page: Page) -> None:
    with served(Told(queries=[], stamps={}, store_actors=[])) as url:
        page.goto(url)
        for section, text in {
            "#/": "no query has used this fleet",
            "#/queries": "No query has used this fleet yet",
            "#/queries/nothing": "The fleet has no such query",
            "#/events": "Nothing has happened since the dashboard started",
            "#/state": "There is no state yet",
        }.items():
            page.goto(url + section)
            expect(page.locator("main")).to_contain_text(text)


class Failing(FedFleet):
    """A fleet whose coordinator is away when the test says so."""

    is_away = False

    def watch(self, known: Mapping[str, str]) -> dict[str, Any]:
        if self.is_away:
            raise RuntimeError("nobody is there")
        return super().watch(known)


def test_what_is_known_stays_when_the_coordinator_or_the_server_is_away_and_the_page_goes_on_by_itself(
    page: Page,
) -> None:
    fleet = Failing(1, 4)
    with served(fleet) as url:
        page.goto(url)
        live, banner = page.locator("#live-text"), page.locator("#banner")
        expect(live).to_have_text("live")
        fleet.is_away = True
        expect(live).to_have_text("coordinator away")
        expect(banner).to_contain_text("nobody is there")
        expect(page.locator(".cell")).to_have_count(4)
        fleet.is_away = False
        expect(live).to_have_text("live")
        expect(banner).to_be_hidden()
        port = int(url.rstrip("/").rpartition(":")[2])
    expect(live).to_have_text("not connected", timeout=15_000)
    expect(banner).to_contain_text("It is tried again")
    expect(page.locator(".cell")).to_have_count(4)
    with served(fleet, port):
        expect(live).to_have_text("live", timeout=20_000)
        expect(banner).to_be_hidden()
    with served(fleet, port, token="another-one-than-before"):
        expect(banner).to_contain_text("wants its token", timeout=30_000)


def test_a_look_up_that_fails_says_so(page: Page) -> None:
    with served(FedFleet(1, 2)) as url:
        page.goto(f"{url}#/state")
        page.get_by_role("button", name="Look up").click()
        expect(page.locator("main .bad")).to_contain_text("this fleet has figures and no rows")


@pytest.mark.timeout(180)
def test_an_update_is_small_however_many_shards_there_are(browser: Browser) -> None:
    """How long it takes with a thousand shards is measured by benchmarks.dashboard; figures are in docs/dashboard.md."""
    found = measure(browser, 10, 400, 2)
    for part in ("map", "queries", "one query"):
        assert 0 < found[part]["bytes of an update"] < 120_000, found

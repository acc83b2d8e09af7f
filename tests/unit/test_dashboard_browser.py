"""The dashboard's page in a headless browser over a made-up fleet: keyboard, colours, hostile names, no fleet, trouble, size."""

from __future__ import annotations

import datetime as dt
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from statefleet.dashboard.values import column_json, typed_value
from tests.fed_fleet import FedFleet
from tests.served_dashboard import served

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)")
EVIL = "<img src=x onerror=\"document.title='owned'\">"


#: Fields of a form that are wider than the space for them.
OVERFLOWING = """[...document.querySelectorAll('form.look label, form.look fieldset, form.look .null')]
    .filter(one => one.scrollWidth > one.clientWidth + 1 && one.clientWidth > 0).map(one => one.textContent)"""


#: The number of lines of the text of each selected element.
LINES = """all => all.map(one => {
    const text = document.createRange();
    text.selectNodeContents(one);
    return text.getClientRects().length; })"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that may print nothing on its console except errors of loading."""
    messages: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light", reduced_motion="reduce")
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    yield page
    page.close()
    assert not [message for message in messages if not message.startswith("Failed to load resource")]


class ChangedFleet(FedFleet):
    """A fleet whose reports have changed fields."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(1, 2)
        self.changes = changes

    def watch(self, known: Mapping[str, str]) -> dict[str, Any]:
        return {**super().watch(known), **self.changes}


def test_shards_are_reached_and_opened_with_the_keyboard_only(page: Page) -> None:
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


def test_the_first_screen_says_that_all_is_well_and_the_map_has_a_row_for_each_query(page: Page) -> None:
    with served(FedFleet(3, 24)) as url:
        page.goto(url)
        health = page.locator(".health .sentence")
        expect(health).to_have_text("All is well: all 3 queries run, all 10 store actors answer, 5 executors work.")
        rows = page.locator("table.map tbody tr")
        expect(rows.locator("th")).to_have_text([f"query-0{number}" for number in range(3)])
        for row in rows.all():
            labels = row.locator(".cell").all_inner_texts()
            assert sorted(map(int, labels)) == list(range(8)), "each square says which shard it is"
        expect(page.locator("th.actor .host").first).to_have_text("10.0.0.4#0")
        expect(page.locator("table.overview tbody tr").first).to_contain_text("running")
        expect(page.locator("#trouble-title")).to_be_hidden()


def test_a_lost_executor_and_an_overdue_batch_are_on_the_first_screen_at_once(page: Page) -> None:
    fleet = FedFleet(2, 8)
    with served(fleet) as url:
        page.goto(url)
        chip = page.locator("th.actor .chip", has_text="executor 2")
        expect(chip.first).to_have_class("chip")
        fleet.lose_executor(2)
        text = "batch 120 of query-00 has been running for 29.3 s (median 1.9 s): executor 2 on 10.0.0.6 was lost"
        fleet.running["query-00"] = {"batch_id": 120, "running_ms": 29_300, "is_overdue": True, "text": text}
        expect(chip.first).to_have_class("chip gone")
        expect(chip.first).to_have_text("executor 2 lost")
        expect(page.locator(".health")).to_contain_text("2 things to look at")
        expect(page.locator(".findings")).to_contain_text(text)
        expect(page.locator("table.overview tbody tr").first).to_contain_text("batch 120 runs for 29 s")
        expect(page.locator(".log")).to_contain_text("executor 2 on 10.0.0.6 was lost: Remote RPC client disassociated")
        fleet.executors.append({**fleet.executors[2], "executor_id": "9", "alive": True, "lost_at_ms": None})
        fleet.running.clear()
        expect(page.locator(".health")).to_contain_text("All is well")
        expect(page.locator("th.actor .chip", has_text="executor 9").first).to_be_visible()
        expect(chip).to_have_count(0)


def test_what_one_cause_did_to_several_shards_is_one_row_and_maintenance_is_asked_for(page: Page) -> None:
    fleet = FedFleet(1, 8)
    with served(fleet) as url:
        page.goto(f"{url}#/events")
        expect(page.locator("#live-text")).to_have_text("live")
        source = fleet.queries["query-00"]["shards"][0]["actor_name"]
        query = fleet.queries["query-00"]
        shards = [{**shard_row, "actor_name": source, "snapshot_version": 99} for shard_row in query["shards"]]
        fleet.queries["query-00"] = {**query, "shards": shards}
        for shard in range(8):
            fleet.move("query-00", shard, 3 + shard % 2, "the store actor that had it was lost")
        rows = page.locator(".log > li")
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text("query-00, 8 shards (0, 1, 2, 3, 4, 5, 6, 7)")
        expect(rows.locator(".text")).to_contain_text("7): the store actor that had it was lost")
        expect(rows.locator("summary")).to_have_text("8 times")
        page.get_by_label("show").select_option("maintenance")
        expect(rows).to_contain_text("snapshots of 8 shards")


def test_queries_are_sorted_by_the_chosen_column(page: Page) -> None:
    with served(FedFleet(4, 8)) as url:
        page.goto(f"{url}#/queries")
        names = page.locator("tbody .name-cell")
        expect(names).to_have_text([f"query-0{number}" for number in range(4)])
        page.get_by_role("button", name="query", exact=True).press("Enter")
        expect(names).to_have_text([f"query-0{number}" for number in reversed(range(4))])
        expect(page.get_by_role("columnheader", name="query", exact=True)).to_have_attribute("aria-sort", "descending")


def test_colours_are_the_systems_until_a_user_chooses_and_are_kept(page: Page) -> None:
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


def test_names_are_text_and_unknown_values_are_not_shown_as_null(page: Page) -> None:
    fed = FedFleet(1, 2)
    (query,) = fed.watch({})["queries"]
    nothing = dict.fromkeys(("rows_per_second", "watermark_ms", "locality", "last_commit_ms", "batch_id"))
    shards = [
        {**shard, **dict.fromkeys(("actor_name", "node_id", "executor", "epoch")), "operations": 0}
        for shard in query["shards"]
    ]
    evil = {**query, **nothing, "name": EVIL, "shards": shards, "batches": []}
    actor = {**fed.actors[0], "host": EVIL, "memory_limit": None, "resident_bytes": None, "spilled_bytes": None}
    changes = {"queries": [evil], "stamps": {EVIL: "1"}, "store_actors": [actor], "uri": EVIL}
    with served(ChangedFleet(**changes)) as url:
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


def test_an_unused_fleet_is_shown_as_empty_everywhere(page: Page) -> None:
    with served(ChangedFleet(queries=[], stamps={}, store_actors=[])) as url:
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


class AbsentFleet(FedFleet):
    """A fleet whose coordinator is unreachable while `is_away`."""

    is_away = False

    def watch(self, known: Mapping[str, str]) -> dict[str, Any]:
        if self.is_away:
            raise RuntimeError("nobody is there")
        return super().watch(known)


def test_the_last_picture_stays_while_the_coordinator_or_the_server_is_away_and_the_page_recovers_by_itself(
    page: Page,
) -> None:
    fleet = AbsentFleet(1, 4)
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


def test_charts_that_an_operator_lacks_are_hidden_and_a_slow_first_batch_leaves_the_others_space(page: Page) -> None:
    fleet = FedFleet(1, 2)
    for _ in range(4):
        fleet.watch({})
    query = fleet.queries["query-00"]
    first, *later = query["batches"]
    slow = {**first, "planned_ms": first["planned_ms"] - 60_000, "rows_in": 1}
    fleet.queries["query-00"] = {**query, "batches": [slow, *later]}

    class NoWatermark(FedFleet):
        def watch(self, known: Mapping[str, str]) -> dict[str, Any]:
            report = fleet.watch(known)
            return {**report, "queries": [{**query_row, "watermark_ms": None} for query_row in report["queries"]]}

    with served(NoWatermark(1, 2)) as url:
        page.goto(f"{url}#/queries/query-00")
        expect(page.locator(".chart:visible")).to_have_count(4)
        expect(page.get_by_text("Behind by event time")).to_be_hidden()
        expect(page.locator(".timeline .bar.cut")).to_have_count(1)
        expect(page.locator(".timeline .num", has_text=re.compile(r"· 1 row$"))).to_have_count(1)


def test_a_window_has_fields_and_doubles_are_shown_as_they_were_meant(page: Page) -> None:
    requests: list[Any] = []
    time = pa.timestamp("us", tz="UTC")
    schema = [pa.field("window", pa.struct([("start", time), ("end", time)])), pa.field("user", pa.string())]
    description = {
        "parts": [],
        "columns": [column_json(column) for column in schema],
        "keys": ["window", "user"],
        "oldest": 1,
        "newest": 3,
    }
    row = {"user": "ann", "total": 16164.090000000002, "n": 3, "list": [0.30000000000000004, {"at": None}]}

    def answer(route: Route) -> None:
        if route.request.method == "POST":
            requests.append(route.request.post_data_json)
            answer_json = {"versions": [{"version": 3, "rows": [row], "more": False}], "complete": True}
            route.fulfill(json=answer_json)
        else:
            route.fulfill(json=description)

    page.route("**/api/states/**", answer)
    with served(FedFleet(1, 2)) as url:
        page.goto(f"{url}#/state")
        expect(page.locator("fieldset legend")).to_contain_text("window")
        page.locator('[data-key="window.start"]').fill("2025-01-31 13:30:00")
        page.locator('[data-key="window.end"]').fill("2025-01-31 13:35:00")
        page.get_by_label("user is null").check()
        page.get_by_role("button", name="Look up").click()
        expect(page.locator("tbody tr").first).to_contain_text("16164.09")
        assert page.locator("tbody td").all_inner_texts() == ["3", "ann", "16164.09", "3", '[0.3, {"at": null}]']
        for width in (390, 700, 1000, 1280, 1900):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate(OVERFLOWING) == []
        page.set_viewport_size({"width": 320, "height": 900})
        assert page.locator("td.n").evaluate_all(LINES) == [1, 1], "a number is not broken"
        window = {"start": "2025-01-31 13:30:00", "end": "2025-01-31 13:35:00"}
        assert requests[0]["key"] == {"window": window, "user": None}
        key = {field.name: typed_value(requests[0]["key"][field.name], field.type, field.name) for field in schema}
        assert key["window"]["end"] == dt.datetime(2025, 1, 31, 13, 35, tzinfo=dt.UTC)
        page.get_by_label("window is null").check()
        page.get_by_role("button", name="Look up").click()
        expect(page.locator("h3")).to_contain_text("1 row at version 3")
        assert [request["key"]["window"] for request in requests] == [window, None]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(("queries", "shards"), [(1, 1), (1, 8), (50, 1000)])
def test_the_first_screen_fits_any_number_of_shards(browser: Browser, width: int, queries: int, shards: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    with served(FedFleet(queries, shards)) as url:
        page.goto(url)
        expect(page.locator(".cell")).to_have_count(shards)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.close()


def test_a_look_up_that_fails_says_so(page: Page) -> None:
    with served(FedFleet(1, 2)) as url:
        page.goto(f"{url}#/state")
        page.get_by_role("button", name="Look up").click()
        expect(page.locator("main .bad")).to_contain_text("this fleet has figures and no rows")


#: Script in the page: records the names and sizes of the events that it is sent.
_RECORD = """
window.sent = [];
const listen = EventSource.prototype.addEventListener;
EventSource.prototype.addEventListener = function (name, listener, ...rest) {
  return listen.call(this, name, (event) => { sent.push([name, event.data.length]); listener(event); }, ...rest);
};
"""


def test_an_update_is_small_however_many_shards_there_are(page: Page) -> None:
    page.add_init_script(_RECORD)
    with served(FedFleet(10, 400)) as url:
        page.goto(url)
        # Not wait_for_function: the page's policy forbids the evaluation of text.
        while page.evaluate("sent.length") <= 3:
            page.wait_for_timeout(200)
        sizes = [size for name, size in page.evaluate("sent") if name == "change"]
        assert sizes
        assert all(0 < size < 120_000 for size in sizes), sizes

"""The dashboard's page in a headless browser over a made-up fleet: keyboard, colours, hostile names, no fleet, trouble, size."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.fed_fleet import FedFleet, now_ms
from tests.served_dashboard import served

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)")
EVIL = "<img src=x onerror=\"document.title='owned'\">"


#: Fields of a form that are wider than the space for them.
OVERFLOWING = """[...document.querySelectorAll('form.look label, form.look .null')]
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


def test_shards_are_reached_and_opened_with_the_keyboard_only(page: Page) -> None:
    with served(FedFleet(2, 8).status) as url:
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
    with served(FedFleet(3, 24).status) as url:
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
    with served(fleet.status) as url:
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


def test_slow_batches_refusals_and_moves_are_told_and_what_has_one_cause_is_one_row(page: Page) -> None:
    fleet = FedFleet(1, 8)
    query = fleet.queries["query-00"]
    source = query["shards"][0]["actor_name"]
    refusal = {"at_ms": now_ms(), "partition_id": 0, "kind": "StoreUnavailableError"}
    fleet.queries["query-00"] = {
        **query,
        "shards": [{**shard, "actor_name": source} for shard in query["shards"]],
        "slow_batches": [{"number": 1, "at_ms": now_ms() - 9000, "text": "batch 7 took 9.0 s"}],
        "refusals": [{**refusal, "number": n, "shard": n, "text": f"the store actor is lost (shard={n})"} for n in (1, 2)],
    }  # fmt: skip
    for shard in range(8):
        fleet.move("query-00", shard, 3 + shard % 2, "the store actor that had it was lost")
    with served(fleet.status) as url:
        page.goto(f"{url}#/events")
        rows = page.locator(".log > li .text")
        expect(rows).to_have_text(
            [
                "query-00: shard 2: StoreUnavailableError: the store actor is lost (shard=2) (2 of this kind)",
                "query-00: batch 7 took 9.0 s",
            ]
        )
        moves = page.locator("tbody tr")
        expect(moves).to_have_count(2)
        expect(moves.first).to_contain_text("0, 2, 4, 6")
        expect(moves.first).to_contain_text("the store actor that had it was lost; 1.2 MB from memory in 31 ms")
        rows.first.get_by_role("link").click()
        expect(page.locator("main")).to_contain_text("Slow batches and refusals")
        expect(page.locator(".log > li")).to_have_count(2)


def test_queries_are_sorted_by_the_chosen_column(page: Page) -> None:
    with served(FedFleet(4, 8).status) as url:
        page.goto(url)
        names = page.locator("tbody .name-cell")
        expect(names).to_have_text([f"query-0{number}" for number in range(4)])
        page.get_by_role("button", name="query", exact=True).press("Enter")
        expect(names).to_have_text([f"query-0{number}" for number in reversed(range(4))])
        expect(page.get_by_role("columnheader", name="query", exact=True).first).to_have_attribute(
            "aria-sort", "descending"
        )


def test_colours_are_the_systems_until_a_user_chooses_and_are_kept(page: Page) -> None:
    with served(FedFleet(1, 2).status) as url:
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
    (query,) = fed.status()["queries"]
    nothing = dict.fromkeys(("rows_per_second", "watermark_ms", "locality", "last_commit_ms", "batch_id"))
    shards = [
        {**shard, **dict.fromkeys(("actor_name", "node_id", "executor", "epoch")), "operations": 0}
        for shard in query["shards"]
    ]
    evil = {**query, **nothing, "name": EVIL, "shards": shards, "batches": []}
    actor = {**fed.actors[0], "host": EVIL, "memory_limit": None, "resident_bytes": None, "spilled_bytes": None}
    changes = {"queries": [evil], "store_actors": [actor], "uri": EVIL}
    with served(lambda: {**fed.status(), **changes}) as url:
        page.goto(url)
        expect(page.locator("#uri")).to_have_text(EVIL)
        expect(page.locator("main")).to_contain_text("On no store actor")
        for section, selector in (
            ("#/", "tbody .name-cell a"),
            (f"#/queries/{page.evaluate('encodeURIComponent', EVIL)}", "h1"),
        ):
            page.goto(url + section)
            expect(page.locator(selector)).to_have_text(EVIL)
            assert "null" not in page.locator("main").inner_text()
            assert "NaN" not in page.locator("main").inner_text()
        assert page.locator("main img").count() == 0
        assert page.title() == f"Statefleet: {EVIL}"


def test_an_unused_fleet_is_shown_as_empty_everywhere(page: Page) -> None:
    fed = FedFleet(1, 2)
    with served(lambda: {**fed.status(), "queries": [], "store_actors": []}) as url:
        page.goto(url)
        for section, text in {
            "#/": "no query has used this fleet",
            "#/queries/nothing": "The fleet has no such query",
            "#/events": "Nothing has happened since the coordinator started",
            "#/state": "There is no state yet",
        }.items():
            page.goto(url + section)
            expect(page.locator("main")).to_contain_text(text)


def test_the_last_picture_stays_while_the_coordinator_or_the_server_is_away_and_the_page_recovers_by_itself(
    page: Page,
) -> None:
    fleet, is_away = FedFleet(1, 4), False

    def status() -> dict[str, Any]:
        if is_away:
            raise RuntimeError("nobody is there")
        return fleet.status()

    with served(status) as url:
        page.goto(url)
        live, banner = page.locator("#live-text"), page.locator("#banner")
        expect(live).to_have_text("live")
        is_away = True
        expect(live).to_have_text("coordinator away")
        expect(banner).to_contain_text("nobody is there")
        expect(page.locator(".cell")).to_have_count(4)
        is_away = False
        expect(live).to_have_text("live")
        expect(banner).to_be_hidden()
        port = int(url.rstrip("/").rpartition(":")[2])
    expect(live).to_have_text("not connected", timeout=15_000)
    expect(banner).to_contain_text("It is tried again")
    expect(page.locator(".cell")).to_have_count(4)
    with served(status, port):
        expect(live).to_have_text("live", timeout=20_000)
        expect(banner).to_be_hidden()
    with served(status, port, token="another-one-than-before"):
        expect(banner).to_contain_text("wants its token", timeout=30_000)


def test_charts_that_an_operator_lacks_are_hidden_and_a_slow_first_batch_leaves_the_others_space(page: Page) -> None:
    fleet = FedFleet(1, 2)
    for _ in range(4):
        fleet.status()
    query = fleet.queries["query-00"]
    first, *later = query["batches"]
    slow = {**first, "phases": [60_000, *first["phases"][1:]], "rows_in": 1}
    fleet.queries["query-00"] = {**query, "batches": [slow, *later]}

    def without_watermark() -> dict[str, Any]:
        report = fleet.status()
        return {**report, "queries": [{**query_row, "watermark_ms": None} for query_row in report["queries"]]}

    with served(without_watermark) as url:
        page.goto(f"{url}#/queries/query-00")
        expect(page.locator(".chart:visible")).to_have_count(4)
        expect(page.get_by_text("Behind by event time")).to_be_hidden()
        expect(page.locator(".timeline .bar.cut")).to_have_count(1)
        expect(page.locator(".timeline .num", has_text=re.compile(r"· 1 row$"))).to_have_count(1)


def test_a_continuous_query_is_told_by_its_epochs_and_how_long_rows_wait(page: Page) -> None:
    fleet = FedFleet(2, 4)
    fleet.queries["query-00"]["is_continuous"] = True
    with served(fleet.status) as url:
        page.goto(url)
        expect(page.locator("tr", has_text="query-00").first).to_contain_text(
            re.compile(r"runs continuously, rows wait [89] ms at most")
        )
        expect(page.locator("tr", has_text="query-01").first).to_contain_text("running")
        page.goto(f"{url}#/queries/query-01")
        expect(page.locator("dd", has_text="of a partition")).to_have_text("1,200 records at most of a partition")
        page.goto(f"{url}#/queries/query-00")
        expect(page.get_by_role("heading", name="Newest epochs")).to_be_visible()
        expect(page.get_by_text("Epoch, version")).to_be_visible()
        expect(page.locator(".chart:visible", has_text="Longest wait of a row")).to_contain_text(re.compile("[89] ms"))
        expect(page.get_by_text("Time of a batch")).to_be_hidden()


def test_a_key_is_looked_up_and_what_does_not_fit_is_said(page: Page) -> None:
    with served(FedFleet(2, 4, names=["clicks", "profiles"]).status) as url:
        page.goto(f"{url}#/state/clicks")
        page.get_by_label("k0 (timestamp").fill("2026-01-01 00:02:50")
        page.get_by_label("k1 (string)").fill("user-0b")
        page.get_by_role("button", name="Look up").click()
        expect(page.locator("h3")).to_have_text("1 row at version 43, shard 0")
        cells = page.locator("tbody td")
        expect(cells).to_have_text(["2026-01-01 00:02:50+00:00", "user-0b", "33", "1", "33"])
        for width in (390, 700, 1000, 1280, 1900):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate(OVERFLOWING) == []
        page.set_viewport_size({"width": 320, "height": 900})
        assert page.locator("td.n").evaluate_all(LINES) == [1, 1, 1], "a number is not broken"
        # What is typed and what was found stay while the page asks for the fleet.
        page.wait_for_timeout(2500)
        expect(page.get_by_label("k1 (string)")).to_have_value("user-0b")
        expect(cells).to_have_count(5)
        page.get_by_label("k1 is null").check()
        page.get_by_role("button", name="Look up").click()
        expect(page.locator("h3")).to_contain_text("The key is not in version 43")
        page.get_by_label("k0 (timestamp").fill("soon")
        page.get_by_role("button", name="Look up").click()
        expect(page.locator("main .bad")).to_contain_text("does not fit its key column")
        page.get_by_label("state").select_option("profiles")
        expect(page.get_by_label("part")).to_have_value("default")
        expect(page.get_by_label("user (string)")).to_be_visible()


@pytest.mark.parametrize(("queries", "shards"), [(1, 1), (1, 8), (50, 1000)])
def test_the_first_screen_fits_any_number_of_shards(page: Page, queries: int, shards: int) -> None:
    with served(FedFleet(queries, shards).status) as url:
        page.goto(url)
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 900})
            expect(page.locator(".cell")).to_have_count(shards)
            assert page.evaluate("document.documentElement.scrollWidth") <= width

"""The dashboard in a headless browser with a query behind it: what it shows is what happens, as it happens."""

from __future__ import annotations

import datetime as dt
import json
import os
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from playwright.sync_api import Browser, Page, expect, sync_playwright
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import statefleet as sf
from coordinator.model.identities import ActorLocation
from coordinator.model.names import dashboard_name
from coordinator.placement.lease_plans import PlannedMove
from coordinator.service.calls import NAMESPACE, RayActors
from statefleet.cli import main
from store_actors.actor.deploy import carry_out
from tests.conftest import NewUri
from tests.integration.streams import Feed, Run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)"),
    pytest.mark.filterwarnings("ignore::statefleet.UnboundedStateWarning"),
]

EVENTS = pa.schema([("user", pa.string()), ("ts", pa.timestamp("us", tz="UTC")), ("amount", pa.int64())])
START = dt.datetime(2025, 1, 1, tzinfo=dt.UTC)
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
USERS = [*(f"u{number}" for number in range(39)), HOSTILE]
SHARDS = 6
STATE = "clicks"


@pytest.fixture(scope="module")
def wide(spark: SparkSession, new_uri: NewUri) -> Iterator[sf.Fleet]:
    connected = sf.connect(new_uri(), store_actors_per_node=2)
    yield connected
    connected.shutdown()


class Clicks:
    """A query that counts by user; the test gives it its batches."""

    def __init__(self, fleet: sf.Fleet, spark: SparkSession, folder: Path) -> None:
        self.fleet, self.batches = fleet, 0
        self._feed = Feed(folder / "in", EVENTS)
        stream = fleet.stateful(self._feed.stream().withWatermark("ts", "1 hour"), name=STATE, shards=SHARDS)
        counts = stream.groupBy("user").agg(F.count("*").alias("n"), F.sum("amount").alias("total"))
        self.run = Run(counts, "update", folder / "checkpoint")

    def batch(self) -> None:
        self.batches += 1
        self._feed.add([(user, START + dt.timedelta(seconds=self.batches), self.batches) for user in USERS])
        self.run.wait()

    @property
    def shown_version(self) -> str:
        """Return batch and version as the page shows the newest batch; some batches have no data."""
        query = self.query()
        return f"{query['batch_id']}, {query['version']}"

    def query(self) -> dict[str, Any]:
        query: dict[str, Any] = next(entry for entry in self.fleet.status()["queries"] if entry["name"] == STATE)
        return query


@pytest.fixture(scope="module")
def clicks(wide: sf.Fleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clicks]:
    query = Clicks(wide, spark, tmp_path_factory.mktemp("clicks"))
    for _ in range(3):
        query.batch()
    yield query
    query.run.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


Open = Callable[..., Page]


@pytest.fixture
def opened(browser: Browser, wide: sf.Fleet, clicks: Clicks) -> Iterator[Open]:
    """Opens the dashboard; at the end, there may be no messages on the console."""
    pages: list[Page] = []
    messages: list[str] = []

    def open_page(section: str = "", *, url: str | None = None) -> Page:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        pages.append(page)
        page.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto((url or wide.dashboard_url()) + section)
        page.wait_for_selector("main[aria-busy=false]")
        return page

    open_page.messages = messages  # type: ignore[attr-defined]
    yield open_page
    keep = os.environ.get("DASHBOARD_SHOTS")
    for number, page in enumerate(pages):
        if keep and not page.is_closed():
            page.screenshot(path=f"{keep}/{page.url.partition('#/')[2].replace('/', '-')}-{number}.png", full_page=True)
        page.close()
    assert not messages


def test_every_part_shows_the_query_on_any_screen(opened: Open, clicks: Clicks) -> None:
    page = opened()
    assert page.locator(".cell").count() == SHARDS
    texts = {
        f"#/queries/{STATE}": "Where the time of a batch goes",
        "#/events": "Events",
        f"#/state/{STATE}": "Look up",
    }
    for section, text in texts.items():
        page.goto(page.url.partition("#")[0] + section)
        expect(page.locator("main")).to_contain_text(text)
        for width in (1280, 390, 360):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, section
    expect(page.locator("#live-text")).to_have_text("live")


def test_figures_are_those_of_the_query_and_follow_its_batches(opened: Open, clicks: Clicks) -> None:
    page = opened(f"#/queries/{STATE}")
    facts = page.locator(".facts")
    expect(facts).to_contain_text(clicks.shown_version)
    clicks.batch()
    expect(facts).to_contain_text(clicks.shown_version, timeout=15_000)
    label = page.locator(".timeline .bar").first.get_attribute("aria-label") or ""
    unknown = {part.removesuffix(" not known") for part in label.split(", ") if part.endswith(" not known")}
    # All but what there is not, where a lease came with the commit before.
    assert unknown <= {"Lease", "Hand-over", "Sink and end"}, label
    assert page.locator(".u-wrap canvas").count() == 6


def test_the_map_shows_a_move_as_it_happens_and_why(opened: Open, clicks: Clicks) -> None:
    page = opened()
    actors = {entry["actor_name"]: entry for entry in clicks.fleet.status()["store_actors"]}
    (shard,) = [entry for entry in clicks.query()["shards"] if entry["partition_id"] == 2]
    source, target = (
        _location(actors[shard["actor_name"]]),
        _location(next(actors[actor] for actor in actors if actor != shard["actor_name"])),
    )
    cell = page.locator(f'[data-shard="{STATE}/2"]')
    expect(page.locator(f'[data-holder="{source.actor_name}"]').locator(cell)).to_have_count(1)
    (done,) = carry_out(
        RayActors(), clicks.fleet._coordinator, [PlannedMove(STATE, 2, source, target, "a test wants it there")]
    )
    assert not done.error
    clicks.batch()
    clicks.batch()
    moved = page.locator(f'[data-holder="{target.actor_name}"] [data-shard="{STATE}/2"]')
    expect(moved).to_have_count(1, timeout=15_000)
    moved.focus()
    page.keyboard.press("Enter")
    expect(page.locator("dialog")).to_contain_text("a test wants it there")
    page.keyboard.press("Escape")
    page.get_by_role("navigation").get_by_role("link", name="Events").click()
    expect(page.locator("main table")).to_contain_text("a test wants it there")


def test_a_store_actor_that_is_killed_is_lost_and_comes_back(opened: Open, clicks: Clicks) -> None:
    page = opened()
    name = next(shard["actor_name"] for shard in clicks.query()["shards"])
    box = page.locator(f'[data-actor="{name}"]')
    expect(box).to_have_class("actor")
    before = box.inner_text()
    ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=False)
    expect(box).to_have_class("actor lost", timeout=30_000)
    expect(box).to_have_class("actor", timeout=60_000)
    clicks.batch()
    expect(box).not_to_have_text(before)
    page.goto(page.url.partition("#")[0] + f"#/state/{STATE}")
    page.get_by_label("user (string)").fill("u1")
    page.get_by_role("button", name="Look up").click()
    expect(page.locator("tbody td").nth(1)).to_have_text(str(clicks.batches), timeout=30_000)


def test_a_page_goes_on_when_its_server_or_the_coordinator_dies(opened: Open, clicks: Clicks) -> None:
    page = opened(f"#/queries/{STATE}")
    url = clicks.fleet.dashboard_url()
    dashboard = ray.get_actor(dashboard_name(clicks.fleet.uri), namespace=NAMESPACE)
    # Ray may start it again before the page asks, every two seconds.
    for _ in range(50):
        ray.kill(dashboard, no_restart=False)
        page.wait_for_timeout(300)
        if page.locator("#live-text").text_content() == "not connected":
            break
    expect(page.locator("#live-text")).to_have_text("not connected", timeout=15_000)
    expect(page.locator("#banner")).to_be_visible()
    expect(page.locator("#live-text")).to_have_text("live", timeout=60_000)
    assert clicks.fleet.dashboard_url() == url
    clicks.batch()
    expect(page.locator(".facts")).to_contain_text(clicks.shown_version, timeout=15_000)
    # A browser reports on its console what it could not load while there was no server.
    messages = opened.messages  # type: ignore[attr-defined]
    assert all("net::ERR_" in message for message in messages), messages
    messages.clear()


@pytest.mark.replay
def test_a_coordinator_that_hangs_and_dies_is_reported_and_comes_back(opened: Open, clicks: Clicks) -> None:
    page = opened(f"#/queries/{STATE}")
    pid = clicks.fleet.status()["coordinator"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    expect(page.locator("#banner")).to_contain_text("The coordinator does not answer", timeout=20_000)
    expect(page.locator("#live-text")).to_have_text("coordinator away")
    os.kill(pid, signal.SIGKILL)
    expect(page.locator("#live-text")).to_have_text("live", timeout=60_000)
    expect(page.locator("#banner")).to_be_hidden()
    clicks.batch()
    expect(page.locator(".facts")).to_contain_text(clicks.shown_version, timeout=15_000)


def test_the_hottest_keys_of_a_shard_are_known(clicks: Clicks) -> None:
    state = clicks.fleet.state(STATE)
    shard = state.find({"user": "u7"}).shard
    assert shard is not None
    for _ in range(40):
        state.get({"user": "u7"})
    hottest = state.hottest_keys(shard).to_pylist()
    (looked_up,) = [entry for entry in hottest if entry["_met_by"] == "look_ups" and entry["user"] == "u7"]
    assert looked_up["_share"] > 0.5
    # Each user has a row in each batch, and there are some users on a shard.
    assert {entry["user"] for entry in hottest if entry["_met_by"] == "batches"} <= set(USERS)


def test_elsewhere_than_on_the_loopback_only_who_has_the_token_is_shown_anything(
    opened: Open, clicks: Clicks, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = clicks.fleet
    assert main(["dashboard", fleet.uri, "--host", "0.0.0.0"]) == 0
    url = capsys.readouterr().out.strip()
    base, _, token = url.partition("?token=")
    assert len(token) >= 32
    for path in ("", "style.css", "api/fleet", f"api/states/{STATE}"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(base + path)
        assert refused.value.code == 401
        assert STATE not in refused.value.read().decode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base}api/states/{STATE}", b"{}", headers)
    with urllib.request.urlopen(request) as answer:
        assert [column["name"] for column in json.load(answer)["columns"] if column["is_key"]] == ["user"]
    page = opened(url=url)
    assert token not in page.url
    assert page.locator(".cell").count() == SHARDS
    assert page.evaluate("document.cookie") == ""
    page.close()
    assert fleet.dashboard_url(host="127.0.0.1").startswith("http://127.0.0.1:")


def _location(status: dict[str, Any]) -> ActorLocation:
    return ActorLocation(**{name: status[name] for name in ("actor_name", "instance_id", "node_id", "host", "pid")})

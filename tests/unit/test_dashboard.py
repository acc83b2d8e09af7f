"""The dashboard as a real server on the loopback, asked over HTTP and shown in a headless browser."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from coordinator.dashboard import Dashboard

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NOW_MS = 1_735_689_600_000
SHARD = {
    "partition_id": 0, "actor_name": "store-a", "node_id": "c0ffee" * 9, "executor": "7", "version": 118, "epoch": 3,
    "state_rows": 1_250_000, "state_bytes": 61_000_000, "last_commit_ms": NOW_MS, "rows_in": 25_000,
}  # fmt: skip
QUERY = {
    "name": "clicks", "query_id": "q", "run_id": "r", "output_mode": "update", "num_shards": 1, "batch_id": 117,
    "version": 118, "watermark_ms": NOW_MS, "rows_per_second": 748_123.4, "state_rows": 1_250_000,
    "state_bytes": 61_000_000, "rows_late": 1234, "last_commit_ms": NOW_MS, "active": True, "shards": [SHARD],
}  # fmt: skip
ACTOR = {"actor_name": "store-a", "instance_id": "i", "node_id": "n", "host": "10.0.0.9", "pid": 4301, "alive": True}
STATUS: dict[str, Any] = {
    "fleet_id": "3f2a", "uri": "s3://bucket/fleet", "store_actors": [ACTOR], "queries": [QUERY],
    "coordinator": {"node_id": "n", "pid": 4211, "started_at_ms": NOW_MS},
}  # fmt: skip

Serve = Callable[[Callable[[], dict[str, Any]]], str]


async def get(url: str) -> tuple[int, str, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, answer.content_type, await answer.text()


def run_served(status: Callable[[], dict[str, Any]], use: Callable[[str], Any]) -> Any:
    """What the coroutine `use(url)` returns while a dashboard serves in the same event loop."""

    async def main() -> Any:
        dashboard = Dashboard()
        url = await dashboard.start(status)
        try:
            return await use(url)
        finally:
            await dashboard.stop()

    return asyncio.run(main())


def test_a_status_that_takes_long_is_not_made_again_at_once() -> None:
    calls: list[int] = []

    def status() -> dict[str, Any]:
        calls.append(1)
        time.sleep(0.2)
        return STATUS

    async def use(url: str) -> list[str]:
        return [(await get(f"{url}api/status"))[2] for _ in range(5)]

    assert [json.loads(one) for one in run_served(status, use)] == [STATUS] * 5
    assert len(calls) == 1


def test_status_is_asked_for_at_each_request() -> None:
    calls: list[int] = []

    def status() -> dict[str, Any]:
        calls.append(1)
        return {**STATUS, "fleet_id": str(len(calls))}

    async def use(url: str) -> list[dict[str, Any]]:
        async with aiohttp.ClientSession() as session:
            answers = [await session.get(f"{url}api/status") for _ in range(2)]
            assert [answer.headers["Cache-Control"] for answer in answers] == ["no-store"] * 2
            return [await answer.json() for answer in answers]

    assert run_served(status, use) == [{**STATUS, "fleet_id": "1"}, {**STATUS, "fleet_id": "2"}]


async def raw_status(url: str, head: str) -> int:
    """Status code that the server answers to a request as it stands."""
    host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    # What is refused tells nothing of the fleet.
    code = int(answer.split(b" ", 2)[1])
    assert code == 200 or b"bucket" not in answer
    return code


@pytest.mark.parametrize("path", ["/", "/api/status", "/nothing"])
@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "localhost.evil.example:{port}", "127.0.0.1.evil.example", "127.0.0.1@evil.example",
     "0.0.0.0:{port}", "[::]:{port}", "10.0.0.9:{port}", "localhost:{port}, evil.example", "localhost\r\nHost: evil.example", ""],
)  # fmt: skip
def test_a_name_that_was_made_to_point_here_is_not_answered(path: str, host: str) -> None:
    async def use(url: str) -> int:
        named = host.format(port=url.rstrip("/").rpartition(":")[2])
        return await raw_status(url, f"GET {path} HTTP/1.1\r\nHost: {named}")

    assert run_served(lambda: STATUS, use) in (400, 421)


def test_a_request_for_no_host_is_not_answered() -> None:
    assert run_served(lambda: STATUS, lambda url: raw_status(url, "GET /api/status HTTP/1.0")) == 421


@pytest.mark.parametrize(
    "host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST:8080", "[::1]:{port}", "localhost"]
)
def test_names_of_this_machine_are_answered_also_through_a_forwarded_port(host: str) -> None:
    async def use(url: str) -> int:
        named = host.format(port=url.rstrip("/").rpartition(":")[2])
        return await raw_status(url, f"GET /api/status HTTP/1.1\r\nHost: {named}")

    assert run_served(lambda: STATUS, use) == 200


def test_the_page_needs_nothing_from_elsewhere() -> None:
    code, content_type, page = run_served(lambda: STATUS, get)
    assert (code, content_type) == (200, "text/html")
    assert re.findall(r"""(?:src|href)=["']?(?!data:)[^"'>]+|https?://|@import|innerHTML""", page) == []


def test_only_the_loopback_answers() -> None:
    async def use(url: str) -> None:
        host, port = url.removeprefix("http://").rstrip("/").split(":")
        assert ipaddress.ip_address(host).is_loopback
        for address in {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}:
            if not ipaddress.ip_address(address).is_loopback:
                with pytest.raises(OSError):
                    await asyncio.open_connection(address, int(port))
        # Bound to every address, 127.0.0.2 would answer too.
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.2", int(port))

    run_served(lambda: STATUS, use)


def test_a_stopped_dashboard_lets_its_port_go() -> None:
    async def main() -> None:
        dashboard = Dashboard()
        url = await dashboard.start(lambda: STATUS)
        await dashboard.stop()
        with pytest.raises(aiohttp.ClientConnectionError):
            await get(url)
        assert await dashboard.start(lambda: STATUS, int(url.rstrip("/").rsplit(":", 1)[1])) == url
        await dashboard.stop()

    asyncio.run(main())


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves dashboards from a thread with its own event loop, for a browser to look at."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    dashboards: list[Dashboard] = []

    def start(status: Callable[[], dict[str, Any]]) -> str:
        dashboards.append(Dashboard())
        return asyncio.run_coroutine_threadsafe(dashboards[-1].start(status), loop).result(10)

    yield start
    for dashboard in dashboards:
        asyncio.run_coroutine_threadsafe(dashboard.stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def rendered(url: str, profile: Path) -> str:
    """The page's DOM after some seconds of the browser's own time."""
    assert CHROMIUM is not None
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --virtual-time-budget=4000 --dump-dom"
    )
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={profile}", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@browser
def test_a_browser_shows_queries_shards_and_actors_and_refreshes(serve: Serve, tmp_path: Path) -> None:
    calls: list[int] = []

    def status() -> dict[str, Any]:
        calls.append(1)
        return {**STATUS, "queries": [{**QUERY, "version": 9000 + len(calls)}]}

    page = rendered(serve(status), tmp_path)
    for text in ("s3://bucket/fleet", "clicks", "748,123", "1,250,000", "61.0 MB", "2025-01-01 00:00:00 UTC", "1,234",
                 "store-a", "c0ffeec0ffee", "10.0.0.9", "4301", "running", "alive"):  # fmt: skip
        assert f">{text}" in page or f" {text}" in page, text
    assert len(calls) > 1
    assert f"{9000 + len(calls):,}" in page or f"{9000 + len(calls) - 1:,}" in page
    assert re.search(r'<div id="lost"[^>]*\bhidden\b', page)


@browser
def test_a_browser_shows_names_as_text_and_survives_nulls(serve: Serve, tmp_path: Path) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\">"
    nothing = dict.fromkeys(QUERY)
    status = {
        **STATUS,
        "coordinator": None,
        "queries": [{**QUERY, "name": evil, "shards": [dict.fromkeys(SHARD)]}, nothing],
    }
    page = rendered(serve(lambda: status), tmp_path)
    assert "<h2>&lt;img src=x" in page
    assert "<title>Statefleet</title>" in page
    assert "null" not in page.split("<main")[1].split("</main>")[0]


@browser
def test_a_browser_tells_when_the_coordinator_does_not_answer(serve: Serve, tmp_path: Path) -> None:
    calls: list[int] = []

    def status() -> dict[str, Any]:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("the coordinator is in trouble")
        return STATUS

    page = rendered(serve(status), tmp_path)
    banner = re.search(r'<div id="lost"[^>]*>[^<]*', page)
    assert banner is not None
    assert "hidden" not in banner.group()
    assert "does not answer" in banner.group()
    assert ">clicks " in page, "what is known stays on the page"


@browser
def test_a_browser_shows_a_fleet_that_nobody_has_used(serve: Serve, tmp_path: Path) -> None:
    page = rendered(serve(lambda: {**STATUS, "queries": [], "store_actors": []}), tmp_path)
    assert "No query has used this fleet yet." in page
    assert "No store actor has reported yet." in page

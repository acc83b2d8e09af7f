"""The dashboard with many queries and shards: bytes that a browser gets, and how long it takes to show them.

    python -m benchmarks.dashboard [--queries 50] [--shards 1000] [--json result.json]
    python -m benchmarks.dashboard --serve      # only serves the page

Every query makes a batch between two updates, a second apart, so that all values change. The browser is headless Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.fed_fleet import FedFleet, now_ms
from coordinator.model.errors import InvalidRequestError
from statefleet.dashboard.access import Access
from statefleet.dashboard.lookups import LookUps
from statefleet.dashboard.server import Server
from statefleet.dashboard.watching import FleetProbe, Watching

__all__ = ["main", "served"]

#: Number of updates that are measured.
_UPDATES = 5


def _no_look_ups() -> LookUps:
    raise InvalidRequestError("this fleet has figures and no rows")


@contextmanager
def served(probe: FleetProbe, port: int = 0, token: str | None = None) -> Iterator[str]:
    """Serve the dashboard of a fleet without Ray from a thread; yield its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    watching = Watching(probe, now_ms)
    access = Access(token, only_loopback_names=token is None)
    server = Server(watching, _no_look_ups, ThreadPoolExecutor(2), access)

    async def start() -> str:
        host, bound = await server.start("127.0.0.1", port)
        watching.start()
        return f"http://{host}:{bound}/"

    async def stop() -> None:
        await watching.stop()
        await server.stop()
        # Connections that browsers left open: a task that is collected later would log an error in the middle of something else.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


#: Script in the page: records updates, and the main thread's long tasks.
_WATCH = """
window.longTasks = [];
new PerformanceObserver((list) => list.getEntries().forEach((one) => longTasks.push(one.duration)))
  .observe({type: "longtask", buffered: true});
const source = EventSource.prototype.addEventListener;
window.sent = [];
EventSource.prototype.addEventListener = function (name, listener, ...rest) {
  return source.call(this, name, (event) => {
    const begun = performance.now();
    listener(event);
    requestAnimationFrame(() => setTimeout(() => sent.push([name, event.data.length, performance.now() - begun]), 0));
  }, ...rest);
};
"""


def measure(browser: Any, queries: int, shards: int, updates: int = _UPDATES) -> dict[str, Any]:
    """Return the figures of a browser that shows a number of queries and shards for some updates."""
    with served(FedFleet(queries, shards)) as url:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.add_init_script(_WATCH)
        figures: dict[str, Any] = {"queries": queries, "shards": shards}
        for name, address, selector in (
            ("map", "", ".cell"), ("queries", "#/queries", "tbody tr"), ("one query", "#/queries/query-03", ".u-wrap"),
        ):  # fmt: skip
            page.goto("about:blank")
            begun = time.perf_counter()
            page.goto(url + address)
            page.wait_for_selector(selector)
            shown_ms = 1000 * (time.perf_counter() - begun)
            # Not wait_for_function: the page's policy forbids the evaluation of text.
            while page.evaluate("sent.length") <= updates:
                page.wait_for_timeout(200)
            sent, long = page.evaluate("[sent, longTasks]")
            changes = [message for message in sent if message[0] == "change"]
            figures[name] = {
                "first shown after ms": round(shown_ms),
                "bytes at first": max(message[1] for message in sent if message[0] == "view"),
                "bytes of an update": round(statistics.median(message[1] for message in changes)),
                "ms to show an update": round(statistics.median(message[2] for message in changes)),
                "longest task in ms": round(max(long, default=0)),
            }
        page.close()
    return figures


def main() -> None:
    """Measure, or serve the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=50)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--serve", action="store_true", help="serve the page until interrupted")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.serve:
        with served(FedFleet(options.queries, options.shards)) as url:
            print(url, flush=True)
            threading.Event().wait()
    # Imported here, as serving needs no browser.
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        result = measure(browser, options.queries, options.shards)
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

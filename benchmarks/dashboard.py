"""The dashboard with many queries and shards: bytes a browser is sent, and how long it takes to show them.

    python -m benchmarks.dashboard [--queries 50] [--shards 1000] [--json result.json]
    python -m benchmarks.dashboard --serve      # only serves the page, to look at it

Every query makes a batch between two looks, a second apart: more cannot change. The browser is headless Chromium.
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

#: Looks over which what is sent and shown is measured.
_LOOKS = 5


def _no_look_ups() -> LookUps:
    raise InvalidRequestError("this fleet has figures and no rows")


@contextmanager
def served(sight: FleetProbe, port: int = 0, token: str | None = None) -> Iterator[str]:
    """The address of a dashboard of a fleet without Ray, served from a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    watching = Watching(sight, now_ms)
    access = Access(token, only_loopback_names=token is None)
    server = Server(watching, _no_look_ups, ThreadPoolExecutor(2), access)

    async def start() -> str:
        host, bound = await server.start("127.0.0.1", port)
        watching.start()
        return f"http://{host}:{bound}/"

    async def stop() -> None:
        await watching.stop()
        await server.stop()

    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


#: In the page: when its parts are there, and the main thread's tasks that take long.
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


def measure(browser: Any, queries: int, shards: int, looks: int = _LOOKS) -> dict[str, Any]:
    """Figures of a browser that looks at so many, so many times."""
    with served(FedFleet(queries, shards)) as url:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.add_init_script(_WATCH)
        found: dict[str, Any] = {"queries": queries, "shards": shards}
        for name, address, there in (
            ("map", "", ".cell"), ("queries", "#/queries", "tbody tr"), ("one query", "#/queries/query-03", ".u-wrap"),
        ):  # fmt: skip
            page.goto("about:blank")
            begun = time.perf_counter()
            page.goto(url + address)
            page.wait_for_selector(there)
            shown_ms = 1000 * (time.perf_counter() - begun)
            # Not wait_for_function: the page's policy lets nobody evaluate text in it.
            while page.evaluate("sent.length") <= looks:
                page.wait_for_timeout(200)
            sent, long = page.evaluate("[sent, longTasks]")
            changes = [one for one in sent if one[0] == "change"]
            found[name] = {
                "first shown after ms": round(shown_ms),
                "bytes at first": max(one[1] for one in sent if one[0] == "view"),
                "bytes of an update": round(statistics.median(one[1] for one in changes)),
                "ms to show an update": round(statistics.median(one[2] for one in changes)),
                "longest task in ms": round(max(long, default=0)),
            }
        page.close()
    return found


def main() -> None:
    """Run it."""
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
    # Late: what is only served needs no browser.
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        result = measure(browser, options.queries, options.shards)
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

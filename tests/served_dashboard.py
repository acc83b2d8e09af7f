"""The dashboard of a fleet without Ray, served from a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from statefleet.dashboard.access import Access
from statefleet.dashboard.server import Server
from statefleet.dashboard.status_cache import StatusCache
from statefleet.reads.fleet import LiveFleet, attach
from tests.fed_fleet import now_ms
from tests.stored_shards import STORED


def _stored_fleet() -> LiveFleet:
    return attach(f"file://{STORED}", offline=True)


@contextmanager
def served(
    status: Callable[[], dict[str, Any]],
    port: int = 0,
    token: str | None = None,
    fleet: Callable[[], LiveFleet] = _stored_fleet,
) -> Iterator[str]:
    """Serve the dashboard of a fleet without Ray from a thread; yield its address.

    Parameters
    ----------
    status
        Returns what the page shows.
    fleet
        Returns the states in which keys are looked up: by default those of :data:`~tests.stored_shards.STORED`.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    access = Access(token, only_loopback_names=token is None)
    server = Server(StatusCache(status, now_ms), fleet, ThreadPoolExecutor(2), access)

    async def start() -> str:
        host, bound = await server.start("127.0.0.1", port)
        return f"http://{host}:{bound}/"

    async def stop() -> None:
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

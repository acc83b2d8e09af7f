"""The dashboard of a fleet without Ray, served from a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from coordinator.model.errors import InvalidRequestError
from statefleet.dashboard.access import Access
from statefleet.dashboard.lookups import LookUps
from statefleet.dashboard.server import Server
from statefleet.dashboard.watching import FleetProbe, Watching
from tests.fed_fleet import now_ms

__all__ = ["served"]


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

"""The location dashboard: a page and its JSON, served on the loopback of the coordinator's node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

__all__ = ["Dashboard"]

_PAGE = Path(__file__).with_name("dashboard.html")


class Dashboard:
    """Serves ``/`` (the page) and ``/api/status`` (what it shows)."""

    def __init__(self) -> None:
        self._runner: web.AppRunner | None = None

    async def start(self, status: Callable[[], dict[str, Any]], port: int = 0) -> str:
        """Serve on 127.0.0.1; returns the URL.

        Parameters
        ----------
        status
            Called for each request of ``/api/status``; JSON data.
        port
            0 takes a free one.
        """
        page = _PAGE.read_text()

        async def show_page(_: web.Request) -> web.Response:
            return web.Response(text=page, content_type="text/html")

        async def show_status(_: web.Request) -> web.Response:
            return web.json_response(status(), headers={"Cache-Control": "no-store"})

        app = web.Application()
        app.add_routes([web.get("/", show_page), web.get("/api/status", show_status)])
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        # Loopback only: the page shows where state is, and asks nobody who they are.
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        host, bound = self._runner.addresses[0][:2]
        return f"http://{host}:{bound}/"

    async def stop(self) -> None:
        """Close the server."""
        if self._runner is not None:
            await self._runner.cleanup()

"""The location dashboard: a page and its JSON, served on the loopback of the coordinator's node."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

__all__ = ["Dashboard"]

_PAGE = Path(__file__).with_name("dashboard.html")
#: What a browser on this machine calls it. Any port: ``ssh -L`` forwards another one here.
_OWN_NAMES = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::\d{1,5})?", re.IGNORECASE)


#: A status that takes longer than that to make, in seconds, is shown for so many times as long.
_LONG_S = 0.05
_REST = 20


@web.middleware
async def _only_own_names(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse requests for other hosts.

    A page of anybody's, whose name its owner makes point to 127.0.0.1 (DNS rebinding), is of the same origin as this server for the
    browser that shows it, and could read where state is. The browser still sends that name.
    """
    hosts = request.headers.getall("Host", [])
    if len(hosts) != 1 or _OWN_NAMES.fullmatch(hosts[0]) is None:
        raise web.HTTPMisdirectedRequest(
            text="This dashboard answers to 127.0.0.1, localhost and [::1] only. From another machine, forward a port to it "
            "(ssh -L) and open it under localhost.\n"
        )
    return await handler(request)


class _Shown:
    """The status as JSON text, made anew for each look, or less often where that takes long: nobody is answered meanwhile.

    Parameters
    ----------
    now_s
        Seconds since some moment.
    """

    def __init__(self, status: Callable[[], dict[str, Any]], now_s: Callable[[], float]) -> None:
        self._status, self._now_s = status, now_s
        self._text = ""
        self._good_until_s = 0.0

    def text(self) -> str:
        begun_s = self._now_s()
        if begun_s >= self._good_until_s:
            self._text = json.dumps(self._status())
            ended_s = self._now_s()
            took_s = ended_s - begun_s
            self._good_until_s = ended_s + _REST * took_s if took_s > _LONG_S else 0.0
        return self._text


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

        shown = _Shown(status, asyncio.get_running_loop().time)

        async def show_status(_: web.Request) -> web.Response:
            return web.Response(
                text=shown.text(), content_type="application/json", headers={"Cache-Control": "no-store"}
            )

        app = web.Application(middlewares=[_only_own_names])
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

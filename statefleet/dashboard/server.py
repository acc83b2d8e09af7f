"""The dashboard's HTTP server: the files of the page, the stream of changes, and queries of state."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from coordinator.model.errors import InvalidRequestError, StateStoreError
from statefleet.dashboard.access import Access
from statefleet.dashboard.lookups import LookUps
from statefleet.dashboard.watching import Watching

__all__ = ["Server"]

log = logging.getLogger(__name__)
_NO_HTTP = (HttpProcessingError, web.RequestPayloadError)
_http_log = logging.getLogger(f"{__name__}.http")
# aiohttp logs a stack trace of each request that is no HTTP, with which anybody could fill the disk.
_http_log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], _NO_HTTP)))

_STATIC = Path(__file__).with_name("static")
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
#: Seconds after which a stream without changes sends a heartbeat.
_HEARTBEAT_S = 10.0
#: Seconds that a page waits for the first poll before it gets the view.
_FIRST_LOOK_S = 3.0
#: Maximum size of a request, in bytes.
_MOST_BYTES = 65536
#: Default number of versions of a key.
_VERSIONS = 5
_ROWS = 20

LookUp = Callable[[LookUps], Any]


class Server:
    """The server of a fleet's dashboard.

    Parameters
    ----------
    watching
        Polls of the fleet.
    look_ups
        Returns the queries of the calling thread.
    threads
        Threads that run queries.
    access
        Check of every request.
    """

    def __init__(self, watching: Watching, look_ups: Callable[[], LookUps], threads: Executor, access: Access) -> None:
        self._watching = watching
        self._look_ups = look_ups
        self._threads = threads
        self._access = access
        self._files = _read_files(_STATIC)
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int, fallback: bool = False) -> tuple[str, int]:
        """Start to serve, and return host and port.

        Parameters
        ----------
        port
            0 takes a free one.
        fallback
            Whether a free port is used if this one is taken.
        """
        app = web.Application(client_max_size=_MOST_BYTES)
        app.add_routes(
            [
                web.get("/api/stream", self._stream),
                web.get("/api/shards/{state}/{shard}", self._shard),
                web.get("/api/shards/{state}/{shard}/keys", self._hottest),
                web.get("/api/states/{state}", self._describe),
                web.get("/api/states/{state}/rows", self._rows),
                web.post("/api/states/{state}/look-up", self._look_up),
                web.get("/{file:.*}", self._file),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, logger=_http_log, shutdown_timeout=1.0)
        await self._runner.setup()
        assert self._runner.server is not None, "it is there after setup"
        # Before aiohttp looks at the request's path and headers, and not as a middleware, which comes after that.
        self._runner.server.request_handler = self._access.guarding(self._runner.server.request_handler)
        # The socket is bound first, so that a port that is taken is an error before anything is served.
        bound = await asyncio.to_thread(_bound, host, port, fallback)
        await web.SockSite(self._runner, bound).start()
        return str(bound.getsockname()[0]), int(bound.getsockname()[1])

    async def stop(self) -> None:
        """Close the server."""
        if self._runner is not None:
            await self._runner.cleanup()

    # -- the page -------------------------------------------------------------------------------------------------

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info["file"] or "index.html"
        file = self._files.get(name)
        if file is None:
            raise web.HTTPNotFound(text="There is nothing here; the dashboard is at /.\n")
        data, content_type = file
        # Requested again each time, so that a page and its modules are always of one version.
        answer = web.Response(
            body=data, content_type=content_type, charset="utf-8", headers={"Cache-Control": "no-cache"}
        )
        answer.enable_compression()
        return answer

    # -- the view -------------------------------------------------------------------------------------------------

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        await self._watching.looked(_FIRST_LOOK_S)
        answer = web.StreamResponse(headers={**self._access.headers, "Content-Type": "text/event-stream"})
        with self._watching.subscribed() as queue, suppress(ConnectionResetError):
            await answer.prepare(request)
            # Changes from now on are queued, and nothing awaits between the subscription and the view that they apply to.
            await answer.write(self._watching.full().encoded())
            while True:
                try:
                    message = await asyncio.wait_for(queue.get(), _HEARTBEAT_S)
                except TimeoutError:
                    await answer.write(b"event: still\ndata: {}\n\n")
                    continue
                if message is None:
                    while not queue.empty():
                        queue.get_nowait()
                    message = self._watching.full()
                await answer.write(message.encoded())
        return answer

    async def _shard(self, request: web.Request) -> web.Response:
        shard = self._watching.model.shard(request.match_info["state"], _number(request))
        if shard is None:
            return _error(404, InvalidRequestError("there is no such shard (any more)"))
        return web.json_response(dict(shard))

    # -- queries --------------------------------------------------------------------------------------------------

    async def _describe(self, request: web.Request) -> web.Response:
        name, part = _state_and_part(request)
        return await self._answer(lambda look_ups: look_ups.describe(name, part))

    async def _hottest(self, request: web.Request) -> web.Response:
        name, shard = request.match_info["state"], _number(request)
        return await self._answer(lambda look_ups: look_ups.hottest(name, shard))

    async def _rows(self, request: web.Request) -> web.Response:
        name, part = _state_and_part(request)
        text = request.query.get("limit", str(_ROWS))
        limit = int(text) if text.isdecimal() and len(text) < 10 else _ROWS
        return await self._answer(lambda look_ups: look_ups.rows(name, part, limit))

    async def _look_up(self, request: web.Request) -> web.Response:
        name, part = _state_and_part(request)
        if request.content_type != "application/json":
            # A form of another site can send its data without a preflight request, but never as JSON.
            return _error(415, InvalidRequestError("a key is sent as application/json"))
        try:
            body = await request.json()
            key, versions = body["key"], body.get("versions", _VERSIONS)
            if not isinstance(key, dict) or not isinstance(versions, int):
                raise TypeError(key)
        # LookupError also for an unknown charset; a body that is not what its Content-Encoding says is a RequestPayloadError.
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, web.RequestPayloadError):
            return _error(400, InvalidRequestError('a look-up is {"key": {column: value}, "versions": number}'))
        return await self._answer(lambda look_ups: look_ups.look_up(name, part, key, versions))

    async def _answer(self, look_up: LookUp) -> web.Response:
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._threads, lambda: look_up(self._look_ups()))
        except InvalidRequestError as error:
            return _error(400, error)
        except StateStoreError as error:
            return _error(503, error)
        except Exception as error:  # the user sees that it failed, and the log has the reason
            log.exception("a look-up failed")
            return web.json_response(
                {"kind": type(error).__name__, "error": "the look-up failed; see the dashboard actor's log"}, status=500
            )
        return web.json_response(result)


def _number(request: web.Request) -> int:
    """Return the number of the shard in a path; -1 if it is not a number."""
    number = request.match_info["shard"]
    return int(number) if number.isdecimal() and len(number) < 10 else -1


def _state_and_part(request: web.Request) -> tuple[str, str]:
    return request.match_info["state"], request.query.get("part", "")


def _error(status: int, error: StateStoreError) -> web.Response:
    return web.Response(
        status=status,
        text=json.dumps({"kind": type(error).__name__, "error": str(error)}),
        content_type="application/json",
    )


def _bound(host: str, port: int, fallback: bool) -> socket.socket:
    try:
        return socket.create_server((host, port), family=_family(host))
    except OSError:
        if not fallback:
            raise
        return socket.create_server((host, 0), family=_family(host))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _read_files(folder: Path) -> dict[str, tuple[bytes, str]]:
    """Return all files that are served, by path: no other file can be requested."""
    return {
        file.relative_to(folder).as_posix(): (file.read_bytes(), _TYPES[file.suffix])
        for file in folder.rglob("*")
        if file.suffix in _TYPES
    }

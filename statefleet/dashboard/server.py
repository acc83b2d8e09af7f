"""The dashboard's HTTP server: the files of the page, the fleet's status, and look-ups of keys."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from coordinator.model.errors import InvalidRequestError, StateStoreError
from statefleet.dashboard.access import Access
from statefleet.dashboard.status_cache import StatusCache
from statefleet.reads.json_values import cell_text, key_of

if TYPE_CHECKING:
    from statefleet.reads.fleet import LiveFleet

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
#: Maximum size of a request, and of an answer that is compressed at once, in bytes.
_MOST_BYTES = 65536
_IN_LOOP_BYTES = 65536
#: Most rows of a key, and characters of a value, that are returned.
_ROWS = 100
_TEXT = 4000


class Server:
    """The server of a fleet's dashboard."""

    def __init__(self, status: StatusCache, fleet: Callable[[], LiveFleet], threads: Executor, access: Access) -> None:
        self._status = status
        self._fleet = fleet
        self._threads = threads
        self._access = access
        self._files = _read_files(_STATIC)
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int, fallback: bool = False) -> tuple[str, int]:
        """Start to serve, and return host and port. Port 0 takes a free one, as `fallback` does if the port is taken."""
        app = web.Application(client_max_size=_MOST_BYTES)
        app.add_routes(
            [
                web.get("/api/fleet", self._fleet_status),
                web.post("/api/states/{state}", self._look_up),
                web.get("/{file:.*}", self._file),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, logger=_http_log, shutdown_timeout=1.0)
        await self._runner.setup()
        assert self._runner.server is not None, "it is there after setup"
        # Before aiohttp looks at the request's path and headers, and not as a middleware, which comes after that.
        self._runner.server.request_handler = partial(self._access.answer, self._runner.server.request_handler)
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

    async def _fleet_status(self, request: web.Request) -> web.Response:
        text = await self._status.status()
        # A large one is compressed in a thread: the loop serves others meanwhile.
        answer = web.Response(text=text, content_type="application/json", zlib_executor_size=_IN_LOOP_BYTES)
        answer.enable_compression()
        return answer

    async def _look_up(self, request: web.Request) -> web.Response:
        if request.content_type != "application/json":
            # A form of another site can send its data without a preflight request, but never as JSON.
            return _error(415, InvalidRequestError("a key is sent as application/json"))
        try:
            body = await request.json()
            part, key = body.get("part", ""), body.get("key")
            if not isinstance(part, str) or not isinstance(key, dict | None):
                raise TypeError(key)
        # LookupError also for an unknown charset; a body that is not what its Content-Encoding says is a RequestPayloadError.
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, web.RequestPayloadError):
            return _error(400, InvalidRequestError('a look-up is {"part": name, "key": {column: value}}'))
        name, loop = request.match_info["state"], asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, lambda: look_up(self._fleet(), name, part, key))
        except InvalidRequestError as error:
            return _error(400, error)
        except StateStoreError as error:
            return _error(503, error)
        except Exception as error:  # the user sees that it failed, and the log has the reason
            log.exception("a look-up failed")
            return web.json_response(
                {"kind": type(error).__name__, "error": "the look-up failed; see the dashboard actor's log"}, status=500
            )
        return web.json_response(found)


def _error(status: int, error: StateStoreError) -> web.Response:
    return web.json_response({"kind": type(error).__name__, "error": str(error)}, status=status)


def _bound(host: str, port: int, fallback: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError:
        if not fallback:
            raise
        return socket.create_server((host, 0), family=family)


def _read_files(folder: Path) -> dict[str, tuple[bytes, str]]:
    """Return all files that are served, by path: no other file can be requested."""
    return {
        file.relative_to(folder).as_posix(): (file.read_bytes(), _TYPES[file.suffix])
        for file in folder.rglob("*")
        if file.suffix in _TYPES
    }


def look_up(fleet: LiveFleet, state_name: str, part: str, key: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the columns of a state's part (empty: its first one), and the rows of a key at the newest version.

    The key has a value for each key column, as text or as JSON has it; None for the columns alone. The result has the ``parts`` of the
    state, and the ``part`` that is read; ``columns``, each with ``name``, ``type`` and ``is_key``. With a key also ``version``,
    ``shard`` (None if several shards may have it), ``rows``, each a list of texts, and ``more``, whether there are further rows. Raises
    InvalidRequestError if there is no such state or part, or the key does not fit its columns.
    """
    state = fleet.state(state_name, part)
    parts = state.parts
    if parts and not part:
        part = parts[0]
        state = fleet.state(state_name, part)
    columns = [
        {"name": field.name, "type": str(field.type), "is_key": field.name in state.keys} for field in state.schema
    ]
    described = {"parts": list(parts), "part": part, "columns": columns}
    if key is None:
        return described
    found = state.find(key_of(state, key))
    rows = [[_shortened(cell_text(value)) for value in row.values()] for row in found.rows[:_ROWS]]
    return {
        **described,
        "version": found.version,
        "shard": found.shard,
        "rows": rows,
        "more": len(found.rows) > _ROWS,
    }


def _shortened(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}… ({len(text)} characters)"

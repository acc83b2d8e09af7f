"""The dashboard actor, which asks the fleet for its status and serves the dashboard. State and coordinator do not depend on it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import ray

from coordinator.model.errors import SetupError, StateStoreError
from coordinator.runtime.logs import log_to_stderr
from coordinator.runtime.runtime import Runtime, freeze_imports, now_ms
from coordinator.service.metric_export import keep_exporting
from statefleet.dashboard.access import Access, is_loopback
from statefleet.dashboard.options import DashboardOptions
from statefleet.dashboard.probe import RayProbe
from statefleet.dashboard.server import Server
from statefleet.dashboard.status_cache import StatusCache

if TYPE_CHECKING:
    from statefleet.reads.fleet import LiveFleet

log = logging.getLogger(__name__)

#: Number of concurrent key look-ups.
_LOOK_UPS = 4


class DashboardActor:
    """The dashboard actor. It serves from its construction on, also after Ray restarted it.

    Parameters
    ----------
    options
        Host and port. Ray keeps them, so they have no token.
    """

    def __init__(self, uri: str, options: DashboardOptions) -> None:
        freeze_imports()
        log_to_stderr(uri, "dashboard")
        self._uri = uri
        self._options = options
        self._clock = Runtime().clock
        self._fleet: LiveFleet | None = None
        self._url = ""
        self._error: StateStoreError | None = None
        # Its own event loop: Ray's loop serves the calls.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="statefleet-dashboard", daemon=True).start()
        try:
            self._url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except StateStoreError as error:
            # Raised by `url`: an actor whose constructor fails cannot say why.
            self._error = error
            log.error("the dashboard is not served: %s", error)

    async def _start(self) -> str:
        options, needs_token = self._options, not is_loopback(self._options.host)
        # Only this process has a generated token; one in its environment outlives the process.
        token = DashboardOptions.token() or (secrets.token_urlsafe(32) if needs_token else None)
        status = StatusCache(RayProbe(self._uri).status, lambda: now_ms(self._clock))
        access = Access(token, only_loopback_names=not needs_token)
        pool = ThreadPoolExecutor(_LOOK_UPS, thread_name_prefix="statefleet-look-up")
        server = Server(status, self._opened_fleet, pool, access)
        try:
            host, port = await server.start(options.host, options.port_of(self._uri), fallback=options.port is None)
        except OSError as error:
            raise SetupError(
                "the dashboard cannot be served there, and the fleet goes on without; ask for another host or port",
                host=options.host,
                port=options.port,
                cause=error,
            ) from error
        self._exporting = asyncio.create_task(keep_exporting(self._uri, status.samples))
        public_host = options.shown_host(host, ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        return f"http://{public_host}:{port}/" + ("" if token is None else f"?token={token}")

    def _opened_fleet(self) -> LiveFleet:
        if self._fleet is None:
            # Imported here: only looking up a key needs the engine, which takes as long to import as all the rest.
            from statefleet.reads.fleet import attach

            self._fleet = attach(self._uri)
        return self._fleet

    def url(self) -> str:
        """Return the address to open once, with the token if one is needed.

        Raises
        ------
        SetupError, InvalidRequestError
            The dashboard cannot be served there, or the token is not valid.
        """
        if self._error is not None:
            raise self._error
        return self._url

    def options(self) -> DashboardOptions:
        """Return the host and port that were asked for."""
        return self._options

    def ping(self) -> None:
        """Return, as proof that the actor answers."""

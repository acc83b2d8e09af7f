"""The dashboard actor, which asks the fleet for its status and serves the dashboard. State and coordinator do not depend on it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from coordinator.model.errors import SetupError, StateStoreError
from coordinator.runtime.hosts import is_loopback
from coordinator.runtime.logs import log_to_stderr
from coordinator.runtime.runtime import Runtime, freeze_imports, now_ms
from coordinator.service.calls import RayActors
from coordinator.service.client import CoordinatorClient
from coordinator.service.metric_export import keep_exporting
from statefleet.dashboard.access import Access
from statefleet.dashboard.options import DashboardOptions
from statefleet.dashboard.server import Server
from statefleet.dashboard.status_cache import StatusCache

if TYPE_CHECKING:
    from statefleet.reads.fleet import LiveFleet

log = logging.getLogger(__name__)

#: Number of concurrent key look-ups.
_LOOK_UPS = 4
#: How long all store actors together may take to answer, in seconds, and how many are pinged at once.
_PING_S = 0.5
_PINGS = 100
#: Number of calls without an answer to a ping after which a store actor counts as lost.
_UNANSWERED = 3


class DashboardActor:
    """The dashboard actor. It serves from its construction on, also after Ray restarted it. Ray keeps its options, so they have no
    token.
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
        status = StatusCache(_RayProbe(self._uri).status, lambda: now_ms(self._clock))
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


class _RayProbe:
    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._actors = RayActors()
        self._coordinator: CoordinatorClient | None = None
        #: By name: the pending ping, and the number of calls without its answer.
        self._pings: dict[str, tuple[Any, int]] = {}
        self._lost: set[str] = set()
        self._next = 0

    def status(self) -> dict[str, Any]:
        """Return :meth:`Coordinator.status_details <coordinator.service.coordinator.Coordinator.status_details>`.

        A store actor that answers no ping is not ``alive`` there: the coordinator learns of a loss only once it needs the actor.
        """
        if self._coordinator is None:
            coordinator = CoordinatorClient.find(self._uri)
            if coordinator is None:
                raise SetupError("the fleet does not run (any more); state is safe in the object store", uri=self._uri)
            # States that no query uses now are shown, too.
            coordinator.load_all_states()
            self._coordinator = coordinator
        report = self._coordinator.status_details()
        self._ping(sorted(actor["actor_name"] for actor in report["store_actors"]))
        for actor in report["store_actors"]:
            actor["alive"] = actor["alive"] and actor["actor_name"] not in self._lost
        return report

    def _ping(self, names: list[str]) -> None:
        """Ping store actors, in turn if there are many, and note which of them are lost."""
        self._lost &= set(names)
        self._pings = {name: ping for name, ping in self._pings.items() if name in names}
        begin = self._next if self._next < len(names) else 0
        self._next = begin + _PINGS
        for name in names[begin : self._next]:
            if name not in self._pings:
                handle = self._actors.find(name)
                if handle is None:
                    self._lost.add(name)
                else:
                    self._pings[name] = handle.ping.remote(), 0
        waiting = [reference for reference, _ in self._pings.values()]
        if waiting:
            ray.wait(waiting, num_returns=len(waiting), timeout=_PING_S)
        self._take_answers(list(self._pings))

    def _take_answers(self, names: Iterable[str]) -> None:
        for name in names:
            reference, calls = self._pings.pop(name)
            if not ray.wait([reference], timeout=0)[0]:
                self._pings[name] = reference, calls + 1
                if calls + 1 >= _UNANSWERED:
                    self._lost.add(name)
                continue
            try:
                ray.get(reference)
                self._lost.discard(name)
            except RayError:
                self._lost.add(name)

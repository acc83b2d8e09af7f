"""The dashboard actor, which polls its fleet and serves the dashboard. State and coordinator do not depend on it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayError

from coordinator.model.errors import SetupError, StateStoreError
from coordinator.runtime.logs import log_to_stderr
from coordinator.runtime.runtime import Runtime, freeze_imports, now_ms
from coordinator.service.calls import RayActors
from coordinator.service.client import CoordinatorClient
from coordinator.service.metric_export import keep_exporting
from statefleet.dashboard.access import Access, is_loopback
from statefleet.dashboard.lookups import LookUps
from statefleet.dashboard.options import DashboardOptions
from statefleet.dashboard.server import Server
from statefleet.dashboard.watching import Watching
from statefleet.reads.fleet import attach

__all__ = ["DashboardActor", "RayProbe"]

log = logging.getLogger(__name__)

#: Number of concurrent key queries.
_LOOK_UPS = 4
#: How long all store actors together may take to answer, in seconds, and how many are pinged at each poll.
_PING_S = 0.5
_PINGS = 100
#: Number of polls without an answer to a ping after which a store actor counts as lost.
_UNANSWERED = 3


class RayProbe:
    """A fleet on this Ray cluster; see :class:`~statefleet.dashboard.watching.FleetProbe`.

    Parameters
    ----------
    uri
        The fleet's normalised URI.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._actors = RayActors()
        self._coordinator: CoordinatorClient | None = None
        self._are_open = False
        #: By name: the pending ping, and the number of polls without its answer.
        self._pings: dict[str, tuple[Any, int]] = {}
        self._answering: dict[str, bool] = {}
        self._next = 0

    def watch(self, known_stamps: Mapping[str, str]) -> dict[str, Any]:
        """Poll the coordinator; see :meth:`Coordinator.watch <coordinator.service.coordinator.Coordinator.watch>`."""
        if self._coordinator is None:
            self._coordinator = CoordinatorClient.find(self._uri)
        if self._coordinator is None:
            raise SetupError("the fleet does not run (any more); state is safe in the object store", uri=self._uri)
        if not self._are_open:
            # States that no query uses now are shown, too.
            self._coordinator.load_all_states()
            self._are_open = True
        return self._coordinator.watch(known_stamps)

    def answering(self, status: Mapping[str, Any]) -> Mapping[str, bool]:
        """Ping store actors and return which of them answer: the coordinator learns of a loss only once the actor is needed."""
        names = sorted(actor["actor_name"] for actor in status["store_actors"])
        self._answering = {name: answers for name, answers in self._answering.items() if name in names}
        self._pings = {name: ping for name, ping in self._pings.items() if name in names}
        for name in self._turn(names):
            if name not in self._pings:
                self._ping(name)
        waiting = [reference for reference, _ in self._pings.values()]
        if waiting:
            ray.wait(waiting, num_returns=len(waiting), timeout=_PING_S)
        for name, (reference, looks) in list(self._pings.items()):
            self._look_for(name, reference, looks)
        return dict(self._answering)

    def _turn(self, names: list[str]) -> list[str]:
        """Return the store actors that are pinged at this poll, in turn."""
        begin = self._next if self._next < len(names) else 0
        self._next = begin + _PINGS
        return names[begin : begin + _PINGS]

    def _ping(self, name: str) -> None:
        handle = self._actors.find(name)
        if handle is None:
            self._answering[name] = False
        else:
            self._pings[name] = handle.ping.remote(), 0

    def _look_for(self, name: str, reference: Any, looks: int) -> None:
        if not ray.wait([reference], timeout=0)[0]:
            self._pings[name] = reference, looks + 1
            if looks + 1 >= _UNANSWERED:
                self._answering[name] = False
            return
        del self._pings[name]
        try:
            ray.get(reference)
        except RayError:
            self._answering[name] = False
        else:
            self._answering[name] = True


class DashboardActor:
    """The dashboard actor. It serves from its construction on, also after Ray restarted it.

    Parameters
    ----------
    uri
        The fleet's normalised URI.
    options
        Host and port. Ray keeps them, so they have no token.
    """

    def __init__(self, uri: str, options: DashboardOptions) -> None:
        freeze_imports()
        log_to_stderr(uri, "dashboard")
        self._uri = uri
        self._options = options
        self._clock = Runtime().clock
        self._local = threading.local()
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
        watching = Watching(RayProbe(self._uri), lambda: now_ms(self._clock))
        access = Access(token, only_loopback_names=not needs_token)
        pool = ThreadPoolExecutor(_LOOK_UPS, thread_name_prefix="statefleet-look-up")
        server = Server(watching, self._look_ups, pool, access)
        try:
            host, port = await server.start(options.host, options.port_of(self._uri), fallback=options.port is None)
        except OSError as error:
            raise SetupError(
                "the dashboard cannot be served there, and the fleet goes on without; ask for another host or port",
                host=options.host,
                port=options.port,
                cause=error,
            ) from error
        watching.start()
        self._exporting = asyncio.create_task(keep_exporting(self._uri, watching.samples))
        public_host = options.shown_host(host, ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        return f"http://{public_host}:{port}/" + ("" if token is None else f"?token={token}")

    def _look_ups(self) -> LookUps:
        """Return the queries of the calling thread, which share no cache with other threads."""
        if not hasattr(self._local, "look_ups"):
            self._local.look_ups = LookUps(lambda: attach(self._uri), self._clock)
        look_ups: LookUps = self._local.look_ups
        return look_ups

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

"""Sources of state: the store actors of a running fleet, or the object store, read by this process. Neither writes anything.

Queries of a few keys go to store actors by direct connections (:mod:`store_actors.connections.direct_calls`), all else by Ray.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import AuthenticationError
from typing import Any, Protocol, Self

import pyarrow as pa
from ray.exceptions import RayActorError, RayError, RayTaskError

from coordinator.ledger.read_views import ReadView, VersionStats, ViewId, WantedView
from coordinator.model.errors import StateStoreError, StoreUnavailableError
from coordinator.model.identities import ActorLocation, StateStoreId
from coordinator.model.schema import StateSchema
from coordinator.runtime.runtime import Runtime
from coordinator.service.calls import RayActors
from coordinator.service.client import CoordinatorClient
from store_actors.connections.direct_calls import DirectAddress, DirectMessages, connect
from store_actors.messages.key_queries import KeyQuery, KeyResult, KeyResults
from store_actors.messages.requests import ReadRequest
from store_actors.serving.hot_key_tracker import HottestKeys

log = logging.getLogger(__name__)

#: How long an answer may take, in seconds: a version that no store actor has in memory is loaded first.
_DEADLINE_S = 300.0
#: How long a store actor may take to return the address of its direct calls, in seconds.
_ADDRESS_S = 1.0
#: How often readers of scans report to store actors that they are alive, in seconds: after a minute of silence a reader counts as dead.
_ALIVE_S = 15.0
#: Seconds until the next attempt after no connection came about.
_AGAIN_S = 30.0
#: Unused connections to one store actor.
_SPARE = 4
#: Seconds after which unused connections are closed: their store actor may be gone for good.
_IDLE_S = 300.0


class StoreActorLostError(Exception):
    """A store actor was lost during a call: ask the coordinator which one has its shards now."""


class Source(Protocol):
    """A source of state. Every method raises the errors of the coordinator and of the store."""

    def names(self) -> list[str]:
        """Return the names of all states."""

    def view(self, name: str, view_request: WantedView, cached: ViewId | None) -> ReadView | None:
        """Return the view of a version; None if the caller has it (:func:`coordinator.ledger.read_views.read_view`)."""

    def version_stats(self, name: str, count: int, *, is_committed: bool) -> tuple[VersionStats, ...]:
        """Return statistics of the newest versions of a state, newest first, `count` at most."""

    def find(
        self, where: ActorLocation | None, requests: Sequence[ReadRequest], keys: Sequence[pa.Table]
    ) -> Callable[[], Sequence[KeyResult]]:
        """Begin key queries on shards of one store actor; returns a function that waits for their results.

        Raises
        ------
        StoreActorLostError
            The store actor was lost; the function that is returned raises it, too.
        """

    def scan(self, where: ActorLocation | None, request: ReadRequest, limit: int | None) -> Iterator[pa.Table] | None:
        """Return all rows of a store, a piece at a time; None if the version is superseded."""

    def describe(self, where: ActorLocation | None, request: ReadRequest) -> StateSchema | None:
        """Return the columns of a store; None if the version is superseded."""

    def hottest_keys(self, where: ActorLocation | None, store_id: StateStoreId, most: int) -> HottestKeys:
        """Return the keys of a shard that were accessed most often lately."""


class FleetSource:
    """The store actors of a running fleet; queries by a few keys go by `direct` connections, or by Ray's calls if that is None."""

    def __init__(
        self,
        coordinator: CoordinatorClient,
        actors: RayActors,
        runtime: Runtime,
        direct: DirectClient | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._actors = actors
        self._runtime = runtime
        self._direct = direct
        self._handles: dict[str, Any] = {}
        #: Store actor of each scan that is being read, by the scan's id.
        self._open_scans: dict[str, Any] = {}
        self._is_keeping = False
        self._guard = runtime.threads.lock()

    @classmethod
    def connected(cls, coordinator: CoordinatorClient, actors: RayActors, runtime: Runtime) -> Self:
        """Return a source with connections of this process to the store actors."""

        def address_of(actor_name: str) -> DirectAddress | None:
            handle = source._handles.get(actor_name) or actors.find(actor_name)
            address: DirectAddress | None = handle and actors.get(handle.direct_address.remote(), _ADDRESS_S)
            return address

        source = cls(coordinator, actors, runtime, DirectClient(address_of, runtime))
        return source

    def names(self) -> list[str]:
        return self._coordinator.load_all_states()

    def view(self, name: str, view_request: WantedView, cached: ViewId | None) -> ReadView | None:
        return self._coordinator.read_view(name, view_request, cached)

    def version_stats(self, name: str, count: int, *, is_committed: bool) -> tuple[VersionStats, ...]:
        return self._coordinator.list_versions(name, count, is_committed=is_committed)

    def find(
        self, where: ActorLocation | None, requests: Sequence[ReadRequest], keys: Sequence[pa.Table]
    ) -> Callable[[], Sequence[KeyResult]]:
        query = KeyQuery(requests, keys)
        if query.is_small:
            return self._find_few(where, query.encoded())
        reference = self._handle(where).find_rows.remote(query)
        return lambda: self._answer(reference).each

    def _find_few(self, where: ActorLocation | None, query: bytes) -> Callable[[], Sequence[KeyResult]]:
        wait = None
        if self._direct is not None and where is not None:
            wait = self._direct.begin(where.actor_name, where.instance_id, query)
        if wait is None:
            reference = self._handle(where).find_few.remote(query)
            return lambda: KeyResults.decoded(self._answer(reference)).each

        def results() -> Sequence[KeyResult]:
            encoded = wait()
            if encoded is None:
                encoded = self._answer(self._handle(where).find_few.remote(query))
            return KeyResults.decoded(encoded).each

        return results

    def scan(self, where: ActorLocation | None, request: ReadRequest, limit: int | None) -> Iterator[pa.Table] | None:
        handle = self._handle(where)
        begun = self._answer(handle.scan_rows.remote(request, limit))
        return None if begun is None else self._pieces(handle, *begun)

    def _pieces(self, handle: Any, scan_id: str, first: pa.Table | None) -> Iterator[pa.Table]:
        piece = first
        self._register_scan(scan_id, handle)
        try:
            while piece is not None:
                # The store actor makes the next piece while this one is used.
                waiting = handle.next_rows.remote(scan_id)
                yield piece
                piece = self._answer(waiting)
                if isinstance(piece, StateStoreError):
                    raise piece
        finally:
            with self._guard:
                del self._open_scans[scan_id]
            if piece is not None:
                handle.end_scan.remote(scan_id)

    def _register_scan(self, scan_id: str, handle: Any) -> None:
        """Tell the store actor regularly that the reader of a scan is alive, until the scan ends."""
        with self._guard:
            self._open_scans[scan_id] = handle
            is_keeping, self._is_keeping = self._is_keeping, True
        if not is_keeping:
            self._runtime.threads.start(self._keep_scans, "statefleet-takers")

    def _keep_scans(self) -> None:
        while True:
            self._runtime.clock.sleep(_ALIVE_S)
            self.keep_scans()

    def keep_scans(self) -> None:
        """Tell store actors that the readers of their scans are alive."""
        with self._guard:
            scans = list(self._open_scans.items())
        by_handle: dict[int, tuple[Any, list[str]]] = {}
        for scan_id, handle in scans:
            by_handle.setdefault(id(handle), (handle, []))[1].append(scan_id)
        for reference in [handle.keep_scans.remote(scan_ids) for handle, scan_ids in by_handle.values()]:
            # If a store actor is lost, or hangs, the reader of the next rows gets the error.
            with suppress(TimeoutError, RayError):
                self._actors.get(reference, _ALIVE_S)

    def describe(self, where: ActorLocation | None, request: ReadRequest) -> StateSchema | None:
        schema: StateSchema | None = self._answer(self._handle(where).describe_store.remote(request))
        return schema

    def hottest_keys(self, where: ActorLocation | None, store_id: StateStoreId, most: int) -> HottestKeys:
        if where is None:
            return HottestKeys(None, None)
        reference = self._handle(where).hottest_keys.remote(store_id.state_name, store_id.partition_id, most)
        keys: HottestKeys = self._answer(reference)
        return keys

    def _handle(self, where: ActorLocation | None) -> Any:
        """Return the handle of the store actor that has a shard, or of any if none has it.

        Raises
        ------
        StoreActorLostError
            The store actor is gone.
        StoreUnavailableError
            The fleet has no store actor.
        """
        name = self._any() if where is None else where.actor_name
        handle = self._handles.get(name) or self._actors.find(name)
        if handle is None:
            raise StoreActorLostError(name)
        self._handles[name] = handle
        return handle

    def _any(self) -> str:
        actors = self._coordinator.status()["store_actors"]
        alive = [actor["actor_name"] for actor in actors if actor["alive"]]
        if not alive:
            raise StoreUnavailableError(
                "the fleet has no store actor to read with now; state is safe in the object store; start a query, or read with "
                "statefleet.attach(uri, offline=True)"
            )
        return str(alive[0])

    def _answer(self, reference: Any) -> Any:
        try:
            return self._actors.get(reference, _DEADLINE_S)
        except TimeoutError as error:
            raise StoreUnavailableError(
                "a store actor did not answer a read in time; nothing was changed; see its log, or read with "
                "statefleet.attach(uri, offline=True)",
                seconds=_DEADLINE_S,
            ) from error
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, StateStoreError) else error) from None
        except RayActorError as error:
            self._handles.clear()
            raise StoreActorLostError(str(error)) from error


@dataclass(slots=True)
class _Incarnation:
    instance_id: str
    #: Connections that no call uses now.
    spare: list[DirectMessages] = field(default_factory=list)
    is_connecting: bool = False
    #: No connection is tried before this time.
    not_before_s: float = 0.0
    used_s: float = 0.0

    def close_spare(self) -> None:
        while self.spare:
            self.spare.pop().close()


class DirectClient:
    """The reader's side: the connections of one process. Thread-safe.

    No call waits for a connection: a call that finds none goes by Ray, and starts one for the next call. `address_of` asks a store
    actor, by its name, for its address; it returns None if it has none now.
    """

    def __init__(self, address_of: Callable[[str], DirectAddress | None], runtime: Runtime) -> None:
        #: Seconds that a caller waits for a connection or for an answer until it asks by Ray.
        self.patience_s = 1.0
        self._address_of = address_of
        self._clock = runtime.clock
        self._threads = runtime.threads
        self._reset()

    def _reset(self) -> None:
        self._guard = self._threads.lock()
        #: By the name of the store actor.
        self._incarnations: dict[str, _Incarnation] = {}
        self._pid = os.getpid()

    def begin(self, actor_name: str, instance_id: str, call: bytes) -> Callable[[], bytes | None] | None:
        """Send a call to an incarnation of a store actor; None if there is no connection.

        What it returns waits for the answer, and returns None if the caller has to ask by Ray.
        """
        incarnation, connection = self._taken(actor_name, instance_id)
        if connection is None:
            return None
        try:
            connection.send(call)
        except OSError:
            self._close(incarnation, connection)
            return None
        return partial(self._received, incarnation, connection)

    def _received(self, incarnation: _Incarnation, connection: DirectMessages) -> bytes | None:
        try:
            # The kernel's limit starts again with every signal.
            if not connection.poll(self.patience_s):
                raise TimeoutError("no answer")
            answer = connection.receive()
        except TimeoutError:
            # It has much to do, or hangs: no other call need wait for as long.
            incarnation.not_before_s = self._clock.elapsed_s() + _AGAIN_S
            self._close(incarnation, connection)
            return None
        except (OSError, EOFError):
            self._close(incarnation, connection)
            return None
        except AuthenticationError:
            log.warning("an answer of a store actor was changed on its way, and is not used; its look-ups go by Ray")
            incarnation.not_before_s = self._clock.elapsed_s() + _AGAIN_S
            self._close(incarnation, connection)
            return None
        with self._guard:
            if len(incarnation.spare) < _SPARE:
                incarnation.spare.append(connection)
        return answer

    def _taken(self, actor_name: str, instance_id: str) -> tuple[_Incarnation, DirectMessages | None]:
        if self._pid != os.getpid():
            # A forked process would receive its parent's answers on these connections, and the parent's lock may never be released.
            self._reset()
        now_s = self._clock.elapsed_s()
        with self._guard:
            incarnation = self._incarnations.get(actor_name)
            if incarnation is None or incarnation.instance_id != instance_id:
                if incarnation is not None:
                    incarnation.close_spare()
                self._close_idle(now_s - _IDLE_S)
                incarnation = self._incarnations[actor_name] = _Incarnation(instance_id)
            incarnation.used_s = now_s
            if incarnation.spare:
                return incarnation, incarnation.spare.pop()
            if not incarnation.is_connecting and incarnation.not_before_s <= now_s:
                self._threads.start(partial(self._connect, actor_name, incarnation), "statefleet-connect")
                incarnation.is_connecting, incarnation.not_before_s = True, now_s + _AGAIN_S
            return incarnation, None

    def _close_idle(self, horizon_s: float) -> None:
        """Close the connections to store actors that were last asked before `horizon_s`."""
        for actor_name, incarnation in list(self._incarnations.items()):
            if incarnation.used_s < horizon_s:
                incarnation.close_spare()
                del self._incarnations[actor_name]

    def _connect(self, actor_name: str, incarnation: _Incarnation) -> None:
        connection = None
        try:
            address = self._address_of(actor_name)
            connection = None if address is None else connect(address, self.patience_s)
        except Exception:  # calls go by Ray, which reports what is wrong
            log.info("no connection to %s; its look-ups go by Ray", actor_name, exc_info=True)
        with self._guard:
            incarnation.is_connecting = False
            if connection is not None:
                incarnation.spare.append(connection)
                incarnation.not_before_s = 0.0

    def _close(self, incarnation: _Incarnation, connection: DirectMessages) -> None:
        """Close a connection that failed, and those that no call uses: they broke with it, or are as slow."""
        connection.close()
        with self._guard:
            incarnation.close_spare()

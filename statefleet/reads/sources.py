"""Where state is read: in the store actors of a fleet that runs, or in this process from object storage. Neither writes anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol, Self, TypeVar

import pyarrow as pa
from ray.exceptions import RayActorError, RayError, RayTaskError

from coordinator.ledger.read_views import ReadView, ViewId, WantedView
from coordinator.ledger.version_stats import VersionStats
from coordinator.model.errors import StateStoreError, StoreUnavailableError
from coordinator.model.identities import ActorLocation, StateStoreId
from coordinator.model.schema import StateSchema
from coordinator.runtime.runtime import Runtime
from coordinator.service.calls import Actors
from coordinator.service.client import CoordinatorClient
from store_actors.direct_calls import DirectAddress, DirectCalls
from store_actors.key_queries import KeyQuery, KeyResult, KeyResults
from store_actors.messages import ReadRequest
from store_actors.serving.hot_key_tracker import HottestKeys

__all__ = ["FleetSource", "Lost", "Source"]

Result = TypeVar("Result")

#: How long an answer may take, in seconds: a version that nobody has in memory is loaded first.
_DEADLINE_S = 300.0
#: How long a store actor may take to tell where it answers, in seconds.
_ADDRESS_S = 1.0
#: How often store actors are told that the takers of rows live, in seconds: after a minute without a word one is taken for dead.
_ALIVE_S = 15.0


class Lost(Exception):
    """A store actor was lost under a call: ask the coordinator who has its shards now."""


class Source(Protocol):
    """Where state is read. Every method raises what the coordinator or the store raises."""

    def names(self) -> list[str]:
        """Names of all states."""

    def view(self, name: str, asked: WantedView, known: ViewId | None) -> ReadView | None:
        """See :meth:`Coordinator.read_view <coordinator.service.coordinator.Coordinator.read_view>`."""

    def figures(self, name: str, count: int, *, is_committed: bool) -> tuple[VersionStats, ...]:
        """See :meth:`Coordinator.list_versions <coordinator.service.coordinator.Coordinator.list_versions>`."""

    def find(
        self, where: ActorLocation | None, requests: Sequence[ReadRequest], keys: Sequence[pa.Table]
    ) -> Callable[[], Sequence[KeyResult]]:
        """Begin look-ups where some shards are; returns what waits for their outcomes.

        Raises
        ------
        Lost
            Also by what is returned.
        """

    def scan(self, where: ActorLocation | None, request: ReadRequest, limit: int | None) -> Iterator[pa.Table] | None:
        """All rows of a store, a piece at a time; None as of an outcome."""

    def describe(self, where: ActorLocation | None, request: ReadRequest) -> StateSchema | None:
        """Columns of a store; None as of an outcome."""

    def hottest_keys(self, where: ActorLocation | None, store_id: StateStoreId, most: int) -> HottestKeys:
        """Keys of a shard that were met most often lately."""


class FleetSource:
    """The store actors of a fleet that runs.

    Parameters
    ----------
    coordinator
        The fleet's coordinator.
    surroundings
        By which it is known that takers of rows live.
    direct
        How store actors are asked for a few keys; by calls of Ray if it is None.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        actors: Actors,
        runtime: Runtime,
        direct: DirectCalls | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._actors = actors
        self._runtime = runtime
        self._direct = direct
        self._handles: dict[str, Any] = {}
        #: Store actors of the scans whose rows are being taken.
        self._taken: dict[str, Any] = {}
        self._is_keeping = False
        self._guard = runtime.threads.lock()

    @classmethod
    def connected(cls, coordinator: CoordinatorClient, actors: Actors, runtime: Runtime) -> Self:
        """With connections of this process to the store actors."""

        def address_of(actor_name: str) -> DirectAddress | None:
            handle = made._handles.get(actor_name) or actors.find(actor_name)
            address: DirectAddress | None = handle and actors.get(handle.direct_address.remote(), _ADDRESS_S)
            return address

        made = cls(coordinator, actors, runtime, DirectCalls(address_of, runtime))
        return made

    def names(self) -> list[str]:
        """See :class:`Source`."""
        return self._coordinator.load_all_states()

    def view(self, name: str, asked: WantedView, known: ViewId | None) -> ReadView | None:
        """See :class:`Source`."""
        return self._coordinator.read_view(name, asked, known)

    def figures(self, name: str, count: int, *, is_committed: bool) -> tuple[VersionStats, ...]:
        """See :class:`Source`."""
        return self._coordinator.list_versions(name, count, is_committed=is_committed)

    def find(
        self, where: ActorLocation | None, requests: Sequence[ReadRequest], keys: Sequence[pa.Table]
    ) -> Callable[[], Sequence[KeyResult]]:
        """See :class:`Source`."""
        asked = KeyQuery(requests, keys)
        if asked.is_small:
            return self._find_few(where, asked.encoded())
        reference = self._handle(where).find_rows.remote(asked)
        return lambda: self._answer(reference).each

    def _find_few(self, where: ActorLocation | None, asked: bytes) -> Callable[[], Sequence[KeyResult]]:
        answered = None
        if self._direct is not None and where is not None:
            answered = self._direct.begin(where.actor_name, where.instance_id, asked)
        if answered is None:
            reference = self._handle(where).find_few.remote(asked)
            return lambda: KeyResults.decoded(self._answer(reference)).each

        def outcomes() -> Sequence[KeyResult]:
            found = answered()
            if found is None:
                found = self._answer(self._handle(where).find_few.remote(asked))
            return KeyResults.decoded(found).each

        return outcomes

    def scan(self, where: ActorLocation | None, request: ReadRequest, limit: int | None) -> Iterator[pa.Table] | None:
        """See :class:`Source`."""
        handle = self._handle(where)
        begun = self._answer(handle.scan_rows.remote(request, limit))
        return None if begun is None else self._pieces(handle, *begun)

    def _pieces(self, handle: Any, scan_id: str, first: pa.Table | None) -> Iterator[pa.Table]:
        piece = first
        self._take(scan_id, handle)
        try:
            while piece is not None:
                # The next one is made while this one is used.
                waiting = handle.next_rows.remote(scan_id)
                yield piece
                piece = self._answer(waiting)
                if isinstance(piece, StateStoreError):
                    raise piece
        finally:
            with self._guard:
                del self._taken[scan_id]
            if piece is not None:
                handle.end_scan.remote(scan_id)

    def _take(self, scan_id: str, handle: Any) -> None:
        """Have a store actor know that the taker of a scan's rows lives, until they are taken."""
        with self._guard:
            self._taken[scan_id] = handle
            is_keeping, self._is_keeping = self._is_keeping, True
        if not is_keeping:
            self._runtime.threads.start(self._keep_scans, "statefleet-takers")

    def _keep_scans(self) -> None:
        while True:
            self._runtime.clock.sleep(_ALIVE_S)
            self.keep_scans()

    def keep_scans(self) -> None:
        """Tell store actors that the takers of the rows that they give live."""
        with self._guard:
            taken = list(self._taken.items())
        by_handle: dict[int, tuple[Any, list[str]]] = {}
        for scan_id, handle in taken:
            by_handle.setdefault(id(handle), (handle, []))[1].append(scan_id)
        for reference in [handle.keep_scans.remote(scan_ids) for handle, scan_ids in by_handle.values()]:
            # Of a store actor that is lost, or hangs, whoever takes the next rows is told.
            with suppress(TimeoutError, RayError):
                self._actors.get(reference, _ALIVE_S)

    def describe(self, where: ActorLocation | None, request: ReadRequest) -> StateSchema | None:
        """See :class:`Source`."""
        schema: StateSchema | None = self._answer(self._handle(where).describe_store.remote(request))
        return schema

    def hottest_keys(self, where: ActorLocation | None, store_id: StateStoreId, most: int) -> HottestKeys:
        """See :class:`Source`."""
        if where is None:
            return HottestKeys(None, None)
        asked = self._handle(where).hottest_keys.remote(store_id.state_name, store_id.partition_id, most)
        found: HottestKeys = self._answer(asked)
        return found

    def _handle(self, where: ActorLocation | None) -> Any:
        """Handle of the store actor that has a shard, or of any if none has.

        Raises
        ------
        Lost
            It is gone.
        StoreUnavailableError
            There is none.
        """
        name = self._any() if where is None else where.actor_name
        handle = self._handles.get(name) or self._actors.find(name)
        if handle is None:
            raise Lost(name)
        self._handles[name] = handle
        return handle

    def _any(self) -> str:
        living = [one["actor_name"] for one in self._coordinator.status()["store_actors"] if one["alive"]]
        if not living:
            raise StoreUnavailableError(
                "the fleet has no store actor to read with now; state is safe in the object store; start a query, or read with "
                "statefleet.attach(uri, offline=True)"
            )
        return str(living[0])

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
            raise Lost(str(error)) from error

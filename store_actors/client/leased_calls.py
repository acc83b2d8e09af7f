"""Calls of store actors under leases: which store actor has a shard, the repetition of calls that a loss ended, and the calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

from msgspec import structs
from ray.exceptions import RayActorError

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.commits import CommitEntry
from coordinator.model.errors import FencedError, StateStoreError, StoreUnavailableError
from coordinator.model.identities import ActorLocation, StateStoreId, TaskIdentity
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.watermarks import Watermarks
from coordinator.runtime.runtime import Clock, Retry
from coordinator.service.calls import Actors, unwrapped
from coordinator.service.client import CoordinatorClient
from store_actors.client.batch import event_times
from store_actors.client.state_store import StateStore
from store_actors.messages.requests import ApplyRequest, OpenRequest, ShardInput, StoreSpec

Result = TypeVar("Result", covariant=True)

log = logging.getLogger(__name__)

#: How long a task waits for a store actor or the coordinator to come back before it fails (Spark then retries it).
DEADLINE_S = 120.0
#: The first pause before it asks again.
PAUSE_S = 0.05

#: Tasks (by number) with their leases.
Granted: TypeAlias = Sequence[tuple[int, LeaseGrant]]


class LeasedCall(Protocol[Result]):
    """A method of a store actor that is called for tasks whose shards are leased to it."""

    @property
    def method(self) -> str: ...

    def arguments(self, granted: Granted, node_id: str) -> tuple[Any, ...]:
        """Return the arguments of a call for some of the tasks; `node_id` is the Ray node of this process."""

    def results(self, answer: Any, granted: Granted, handle: Any) -> Sequence[Result | StateStoreError]:
        """Return the result of each task in the store actor's answer; `handle` is its handle."""


class LeasedCalls:
    """A process's calls of the store actors of a fleet.

    Parameters
    ----------
    find_local
        Returns the handle of the store actor of this process's node, which is started if there is none.
    """

    def __init__(
        self, actors: Actors, coordinator: CoordinatorClient, clock: Clock, find_local: Callable[[], Any]
    ) -> None:
        self._actors = actors
        self._coordinator = coordinator
        self._clock = clock
        self._find_local = find_local
        self._handles: dict[str, Any] = {}
        self._local: ActorLocation | None = None
        #: Store actor of each partition of a state, as of the last lease of a task in this process.
        self._holders: dict[tuple[str, int], ActorLocation] = {}

    def under_leases(
        self, tasks: Sequence[TaskIdentity], metadata: StateMetadata, call: LeasedCall[Result]
    ) -> list[Result]:
        """Return the results of a call under the leases of some tasks of one batch, in their order.

        There is one call for each store actor that has shards of them. A call that failed because a store actor, or a lease, was lost
        is repeated under a new lease.

        Raises
        ------
        StoreUnavailableError
            A store actor did not come back before the deadline.
        StateStoreError
            The coordinator or the store refused a call.
        """
        # A plan is made before its query has an id.
        metadata = structs.replace(metadata, query_id=tasks[0].query_id)
        retry = Retry(self._clock, DEADLINE_S, first_pause_s=PAUSE_S, longest_pause_s=2.0)
        # A lease that came with the batch before is tried once; after a failure the coordinator is asked.
        grants = self._piggybacked(tasks)
        results: dict[int, Result] = {}
        while True:
            failed: tuple[TaskIdentity, Exception] | None = None
            for number, outcome in self._round(tasks, metadata, grants, results, call):
                if isinstance(outcome, FencedError | RayActorError):
                    # A lease may have moved between being granted and being used; the next one says whether this run may go on.
                    failed = tasks[number], outcome
                    grants.pop(number, None)
                elif isinstance(outcome, Exception):
                    raise outcome
                else:
                    results[number] = outcome
            if failed is None:
                return [results[number] for number in range(len(tasks))]
            if retry.is_over:
                task, error = failed
                raise error if isinstance(error, FencedError) else unavailable(task, error) from error
            retry.pause()

    def _round(
        self,
        tasks: Sequence[TaskIdentity],
        metadata: StateMetadata,
        grants: dict[int, LeaseGrant],
        results: Mapping[int, Result],
        call: LeasedCall[Result],
    ) -> Iterator[tuple[int, Result | Exception]]:
        """Yield an outcome for each task without a result, from concurrent calls, one to each store actor of their shards."""
        unfinished = [number for number in range(len(tasks)) if number not in results]
        unleased = [number for number in unfinished if number not in grants]
        try:
            if unleased:
                leases = self._coordinator.attach_and_lease_all(
                    [tasks[number] for number in unleased], metadata, self.local_location()
                )
                grants |= zip(unleased, leases, strict=True)
        except RayActorError as error:
            self.lost(None)
            yield from ((number, error) for number in unleased)
            return
        waiting = []
        for location, granted in self._by_location(tasks, [(number, grants[number]) for number in unfinished]):
            try:
                self._check_node(location)
                arguments = call.arguments(granted, self.local_location().node_id)
                handle = self.handle(location)
                waiting.append((location, granted, handle, getattr(handle, call.method).remote(*arguments)))
            except RayActorError as error:
                yield from self._of_lost(location, granted, error)
        for location, granted, handle, reference in waiting:
            outcomes: Sequence[Result | Exception]
            try:
                outcomes = call.results(unwrapped(self._actors, handle, reference), granted, handle)
            except FencedError as error:
                outcomes = [error] * len(granted)
            except RayActorError as error:
                yield from self._of_lost(location, granted, error)
                continue
            yield from zip((number for number, _ in granted), outcomes, strict=True)

    def _by_location(
        self, tasks: Sequence[TaskIdentity], granted: Iterable[tuple[int, LeaseGrant]]
    ) -> Iterable[tuple[ActorLocation, list[tuple[int, LeaseGrant]]]]:
        """Return the tasks by the store actor that has their shards, and remember it."""
        grouped: dict[ActorLocation, list[tuple[int, LeaseGrant]]] = {}
        for number, grant in granted:
            task, location = tasks[number], grant.lease.location
            self._holders[task.state_name, task.partition_id] = location
            grouped.setdefault(location, []).append((number, grant))
        return grouped.items()

    def _of_lost(
        self, location: ActorLocation, granted: Sequence[tuple[int, LeaseGrant]], error: RayActorError
    ) -> Iterator[tuple[int, RayActorError]]:
        self.lost(location)
        return ((number, error) for number, _ in granted)

    def _piggybacked(self, tasks: Sequence[TaskIdentity]) -> dict[int, LeaseGrant]:
        """Return leases by task number that store actors of this node received with the commits before."""
        if tasks[0].batch_id == 0 or tasks[0].is_of_python:
            return {}
        grants: dict[int, LeaseGrant] = {}
        where: ActorLocation | None = None
        try:
            local = self.local_location()
            # A node may have several store actors; the one that has the shard is known if a task of the shard ran here before.
            by_location: dict[ActorLocation, list[int]] = {}
            for number, task in enumerate(tasks):
                by_location.setdefault(self._holders.get((task.state_name, task.partition_id), local), []).append(
                    number
                )
            for where, numbers in by_location.items():
                if where.node_id != local.node_id:
                    continue
                handle = self.handle(where)
                leases = unwrapped(
                    self._actors, handle, handle.piggybacked.remote([tasks[number] for number in numbers])
                )
                grants |= {number: lease for number, lease in zip(numbers, leases, strict=True) if lease is not None}
        except RayActorError:
            self.lost(where)
        return grants

    def local_location(self) -> ActorLocation:
        """Return the store actor of this node."""
        if self._local is None:
            handle = self._find_local()
            local: ActorLocation = unwrapped(self._actors, handle, handle.location.remote())
            self._handles[local.instance_id] = handle
            self._local = local
        return self._local

    def handle(self, location: ActorLocation) -> Any:
        """Return the handle of an incarnation of a store actor.

        Raises
        ------
        ray.exceptions.RayActorError
            There is no such actor any more.
        """
        # By incarnation: a fleet that was shut down and connected to again has other actors of the same names.
        if location.instance_id not in self._handles:
            handle = self._actors.find(location.actor_name)
            if handle is None:
                raise RayActorError(error_msg=f"there is no actor {location.actor_name} any more")
            self._handles[location.instance_id] = handle
        return self._handles[location.instance_id]

    def _check_node(self, location: ActorLocation) -> None:
        """Raise RayActorError if a store actor is on another node that cannot be reached; Ray itself would raise it seconds later.

        Tasks run on the nodes of their shards, so most tasks that call another node's store actor have lost the shard's node.
        """
        if location.node_id == self.local_location().node_id or self._actors.node_answers(location.node_id):
            return
        log.warning("node %s does not answer; its store actor counts as lost", location.node_id)
        if (handle := self._actors.find(location.actor_name)) is not None:
            # A store actor that is only cut off from here must not go on: its incarnation counts as dead.
            self._actors.kill(handle, restart=True)
        raise RayActorError(error_msg=f"node {location.node_id} cannot be reached")

    def lost(self, location: ActorLocation | None) -> None:
        """Report to the coordinator that an incarnation died under a call, and forget all handles, so that they are looked up again."""
        self._local = None
        self._handles.clear()
        self._holders.clear()
        if location is not None:
            self._coordinator.report_store_actor_lost(location.instance_id)


def unavailable(task: TaskIdentity, error: Exception) -> StoreUnavailableError:
    """Return the error of a task that has waited until the deadline."""
    return StoreUnavailableError(
        "the store actor of a shard did not come back in time; committed versions are safe in the object store and nothing of "
        "this batch was lost; see `ray list actors` and the actor's log, then restart the query",
        state=task.state_name,
        partition=task.partition_id,
        version=task.batch_id + 1,
        cause=error,
    )


@dataclass(frozen=True, slots=True)
class ShardWork:
    """The rows of a task for one shard."""

    task: TaskIdentity
    rows: ShardInput
    late_ms: int = 0
    evict_ms: int = 0
    output_mode: str = ""


@dataclass(frozen=True, slots=True)
class ApplyCall:
    """Folds the rows of shards of one operator and batch; see :class:`~store_actors.client.leased_calls.LeasedCall`.

    The results are the rows that each shard emits.
    """

    method: ClassVar[str] = "apply"
    actors: Actors
    works: Sequence[ShardWork]
    schema: StateSchema

    def arguments(self, granted: Granted, node_id: str) -> tuple[Any, ...]:
        requests = []
        for number, grant in granted:
            work = self.works[number]
            times = event_times(grant, work.late_ms, work.evict_ms)
            requests.append(
                ApplyRequest(
                    work.task, grant.lease, grant.base_version, self.schema, times.after, times.late_ms, node_id
                )
            )
        return requests, self.actors.put([self.works[number].rows for number, _ in granted])

    def results(self, answer: Any, granted: Granted, handle: Any) -> Sequence[Any | StateStoreError]:
        return [outcome if isinstance(outcome, StateStoreError) else outcome[0] for outcome in answer]


@dataclass(frozen=True, slots=True)
class ImportCall:
    """Makes rows of state the first version of a shard; see :class:`~store_actors.client.leased_calls.LeasedCall`.

    The result is the commit.

    Attributes
    ----------
    pieces
        References to the rows, in Ray's object store.
    """

    method: ClassVar[str] = "import_rows"
    task: TaskIdentity
    schema: StateSchema
    pieces: Sequence[Any]
    watermarks: Watermarks

    def arguments(self, granted: Granted, node_id: str) -> tuple[Any, ...]:
        ((_, grant),) = granted
        return ApplyRequest(self.task, grant.lease, grant.base_version, self.schema, self.watermarks), self.pieces

    def results(self, answer: CommitEntry, granted: Granted, handle: Any) -> Sequence[CommitEntry]:
        return [answer]


@dataclass(frozen=True, slots=True)
class OpenCall:
    """Opens a session that updates keyed stores; see :class:`~store_actors.client.leased_calls.LeasedCall`.

    The result is a handle on the stores, with the lease.
    """

    method: ClassVar[str] = "open_update"
    actors: Actors
    task: TaskIdentity
    stores: tuple[StoreSpec, ...]

    def _request(self, granted: Granted) -> OpenRequest:
        ((_, grant),) = granted
        return OpenRequest(self.task, grant.lease, grant.base_version, self.stores)

    def arguments(self, granted: Granted, node_id: str) -> tuple[Any, ...]:
        return (self._request(granted),)

    def results(self, answer: Any, granted: Granted, handle: Any) -> Sequence[tuple[StateStore, LeaseGrant]]:
        ((_, grant),) = granted
        session = SessionCalls(self.actors, handle, answer[0], self._request(granted))
        store_id = default_store(grant.lease.store_id, self.stores)
        return [(StateStore(session, store_id, grant.base_version), grant)]


@dataclass(frozen=True, slots=True)
class SessionCalls:
    """Calls of a session that a store actor has open."""

    actors: Actors
    handle: Any
    session_id: str
    request: OpenRequest

    def __call__(self, method: str, *args: Any) -> Any:
        """Return the answer to a call.

        Raises
        ------
        StoreUnavailableError
            The store actor was lost.
        """
        try:
            return unwrapped(self.actors, self.handle, getattr(self.handle, method).remote(self.session_id, *args))
        except RayActorError as error:
            raise StoreUnavailableError(
                "the store actor was lost under a handle; nothing of it was committed unless commit said so; open a new one",
                state=self.request.task.state_name,
                partition=self.request.task.partition_id,
                version=self.request.base_version,
                cause=error,
            ) from error


def default_store(store_id: StateStoreId, stores: tuple[StoreSpec, ...]) -> StateStoreId:
    """Return the identity of the first store, on which a new handle works."""
    return structs.replace(store_id, store_name=stores[0].name)

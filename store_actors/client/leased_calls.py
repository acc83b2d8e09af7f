"""Calls of store actors under leases: which store actor has a shard, the repetition of calls that a loss ended, and the calls.

A store actor's own process calls it without Ray (:class:`LocalActors`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from msgspec import structs
from ray import ObjectRef
from ray.exceptions import RayActorError

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.errors import FencedError, StoreUnavailableError
from coordinator.model.identities import ActorLocation, TaskIdentity
from coordinator.model.state_metadata import StateMetadata
from coordinator.runtime.runtime import Clock, Pool, Retry, Threads
from coordinator.service.calls import RayActors, unwrapped
from coordinator.service.client import CoordinatorClient
from store_actors.client.leased_call import DEADLINE_S, PAUSE_S, LeasedCall
from store_actors.messages.requests import OpenRequest

Result = TypeVar("Result")

log = logging.getLogger(__name__)

#: Calls of tasks at once by the process of a store actor itself; a node has as many tasks as cores.
_LOCAL_AT_ONCE = 64


class LeasedCalls:
    """A process's calls of the store actors of a fleet.

    Parameters
    ----------
    find_local
        Returns the handle of the store actor of this process's node, which is started if there is none.
    """

    def __init__(
        self, actors: RayActors, coordinator: CoordinatorClient, clock: Clock, find_local: Callable[[], Any]
    ) -> None:
        self.actors = actors
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
                outcomes = call.results(unwrapped(self.actors, handle, reference), granted, handle)
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
                    self.actors, handle, handle.piggybacked.remote([tasks[number] for number in numbers])
                )
                grants |= {number: lease for number, lease in zip(numbers, leases, strict=True) if lease is not None}
        except RayActorError:
            self.lost(where)
        return grants

    def local_location(self) -> ActorLocation:
        """Return the store actor of this node."""
        if self._local is None:
            handle = self._find_local()
            local: ActorLocation = unwrapped(self.actors, handle, handle.location.remote())
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
            handle = self.actors.find(location.actor_name)
            if handle is None:
                raise RayActorError(error_msg=f"there is no actor {location.actor_name} any more")
            self._handles[location.instance_id] = handle
        return self._handles[location.instance_id]

    def _check_node(self, location: ActorLocation) -> None:
        """Raise RayActorError if a store actor is on another node that cannot be reached; Ray itself would raise it seconds later.

        Tasks run on the nodes of their shards, so most tasks that call another node's store actor have lost the shard's node.
        """
        if location.node_id == self.local_location().node_id or self.actors.node_answers(location.node_id):
            return
        log.warning("node %s does not answer; its store actor counts as lost", location.node_id)
        if (handle := self.actors.find(location.actor_name)) is not None:
            # A store actor that is only cut off from here must not go on: its incarnation counts as dead.
            self.actors.kill(handle, restart=True)
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
class SessionCalls:
    """Calls of a session that a store actor has open."""

    actors: RayActors
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


def local_calls(threads: Threads) -> Pool:
    """Return threads for calls of a store actor in its own process."""
    return threads.pool(_LOCAL_AT_ONCE, "statefleet-local-call")


class LocalActors(RayActors):
    """The fleet's actors as the process of a store actor sees them: it calls itself without Ray; see
    :class:`~coordinator.service.calls.RayActors`.

    Parameters
    ----------
    name, process
        The store actor of this process, or what has its methods. Their arguments are passed as they are.
    threads
        Where calls are made.
    """

    def __init__(self, name: str, process: Any, threads: Pool) -> None:
        super().__init__()
        self._name = name
        self._local = _LocalHandle(process, threads)

    def find(self, name: str) -> Any | None:
        return self._local if name == self._name else super().find(name)

    def wait(self, references: Sequence[Any], timeout_s: float) -> bool:
        # This process does not look after itself: :meth:`get` waits for its own calls.
        return not isinstance(references[0], ObjectRef) or super().wait(references, timeout_s)

    def get(self, reference: Any, timeout_s: float | None = None) -> Any:
        return super().get(reference, timeout_s) if isinstance(reference, ObjectRef) else reference.result()

    def put(self, value: Any) -> Any:
        # Ray puts the arguments of its own calls by itself.
        return value


@dataclass(frozen=True, slots=True)
class _LocalHandle:
    process: Any
    threads: Pool

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=partial(self.threads.submit, getattr(self.process, method)))

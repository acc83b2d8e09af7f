"""Calls of a store actor by a Spark task: of a batch, an import or a session under a lease, and those of an open session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from msgspec import structs
from ray.exceptions import RayActorError

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.commits import CommitEntry
from coordinator.model.errors import StateStoreError, StoreUnavailableError
from coordinator.model.identities import StateStoreId, TaskIdentity
from coordinator.model.schema import StateSchema
from coordinator.model.watermarks import Watermarks
from coordinator.service.calls import Actors, unwrapped
from store_actors.client.batch import event_times
from store_actors.client.leased_calls import Granted
from store_actors.client.state_store import StateStore
from store_actors.messages.requests import ApplyRequest, OpenRequest, ShardInput, StoreSpec


@dataclass(frozen=True, slots=True)
class ShardWork:
    """The rows of a task for one shard.

    Attributes
    ----------
    late_ms, evict_ms, output_mode
        Facts of the batch; see :class:`~store_actors.client.batch.BatchHeader`.
    """

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

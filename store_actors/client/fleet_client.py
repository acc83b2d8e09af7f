"""A process's way to keyed stores and to imports: the store actor of its node, the coordinator, and retries."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.commits import CommitEntry
from coordinator.model.errors import VersionNotFoundError
from coordinator.model.identities import ActorLocation, TaskIdentity
from coordinator.model.leases import Lease
from coordinator.model.load_plans import LoadPlan
from coordinator.model.maintenance import Maintenance
from coordinator.model.memory_options import MemoryOptions
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.watermarks import Watermarks
from coordinator.runtime.runtime import Clock, Retry
from coordinator.service.calls import RayActors, unwrapped
from coordinator.service.client import CoordinatorClient
from coordinator.storage.options import StorageOptions
from store_actors.client.leased_call import DEADLINE_S, PAUSE_S, Granted, LeasedCall
from store_actors.client.leased_calls import LeasedCalls, SessionCalls, unavailable
from store_actors.client.state_store import ReadStateStore, StateStore, default_store
from store_actors.messages.requests import ApplyRequest, OpenRequest, StoreSpec


@dataclass(frozen=True, slots=True)
class FleetAddress:
    """The address of a fleet: its URI, and options, which hold no credentials."""

    uri: str
    storage_options: StorageOptions = field(default_factory=StorageOptions)
    maintenance: Maintenance = field(default_factory=Maintenance)
    memory: MemoryOptions = field(default_factory=MemoryOptions)


class FleetClient:
    """Routes the operations of a process on keyed stores, and its imports."""

    def __init__(
        self,
        coordinator: CoordinatorClient,
        actors: RayActors,
        clock: Clock,
        find_local: Callable[[], Any],
    ) -> None:
        self._actors = actors
        self._clock = clock
        self._coordinator = coordinator
        self.calls = LeasedCalls(actors, coordinator, clock, find_local)

    def import_rows(
        self,
        task: TaskIdentity,
        metadata: StateMetadata,
        schema: StateSchema,
        pieces: Sequence[Any],
        watermarks: Watermarks,
    ) -> CommitEntry:
        """Make rows of state that are in Ray's object store, in pieces, the first version of a shard; return its commit.

        Raises errors as :meth:`~store_actors.client.leased_calls.LeasedCalls.under_leases`.
        """

        def arguments(granted: Granted, node_id: str) -> tuple[Any, ...]:
            ((_, grant),) = granted
            return ApplyRequest(task, grant.lease, grant.base_version, schema, watermarks), pieces

        call: LeasedCall[CommitEntry] = LeasedCall("import_rows", arguments, lambda answer, granted, handle: [answer])
        (committed,) = self.calls.under_leases([task], metadata, call)
        return committed

    def open_update(self, task: TaskIdentity, metadata: StateMetadata, stores: tuple[StoreSpec, ...]) -> StateStore:
        """Return a handle that makes the next version of a partition's keyed stores.

        Raises
        ------
        WriterBusyError
            Another handle is changing the partition.
        StateStoreError
            The coordinator or the store refused the call.
        """
        session, grant = self.open_session(task, metadata, stores)
        return StateStore(session, default_store(grant.lease.store_id, stores), grant.base_version)

    def open_session(
        self, task: TaskIdentity, metadata: StateMetadata, stores: tuple[StoreSpec, ...]
    ) -> tuple[SessionCalls, LeaseGrant]:
        """Return the calls of the handle of :meth:`open_update`, and the lease."""

        def request(granted: Granted) -> OpenRequest:
            ((_, grant),) = granted
            return OpenRequest(task, grant.lease, grant.base_version, stores)

        def opened(answer: Any, granted: Granted, handle: Any) -> list[tuple[SessionCalls, LeaseGrant]]:
            ((_, grant),) = granted
            return [(SessionCalls(self._actors, handle, answer[0], request(granted)), grant)]

        call = LeasedCall("open_update", lambda granted, node_id: (request(granted),), opened)
        (of_task,) = self.calls.under_leases([task], metadata, call)
        return of_task

    def open_read(
        self, state_name: str, shard: int, stores: tuple[StoreSpec, ...], version: int | None
    ) -> ReadStateStore:
        """Return a handle that reads a retained version of a shard's keyed stores, the newest by default.

        If the state was rescaled, `shard` is a shard that it had at the version.

        Raises
        ------
        InvalidRequestError
            The version does not exist or is not retained.
        """
        retry = Retry(self._clock, DEADLINE_S, first_pause_s=PAUSE_S, longest_pause_s=PAUSE_S)
        while True:
            located = self._coordinator.locate(state_name, shard, version)
            store_id, newest = located.store_id, located.newest_version
            where = located.location or self.calls.local_location()
            read_version = newest if version is None else version
            if not 0 <= read_version <= newest:
                raise VersionNotFoundError(
                    "the state has no such version",
                    state=state_name,
                    shard=shard,
                    version=read_version,
                    newest=newest,
                )
            task = TaskIdentity(
                state_name, "", "", read_version, store_id.partition_id, 0, f"{socket.gethostname()}:{os.getpid()}"
            )
            request = OpenRequest(task, Lease(store_id, "", -1, where), read_version, stores)
            try:
                return ReadStateStore(self._open_read(where, request), default_store(store_id, stores), read_version)
            except RayActorError as error:
                self.calls.lost(where)
                if retry.is_over:
                    raise unavailable(task, error) from error
                retry.pause()

    def load_plans(self, task: TaskIdentity, store_names: Sequence[str]) -> Mapping[str, LoadPlan]:
        """Return the files that make the version of some of a partition's stores that the task's batch reads, by store name."""
        return self._coordinator.load_plans(task.state_name, task.partition_id, task.batch_id, store_names).plans

    def _open_read(self, location: ActorLocation, request: OpenRequest) -> SessionCalls:
        handle = self.calls.handle(location)
        session_id, _ = unwrapped(self._actors, handle, handle.open_read.remote(request))
        return SessionCalls(self._actors, handle, session_id, request)

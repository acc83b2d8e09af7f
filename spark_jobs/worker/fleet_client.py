"""A Spark Python worker's way to the fleet: one Ray connection a process, the co-located store actor, and retries."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import psutil
import pyarrow as pa
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
from coordinator.runtime.retry import Retry
from coordinator.runtime.runtime import Runtime
from coordinator.service.calls import Actors, RayActors, unwrapped
from coordinator.service.client import CoordinatorClient
from coordinator.service.deploy import join_cluster
from coordinator.storage.options import StorageOptions
from spark_jobs.worker.daemon import settle_process
from spark_jobs.worker.leased_calls import DEADLINE_S, PAUSE_S, LeasedCalls, unavailable
from spark_jobs.worker.state_store import ReadStateStore, StateStore
from spark_jobs.worker.store_calls import ApplyCall, ImportCall, OpenCall, SessionCalls, ShardWork, default_store
from store_actors.deploy import ensure_store_actor
from store_actors.messages import OpenRequest, StoreSpec

__all__ = ["ConnectTask", "FleetAddress", "FleetClient", "executor_name", "fleet_client"]

#: Bytes of rows from which on a task sends them before it reads more.
_GROUP_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class FleetAddress:
    """The address of a fleet: its URI, options of the object store, and its Ray cluster.

    Part of the functions that Spark keeps, so its options hold no credentials; a worker needs none.
    """

    uri: str
    ray_address: str
    storage_options: StorageOptions = field(default_factory=StorageOptions)
    maintenance: Maintenance = field(default_factory=Maintenance)
    memory: MemoryOptions = field(default_factory=MemoryOptions)


@cache
def fleet_client(address: FleetAddress) -> FleetClient:
    """Return this process's client of a fleet, which connects to Ray at first use (Spark reuses its Python workers)."""
    join_cluster(address.ray_address, node_ip=_executors_node_ip())
    client = FleetClient(address)
    settle_process()
    return client


def _executors_node_ip() -> str | None:
    """Return the address of the Ray node that this worker's executor is an actor of; None for the machine's own.

    A machine may have several nodes, and Ray's workers inherit the id of the raylet that started them.
    """
    try:
        arguments = psutil.Process(int(os.environ["RAY_RAYLET_PID"])).cmdline()
    except (KeyError, ValueError, psutil.Error):
        return None
    option = "--node_ip_address="
    return next((argument.removeprefix(option) for argument in arguments if argument.startswith(option)), None)


@dataclass(frozen=True, slots=True)
class ConnectTask:
    """A ``mapInArrow`` function that connects its worker to the fleet, and returns the rows unchanged."""

    address: FleetAddress

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        fleet_client(self.address).connect()
        yield from batches


@cache
def executor_name() -> str:
    """Return ``host:pid`` of the Spark executor: the process above this worker's daemon."""
    pid = psutil.Process(os.getppid()).ppid()
    return f"{_executors_node_ip() or socket.gethostname()}:{pid}"


class FleetClient:
    """Routes the state operations of a process.

    Parameters
    ----------
    address
        The fleet.
    actors, runtime
        Calls of the fleet's actors, and the clock and ids of the machine; a simulation passes its own.
    """

    def __init__(self, address: FleetAddress, *, actors: Actors | None = None, runtime: Runtime | None = None) -> None:
        self._address = address
        self._actors = actors or RayActors()
        runtime = runtime or Runtime()
        self._clock = runtime.clock
        self._coordinator = CoordinatorClient.connect(
            address.uri, address.storage_options, address.maintenance, actors=self._actors, runtime=runtime
        )
        self._calls = LeasedCalls(self._actors, self._coordinator, self._clock, self._find_local)

    def apply_all(self, works: Iterable[ShardWork], metadata: StateMetadata, schema: StateSchema) -> Iterator[pa.Table]:
        """Send rows to shards of one operator and batch; yield the rows that each emits, in their order, once its commit is durable.

        The shards commit side by side, so that a task with many shards waits for the object store once. A large batch is sent to some
        shards at a time, so that their rows need not be in memory together. After the loss of a store actor or a lease the call is
        repeated: the commit protocol makes that safe.

        Raises
        ------
        StoreUnavailableError
            No store actor answered before the deadline.
        StateStoreError
            The coordinator or the store refused the call.
        """
        # In complete mode each shard emits all its rows.
        is_large = schema.output_mode == "complete" and self._address.memory.limit is not None
        for group in _groups(works, 0 if is_large else _GROUP_BYTES):
            yield from self._apply(group, metadata, schema)

    def _apply(self, works: Sequence[ShardWork], metadata: StateMetadata, schema: StateSchema) -> list[pa.Table]:
        call = ApplyCall(self._actors, works, schema)
        return self._calls.under_leases([work.task for work in works], metadata, call)

    def import_rows(
        self,
        task: TaskIdentity,
        metadata: StateMetadata,
        schema: StateSchema,
        pieces: Iterable[pa.Table],
        watermarks: Watermarks,
    ) -> CommitEntry:
        """Make rows of state, in pieces, the first version of a shard; return its commit.

        Raises
        ------
        StoreUnavailableError
            No store actor answered before the deadline.
        StateStoreError
            The coordinator or the store refused the call.
        """
        # Ray keeps the pieces until the call ends, if need be on disk.
        references = [self._actors.put(piece) for piece in pieces]

        call = ImportCall(task, schema, references, watermarks)
        (committed,) = self._calls.under_leases([task], metadata, call)
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
        return self.open_granted(task, metadata, stores)[0]

    def open_granted(
        self, task: TaskIdentity, metadata: StateMetadata, stores: tuple[StoreSpec, ...]
    ) -> tuple[StateStore, LeaseGrant]:
        """Return the handle of :meth:`open_update`, and the lease, whose watermarks are for operators that follow event time."""
        call = OpenCall(self._actors, task, stores)
        (opened,) = self._calls.under_leases([task], metadata, call)
        return opened

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
            where = located.location or self._calls.local_location()
            read_version = newest if version is None else version
            if not 0 <= read_version <= newest:
                raise VersionNotFoundError(
                    "the state has no such version",
                    state=state_name,
                    shard=shard,
                    version=read_version,
                    newest=newest,
                )
            task = TaskIdentity(state_name, "", "", read_version, store_id.partition_id, 0, executor_name())
            request = OpenRequest(task, Lease(store_id, "", -1, where), read_version, stores)
            try:
                return ReadStateStore(self._open_read(where, request), default_store(store_id, stores), read_version)
            except RayActorError as error:
                self._calls.lost(where)
                if retry.is_over:
                    raise unavailable(task, error) from error
                retry.pause()

    def load_plans(self, task: TaskIdentity, store_names: Sequence[str]) -> Mapping[str, LoadPlan]:
        """Return the files that make the version of some of a partition's stores that the task's batch reads, by store name."""
        return self._coordinator.load_plans(task.state_name, task.partition_id, task.batch_id, store_names).plans

    def _open_read(self, location: ActorLocation, request: OpenRequest) -> SessionCalls:
        handle = self._calls.handle(location)
        session_id, _ = unwrapped(self._actors, handle, handle.open_read.remote(request))
        return SessionCalls(self._actors, handle, session_id, request)

    def connect(self) -> None:
        """Find (or start) the store actor of this node."""
        self._calls.local_location()

    def _find_local(self) -> Any:
        address = self._address
        return ensure_store_actor(
            self._actors,
            address.uri,
            address.storage_options,
            address.maintenance,
            self._actors.node_id(),
            address.memory,
        )


def _groups(works: Iterable[ShardWork], most_bytes: int) -> Iterator[list[ShardWork]]:
    """Yield groups of consecutive works; a group ends once it has so many bytes of rows."""
    group: list[ShardWork] = []
    size = 0
    for work in works:
        group.append(work)
        size += sum(table.nbytes for table in work.rows.tables)
        if size >= most_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group

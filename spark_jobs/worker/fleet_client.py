"""A Spark Python worker's way to the fleet: one Ray connection a process, the co-located store actor, and retries."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from ray.exceptions import RayActorError

from coordinator.calls import Actors, RayActors, unwrapped
from coordinator.client import CoordinatorClient
from coordinator.core import LeaseGrant
from coordinator.deploy import join_cluster
from coordinator.errors import FencedError, StoreUnavailableError, VersionNotFoundError
from coordinator.maintenance import Maintenance
from coordinator.memory_options import MemoryOptions
from coordinator.model import ActorLocation, Lease, LoadPlan, StateMetadata, StateStoreId, TaskIdentity
from coordinator.storage.options import StorageOptions
from coordinator.surroundings import Surroundings
from spark_jobs.worker.batch import BatchHeader, event_times
from spark_jobs.worker.daemon import settle_process
from spark_jobs.worker.state_store import Ask, ReadStateStore, StateStore
from store_actors.deploy import ensure_store_actor
from store_actors.messages import ApplyRequest, OpenRequest, ShardInput, StoreSpec
from store_actors.schema import StateSchema

__all__ = ["ConnectTask", "FleetAddress", "FleetClient", "executor_name", "fleet_client"]

Result = TypeVar("Result")

log = logging.getLogger(__name__)

#: How long a task waits for a store actor or the coordinator to come back before it fails (Spark then retries it).
_DEADLINE_S = 120.0
#: How long it waits before it asks again, at first.
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class FleetAddress:
    """Where a fleet is: its URI, options of the object store, and the Ray cluster it lives on.

    Part of the functions that Spark keeps, so its options hold no credentials; a worker needs none.
    """

    uri: str
    ray_address: str
    storage_options: StorageOptions = field(default_factory=StorageOptions)
    maintenance: Maintenance = field(default_factory=Maintenance)
    memory: MemoryOptions = field(default_factory=MemoryOptions)


@cache
def fleet_client(address: FleetAddress) -> FleetClient:
    """This process's client of a fleet; connects to Ray at first use (Spark reuses its Python workers)."""
    join_cluster(address.ray_address, node_ip=_executors_node_ip())
    client = FleetClient(address)
    settle_process()
    return client


def _executors_node_ip() -> str | None:
    """Address of the Ray node that this worker's executor is an actor of; None for the machine's own.

    A machine may have several nodes, and Ray's workers inherit which raylet started them.
    """
    try:
        arguments = Path(f"/proc/{int(os.environ['RAY_RAYLET_PID'])}/cmdline").read_text().split("\0")
    except (KeyError, ValueError, OSError):
        return None
    option = "--node_ip_address="
    return next((one.removeprefix(option) for one in arguments if one.startswith(option)), None)


@dataclass(frozen=True, slots=True)
class ConnectTask:
    """A ``mapInArrow`` function that only readies the worker it runs in."""

    address: FleetAddress

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        fleet_client(self.address).connect()
        yield from batches


@cache
def executor_name() -> str:
    """``host:pid`` of the Spark executor: the process above this worker's daemon."""
    pid = os.getppid()
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        pid = int(fields[1])
    except (OSError, IndexError, ValueError):
        pass  # not Linux: the daemon's pid tells executors of a host apart just as well
    return f"{socket.gethostname()}:{pid}"


class FleetClient:
    """Routes one process's state operations.

    Parameters
    ----------
    address
        The fleet.
    actors, surroundings
        How it reaches the fleet's actors, and what it takes from its machine; a simulation has its own.
    """

    def __init__(
        self, address: FleetAddress, *, actors: Actors | None = None, surroundings: Surroundings | None = None
    ) -> None:
        self._address = address
        self._actors = actors or RayActors()
        surroundings = surroundings or Surroundings()
        self._clock = surroundings.clock
        self._coordinator = CoordinatorClient.connect(
            address.uri, address.storage_options, address.maintenance, actors=self._actors, surroundings=surroundings
        )
        self._handles: dict[str, Any] = {}
        self._local: ActorLocation | None = None
        #: Store actor that had each partition of a state when a task here asked last.
        self._holders: dict[tuple[str, int], ActorLocation] = {}

    def apply(
        self,
        task: TaskIdentity,
        metadata: StateMetadata,
        schema: StateSchema,
        rows: ShardInput,
        watermarks_ms: Mapping[int, int],
        header: BatchHeader | None = None,
    ) -> pa.Table:
        """Hand a shard its rows; returns what the batch emits once the commit is durable.

        Repeated after the loss of a store actor or of a lease: the commit protocol makes that safe.

        Parameters
        ----------
        watermarks_ms
            Own watermark of each of the operator's own sources (by number) that the batch had rows of.
        header
            What Spark's driver tells of the batch.

        Raises
        ------
        StoreUnavailableError
            No store actor answered before the deadline.
        StateStoreError
            Whatever the coordinator or the store refused.
        """
        payload = self._actors.put(rows)

        def hand_over(grant: LeaseGrant) -> pa.Table:
            times = event_times(schema, grant, header, watermarks_ms)
            node_id = self._local_location().node_id
            request = ApplyRequest(task, grant.lease, grant.base_version, schema, times.after, times.late_ms, node_id)
            handle = self._handle(grant.lease.location)
            emitted, _ = unwrapped(self._actors, handle, handle.apply.remote(request, payload))
            return emitted

        return self._on_lease(task, metadata, hand_over)

    def _on_lease(self, task: TaskIdentity, metadata: StateMetadata, use: Callable[[LeaseGrant], Result]) -> Result:
        """What `use` makes of the task's lease; a new lease is asked for if a store actor, or the lease, was lost meanwhile."""
        # A plan is made before its query has an id.
        metadata = replace(metadata, query_id=task.query_id)
        deadline = self._clock.elapsed_s() + _DEADLINE_S
        pause_s = _PAUSE_S
        grant = self._carried(task)
        while True:
            location: ActorLocation | None = None
            try:
                # One that came with the batch before is tried once; what is wrong with it, the coordinator knows.
                if grant is None:
                    grant = self._coordinator.attach_and_lease(task, metadata, self._local_location())
                location = self._holders[task.state_name, task.partition_id] = grant.lease.location
                self._check_node(location)
                try:
                    return use(grant)
                except FencedError:
                    # A lease may have moved between being granted and being used; the next grant says whether this run may go on.
                    if self._clock.elapsed_s() > deadline:
                        raise
            except RayActorError as error:
                self._lost(location)
                if self._clock.elapsed_s() > deadline:
                    raise _unavailable(task, error) from error
            grant = None
            self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)

    def _carried(self, task: TaskIdentity) -> LeaseGrant | None:
        """The task's lease, if the store actor that has the shard is on this node and got it with the commit before."""
        if task.batch_id == 0 or task.is_of_python:
            return None
        where: ActorLocation | None = None
        try:
            local = self._local_location()
            # A node may have several; which one has the shard is known where a task of it ran before.
            where = self._holders.get((task.state_name, task.partition_id), local)
            if where.node_id != local.node_id:
                return None
            handle = self._handle(where)
            grant: LeaseGrant | None = unwrapped(self._actors, handle, handle.carried.remote(task))
        except RayActorError:
            self._lost(where)
            return None
        return grant

    def open_update(self, task: TaskIdentity, metadata: StateMetadata, stores: tuple[StoreSpec, ...]) -> StateStore:
        """A handle that makes the next version of a partition's keyed stores.

        Raises
        ------
        WriterBusyError
            Another handle is changing the partition.
        StateStoreError
            Whatever the coordinator or the store refused.
        """
        return self.open_granted(task, metadata, stores)[0]

    def open_granted(
        self, task: TaskIdentity, metadata: StateMetadata, stores: tuple[StoreSpec, ...]
    ) -> tuple[StateStore, LeaseGrant]:
        """:meth:`open_update`, with the lease: what it says of watermarks is for operators that follow event time."""

        def open_session(grant: LeaseGrant) -> tuple[StateStore, LeaseGrant]:
            request = OpenRequest(task, grant.lease, grant.base_version, stores)
            ask = self._session(grant.lease.location, "open_update", request)
            return StateStore(ask, _default(grant.lease.store_id, stores), grant.base_version), grant

        return self._on_lease(task, metadata, open_session)

    def open_read(
        self, state_name: str, shard: int, stores: tuple[StoreSpec, ...], version: int | None
    ) -> ReadStateStore:
        """A handle that reads a retained version of a shard's keyed stores, the newest by default.

        Of a state that was rescaled the shard is one of those that it had at the version.

        Raises
        ------
        InvalidRequestError
            The version does not exist or is not retained.
        """
        deadline = self._clock.elapsed_s() + _DEADLINE_S
        while True:
            located = self._coordinator.locate(state_name, shard, version)
            store_id, newest = located.store_id, located.newest_version
            where = located.location or self._local_location()
            wanted = newest if version is None else version
            if not 0 <= wanted <= newest:
                raise VersionNotFoundError(
                    "the state has no such version",
                    state=state_name,
                    shard=shard,
                    version=wanted,
                    newest=newest,
                )
            task = TaskIdentity(state_name, "", "", wanted, store_id.partition_id, 0, executor_name())
            request = OpenRequest(task, Lease(store_id, "", -1, where), wanted, stores)
            try:
                return ReadStateStore(self._session(where, "open_read", request), _default(store_id, stores), wanted)
            except RayActorError as error:
                self._lost(where)
                if self._clock.elapsed_s() > deadline:
                    raise _unavailable(task, error) from error
                self._clock.sleep(_PAUSE_S)

    def load_plans(self, task: TaskIdentity, store_names: Sequence[str]) -> Mapping[str, LoadPlan]:
        """What makes up the version of some of a partition's stores that the task's batch reads, by store name."""
        return self._coordinator.load_plans(task.state_name, task.partition_id, task.batch_id, store_names).plans

    def _session(self, location: ActorLocation, opening: str, request: OpenRequest) -> Ask:
        """Opens a session on a store actor; returns how to call it."""
        handle = self._handle(location)
        session_id, _ = unwrapped(self._actors, handle, getattr(handle, opening).remote(request))

        def ask(method: str, *args: Any) -> Any:
            try:
                return unwrapped(self._actors, handle, getattr(handle, method).remote(session_id, *args))
            except RayActorError as error:
                raise StoreUnavailableError(
                    "the store actor was lost under a handle; nothing of it was committed unless commit said so; open a new one",
                    state=request.task.state_name,
                    partition=request.task.partition_id,
                    version=request.base_version,
                    cause=error,
                ) from error

        return ask

    def connect(self) -> None:
        """Find (or start) the store actor of this node."""
        self._local_location()

    def _local_location(self) -> ActorLocation:
        if self._local is None:
            address, node_id = self._address, self._actors.node_id()
            handle = ensure_store_actor(
                self._actors, address.uri, address.storage_options, address.maintenance, node_id, address.memory
            )
            local: ActorLocation = unwrapped(self._actors, handle, handle.location.remote())
            self._handles[local.instance_id] = handle
            self._local = local
        return self._local

    def _handle(self, location: ActorLocation) -> Any:
        # By life: a fleet that was shut down and connected to again has other actors of the same names.
        if location.instance_id not in self._handles:
            handle = self._actors.find(location.actor_name)
            if handle is None:
                raise RayActorError(error_msg=f"there is no actor {location.actor_name} any more")
            self._handles[location.instance_id] = handle
        return self._handles[location.instance_id]

    def _check_node(self, location: ActorLocation) -> None:
        """Raise what Ray would raise seconds later, if a store actor is on another node and that one cannot be reached.

        Tasks run where their shards are, so most of those that meet another node's store actor have lost their own node.
        """
        if location.node_id == self._local_location().node_id or self._actors.node_answers(location.node_id):
            return
        log.warning("node %s does not answer; its store actor counts as lost", location.node_id)
        if (handle := self._actors.find(location.actor_name)) is not None:
            # One that is only cut off from here must not go on as a life that counts as over.
            self._actors.kill(handle, restart=True)
        raise RayActorError(error_msg=f"node {location.node_id} cannot be reached")

    def _lost(self, location: ActorLocation | None) -> None:
        """An actor died under a call: tell the coordinator which life of it, and look everything up anew."""
        self._local = None
        self._handles.clear()
        self._holders.clear()
        if location is not None:
            self._coordinator.report_store_actor_lost(location.instance_id)


def _default(store_id: StateStoreId, stores: tuple[StoreSpec, ...]) -> StateStoreId:
    """Identity of the first store, on which a new handle works."""
    return replace(store_id, store_name=stores[0].name)


def _unavailable(task: TaskIdentity, error: Exception) -> StoreUnavailableError:
    return StoreUnavailableError(
        "the store actor of a shard did not come back in time; committed versions are safe in the object store and nothing of "
        "this batch was lost; see `ray list actors` and the actor's log, then restart the query",
        state=task.state_name,
        partition=task.partition_id,
        version=task.batch_id + 1,
        cause=error,
    )

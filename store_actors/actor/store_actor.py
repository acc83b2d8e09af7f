"""The store actor: a thin shell around the shards and keyed stores of one process."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import pyarrow as pa
import ray

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.commits import CommitEntry
from coordinator.model.errors import MemoryLimitError, StateStoreError
from coordinator.model.identities import ActorLocation, StateStoreId, StateStoreProviderId, TaskIdentity
from coordinator.model.leases import CopyResult
from coordinator.model.load_plans import InstancePlans
from coordinator.model.maintenance import Maintenance
from coordinator.model.memory_options import MemoryOptions
from coordinator.model.metric_table import Sample
from coordinator.model.names import store_actor_number
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.runtime.logs import about, log_to_stderr
from coordinator.runtime.runtime import Runtime, freeze_imports
from coordinator.service.calls import RayActors, session_folder, unwrapped
from coordinator.service.client import CoordinatorClient
from coordinator.service.metric_export import EXPORT_INTERVAL_S, MetricExport
from coordinator.storage.actor_store import ForwardedCredentialsStore, StorageStats
from coordinator.storage.options import Secrets, StorageOptions
from coordinator.storage.probe import StorageProof
from coordinator.storage.protocol import ObjectStore
from coordinator.storage.uris import open_store_in_actor
from store_actors.actor.replicator import Replicator
from store_actors.client.fleet_client import FleetClient
from store_actors.client.leased_calls import LocalActors, local_calls
from store_actors.client.operator_task import emitted_rows
from store_actors.connections.direct_calls import DirectAddress, DirectMessages, DirectServer
from store_actors.connections.epoch_stream import Beats, EpochServer
from store_actors.connections.hand_over import address_of, hand_over_server, serve_remote_task, sockets_of
from store_actors.connections.worker_calls import WorkerCalls
from store_actors.epochs.functions import FunctionRuns
from store_actors.epochs.runs import EpochRuns
from store_actors.messages.key_queries import KeyQuery, KeyResults
from store_actors.messages.requests import (
    ApplyRequest,
    BatchFacts,
    OpenRequest,
    ReadRequest,
    ReplicatedCommit,
    ShardInput,
    Transfer,
    Write,
)
from store_actors.serving.coordinator_ref import GroupedCommits
from store_actors.serving.hot_key_tracker import HotKeyTracker, HottestKeys
from store_actors.serving.keyed_stores import KeyedStores
from store_actors.serving.metrics import StoreMetrics, store_samples
from store_actors.serving.operator_shards import OperatorShards
from store_actors.serving.partitions import Partitions
from store_actors.serving.reads import Reads
from store_actors.serving.restoring import StoreMemory
from store_actors.spilling.limited_memory import LimitedMemory, memory_use

log = logging.getLogger(__name__)

#: Shards of tasks with several that are worked on at once. Most of the time each waits for the object store.
SHARDS_AT_ONCE = 256
#: Copies that a standby takes at once.
_COPIES_AT_ONCE = 2
#: Seconds for which a thread may keep Python to itself while others wait; Python's default is ten times as long.
_TURN_S = 0.0005


class _LocatedCoordinator:
    """The coordinator for the store actor of one location; see :class:`~store_actors.serving.coordinator_ref.CoordinatorRef`."""

    def __init__(self, client: CoordinatorClient, location: ActorLocation, runtime: Runtime) -> None:
        self._client = client
        self._location = location
        self.grouped = GroupedCommits(client.commit_partitions, runtime.threads.lock, runtime.clock)
        self.commit_all = self.grouped.commit_all
        self.load_plans = client.load_plans
        self.add_snapshot = client.add_snapshot

    def open_instance(
        self,
        provider_id: StateStoreProviderId,
        ids_to_check: Sequence[StateStoreProviderId],
        version: int,
        store_names: Sequence[str],
    ) -> InstancePlans:
        return self._client.open_instance(provider_id, self._location, ids_to_check, version, store_names)

    def reassigned(self, state_name: str, store_ids: Sequence[StateStoreId]) -> set[StateStoreId]:
        partitions = [store_id.partition_id for store_id in store_ids]
        reassigned = self._client.reassigned(state_name, self._location.actor_name, partitions)
        return {store_id for store_id in store_ids if store_id.partition_id in reassigned}


class StoreProcess:
    """Keeps shards in memory on one Ray node.

    Parameters
    ----------
    memory
        Of the process; as much as the state takes by default.
    check_fitness
        Called before any work is taken; raises a StateStoreError if the process must take none.
    """

    def __init__(
        self,
        location: ActorLocation,
        objects: ObjectStore,
        coordinator: CoordinatorClient,
        maintenance: Maintenance,
        runtime: Runtime,
        actors: RayActors,
        memory: StoreMemory | None = None,
        check_fitness: Callable[[], None] = lambda: None,
    ) -> None:
        self._memory = memory or StoreMemory()
        self._check_fitness = check_fitness
        self._coordinator = coordinator
        self._actors = actors
        self._location = location
        self._maintenance = maintenance
        self._clock = runtime.clock
        self._metrics = StoreMetrics()
        located = _LocatedCoordinator(coordinator, location, runtime)
        self._grouped = located.grouped
        self._standbys = Replicator(actors, location.actor_name, self._metrics, runtime.threads.lock())
        self._partitions = Partitions(
            objects, located, self._metrics, runtime, replicate=self._standbys.send, memory=self._memory
        )
        self._shards = OperatorShards(self._partitions)
        self._keyed = KeyedStores(self._partitions)
        self._hot_keys = HotKeyTracker(runtime.threads.lock())
        self._reads = Reads(
            self._partitions.stored,
            self._partitions.cache,
            located,
            runtime,
            self._metrics,
            self._hot_keys,
            self._memory.read_bytes,
        )
        self._appliers = runtime.threads.pool(SHARDS_AT_ONCE, "statefleet-apply")
        self._copying: set[StateStoreId] = set()
        self._copiers = runtime.threads.pool(_COPIES_AT_ONCE, "statefleet-copy")
        #: The runs of continuous queries that have shards here.
        self.runs = EpochRuns(self._partitions, self._lease, self._has, runtime)
        coordinator.report_store_actor(location)
        runtime.threads.start(self._maintain, "statefleet-maintenance")

    def _maintain(self) -> None:
        while True:
            self._clock.sleep(self._maintenance.interval_s)
            try:
                # A coordinator that was started again may not know of incarnations without shards.
                self._coordinator.report_store_actor(self._location, is_new=False)
                self._partitions.maintain(self._maintenance.min_deltas_for_snapshot)
                self._reads.maintain()
                self._report_memory()
            except Exception:  # the thread must outlive any round; failures that are known are counted
                log.exception("a round of maintenance failed; the next one tries again")

    def _report_memory(self) -> None:
        use = memory_use(self._memory)
        if use.memory_limit is not None:
            self._coordinator.report_memory(self._location.instance_id, use)

    @ray.method(concurrency_group="control")
    def ping(self) -> str:
        """Return the id of this incarnation of the actor, at once."""
        return self._location.instance_id

    def location(self) -> ActorLocation:
        """Return this incarnation of the actor."""
        self._check_fitness()
        return self._location

    @ray.method(concurrency_group="control")
    def piggybacked(self, tasks: Sequence[TaskIdentity]) -> list[LeaseGrant | None]:
        """Return the leases that came with the previous commits of some tasks; None for a task without one."""
        return [self._grouped.piggybacked(task) for task in tasks]

    def apply(
        self, requests: Sequence[ApplyRequest], rows: Sequence[ShardInput]
    ) -> list[tuple[pa.Table, CommitEntry] | StateStoreError]:
        """Apply a batch to each of some shards, side by side, since each commit waits for the object store.

        Returns
        -------
        list
            The result of each request, or its error: a request that fails does not keep the others from being committed.
        """
        self._check_fitness()
        if len(requests) == 1:
            return [self._apply(requests[0], rows[0])]
        self._grouped.expect(requests[0].task.state_name, [request.task.partition_id for request in requests])
        waiting = [self._appliers.submit(self._apply, *work) for work in zip(requests, rows, strict=True)]
        return [outcome.result() for outcome in waiting]

    def _apply(self, request: ApplyRequest, rows: ShardInput) -> tuple[pa.Table, CommitEntry] | StateStoreError:
        try:
            emitted, entry = self._shards.apply(request, rows)
        except StateStoreError as error:
            return error
        finally:
            self._grouped.expect_no_more(request.task.state_name, request.task.partition_id)
        if request.node_id not in ("", self._location.node_id):
            self._metrics.bytes_between_nodes += sum(table.nbytes for table in rows.tables) + emitted.nbytes
        keys = [field.name for field in request.schema.input_keys]
        self._hot_keys.written(request.task.state_name, request.task.partition_id, keys, rows.tables)
        return emitted, entry

    # -- continuous queries: see EpochRuns ------------------------------------------------------------------------------

    def _lease(self, tasks: Sequence[TaskIdentity], metadata: StateMetadata) -> Sequence[LeaseGrant]:
        grants = self._coordinator.attach_and_lease_all(tasks, metadata, self._location)
        if any(self._is_former(grant.lease.location) for grant in grants):
            # A coordinator that was started again heard of the process before this one first. Tasks reach this one.
            self._coordinator.report_store_actor(self._location)
            grants = self._coordinator.attach_and_lease_all(tasks, metadata, self._location)
        return grants

    def _is_former(self, location: ActorLocation) -> bool:
        """Return whether a location is of another process that had this one's name."""
        mine = self._location
        return location.actor_name == mine.actor_name and location.instance_id != mine.instance_id

    def _has(self, grant: LeaseGrant) -> bool:
        return grant.lease.location.instance_id == self._location.instance_id

    # -- imports --------------------------------------------------------------------------------------------------------

    def import_rows(self, request: ApplyRequest, pieces: Sequence[Any]) -> CommitEntry:
        """Import rows that are in Ray's object store, a piece at each reference."""
        tables = [self._actors.get(piece) for piece in pieces]
        return self._shards.import_rows(request, pa.concat_tables([request.schema.row_schema().empty_table(), *tables]))

    # -- keyed stores: see KeyedStores, method by method ------------------------------------------------------------

    def open_update(self, request: OpenRequest) -> tuple[str, int]:
        self._check_fitness()
        return self._keyed.open_update(request)

    def open_read(self, request: OpenRequest) -> tuple[str, int]:
        self._check_fitness()
        return self._keyed.open_read(request)

    def session_call(
        self, session_id: str, store_name: str, method: str, args: tuple[Any, ...], writes: Sequence[Write]
    ) -> Any:
        return self._keyed.call(session_id, store_name, method, args, writes)

    def next_batch(self, session_id: str, scan_id: str) -> pa.RecordBatch | None:
        return self._keyed.next_batch(session_id, scan_id)

    def commit_session(self, session_id: str, facts: BatchFacts | int | None, writes: Sequence[Write]) -> int:
        return self._keyed.commit(session_id, facts, writes)

    def seal_session(
        self,
        session_id: str,
        facts: BatchFacts,
        writes: Sequence[Write],
        tell_failed: Callable[[BaseException], object],
    ) -> int:
        return self._keyed.seal(session_id, facts, writes, tell_failed)

    def session_committed(self, session_id: str) -> bool:
        return self._keyed.committed(session_id)

    def end_session(self, session_id: str) -> None:
        self._keyed.end(session_id)

    # -- partitions that come and go ----------------------------------------------------------------------------------

    @ray.method(concurrency_group="transfers")
    def begin_transfer(self, store_id: StateStoreId) -> Transfer | None:
        """Begin to send a partition's rows as they are now; return None if memory does not have it."""
        return self._partitions.transfers.begin(store_id)

    @ray.method(concurrency_group="transfers")
    def next_piece(self, transfer_id: str) -> tuple[int, pa.Table] | None:
        """Return the next rows of a transfer, with the index of their store in it; None after the last."""
        return self._partitions.transfers.next_piece(transfer_id)

    def take_copy(self, store_id: StateStoreId, source: str) -> CopyResult:
        """Copy a partition from the store actor that has it, by name, as the next one to have it; batches go on there.

        Raises
        ------
        ray.exceptions.RayActorError
            The source was lost.
        """
        self._check_fitness()
        started_s = self._clock.elapsed_s()
        handle = self._actors.find(source)
        transfer = None if handle is None else unwrapped(self._actors, handle, handle.begin_transfer.remote(store_id))
        if transfer is None:
            return CopyResult(0, 0, 0)
        version, size = self._partitions.transfers.take(store_id, transfer, self._pieces(handle, transfer))
        self._metrics.bytes_taken_over += size
        return CopyResult(version, size, round(1000 * (self._clock.elapsed_s() - started_s)))

    def replicate(self, commit: ReplicatedCommit) -> bool:
        """Apply a commit of another store actor, as its standby; return False if a copy must be taken first, which is begun."""
        if self._partitions.transfers.replicate(commit):
            return True
        if commit.store_id not in self._copying:
            self._copying.add(commit.store_id)
            self._copiers.submit(self._copy, commit.store_id, commit.source)
        return False

    def _copy(self, store_id: StateStoreId, source: str) -> None:
        try:
            self.take_copy(store_id, source)
        except Exception:  # of any kind: the next commit begins a new copy
            path = store_id.path()
            log.exception(
                "a standby has no copy of %s yet; it tries again with the next commit", path, extra=about(store_id)
            )
        finally:
            self._copying.discard(store_id)

    def _pieces(self, handle: Any, transfer: Transfer) -> Iterator[tuple[int, pa.Table]]:
        """Yield the rows of a transfer; the next piece is on its way while one is used."""
        waiting = handle.next_piece.remote(transfer.transfer_id)
        while (piece := unwrapped(self._actors, handle, waiting)) is not None:
            waiting = handle.next_piece.remote(transfer.transfer_id)
            yield piece

    # -- reads beside the batches: see Reads, method by method --------------------------------------------------------

    @ray.method(concurrency_group="reading")
    def find_rows(self, query: KeyQuery) -> KeyResults:
        """Find keys in some stores; a store that fails does not keep the others from being read."""
        return self._reads.find_all(query)

    @ray.method(concurrency_group="reading")
    def find_few(self, query: bytes) -> bytes:
        """Find a few keys, as :meth:`find_rows`; query and result are bytes, which Ray passes on unchanged."""
        return self._reads.answer(query)

    @ray.method(concurrency_group="reading")
    def hottest_keys(self, state_name: str, partition_id: int, most: int) -> HottestKeys:
        """Return the keys of a partition that batches and queries meet most often."""
        return self._hot_keys.hottest(state_name, partition_id, most)

    @ray.method(concurrency_group="reading")
    def scan_rows(self, request: ReadRequest, limit: int | None) -> tuple[str, pa.Table | None] | None:
        """Begin a scan; return its id and its first rows, or None as :meth:`Reads.scan`."""
        scan_id = self._reads.scan(request, limit)
        return None if scan_id is None else (scan_id, self._next_rows(scan_id))

    @ray.method(concurrency_group="reading")
    def next_rows(self, scan_id: str) -> pa.Table | StateStoreError | None:
        """Return the next rows of a scan; None after the last.

        An error is returned, not raised: a reader that stops early never reads the answer that is still on its way.
        """
        try:
            return self._next_rows(scan_id)
        except StateStoreError as error:
            return error

    def _next_rows(self, scan_id: str) -> pa.Table | None:
        rows = self._reads.next_rows(scan_id)
        self._metrics.bytes_scanned += 0 if rows is None else rows.nbytes
        return rows

    @ray.method(concurrency_group="control")
    def keep_scans(self, scan_ids: Sequence[str]) -> None:
        """Keep scans open whose reader is slow but alive."""
        self._reads.keep_scans(scan_ids)

    @ray.method(concurrency_group="reading")
    def end_scan(self, scan_id: str) -> None:
        self._reads.end_scan(scan_id)

    @ray.method(concurrency_group="reading")
    def describe_store(self, request: ReadRequest) -> StateSchema | None:
        return self._reads.describe(request)

    def unload(self, store_id: StateStoreId) -> bool:
        """Unload a partition, as :meth:`PartitionCache.unload <store_actors.serving.restoring.PartitionCache.unload>`."""
        return self._partitions.cache.unload(store_id)

    def metrics(self) -> dict[str, Any]:
        """Return the counters since the process started, and the shards in memory."""
        loaded = [
            {"path": store_id.path(), "version": version, "rows": rows}
            for store_id, version, rows in self._shards.loaded()
        ]
        return {**asdict(self._metrics), **asdict(memory_use(self._memory)), "loaded": loaded}

    def _samples(self) -> Iterator[Sample]:
        shards = self._partitions.cache.count()
        return store_samples(self._metrics, memory_use(self._memory), shards, self._standbys.behind())


class StoreActor(StoreProcess):
    """The store actor as Ray makes it, again after each death; :mod:`store_actors.actor.deploy` has the options and their reasons."""

    def __init__(
        self,
        actor_name: str,
        uri: str,
        storage_options: StorageOptions,
        maintenance: Maintenance,
        memory: MemoryOptions,
    ) -> None:
        freeze_imports()
        # Threads that take pieces of rows give up their turn many times in each, and would wait for the others' whole turns.
        sys.setswitchinterval(_TURN_S)
        log_to_stderr(uri, "store_actor")
        runtime = Runtime()
        location = ActorLocation(
            actor_name=actor_name,
            instance_id=runtime.new_id(),
            node_id=ray.get_runtime_context().get_node_id(),
            # Machines of one image all have one name; the address tells them apart.
            host=ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            pid=os.getpid(),
        )
        coordinator = CoordinatorClient.connect(uri, storage_options, maintenance)
        storage_stats = StorageStats()
        self._store = open_store_in_actor(
            uri, storage_options, coordinator.forwarded_credentials, storage_stats, runtime.clock
        )
        self._unfit: MemoryLimitError | None = None
        try:
            of_process = _memory_of(memory)
        except MemoryLimitError as error:
            # Ray would wrap an error that is raised here; the first call that does work raises it instead.
            self._unfit, of_process = error, StoreMemory()
        self._proof = StorageProof(self._store, coordinator.look_into, location, runtime.threads.lock())
        super().__init__(
            location, self._store, coordinator, maintenance, runtime, RayActors(), of_process, self._check_process
        )
        self._storage_stats = storage_stats
        self._export = MetricExport(uri)
        runtime.threads.start(self._export_metrics, "statefleet-metrics")
        address = address_of(sockets_of(session_folder(), uri), location.host, store_actor_number(actor_name))
        actors = LocalActors(actor_name, self, local_calls(runtime.threads))
        client = FleetClient(coordinator, actors, runtime.clock, partial(actors.find, actor_name))
        serve = partial(emitted_rows, client.calls, is_limited=memory.limit is not None)
        functions = FunctionRuns(runtime.threads)
        make_calls = partial(WorkerCalls, client, self._lease, self._has)
        epochs = EpochServer(
            self.runs, functions, self._metrics, runtime, self._check_process, make_calls, Beats(runtime)
        )
        hand_over_server(address, serve, epochs.serve, runtime)
        serve_remote = partial(serve_remote_task, serve_task=serve, serve_epochs=epochs.serve, runtime=runtime)
        self._direct = _direct_answers(self._reads.answer, serve_remote, runtime)
        fields = {"actor": actor_name, "node": location.node_id}
        log.info("store actor of %s started on %s", uri, location.host, extra=fields)

    def _export_metrics(self) -> None:
        while True:
            try:
                self._export.send([*self._samples(), *self._storage_stats.samples("store_actor")])
            except Exception:  # batches do without
                log.exception("metrics could not be exported; it is tried again")
            self._clock.sleep(EXPORT_INTERVAL_S)

    def _check_process(self) -> None:
        if self._unfit is not None:
            raise self._unfit
        self._proof.check()

    @ray.method(concurrency_group="control")
    def direct_address(self) -> DirectAddress | None:
        """Return the address at which :meth:`find_few` is answered without Ray; None if only calls of Ray are answered."""
        return None if self._direct is None else self._direct.address

    @ray.method(concurrency_group="control")
    def forwarded_credentials(self) -> Secrets | None:
        """Return the object store's credentials; None if none were forwarded to this process."""
        return self._store.secrets if isinstance(self._store, ForwardedCredentialsStore) else None

    @ray.method(concurrency_group="control")
    def use_credentials(self, secrets: Secrets) -> None:
        """Use other credentials from now on; see ``CoordinatorActor.use_credentials``."""
        if isinstance(self._store, ForwardedCredentialsStore):
            self._store.use_credentials(secrets)


def _direct_answers(
    answer: Callable[[bytes], bytes], serve_task: Callable[[DirectMessages], None], runtime: Runtime
) -> DirectServer | None:
    # A cluster with TLS sends nothing in the clear, and direct connections are not encrypted.
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return None
    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    try:
        return DirectServer(host, secrets.token_bytes(32), answer, serve_task, runtime)
    except OSError:
        log.exception(
            "look-ups are answered by calls of Ray only, and continuous queries run on one node: nothing can be listened to on %s",
            host,
        )
        return None


def _memory_of(options: MemoryOptions) -> StoreMemory:
    """Return the process's memory. By default, spilled state goes into Ray's folder of this node's session."""
    if options.limit is None:
        return StoreMemory()
    folder = options.spill_dir or os.path.join(session_folder(), "statefleet-spill")
    return LimitedMemory(options.limit, folder)

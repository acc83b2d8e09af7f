"""What the coordinator answers: an asynchronous shell around the ledgers, one for each state of the fleet. No Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from coordinator.ledger.batch_stats import BatchResult
from coordinator.ledger.branches import Branch
from coordinator.ledger.checkpoints import PART_RECORDS
from coordinator.ledger.fleet_view import KnownFleet
from coordinator.ledger.read_views import ReadView, ViewId, WantedView
from coordinator.ledger.records import Record
from coordinator.ledger.rescaling import BatchShards, RescalePlan, decide_rescale_request, first_layout
from coordinator.ledger.state_ledger import AcceptedCommits, LeaseGrant, StateLedger
from coordinator.ledger.unloading import EndedQueries
from coordinator.ledger.version_stats import VersionStats
from coordinator.log.cleaner import Cleaner
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.log.manifest_log import CHECKPOINT_INTERVAL
from coordinator.log.open_states import OpenStates
from coordinator.model.commits import CommitEntry, PartitionCommit, SnapshotEntry
from coordinator.model.copy_result import CopyResult
from coordinator.model.errors import InvalidRequestError, StateStoreError
from coordinator.model.identities import ActorLocation, StateStoreProviderId, TaskIdentity
from coordinator.model.leases import ShardLocation
from coordinator.model.load_plans import InstancePlans, LoadPlans
from coordinator.model.maintenance import Maintenance
from coordinator.model.memory_options import MemoryUse
from coordinator.model.metric_table import Sample
from coordinator.model.state_metadata import StateMetadata
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.placement.move_planner import PlacementExplanation, PlannedMove
from coordinator.placement.policy import ActorSlot
from coordinator.runtime.runtime import Runtime, now_ms
from coordinator.service.active_instances import ActiveInstances
from coordinator.service.branching import Branching
from coordinator.service.drained_nodes import DrainedNodes
from coordinator.service.dropping import DroppedState, Dropping
from coordinator.service.leasing import Leasing
from coordinator.service.placement_service import Placement, PlacementService
from coordinator.service.state_metrics import StateMetrics
from coordinator.service.versions import Versions
from coordinator.storage.counted import StorageStats
from coordinator.storage.probe import ProbeResult, look_into, probe, remove_left_over
from coordinator.storage.protocol import ObjectStore
from coordinator.telemetry.drivers import DriverReport
from coordinator.telemetry.status import fleet_status, query_details, query_status

__all__ = ["Coordinator"]

log = logging.getLogger(__name__)

#: Requests to the object store that are on their way at once, of all states.
_REQUESTS = 64


def _task_of(ledger: StateLedger, entry: CommitEntry) -> TaskIdentity:
    """The task that made a commit."""
    return TaskIdentity(
        ledger.state_name,
        ledger.query_id,
        entry.run_id,
        entry.version - 1,
        entry.partition_id,
        0,
        entry.executor,
        is_import=entry.is_import,
    )


class Coordinator:
    """Who holds what, and what counts.

    - Deployed by :mod:`coordinator.service.deploy` as a named, detached actor that restarts by itself.
    - Its memory is a cache: ledgers are loaded from the manifest logs when first asked for, so a restarted coordinator
      answers as the former one did.
    - Every method may be called again after a lost answer.
    - :class:`coordinator.service.client.CoordinatorClient` has a method for each that others call.

    Parameters
    ----------
    uri, store
        The fleet, and its object store.
    node_id
        Ray node that it runs on.
    checkpoint_interval
        Of the manifest logs, in appends.
    part_records
        Of their checkpoints (:mod:`coordinator.ledger.checkpoints`).
    figures
        Where requests to `store` are counted, if they are.
    """

    def __init__(
        self,
        uri: str,
        store: ObjectStore,
        maintenance: Maintenance,
        node_id: str,
        *,
        runtime: Runtime | None = None,
        checkpoint_interval: int = CHECKPOINT_INTERVAL,
        part_records: int = PART_RECORDS,
        figures: StorageStats | None = None,
    ) -> None:
        self._uri = uri
        self._store = store
        runtime = runtime or Runtime()
        self._clock = runtime.clock
        self._writer_id = runtime.new_id()
        self._started_at_ms = now_ms(self._clock)
        self._node_id = node_id
        self._states = OpenStates(
            store,
            self._writer_id,
            runtime,
            checkpoint_interval=checkpoint_interval,
            part_records=part_records,
            max_age_s=maintenance.grace_s / 2,
        )
        self._lives = ActorRegistry()
        self._instances = ActiveInstances(self._lives, self._writer_of)
        self._fleet = KnownFleet(self._lives, self._states.ledgers)
        drained = DrainedNodes(store)
        self._placements = PlacementService(self._fleet, self._writer_of, drained, self._partitions)
        self._leasing = Leasing(self._fleet, self._placements.planner, self._writer_of)
        self._maintenance = maintenance
        self._cleaner = Cleaner(self._store, maintenance, self._clock, self._writer_of, self._states.notice_deleted)
        self._versions = Versions(self._states, self._writer_of, Branching(self._writer_of, self._clock))
        self._dropping = Dropping(self._store, self._states, self._is_active)
        self._rounds: asyncio.Task[None] | None = None
        # The loop's own has a few threads more than this node has cores, for which requests of many states would wait.
        self._requests: Any = runtime.threads.pool(_REQUESTS, "statefleet-requests")
        self._observing = StateMetrics(self._clock, self._lives, self._placements.planner, figures or StorageStats())
        self._ended_queries = EndedQueries(self._clock, maintenance.unload_after_s, self._is_running)

    async def open(self) -> None:
        """Prove that the store works; raises StorageUnavailableError if it doesn't."""
        await asyncio.to_thread(probe, self._store)
        await asyncio.to_thread(remove_left_over, self._store, self._maintenance.grace_s)
        await self._placements.open()

    async def _writer_of(self, state_name: str) -> LedgerWriter:
        if self._rounds is None:
            self._begin()
        return await self._states.writer(state_name)

    def _begin(self) -> None:
        """Start what goes on beside the answers: once there is a loop."""
        self._rounds = asyncio.create_task(self._maintain())
        asyncio.get_running_loop().set_default_executor(self._requests)

    # -- states and leases ----------------------------------------------------------------------------------------

    async def describe_state(self, state_name: str) -> StateMetadata | None:
        """What is fixed about a state, with its newest schema; None if there is no such state."""
        writer = await self._writer_of(state_name)
        created = writer.metadata
        return None if created is None else await writer.read(lambda ledger: ledger.described(created))

    async def check_state(self, metadata: StateMetadata) -> None:
        """See :meth:`Leasing.check`."""
        await self._states.notice_deleted(metadata.state_name)
        await self._leasing.check(metadata, self._instances.has)

    async def check_start(self, state_name: str, query_id: str, output_mode: str | None) -> None:
        """See :meth:`Leasing.check_start`."""
        await self._leasing.check_start(state_name, query_id, output_mode, self._instances.has)

    async def attach_and_lease(self, task: TaskIdentity, metadata: StateMetadata, local: ActorLocation) -> LeaseGrant:
        """The store actor that may commit the task's shard, and the version its batch reads."""
        asked_ms = now_ms(self._clock)
        try:
            grant, is_new, former = await self._leasing.lease(task, metadata, self._lives.newest(local))
        except StateStoreError as error:
            self._observing.refused(task.state_name, task.partition_id, error)
            raise
        self._ended_queries.used(task.state_name)
        if is_new:
            # Of a driver that was killed, nobody says that its run has ended.
            self._instances.registry.forget_previous_runs(grant.lease.store_id.checkpoint_root_location, task.run_id)
        self._observing.leased(task.state_name, task.batch_id + 1, task.partition_id, asked_ms, is_new=is_new)
        self._observing.moved(grant.lease, former, grant.base_version)
        return grant

    async def attach_and_lease_all(
        self, tasks: Sequence[TaskIdentity], metadata: StateMetadata, local: ActorLocation
    ) -> list[LeaseGrant]:
        """:meth:`attach_and_lease` for tasks of one batch; what one is refused with, all are."""
        return await asyncio.gather(*(self.attach_and_lease(task, metadata, local) for task in tasks))

    async def commit_partitions(
        self, state_name: str, commits: Sequence[PartitionCommit]
    ) -> list[AcceptedCommits | StateStoreError]:
        """Count commits of some partitions durably, each with all its stores or not at all.

        Returns
        -------
        list
            What became of each: one that is refused does not keep the others from being counted.
        """
        writer = await self._writer_of(state_name)
        outcomes = await asyncio.gather(
            *(self._commit(state_name, writer, one) for one in commits), return_exceptions=True
        )
        told: list[AcceptedCommits | StateStoreError] = []
        for commit, outcome in zip(commits, outcomes, strict=True):
            if isinstance(outcome, StateStoreError):
                self._observing.refused(state_name, commit.entries[0].partition_id, outcome)
            elif not isinstance(outcome, AcceptedCommits):
                raise outcome
            told.append(outcome)
        return told

    async def _commit(self, state_name: str, writer: LedgerWriter, commit: PartitionCommit) -> AcceptedCommits:
        created = writer.metadata

        def decide(ledger: StateLedger) -> tuple[list[Record], tuple[AcceptedCommits, bool]]:
            records, counted = ledger.decide_commits(commit.entries)
            if not records:
                return [], (AcceptedCommits(counted), False)
            if created is None:
                return records, (AcceptedCommits(counted), True)
            entry, first = commit.entries[0], first_layout(created)
            layout = ledger.layouts.in_force(first, entry.run_id, entry.version - 1)
            ledger.check_whole(_task_of(ledger, entry), layout)
            return records, (AcceptedCommits(counted, self._leasing.next_lease(ledger, created, commit.entries)), True)

        counted, is_new = await writer.decide(decide, is_batched=True)
        self._ended_queries.used(state_name)
        self._observing.committed(state_name, commit.entries, is_new=is_new)
        if commit.is_piggybacked:
            self._leasing.count_piggybacked(state_name, commit.entries[0].partition_id)
        return counted

    async def begin_batch(self, task: TaskIdentity, planned: int, asked: int | None) -> BatchShards:
        """See :meth:`Leasing.begin_batch`."""
        return await self._leasing.begin_batch(task, planned, asked)

    async def batch_result(self, task: TaskIdentity, shards: BatchShards) -> tuple[BatchResult, Placement, BatchShards]:
        """What a batch of a run did to a state, which of its shards have not counted it, where its next tasks should run, and on how
        many shards.

        Parameters
        ----------
        task
            Any of the batch's.
        shards
            Those of the batch.
        """
        ended = await self._leasing.end_batch(task, shards, self._placements)
        ledger = (await self._writer_of(task.state_name)).ledger
        if not ended[0].missing and ledger is not None:
            self._observing.ended(ledger, task.batch_id + 1, shards)
        return ended

    async def rescale(self, state_name: str, num_shards: int, dry_run: bool) -> RescalePlan:
        """Have the run of a state's query that goes on rescaled with one of its next batches, or only say what that would do.

        Raises
        ------
        InvalidRequestError
            There is no such state, it cannot be rescaled, no run goes on, or the number is none.
        """
        writer = await self._writer_of(state_name)
        created = writer.metadata
        if created is None:
            raise InvalidRequestError(
                "there is no such state; nothing was changed; see `statefleet status`", state=state_name
            )

        def decide(ledger: StateLedger) -> tuple[list[Record], RescalePlan]:
            return decide_rescale_request(
                ledger, created, num_shards, is_active=self._is_active(ledger), dry_run=dry_run
            )

        return await writer.decide(decide)

    async def branch(self, state_name: str, name: str, version: int | None) -> Branch:
        """See :meth:`Versions.branch`."""
        return await self._versions.branch(state_name, name, version)

    async def drop(self, state_name: str, dry_run: bool, is_over: bool) -> DroppedState:
        """End a state: its name, memory and files are free; or only say what would go. May be called again after it was cut off.

        Parameters
        ----------
        is_over
            Whether the caller knows that its query does not run any more; a run that does is refused from then on.

        Raises
        ------
        InvalidRequestError
            There is no such state, it has branches, or its query runs.
        """
        if self._rounds is None:
            self._begin()
        await self._versions.load_all_states()
        return await self._dropping.drop(state_name, dry_run=dry_run, is_over=is_over)

    # -- places ---------------------------------------------------------------------------------------------------

    async def place_shards(
        self,
        state_name: str,
        query_id: str,
        shards: BatchShards,
        slots: Sequence[ActorSlot],
        standbys: int = 0,
        policy: str | bytes = "balance",
    ) -> Placement:
        """Place a state's shards on nodes that have executors, before the first task of a run and whenever these nodes change.

        Parameters
        ----------
        slots
            Store actors of these nodes.
        standbys
            How many store actors on other nodes are sent the commits of each shard.
        policy
            Name of a policy, or a pickled one (:func:`~coordinator.placement.policies.policy_of`).

        Raises
        ------
        InvalidRequestError
            The policy failed.
        """
        return await self._placements.place(state_name, query_id, shards, slots, standbys, policy)

    async def explain_placement(self, state_name: str, shard: int) -> PlacementExplanation:
        """Why a shard is where it is: its newest moves, and where its tasks ran."""
        return await self._placements.explain(state_name, shard)

    async def plan_move(self, state_name: str, shard: int, node_id: str) -> tuple[PlannedMove, ...]:
        """See :meth:`PlacementService.move`."""
        return await self._placements.move(state_name, shard, node_id)

    async def plan_rebalance(self, state_names: Sequence[str]) -> tuple[PlannedMove, ...]:
        """See :meth:`PlacementService.rebalance`."""
        return await self._placements.rebalance(await self._sizes(state_names))

    async def drain(self, node_id: str, dry_run: bool) -> tuple[PlannedMove, ...]:
        """See :meth:`PlacementService.drain`; of all states that are open."""
        names = [name for name, _ in self._states.writers()]
        return await self._placements.drain(await self._sizes(names), node_id, dry_run=dry_run)

    async def undrain(self, node_id: str) -> None:
        """See :meth:`PlacementService.undrain`."""
        await self._placements.undrain(node_id)

    async def _sizes(self, state_names: Sequence[str]) -> list[tuple[str, range]]:
        """Those of some states that exist, each with the partitions of its shards."""
        existing = [name for name in state_names if (await self._writer_of(name)).metadata is not None]
        return [(name, await self._partitions(name)) for name in existing]

    async def _partitions(self, state_name: str) -> range:
        """Partitions of a state's shards, in their order; of one that does not exist none."""
        writer = await self._writer_of(state_name)
        created = writer.metadata
        if created is None:
            return range(0)
        first = first_layout(created)
        return await writer.read(lambda ledger: ledger.layouts.newest(first).partitions)

    async def move_prepared(self, move: PlannedMove, preparation: CopyResult | None) -> bool:
        """The taker of a shard has a copy: it has the shard from the end of the batch at hand on.

        Returns
        -------
        bool
            False if the giver does not have the shard any more, or the taker is lost: nothing is moved.
        """
        return await self._placements.copy_finished(move, preparation)

    async def move_failed(self, move: PlannedMove, error: str) -> None:
        """See :meth:`PlacementService.failed`."""
        await self._placements.failed(move, error)
        self._observing.move_failed(move.state_name)

    # -- versions -------------------------------------------------------------------------------------------------

    async def load_plans(
        self, state_name: str, partition_id: int, version: int, store_names: Sequence[str]
    ) -> LoadPlans:
        """How to load a version of some of a partition's stores; the files are left alone for the grace period."""
        writer = await self._writer_of(state_name)
        # Through the queue: an answer must not show commits whose records are still on their way.
        loading = await writer.read(lambda ledger: ledger.load_plans(partition_id, version, store_names))
        self._cleaner.pin(loading)
        return loading

    async def locate(self, state_name: str, shard: int, version: int | None = None) -> ShardLocation:
        """See :meth:`Versions.locate`."""
        return await self._versions.locate(state_name, shard, version)

    async def batch_finished(self, state_names: Sequence[str], run_id: str, batch_id: int, within_s: float) -> None:
        """See :meth:`Versions.batch_finished`."""
        await self._versions.batch_finished(state_names, run_id, batch_id, within_s)

    async def read_view(self, state_name: str, asked: WantedView, known: ViewId | None) -> ReadView | None:
        """See :meth:`Versions.read_view`."""
        return await self._versions.read_view(state_name, asked, known)

    async def list_versions(self, state_name: str, count: int, is_committed: bool = False) -> tuple[VersionStats, ...]:
        """See :meth:`Versions.list_newest`."""
        return await self._versions.list_newest(state_name, count, is_committed)

    async def elsewhere(self, state_name: str, actor_name: str, partition_ids: Sequence[int]) -> list[int]:
        """Those of some partitions that no store actor of this name should have in memory.

        They are leased to another one, are shards no more, or their query ended a while ago. It is one look at the log, however many.
        """
        writer = await self._writer_of(state_name)
        if writer.metadata is None:
            return list(partition_ids)

        def look(ledger: StateLedger) -> list[int]:
            if self._ended_queries.is_due(ledger):
                return list(partition_ids)
            holders = {partition: ledger.holder(partition) for partition in partition_ids}
            # By name: a shard that a previous incarnation was given belongs to this one.
            reassigned = {
                partition
                for partition, holder in holders.items()
                if holder is not None and holder.actor_name != actor_name
            }
            # Shards of a previous layout are needed by no store actor once all shards made of them have a version of their own.
            return [
                partition for partition in partition_ids if partition in reassigned or ledger.is_taken_over(partition)
            ]

        return await writer.read(look)

    # -- maintenance ----------------------------------------------------------------------------------------------

    async def add_snapshot(self, state_name: str, snapshot: SnapshotEntry) -> bool:
        """Count a snapshot; False if its version was superseded meanwhile, or a newer one is there."""

        def decide(ledger: StateLedger) -> tuple[list[Record], tuple[bool, bool]]:
            records, counted = ledger.decide_snapshot(snapshot)
            return records, (counted, bool(records))

        # Where nothing is left of the state, nothing is written for it.
        await self._states.notice_deleted(state_name)
        counted, is_new = await (await self._writer_of(state_name)).decide(decide)
        self._observing.count(state_name, "snapshots", int(is_new))
        return counted

    async def _maintain(self) -> None:
        """Truncate and clean every state, again and again. A failure of one round is told and the next one tries again."""
        while True:
            await asyncio.sleep(self._maintenance.interval_s)
            for state_name, writer in self._states.writers():
                try:
                    await self._states.notice_deleted(state_name)
                    if state_name not in dict(self._states.writers()):
                        continue
                    self._deleted(state_name, [one.size for one in await self._cleaner.round(writer, state_name)])
                    await self._dropping.finish(state_name, writer)
                    self._rest(state_name, writer)
                except Exception:  # whatever it is, the other states and the next round have their turn
                    self._observing.count(state_name, "cleaning_failures")
                    log.exception(
                        "maintenance of a state failed; it is tried again at the next round: %s",
                        state_name,
                        extra={"state": state_name},
                    )

    def _rest(self, state_name: str, writer: LedgerWriter) -> None:
        """Let go of the ledger of a state whose query ended long ago, or that is none, once there is nothing more to clean."""
        ledger, created = writer.ledger, writer.metadata
        if ledger is None or writer.left_over is not None or not self._cleaner.is_at_rest(state_name):
            return
        if created is not None and not self._ended_queries.is_due(ledger):
            return
        shown, stamp = None, self._stamp(state_name, writer, active=False)
        if created is not None:
            record = self._observing.record(state_name)
            shown = query_details(ledger, created, self._placements.planner, record, active=False)
        if self._states.rest(state_name, shown, stamp):
            self._observing.forget(state_name)
            self._placements.planner.forget(state_name)
            self._instances.registry.deactivate_instances(ledger.run_id)

    def _deleted(self, state_name: str, sizes: Sequence[int]) -> None:
        self._observing.count(state_name, "deleted_files", len(sizes))
        self._observing.count(state_name, "deleted_bytes", sum(sizes))

    async def clean(self, state_name: str, dry_run: bool) -> dict[str, Any]:
        """Let go of versions that need not be retained, and delete the files that nothing needs, or only say what would go.

        Nothing is deleted before the coordinator has been there for the grace period.

        Returns
        -------
        dict
            ``floors`` (partition, store and oldest retained version, where that moves) and ``files`` (path, bytes and age in seconds).
        """
        found = await self._cleaner.clean(await self._writer_of(state_name), state_name, dry_run=dry_run)
        if not dry_run:
            self._deleted(state_name, [one["bytes"] for one in found["files"]])
        return found

    async def look_into(self, folder: str) -> ProbeResult:
        """Read what a store actor wrote in a folder, and answer there: see :func:`coordinator.storage.probe.prove_shared`."""
        place = f"pid {os.getpid()} on {socket.gethostname()}, node {self._node_id}"
        return await asyncio.to_thread(look_into, self._store, folder, place)

    # -- store actors ---------------------------------------------------------------------------------------------

    async def report_store_actor(self, location: ActorLocation, is_new: bool = True) -> None:
        """A store actor has started: a former life of the same name is over; or, if it is not new, goes on, for a coordinator that does
        not know of it.
        """
        if is_new:
            self._lives.started(location)
        else:
            self._lives.newest(location)

    async def report_memory(self, instance_id: str, use: MemoryUse) -> None:
        """A life of a store actor with a memory limit tells what it takes."""
        self._lives.memory_reported(instance_id, use)

    async def report_driver(self, report: DriverReport) -> None:
        """A driver reports its executors, and what its long batches wait for."""
        self._observing.reported(report)

    async def report_store_actor_lost(self, instance_id: str) -> None:
        """A store actor died under a call; its shards go elsewhere at their next lease."""
        if self._lives.lost(instance_id):
            log.warning("a store actor was lost under a call; its shards go elsewhere: life %s", instance_id)

    # -- Spark's StateStoreCoordinator ----------------------------------------------------------------------------

    async def report_active_instance(
        self,
        provider_id: StateStoreProviderId,
        location: ActorLocation,
        ids_to_check: Sequence[StateStoreProviderId] = (),
    ) -> list[StateStoreProviderId]:
        """See :meth:`ActiveInstances.report`."""
        return await self._instances.report(provider_id, location, ids_to_check)

    async def open_instance(
        self,
        provider_id: StateStoreProviderId,
        location: ActorLocation,
        ids_to_check: Sequence[StateStoreProviderId],
        version: int,
        store_names: Sequence[str],
    ) -> InstancePlans:
        """:meth:`report_active_instance` and :meth:`load_plans` in one: what a store asks before it opens a partition at a version."""
        store_id = provider_id.store_id
        loading = await self.load_plans(store_id.state_name, store_id.partition_id, version, store_names)
        return InstancePlans(tuple(await self.report_active_instance(provider_id, location, ids_to_check)), loading)

    async def verify_if_instance_active(self, provider_id: StateStoreProviderId, location: ActorLocation) -> bool:
        """See :meth:`InstanceRegistry.verify_if_instance_active`."""
        return self._instances.registry.verify_if_instance_active(provider_id, location)

    async def get_location(self, provider_id: StateStoreProviderId) -> ActorLocation | None:
        """See :meth:`InstanceRegistry.get_location`."""
        return self._instances.registry.get_location(provider_id)

    async def deactivate_instances(self, run_id: str) -> int:
        """See :meth:`InstanceRegistry.deactivate_instances`; called when a query stops."""
        return self._instances.end(run_id)

    # -- showing --------------------------------------------------------------------------------------------------

    async def load_all_states(self) -> list[str]:
        """See :meth:`Versions.load_all_states`."""
        return await self._versions.load_all_states()

    async def status(self) -> dict[str, Any]:
        """Store actors, queries and shards as JSON data."""
        states = self._states.described()
        queries = [
            {
                **query_status(ledger, metadata, self._placements.planner, active=self._is_active(ledger)),
                "slow_batches": [asdict(batch) for batch in self._observing.record(metadata.state_name).slow_batches],
                "running_batch": self._running(ledger, metadata),
            }
            for ledger, metadata in states
        ]
        queries += [{**state.details(), "running_batch": None} for state in self._states.resting().values()]
        queries.sort(key=lambda query: str(query["name"]))
        told = fleet_status(self._uri, self._described(), self._lives, queries)
        unreadable = [{"name": name, "error": error} for name, error in self._states.unreadable().items()]
        return {**told, "executors": self._observing.executors(), "unreadable": unreadable}

    def _running(self, ledger: StateLedger, metadata: StateMetadata) -> dict[str, Any] | None:
        """A state's batch that has been running for some seconds, as JSON data."""
        running = self._observing.running(ledger, metadata) if self._is_active(ledger) else None
        return None if running is None else asdict(running)

    def _described(self) -> dict[str, Any]:
        return {"node_id": self._node_id, "pid": os.getpid(), "started_at_ms": self._started_at_ms}

    def _is_active(self, ledger: StateLedger) -> bool:
        """Whether nobody has said that the newest run of a state's query is over."""
        return bool(ledger.run_id) and ledger.run_id not in self._instances.ended_runs

    def _is_running(self, ledger: StateLedger) -> bool:
        """Whether a state's query goes on, and its driver says so."""
        return self._is_active(ledger) and self._observing.is_running(ledger.run_id)

    async def watch(self, known: Mapping[str, str]) -> dict[str, Any]:
        """:meth:`status` for somebody who looks again and again: with details, and of what changed only.

        Parameters
        ----------
        known
            ``stamps`` of the last answer.

        Returns
        -------
        dict
            ``queries`` are those whose stamp is another one now; ``stamps`` has one of each state; ``took_ms`` is how long nobody else
            was answered meanwhile. ``executors`` are those of all drivers, and ``running`` are the batches that take long, by state.
        """
        stamps: dict[str, str] = {}
        queries: list[dict[str, Any]] = []
        took_s = 0.0
        for name, writer in self._states.writers():
            began_s = self._clock.elapsed_s()
            found = self._details(name, writer, known, stamps)
            took_s += self._clock.elapsed_s() - began_s
            if found is not None:
                queries.append(found)
                # Tasks have their turn between one query and the next.
                await asyncio.sleep(0)
        for name, state in self._states.resting().items():
            stamps[name] = state.stamp
            if known.get(name) != state.stamp:
                queries.append(state.details())
        told = fleet_status(self._uri, self._described(), self._lives, queries)
        drained = sorted(self._placements.planner.drained)
        return {
            **told,
            "executors": self._observing.executors(),
            "running": self._all_running(),
            "stamps": stamps,
            "drained": drained,
            "took_ms": int(1000 * took_s),
        }

    def _all_running(self) -> dict[str, dict[str, Any]]:
        """By state, the batches that have been running for some seconds."""
        running = {
            metadata.state_name: self._running(ledger, metadata) for ledger, metadata in self._states.described()
        }
        return {name: batch for name, batch in running.items() if batch is not None}

    def _details(
        self, name: str, writer: LedgerWriter, known: Mapping[str, str], stamps: dict[str, str]
    ) -> dict[str, Any] | None:
        """A query's details if its stamp, which is entered, is not the one that is known."""
        ledger, created, record = writer.ledger, writer.metadata, self._observing.record(name)
        if ledger is None or created is None:
            if created is not None and name in known:
                stamps[name] = known[name]  # it is being read anew
            return None
        active = self._is_active(ledger)
        stamps[name] = self._stamp(name, writer, active=active)
        if known.get(name) == stamps[name]:
            return None
        return query_details(ledger, created, self._placements.planner, record, active=active)

    def _stamp(self, name: str, writer: LedgerWriter, *, active: bool) -> str:
        """Another one once something happened to a state."""
        opening, record = self._states.openings[name], self._observing.record(name)
        return f"{self._writer_id}-{opening}-{writer.changes}-{record.changes}-{active}"

    async def samples(self) -> list[Sample]:
        """See :meth:`StateMetrics.samples`; of the states that are open."""
        states = []
        for name, writer in self._states.writers():
            ledger, created = writer.ledger, writer.metadata
            if ledger is not None and created is not None:
                active = self._is_active(ledger)
                states.append((self._stamp(name, writer, active=active), ledger, created, active))
        return await self._observing.samples(states)

    async def ping(self) -> str:
        """Writer id of this life of the coordinator."""
        return self._writer_id

"""The coordinator: an asynchronous shell around the ledgers, one for each state of the fleet. No Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from coordinator.ledger.batch_stats import BatchResult
from coordinator.ledger.checkpoints import PART_RECORDS
from coordinator.ledger.records import Record
from coordinator.ledger.rescaling import RescalePlan, decide_rescale_request
from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.ledger.state_ledger import AcceptedCommits, LeaseGrant, StateLedger
from coordinator.log.cleaner import Cleaner
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.log.manifest_log import CHECKPOINT_INTERVAL
from coordinator.log.open_states import OpenStates
from coordinator.model.commits import PartitionCommit, SnapshotEntry
from coordinator.model.errors import InvalidRequestError, StateStoreError
from coordinator.model.identities import ActorLocation, StateStoreProviderId, TaskIdentity
from coordinator.model.load_plans import InstancePlans, LoadPlans
from coordinator.model.maintenance import Maintenance
from coordinator.model.memory_options import MemoryUse
from coordinator.model.state_metadata import StateMetadata
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.placement.lease_plans import PlannedMove
from coordinator.runtime.runtime import Runtime, now_ms
from coordinator.service.active_instances import ActiveInstances
from coordinator.service.dropping import DroppedState, Dropping
from coordinator.service.leasing import Leasing
from coordinator.service.maintenance_rounds import MaintenanceRounds
from coordinator.service.overview import Overview
from coordinator.service.placement_service import KnownFleet, Placement, PlacementService
from coordinator.service.state_metrics import StateMetrics
from coordinator.service.versions import Branching, Versions
from coordinator.storage.actor_store import StorageStats
from coordinator.storage.probe import ProbeResult, look_into, probe, remove_left_over
from coordinator.storage.protocol import ObjectStore
from coordinator.telemetry.drivers import DriverReport
from coordinator.telemetry.state_stats import TaskLocality

log = logging.getLogger(__name__)

#: Requests to the object store that are on their way at once, of all states.
_REQUESTS = 64

Given = ParamSpec("Given")
Result = TypeVar("Result")


def _method_of(
    part: str, method: Callable[Concatenate[Any, Given], Coroutine[Any, Any, Result]]
) -> Callable[Concatenate[Coordinator, Given], Coroutine[Any, Any, Result]]:
    """Return a method of the coordinator which is that of one of its parts, by the name of the attribute that has the part.

    The two have one name, by which :class:`coordinator.service.client.CoordinatorClient` calls it.
    """

    @wraps(method)
    async def call(self: Coordinator, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return await method(getattr(self, part), *args, **kwargs)

    return call


class Coordinator:
    """Says which store actor has which shard, and which commits count.

    - Deployed by :mod:`coordinator.service.deploy` as a named, detached actor that restarts by itself.
    - Its memory is a cache: ledgers are loaded from the manifest logs when first asked for, so a restarted coordinator
      answers as the previous one did.
    - Every method may be called again after a lost answer.
    - :class:`coordinator.service.client.CoordinatorClient` has the methods that other processes call.
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
        stats: StorageStats | None = None,
    ) -> None:
        self._store = store
        runtime = runtime or Runtime()
        self._clock = runtime.clock
        self._writer_id = runtime.new_id()
        self._node_id = node_id
        self._states = OpenStates(
            store,
            self._writer_id,
            runtime,
            checkpoint_interval=checkpoint_interval,
            part_records=part_records,
            max_age_s=maintenance.grace_s / 2,
        )
        self._actors = ActorRegistry()
        self._instances = ActiveInstances(self._actors, self._writer_of)
        self._fleet = KnownFleet(self._actors, self._states.ledgers)
        locality = TaskLocality()
        self._placement = PlacementService(self._fleet, self._writer_of, store, locality)
        self._leasing = Leasing(self._fleet, self._placement, locality, self._writer_of, self._instances.has)
        self._maintenance = maintenance
        self._cleaner = Cleaner(self._store, maintenance, self._clock, self._writer_of, self._states.notice_deleted)
        self._versions = Versions(self._states, self._writer_of, Branching(self._writer_of, self._clock))
        self._dropping = Dropping(self._store, self._states, self._is_active)
        self._metrics = StateMetrics(self._clock, self._actors, locality, stats or StorageStats())
        self._overview = Overview(
            uri,
            node_id,
            self._clock,
            self._states,
            self._actors,
            self._placement.leases,
            locality,
            self._metrics,
            self._is_active,
        )
        self._rounds = MaintenanceRounds(
            maintenance,
            self._clock,
            self._is_running,
            self._states,
            self._cleaner,
            self._dropping,
            self._overview,
            self._metrics,
            self._placement.leases,
            locality,
            self._instances,
        )
        self._maintaining: asyncio.Task[None] | None = None
        #: By state, set by its next commit.
        self._committed: dict[str, asyncio.Event] = {}
        # The loop's own pool has a few threads more than this node has cores, too few for the requests of many states.
        self._requests: Any = runtime.threads.pool(_REQUESTS, "statefleet-requests")

    async def open(self) -> None:
        """Prove that the store works; raises StorageUnavailableError if it doesn't."""
        await asyncio.to_thread(probe, self._store)
        await asyncio.to_thread(remove_left_over, self._store, self._maintenance.grace_s)
        await self._placement.open()

    async def _writer_of(self, state_name: str) -> LedgerWriter:
        if self._maintaining is None:
            self._begin()
        return await self._states.writer(state_name)

    def _begin(self) -> None:
        """Start maintenance beside the answers, once there is a loop."""
        self._maintaining = asyncio.create_task(self._rounds.run())
        asyncio.get_running_loop().set_default_executor(self._requests)

    # -- states and leases ----------------------------------------------------------------------------------------

    async def describe_state(self, state_name: str) -> StateMetadata | None:
        """Return a state's metadata with its newest schema; None if there is no such state."""
        await self._states.notice_deleted(state_name)
        writer = await self._writer_of(state_name)
        created = writer.metadata
        return None if created is None else await writer.read(lambda ledger: ledger.described(created))

    async def check_state(self, metadata: StateMetadata, batch_id: int | None = None) -> None:
        """Refuse a query that does not fit an existing state; see :meth:`Leasing.check`."""
        await self._states.notice_deleted(metadata.state_name)
        await self._leasing.check(metadata, batch_id)

    async def check_start(self, state_name: str, query_id: str, output_mode: str | None) -> None:
        """Refuse a query that is to start on a state that is not its own; see :meth:`Leasing.check_start`."""
        await self._states.notice_deleted(state_name)
        await self._leasing.check_start(state_name, query_id, output_mode)

    async def attach_and_lease(self, task: TaskIdentity, metadata: StateMetadata, local: ActorLocation) -> LeaseGrant:
        """Return a lease: the store actor that may commit the task's shard, and the version that its batch reads."""
        asked_ms = now_ms(self._clock)
        try:
            grant, is_new, previous = await self._leasing.lease(task, metadata, self._actors.newest(local))
        except StateStoreError as error:
            self._metrics.refused(task.state_name, task.partition_id, error)
            raise
        self._rounds.used(task.state_name)
        if is_new:
            # A driver that was killed does not report that its run has ended.
            self._instances.forget_previous_runs(grant.lease.store_id.checkpoint_root_location, task.run_id)
        self._metrics.leased(task.state_name, task.batch_id + 1, task.partition_id, asked_ms, is_new=is_new)
        self._metrics.moved(grant.lease, previous, grant.base_version)
        return grant

    async def attach_and_lease_all(
        self, tasks: Sequence[TaskIdentity], metadata: StateMetadata, local: ActorLocation
    ) -> list[LeaseGrant]:
        """Return the lease of each task of one batch (:meth:`attach_and_lease`); if one task is refused, all are."""
        return await asyncio.gather(*(self.attach_and_lease(task, metadata, local) for task in tasks))

    async def commit_partitions(
        self, state_name: str, commits: Sequence[PartitionCommit]
    ) -> list[AcceptedCommits | StateStoreError]:
        """Accept commits of some partitions durably, each with all its stores or not at all.

        Returns
        -------
        list
            The outcome of each: a refused commit does not keep the others from being accepted.
        """
        writer = await self._writer_of(state_name)
        outcomes = await asyncio.gather(
            *(self._commit(state_name, writer, commit) for commit in commits), return_exceptions=True
        )
        answers: list[AcceptedCommits | StateStoreError] = []
        for commit, outcome in zip(commits, outcomes, strict=True):
            if isinstance(outcome, StateStoreError):
                self._metrics.refused(state_name, commit.entries[0].partition_id, outcome)
            elif not isinstance(outcome, AcceptedCommits):
                raise outcome
            answers.append(outcome)
        return answers

    async def _commit(self, state_name: str, writer: LedgerWriter, commit: PartitionCommit) -> AcceptedCommits:
        accepted, is_new = await self._leasing.commit(writer, commit)
        self._rounds.used(state_name)
        self._metrics.committed(state_name, commit.entries, is_new=is_new)
        if (committed := self._committed.pop(state_name, None)) is not None:
            committed.set()
        return accepted

    begin_batch = _method_of("_leasing", Leasing.begin_batch)

    async def newest_run(self, state_name: str) -> int:
        """Return the epoch of a state's newest lease: a run that begins after it has a greater one; 0 without any."""
        writer = await self._writer_of(state_name)
        return 0 if writer.metadata is None else await writer.read(lambda ledger: ledger.epoch)

    async def batch_result(
        self, task: TaskIdentity, partitions: range, wait_s: float = 0.0
    ) -> tuple[BatchResult, Placement, range]:
        """Return the result of a batch, with the shards that have not committed it, and the next batch's placement and partitions.

        Parameters
        ----------
        wait_s
            Seconds for which the commits of missing shards are waited for: those of an epoch come by themselves.
        """
        await self._await_commits(task, ShardLayout(len(partitions), partitions.start), wait_s)
        ended = await self._leasing.end_batch(task, partitions)
        ledger = (await self._writer_of(task.state_name)).ledger
        if not ended[0].missing and ledger is not None:
            self._metrics.ended(ledger, task.batch_id + 1, partitions)
        return ended

    async def _await_commits(self, task: TaskIdentity, layout: ShardLayout, wait_s: float) -> None:
        until_s = self._clock.elapsed_s() + wait_s
        while (left_s := until_s - self._clock.elapsed_s()) > 0:
            ledger = (await self._writer_of(task.state_name)).ledger
            if ledger is not None and not ledger.batch_result(task.run_id, task.batch_id, layout).missing:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._committed.setdefault(task.state_name, asyncio.Event()).wait(), left_s)

    async def rescale(self, state_name: str, num_shards: int, dry_run: bool) -> RescalePlan:
        """Rescale a state with one of the next batches of its running query, or only say what that would do.

        Raises errors as :func:`~coordinator.ledger.rescaling.decide_rescale_request`, and an InvalidRequestError if there is no such
        state.
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

    async def drop(self, state_name: str, dry_run: bool, is_over: bool) -> DroppedState:
        """Drop a state, which frees its name, memory and files, or only say what would go. It may be repeated after it was cut off.

        Parameters
        ----------
        is_over
            Whether the caller knows that its query does not run any more. A run that goes on nevertheless is refused from then on.

        Raises
        ------
        InvalidRequestError
            There is no such state, it has branches, or its query runs.
        """
        if self._maintaining is None:
            self._begin()
        await self._states.open_all()
        return await self._dropping.drop(state_name, dry_run=dry_run, is_over=is_over)

    # -- placement ------------------------------------------------------------------------------------------------

    place_shards = _method_of("_placement", PlacementService.place_shards)
    explain_placement = _method_of("_placement", PlacementService.explain_placement)
    plan_move = _method_of("_placement", PlacementService.plan_move)
    plan_rebalance = _method_of("_placement", PlacementService.plan_rebalance)
    move_prepared = _method_of("_placement", PlacementService.move_prepared)
    undrain = _method_of("_placement", PlacementService.undrain)

    async def drain(self, node_id: str, dry_run: bool) -> tuple[PlannedMove, ...]:
        """Place no shard on a node any more, and return the moves that empty it of the open states' shards."""
        names = [name for name, _ in self._states.writers()]
        return await self._placement.drain(names, node_id, dry_run=dry_run)

    async def move_failed(self, move: PlannedMove, error: str) -> None:
        """Write to the state's log why a move failed."""
        await self._placement.failed(move, error)
        self._metrics.move_failed(move.state_name)

    # -- versions -------------------------------------------------------------------------------------------------

    locate = _method_of("_versions", Versions.locate)
    read_view = _method_of("_versions", Versions.read_view)
    list_versions = _method_of("_versions", Versions.list_versions)
    branch = _method_of("_versions", Versions.branch)
    batch_finished = _method_of("_versions", Versions.batch_finished)
    end_epoch = _method_of("_versions", Versions.end_epoch)
    newest_epoch = _method_of("_versions", Versions.newest_epoch)

    async def load_plans(
        self, state_name: str, partition_id: int, version: int, store_names: Sequence[str]
    ) -> LoadPlans:
        """Return which files make a version of some of a partition's stores. They are not deleted during the grace period."""
        writer = await self._writer_of(state_name)
        # By the writer: an answer must not show commits whose records are still being written.
        loading = await writer.read(lambda ledger: ledger.load_plans(partition_id, version, store_names))
        self._cleaner.pin(loading)
        return loading

    async def reassigned(self, state_name: str, actor_name: str, partition_ids: Sequence[int]) -> list[int]:
        """Return the partitions, of those asked for, that the store actor of this name should not have in memory.

        They are leased to another store actor, are shards no more, or their query ended a while ago. It takes one look at the log.
        """
        writer = await self._writer_of(state_name)
        if writer.metadata is None:
            return list(partition_ids)

        def look(ledger: StateLedger) -> list[int]:
            if self._rounds.is_unused(ledger):
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
        """Accept a snapshot; returns False if its version was superseded meanwhile, or there is a newer snapshot."""

        def decide(ledger: StateLedger) -> tuple[list[Record], tuple[bool, bool]]:
            records, counted = ledger.decide_snapshot(snapshot)
            return records, (counted, bool(records))

        # Nothing is written for a state whose folder was deleted.
        await self._states.notice_deleted(state_name)
        counted, is_new = await (await self._writer_of(state_name)).decide(decide)
        self._metrics.count(state_name, "snapshots", int(is_new))
        return counted

    async def clean(self, state_name: str, dry_run: bool) -> dict[str, Any]:
        """Truncate versions that need not be retained, and delete the files that nothing needs, or only say what would go.

        Nothing is deleted before the coordinator has run for the grace period.

        Returns
        -------
        dict
            ``floors`` (partition, store and oldest retained version, where that moves) and ``files`` (path, bytes and age in seconds).
        """
        return await self._rounds.clean(state_name, await self._writer_of(state_name), dry_run=dry_run)

    async def look_into(self, folder: str) -> ProbeResult:
        """Read what a store actor wrote in a folder, and write an answer there; see :func:`coordinator.storage.probe.prove_shared`."""
        process = f"pid {os.getpid()} on {socket.gethostname()}, node {self._node_id}"
        return await asyncio.to_thread(look_into, self._store, folder, process)

    # -- store actors ---------------------------------------------------------------------------------------------

    async def report_store_actor(self, location: ActorLocation, is_new: bool = True) -> None:
        """Register a store actor: a new incarnation, so that the previous one of its name is dead, or one that was running before."""
        if is_new:
            self._actors.started(location)
        else:
            self._actors.newest(location)

    async def report_memory(self, instance_id: str, use: MemoryUse) -> None:
        """Register the memory that a store actor with a memory limit takes."""
        self._actors.memory_reported(instance_id, use)

    async def report_driver(self, report: DriverReport) -> None:
        """Register a driver's executors, and what its long batches wait for."""
        self._metrics.reported(report)

    async def report_store_actor_lost(self, instance_id: str) -> None:
        """Register that a store actor died under a call; its shards go to other ones with their next lease."""
        if self._actors.lost(instance_id):
            log.warning("a store actor was lost under a call; its shards go to other ones: incarnation %s", instance_id)

    # -- Spark's StateStoreCoordinator ----------------------------------------------------------------------------

    async def open_instance(
        self,
        provider_id: StateStoreProviderId,
        location: ActorLocation,
        ids_to_check: Sequence[StateStoreProviderId],
        version: int,
        store_names: Sequence[str],
    ) -> InstancePlans:
        """Record that a store actor is about to open a partition at a version, and return the files that make the version.

        That is :meth:`ActiveInstances.report` and :meth:`load_plans` in one call.
        """
        store_id = provider_id.store_id
        loading = await self.load_plans(store_id.state_name, store_id.partition_id, version, store_names)
        stale = await self._instances.report(provider_id, location, ids_to_check)
        return InstancePlans(tuple(stale), loading)

    async def deactivate_instances(self, run_id: str) -> int:
        """Forget all shards of a run, which has ended; returns how many there were."""
        return self._instances.end(run_id)

    # -- overview -------------------------------------------------------------------------------------------------

    async def load_all_states(self) -> list[str]:
        """Open the states that are stored; returns the names of all."""
        return await self._states.open_all()

    async def status(self) -> dict[str, Any]:
        """Return store actors, queries and shards as JSON data."""
        return self._overview.status()

    def _is_active(self, ledger: StateLedger) -> bool:
        """Return whether the newest run of a state's query is not known to be over."""
        return bool(ledger.run_id) and ledger.run_id not in self._instances.ended_runs

    def _is_running(self, ledger: StateLedger) -> bool:
        """Return whether a state's query is active, and its driver reports it."""
        return self._is_active(ledger) and self._metrics.is_running(ledger.run_id)

    status_details = _method_of("_overview", Overview.status_details)
    samples = _method_of("_overview", Overview.samples)

    async def ping(self) -> str:
        """Return the id of this incarnation of the coordinator."""
        return self._writer_id

"""Leases of shards: requests of a query and its tasks before they may use a state. No Ray."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from msgspec import structs

from coordinator.ledger.batch_stats import BatchResult
from coordinator.ledger.compatibility import changes, check_output_mode, fitting
from coordinator.ledger.records import Dropped, Record, StateBegun
from coordinator.ledger.rescaling import decide_shards, first_layout
from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.ledger.state_ledger import AcceptedCommits, LeaseGrant, StateLedger
from coordinator.log.ledger_writer import RECENT_S, LedgerWriter
from coordinator.model.commits import CommitEntry, PartitionCommit
from coordinator.model.errors import FencedError
from coordinator.model.identities import DEFAULT_STORE, PYTHON_QUERY_ID, ActorLocation, StateStoreId, TaskIdentity
from coordinator.model.leases import Lease
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.watermarks import Watermarks
from coordinator.placement.lease_plans import FleetView, LeaseRequest
from coordinator.service.placement_service import Placement, PlacementService
from coordinator.telemetry.state_stats import TaskLocality

log = logging.getLogger(__name__)


def log_rescale(state_name: str, layout: ShardLayout) -> None:
    """Log that a state was rescaled."""
    log.warning(
        "%s: from version %d on it has %d shards instead of %d; no file was rewritten",
        state_name,
        layout.version,
        layout.num_shards,
        layout.former_shards,
        extra={"state": state_name, "version": layout.version},
    )


@dataclass(eq=False)
class Leasing:
    """Gives leases of the states of a fleet."""

    _fleet: FleetView
    _placement: PlacementService
    _locality: TaskLocality
    _writer_of: Callable[[str], Awaitable[LedgerWriter]]
    _is_active: Callable[[StateLedger], bool]

    async def check_start(self, state_name: str, query_id: str, output_mode: str | None) -> None:
        """Refuse a query that is to start on another query's state, or in another output mode than the state's (StateMismatchError).

        A state whose query had a temporary checkpoint, and is over, is dropped as the checkpoint was, and begins empty.

        Parameters
        ----------
        query_id
            The id in its checkpoint; empty for a new query.
        output_mode
            None if it was checked before.
        """
        writer = await self._writer_of(state_name)
        created = writer.metadata
        if created is None:
            return
        if output_mode is not None:
            check_output_mode(created, output_mode)

        def decide(ledger: StateLedger) -> tuple[list[Record], bool]:
            if ledger.ends_with_its_run and query_id != ledger.query_id and not self._is_active(ledger):
                return [Dropped(created.to_json())], True
            ledger.check_owner(query_id)
            return [], False

        if await writer.decide(decide):
            log.warning(
                "%s: state reset: its query had no checkpointLocation and has ended",
                state_name,
                extra={"state": state_name},
            )

    async def check(self, metadata: StateMetadata, batch_id: int | None) -> None:
        """Refuse a query that does not fit an existing state (StateMismatchError), before it starts.

        A state that begins empty with the query fits any query (:meth:`check_start`).

        Parameters
        ----------
        batch_id
            The query's first batch, by its checkpoint: the one after the newest version that every shard has, or that batch again.
            None before the query is started: then it may fit either.
        """
        writer = await self._writer_of(metadata.state_name)
        created = writer.metadata
        if created is None:
            return

        def look(ledger: StateLedger) -> StateSchema | None:
            if ledger.ends_with_its_run and not self._is_active(ledger):
                return None
            newest = ledger.committed_version(ledger.layouts.newest(first_layout(created)))
            versions = [newest, max(0, newest - 1)]
            if batch_id is not None:
                versions = versions[:1] if batch_id >= newest else versions[1:]
            return fitting((ledger.committed_schema(created, version) for version in versions), created, metadata)

        existing = await writer.read(look)
        if existing is not None and batch_id is None:
            begun, dropped = changes(existing, metadata.schema)
            if begun or dropped:
                # A renamed column is another column: the log shows it to users who did not mean that.
                log.warning(
                    "%s: starting from nothing: %s; left out: %s",
                    metadata.state_name,
                    begun or "-",
                    dropped or "-",
                    extra={"state": metadata.state_name, "query": metadata.query_id},
                )

    async def begin_batch(self, task: TaskIdentity, planned: int, requested: int | None) -> range:
        """Return the partitions of the shards of a batch that is about to be planned.

        Parameters
        ----------
        planned
            Number of shards of a state that does not exist yet.
        """
        writer = await self._writer_of(task.state_name)
        created = writer.metadata
        if created is None:
            return range(planned)

        def decide(ledger: StateLedger) -> tuple[list[Record], tuple[bool, ShardLayout]]:
            records, layout = decide_shards(ledger, created, task, requested)
            return records, (bool(records), layout)

        is_new, layout = await writer.decide(decide)
        if is_new:
            log_rescale(task.state_name, layout)
        return layout.partitions

    async def end_batch(self, task: TaskIdentity, partitions: range) -> tuple[BatchResult, Placement, range]:
        """Return a batch's result; see :meth:`~coordinator.service.coordinator.Coordinator.batch_result`."""
        writer = await self._writer_of(task.state_name)
        created = writer.metadata
        following = structs.replace(
            task, batch_id=task.batch_id + 1, batch_time_ms=None, former_time_ms=task.batch_time_ms
        )

        def decide(ledger: StateLedger) -> tuple[list[Record], tuple[BatchResult, ShardLayout, bool, StateLedger]]:
            of_batch = ShardLayout(len(partitions), partitions.start)
            result = ledger.batch_result(task.run_id, task.batch_id, of_batch)
            records, layout = list[Record](), of_batch
            if created is not None and not result.missing:
                # Decided here, so that the next batch need not ask.
                records, layout = decide_shards(ledger, created, following, None)
            return records, (result, layout, bool(records), ledger)

        # The batch's commits are in the ledger, whichever coordinator has written since. Only commits that are missing may have been
        # accepted by another one.
        records, ended = await writer.read(decide, max_age_s=RECENT_S)
        if records or ended[0].missing:
            ended = await writer.decide(decide)
        result, layout, is_new, ledger = ended
        if is_new:
            log_rescale(task.state_name, layout)
        # Once, after a decision that may have been repeated: moves that restore a plan are returned a single time.
        placement = self._placement.next_batch(ledger, partitions, is_whole=not result.missing)
        return result, placement, layout.partitions

    async def lease(
        self, task: TaskIdentity, metadata: StateMetadata, local: ActorLocation
    ) -> tuple[LeaseGrant, bool, ActorLocation | None]:
        """Return a task's lease, whether its run is new, and the store actor that had the shard before."""
        writer = await self._writer_of(task.state_name)

        if writer.metadata is None:
            # Before anything is written: a checkpoint that is ahead of a missing state must not create an empty one.
            await writer.read(lambda ledger: ledger.check_query(task))
            await writer.create_metadata(metadata)
        created = writer.metadata
        assert created is not None

        def decide(ledger: StateLedger) -> tuple[list[Record], tuple[LeaseGrant, bool, ActorLocation | None]]:
            # Ownership first: a run that was replaced gets that error, also if the state has changed since.
            ledger.check_query(task)
            if writer.metadata is None or writer.metadata.state_id != created.state_id:
                raise FencedError(
                    "the state was dropped by another coordinator a moment ago; nothing of this batch was committed by this task, and "
                    "its repetition begins with a new state",
                    state=task.state_name,
                )
            layout = ledger.layouts.in_force(task.run_id, task.batch_id) or first_layout(created)
            if not task.is_of_python:
                ledger.check_layout(task, layout)
            ledger.check_whole(task, layout)
            is_new = task.run_id != ledger.run_id
            previous = ledger.holder(task.partition_id)
            records, grant = ledger.decide_lease(task, local, self._fleet, self._placement.leases.place)
            records += ledger.decide_schema(task, created, metadata)
            if ledger.drops and not ledger.run_id and ledger.begun_metadata is None:
                records.insert(0, StateBegun(created.to_json()))
            return records, (grant, is_new, previous)

        if task.is_of_python:
            # Partitions of Python programs have no batches in common, so none waits for the end of a batch.
            self._placement.leases.batch_ended(task.state_name)
        grant, is_new, previous = await writer.decide(decide)
        if not task.is_of_python:
            slots = self._placement.leases.slots(task.state_name)
            self._locality.count(task.state_name, task.partition_id, local, previous, grant.lease.location, slots)
        lease = structs.replace(
            grant.lease, standbys=self._standbys(task.state_name, task.partition_id, grant.lease.location)
        )
        return structs.replace(grant, lease=lease), is_new, previous

    def _standbys(self, state_name: str, partition_id: int, holder: ActorLocation) -> tuple[str, ...]:
        standbys = self._placement.leases.standbys(state_name, partition_id, holder, self._fleet)
        return tuple(location.actor_name for location in standbys)

    def next_lease(
        self, ledger: StateLedger, created: StateMetadata, entries: Sequence[CommitEntry]
    ) -> LeaseGrant | None:
        """Return the lease of the batch after a partition's commits, which are about to be accepted, if it is known by now.

        It is not known if the shard is to go to another store actor. Partitions of Python programs have no next batch of their run.
        """
        entry = entries[0]
        assignment = ledger.assignment(entry.partition_id)
        if assignment is None or ledger.query_id == PYTHON_QUERY_ID:
            return None
        holder = assignment.location
        # A coordinator that has just started learns from commits which store actors are alive, as from requests for leases.
        self._fleet.newest(holder)
        if not self._placement.leases.stays(
            LeaseRequest(ledger.state_name, entry.partition_id, holder, holder), self._fleet
        ):
            return None
        lease = Lease(
            StateStoreId(ledger.root, 0, entry.partition_id),
            entry.run_id,
            assignment.epoch,
            holder,
            self._standbys(ledger.state_name, entry.partition_id, holder),
        )
        read = next((entry.watermarks for entry in entries if entry.store_name == DEFAULT_STORE), Watermarks())
        return LeaseGrant(lease, entry.version, read)

    async def commit(self, writer: LedgerWriter, commit: PartitionCommit) -> tuple[AcceptedCommits, bool]:
        """Accept the commits of a partition durably, with the lease of its next batch if that is known by now.

        Returns
        -------
        tuple
            What was accepted, and whether it is new: a repeated commit is answered as the first time.
        """
        created = writer.metadata

        def decide(ledger: StateLedger) -> tuple[list[Record], tuple[AcceptedCommits, bool]]:
            records, entries = ledger.decide_commits(commit.entries)
            if not records:
                return [], (AcceptedCommits(entries), False)
            if created is None:
                return records, (AcceptedCommits(entries), True)
            task = _task_of(ledger, commit.entries[0])
            ledger.check_whole(task, ledger.layouts.in_force(task.run_id, task.batch_id) or first_layout(created))
            return records, (AcceptedCommits(entries, self.next_lease(ledger, created, commit.entries)), True)

        outcome = await writer.decide(decide, is_batched=True)
        if commit.is_piggybacked and created is not None:
            # Tasks take such leases from the store actors of their own node only.
            self._locality.count_local(created.state_name, commit.entries[0].partition_id)
        return outcome


def _task_of(ledger: StateLedger, entry: CommitEntry) -> TaskIdentity:
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

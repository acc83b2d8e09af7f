"""The coordinator's records of its states beside their logs: times, counts, and why a batch was slow. In memory only. No Ray."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from coordinator.ledger.rescaling import first_layout
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.commits import CommitEntry
from coordinator.model.errors import StateStoreError
from coordinator.model.identities import ActorLocation
from coordinator.model.leases import Lease
from coordinator.model.metric_table import Sample
from coordinator.model.state_metadata import StateMetadata
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.runtime.logs import about
from coordinator.runtime.runtime import Clock, now_ms
from coordinator.storage.actor_store import StorageStats
from coordinator.telemetry.batch_spans import TracedBatch, TracedShard
from coordinator.telemetry.drivers import DriverReport, Drivers
from coordinator.telemetry.slow_batches import (
    BatchContext,
    EndedBatch,
    RunningBatch,
    explanation,
    is_slow,
    running_batch,
)
from coordinator.telemetry.state_record import StateRecord
from coordinator.telemetry.state_stats import ShardStats, StateStats, TaskLocality

log = logging.getLogger(__name__)

#: Shards that are looked at before other requests are answered.
_AT_ONCE = 500
#: Ended batches that wait to be traced; further ones are not traced.
_NOT_TRACED = 64


@dataclass(slots=True)
class _State:
    record: StateRecord = field(default_factory=StateRecord)
    #: Sums over its shards, with the stamp of the state that they are of; None until they were asked for.
    stats: tuple[str, StateStats] | None = None
    #: ``refused``, ``trouble``, ``lost_executors``: Refusals, trouble with the object store and the number of lost executors
    #: when its last batch ended.
    refused: Counter[str] = field(default_factory=Counter)
    trouble: Counter[str] = field(default_factory=Counter)
    lost_executors: int = 0


class _Ended(NamedTuple):
    ledger: StateLedger
    last: CommitEntry
    partitions: range
    planned_ms: int | None
    ended_ms: int


class StateMetrics:
    """Records what happens to the states of a fleet."""

    def __init__(self, clock: Clock, actors: ActorRegistry, locality: TaskLocality, storage: StorageStats) -> None:
        self._clock = clock
        self.started_at_ms = now_ms(clock)
        self._actors = actors
        self._locality = locality
        self._storage = storage
        self._states: defaultdict[str, _State] = defaultdict(_State)
        self._drivers = Drivers()
        #: None where nothing is traced.
        self._not_traced: asyncio.Queue[_Ended] | None = None

    def forget(self, state_name: str) -> None:
        """Drop all that was recorded of a state."""
        self._states.pop(state_name, None)

    def record(self, state_name: str) -> StateRecord:
        """Return what was recorded of a state; it goes on being written."""
        return self._states[state_name].record

    def leased(self, state_name: str, version: int, partition_id: int, asked_ms: int, *, is_new: bool) -> None:
        """Record that a task was given its lease; `is_new` if its run is."""
        record = self.record(state_name)
        if is_new:
            record.forget_run()
        record.add_lease(version, partition_id, asked_ms, now_ms(self._clock))

    def moved(self, lease: Lease, previous: ActorLocation | None, version: int) -> None:
        """Record a lease of a shard at a version, and a move if another store actor had the shard."""
        location, store_id = lease.location, lease.store_id
        if previous is None or previous.instance_id == location.instance_id:
            return
        was_lost = self._actors.is_dead(previous)
        self.record(store_id.state_name).moves["recovery" if was_lost else "move"] += 1
        fields = about(store_id, run=lease.run_id, version=version, epoch=lease.epoch, actor=location.actor_name)
        how = "a shard goes from %s, which was lost, to %s" if was_lost else "a shard goes from %s to %s"
        log.info(how, previous.actor_name, location.actor_name, extra=fields)

    def move_failed(self, state_name: str) -> None:
        """Record that a shard stays where it is, though it was to go elsewhere."""
        self.record(state_name).moves["failed"] += 1

    def refused(self, state_name: str, partition_id: int, error: StateStoreError) -> None:
        """Record that a task's request was refused."""
        self.record(state_name).add_refusal(partition_id, type(error).__name__, str(error), now_ms(self._clock))
        log.warning("a task was refused: %s", error, extra={"state": state_name, "partition": partition_id})

    def committed(self, state_name: str, entries: Sequence[CommitEntry], *, is_new: bool) -> None:
        """Record accepted commits of a partition; see :meth:`StateRecord.add_commits`."""
        self.record(state_name).add_commits(entries, now_ms(self._clock), is_new=is_new)

    def count(self, state_name: str, name: str, by: int = 1) -> None:
        """Add to a metric that has no label but the state; see :data:`~coordinator.model.metric_table.METRICS`."""
        self.record(state_name).counts[name] += by

    def reported(self, report: DriverReport) -> None:
        """Record a driver's report of its executors, and of the batches that take long."""
        for executor in self._drivers.take(report, self._clock.elapsed_s()):
            log.warning("%s: %s", executor.loss_text(), executor.reason or "Spark gives no reason")

    def is_running(self, run_id: str) -> bool:
        """Return whether a living driver has reported a run lately."""
        return self._drivers.is_running(run_id, self._clock.elapsed_s())

    def executors(self) -> list[dict[str, Any]]:
        """Return the executors of living drivers as JSON data, those that were lost lately included."""
        return [
            {"application": application, **asdict(executor), "alive": executor.lost_at_ms is None}
            for application, executor in self._drivers.executors(self._clock.elapsed_s())
        ]

    def running(self, ledger: StateLedger, metadata: StateMetadata) -> RunningBatch | None:
        """Return a state's running batch if it has been running for some seconds."""
        batch, state = self._drivers.batch(ledger.run_id, self._clock.elapsed_s()), self._states[metadata.state_name]
        if batch is None or state.record.is_ended(batch.batch_id + 1):
            return None
        layout = ledger.layouts.newest(first_layout(metadata))
        missing = [
            partition - layout.first_partition
            for partition in layout.partitions
            if ledger.newest_version(partition) <= batch.batch_id
        ]
        lost = self._drivers.lost_since(ledger.run_id, state.lost_executors)
        return running_batch(metadata.state_name, batch, state.record.recent, missing, layout.num_shards, lost)

    def behind(self, ledger: StateLedger) -> int | None:
        """Return how many records the sources of a state's run are behind; None if they do not say."""
        return self._drivers.behind(ledger.run_id, self._clock.elapsed_s())

    def ended(self, ledger: StateLedger, version: int, partitions: range) -> None:
        """Record the end of a batch of some partitions; a slow one is explained in the log."""
        name, at_ms = ledger.state_name, now_ms(self._clock)
        record = self.record(name)
        ended = record.end_batch(version, at_ms)
        if ended is None:
            return
        context = self._context(ledger, ended, partitions.start)
        if is_slow(ended.took_ms, record.recent):
            text = explanation(name, ended, record.recent, context)
            record.add_slow_batch(ended, at_ms, context.shard, text)
            log.warning("%s", text, extra=_fields(ledger, ended.last, context.shard))
        record.recent.append(ended)
        if self._not_traced is not None and not self._not_traced.full():
            # The first batch of a run may be one that an earlier run planned, long ago.
            planned_ms = ended.last.batch_time_ms if record.is_ended(version - 1) else None
            self._not_traced.put_nowait(_Ended(ledger, ended.last, partitions, planned_ms, at_ms))

    def _context(self, ledger: StateLedger, ended: EndedBatch, first_partition: int) -> BatchContext:
        """Return what happened since the state's batch before."""
        last, state = ended.last, self._states[ledger.state_name]
        refused, trouble = state.refused, state.trouble
        state.refused, state.trouble = Counter(state.record.refused), Counter(self._storage.trouble())
        lost_executors = self._drivers.lost_since(last.run_id, state.lost_executors)
        state.lost_executors = self._drivers.lost
        holder = ledger.holder(last.partition_id)
        moves = [move for move in ledger.moves(last.partition_id) if not move.error]
        # It came there for this batch if it had the batch's base version then.
        move = moves[-1] if moves and moves[-1].version == last.base_version and moves[-1].former else None
        return BatchContext(
            last.partition_id - first_partition,
            None if holder is None else holder.host,
            move,
            move is not None and move.former is not None and self._actors.is_dead(move.former),
            None if holder is None else self._actors.memory(holder),
            state.refused - refused,
            state.trouble - trouble,
            lost_executors,
        )

    # -- as traces ------------------------------------------------------------------------------------------------

    async def next_traced(self) -> TracedBatch:
        """Return the next batch that has ended since the first call; other requests are answered after every few hundred shards."""
        if self._not_traced is None:
            self._not_traced = asyncio.Queue(_NOT_TRACED)
        ledger, last, partitions, planned_ms, ended_ms = await self._not_traced.get()
        shards = []
        for shard, partition in enumerate(partitions):
            if shard % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)
            commits, holder = ledger.commits_of_version(partition, last.version), ledger.holder(partition)
            if commits and commits[0].run_id == last.run_id:
                time = self.record(ledger.state_name).time_of(commits[0])
                shards.append(TracedShard(shard, "" if holder is None else holder.actor_name, commits, time))
        return TracedBatch(ledger.state_name, ledger.query_id, planned_ms, ended_ms, shards)

    # -- as metrics -----------------------------------------------------------------------------------------------

    async def samples(self, states: Iterable[tuple[str, StateLedger, StateMetadata, bool]]) -> list[Sample]:
        """Return all metrics of the coordinator, as they are now; other requests are answered after every few hundred shards.

        Parameters
        ----------
        states
            The open states: a stamp that is another one once something happened, ledger, metadata, and whether a run goes on.
        """
        newest = self._actors.all()
        lost = sum(map(self._actors.is_dead, newest))
        samples = [
            Sample("statefleet_coordinator_start_timestamp_seconds", self.started_at_ms / 1000),
            Sample("statefleet_store_actors", len(newest) - lost, ("alive",)),
            Sample("statefleet_store_actors", lost, ("lost",)),
            Sample("statefleet_executors_lost_total", self._drivers.lost),
        ]
        for stamp, ledger, metadata, is_active in states:
            name = metadata.state_name
            stats = await self._stats_of(stamp, ledger, metadata)
            samples += stats.samples(name, self._actors, is_active=is_active)
            samples += self.record(name).samples(name, stats.labelled_operations)
            running = self.running(ledger, metadata)
            overdue_ms = running.running_ms if running is not None and running.is_overdue else 0
            samples.append(Sample("statefleet_batch_overdue_seconds", overdue_ms / 1000, (name,)))
            if (behind := self.behind(ledger)) is not None:
                samples.append(Sample("statefleet_behind_records", behind, (name,)))
        return [*samples, *self._storage.samples("coordinator")]

    async def _stats_of(self, stamp: str, ledger: StateLedger, metadata: StateMetadata) -> StateStats:
        """Return the sums over a state's shards: those of the last call if the stamp is the same."""
        cached = self._states[metadata.state_name].stats
        if cached is not None and cached[0] == stamp:
            return cached[1]
        stats, partitions = StateStats(), ledger.layouts.newest(first_layout(metadata)).partitions
        for begin in range(0, len(partitions), _AT_ONCE):
            shards = partitions[begin : begin + _AT_ONCE]
            stats.add(metadata, (ShardStats.of(ledger, self._locality, partition) for partition in shards))
            await asyncio.sleep(0)
        self._states[metadata.state_name].stats = stamp, stats
        return stats


def _fields(ledger: StateLedger, entry: CommitEntry, shard: int) -> dict[str, object]:
    return {
        "state": ledger.state_name,
        "query": ledger.query_id,
        "run": entry.run_id,
        "shard": shard,
        "version": entry.version,
        "epoch": entry.epoch,
        "batch": entry.version - 1,
    }

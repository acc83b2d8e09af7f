"""What a coordinator takes down of its states beside their logs: moments, counts, and why a batch was slow. In memory only. No Ray."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from coordinator.ledger.rescaling import BatchShards, first_generation
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.commits import CommitEntry
from coordinator.model.errors import StateStoreError
from coordinator.model.identities import ActorLocation
from coordinator.model.leases import Lease
from coordinator.model.metric_table import Sample
from coordinator.model.state_metadata import StateMetadata
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.placement.move_planner import MovePlanner
from coordinator.runtime.logs import about
from coordinator.runtime.runtime import Clock, now_ms
from coordinator.storage.counted import StorageStats
from coordinator.telemetry.batch_times import BatchTimes
from coordinator.telemetry.drivers import DriverReport, Drivers
from coordinator.telemetry.fleet_samples import StateStats, coordinator_samples
from coordinator.telemetry.slow_batches import (
    BatchContext,
    EndedBatch,
    RunningBatch,
    SlowBatch,
    explanation,
    is_slow,
    running_batch,
)
from coordinator.telemetry.state_counters import StateCounters

__all__ = ["StateMetrics"]

log = logging.getLogger(__name__)

#: Shards that are looked at in one turn.
_AT_ONCE = 500


class StateMetrics:
    """Takes down what happens to the states of a fleet.

    Parameters
    ----------
    lives, placing
        What is known of store actors, and where tasks ran.
    storage
        The coordinator's own requests to the object store.
    """

    def __init__(self, clock: Clock, lives: ActorRegistry, placing: MovePlanner, storage: StorageStats) -> None:
        self._clock = clock
        self._started_at_ms = now_ms(clock)
        self._lives = lives
        self._placing = placing
        self._storage = storage
        self._times: defaultdict[str, BatchTimes] = defaultdict(BatchTimes)
        self._counters: defaultdict[str, StateCounters] = defaultdict(StateCounters)
        #: By state, with the stamp that they are of.
        self._figures: dict[str, tuple[str, StateStats]] = {}
        #: By state, refusals and trouble with the object store when its last batch ended.
        self._at_end: dict[str, tuple[Counter[str], Counter[str]]] = {}
        self._drivers = Drivers()
        #: By state, how many executors were lost when its last batch ended.
        self._lost_at_end: dict[str, int] = {}

    def forget(self, state_name: str) -> None:
        """Let go of all that was taken down of a state."""
        for facts in (self._times, self._counters, self._figures, self._at_end, self._lost_at_end):
            facts.pop(state_name, None)

    def times(self, state_name: str) -> BatchTimes:
        """Moments of a state's newest batches."""
        return self._times[state_name]

    def leased(self, state_name: str, version: int, partition_id: int, asked_ms: int, *, is_new: bool) -> None:
        """A task was given its lease; `is_new` if its run is."""
        if is_new:
            self._times[state_name].forget_run()
            self._counters[state_name].forget_run()
        self._times[state_name].leased(version, partition_id, asked_ms, now_ms(self._clock))

    def moved(self, lease: Lease, former: ActorLocation | None, version: int) -> None:
        """A lease was given; the shard, at a version, went to another store actor if another one had it."""
        location, store_id = lease.location, lease.store_id
        if former is None or former.instance_id == location.instance_id:
            return
        was_lost = self._lives.is_over(former)
        self._counters[store_id.state_name].moves["recovery" if was_lost else "move"] += 1
        fields = about(store_id, run=lease.run_id, version=version, epoch=lease.epoch, actor=location.actor_name)
        how = "a shard goes from %s, which was lost, to %s" if was_lost else "a shard goes from %s to %s"
        log.info(how, former.actor_name, location.actor_name, extra=fields)

    def move_failed(self, state_name: str) -> None:
        """A shard stays where it is, though it was to go elsewhere."""
        self._counters[state_name].moves["failed"] += 1

    def refused(self, state_name: str, partition_id: int, error: StateStoreError) -> None:
        """Somebody was refused."""
        kind = type(error).__name__
        self._times[state_name].refused(partition_id, kind, str(error), now_ms(self._clock))
        self._counters[state_name].refusals[kind] += 1
        log.warning("a task was refused: %s", error, extra={"state": state_name, "partition": partition_id})

    def counted(self, state_name: str, entries: Sequence[CommitEntry], *, is_new: bool) -> None:
        """Commits of a partition count; `is_new` if they did not before."""
        newest, times = entries[0], self._times[state_name]
        time = times.counted(newest.version, newest.partition_id, now_ms(self._clock))
        if is_new:
            self._counters[state_name].counted(entries, time)

    def count(self, state_name: str, name: str, by: int = 1) -> None:
        """Count something that has no label but the state; see :data:`~coordinator.model.metric_table.METRICS`."""
        self._counters[state_name].counts[name] += by

    def reported(self, report: DriverReport) -> None:
        """A driver reports its executors, and the batches that take long."""
        for executor in self._drivers.take(report, self._clock.elapsed_s()):
            log.warning("%s: %s", executor.loss_text(), executor.reason or "Spark gives no reason")

    def is_running(self, run_id: str) -> bool:
        """Whether a driver that goes on has reported a run lately."""
        return self._drivers.is_running(run_id, self._clock.elapsed_s())

    def executors(self) -> list[dict[str, Any]]:
        """Executors of the drivers that go on, as JSON data, those that were lost lately included."""
        return [
            {"application": application, **asdict(executor), "alive": executor.lost_at_ms is None}
            for application, executor in self._drivers.executors(self._clock.elapsed_s())
        ]

    def running(self, ledger: StateLedger, metadata: StateMetadata) -> RunningBatch | None:
        """A state's batch at hand, if it has been running for some seconds."""
        batch, name = self._drivers.batch(ledger.run_id, self._clock.elapsed_s()), metadata.state_name
        if batch is None or self._times[name].is_ended(batch.batch_id + 1):
            return None
        generation = ledger.generations.newest(first_generation(metadata))
        missing = [
            partition - generation.first_partition
            for partition in generation.partitions
            if ledger.newest_version(partition) <= batch.batch_id
        ]
        lost = self._drivers.lost_since(ledger.run_id, self._lost_at_end.get(name, 0))
        return running_batch(name, batch, self._counters[name].recent, missing, generation.num_shards, lost)

    def ended(self, ledger: StateLedger, version: int, shards: BatchShards) -> None:
        """A batch is at its end; a slow one is explained."""
        name, at_ms = ledger.state_name, now_ms(self._clock)
        self._times[name].ended(version, at_ms)
        counters = self._counters[name]
        ended = counters.ended(version, at_ms)
        if ended is None:
            return
        refusals, trouble = self._since_last_batch(name)
        lost = self._drivers.lost_since(ended.last.run_id, self._lost_at_end.get(name, 0))
        self._lost_at_end[name] = self._drivers.lost
        if is_slow(ended.took_ms, counters.recent):
            counters.counts["slow_batches"] += 1
            around = replace(self._around(ledger, ended, shards, refusals, trouble), lost_executors=lost)
            text = explanation(name, ended, counters.recent, around)
            batch_id, number = ended.last.version - 1, counters.counts["slow_batches"]
            self._times[name].was_slow(SlowBatch(number, at_ms, batch_id, around.shard, ended.took_ms, text))
            log.warning("%s", text, extra=_fields(ledger, ended.last, around.shard))
        counters.recent.append(ended)

    def _around(
        self,
        ledger: StateLedger,
        ended: EndedBatch,
        shards: BatchShards,
        refusals: Mapping[str, int],
        trouble: Mapping[str, int],
    ) -> BatchContext:
        last = ended.last
        holder = ledger.holder(last.partition_id)
        moves = [one for one in ledger.assignments.moves(last.partition_id) if not one.error]
        # It came there for this batch if it had the batch's base version then.
        move = moves[-1] if moves and moves[-1].version == last.base_version and moves[-1].former else None
        return BatchContext(
            last.partition_id - shards.first_partition,
            None if holder is None else holder.host,
            move,
            move is not None and move.former is not None and self._lives.is_over(move.former),
            None if holder is None else self._lives.memory(holder),
            refusals,
            trouble,
        )

    def _since_last_batch(self, state_name: str) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Refusals of a state, and trouble with the object store, since its last batch ended."""
        now = Counter(self._counters[state_name].refusals), Counter(self._storage.trouble())
        before = self._at_end.get(state_name, (Counter(), Counter()))
        self._at_end[state_name] = now
        return now[0] - before[0], now[1] - before[1]

    # -- as metrics -----------------------------------------------------------------------------------------------

    async def samples(self, states: Iterable[tuple[str, StateLedger, StateMetadata, bool]]) -> list[Sample]:
        """All figures of the coordinator, as they are now; tasks have their turn between some shards and the next.

        Parameters
        ----------
        states
            Those that are open: a stamp that is another one once something happened, ledger, metadata, and whether a run goes on.
        """
        found = list(coordinator_samples(self._started_at_ms, self._lives))
        found.append(Sample("statefleet_executors_lost_total", self._drivers.lost))
        for stamp, ledger, metadata, is_active in states:
            name = metadata.state_name
            told = self._figures.get(name)
            if told is None or told[0] != stamp:
                told = self._figures[name] = stamp, await self._summed(ledger, metadata)
            found += told[1].samples(name, self._lives, is_active=is_active)
            found += self._counters[name].samples(name, told[1].operations)
            running = self.running(ledger, metadata)
            overdue_ms = running.running_ms if running is not None and running.is_overdue else 0
            found.append(Sample("statefleet_batch_overdue_seconds", overdue_ms / 1000, (name,)))
        return [*found, *self._storage.samples("coordinator")]

    async def _summed(self, ledger: StateLedger, metadata: StateMetadata) -> StateStats:
        generation = ledger.generations.newest(first_generation(metadata))
        figures = StateStats()
        partitions = generation.partitions
        for begin in range(0, len(partitions), _AT_ONCE):
            figures.add(ledger, metadata, self._placing, partitions[begin : begin + _AT_ONCE])
            await asyncio.sleep(0)
        return figures


def _fields(ledger: StateLedger, entry: CommitEntry, shard: int) -> dict[str, object]:
    """Fields of a log line about a commit."""
    return {
        "state": ledger.state_name,
        "query": ledger.query_id,
        "run": entry.run_id,
        "shard": shard,
        "version": entry.version,
        "epoch": entry.epoch,
        "batch": entry.version - 1,
    }

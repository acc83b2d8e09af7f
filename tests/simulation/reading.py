"""Readers of the state while batches run: each read is of one finished version, and never older than the read before."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from coordinator.ledger.read_views import ReadView
from coordinator.model.identities import DEFAULT_STORE
from coordinator.runtime.runtime import Runtime
from statefleet.reads.shard_reads import KeyPlan, ReadVersion, ShardReads
from statefleet.reads.sources import FleetSource
from store_actors.messages.requests import ReadProjection
from tests.simulation.beside import Bystander
from tests.simulation.clock import SimulatedThreads
from tests.simulation.scheduler import Violation
from tests.simulation.workload import AggregationWorkload, Groups, compare, groups_of

#: How far behind a read may be where processes are killed and frozen, in seconds: what a store actor, and a coordinator, that were
#: replaced without noticing may be.
_BEHIND_S = 2.5
#: For how many moments a task that was sent a scan waits until it is scanned, at most.
_LATER = 120


class Reader:
    """Looks all keys up a few times, or scans, and follows what changes.

    Parameters
    ----------
    world
        Makes clients of the coordinator.
    """

    def __init__(self, world: Any, state: str) -> None:
        self._world, self._state = world, state
        self.name = ""
        #: Shards and version that changes were followed to, and what these came to.
        self._followed: tuple[ReadView, dict[int, Groups]] | None = None

    def _reads(self) -> ShardReads:
        """As a process of its own has them."""
        threads = SimulatedThreads(self._world.scheduler, self._world.clock)
        runtime = Runtime(clock=self._world.clock, threads=threads)
        source = FleetSource(self._world.new_coordinator_client(), self._world.actors, runtime)
        return ShardReads(source, self._state, runtime, threads.pool(1, "scan"))

    def read(self, bystander: Bystander) -> None:
        """Read a few times, as a process of its own."""
        self.name, reads = bystander.name, self._reads()
        for _ in range(8):
            self._read(reads)

    def _read(self, reads: ShardReads) -> None:
        world = self._world
        workload: AggregationWorkload = world.workload
        faults = world.fault_profile
        behind_s = _BEHIND_S if faults.process_faults or faults.stops_at_records else 0.0
        oldest = world.finished_by(world.clock.elapsed_s() - behind_s)

        def plan(view: ReadView) -> KeyPlan:
            schema = view.metadata.schema
            keys = pa.Table.from_batches([workload.all_keys(schema)])
            return KeyPlan(DEFAULT_STORE, _form(view), dict.fromkeys(view.written, keys))

        view, _, looked_up = reads.find(ReadVersion(), plan)
        self._check(view, {shard: groups_of(result.rows) for shard, result in looked_up.items()}, "looked up")
        if view.version > world.readable_versions():
            raise Violation(f"{self.name}: version {view.version} was read, and Spark has not finished its batch")
        if view.version < oldest and not world.was_begun_again(view.version):
            raise Violation(f"{self.name}: version {view.version} was read, and {oldest} was finished long before")
        world.scheduler.fault(self.name, "read")
        self._check(view, self._scanned(reads, view), "scanned")
        self._follow(reads, view)
        if world.rescales:
            self._scan_later(view)

    def _scanned(self, reads: ShardReads, view: ReadView) -> dict[int, Groups]:
        form = _form(view)
        scanned: dict[int, Groups] = {}
        for shard in view.written:
            pieces = list(reads.scan(view, ReadVersion(), DEFAULT_STORE, form, shard, None))
            scanned[shard] = {key: row for piece in pieces for key, row in groups_of(piece).items()}
        return scanned

    def _scan_later(self, view: ReadView) -> None:
        """Send a scan to a task of another process, which runs it later, when the state may have other shards."""
        scheduler = self._world.scheduler
        until = scheduler.now + self._world.later_steps(_LATER)
        scheduler.pause(wake=lambda: scheduler.now >= until)
        reads = self._reads()
        again = reads.view(ReadVersion.to(view))
        if len(again.versions) != len(view.versions):
            raise Violation(
                f"{self.name}: {len(view.versions)} shards were to be scanned, and there are {len(again.versions)}"
            )
        if again.id.first_partition != reads.view(ReadVersion(view.version)).id.first_partition:
            scheduler.fault(self.name, "scanned_by_former_shards")
        self._check(again, self._scanned(reads, again), "scanned later")

    def _follow(self, reads: ShardReads, view: ReadView) -> None:
        """Take what changed since the last time; from the start where the state has other shards."""
        if self._followed is None or self._followed[0].id.first_partition != view.id.first_partition:
            self._followed = view, self._scanned(reads, view)
            return
        before, rows = self._followed
        if view.version < before.version:
            return
        reads.view(ReadVersion(before.version, lineage=before.lineage))
        form = _form(view)
        for shard in view.written:
            for piece in reads.scan(view, ReadVersion(), DEFAULT_STORE, form, shard, None, before.version):
                groups = rows.setdefault(shard, {})
                for number, (kind, version) in enumerate(
                    zip(piece["_change_type"].to_pylist(), piece["_commit_version"].to_pylist(), strict=True)
                ):
                    if not before.version < version <= view.version:
                        raise Violation(f"{self.name}: a change of version {version} between {before.id} and {view.id}")
                    for key, row in groups_of(piece.slice(number, 1)).items():
                        groups.pop(key, None)
                        if kind == "upsert":
                            groups[key] = row
        self._followed = view, rows
        self._check(view, rows, "followed")

    def _check(self, view: ReadView, by_shard: dict[int, Groups], how: str) -> None:
        for shard, groups in by_shard.items():
            subject = f"{self.name}: version {view.version} of shard {shard} as {how}"
            compare(subject, groups, self._world.workload.rows_at(view.version, view.partitions[shard]))


def _form(view: ReadView) -> bytes:
    return ReadProjection(view.metadata.schema).encoded()

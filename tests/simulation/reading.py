"""Whoever reads the state while batches go on: each read is one finished version, and not one of the past."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
from ray.exceptions import RayError

from coordinator.errors import StateStoreError
from coordinator.model import DEFAULT_STORE
from coordinator.reading import ReadView
from coordinator.surroundings import Surroundings
from store_actors.live.shard_reads import Pinned, ShardReads
from store_actors.live.sources import FleetSource
from store_actors.messages import ReadForm
from store_actors.schema import StateSchema
from tests.simulation.clock import SimulatedThreads
from tests.simulation.scheduler import Party, Violation
from tests.simulation.workload import AggregationWorkload, Groups, compare, groups_of

__all__ = ["Reader"]

#: How far behind a read may be where processes are killed and frozen, in seconds: what a store actor, and a coordinator, that were
#: replaced without noticing may be.
_BEHIND_S = 2.5


class Reader(Party):
    """Looks all keys up a few times, or scans.

    Parameters
    ----------
    world
        Makes clients of the coordinator.
    """

    def __init__(self, world: Any, name: str, state: str) -> None:
        super().__init__(name, world.nodes[0])
        self._world, self._state = world, state
        self.is_over = False
        world.scheduler.spawn(self, self._run)

    def _run(self) -> None:
        scheduler = self._world.scheduler
        try:
            source = FleetSource(self._world.new_coordinator_client(), self._world.actors)
            surroundings = Surroundings(clock=self._world.clock, threads=SimulatedThreads(scheduler, self._world.clock))
            reads = ShardReads(source, self._state, surroundings, surroundings.threads.pool(1, "scan"))
            for _ in range(8):
                self._read(reads)
        except StateStoreError as error:
            scheduler.log(self.name, f"reads nothing: {type(error).__name__}")
        except RayError as error:
            raise Violation(f"{self.name}: an error that no caller can tell from others escaped: {error!r}") from error
        finally:
            self.is_over = True

    def _read(self, reads: ShardReads) -> None:
        world = self._world
        workload: AggregationWorkload = world.workload
        behind_s = _BEHIND_S if world.weather.strikes else 0.0
        oldest = world.finished_by(world.clock.elapsed_s() - behind_s)

        def plan(view: ReadView) -> tuple[str, bytes, dict[int, pa.Table]]:
            schema = StateSchema.from_json(view.metadata.schema)
            keys = pa.Table.from_batches([workload.all_keys(schema)])
            return DEFAULT_STORE, pickle.dumps(ReadForm(schema, is_keyed=False)), dict.fromkeys(view.written, keys)

        view, found = reads.find(Pinned(), plan)
        self._check(view, {shard: groups_of(one.rows) for shard, one in found.items()}, "looked up")
        if view.version < oldest:
            raise Violation(f"{self.name}: version {view.version} was read, and {oldest} was finished long before")
        world.scheduler.fault(self.name, "read")
        form = plan(view)[1]
        scanned: dict[int, Groups] = {}
        for shard in found:
            pieces = list(reads.scan(view, Pinned(), DEFAULT_STORE, form, shard, None))
            scanned[shard] = {key: row for piece in pieces for key, row in groups_of(piece).items()}
        self._check(view, scanned, "scanned")

    def _check(self, view: ReadView, found: dict[int, Groups], how: str) -> None:
        states = self._world.workload.states
        for shard, groups in found.items():
            compare(
                f"{self.name}: version {view.version} of shard {shard} as {how}", groups, states[shard][view.version]
            )

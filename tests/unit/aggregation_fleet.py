"""Operator shards that count strings, over one object store and a coordinator in this process."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from coordinator.ledger.state_ledger import LeaseGrant, Record, StateLedger
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.errors import StoreUnavailableError
from coordinator.model.identities import DEFAULT_STORE, ActorLocation, StateStoreId, StateStoreProviderId, TaskIdentity
from coordinator.model.load_plans import InstancePlans, LoadPlan, LoadPlans
from coordinator.model.schema import Accumulator, Field, StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.placement.lease_plans import stay_else_local
from store_actors.epochs.folding import Emitted, emitted_table
from store_actors.epochs.shard import Piece
from store_actors.messages.requests import ApplyRequest, ShardInput
from store_actors.serving.operator_shards import OperatorShards
from store_actors.serving.partitions import Partitions
from tests.memory_store import MemoryObjectStore
from tests.unit.ledger_harness import FakeFleetView

SCHEMA = StateSchema(
    keys=(Field("v", "string"),),
    inputs=(),
    accumulators=(Accumulator(AccumulatorKind.COUNT_ROWS, (), (Field("n", "int64", False),)),),
    expiry_key=None,
    delay_ms=None,
    output_mode="update",
)


class LocalCoordinator:
    """A coordinator in this process: a real ledger writer over a real log, one decision at a time.

    Parameters
    ----------
    objects
        The object store.
    created
        Metadata of the state, which is created at every start; by default the state has none.
    log_options
        Options of the manifest log: ``checkpoint_interval`` and ``part_records``.
    """

    def __init__(self, objects: MemoryObjectStore, created: StateMetadata | None = None, **log_options: int) -> None:
        self._created, self._log_options = created, log_options
        self._loop = asyncio.new_event_loop()
        self._guard = ThreadPoolExecutor(1)
        self._objects = objects
        self.restart()
        self.lose_answers = 0
        self.is_elsewhere = False
        #: Metadata of the query that asks, if leases record its schema.
        self.queried: StateMetadata | None = None
        #: Calls so far by name, and the instances that were reported with the ids to check.
        self.calls: Counter[str] = Counter()
        self.reported: list[tuple[StateStoreProviderId, tuple[StateStoreProviderId, ...]]] = []
        self.stale: set[StateStoreProviderId] = set()

    def restart(self) -> None:
        """Replace the coordinator by another one, which reads the log."""
        self._writer = LedgerWriter(ManifestLog(self._objects, "s", "writer", **self._log_options))
        self._do(self._writer.open())
        if self._created is not None:
            self._do(self._writer.create_metadata(self._created))

    def _do(self, coroutine: Any) -> Any:
        return self._guard.submit(self._loop.run_until_complete, coroutine).result()

    def decide(self, decision: Callable[[StateLedger], Any]) -> Any:
        """Return the result of a decision, once the log has its records."""
        return self._do(self._writer.decide(decision))

    def read(self, look: Callable[[StateLedger], Any]) -> Any:
        return self._do(self._writer.read(look))

    def lease(self, task: TaskIdentity, local: str, lost: frozenset[str] = frozenset()) -> LeaseGrant:
        location = ActorLocation(local, local, "node", "host", 1)

        def decide(ledger: StateLedger) -> tuple[list[Record], LeaseGrant]:
            records, grant = ledger.decide_lease(task, location, FakeFleetView(lost), stay_else_local)
            if self.queried is not None and self._created is not None:
                records = [*records, *ledger.decide_schema(task, self._created, self.queried)]
            return records, grant

        return self.decide(decide)

    def commit_all(self, state_name: str, entries: Sequence[CommitEntry]) -> Sequence[CommitEntry]:
        self.calls["commit_all"] += 1
        accepted: Sequence[CommitEntry] = self.decide(lambda ledger: ledger.decide_commits(entries))
        if self.lose_answers:
            self.lose_answers -= 1
            raise StoreUnavailableError("the answer was lost")
        return accepted

    def former(self, entries: Sequence[CommitEntry]) -> None:
        """Accept commits as a previous coordinator that received them first."""
        self.decide(lambda ledger: ledger.decide_commits(entries))

    def load_plans(self, state_name: str, partition_id: int, version: int, store_names: Sequence[str]) -> LoadPlans:
        self.calls["load_plans"] += 1
        return self.read(lambda ledger: ledger.load_plans(partition_id, version, store_names))

    def open_instance(
        self,
        provider_id: StateStoreProviderId,
        ids_to_check: Sequence[StateStoreProviderId],
        version: int,
        store_names: Sequence[str],
    ) -> InstancePlans:
        self.calls["open_instance"] += 1
        self.reported.append((provider_id, tuple(ids_to_check)))
        partition = provider_id.store_id.partition_id
        plans = self.read(lambda ledger: ledger.load_plans(partition, version, store_names))
        return InstancePlans(tuple(provider for provider in ids_to_check if provider in self.stale), plans)

    def plan(self, version: int, partition_id: int = 0) -> LoadPlan:
        """Return how the only store of a partition is loaded at a version."""
        loading: LoadPlans = self.read(lambda ledger: ledger.load_plans(partition_id, version))
        return loading.plans[DEFAULT_STORE]

    def add_snapshot(self, state_name: str, snapshot: SnapshotEntry) -> bool:
        return self.decide(lambda ledger: ledger.decide_snapshot(snapshot))

    def truncate(self, keep: int) -> dict[int, int]:
        return self.decide(lambda ledger: ledger.decide_truncation(keep))

    def referenced(self) -> set[str]:
        return self.read(lambda ledger: ledger.referenced_files())

    def reassigned(self, state_name: str, store_ids: Sequence[StateStoreId]) -> set[StateStoreId]:
        self.calls["reassigned"] += 1
        return set(store_ids) if self.is_elsewhere else set()


class AggregationFleet:
    """Stores over one object store; an empty one by default."""

    def __init__(self, objects: MemoryObjectStore | None = None) -> None:
        self.objects = objects or MemoryObjectStore()
        self.coordinator = LocalCoordinator(self.objects)
        self.store = self.new_store()

    def new_store(self) -> OperatorShards:
        return OperatorShards(Partitions(self.objects, self.coordinator))

    def request(
        self,
        batch: int,
        run: str = "run-1",
        schema: StateSchema = SCHEMA,
        *,
        local: str = "a",
        lost: str = "",
        shard: int = 0,
    ) -> ApplyRequest:
        task = TaskIdentity("s", "query", run, batch, shard, 0, "executor")
        grant = self.coordinator.lease(task, local, frozenset([lost]))
        return ApplyRequest(task, grant.lease, grant.base_version, schema, grant.watermarks)

    def apply(
        self, batch: int, values: str, run: str = "run-1", schema: StateSchema = SCHEMA, *, shard: int = 0
    ) -> dict[str, int]:
        return counts(self.store.apply(self.request(batch, run, schema, shard=shard), rows(values))[0])

    def deltas(self) -> list[str]:
        return [info.path for info in self.objects.list("") if info.path.endswith(".delta")]


def rows(values: str) -> ShardInput:
    return ShardInput.of_raw(SCHEMA, pa.record_batch({"v": pa.array(list(values), pa.string())}))


def counts(table: pa.Table) -> dict[str, int]:
    return {row["v"]: row["n"] for row in table.to_pylist()}


def filled(batches: int, snapshots: tuple[int, ...] = ()) -> AggregationFleet:
    """A fleet whose only shard has counted one "a" a batch, with snapshots after some of them."""
    fleet = AggregationFleet()
    for batch in range(batches):
        fleet.apply(batch, "a" + "b" * (batch == 0))
        if batch + 1 in snapshots:
            fleet.store.partitions.maintain(1)
    return fleet


class Link:
    """The end of a task's connection in a store actor, as a run has it."""

    def __init__(self) -> None:
        self.answered = 0
        self.results: list[dict[str, int]] = []
        self.ended: list[int] = []
        self.errors: list[BaseException] = []
        self.fail = self.errors.append
        self.end_epoch = self.ended.append

    def answer(self, rows: int) -> None:
        self.answered += rows

    def emit(self, epoch: int, results: Emitted, piece: Piece | None) -> None:
        self.results.append(counts(emitted_table(results)))
        if piece is not None:
            piece.task.answer(piece.rows.rows_read)

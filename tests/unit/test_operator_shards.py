"""The store's half of the commit protocol, with a real coordinator ledger and an in-memory object store; no Ray."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.errors import (
    CommitUnknownError,
    CorruptStateError,
    FencedError,
    StateMismatchError,
    StoreUnavailableError,
)
from coordinator.model.identities import DEFAULT_STORE, ActorLocation, StateStoreId, StateStoreProviderId, TaskIdentity
from coordinator.model.load_plans import InstancePlans, LoadPlan, LoadPlans
from coordinator.model.schema import Accumulator, AccumulatorKind, Field, StateSchema
from coordinator.placement.policy import StayElseLocal
from coordinator.storage.memory import MemoryObjectStore
from store_actors.messages import ApplyRequest, ShardInput
from store_actors.serving.operator_shards import OperatorShards
from tests.code_blocks import blocks_of
from tests.unit.test_coordinator import Living

SCHEMA = StateSchema(
    keys=(Field("v", "string"),),
    inputs=(),
    accumulators=(Accumulator(AccumulatorKind.COUNT_ROWS, (), (Field("n", "int64", False),)),),
    expiry_key=None,
    delay_ms=None,
    output_mode="update",
)


class Coordinator:
    """A coordinator in this process: a real keeper over a real log, one decision at a time."""

    def __init__(self, objects: MemoryObjectStore) -> None:
        self._loop = asyncio.new_event_loop()
        self._guard = ThreadPoolExecutor(1)
        self._objects = objects
        self.restart()
        self.lose_answers = 0
        self.is_elsewhere = False
        #: Calls so far, and who reported what.
        self.calls: Counter[str] = Counter()
        self.reported: list[tuple[StateStoreProviderId, tuple[StateStoreProviderId, ...]]] = []
        self.stale: set[StateStoreProviderId] = set()

    def restart(self) -> None:
        """Another life of it, which reads the log."""
        self._keeper = LedgerWriter(ManifestLog(self._objects, "s", "writer"))
        self._do(self._keeper.open())

    def _do(self, coroutine: Any) -> Any:
        return self._guard.submit(self._loop.run_until_complete, coroutine).result()

    def lease(self, task: TaskIdentity, local: str, lost: frozenset[str] = frozenset()) -> LeaseGrant:
        where = ActorLocation(local, local, "node", "host", 1)
        return self._do(
            self._keeper.submit(lambda ledger: ledger.decide_lease(task, where, Living(lost), StayElseLocal()))
        )

    def commit_all(self, state_name: str, entries: Sequence[CommitEntry]) -> Sequence[CommitEntry]:
        self.calls["commit_all"] += 1
        counted: Sequence[CommitEntry] = self._do(self._keeper.submit(lambda ledger: ledger.decide_commits(entries)))
        if self.lose_answers:
            self.lose_answers -= 1
            raise StoreUnavailableError("the answer was lost")
        return counted

    def former(self, entries: Sequence[CommitEntry]) -> None:
        """A former coordinator, which was asked first, has a commit counted after all."""
        self._do(self._keeper.submit(lambda ledger: ledger.decide_commits(entries)))

    def load_plans(self, state_name: str, partition_id: int, version: int, store_names: Sequence[str]) -> LoadPlans:
        self.calls["load_plans"] += 1
        return self._do(self._keeper.submit(lambda ledger: ([], ledger.load_plans(partition_id, version, store_names))))

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
        plans = self._do(self._keeper.submit(lambda ledger: ([], ledger.load_plans(partition, version, store_names))))
        return InstancePlans(tuple(one for one in ids_to_check if one in self.stale), plans)

    def plan(self, version: int, partition_id: int = 0) -> LoadPlan:
        """What makes a version of a partition's one store."""
        decided = self._keeper.submit(lambda ledger: ([], ledger.load_plans(partition_id, version)))
        return self._do(decided).plans[DEFAULT_STORE]

    def add_snapshot(self, state_name: str, snapshot: SnapshotEntry) -> bool:
        return self._do(self._keeper.submit(lambda ledger: ledger.decide_snapshot(snapshot)))

    def truncate(self, keep: int) -> dict[int, int]:
        return self._do(self._keeper.submit(lambda ledger: ledger.decide_truncation(keep)))

    def referenced(self) -> set[str]:
        return self._do(self._keeper.submit(lambda ledger: ([], ledger.referenced_files())))

    def elsewhere(self, state_name: str, store_ids: Sequence[StateStoreId]) -> set[StateStoreId]:
        self.calls["elsewhere"] += 1
        return set(store_ids) if self.is_elsewhere else set()


class Fleet:
    """Stores over one object store."""

    def __init__(self) -> None:
        self.objects = MemoryObjectStore()
        self.coordinator = Coordinator(self.objects)
        self.store = self.new_store()

    def new_store(self) -> OperatorShards:
        return OperatorShards(self.objects, self.coordinator)

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


def test_batches_follow_each_other() -> None:
    fleet = Fleet()
    assert fleet.apply(0, "aab") == {"a": 2, "b": 1}
    assert fleet.apply(1, "bc") == {"b": 2, "c": 1}
    assert fleet.apply(2, "") == {}


def test_a_repeated_request_gets_the_recorded_rows_and_applies_nothing() -> None:
    fleet = Fleet()
    first = fleet.apply(0, "aab")
    assert fleet.apply(0, "aab") == first
    assert fleet.store.metrics.replayed_answers == 1
    assert len(fleet.deltas()) == 1
    assert fleet.apply(1, "a") == {"a": 3}


def test_a_new_run_replays_in_memory_and_reads_nothing() -> None:
    fleet = Fleet()
    fleet.apply(0, "a")
    fleet.apply(1, "a")
    assert fleet.apply(1, "aa", "run-2") == {"a": 3}
    assert fleet.apply(2, "b", "run-2") == {"b": 1}
    assert (fleet.store.metrics.bytes_loaded, fleet.store.metrics.rollbacks) == (0, 1)


def test_a_new_process_loads_from_the_deltas() -> None:
    fleet = Fleet()
    for batch in range(5):
        fleet.apply(batch, "ab"[: batch % 2 + 1])
    fleet.store = fleet.new_store()
    assert fleet.apply(5, "ab") == {"a": 6, "b": 3}
    assert fleet.store.metrics.deltas_loaded == 5


def test_a_run_that_starts_in_the_past_is_refused() -> None:
    fleet = Fleet()
    for batch in range(6):
        fleet.apply(batch, "a")
    with pytest.raises(StateMismatchError, match="ahead of the checkpoint"):
        fleet.apply(4, "b", "run-2")
    assert fleet.apply(5, "b", "run-3") == {"b": 1}
    assert fleet.apply(6, "a", "run-3") == {"a": 6}


def test_two_stores_racing_for_a_version_make_one_entry_and_equal_answers() -> None:
    fleet = Fleet()
    fleet.apply(0, "a")
    request = fleet.request(1)
    stores = [fleet.store, fleet.new_store(), fleet.new_store()]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda store: counts(store.apply(request, rows("ab"))[0]), stores))
    assert answers == [{"a": 2, "b": 1}] * 3
    assert [entry.version for entry in fleet.coordinator.plan(sys.maxsize).deltas] == [1, 2]
    assert len(fleet.deltas()) == 2


def test_an_owner_that_was_replaced_counts_nothing_and_leaves_no_file() -> None:
    fleet = Fleet()
    old = fleet.request(0, local="a")
    new = fleet.request(0, local="b", lost="a")
    successor = fleet.new_store()
    assert counts(successor.apply(new, rows("ab"))[0]) == {"a": 1, "b": 1}
    with pytest.raises(FencedError):
        fleet.store.apply(old, rows("ab"))
    assert len(fleet.deltas()) == 1


def test_a_commit_whose_answer_was_lost_is_adopted_at_the_next_call() -> None:
    fleet = Fleet()
    fleet.apply(0, "a")
    fleet.coordinator.lose_answers = 1
    with pytest.raises(StoreUnavailableError):
        fleet.apply(1, "ab")
    assert fleet.apply(1, "ab") == {"a": 2, "b": 1}
    assert fleet.store.metrics.adopted_commits == 1
    assert fleet.apply(2, "a") == {"a": 3}


@pytest.mark.parametrize("damage", [None, b"", b"not arrow"])
def test_a_delta_that_cannot_be_read_is_named(damage: bytes | None) -> None:
    fleet = Fleet()
    fleet.apply(0, "a")
    (path,) = fleet.deltas()
    fleet.objects.delete(path) if damage is None else fleet.objects.put(path, damage)
    fleet.store = fleet.new_store()
    with pytest.raises(CorruptStateError, match=path):
        fleet.apply(1, "a")


def test_complete_mode_gives_every_group_also_to_a_retry() -> None:
    schema = StateSchema(SCHEMA.keys, (), SCHEMA.accumulators, None, None, "complete")
    fleet = Fleet()
    fleet.apply(0, "ab", schema=schema)
    assert fleet.apply(1, "a", schema=schema) == {"a": 2, "b": 1}
    assert fleet.apply(1, "a", schema=schema) == {"a": 2, "b": 1}


def test_the_format_document_reads_a_version_without_this_package() -> None:
    """Runs the code in docs/format.md over real deltas."""
    import io

    fleet = Fleet()
    for batch, values in enumerate(("aab", "bc", "a")):
        fleet.apply(batch, values)
    namespace: dict[str, Any] = {}
    for block in blocks_of(
        "tests/unit/test_operator_shards.py::test_the_format_document_reads_a_version_without_this_package"
    ):
        exec(compile(block.code, str(block), "exec"), namespace)
    files = [io.BytesIO(fleet.objects.get(entry.file)) for entry in fleet.coordinator.plan(sys.maxsize).deltas]
    read = namespace["read_version"](files, ["v"])
    assert {row["v"]: row["n"] for row in read} == {"a": 3, "b": 2, "c": 1}
    for file in files:
        file.seek(0)
        told = namespace["spark_schema"](file)
        assert told.simpleString() == "struct<v:string,n:bigint>"
        assert [field.nullable for field in told] == [True, False]


class FailsOnce(MemoryObjectStore):
    """Refuses the first delta, after the shard was changed."""

    def __init__(self) -> None:
        super().__init__()
        self.failing = False

    def put(self, path: str, data: bytes) -> None:
        if self.failing:
            self.failing = False
            raise MemoryError("on purpose")
        super().put(path, data)


def test_a_failure_after_the_shard_changed_is_forgotten_and_the_retry_counts_once() -> None:
    fleet = Fleet()
    fleet.objects = FailsOnce()
    fleet.coordinator = Coordinator(fleet.objects)
    fleet.store = fleet.new_store()
    fleet.apply(0, "a")
    fleet.objects.failing = True
    with pytest.raises(MemoryError):
        fleet.apply(1, "a")
    assert fleet.apply(1, "a") == {"a": 2}
    fleet.store = fleet.new_store()
    assert fleet.apply(2, "a") == {"a": 3}


def test_a_failure_inside_the_shard_leaves_no_half_changed_state() -> None:
    fleet = Fleet()
    fleet.apply(0, "a")
    request = fleet.request(1)
    with pytest.raises(KeyError):
        fleet.store.apply(request, ShardInput.of_raw(SCHEMA, pa.record_batch({"other": ["a"]})))
    assert fleet.apply(1, "a") == {"a": 2}


def test_maintenance_does_not_wait_for_a_shard_that_is_elsewhere_and_hangs() -> None:
    fleet = Fleet()
    fleet.apply(0, "a")
    fleet.coordinator.is_elsewhere = True
    ((_, held),) = fleet.store._held.items()
    with held.lock, ThreadPoolExecutor(1) as other:
        other.submit(fleet.store.maintain, 99).result(timeout=10)
    assert fleet.store.metrics.shards_unloaded == 0
    fleet.store.maintain(99)
    assert fleet.store.metrics.shards_unloaded == 1


def test_a_commit_without_a_clear_answer_keeps_its_file_for_it_may_count_all_the_same() -> None:
    fleet = Fleet()
    fleet.apply(0, "a")
    commit_all = fleet.coordinator.commit_all

    def unanswered(state_name: str, entries: Sequence[CommitEntry]) -> Sequence[CommitEntry]:
        fleet.coordinator.former(entries)
        raise CommitUnknownError("no clear answer")

    fleet.coordinator.commit_all = unanswered  # type: ignore[method-assign]
    with pytest.raises(CommitUnknownError, match="no clear answer"):
        fleet.apply(1, "a")
    fleet.coordinator.commit_all = commit_all  # type: ignore[method-assign]
    assert fleet.apply(2, "a") == {"a": 3}
    assert len(fleet.deltas()) == 3

"""A user's program with state, from its task's identity and rows to its commit: over keyed stores in this process, without Spark."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import types as T
from pyspark.sql.streaming.state import GroupStateTimeout

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.errors import StoreUnavailableError
from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import Field, OperatorKind, StateSchema
from coordinator.model.state_metadata import StateMetadata
from spark_jobs.functions import user_state_task
from spark_jobs.functions.groups import StateColumns
from spark_jobs.functions.state_batch import StateBatch
from spark_jobs.functions.user_program import EVENT_TIME_FIELD
from spark_jobs.functions.user_state_task import (
    ArrowCalls,
    GroupStateProgram,
    GroupView,
    UserStateTask,
)
from spark_jobs.plan.keys import KeyTree
from spark_jobs.plan.spark_version import SPARK
from spark_jobs.worker.exchange import Received
from spark_jobs.worker.process import task_identity
from store_actors.client.operator_task import BatchHeader
from store_actors.client.state_store import StateStore, default_store
from store_actors.messages.requests import OpenRequest, ShardInput, StoreSpec
from tests.unit.keyed_fleet import KeyedFleet, ask

METADATA = StateMetadata("clicks", "", 4, "update")
HEADER = BatchHeader("query", "run", 7, 2, late_ms=0, evict_ms=0, time_ms=11, former_time_ms=10)


@pytest.fixture
def context() -> Iterator[TaskContext]:
    """The context of this process, as a Python worker sets it for each task."""
    task_context = TaskContext._getOrCreate()
    # Properties that user code may set in the middle of a batch.
    task_context._localProperties = {"streaming.sql.batchId": "1", "spark.jobGroup.id": "a group of the user's own"}
    yield task_context
    TaskContext._setTaskContext(None)


def identity_of(context: TaskContext, stage_attempt: tuple[int, int], task_attempt_id: int) -> TaskIdentity:
    """Return the identity of a task, given its partition and attempt number in its stage, and its id."""
    context._partitionId, context._attemptNumber = stage_attempt
    context._taskAttemptId = task_attempt_id
    return task_identity(METADATA, HEADER)


def test_a_later_attempt_is_larger_also_in_a_stage_that_spark_repeats(context: TaskContext) -> None:
    first = identity_of(context, (2, 0), 40)
    retried = identity_of(context, (2, 1), 44)
    of_the_repeated_stage = identity_of(context, (2, 0), 51)
    assert first.attempt < retried.attempt < of_the_repeated_stage.attempt
    assert {(identity.batch_id, identity.partition_id) for identity in (first, retried, of_the_repeated_stage)} == {
        (7, 2)
    }


def test_a_job_group_of_the_users_own_changes_neither_run_nor_batch(context: TaskContext) -> None:
    task = identity_of(context, (0, 0), 1)
    assert (task.query_id, task.run_id, task.batch_id) == ("query", "run", 7)
    assert (task.batch_time_ms, task.former_time_ms) == (11, 10)


KEYS = (Field("k", "string"),)
SCHEMA = StateSchema(
    keys=KEYS,
    inputs=(Field("v", "int64"), EVENT_TIME_FIELD),
    accumulators=(),
    expiry_key=None,
    delay_ms=0,
    output_mode="update",
    operator=OperatorKind.GROUP_STATE,
)
OUTPUT = pa.schema([("k", pa.string()), ("n", pa.int64())])
VIEW = GroupView((("k", KeyTree("k")),), (("v", "v"),))
COLUMNS = StateColumns(SPARK.arrow_schema(T.StructType([T.StructField("n", T.LongType())])))


def sums(keys: pa.Table, rows: pa.Table, state: StateBatch) -> pa.Table:
    """Add the rows of each key to its state, and emit it."""
    before = state.values["n"].to_numpy()
    totals = [int(n) if exists else 0 for n, exists in zip(before, state.exists, strict=True)]
    for index, value in zip(rows["key_index"].to_pylist(), rows["v"].to_pylist(), strict=True):
        totals[index] += value
    new = pa.table({"n": pa.array(totals, pa.int64())})
    state.update(new)
    return pa.table({"k": keys["k"], "n": new["n"]})


class FakeClient:
    """A client of the fleet whose store actor is in this process.

    Attributes
    ----------
    losses
        Number of times that the store actor is lost after it has committed, before its answer.
    """

    def __init__(self, losses: int = 0) -> None:
        self.fleet = KeyedFleet()
        self.losses = losses

    def open_granted(
        self, task: TaskIdentity, metadata: StateMetadata, stores: tuple[StoreSpec, ...]
    ) -> tuple[StateStore, LeaseGrant]:
        grant = self.fleet.coordinator.lease(task, "a")
        stores_of_actor = self.fleet.stores
        session, base = stores_of_actor.open_update(OpenRequest(task, grant.lease, grant.base_version, stores))

        def ask_actor(method: str, *args: Any) -> Any:
            if stores_of_actor is self.fleet.stores:
                answer = ask(stores_of_actor, session, method, *args)
                if method != "commit_session" or not self.losses:
                    return answer
                self.losses -= 1
                self.fleet.stores = self.fleet.new_stores()
            raise StoreUnavailableError("the store actor was lost")

        return StateStore(ask_actor, default_store(grant.lease.store_id, stores), base), grant


STORES = (COLUMNS.group_store(SCHEMA.keys),)
FUNCTION = GroupStateProgram(ArrowCalls(sums, OUTPUT), VIEW, COLUMNS, STORES, GroupStateTimeout.NoTimeout, True)


class Query:
    """A program on one partition, batch by batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, client: FakeClient, *, drops_late_rows: bool = False) -> None:
        metadata = StateMetadata("s", "query", 1, "update", SCHEMA)
        self.task = UserStateTask(
            program=FUNCTION,
            drops_late_rows=drops_late_rows,
            due_per_ms=None,
            schema=SCHEMA,
            metadata=metadata,
        )
        self.batch_id = 0
        monkeypatch.setattr(user_state_task, "worker_client", lambda header: nullcontext(client))
        monkeypatch.setattr(user_state_task, "task_identity", self._identity)

    def _identity(self, metadata: StateMetadata, header: BatchHeader) -> TaskIdentity:
        return TaskIdentity("s", "query", "run-1", header.batch_id, 0, 0, "executor", batch_time_ms=header.time_ms)

    def batch(self, *rows: tuple[str, int, int], late_ms: int = 0) -> list[tuple[str, int]]:
        """Return what a batch of rows (key, value, event time in milliseconds) emits."""
        keys, values, times = zip(*rows, strict=True)
        columns = [pa.array(keys), pa.array(values), pa.array([1000 * time for time in times])]
        table = pa.record_batch(columns, schema=SCHEMA.raw_schema())
        header = BatchHeader("query", "run-1", self.batch_id, 0, late_ms, late_ms, 1000 + self.batch_id)
        self.batch_id += 1
        emitted = self.task._repeated(Received(ShardInput.of_raw(SCHEMA, table), header))
        return sorted((row["k"], row["n"]) for part in emitted for row in part.to_pylist())


@pytest.mark.parametrize(("drops", "expected"), [(True, [("b", 2)]), (False, [("a", 1), ("b", 2)])])
def test_late_rows_are_dropped_where_the_task_says_so(
    monkeypatch: pytest.MonkeyPatch, drops: bool, expected: list[tuple[str, int]]
) -> None:
    client = FakeClient()
    query = Query(monkeypatch, client, drops_late_rows=drops)
    assert query.batch(("a", 1, 5), ("b", 2, 11), late_ms=10) == expected
    (partition,) = [partition for _, partition in client.fleet.stores.partitions.cache.items()]
    (entry,) = partition.lineage.newest
    assert (entry.rows_in, entry.rows_late) == (2, 2 - len(expected))


def test_a_batch_whose_store_actor_was_lost_is_done_again_and_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(losses=2)
    query = Query(monkeypatch, client)
    assert query.batch(("a", 1, 5)) == [("a", 1)]
    assert query.batch(("a", 1, 5)) == [("a", 2)]


def test_a_store_actor_that_is_lost_in_each_attempt_fails_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    query = Query(monkeypatch, FakeClient(losses=3))
    with pytest.raises(StoreUnavailableError):
        query.batch(("a", 1, 5))


def test_a_task_is_pickled_with_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Query(monkeypatch, FakeClient()).task
    assert pickle.loads(pickle.dumps(task)) == replace(task)

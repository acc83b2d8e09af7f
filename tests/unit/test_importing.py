"""Imported state: the first version of a shard with any number, which cannot be used before all shards have it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pytest
from msgspec import structs
from pyspark import TaskContext

from coordinator.ledger.read_views import WantedView, finished, read_view
from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.commits import CommitEntry
from coordinator.model.errors import InvalidRequestError, StateMismatchError
from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import Accumulator, Field, StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.watermarks import Watermarks
from spark_jobs.worker import import_task
from spark_jobs.worker.import_task import PRESENT_COLUMN, SHARD_COLUMN, ImportTask, as_state
from store_actors.messages.requests import ApplyRequest
from store_actors.operators.join_schema import join_schema
from tests.unit.aggregation_fleet import SCHEMA, AggregationFleet, counts, rows
from tests.unit.ledger_harness import SHARDS, LedgerQuery, actor, entry

STATE = pa.table({"v": ["a", "b"], "n": [5, 7]}, schema=SCHEMA.row_schema())


def imported(fleet: AggregationFleet, table: pa.Table = STATE, *, batch: int = 6, run: str = "import-1") -> CommitEntry:
    """Import a shard as the result of a batch."""
    return imported_by(fleet, task_of(batch, run), table)


def task_of(batch: int, run: str) -> TaskIdentity:
    return TaskIdentity("s", "query", run, batch, 0, 0, "executor", batch_time_ms=60, is_import=True)


def imported_by(fleet: AggregationFleet, task: TaskIdentity, table: pa.Table) -> CommitEntry:
    grant = fleet.coordinator.lease(task, "a")
    request = ApplyRequest(task, grant.lease, grant.base_version, SCHEMA, Watermarks(40, 40))
    return fleet.store.import_rows(request, table)


def test_an_import_is_repeated_by_its_own_run_and_by_another_one() -> None:
    fleet = AggregationFleet()
    first = imported(fleet)
    assert imported(fleet) == first
    by_other_run = imported(fleet, run="import-2")
    assert by_other_run.attempt_id != first.attempt_id
    assert [delta.attempt_id for delta in fleet.coordinator.plan(sys.maxsize).deltas] == [by_other_run.attempt_id]
    assert fleet.apply(7, "a", "run-1") == {"a": 6}


class StoreClient:
    """A worker's client of a store in this process."""

    def __init__(self, fleet: AggregationFleet) -> None:
        self._fleet = fleet

    def import_rows(
        self,
        task: TaskIdentity,
        metadata: StateMetadata,
        schema: StateSchema,
        pieces: Iterable[pa.Table],
        at: Watermarks,
    ) -> None:
        assert (schema, at) == (SCHEMA, Watermarks(40, 40))
        imported_by(self._fleet, task, pa.concat_tables(pieces))


def test_a_task_reports_the_rows_it_had_and_not_those_of_an_attempt_that_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = AggregationFleet()
    monkeypatch.setattr(import_task, "worker_client", lambda store_actor: nullcontext(StoreClient(fleet)))
    monkeypatch.setattr(TaskContext, "_taskContext", TaskContext._getOrCreate())
    metadata = StateMetadata("s", "query", 1, "update", SCHEMA)
    batches = [
        pa.record_batch({SHARD_COLUMN: [0], PRESENT_COLUMN: [True], "v": [value], "n": [number]})
        for value, number in zip(*STATE.to_pydict().values(), strict=True)
    ]

    def task(run: str) -> ImportTask:
        here = [{"sockets": "/tmp/none-", "host": "nowhere", "actor": 0, "direct": None}]
        return ImportTask(SCHEMA, metadata, here, task_of(6, run), Watermarks(40, 40))

    # Spark ends what it sends a killed task's worker in the middle, and tries the task again. The first commit of a run counts.
    for attempt, (run, size, state_rows) in enumerate((("import-1", 1, 1), ("import-1", 2, 1), ("import-2", 2, 2))):
        TaskContext._getOrCreate()._taskAttemptId = attempt
        (report,) = task(run)(batches[:size])
        assert report.to_pylist() == [{"shard": 0, "rows": size}]
        assert fleet.coordinator.plan(sys.maxsize).deltas[-1].state_rows == state_rows
    assert fleet.apply(7, "a", "run-1") == {"a": 6}


def test_only_an_import_makes_a_first_version_of_any_number_and_only_a_first_one() -> None:
    fleet = AggregationFleet()
    with pytest.raises(StateMismatchError, match="the state has no version"):
        fleet.apply(6, "a")
    imported(fleet)
    assert fleet.apply(7, "b") == {"b": 8}
    with pytest.raises(StateMismatchError, match="ahead of the checkpoint"):
        imported(fleet, batch=5, run="import-2")
    with pytest.raises(InvalidRequestError, match="imported as its first version"):
        imported(fleet, batch=8, run="import-3")
    assert counts(fleet.store.apply(fleet.request(8, "run-2"), rows("a"))[0]) == {"a": 6}


class ImportQuery(LedgerQuery):
    """A query that imports batch 4 of three shards."""

    def imported(self, shards: list[int], run: str) -> None:
        for shard in shards:
            identity = structs.replace(self.task(4, shard, run), is_import=True)
            self.begin(identity)
            commit = entry(self.lease(identity, actor("a")), 5)
            self.commit(structs.replace(commit, batch_time_ms=identity.batch_time_ms, is_import=True))


def test_an_unfinished_import_is_used_by_no_query() -> None:
    query, created = ImportQuery(), StateMetadata("s", "query", SHARDS, "update")
    query.imported([0, 2], "import-1")
    for shard in range(SHARDS):
        with pytest.raises(StateMismatchError, match=r"missing=.*1"):
            query.begin(query.task(5, shard, "run-1"))
    with pytest.raises(StateMismatchError, match="belongs to another query"):
        query.ledger.check_query(structs.replace(query.task(0, 0, "run-2"), query_id="another"))
    assert finished(query.ledger, created) == 0
    query.imported([0, 1, 2], "import-2")
    query.run(5, [0, 1, 2], "run-1")


def test_there_is_no_version_before_the_one_that_was_imported() -> None:
    query, created = ImportQuery(), StateMetadata("s", "query", SHARDS, "update")
    query.imported([0, 1, 2], "import-1")
    view = read_view(query.ledger, created, 5, WantedView())
    assert view is not None
    assert (view.version, view.oldest) == (5, 5)
    with pytest.raises(InvalidRequestError, match="no such version"):
        read_view(query.ledger, created, 5, WantedView(4))


def test_rows_of_one_key_are_numbered_over_all_pieces() -> None:
    schema = join_schema(
        (Field("k0", "int64"),), (Field("l0", "string"),), (), {"join_type": "inner", "output": [["l0"], []]}
    )
    piece = pa.record_batch(
        {"k0": [1, 1], "__side": pa.array([0, 0], pa.int8()), "__matched": pa.nulls(2, pa.bool_()), "l0": ["x", "y"]}
    )
    rows = as_state(piece, schema, 3)
    assert rows.schema == schema.row_schema()
    assert rows.to_pylist() == [
        {"k0": 1, "__row": number, "__side": 0, "__matched": None, "l0": text} for number, text in ((3, "x"), (4, "y"))
    ]


def test_registers_that_spark_has_in_columns_are_words() -> None:
    registers = Accumulator(AccumulatorKind.DISTINCT_REGISTERS, ("v0",), (Field("a0_words", "words<2>", False),))
    schema = StateSchema((Field("k0", "int64"),), (), (registers,), None, None, "update")
    piece = pa.record_batch({"k0": [1, 2], "a0_words": [[1, -1], [0, 1 << 40]]})
    (first, second) = as_state(piece, schema, 0).column("a0_words").to_pylist()
    assert np.frombuffer(first, "<i8").tolist() == [1, -1]
    assert np.frombuffer(second, "<i8").tolist() == [0, 1 << 40]

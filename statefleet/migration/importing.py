"""Import of a state: rows in the columns of an operator's state become its first version, on all its shards or not at all."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.errors import InvalidRequestError, StateMismatchError, StoreUnavailableError
from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import OperatorKind, StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.watermarks import Watermarks
from coordinator.service.client import CoordinatorClient
from spark_jobs.functions.group_plan import GroupStatePlan
from spark_jobs.operators.aggregate import AggregatePlan
from spark_jobs.operators.join import JoinPlan
from spark_jobs.plan.catalyst import JOB_FAILURES
from spark_jobs.plan.event_time import operators_of, used_of
from spark_jobs.plan.logical import Plan, analysed
from spark_jobs.plan.operator_plan import RoutedOperator
from spark_jobs.plan.row_columns import ProjectedPlan
from spark_jobs.plan.stateful_exchange import check_reach, shard_routes
from spark_jobs.transform.plan import TransformPlan
from spark_jobs.transform.variables import processor_stores
from spark_jobs.worker.exchange import HASH_COLUMN
from spark_jobs.worker.import_task import IMPORTED_SCHEMA, PRESENT_COLUMN, SHARD_COLUMN, ImportTask, StoresImportTask
from statefleet.migration.aggregation import aggregation_rows, aggregations_as_run, without
from statefleet.migration.checkpoint import NewCheckpoint, SparkCheckpoint, SparkOperator
from statefleet.migration.join import join_rows
from statefleet.migration.key_rows import deduplication_rows, function_rows, limit_rows
from statefleet.migration.processor_state import processor_rows
from statefleet.migration.table import check_keys, table_rows


@dataclass(frozen=True)
class PlannedState:
    """The state of an operator of a query that was built in this process."""

    operator: RoutedOperator
    #: Metadata with which its first batch would create it.
    metadata: StateMetadata


@dataclass(frozen=True)
class Imported:
    """The result of an import.

    Attributes
    ----------
    checkpoint
        Checkpoint with which the query continues.
    batch_id
        Newest batch of the checkpoint; the next batch of the query has the next number.
    rows
        Number of rows of each state now, by its name.
    """

    checkpoint: str
    batch_id: int
    rows: Mapping[str, int]


class Importer:
    """Import of states into a fleet, of which it has the URI, and how the paths of its sockets begin.

    `planned` are the states of the operators that were built in this process, by name.
    """

    def __init__(
        self, coordinator: CoordinatorClient, uri: str, sockets: str, planned: Mapping[str, PlannedState]
    ) -> None:
        self._coordinator = coordinator
        self._uri, self._sockets = uri, sockets
        self._planned = planned

    def import_checkpoint(
        self,
        source: str,
        frame: DataFrame,
        checkpoint: str,
        operators: Mapping[str, int] | None,
        from_nothing: Sequence[str],
    ) -> Imported:
        """Import a checkpoint; see :meth:`Fleet.import_checkpoint <statefleet.fleet.Fleet.import_checkpoint>`."""
        planned = self._states_of(frame)
        spark = frame.sparkSession
        old = SparkCheckpoint.open(spark, source)
        new = NewCheckpoint.of(spark, checkpoint, f"{old.query_id} batch {old.batch_id}")
        states = _all_without(planned, from_nothing)
        numbers = _numbers(states, old, operators)
        names = [state.metadata.state_name for state in states]
        if new.is_whole:
            return Imported(new.folder.uri, old.batch_id, {name: self._rows_of(name, new) for name in names})
        self._check_new(states, new)
        # All frames are built before anything is written, so that a state that does not fit is an error here.
        spark_plans = {
            state.metadata.state_name: plan.analysed
            for state in states
            if isinstance(plan := state.operator.plan, AggregatePlan)
        }
        as_run = aggregations_as_run(analysed(frame), spark_plans)
        frames = [
            _rows(state, SparkOperator(spark, old, numbers[state.metadata.state_name]), frame, as_run)
            for state in states
        ]
        # Chained operators have watermarks of their own, which Spark passes with the next batch.
        watermarks = Watermarks(old.watermark_ms, old.watermark_ms) if len(states) == 1 else Watermarks()
        rows = self._write_all(states, frames, _task(new, old.batch_id, old.batch_time_ms), watermarks)
        old.check_unchanged()
        new.write_after(old)
        return Imported(new.folder.uri, old.batch_id, rows)

    def import_table(self, frame: DataFrame, table: DataFrame, checkpoint: str) -> Imported:
        """Import a table; see :meth:`Fleet.import_table <statefleet.fleet.Fleet.import_table>`."""
        states = self._states_of(frame)
        spark = frame.sparkSession
        if len(states) > 1 or table.isStreaming:
            raise InvalidRequestError(
                "a table is imported for a query with one stateful operator, and is no stream; nothing was written",
                states=[state.metadata.state_name for state in states],
                isStreaming=table.isStreaming,
            )
        (state,) = states
        name = state.metadata.state_name
        new = NewCheckpoint.of(spark, checkpoint, f"a table for {name}")
        if new.is_whole:
            return Imported(new.folder.uri, 0, {name: self._rows_of(name, new)})
        self._check_new(states, new)
        rows = table_rows(state.operator.plan, table)
        check_keys(rows, state.operator.schema.keys)
        time_ms = int(time.time() * 1000)
        counts = self._write_all(states, [rows], _task(new, 0, time_ms), Watermarks())
        new.write_first(time_ms, analysed(frame).streaming_sources)
        return Imported(new.folder.uri, 0, counts)

    def _write_all(
        self, states: Sequence[PlannedState], frames: Sequence[DataFrame], task: TaskIdentity, watermarks: Watermarks
    ) -> dict[str, int]:
        """Write rows as the first version of each state, and return their numbers by name."""
        try:
            counts = {
                state.metadata.state_name: self._write(state, rows, task, watermarks)
                for state, rows in zip(states, frames, strict=True)
            }
        finally:
            self._coordinator.deactivate_instances(task.run_id)
        # Of the commits that count: what Spark sends a killed task's worker ends as if there were no more.
        for name, count in counts.items():
            imported = self._newest_rows(name)
            if imported != count:
                raise StateMismatchError(
                    "the import has other rows than the state, as a task of it was killed in the middle; no query can use what there "
                    "is of the state, and there is no new checkpoint; import again with the same names",
                    state=name,
                    rows=count,
                    imported_rows=imported,
                )
        return counts

    def _states_of(self, frame: DataFrame) -> list[PlannedState]:
        """Return the states of the operators of a query, the last operator first, as Spark numbers its own."""
        # By its type: a stateful frame, which has no operator yet, passes for a DataFrame.
        operators = operators_of(analysed(frame)) if issubclass(type(frame), DataFrame) else []
        if not operators:
            raise InvalidRequestError(
                "the DataFrame has no stateful operator of a fleet; nothing was written; give the one that an operator gave, such as "
                "fleet.stateful(..).groupBy(..).agg(..)"
            )
        for operator in operators:
            if operator.uri != self._uri or operator.state not in self._planned:
                raise InvalidRequestError(
                    "the operator was not built by this fleet handle; build the query with the handle that imports its state",
                    state=operator.state,
                    fleet=operator.uri,
                )
        return [self._planned[operator.state] for operator in operators]

    def _check_new(self, states: Sequence[PlannedState], new: NewCheckpoint) -> None:
        for state in states:
            existing = self._coordinator.describe_state(state.metadata.state_name)
            if existing is not None and existing.query_id != new.query_id:
                raise StateMismatchError(
                    "there is a state of this name, made by another query or by an import of something else; nothing was written; "
                    "give the query's operator another name, or delete the state's folder while no fleet runs",
                    state=existing.state_name,
                    owner_query_id=existing.query_id,
                    query_id=new.query_id,
                )

    def _rows_of(self, name: str, new: NewCheckpoint) -> int:
        existing = self._coordinator.describe_state(name)
        if existing is None or existing.query_id != new.query_id:
            raise StateMismatchError(
                "the new checkpoint is of an import that made other states; nothing was written; give another folder, or the query "
                "with the names of that import",
                state=name,
                checkpoint=new.folder.uri,
            )
        return self._newest_rows(name)

    def _newest_rows(self, name: str) -> int:
        return self._coordinator.list_versions(name, 1)[0].state_rows

    def _write(self, state: PlannedState, rows: DataFrame, task: TaskIdentity, watermarks: Watermarks) -> int:
        name, plan = state.metadata.state_name, state.operator.plan
        task = structs.replace(task, state_name=name)
        existing = self._coordinator.describe_state(name)
        # An unfinished import has decided the number of shards; the query may ask for another one when it starts.
        shards = state.metadata.num_shards if existing is None else existing.num_shards
        metadata = structs.replace(state.metadata, num_shards=shards)
        where = check_reach(rows.sparkSession, self._uri, self._sockets)
        write: ImportTask | StoresImportTask
        if isinstance(plan, TransformPlan):
            stores = processor_stores(plan.program.variables, plan.schema.keys)
            write = StoresImportTask(stores, metadata, where, task, watermarks, plan.due_per_ms)
        else:
            write = ImportTask(file_schema(state.operator), metadata, where, task, watermarks)
        written = _by_shard(rows, shards).mapInArrow(write, from_arrow_schema(IMPORTED_SCHEMA))
        try:
            counts = {row["shard"]: row["rows"] for row in written.collect()}
        except JOB_FAILURES as error:
            raise StoreUnavailableError(
                "the import was not finished; no query can use what there is of the state, and there is no new checkpoint; see the "
                "cause, and import again with the same names",
                state=name,
                cause=error,
            ) from error
        assert counts.keys() == set(range(shards)), "a task for each shard"
        return sum(counts.values())


def _task(new: NewCheckpoint, batch_id: int, time_ms: int) -> TaskIdentity:
    """Return the task that makes an imported version, of any state, in the batch that the query's log has."""
    run_id = f"import-{uuid.uuid4().hex}"
    return TaskIdentity("", new.query_id, run_id, batch_id, 0, 0, "", batch_time_ms=time_ms, is_import=True)


def _numbers(
    states: Sequence[PlannedState], old: SparkCheckpoint, operators: Mapping[str, int] | None
) -> Mapping[str, int]:
    names, existing = [state.metadata.state_name for state in states], old.operators()
    numbers = dict(zip(names, existing, strict=False)) if operators is None else dict(operators)
    if sorted(numbers.values()) != existing or numbers.keys() != set(names):
        raise StateMismatchError(
            "the checkpoint has other stateful operators than the query; nothing was written; build the query with an operator of the "
            "fleet for each of Spark's, and give operators={name: number} if they are in another order",
            checkpoint=old.folder.uri,
            existing=existing,
            asked=names,
        )
    return numbers


def _all_without(states: Sequence[PlannedState], names: Sequence[str]) -> list[PlannedState]:
    """Return the states without the aggregates in some columns of the results; the query's first batch adds them."""
    plans = [state.operator.plan for state in states]
    aggregates = {
        column.name for plan in plans if isinstance(plan, AggregatePlan) for column in plan.analysed.aggregates
    }
    if unknown := [name for name in names if name not in aggregates]:
        raise _wrong_names(unknown, sorted(aggregates))
    return [_without(state, names) for state in states]


def _without(state: PlannedState, names: Sequence[str]) -> PlannedState:
    plan, schema = state.operator.plan, state.operator.schema
    if not isinstance(plan, AggregatePlan) or not {column.name for column in plan.analysed.aggregates} & set(names):
        return state
    remaining = without(plan, schema, names)
    if remaining == schema or all(kept.kind is AccumulatorKind.VALUE for kept in remaining.accumulators):
        raise _wrong_names(names, [column.name for column in plan.analysed.aggregates])
    metadata = structs.replace(state.metadata, schema=remaining)
    return PlannedState(replace(state.operator, schema=remaining), metadata)


def _wrong_names(names: Sequence[str], columns: Sequence[str]) -> InvalidRequestError:
    return InvalidRequestError(
        "from_nothing has names of columns of aggregates, and not of all of them; nothing was written",
        from_nothing=list(names),
        columns=list(columns),
    )


def _rows(
    state: PlannedState, operator: SparkOperator, frame: DataFrame, aggregations: Mapping[str, Plan]
) -> DataFrame:
    plan = state.operator.plan
    if isinstance(plan, AggregatePlan):
        in_query = aggregations.get(state.metadata.state_name)
        return aggregation_rows(plan, state.operator.schema, operator, in_query)
    if isinstance(plan, JoinPlan) and plan.analysed is not None:
        return join_rows(plan, operator, used_of(analysed(frame), state.metadata.state_name))
    if isinstance(plan, GroupStatePlan):
        return function_rows(plan, operator)
    if isinstance(plan, TransformPlan):
        return processor_rows(plan, operator)
    if isinstance(plan, ProjectedPlan) and plan.schema.operator is OperatorKind.DEDUPLICATE:
        return deduplication_rows(plan, operator)
    if isinstance(plan, ProjectedPlan) and plan.schema.operator is OperatorKind.LIMIT:
        return limit_rows(plan, operator)
    raise InvalidRequestError(
        "the state of this operator is not imported; nothing was written; it is of those operators that Spark has, too",
        state=state.metadata.state_name,
        operator=str(plan.schema.operator),
    )


def file_schema(operator: RoutedOperator) -> StateSchema:
    """Return the schema of the files of an operator's state."""
    plan = operator.plan
    if isinstance(plan, GroupStatePlan):
        (store,) = plan.program.stores
        return StateSchema.keyed(store.keys, store.values)
    return operator.schema


def _by_shard(rows: DataFrame, shards: int) -> DataFrame:
    """Return the rows partitioned by shard, with a marker row in each partition that has the number of its shard."""
    spark = rows.sparkSession
    shard = F.expr(f"pmod(`{HASH_COLUMN}`, {shards})").alias(SHARD_COLUMN)
    values = [name for name in rows.columns if name != HASH_COLUMN]
    present = rows.select(shard, F.lit(True).alias(PRESENT_COLUMN), *values)
    kinds = {column.name: column.dataType for column in rows.schema.fields}
    markers = spark.range(shards).select(
        F.col("id").cast("int").alias(SHARD_COLUMN),
        F.lit(False).alias(PRESENT_COLUMN),
        *(F.lit(None).cast(kinds[name]).alias(name) for name in values),
    )
    routes = F.array(*map(F.lit, shard_routes(spark, shards)))
    all_rows = markers.unionByName(present)
    return all_rows.repartition(shards, routes[F.col(SHARD_COLUMN)])

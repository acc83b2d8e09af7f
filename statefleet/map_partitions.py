"""A user's function with an open state store for each partition of a streaming query: Spark's StateStoreRDD for Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType, _parse_datatype_string

from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import Field, OperatorKind, StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.type_names import payload_type
from spark_jobs.plan.logical import analysed
from spark_jobs.plan.operator_plan import OperatorPlan, ReduceTask, RoutedOperator, route_plan
from spark_jobs.plan.spark_version import SPARK
from spark_jobs.session.spark_connect import check_classic
from spark_jobs.worker.exchange import HASH_COLUMN, unpack
from spark_jobs.worker.process import task_identity, worker_client
from store_actors.client.state_store import StateStore, store_specs
from store_actors.messages.requests import StoreSpec

if TYPE_CHECKING:  # Spark's workers import this module, and need no Ray
    from statefleet.fleet import Fleet

#: Function from the open store and the partition's batches to the batches to emit.
StoreFunction = Callable[[StateStore, Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]]
#: Maximum rows of a batch that a function gets.
_BATCH_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class _PartitionTask:
    function: StoreFunction
    rows: pa.Schema
    stores: tuple[StoreSpec, ...]
    schema: StateSchema
    metadata: StateMetadata

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        received = unpack(batches, self.schema.raw_schema(), self.metadata.state_name)
        task = task_identity(self.metadata, received.header)
        table = received.rows.raw
        rows = pa.Table.from_arrays(
            [column.cast(field.type) for column, field in zip(table.columns, self.rows, strict=True)], schema=self.rows
        )
        # An exception aborts the store. It is committed before any row is yielded, so that a reader of only some rows does not
        # prevent it.
        with (
            worker_client(received.header.store_actor) as client,
            client.open_granted(task, self.metadata, self.stores)[0] as store,
        ):
            emitted = list(self.function(store, iter(rows.to_batches(max_chunksize=_BATCH_ROWS))))
            store.commit()
        yield from emitted


@dataclass(frozen=True, kw_only=True)
class _PartitionsPlan(OperatorPlan):
    function: StoreFunction
    rows: pa.Schema
    stores: tuple[StoreSpec, ...]

    def reduce_task(self, schema: StateSchema, metadata: StateMetadata) -> ReduceTask:
        """Return the task that runs the function in Spark's worker."""
        return _PartitionTask(self.function, self.rows, self.stores, schema, metadata)


def map_partitions_with_state_store(
    df: DataFrame,
    function: StoreFunction,
    schema: StructType | str,
    *,
    fleet: Fleet,
    name: str,
    partition_by: Sequence[str | Column],
    keys: pa.Schema | None = None,
    values: pa.Schema | None = None,
    stores: Mapping[str, tuple[pa.Schema, pa.Schema]] | None = None,
    shards: int | None = None,
) -> DataFrame:
    """Run a function over each partition of a streaming DataFrame, with the partition's state open.

    The function runs once a batch for every partition, also for those without rows. When it ends, the store is committed; when it
    raises, aborted, and Spark repeats the task on the same version. It may run more than once for a batch, and only one run counts.

    Parameters
    ----------
    df
        Streaming DataFrame.
    function
        Takes an open :class:`StateStore` and the partition's record batches; yields the batches to emit.
    schema
        Schema of the rows that it yields, as for ``mapInArrow``.
    fleet, name
        The fleet and the name of the state; the name is unique in the fleet.
    partition_by
        Columns by which rows are partitioned; all rows of a key must be in one partition.
    keys, values
        Columns of the store ``default``; or `stores`, by name.
    shards
        Number of partitions, fixed once the state exists.

    Raises
    ------
    InvalidRequestError
        The DataFrame is not streaming, or an argument is not valid.
    SetupError
        The DataFrame is one of Spark Connect.
    StateMismatchError
        The state exists and is of another kind or number of shards.
    """
    check_classic(df)
    if not df.isStreaming:
        raise InvalidRequestError("state is kept for streaming queries; read with spark.readStream", state=name)
    specs = store_specs(keys, values, stores)

    plan = _plan(df, function, schema, specs, list(partition_by))
    operator = RoutedOperator.of(plan, name, fleet.uri)
    operator = replace(operator, upstream=replace(operator.upstream, sockets=fleet.sockets))
    return fleet.attach(
        df,
        name,
        "keyed",
        None,
        shards,
        lambda metadata: route_plan(operator, metadata),
        by_python=True,
    )


def _plan(
    df: DataFrame,
    function: StoreFunction,
    output: StructType | str,
    stores: tuple[StoreSpec, ...],
    partition_by: list[str | Column],
) -> _PartitionsPlan:
    # By index, as two columns may have the same name.
    attributes = [attribute.column() for attribute in analysed(df).output]
    fields = [Field(f"c{index}", payload_type(field.type)) for index, field in enumerate(SPARK.arrow_schema(df.schema))]
    selected = [column.alias(field.name) for column, field in zip(attributes, fields, strict=True)]
    hashed = F.hash(*(F.col(column) if isinstance(column, str) else column for column in partition_by)).alias(
        HASH_COLUMN
    )
    schema = StateSchema((), tuple(fields), (), None, None, "update", OperatorKind.PARTITIONS)
    kind = _parse_datatype_string(output) if isinstance(output, str) else output
    if not isinstance(kind, StructType):
        raise InvalidRequestError("the schema of what the function yields is a struct", schema=output)
    return _PartitionsPlan(
        inputs=(df.select(*selected, hashed),),
        schema=schema,
        emitted=kind,
        function=function,
        rows=_rows_schema(df),
        stores=stores,
    )


def _rows_schema(df: DataFrame) -> pa.Schema:
    """Return the columns of a DataFrame as ``mapInArrow`` passes them: timestamps are in the session's time zone."""
    zone = df.sparkSession.conf.get("spark.sql.session.timeZone")
    schema = SPARK.arrow_schema(df.schema)
    for index, field in enumerate(schema):
        if pa.types.is_timestamp(field.type) and field.type.tz is not None:
            schema = schema.set(index, field.with_type(pa.timestamp("us", zone)))
    return schema

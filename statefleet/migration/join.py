"""Rows of both sides of Spark's own stream-stream join, in the columns of the fleet's state."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.errors import StateMismatchError
from coordinator.model.schema import Field
from spark_jobs.operators.join import JoinedSide, JoinPlan
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.checkpoint_state import StoreSchema, state_rows, with_columns
from spark_jobs.plan.logical import analysed, resolved
from spark_jobs.plan.storable import spark_field
from spark_jobs.worker.exchange import HASH_COLUMN
from statefleet.migration.checkpoint import JOIN_STORES, SparkOperator
from statefleet.migration.columns import check_types, store_of
from statefleet.migration.state_reader import KEY, VALUE, read_state, struct_of
from store_actors.operators.expressions import columns_of
from store_actors.operators.join_schema import MATCHED_COLUMN, SIDE_COLUMN, JoinOptions, JoinType

#: Spark's store of the rows of each side, by key and index; the other store of a side only has their number.
_ROWS = JOIN_STORES[1::2]
#: From this format on, one store has those stores as its column families.
_ONE_STORE = 3
_FLOATS = ("float32", "float64")
_MATCHED = "matched"


def join_rows(plan: JoinPlan, operator: SparkOperator, used: Container[str]) -> DataFrame:
    """Return the rows of both sides of a Spark operator, in the columns of the plan's state.

    Of the columns of the operator's results, the query uses those in `used`: Spark keeps no others, which become null. Raises
    StateMismatchError if the operator is another one, has other keys, or lacks a column that the query needs.
    """
    left, right = (_side(plan, number, operator, used) for number in (0, 1))
    return left.unionByName(right)


def _side(plan: JoinPlan, number: int, operator: SparkOperator, used: Container[str]) -> DataFrame:
    options, side = JoinOptions.of(plan.schema.options), plan.sides[number]
    state_format = int(operator.checkpoint.conf.get("spark.sql.streaming.join.stateFormatVersion", "2"))
    store = _stored_rows(operator, number, state_format)
    keys: list[tuple[str | None, T.DataType]] = [(None, key.type) for key in side.keys]
    check_types(operator, "join keys", store.schema.keys, [*keys, ("index", T.LongType())])
    values_of_store = list(store.schema.values.fields)
    # Spark 2 did not record which rows have matched.
    has_matched = state_format > 1
    if has_matched:
        check_types(operator, "join's values", T.StructType(values_of_store[-1:]), [(_MATCHED, T.BooleanType())])
    elif options.join_type.is_outer(number):
        raise StateMismatchError(
            "the checkpoint's join does not note which rows have matched (state format 1), so it is not known which are still to be "
            "emitted with nulls; nothing was written; start the query again",
            checkpoint=operator.checkpoint.folder.uri,
        )
    stored = options.stored()[number]
    read = {*([] if options.condition is None else columns_of(options.condition)), options.expiry[number]}
    needed = [name for name in stored if name in read or name in used]
    rows = _rows(operator, store, side, values_of_store[:-1] if has_matched else values_of_store, needed)
    if has_matched and options.join_type is JoinType.LEFT_SEMI and number == 0:
        # Spark keeps rows that it has emitted until they expire.
        rows = rows.where(~F.col(_MATCHED))
    leaves = [_key(column, leaf).alias(leaf.name) for leaf, column in side.leaves]
    matched = F.col(_MATCHED) if options.join_type.is_outer(number) else F.lit(None).cast("boolean")
    fields = {state.name: state for state in plan.schema.state_fields}
    values = [
        side.columns[name] if name in stored else F.lit(None).cast(spark_field(state).dataType).alias(name)
        for name, state in fields.items()
        if name not in (SIDE_COLUMN, MATCHED_COLUMN)
    ]
    hashed = F.hash(*(column for _, column in side.leaves)).alias(HASH_COLUMN)
    return rows.select(
        *leaves, F.lit(number).cast("byte").alias(SIDE_COLUMN), matched.alias(MATCHED_COLUMN), *values, hashed
    )


@dataclass(frozen=True)
class _StoredRows:
    """The rows of a side in Spark's state."""

    schema: StoreSchema
    #: Returns them as columns of the given names and types: the key's, then the value's.
    read: Callable[[T.StructType], DataFrame]


def _stored_rows(operator: SparkOperator, number: int, state_format: int) -> _StoredRows:
    if state_format < _ONE_STORE:
        store = store_of(operator, _ROWS[number])
        keys = len(store.schema.keys.fields) - 1
        return _StoredRows(store.schema, partial(state_rows, operator.spark, store, partitioned_by=keys))
    rows = read_state(operator, {"storeName": _ROWS[number]}, partitioned_by=-1)
    schema = StoreSchema(struct_of(rows, KEY), struct_of(rows, VALUE))
    return _StoredRows(schema, partial(with_columns, rows.select(f"{KEY}.*", f"{VALUE}.*")))


def _rows(
    operator: SparkOperator, store: _StoredRows, side: JoinedSide, existing: list[T.StructField], stored: Sequence[str]
) -> DataFrame:
    """Return the rows of a side, as columns with the ids that the query's expressions read, and whether they have matched."""
    keys = [T.StructField(f"key{index}", key.dataType) for index, key in enumerate(store.schema.keys.fields)]
    unused = list(enumerate(existing))
    columns, indexes = list[T.StructField](), dict[int, int]()
    for attribute in side.attributes:
        kind = attribute.type.simpleString()
        index = next(
            (at for at, column in unused if (column.name, column.dataType.simpleString()) == (attribute.name, kind)),
            None,
        )
        if index is not None:
            # Two columns of the same name belong to the attributes in their order.
            unused = [pair for pair in unused if pair[0] != index]
            indexes[attribute.id] = index
    needed = {
        reference.id
        for column in (
            *(c for _, c in side.leaves),
            *(column for name, column in side.columns.items() if name in stored),
        )
        for reference in Expression.of(column).references
    }
    missing = [attribute.name for attribute in side.attributes if attribute.id in needed - indexes.keys()]
    if missing or unused:
        raise StateMismatchError(
            "the columns of a side of the query's join are not those of the checkpoint's, which has those that are used after the "
            "join; nothing was written; build the query as the one was that made the checkpoint",
            checkpoint=operator.checkpoint.folder.uri,
            missing=missing,
            existing=[column.name for column in existing],
            asked=[attribute.name for attribute in side.attributes],
        )
    by_index = {index: attribute for attribute in side.attributes if (index := indexes.get(attribute.id)) is not None}
    for index, column in enumerate(existing):
        columns.append(T.StructField(f"value{index}", by_index[index].type if index in by_index else column.dataType))
    extra = [T.StructField(_MATCHED, T.BooleanType())] if len(store.schema.values.fields) > len(existing) else []
    rows = store.read(T.StructType([*keys, *columns, *extra]))
    named = []
    for attribute in side.attributes:
        index = indexes.get(attribute.id)
        value = (
            resolved(rows, f"value{index}") if index is not None else Expression.of(F.lit(None).cast(attribute.type))
        )
        named.append(value.as_nullable_as(attribute).named_as(attribute))
    passed = [resolved(rows, _MATCHED)] if extra else []
    return analysed(rows).project([*named, *passed]).frame()


def _key(column: Column, leaf: Field) -> Column:
    """Return a leaf of the key; equal floating-point numbers become the same value."""
    return Expression.of(column).normalised().column() if leaf.type in _FLOATS else column

"""Rows of both sides of Spark's own join of two streams, as the fleet holds them."""

from __future__ import annotations

from collections.abc import Container, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.errors import StateMismatchError
from coordinator.model.schema import Field
from spark_jobs.operators.join import JoinedSide, JoinPlan
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.checkpoint_state import SparkStore, state_rows
from spark_jobs.plan.logical import analysed, resolved
from spark_jobs.plan.state_types import spark_field
from spark_jobs.worker.exchange import HASH_COLUMN
from statefleet.migration.checkpoint import SparkOperator
from statefleet.migration.columns import check_types, store_of
from store_actors.operators.expressions import columns_of
from store_actors.operators.join_schema import MATCHED_COLUMN, SIDE_COLUMN, JoinOptions, JoinType

__all__ = ["join_rows"]

#: Spark's store of a side's rows by key and place; the other one of a side only has how many there are.
_ROWS = ("left-keyWithIndexToValue", "right-keyWithIndexToValue")
_FLOATS = ("float32", "float64")
_MATCHED = "matched"


def join_rows(plan: JoinPlan, operator: SparkOperator, used: Container[str]) -> DataFrame:
    """Rows of both sides of an operator of Spark's, in the columns of the plan's state.

    Parameters
    ----------
    used
        Columns of what the operator emits that the query uses: Spark keeps no others, which are null then.

    Raises
    ------
    StateMismatchError
        It is another operator, has other keys, or does not have a column that the query needs.
    """
    left, right = (_side(plan, number, operator, used) for number in (0, 1))
    return left.unionByName(right)


def _side(plan: JoinPlan, number: int, operator: SparkOperator, used: Container[str]) -> DataFrame:
    options, side = JoinOptions.of(plan.schema.options), plan.sides[number]
    store = store_of(operator, _ROWS[number])
    keys: list[tuple[str | None, T.DataType]] = [(None, one.type) for one in side.keys]
    check_types(operator, "join keys", store.schema.keys, [*keys, ("index", T.LongType())])
    found = list(store.schema.values.fields)
    # Spark 2 did not note which rows have matched.
    has_matched = operator.checkpoint.conf.get("spark.sql.streaming.join.stateFormatVersion", "2") != "1"
    if has_matched:
        check_types(operator, "join's values", T.StructType(found[-1:]), [(_MATCHED, T.BooleanType())])
    elif options.is_outer(number):
        raise StateMismatchError(
            "the checkpoint's join does not note which rows have matched (state format 1), so nobody knows which are still to be "
            "emitted with nulls; nothing was written; start the query anew",
            checkpoint=operator.checkpoint.folder.uri,
        )
    held = options.stored()[number]
    read = {*([] if options.condition is None else columns_of(options.condition)), options.expiry[number]}
    needed = [name for name in held if name in read or name in used]
    rows = _rows(operator, store, side, found[:-1] if has_matched else found, needed)
    if has_matched and options.join_type is JoinType.LEFT_SEMI and number == 0:
        # Spark keeps what it has emitted until its time is over.
        rows = rows.where(~F.col(_MATCHED))
    leaves = [_key(column, leaf).alias(leaf.name) for leaf, column in side.leaves]
    matched = F.col(_MATCHED) if options.is_outer(number) else F.lit(None).cast("boolean")
    own = {_name(column): column for column in side.columns}
    others = {one.name: one for one in plan.schema.state_fields}
    values = [
        own[name] if name in held else F.lit(None).cast(spark_field(one).dataType).alias(name)
        for name, one in others.items()
        if name not in (SIDE_COLUMN, MATCHED_COLUMN)
    ]
    hashed = F.hash(*(column for _, column in side.leaves)).alias(HASH_COLUMN)
    return rows.select(
        *leaves, F.lit(number).cast("byte").alias(SIDE_COLUMN), matched.alias(MATCHED_COLUMN), *values, hashed
    )


def _rows(
    operator: SparkOperator, store: SparkStore, side: JoinedSide, found: list[T.StructField], held: Sequence[str]
) -> DataFrame:
    """Rows of a side as columns of the very ids that the query's expressions read, and whether they have matched."""
    keys = [T.StructField(f"key{place}", one.dataType) for place, one in enumerate(store.schema.keys.fields)]
    left = list(enumerate(found))
    columns, places = list[T.StructField](), dict[int, int]()
    for attribute in side.attributes:
        kind = attribute.type.simpleString()
        place = next(
            (at for at, one in left if one.name == attribute.name and one.dataType.simpleString() == kind), None
        )
        if place is not None:
            # Of two columns of one name each is the attribute's in its turn.
            left = [one for one in left if one[0] != place]
            places[attribute.id] = place
    needed = {
        one.id
        for column in (*(c for _, c in side.leaves), *_held(side, held))
        for one in Expression.of(column).references
    }
    missing = [one.name for one in side.attributes if one.id in needed and one.id not in places]
    if missing or left:
        raise StateMismatchError(
            "the columns of a side of the query's join are not those of the checkpoint's, which has those that are used after the "
            "join; nothing was written; build the query as the one was that made the checkpoint",
            checkpoint=operator.checkpoint.folder.uri,
            missing=missing,
            existing=[one.name for one in found],
            asked=[one.name for one in side.attributes],
        )
    by_place = {place: one for one in side.attributes if (place := places.get(one.id)) is not None}
    for place, one in enumerate(found):
        columns.append(T.StructField(f"value{place}", by_place[place].type if place in by_place else one.dataType))
    extra = [T.StructField(_MATCHED, T.BooleanType())] if len(store.schema.values.fields) > len(found) else []
    rows = state_rows(operator.spark, store, T.StructType([*keys, *columns, *extra]), partitioned_by=len(keys) - 1)
    named = []
    for attribute in side.attributes:
        place = places.get(attribute.id)
        column = (
            resolved(rows, f"value{place}") if place is not None else Expression.of(F.lit(None).cast(attribute.type))
        )
        named.append(column.as_nullable_as(attribute).named_as(attribute))
    passed = [resolved(rows, _MATCHED)] if extra else []
    return analysed(rows).project([*named, *passed]).frame()


def _held(side: JoinedSide, held: Sequence[str]) -> list[Column]:
    return [column for column in side.columns if _name(column) in held]


def _name(column: Column) -> str:
    return Expression.of(column).name


def _key(column: Column, leaf: Field) -> Column:
    """A leaf of the key; of floating-point numbers those that are equal are one."""
    return Expression.of(column).normalised().column() if leaf.type in _FLOATS else column

"""Groups of Spark's own streaming aggregation, and its session windows, as the fleet holds them.

What Spark keeps of a group are the buffers of its aggregate functions. The optimiser has the last word on which these are: a decimal
that fits into 64 bits is summed up as a number, ``count(x)`` of what is never null counts rows, and two aggregates that come to the
same share a buffer; below a select they are in the select's order. So the buffers are read off the whole query as Spark would run it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.errors import InvalidRequestError, StateMismatchError
from coordinator.model.schema import Accumulator, AccumulatorKind, Field, OperatorKind, StateSchema
from spark_jobs.operators.aggregate import AggregatePlan
from spark_jobs.plan.aggregate_functions import AggregateExpression, AggregateFunction
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.checkpoint_state import state_rows
from spark_jobs.plan.logical import Plan
from spark_jobs.plan.storable import stored, stored_type
from statefleet.migration.checkpoint import SparkOperator
from statefleet.migration.columns import check_types, hashed, key_columns, key_name, keys_over, named_columns, store_of

__all__ = ["Buffer", "aggregation_rows", "state_columns", "without"]

#: Setting in the offset log that says whether values have the keys in them once more (1) or not (2).
_FORMAT = "spark.sql.streaming.aggregation.stateFormatVersion"
#: Kinds whose list is the function's own result.
_RESULTS = (AccumulatorKind.COLLECT_LIST, AccumulatorKind.COLLECT_SET)
#: Functions that count values in Spark, too, and not by a sketch.
_COUNTING = ("Mode", "Percentile", "PercentileDisc")
_LONG = T.DecimalType(20, 0)


@dataclass(frozen=True)
class Buffer:
    """One column of an aggregate's buffer in Spark's state."""

    column: Column
    type: T.DataType


@dataclass
class _SparkBuffers:
    """Distinct aggregates of an aggregation as Spark runs it, in the order of their buffers."""

    aggregates: list[AggregateExpression] = field(default_factory=list)

    @classmethod
    def of(cls, optimised: Plan) -> _SparkBuffers:
        found = cls()
        for output in optimised.aggregates:
            for one in _uses(output):
                if found.place(one) is None:
                    found.aggregates.append(one)
        return found

    def columns(self) -> list[tuple[str, T.DataType, AggregateFunction | None]]:
        """Name and type of each column, as Spark's state has it, and the function whose bytes it is."""
        told = []
        for aggregate in self.aggregates:
            function = aggregate.function
            told += [(one.name, one.type, function if function.is_serialised else None) for one in function.buffer]
        return told

    def place(self, aggregate: AggregateExpression) -> slice | None:
        """Where the columns of an aggregate are; None if Spark does not keep it, as nothing uses it."""
        begin = 0
        for one in self.aggregates:
            end = begin + len(one.function.buffer)
            if one.matches(aggregate):
                return slice(begin, end)
            begin = end
        return None


def without(plan: AggregatePlan, schema: StateSchema, names: Container[str]) -> StateSchema:
    """A schema of an aggregation's state without the aggregates in some columns of its results.

    It says nothing of what readers are shown: that goes with the query's first batch, which has them all.
    """
    left_out = {one.sql for output in plan.analysed.aggregates if output.name in names for one in _uses(output)}
    gone = [
        accumulator
        for number, use in enumerate(plan.uses)
        if use.sql in left_out
        for accumulator in plan.accumulators(number)
    ]
    return replace(schema, accumulators=tuple(one for one in schema.accumulators if one not in gone), shown={})


def aggregation_rows(
    plan: AggregatePlan, schema: StateSchema, operator: SparkOperator, in_query: Plan | None
) -> DataFrame:
    """Groups of an operator of Spark's, in the columns of the plan's state.

    Parameters
    ----------
    schema
        The plan's, or one :func:`without` some of its aggregates.
    in_query
        The aggregation as Spark runs it in the whole query; None if it does not run it as one.

    Raises
    ------
    StateMismatchError
        It is another aggregation.
    InvalidRequestError
        What Spark holds of an aggregate cannot be made what the fleet holds; names it.
    """
    node = plan.analysed
    run = _as_run(node)
    if in_query is None:
        raise _refused(
            "does not run each aggregation of the query by itself",
            "build the query as it was built for Spark",
            operator,
        )
    buffers = _SparkBuffers.of(in_query)
    uses = _pairs(node, run, operator)
    store = store_of(operator)
    is_session = plan.schema.operator is OperatorKind.SESSION
    if len(node.grouping) != len(run.grouping):
        raise _refused(
            "groups by a constant or by one column twice, which Spark leaves out", "group by each column once", operator
        )
    grouped = list(zip(node.grouping, run.grouping, strict=True))
    by_key = [pair for pair in grouped if not (is_session and pair[0].is_session)]
    keys = [(key_name(spark), own.type) for own, spark in by_key]
    if is_session:
        keys.append((None, T.TimestampType()))
    check_types(operator, "grouping columns", store.schema.keys, keys)
    held = [(name, kind) for name, kind, _ in buffers.columns()]
    has_keys = is_session or operator.checkpoint.conf.get(_FORMAT) == "1"
    before: list[tuple[str | None, T.DataType]] = [(None, own.type) for own, _ in grouped] if has_keys else []
    check_types(operator, "aggregates", store.schema.values, [*before, *held])

    columns = [
        *named_columns("key", [(own.type, own.nullable) for own, _ in by_key]),
        *([T.StructField("start", T.TimestampType())] if is_session else []),
        *named_columns("group", [(own.type, own.nullable) for own, _ in grouped] if has_keys else []),
        *named_columns("buffer", [(_shown(kind, function), True) for _, kind, function in buffers.columns()]),
    ]
    opened = [*[None] * len(before), *(function for _, _, function in buffers.columns())]
    rows = state_rows(
        operator.spark,
        store,
        T.StructType(columns),
        prefix=len(by_key) if is_session else 0,
        functions=opened if any(one is not None for one in opened) else (),
    )
    given = [
        Buffer(F.col(f"buffer{place}"), one.dataType) for place, one in enumerate(columns[len(columns) - len(held) :])
    ]
    own_keys = [key for key in plan.keys if key.leaves]
    leaves = keys_over(rows, own_keys, [f"key{place}" for place in range(len(own_keys))])
    selected = key_columns(leaves)
    if is_session:
        session = next(number for number, (own, _) in enumerate(grouped) if own.is_session)
        selected += [F.col(f"group{session}.{part}").alias(f"session_{part}") for part in ("start", "end")]
    for number, aggregate in enumerate(plan.uses):
        accumulators = [one for one in plan.accumulators(number) if one in schema.accumulators]
        if not accumulators:
            continue
        place = buffers.place(_run_as(aggregate, uses))
        if place is None:
            raise _refused(
                f"leaves out {aggregate.sql}, as nothing in the query uses it, or makes something else of it",
                "leave it out, or give the name of its column in from_nothing",
                operator,
            )
        selected += state_columns(aggregate, accumulators, given[place])
    return rows.select(*selected, hashed(leaves))


def state_columns(
    aggregate: AggregateExpression, accumulators: Sequence[Accumulator], buffer: Sequence[Buffer]
) -> list[Column]:
    """What the fleet holds of an aggregate, made of Spark's buffer of it.

    Raises
    ------
    InvalidRequestError
        It cannot be made of that.
    """
    fields = [one for accumulator in accumulators for one in accumulator.state]
    kinds = {one.kind for one in accumulators}
    if kinds == {AccumulatorKind.DISTINCT_REGISTERS}:
        columns = [F.array(*(one.column for one in buffer))]
    elif kinds <= set(_RESULTS):
        columns = [stored(one.column, one.type) for one in buffer]
    elif kinds == {AccumulatorKind.COUNTED} and aggregate.function.kind in _COUNTING:
        columns = [_counted(accumulators[0], buffer[0])]
    elif any(one.result for one in accumulators) or not _is_held_alike(fields, buffer):
        raise InvalidRequestError(
            "what Spark keeps of this aggregate cannot be made what the fleet keeps; nothing was written; give the name of its column "
            "in from_nothing, and it tells of what comes from there on",
            aggregate=aggregate.sql,
            function=aggregate.function.sql_name,
        )
    elif len(fields) == len(buffer):
        columns = [stored(one.column, one.type) for one in buffer]
        if aggregate.function.kind == "Average":
            # Spark begins with a sum of 0.
            columns[0] = F.when(columns[1] > 0, columns[0])
    else:
        columns = _summed(aggregate, fields, buffer)
    return [column.alias(one.name) for column, one in zip(columns, fields, strict=True)]


def _counted(accumulator: Accumulator, buffer: Buffer) -> Column:
    """Values with how often each came; of percentiles as doubles."""
    assert isinstance(buffer.type, T.ArrayType)
    assert isinstance(buffer.type.elementType, T.StructType)
    kind = buffer.type.elementType["value"].dataType
    is_double = accumulator.state[0].type == "counts<float64>"

    def held(one: Column) -> Column:
        value = one.getField("value")
        value = value.cast("double") if is_double else stored(value, kind)
        return F.struct(value.alias("value"), one.getField("count").alias("count"))

    return F.transform(buffer.column, held)


def _is_held_alike(fields: Sequence[Field], buffer: Sequence[Buffer]) -> bool:
    """Whether there is a field for each column of a buffer, but for one that says that there is no value yet."""
    further = [one for one in fields if one.name.endswith("_is_empty")]
    return len(fields) in (len(buffer), len(buffer) + len(further))


def _summed(aggregate: AggregateExpression, fields: Sequence[Field], buffer: Sequence[Buffer]) -> list[Column]:
    """A sum, whether there is any value in it, and what else there is (a count): where Spark says so by a null, or by the count."""
    total, *others = (stored(one.column, one.type) for one in buffer)
    kind = fields[0].type
    if kind.startswith("decimal(") and not isinstance(buffer[0].type, T.DecimalType):
        total = _scaled(total, kind)
    is_empty = others[0] == 0 if aggregate.function.kind == "Average" else total.isNull()
    nothing = (
        F.lit(0).cast(stored_type(buffer[0].type)) if not kind.startswith("decimal(") else F.lit(0).cast(_decimal(kind))
    )
    return [F.when(is_empty, nothing).otherwise(total), is_empty, *others]


def _decimal(kind: str) -> T.DecimalType:
    precision, scale = kind[len("decimal(") : -1].split(",")
    return T.DecimalType(int(precision), int(scale))


def _scaled(number: Column, kind: str) -> Column:
    """A decimal that Spark held as a whole number of its last digit's units."""
    decimal = _decimal(kind)
    unit = (
        F.lit(1).cast(T.DecimalType(1, 0))
        if decimal.scale == 0
        else F.lit(f"0.{'0' * (decimal.scale - 1)}1").cast(T.DecimalType(decimal.scale, decimal.scale))
    )
    return (number.cast("long").cast(_LONG) * unit).cast(decimal)


# -- the query as Spark runs it ---------------------------------------------------------------------------------------


def _as_run(node: Plan) -> Plan:
    """The aggregation as Spark runs it."""
    found = node.optimised()
    while found.kind != "Aggregate":
        (found,) = found.children
    return found


def _uses(node: Expression) -> list[AggregateExpression]:
    """Aggregates in an expression, from the top."""
    own = AggregateExpression.at(node)
    return [own] if own is not None else [one for child in node.children for one in _uses(child)]


def _pairs(node: Plan, run: Plan, operator: SparkOperator) -> list[tuple[AggregateExpression, AggregateExpression]]:
    """Each aggregate of the query, with what Spark runs for it."""
    by_id = {output.id: output for output in run.aggregates}
    pairs: list[tuple[AggregateExpression, AggregateExpression]] = []
    for output in node.aggregates:
        own, spark = _uses(output), _uses(by_id[output.id]) if output.id in by_id else []
        if len(own) != len(spark):
            raise _refused(
                f"computes {output.name} in another way than it is written",
                "give each aggregate a column of its own",
                operator,
            )
        pairs += zip(own, spark, strict=True)
    return pairs


def _run_as(
    aggregate: AggregateExpression, pairs: Sequence[tuple[AggregateExpression, AggregateExpression]]
) -> AggregateExpression:
    return next(spark for own, spark in pairs if own.matches(aggregate))


def _shown(kind: T.DataType, function: AggregateFunction | None) -> T.DataType:
    """Type of a column of a buffer, or of what is shown of the function whose bytes it is."""
    if function is None:
        return kind
    if function.kind not in _COUNTING:
        return function.type
    counted = [T.StructField("value", function.children[0].type, False), T.StructField("count", T.LongType(), False)]
    return T.ArrayType(T.StructType(counted), containsNull=False)


def _refused(what: str, remedy: str, operator: SparkOperator) -> StateMismatchError:
    return StateMismatchError(
        f"Spark {what}, so its state does not say which column is which; nothing was written; {remedy}",
        checkpoint=operator.checkpoint.folder.uri,
        operator=operator.number,
    )

"""Which accumulators make up each of Spark's aggregate functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.errors import InvalidRequestError
from spark_jobs.operators.meaning import meaning_of
from spark_jobs.plan.aggregate_functions import AggregateExpression, AggregateFunction
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.state_types import list_field, state_field
from store_actors.schema import AccumulatorKind, Field

__all__ = ["FUNCTIONS", "Function", "Part", "held_functions", "parts_of"]


@dataclass(frozen=True)
class Part:
    """One accumulator of an aggregate: its kind, its input (None for rows), its state fields, and what it means.

    The state fields of all parts, in order, stand for the function's ``aggBufferAttributes``.
    """

    kind: AccumulatorKind
    input: Column | None
    #: Named by suffixes.
    state: tuple[Field, ...]
    meaning: str = ""
    cast: str = ""

    def fields(self, prefix: str) -> tuple[Field, ...]:
        return tuple(replace(field, name=f"{prefix}_{field.name}") for field in self.state)


@dataclass(frozen=True)
class Function:
    """One of Spark's aggregate functions: its names, and the accumulators that a use of it takes.

    Attributes
    ----------
    is_state
        Whether its result is its one state field. Otherwise Spark has a final expression for it.
    """

    names: tuple[str, ...]
    parts: Callable[[_Use], tuple[Part, ...]]
    is_state: bool = False


def parts_of(spark: SparkSession, aggregate: AggregateExpression) -> tuple[Part, ...]:
    """Accumulators of one use of an aggregate function.

    Raises
    ------
    InvalidRequestError
        The function, or a use of it, is not supported; says which and what to use.
    """
    text, function = aggregate.sql, aggregate.function
    if aggregate.is_distinct:
        raise InvalidRequestError(
            "Distinct aggregations are not supported on streaming DataFrames, as in Spark; consider using approx_count_distinct() "
            "instead, or group by the column as well and count the groups in a query over the results",
            aggregate=text,
        )
    held = FUNCTIONS.get(function.kind)
    if held is None:
        raise InvalidRequestError(
            f"this aggregate is not held by the fleet yet; it holds {', '.join(held_functions())}; use one of these, or Spark's own "
            "groupBy for this query",
            aggregate=text,
            function=function.shown_name,
        )
    where = None if aggregate.where is None else aggregate.where.column()
    meaning, cast = meaning_of(spark, aggregate)
    parts = held.parts(_Use(function, text, where))
    # The parts of one aggregate belong together: its sum never goes on with the sum of another.
    return tuple(
        replace(part, meaning=meaning if len(parts) == 1 else f"{meaning}.{part.state[0].name}", cast=cast)
        for part in parts
    )


@dataclass(frozen=True)
class _Use:
    """One use of a function in a query."""

    function: AggregateFunction
    text: str
    where: Column | None

    def child(self) -> Expression:
        return self.function.children[0]

    def kept(self, column: Column) -> Column:
        """The column where the aggregate's FILTER holds, null elsewhere."""
        return column if self.where is None else F.when(self.where, column)

    def column(self) -> Column:
        return self.kept(self.child().column())

    def require_legacy_arithmetic(self) -> None:
        if not self.function.is_legacy:
            raise InvalidRequestError(
                "sums that fail or turn null on overflow (ANSI mode, try_sum) are not held by the fleet yet; set "
                "spark.sql.ansi.enabled to false, or sum a decimal",
                aggregate=self.text,
            )


def _count(use: _Use) -> tuple[Part, ...]:
    needed = [child.column().isNotNull() for child in use.function.children if child.nullable]
    state = (state_field("count", T.LongType(), False),)
    if not needed and use.where is None:
        return (Part(AccumulatorKind.COUNT_ROWS, None, state),)
    present = use.where if use.where is not None else F.lit(True)
    for column in needed:
        present = present & column
    return (Part(AccumulatorKind.COUNT_VALID, F.when(present, F.lit(True)), state),)


def _sum(use: _Use) -> tuple[Part, ...]:
    result = use.function.type
    column = use.kept(use.child().column().cast(result))
    if isinstance(result, T.DecimalType):
        return (Part(AccumulatorKind.SUM_DECIMAL, column, _decimal_sum(result)),)
    if isinstance(result, T.DoubleType):
        return (Part(AccumulatorKind.SUM_FLOAT, column, (state_field("sum", result),)),)
    if isinstance(result, T.LongType):
        use.require_legacy_arithmetic()
        return (Part(AccumulatorKind.SUM_INT, column, (state_field("sum", result),)),)
    raise InvalidRequestError(
        "the fleet sums numbers; cast the column to one", aggregate=use.text, type=result.simpleString()
    )


def _average(use: _Use) -> tuple[Part, ...]:
    sum_type = use.function.buffer[0].type
    if not isinstance(sum_type, T.DecimalType | T.DoubleType):
        raise InvalidRequestError(
            "the fleet averages numbers; cast the column to one", aggregate=use.text, type=sum_type.simpleString()
        )
    column = use.kept(use.child().column().cast(sum_type))
    count = Part(AccumulatorKind.COUNT_VALID, column, (state_field("count", T.LongType(), False),))
    if isinstance(sum_type, T.DoubleType):
        return (Part(AccumulatorKind.SUM_FLOAT, column, (state_field("sum", sum_type),)), count)
    return (Part(AccumulatorKind.SUM_DECIMAL, column, _decimal_sum(sum_type)), count)


def _decimal_sum(kind: T.DecimalType) -> tuple[Field, ...]:
    return (state_field("sum", kind), state_field("is_empty", T.BooleanType(), False))


def _extreme(kind: AccumulatorKind) -> Callable[[_Use], tuple[Part, ...]]:
    def make(use: _Use) -> tuple[Part, ...]:
        value = state_field("value", use.child().type, what=use.text)
        return (Part(kind, use.column(), (value,)),)

    return make


def _positional(any_kind: AccumulatorKind, valid_kind: AccumulatorKind) -> Callable[[_Use], tuple[Part, ...]]:
    def make(use: _Use) -> tuple[Part, ...]:
        ignore_nulls = use.function.ignores_nulls
        if use.where is not None and not ignore_nulls:
            raise InvalidRequestError(
                "first and last with a FILTER need ignorenulls=True in the fleet", aggregate=use.text
            )
        value = state_field("value", use.child().type, what=use.text)
        state = (value, state_field("value_set", T.BooleanType(), False))
        return (Part(valid_kind if ignore_nulls else any_kind, use.column(), state),)

    return make


def _moments(use: _Use) -> tuple[Part, ...]:
    column = use.kept(use.child().column().cast(T.DoubleType()))
    state = tuple(state_field(name, T.DoubleType(), False) for name in ("n", "avg", "m2"))
    return (Part(AccumulatorKind.MOMENTS, column, state),)


def _collected(kind: AccumulatorKind) -> Callable[[_Use], tuple[Part, ...]]:
    def make(use: _Use) -> tuple[Part, ...]:
        values = list_field("values", use.child().type, what=use.text)
        return (Part(kind, use.column(), (values,)),)

    return make


#: By Spark's class. Names are those in SQL and PySpark, also of functions that Spark makes this one of.
FUNCTIONS: Mapping[str, Function] = {
    "Count": Function(("count", "count_if"), _count),
    "Sum": Function(("sum",), _sum),
    "Average": Function(("avg", "mean"), _average),
    "Min": Function(("min", "bool_and"), _extreme(AccumulatorKind.MIN)),
    "Max": Function(("max", "bool_or"), _extreme(AccumulatorKind.MAX)),
    "First": Function(("first", "any_value"), _positional(AccumulatorKind.FIRST, AccumulatorKind.FIRST_VALID)),
    "Last": Function(("last",), _positional(AccumulatorKind.LAST, AccumulatorKind.LAST_VALID)),
    "StddevSamp": Function(("stddev", "stddev_samp"), _moments),
    "StddevPop": Function(("stddev_pop",), _moments),
    "VarianceSamp": Function(("variance", "var_samp"), _moments),
    "VariancePop": Function(("var_pop",), _moments),
    "CollectList": Function(("collect_list", "array_agg"), _collected(AccumulatorKind.COLLECT_LIST), is_state=True),
    "CollectSet": Function(("collect_set",), _collected(AccumulatorKind.COLLECT_SET), is_state=True),
}


def held_functions() -> list[str]:
    """Names of all aggregate functions that the fleet holds."""
    return [name for function in FUNCTIONS.values() for name in function.names]

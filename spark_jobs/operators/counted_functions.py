"""Accumulators of the functions that count the values of a group: the mode and the percentiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.schema import AccumulatorKind
from spark_jobs.operators.accumulator_parts import Part, Use
from spark_jobs.plan.aggregate_functions import AggregateFunction
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.state_types import counts_field, list_field, state_field
from spark_jobs.plan.storable import stored_type

__all__ = ["approximate_percentile", "discrete_percentile", "mode", "of_its_type", "percentile"]

_INTERVALS = (T.DayTimeIntervalType, T.YearMonthIntervalType)
#: How a percentile is chosen: ``rule`` of ``store_actors.engine.count_kernels.choose``.
_BETWEEN, _A_VALUE = 0, 1


def mode(use: Use) -> tuple[Part, ...]:
    """The value that came most often."""
    held = stored_type(use.child().type)
    state = counts_field("values", held, what=use.text)
    return (
        Part(AccumulatorKind.COUNTED, (use.column(),), (state,), result=(state_field("values", held, nested=True),)),
    )


def percentile(use: Use) -> tuple[Part, ...]:
    """Values between those that are there, each counted as often as the use says."""
    child, _, *often = use.function.children
    column = use.column() if isinstance(child.type, _INTERVALS) else use.double()
    inputs: tuple[Column, ...] = (column,)
    if often and often[0].kind != "Literal":
        negative = F.concat(
            F.lit("[NEGATIVE_VALUES_IN_FREQUENCY_EXPRESSION] Found the negative value in "),
            F.lit(f"{often[0].sql}: "),
            often[0].column().cast("string"),
            F.lit(", but expected a positive integral value."),
        )
        count = often[0].column().cast("long")
        inputs += (use.kept(F.when(count < 0, F.raise_error(negative)).otherwise(count)),)
    elif often and often[0].literal != 1:
        inputs += (use.kept(F.lit(often[0].literal).cast("long")),)
    return (_chosen(use, inputs, child.type if isinstance(child.type, _INTERVALS) else T.DoubleType(), _BETWEEN),)


def discrete_percentile(use: Use) -> tuple[Part, ...]:
    """Values that are there."""
    part = percentile(use)[0]
    return (replace(part, options={**part.options, "rule": -2 if use.function.is_descending else _A_VALUE}),)


def approximate_percentile(use: Use) -> tuple[Part, ...]:
    """Values that are there, of exactly the rank that is asked for; Spark itself goes by a sketch."""
    # Spark's sketch is of doubles, too.
    is_decimal = isinstance(use.child().type, T.DecimalType)
    column = use.double() if is_decimal else use.column()
    return (_chosen(use, (column,), T.DoubleType() if is_decimal else use.child().type, _A_VALUE),)


def _chosen(use: Use, inputs: tuple[Column, ...], value: T.DataType, rule: int) -> Part:
    """Counted values, of which percentiles are emitted."""
    held, function = stored_type(value), use.function
    result = state_field("values", held)
    if isinstance(function.type, T.ArrayType):
        result = replace(list_field("values", held, what=use.text), nullable=True)
    options = {"percentages": list(function.percentages), "rule": -1 - rule if function.is_descending else rule}
    state = counts_field("values", held, what=use.text)
    return Part(AccumulatorKind.COUNTED, inputs, (state,), result=(result,), options=options)


def of_its_type(function: AggregateFunction, columns: Sequence[Column]) -> Column:
    """What is emitted is the result, as doubles if that is of decimals."""
    (column,), kind = columns, function.type
    if isinstance(kind, T.DecimalType):
        return column.cast(kind)
    if isinstance(kind, T.ArrayType) and isinstance(kind.elementType, T.DecimalType):
        decimal = kind.elementType
        # A decimal's double is one again, so none becomes null; Spark is to know that.
        return F.transform(column, lambda one: Expression.of(one.cast(decimal)).known_not_null().column())
    return column

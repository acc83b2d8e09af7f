"""Accumulators of the functions that count the values of a group: the mode and the percentiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.accumulator_kinds import AccumulatorKind
from spark_jobs.operators.accumulator_parts import Part, Use
from spark_jobs.plan.aggregate_functions import AggregateFunction
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.state_types import counts_field, list_field, state_field
from spark_jobs.plan.storable import stored_type

_INTERVALS = (T.DayTimeIntervalType, T.YearMonthIntervalType)
#: How a percentile is chosen: the ``rule`` of ``store_actors.engine.count_kernels.choose``.
_BETWEEN, _A_VALUE = 0, 1


def mode(use: Use) -> tuple[Part, ...]:
    """Return the accumulator of the most frequent value."""
    value_type = stored_type(use.child().type)
    state = counts_field("values", value_type, subject=use.text)
    return (
        Part(
            AccumulatorKind.COUNTED, (use.column(),), (state,), result=(state_field("values", value_type, nested=True),)
        ),
    )


def percentile(use: Use) -> tuple[Part, ...]:
    """Return the accumulator of interpolated percentiles; the use may have a frequency for each value."""
    child, _, *frequency = use.function.children
    column = use.column() if isinstance(child.type, _INTERVALS) else use.double()
    inputs: tuple[Column, ...] = (column,)
    if frequency and frequency[0].kind != "Literal":
        negative = F.concat(
            F.lit("[NEGATIVE_VALUES_IN_FREQUENCY_EXPRESSION] Found the negative value in "),
            F.lit(f"{frequency[0].sql}: "),
            frequency[0].column().cast("string"),
            F.lit(", but expected a positive integral value."),
        )
        count = frequency[0].column().cast("long")
        inputs += (use.kept(F.when(count < 0, F.raise_error(negative)).otherwise(count)),)
    elif frequency and frequency[0].literal != 1:
        inputs += (use.kept(F.lit(frequency[0].literal).cast("long")),)
    return (_chosen(use, inputs, child.type if isinstance(child.type, _INTERVALS) else T.DoubleType(), _BETWEEN),)


def discrete_percentile(use: Use) -> tuple[Part, ...]:
    """Return the accumulator of percentiles that are values of the group."""
    part = percentile(use)[0]
    return (replace(part, options={**part.options, "rule": -2 if use.function.is_descending else _A_VALUE}),)


def approximate_percentile(use: Use) -> tuple[Part, ...]:
    """Return the accumulator of percentiles of exactly the requested rank; Spark itself uses a sketch."""
    # Spark's sketch of decimals also has doubles.
    is_decimal = isinstance(use.child().type, T.DecimalType)
    column = use.double() if is_decimal else use.column()
    return (_chosen(use, (column,), T.DoubleType() if is_decimal else use.child().type, _A_VALUE),)


def _chosen(use: Use, inputs: tuple[Column, ...], value: T.DataType, rule: int) -> Part:
    """Return the accumulator of counted values, which emits percentiles."""
    value_type, function = stored_type(value), use.function
    result = state_field("values", value_type)
    if isinstance(function.type, T.ArrayType):
        result = structs.replace(list_field("values", value_type, subject=use.text), nullable=True)
    options = {"percentages": list(function.percentages), "rule": -1 - rule if function.is_descending else rule}
    state = counts_field("values", value_type, subject=use.text)
    return Part(AccumulatorKind.COUNTED, inputs, (state,), result=(result,), options=options)


def of_its_type(function: AggregateFunction, columns: Sequence[Column]) -> Column:
    """Return the emitted column in the function's type: decimals are emitted as doubles."""
    (column,), kind = columns, function.type
    if isinstance(kind, T.DecimalType):
        return column.cast(kind)
    if isinstance(kind, T.ArrayType) and isinstance(kind.elementType, T.DecimalType):
        decimal = kind.elementType
        # A decimal's double converts back to a decimal, never to null; Spark must know that.
        return F.transform(column, lambda value: Expression.of(value.cast(decimal)).known_not_null().column())
    return column

"""Accumulators of the functions that keep a summary of a group of a bounded size: sketches, bitmaps and histograms."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.schema import AccumulatorKind, Field
from coordinator.model.type_names import words_type
from spark_jobs.operators.accumulator_parts import Part, Use, doubles
from spark_jobs.plan.aggregate_functions import AggregateFunction
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.state_types import bins_field, list_field, state_field, words_field
from spark_jobs.plan.storable import stored_type

__all__ = [
    "bitmap",
    "count_min_sketch",
    "estimate",
    "histogram",
    "histogram_of_its_type",
    "hll_sketch",
    "registers",
    "united_bitmaps",
]

_BITMAP_BYTES = 4096
_BITMAP = words_type(_BITMAP_BYTES // 8)


def registers(use: Use) -> tuple[Part, ...]:
    """Registers of Spark's HyperLogLog++, over hashes of the argument."""
    child = use.child()
    # As Spark's own: of floats, each NaN is one value, and -0.0 is 0.0.
    value = child.normalised() if isinstance(child.type, T.FloatType | T.DoubleType) else child
    hashed = use.kept(F.when(child.column().isNotNull(), F.xxhash64(value.column())))
    state = words_field("registers", use.function.registers.slots)
    result = doubles("total", "zeros")
    return (Part(AccumulatorKind.DISTINCT_REGISTERS, (hashed,), (state,), result=result),)


def estimate(function: AggregateFunction, columns: Sequence[Column]) -> Column:
    """How many distinct values the registers have seen, as Spark estimates it."""
    total, zeros = columns
    return function.registers.estimate(total, zeros)


def bitmap(use: Use) -> tuple[Part, ...]:
    """The bits at the positions that the argument gives."""
    position = use.child().column()
    words = F.concat(
        F.lit("[INVALID_BITMAP_POSITION] The 0-indexed bitmap position "),
        position.cast("string"),
        F.lit(f" is out of bounds. The bitmap has {_BITMAP_BYTES * 8} bits ({_BITMAP_BYTES} bytes)."),
    )
    # Spark's error is of the row, not of its group.
    checked = F.when((position < 0) | (position >= _BITMAP_BYTES * 8), F.raise_error(words)).otherwise(position)
    return (_bits(AccumulatorKind.BITMAP, use.kept(checked), None),)


def united_bitmaps(use: Use) -> tuple[Part, ...]:
    """The bits that any bitmap has."""
    # Of a longer one Spark takes as much as a bitmap has, too.
    sized = F.call_function("rpad", use.column(), F.lit(_BITMAP_BYTES), F.expr("x'00'"))
    return (_bits(AccumulatorKind.BITMAP_OR, sized, _BITMAP),)


def _bits(kind: AccumulatorKind, column: Column, input_type: str | None) -> Part:
    state = Field("bits", _BITMAP, nullable=False)
    return Part(kind, (column,), (state,), result=(state_field("bits", T.BinaryType(), False),), input_type=input_type)


def count_min_sketch(use: Use) -> tuple[Part, ...]:
    """Spark's count-min sketch, as its bytes."""
    table, child = use.function.empty_sketch, use.child()
    kind = AccumulatorKind.COUNT_MIN
    if isinstance(child.type, T.StringType | T.BinaryType):
        # Two 32-bit hashes, the second one under the first as its seed, in one word.
        kind = AccumulatorKind.COUNT_MIN_BYTES
        first, second = child.murmur(0).column().cast("long"), child.murmur(0, times=2).column().cast("long")
        packed = F.shiftleft(first, 32).bitwiseOR(second.bitwiseAND(F.lit(0xFFFFFFFF)))
        column = F.when(child.column().isNotNull(), packed)
    else:
        column = child.column().cast("long")
    state = words_field("sketch", len(table.head) + table.depth * table.width)
    options = {"initial": list(table.head), "depth": table.depth}
    result = (state_field("sketch", T.BinaryType(), False),)
    return (Part(kind, (use.kept(column),), (state,), result=result, options=options),)


def hll_sketch(use: Use) -> tuple[Part, ...]:
    """The sketch of Apache DataSketches, of values or of other sketches."""
    child, function = use.child(), use.function
    kind, column = AccumulatorKind.HLL_SKETCH, child.column()
    if function.kind == "HllUnionAgg":
        # By itself a sketch stays what it is, and is written in one form, whoever made it.
        kind, column = AccumulatorKind.HLL_UNION, F.hll_union(column, column, allowDifferentLgConfigK=True)
    elif isinstance(child.type, T.IntegerType):
        column = column.cast("long")
    state = (list_field("sketch", T.IntegerType(), what=use.text),)
    options = {"lg_k": function.lg_config_k, "may_differ": function.may_differ}
    result = (state_field("sketch", T.BinaryType(), False),)
    return (Part(kind, (use.kept(column),), state, result=result, options=options),)


def histogram(use: Use) -> tuple[Part, ...]:
    """Bins of values that are near each other, at most as many as the use asks for."""
    kind, bins = use.child().type, use.function.bins
    is_number = isinstance(kind, T.NumericType)
    options = {"bins": bins, "floating": is_number}
    # How many bins are used, and of each its place and its height; and room for one more.
    state = words_field("bins", 1 + 2 * (bins + 1))
    place = T.DoubleType() if isinstance(kind, T.DecimalType) else stored_type(kind)
    result = (bins_field("bins", place, what=use.text),)
    column = use.double() if is_number else use.column()
    return (Part(AccumulatorKind.HISTOGRAM, (column,), (state,), result=result, options=options),)


def histogram_of_its_type(function: AggregateFunction, columns: Sequence[Column]) -> Column:
    """The bins, with places that are decimals again if the argument is."""
    (column,), kind = columns, function.type
    assert isinstance(kind, T.ArrayType)
    assert isinstance(kind.elementType, T.StructType)
    place = kind.elementType["x"].dataType
    if not isinstance(place, T.DecimalType):
        return column

    def typed(one: Column) -> Column:
        bins = F.struct(one["x"].cast(place).alias("x"), one["y"].alias("y"))
        return Expression.of(bins).known_nullable().column()

    return F.transform(column, typed)

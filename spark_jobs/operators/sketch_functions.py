"""Accumulators of the functions that keep a summary of bounded size of a group: sketches, bitmaps and histograms."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Field
from coordinator.model.type_names import words_type
from spark_jobs.operators.accumulator_parts import Part, Use, doubles
from spark_jobs.plan.aggregate_functions import AggregateFunction
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.state_types import bins_field, list_field, state_field, words_field
from spark_jobs.plan.storable import stored_type

_BITMAP_BYTES = 4096
_BITMAP = words_type(_BITMAP_BYTES // 8)


def registers(use: Use) -> tuple[Part, ...]:
    """Return the accumulator of Spark's HyperLogLog++: registers, over hashes of the argument."""
    child = use.child()
    # As in Spark's own: among floats, all NaNs are one value, and -0.0 equals 0.0.
    value = child.normalised() if isinstance(child.type, T.FloatType | T.DoubleType) else child
    hashes = use.kept(F.when(child.column().isNotNull(), F.xxhash64(value.column())))
    state = words_field("registers", use.function.registers.slots)
    result = doubles("total", "zeros")
    values = use.kept(child.column())
    return (Part(AccumulatorKind.DISTINCT_REGISTERS, (hashes,), (state,), result=result, hashed=values),)


def estimate(function: AggregateFunction, columns: Sequence[Column]) -> Column:
    """Return the number of distinct values that the registers have seen, as Spark estimates it."""
    total, zeros = columns
    return function.registers.estimate(total, zeros)


def bitmap(use: Use) -> tuple[Part, ...]:
    """Return the accumulator of a bitmap of the positions that the argument has."""
    position = use.child().column()
    error = F.concat(
        F.lit("[INVALID_BITMAP_POSITION] The 0-indexed bitmap position "),
        position.cast("string"),
        F.lit(f" is out of bounds. The bitmap has {_BITMAP_BYTES * 8} bits ({_BITMAP_BYTES} bytes)."),
    )
    # Raised for the row, as in Spark, and not for its group.
    checked = F.when((position < 0) | (position >= _BITMAP_BYTES * 8), F.raise_error(error)).otherwise(position)
    return (_bits(AccumulatorKind.BITMAP, use.kept(checked), None),)


def united_bitmaps(use: Use) -> tuple[Part, ...]:
    """Return the accumulator of the union of bitmaps."""
    # Spark also truncates longer ones to the size of a bitmap.
    sized = F.call_function("rpad", use.column(), F.lit(_BITMAP_BYTES), F.expr("x'00'"))
    return (_bits(AccumulatorKind.BITMAP_OR, sized, _BITMAP),)


def _bits(kind: AccumulatorKind, column: Column, input_type: str | None) -> Part:
    state = Field("bits", _BITMAP, nullable=False)
    return Part(kind, (column,), (state,), result=(state_field("bits", T.BinaryType(), False),), input_type=input_type)


def count_min_sketch(use: Use) -> tuple[Part, ...]:
    """Return the accumulator of Spark's count-min sketch, emitted as its bytes."""
    table, child = use.function.empty_sketch, use.child()
    kind = AccumulatorKind.COUNT_MIN
    if isinstance(child.type, T.StringType | T.BinaryType):
        # Two 32-bit hashes in a 64-bit number; the first is the seed of the second.
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
    """Return the accumulator of a sketch of Apache DataSketches, of values or of other sketches."""
    child, function = use.child(), use.function
    kind, column = AccumulatorKind.HLL_SKETCH, child.column()
    if function.kind == "HllUnionAgg":
        # The union of a sketch with itself is the same sketch, in one serialised form for all writers.
        kind, column = AccumulatorKind.HLL_UNION, F.hll_union(column, column, allowDifferentLgConfigK=True)
    elif isinstance(child.type, T.IntegerType):
        column = column.cast("long")
    state = (list_field("sketch", T.IntegerType(), subject=use.text),)
    options = {"lg_k": function.lg_config_k, "may_differ": function.may_differ}
    result = (state_field("sketch", T.BinaryType(), False),)
    return (Part(kind, (use.kept(column),), state, result=result, options=options),)


def histogram(use: Use) -> tuple[Part, ...]:
    """Return the accumulator of a histogram, with at most as many bins as the use asks for."""
    kind, bins = use.child().type, use.function.bins
    is_number = isinstance(kind, T.NumericType)
    options = {"bins": bins, "floating": is_number}
    # The number of used bins, then the centre and the height of each, with capacity for one more bin.
    state = words_field("bins", 1 + 2 * (bins + 1))
    centre = T.DoubleType() if isinstance(kind, T.DecimalType) else stored_type(kind)
    result = (bins_field("bins", centre, subject=use.text),)
    column = use.double() if is_number else use.column()
    return (Part(AccumulatorKind.HISTOGRAM, (column,), (state,), result=result, options=options),)


def histogram_of_its_type(function: AggregateFunction, columns: Sequence[Column]) -> Column:
    """Return the bins, with centres in decimals if the argument has them."""
    (column,), kind = columns, function.type
    assert isinstance(kind, T.ArrayType)
    assert isinstance(kind.elementType, T.StructType)
    centre = kind.elementType["x"].dataType
    if not isinstance(centre, T.DecimalType):
        return column

    def typed(row: Column) -> Column:
        typed_bin = F.struct(row["x"].cast(centre).alias("x"), row["y"].alias("y"))
        return Expression.of(typed_bin).known_nullable().column()

    return F.transform(column, typed)

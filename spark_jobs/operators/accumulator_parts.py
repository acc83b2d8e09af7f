"""The accumulators of an aggregate function, each over columns of the query where the FILTER of its use holds; and those of functions
that count the values of a group (the mode and the percentiles), or keep a summary of bounded size of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Field
from coordinator.model.type_names import words_type
from spark_jobs.plan.aggregate_functions import AggregateFunction
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.storable import bins_field, counts_field, list_field, state_field, stored, stored_type, words_field

_INTERVALS = (T.DayTimeIntervalType, T.YearMonthIntervalType)
#: How a percentile is chosen: the ``rule`` of ``store_actors.engine.count_kernels.choose``.
_BETWEEN, _A_VALUE = 0, 1
_BITMAP_BYTES = 4096
_BITMAP = words_type(_BITMAP_BYTES // 8)


@dataclass(frozen=True)
class Part:
    """An accumulator of an aggregate: its kind, its inputs (none for rows), its state fields, and its fingerprint.

    The state fields of all parts of an aggregate, in order, correspond to the function's ``aggBufferAttributes``.
    """

    kind: AccumulatorKind
    inputs: tuple[Column, ...]
    #: Their names are suffixes until :meth:`named`.
    state: tuple[Field, ...]
    fingerprint: str = ""
    cast: str = ""
    #: Fields that are emitted, if not the state; named in the same way.
    result: tuple[Field, ...] = ()
    #: Options of the emitted result (``coordinator.model.schema.Accumulator``).
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Type of its inputs in the state's schema, if it differs from that of Spark's column.
    input_type: str | None = None
    #: The values of which the input has hashes: Spark's own partial aggregation hashes them itself.
    hashed: Column | None = None

    def named(self, prefix: str) -> Part:
        """Return the part with the prefix of its aggregate on its fields."""

        def prefixed(fields: tuple[Field, ...]) -> tuple[Field, ...]:
            return tuple(structs.replace(field, name=f"{prefix}_{field.name}") for field in fields)

        return replace(self, state=prefixed(self.state), result=prefixed(self.result))


@dataclass(frozen=True)
class Use:
    """A use of a function in a query."""

    function: AggregateFunction
    text: str
    where: Column | None

    def child(self, number: int = 0) -> Expression:
        return self.function.children[number]

    def kept(self, column: Column) -> Column:
        """Return the column where the aggregate's FILTER holds, and null where it does not."""
        return column if self.where is None else F.when(self.where, column)

    def column(self, number: int = 0) -> Column:
        """Return an argument as it is stored, where the FILTER holds."""
        child = self.child(number)
        return self.kept(stored(child.column(), child.type))

    def double(self, number: int = 0) -> Column:
        """Return an argument as a double, where the FILTER holds."""
        return self.kept(self.child(number).column().cast(T.DoubleType()))

    def value(self, name: str, number: int = 0) -> Field:
        """Return the state field of an argument."""
        return state_field(name, stored_type(self.child(number).type), subject=self.text, nested=True)


def doubles(*names: str) -> tuple[Field, ...]:
    """Return state fields of doubles that are never null."""
    return tuple(state_field(name, T.DoubleType(), False) for name in names)


def mode(use: Use) -> tuple[Part, ...]:
    """Return the accumulator of the most frequent value."""
    value_type = stored_type(use.child().type)
    state = counts_field(value_type, subject=use.text)
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
    state = counts_field(value_type, subject=use.text)
    return Part(AccumulatorKind.COUNTED, inputs, (state,), result=(result,), options=options)


def of_its_type(function: AggregateFunction, columns: Sequence[Column]) -> Column:
    """Return the emitted column in the function's type: decimals are emitted as doubles."""
    (column,), kind = columns, function.type
    if isinstance(kind, T.DecimalType):
        return column.cast(kind)
    if isinstance(kind, T.ArrayType) and isinstance(kind.elementType, T.DecimalType):
        decimal = kind.elementType
        # A decimal's double converts back to a decimal, never to null; Spark must know that.
        return F.transform(column, lambda value: Expression.of(value.cast(decimal)).known(nullable=False).column())
    return column


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
        first, second = child.murmur().column().cast("long"), child.murmur(times=2).column().cast("long")
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
        return Expression.of(typed_bin).known(nullable=True).column()

    return F.transform(column, typed)

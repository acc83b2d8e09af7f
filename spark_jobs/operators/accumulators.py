"""Which accumulators make up each of Spark's aggregate functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.errors import InvalidRequestError
from spark_jobs.operators.meaning import meaning_of
from spark_jobs.plan.aggregate_functions import AggregateExpression, AggregateFunction
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.state_types import (
    bins_field,
    counts_field,
    list_field,
    state_field,
    words_field,
)
from spark_jobs.plan.storable import stored, stored_type
from store_actors.schema import AccumulatorKind, Field
from store_actors.type_names import words_type

__all__ = ["FUNCTIONS", "Function", "Part", "emitted_result", "held_functions", "parts_of"]


@dataclass(frozen=True)
class Part:
    """One accumulator of an aggregate: its kind, its inputs (none for rows), its state fields, and what it means.

    The state fields of all parts, in order, stand for the function's ``aggBufferAttributes``.
    """

    kind: AccumulatorKind
    inputs: tuple[Column, ...]
    #: Named by suffixes.
    state: tuple[Field, ...]
    meaning: str = ""
    cast: str = ""
    #: What is emitted of it, if not its state; named as that is.
    result: tuple[Field, ...] = ()
    #: What else that depends on (``store_actors.schema.Accumulator``).
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Type of its inputs in the state's schema, if not what Spark's column tells.
    input_type: str | None = None

    def named(self, prefix: str) -> Part:
        """Its fields with a prefix of their aggregate's own."""

        def prefixed(fields: tuple[Field, ...]) -> tuple[Field, ...]:
            return tuple(replace(one, name=f"{prefix}_{one.name}") for one in fields)

        return replace(self, state=prefixed(self.state), result=prefixed(self.result))


@dataclass(frozen=True)
class Function:
    """One of Spark's aggregate functions: its names, and the accumulators that a use of it takes.

    Attributes
    ----------
    result
        Makes the result of the function and the columns that its parts emit. None: by Spark's own final expression.
    """

    names: tuple[str, ...]
    parts: Callable[[_Use], tuple[Part, ...]]
    result: Callable[[AggregateFunction, Sequence[Column]], Column] | None = None


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

    def child(self, number: int = 0) -> Expression:
        return self.function.children[number]

    def kept(self, column: Column) -> Column:
        """The column where the aggregate's FILTER holds, null elsewhere."""
        return column if self.where is None else F.when(self.where, column)

    def column(self, number: int = 0) -> Column:
        """An argument, as a state holds it, where the FILTER holds."""
        child = self.child(number)
        return self.kept(stored(child.column(), child.type))

    def double(self, number: int = 0) -> Column:
        """An argument as a double, where the FILTER holds."""
        return self.kept(self.child(number).column().cast(T.DoubleType()))

    def value(self, name: str, number: int = 0) -> Field:
        """State field for an argument."""
        return state_field(name, stored_type(self.child(number).type), what=self.text, nested=True)


def _count(use: _Use) -> tuple[Part, ...]:
    needed = [child.column().isNotNull() for child in use.function.children if child.nullable]
    state = (state_field("count", T.LongType(), False),)
    if not needed and use.where is None:
        return (Part(AccumulatorKind.COUNT_ROWS, (), state),)
    present = use.where if use.where is not None else F.lit(True)
    for column in needed:
        present = present & column
    return (Part(AccumulatorKind.COUNT_VALID, (F.when(present, F.lit(True)),), state),)


def _sum(use: _Use) -> tuple[Part, ...]:
    return (_summed(use, use.function.type),)


def _average(use: _Use) -> tuple[Part, ...]:
    total = _summed(use, use.function.buffer[0].type)
    return (total, Part(AccumulatorKind.COUNT_VALID, total.inputs, (state_field("count", T.LongType(), False),)))


def _summed(use: _Use, kind: T.DataType) -> Part:
    """The sum, of a type, of the argument."""
    column, held = use.kept(stored(use.child().column().cast(kind), kind)), stored_type(kind)
    total, is_empty = state_field("sum", held), state_field("is_empty", T.BooleanType(), False)
    if isinstance(kind, T.DecimalType):
        return Part(AccumulatorKind.SUM_DECIMAL, (column,), (total, is_empty))
    if isinstance(kind, T.DoubleType):
        return Part(AccumulatorKind.SUM_FLOAT, (column,), (total,))
    mode = use.function.eval_mode
    if isinstance(kind, T.LongType) and mode == "LEGACY":
        return Part(AccumulatorKind.SUM_INT, (column,), (total,))
    # Sums of intervals never wrap.
    checked = AccumulatorKind.SUM_INT_OR_NULL if mode == "TRY" else AccumulatorKind.SUM_INT_CHECKED
    return Part(checked, (column,), (total, is_empty))


def _folded(kind: AccumulatorKind) -> Callable[[_Use], tuple[Part, ...]]:
    """Of one argument, to one value of its type."""

    def make(use: _Use) -> tuple[Part, ...]:
        return (Part(kind, (use.column(),), (use.value("value"),)),)

    return make


def _by_ordering(kind: AccumulatorKind) -> Callable[[_Use], tuple[Part, ...]]:
    def make(use: _Use) -> tuple[Part, ...]:
        return (Part(kind, (use.column(), use.column(1)), (use.value("value"), use.value("ordering", 1))),)

    return make


def _positional(any_kind: AccumulatorKind, valid_kind: AccumulatorKind) -> Callable[[_Use], tuple[Part, ...]]:
    def make(use: _Use) -> tuple[Part, ...]:
        state = (use.value("value"), state_field("value_set", T.BooleanType(), False))
        if use.function.ignores_nulls:
            return (Part(valid_kind, (use.column(),), state),)
        if use.where is None:
            return (Part(any_kind, (use.column(),), state),)
        # A null where the FILTER holds is a value, so what it leaves out must be told otherwise.
        return (Part(any_kind, (use.column(), F.coalesce(use.where, F.lit(False))), state),)

    return make


def _doubles(*names: str) -> tuple[Field, ...]:
    return tuple(state_field(name, T.DoubleType(), False) for name in names)


def _moments(kind: AccumulatorKind, *further: str) -> Callable[[_Use], tuple[Part, ...]]:
    def make(use: _Use) -> tuple[Part, ...]:
        return (Part(kind, (use.double(),), _doubles("n", "avg", "m2", *further)),)

    return make


_PAIRED = ("n", "x_avg", "y_avg", "ck")


def _co_moments(kind: AccumulatorKind, *further: str) -> Callable[[_Use], tuple[Part, ...]]:
    def make(use: _Use) -> tuple[Part, ...]:
        return (Part(kind, (use.double(0), use.double(1)), _doubles(*_PAIRED, *further)),)

    return make


def _regression(use: _Use) -> tuple[Part, ...]:
    """Of y and x: their covariance, and the variance of the x that have a y."""
    y, x = use.double(0), use.double(1)
    return (
        Part(AccumulatorKind.COVARIANCE, (x, y), _doubles(*_PAIRED)),
        Part(AccumulatorKind.MOMENTS, (F.when(y.isNotNull(), x),), _doubles("x_n", "x_mean", "x_m2")),
    )


def _collected(kind: AccumulatorKind) -> Callable[[_Use], tuple[Part, ...]]:
    def make(use: _Use) -> tuple[Part, ...]:
        values = list_field("values", stored_type(use.child().type), what=use.text)
        return (Part(kind, (use.column(),), (values,)),)

    return make


def emitted_result(function: AggregateFunction, columns: Sequence[Column]) -> Column:
    """What is emitted is the result."""
    (column,) = columns
    return column


def _registers(use: _Use) -> tuple[Part, ...]:
    child = use.child()
    # As Spark's own: of floats, each NaN is one value, and -0.0 is 0.0.
    value = child.normalised() if isinstance(child.type, T.FloatType | T.DoubleType) else child
    hashed = use.kept(F.when(child.column().isNotNull(), F.xxhash64(value.column())))
    state = words_field("registers", use.function.registers.words)
    result = _doubles("total", "zeros")
    return (Part(AccumulatorKind.DISTINCT_REGISTERS, (hashed,), (state,), result=result),)


def _estimate(function: AggregateFunction, columns: Sequence[Column]) -> Column:
    total, zeros = columns
    return function.registers.estimate(total, zeros)


_INTERVALS = (T.DayTimeIntervalType, T.YearMonthIntervalType)
_BITMAP_BYTES = 4096
_BITMAP = words_type(_BITMAP_BYTES // 8)


def _bitmap(use: _Use) -> tuple[Part, ...]:
    position = use.child().column()
    words = F.concat(
        F.lit("[INVALID_BITMAP_POSITION] The 0-indexed bitmap position "),
        position.cast("string"),
        F.lit(f" is out of bounds. The bitmap has {_BITMAP_BYTES * 8} bits ({_BITMAP_BYTES} bytes)."),
    )
    # Spark's error is of the row, not of its group.
    checked = F.when((position < 0) | (position >= _BITMAP_BYTES * 8), F.raise_error(words)).otherwise(position)
    return (_bits(AccumulatorKind.BITMAP, use.kept(checked), None),)


def _united_bitmaps(use: _Use) -> tuple[Part, ...]:
    # Of a longer one Spark takes as much as a bitmap has, too.
    sized = F.call_function("rpad", use.column(), F.lit(_BITMAP_BYTES), F.expr("x'00'"))
    return (_bits(AccumulatorKind.BITMAP_OR, sized, _BITMAP),)


def _mode(use: _Use) -> tuple[Part, ...]:
    held = stored_type(use.child().type)
    state = counts_field("values", held, what=use.text)
    return (
        Part(AccumulatorKind.COUNTED, (use.column(),), (state,), result=(state_field("values", held, nested=True),)),
    )


#: How a percentile is chosen: ``rule`` of ``store_actors.engine.count_kernels.choose``.
_BETWEEN, _A_VALUE = 0, 1


def _percentile(use: _Use) -> tuple[Part, ...]:
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


def _discrete_percentile(use: _Use) -> tuple[Part, ...]:
    part = _percentile(use)[0]
    return (replace(part, options={**part.options, "rule": -2 if use.function.is_descending else _A_VALUE}),)


def _approximate_percentile(use: _Use) -> tuple[Part, ...]:
    # Spark's sketch is of doubles, too.
    is_decimal = isinstance(use.child().type, T.DecimalType)
    column = use.double() if is_decimal else use.column()
    return (_chosen(use, (column,), T.DoubleType() if is_decimal else use.child().type, _A_VALUE),)


def _chosen(use: _Use, inputs: tuple[Column, ...], value: T.DataType, rule: int) -> Part:
    """Counted values, of which percentiles are emitted."""
    held, function = stored_type(value), use.function
    result = state_field("values", held)
    if isinstance(function.type, T.ArrayType):
        result = replace(list_field("values", held, what=use.text), nullable=True)
    options = {"percentages": list(function.percentages), "rule": -1 - rule if function.is_descending else rule}
    state = counts_field("values", held, what=use.text)
    return Part(AccumulatorKind.COUNTED, inputs, (state,), result=(result,), options=options)


def _of_its_type(function: AggregateFunction, columns: Sequence[Column]) -> Column:
    """What is emitted is the result, as doubles if that is of decimals."""
    (column,), kind = columns, function.type
    if isinstance(kind, T.DecimalType):
        return column.cast(kind)
    if isinstance(kind, T.ArrayType) and isinstance(kind.elementType, T.DecimalType):
        decimal = kind.elementType
        # A decimal's double is one again, so none becomes null; Spark is to know that.
        return F.transform(column, lambda one: Expression.of(one.cast(decimal)).known_not_null().column())
    return column


def _count_min_sketch(use: _Use) -> tuple[Part, ...]:
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


def _hll_sketch(use: _Use) -> tuple[Part, ...]:
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


def _histogram(use: _Use) -> tuple[Part, ...]:
    kind, bins = use.child().type, use.function.bins
    is_number = isinstance(kind, T.NumericType)
    options = {"bins": bins, "floating": is_number}
    # How many bins are used, and of each its place and its height; and room for one more.
    state = words_field("bins", 1 + 2 * (bins + 1))
    place = T.DoubleType() if isinstance(kind, T.DecimalType) else stored_type(kind)
    result = (bins_field("bins", place, what=use.text),)
    column = use.double() if is_number else use.column()
    return (Part(AccumulatorKind.HISTOGRAM, (column,), (state,), result=result, options=options),)


def _histogram_of_its_type(function: AggregateFunction, columns: Sequence[Column]) -> Column:
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


def _bits(kind: AccumulatorKind, column: Column, input_type: str | None) -> Part:
    state = Field("bits", _BITMAP, nullable=False)
    return Part(kind, (column,), (state,), result=(state_field("bits", T.BinaryType(), False),), input_type=input_type)


#: By Spark's class. Names are those in SQL and PySpark, also of functions that Spark makes this one of.
FUNCTIONS: Mapping[str, Function] = {
    "Count": Function(("count", "count_if", "regr_count"), _count),
    "Sum": Function(("sum", "try_sum"), _sum),
    "Average": Function(("avg", "mean", "try_avg", "regr_avgx", "regr_avgy"), _average),
    "Min": Function(("min", "bool_and", "every"), _folded(AccumulatorKind.MIN)),
    "Max": Function(("max", "bool_or", "some", "any"), _folded(AccumulatorKind.MAX)),
    "MaxBy": Function(("max_by",), _by_ordering(AccumulatorKind.MAX_BY)),
    "MinBy": Function(("min_by",), _by_ordering(AccumulatorKind.MIN_BY)),
    "First": Function(
        ("first", "first_value", "any_value"), _positional(AccumulatorKind.FIRST, AccumulatorKind.FIRST_VALID)
    ),
    "Last": Function(("last", "last_value"), _positional(AccumulatorKind.LAST, AccumulatorKind.LAST_VALID)),
    "StddevSamp": Function(("stddev", "std", "stddev_samp"), _moments(AccumulatorKind.MOMENTS)),
    "StddevPop": Function(("stddev_pop",), _moments(AccumulatorKind.MOMENTS)),
    "VarianceSamp": Function(("variance", "var_samp"), _moments(AccumulatorKind.MOMENTS)),
    "VariancePop": Function(("var_pop",), _moments(AccumulatorKind.MOMENTS)),
    "Skewness": Function(("skewness",), _moments(AccumulatorKind.MOMENTS_3, "m3")),
    "Kurtosis": Function(("kurtosis",), _moments(AccumulatorKind.MOMENTS_4, "m3", "m4")),
    "Corr": Function(("corr",), _co_moments(AccumulatorKind.CORRELATION, "x_m2", "y_m2")),
    "CovPopulation": Function(("covar_pop",), _co_moments(AccumulatorKind.COVARIANCE)),
    "CovSample": Function(("covar_samp",), _co_moments(AccumulatorKind.COVARIANCE)),
    "RegrR2": Function(("regr_r2",), _co_moments(AccumulatorKind.CORRELATION, "x_m2", "y_m2")),
    "RegrReplacement": Function(("regr_sxx", "regr_syy"), _moments(AccumulatorKind.MOMENTS)),
    "RegrSXY": Function(("regr_sxy",), _co_moments(AccumulatorKind.COVARIANCE)),
    "RegrSlope": Function(("regr_slope",), _regression),
    "RegrIntercept": Function(("regr_intercept",), _regression),
    "Product": Function(("product",), _folded(AccumulatorKind.PRODUCT)),
    "BitAndAgg": Function(("bit_and",), _folded(AccumulatorKind.BIT_AND)),
    "BitOrAgg": Function(("bit_or",), _folded(AccumulatorKind.BIT_OR)),
    "BitXorAgg": Function(("bit_xor",), _folded(AccumulatorKind.BIT_XOR)),
    "Mode": Function(("mode",), _mode, emitted_result),
    "Percentile": Function(("percentile", "median", "percentile_cont"), _percentile, emitted_result),
    "PercentileDisc": Function(("percentile_disc",), _discrete_percentile, emitted_result),
    "ApproximatePercentile": Function(
        ("percentile_approx", "approx_percentile"), _approximate_percentile, _of_its_type
    ),
    "CountMinSketchAgg": Function(("count_min_sketch",), _count_min_sketch, emitted_result),
    "HllSketchAgg": Function(("hll_sketch_agg",), _hll_sketch, emitted_result),
    "HllUnionAgg": Function(("hll_union_agg",), _hll_sketch, emitted_result),
    "HistogramNumeric": Function(("histogram_numeric",), _histogram, _histogram_of_its_type),
    "HyperLogLogPlusPlus": Function(("approx_count_distinct",), _registers, _estimate),
    "BitmapConstructAgg": Function(("bitmap_construct_agg",), _bitmap, emitted_result),
    "BitmapOrAgg": Function(("bitmap_or_agg",), _united_bitmaps, emitted_result),
    "CollectList": Function(("collect_list", "array_agg"), _collected(AccumulatorKind.COLLECT_LIST), emitted_result),
    "CollectSet": Function(("collect_set",), _collected(AccumulatorKind.COLLECT_SET), emitted_result),
}


def held_functions() -> list[str]:
    """Names of all aggregate functions that the fleet holds."""
    return [name for function in FUNCTIONS.values() for name in function.names]

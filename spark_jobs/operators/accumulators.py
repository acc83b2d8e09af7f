"""The accumulators of each of Spark's aggregate functions, and the fingerprint of a use, by which a changed query finds its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.accumulator_kinds import AccumulatorKind
from spark_jobs.operators import accumulator_parts
from spark_jobs.operators.accumulator_parts import Part, Use, doubles
from spark_jobs.plan.aggregate_functions import AggregateExpression, AggregateFunction
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.spark_errors import RefusedQueryError
from spark_jobs.plan.storable import check_compared, list_field, state_field, stored, stored_type

#: By Spark's class, what to use in place of a function that the fleet does not have.
_REMEDIES = {"ListAgg": "use array_join(collect_list(..), ..), which joins strings in the order of their arrival"}
#: By Spark's class, how many of the first arguments of a function are only stored, and neither compared nor hashed.
_STORED_ARGUMENTS = {"First": 1, "Last": 1, "CollectList": 1, "MaxBy": 1, "MinBy": 1}

#: Of which distinct values a row is; empty for the rows of all other aggregates.
_VALUES_COLUMN = "__values"


@dataclass(frozen=True)
class Function:
    """An aggregate function of Spark: its names, and the accumulators of a use."""

    names: tuple[str, ...]
    parts: Callable[[Use], tuple[Part, ...]]
    #: Computes the result from the function and the columns that its parts emit. None: Spark's own final expression does.
    result: Callable[[AggregateFunction, Sequence[Column]], Column] | None = None


def parts_of(spark: SparkSession, aggregate: AggregateExpression) -> tuple[Part, ...]:
    """Return the accumulators of a use of an aggregate function.

    Raises
    ------
    InvalidRequestError
        The function or the use is not supported; the error says which and what to use instead.
    """
    text, function = aggregate.sql, aggregate.function
    supported = FUNCTIONS.get(function.kind)
    if supported is None:
        raise RefusedQueryError(
            f"this aggregate is not held by the fleet yet; it holds {', '.join(supported_functions())}; "
            + _REMEDIES.get(function.kind, "use one of these, or Spark's own groupBy for this query"),
            aggregate=text,
            function=function.sql_name,
        )
    if function.added_option:
        raise RefusedQueryError(
            f"the fleet does not have {function.added_option} of this aggregate; leave it out, or use Spark's own groupBy",
            aggregate=text,
            function=function.sql_name,
        )
    for child in function.children[_STORED_ARGUMENTS.get(function.kind, 0) :] if function.kind != "Count" else ():
        check_compared(child.type, text)
    where = None if aggregate.where is None else aggregate.where.column()
    fingerprint, cast = fingerprint_of(spark, aggregate)
    parts = supported.parts(Use(function, text, where))
    # The parts of an aggregate belong together: after a change of the query, its sum never continues the sum of another aggregate.
    return tuple(
        replace(part, fingerprint=fingerprint if len(parts) == 1 else f"{fingerprint}.{part.state[0].name}", cast=cast)
        for part in parts
    )


def _count(use: Use) -> tuple[Part, ...]:
    needed = [child.column().isNotNull() for child in use.function.children if child.nullable]
    state = (state_field("count", T.LongType(), False),)
    if not needed and use.where is None:
        return (Part(AccumulatorKind.COUNT_ROWS, (), state),)
    present = use.where if use.where is not None else F.lit(True)
    for column in needed:
        present = present & column
    return (Part(AccumulatorKind.COUNT_VALID, (F.when(present, F.lit(True)),), state),)


def _sum(use: Use) -> tuple[Part, ...]:
    return (_summed(use, use.function.type),)


def _average(use: Use) -> tuple[Part, ...]:
    total = _summed(use, use.function.buffer[0].type)
    return (total, Part(AccumulatorKind.COUNT_VALID, total.inputs, (state_field("count", T.LongType(), False),)))


def _summed(use: Use, kind: T.DataType) -> Part:
    column, sum_type = use.kept(stored(use.child().column().cast(kind), kind)), stored_type(kind)
    total, is_empty = state_field("sum", sum_type), state_field("is_empty", T.BooleanType(), False)
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


def _folded(kind: AccumulatorKind) -> Callable[[Use], tuple[Part, ...]]:
    """Return accumulators of a function from one argument to a value of its type."""

    def make(use: Use) -> tuple[Part, ...]:
        return (Part(kind, (use.column(),), (use.value("value"),)),)

    return make


def _by_ordering(kind: AccumulatorKind) -> Callable[[Use], tuple[Part, ...]]:
    def make(use: Use) -> tuple[Part, ...]:
        return (Part(kind, (use.column(), use.column(1)), (use.value("value"), use.value("ordering", 1))),)

    return make


def _positional(any_kind: AccumulatorKind, valid_kind: AccumulatorKind) -> Callable[[Use], tuple[Part, ...]]:
    def make(use: Use) -> tuple[Part, ...]:
        state = (use.value("value"), state_field("value_set", T.BooleanType(), False))
        if use.function.ignores_nulls:
            return (Part(valid_kind, (use.column(),), state),)
        if use.where is None:
            return (Part(any_kind, (use.column(),), state),)
        # A null where the FILTER holds is a value, so a second input says which rows the FILTER drops.
        return (Part(any_kind, (use.column(), F.coalesce(use.where, F.lit(False))), state),)

    return make


def _moments(kind: AccumulatorKind, *further: str) -> Callable[[Use], tuple[Part, ...]]:
    def make(use: Use) -> tuple[Part, ...]:
        return (Part(kind, (use.double(),), doubles("n", "avg", "m2", *further)),)

    return make


_PAIRED = ("n", "x_avg", "y_avg", "ck")


def _co_moments(kind: AccumulatorKind, *further: str) -> Callable[[Use], tuple[Part, ...]]:
    def make(use: Use) -> tuple[Part, ...]:
        return (Part(kind, (use.double(0), use.double(1)), doubles(*_PAIRED, *further)),)

    return make


def _regression(use: Use) -> tuple[Part, ...]:
    """Return the accumulators of y and x: their covariance, and the variance of each x whose y is not null."""
    y, x = use.double(0), use.double(1)
    return (
        Part(AccumulatorKind.COVARIANCE, (x, y), doubles(*_PAIRED)),
        Part(AccumulatorKind.MOMENTS, (F.when(y.isNotNull(), x),), doubles("x_n", "x_mean", "x_m2")),
    )


def _collected(kind: AccumulatorKind) -> Callable[[Use], tuple[Part, ...]]:
    def make(use: Use) -> tuple[Part, ...]:
        values = list_field("values", stored_type(use.child().type), subject=use.text)
        return (Part(kind, (use.column(),), (values,)),)

    return make


def emitted_result(function: AggregateFunction, columns: Sequence[Column]) -> Column:
    """Return the single emitted column, which is the result."""
    (column,) = columns
    return column


#: By Spark's class. The names are those in SQL and PySpark, also of functions that Spark rewrites to the class.
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
    "Mode": Function(("mode",), accumulator_parts.mode, emitted_result),
    "Percentile": Function(("percentile", "median", "percentile_cont"), accumulator_parts.percentile, emitted_result),
    "PercentileDisc": Function(("percentile_disc",), accumulator_parts.discrete_percentile, emitted_result),
    "ApproximatePercentile": Function(
        ("percentile_approx", "approx_percentile"),
        accumulator_parts.approximate_percentile,
        accumulator_parts.of_its_type,
    ),
    "CountMinSketchAgg": Function(("count_min_sketch",), accumulator_parts.count_min_sketch, emitted_result),
    "HllSketchAgg": Function(("hll_sketch_agg",), accumulator_parts.hll_sketch, emitted_result),
    "HllUnionAgg": Function(("hll_union_agg",), accumulator_parts.hll_sketch, emitted_result),
    "HistogramNumeric": Function(
        ("histogram_numeric",), accumulator_parts.histogram, accumulator_parts.histogram_of_its_type
    ),
    "HyperLogLogPlusPlus": Function(
        ("approx_count_distinct",), accumulator_parts.registers, accumulator_parts.estimate
    ),
    "BitmapConstructAgg": Function(("bitmap_construct_agg",), accumulator_parts.bitmap, emitted_result),
    "BitmapOrAgg": Function(("bitmap_or_agg",), accumulator_parts.united_bitmaps, emitted_result),
    "CollectList": Function(("collect_list", "array_agg"), _collected(AccumulatorKind.COLLECT_LIST), emitted_result),
    "CollectSet": Function(("collect_set",), _collected(AccumulatorKind.COLLECT_SET), emitted_result),
}


def supported_functions() -> list[str]:
    """Return the names of all aggregate functions that the fleet supports."""
    return [name for function in FUNCTIONS.values() for name in function.names]


def fingerprint_of(spark: SparkSession, aggregate: AggregateExpression) -> tuple[str, str]:
    """Return the fingerprint of a use of an aggregate function: the function over its arguments in SQL, and the casts of an argument.

    In the first, columns stand by name alone, without the casts that Spark adds: these follow the types of the columns, which may
    become wider. The second has the types to which the query itself casts a single argument, from the inside out: ``min(cast(v as
    bigint))`` can continue the state of ``min(cast(v as int))``.
    """
    names, function = _Names(spark), aggregate.function
    arguments = function.children
    casts: list[str] = []
    if len(arguments) == 1:
        argument = arguments[0]
        while argument.kind == "Cast":
            if argument.is_written_cast:
                casts.insert(0, argument.type_sql)
            argument = argument.child
        arguments = [argument]
    text = f"{function.kind}({', '.join(names.text(argument) for argument in arguments)})"
    if function.kind in ("First", "Last") and function.ignores_nulls:
        text += " ignoring nulls"
    if function.kind == "HyperLogLogPlusPlus":
        text += f" in {function.registers.slots} words"
    if function.is_descending:
        text += " descending"
    if function.kind in ("Sum", "Average") and function.eval_mode == "TRY":
        text += " or null"
    where = _own_condition(aggregate.where)
    if where is not None:
        text += f" where {names.text(where)}"
    return text, " ".join(casts)


def _own_condition(where: Expression | None) -> Expression | None:
    """Return a condition without the part by which aggregates of all rows leave those of distinct values out, if there are such.

    So an aggregate stays what it is when one of distinct values comes beside it (``DistinctAggregation.scala``).
    """
    if where is None:
        return None
    first, rest = where.children if where.kind == "And" else (where, None)
    is_of_all = first.kind == "EqualTo" and [item.sql.strip("`'") for item in first.children] == [_VALUES_COLUMN, ""]
    return rest if is_of_all else where


class _Names:
    """Writes expressions as SQL that is equal in every analysis of a query."""

    def __init__(self, spark: SparkSession) -> None:
        self._case_sensitive = spark.conf.get("spark.sql.caseSensitive") == "true"
        #: Variables of lambdas, by expression id, in the order of their appearance.
        self._variables: dict[int, str] = {}

    def text(self, expression: Expression) -> str:
        return expression.rebuilt(self._plain).sql

    def _plain(self, node: Expression) -> Expression | None:
        if node.kind == "Cast" and not node.is_written_cast:
            return node.child.rebuilt(self._plain)
        if node.is_attribute:
            # The query may write the name in another case than the column's.
            name = node.name if self._case_sensitive else node.name.lower()
            return node.as_leaf(f"`{name}`")
        if node.kind == "NamedLambdaVariable":
            number = len(self._variables)
            return node.as_leaf(self._variables.setdefault(node.id, f"_{number}"))
        if node.kind == "Literal" and node.literal is None:
            return node.as_leaf("NULL")
        replaced = node.unwrapped()
        return None if replaced is node else replaced.rebuilt(self._plain)

"""Spark's logical plans: the analysed plans of DataFrames, taken apart and rebuilt; and Spark's own rules for them: its check of
streaming queries, which ``writeStream.start`` runs, and of a join its equal keys, its filters, how long rows may still match."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.types import StructType

from spark_jobs.plan.catalyst import CATALYST, Expression, java_class, java_type, optional, scala_list, scala_seq


class SortOrder(NamedTuple):
    """An expression that a plan sorts by."""

    expression: Expression
    sql: str
    descending: bool
    nulls_first: bool


@dataclass(frozen=True, eq=False)
class Plan:
    """A node of a plan with all nodes below it. A property that only some kinds have names them."""

    _java: Any
    spark: SparkSession

    def frame(self) -> DataFrame:
        dataset = java_class("org.apache.spark.sql.Dataset")
        return DataFrame(dataset.ofRows(self.spark._jsparkSession, self._java), self.spark)

    def optimised(self) -> Plan:
        """Return the plan as Spark optimises it."""
        return self._plan(self.spark._jsparkSession.sessionState().optimizer().execute(self._java))

    @cached_property
    def kind(self) -> str:
        """Simple name of its class, such as ``Project``."""
        return str(self._java.getClass().getSimpleName())

    @property
    def node_name(self) -> str:
        return str(self._java.nodeName())

    @property
    def text(self) -> str:
        """Its description in one line."""
        return str(self._java.simpleString(20))

    @property
    def children(self) -> list[Plan]:
        return [self._plan(child) for child in scala_list(self._java.children())]

    @property
    def child(self) -> Plan:
        return self._plan(self._java.children().head())

    @property
    def output(self) -> list[Expression]:
        return _expressions(self._java.output())

    def covers(self, expression: Expression) -> bool:
        """Return whether an expression reads no other columns than the plan's."""
        return bool(expression._java.references().subsetOf(self._columns))

    def reads(self, column: Expression) -> bool:
        """Return whether its own expressions read a column."""
        return bool(self._java.references().contains(column._java))

    @property
    def is_streaming(self) -> bool:
        return bool(self._java.isStreaming())

    @property
    def checks_streaming(self) -> bool:
        """Whether Spark refuses streaming operations that it does not support."""
        return bool(self.spark._jsparkSession.sessionState().conf().isUnsupportedOperationCheckEnabled())

    @property
    def streaming_sources(self) -> int:
        """Number of streams that the plan reads; a stream that is read twice counts twice."""
        children = self.children
        return sum(child.streaming_sources for child in children) if children else int(self.is_streaming)

    def has_result_of(self, other: Plan) -> bool:
        """Return whether both have the same result, by Spark's own comparison."""
        return bool(self._java.sameResult(other._java))

    # -- properties of some kinds ---------------------------------------------------------------------------------

    @property
    def projected(self) -> list[Expression]:
        """The expressions that a projection selects."""
        return _expressions(self._java.projectList())

    @property
    def grouping(self) -> list[Expression]:
        """The expressions that an aggregation groups by."""
        return _expressions(self._java.groupingExpressions())

    @property
    def aggregates(self) -> list[Expression]:
        """The expressions that an aggregation selects for each group."""
        return _expressions(self._java.aggregateExpressions())

    @property
    def keys(self) -> list[Expression]:
        """The columns by which a deduplication compares rows."""
        return _expressions(self._java.keys())

    @property
    def sorting(self) -> list[SortOrder]:
        """The expressions by which rows are sorted."""
        return [
            SortOrder(
                Expression(order.child()),
                str(order.sql()),
                order.direction().sql() == "DESC",
                order.nullOrdering().sql() == "NULLS FIRST",
            )
            for order in scala_list(self._java.order())
        ]

    @property
    def condition(self) -> Expression:
        return Expression(self._java.condition()).with_comparisons()

    @property
    def is_outer(self) -> bool:
        """Whether a generator keeps rows for which it generates nothing."""
        return bool(self._java.outer())

    @property
    def output_mode(self) -> str:
        """Output mode of an operator with a user's function."""
        return str(self._java.outputMode().toString())

    @property
    def join_type(self) -> str:
        """A join's type in SQL."""
        return str(self._java.joinType().sql())

    @property
    def join_condition(self) -> Expression | None:
        condition = optional(self._java.condition())
        return None if condition is None else Expression(condition)

    @property
    def left(self) -> Plan:
        return self._plan(self._java.left())

    @property
    def right(self) -> Plan:
        return self._plan(self._java.right())

    # -- derived plans --------------------------------------------------------------------------------------------

    def with_children(self, children: Iterable[Plan]) -> Plan:
        return self._plan(self._java.withNewChildren(scala_seq(child._java for child in children)))

    def project(self, columns: Iterable[Expression]) -> Plan:
        """Return a projection of the plan to named expressions."""
        project = java_class(f"{CATALYST}.plans.logical.Project")
        return self._plan(project(scala_seq(column._java for column in columns), self._java))

    @cached_property
    def _columns(self) -> Any:
        return self._java.outputSet()

    def _plan(self, java: Any) -> Plan:
        return Plan(java, self.spark)


def analysed(frame: DataFrame) -> Plan:
    return Plan(frame._jdf.queryExecution().analyzed(), frame.sparkSession)


def empty_frame(spark: SparkSession, kind: StructType) -> DataFrame:
    """Return a DataFrame of a type without rows."""
    session = spark._jsparkSession
    rows = java_class("java.util.ArrayList")()
    return DataFrame(session.createDataFrame(rows, java_type(spark, kind)), spark)


def projected(frame: DataFrame, columns: Iterable[tuple[Column, Expression]]) -> DataFrame:
    """Return columns of a DataFrame, each with the name, id, qualifier, metadata and nullability of an attribute.

    A reference to the attribute (``df.k``, ``"a.k"``) then means the column.
    """
    pairs = list(columns)
    rows = frame.select(*(column.alias(f"c{index}") for index, (column, _) in enumerate(pairs)))
    # A column that is restored from state may differ in nullability from the query's.
    named = [
        resolved(rows, f"c{index}").as_nullable_as(attribute).named_as(attribute)
        for index, (_, attribute) in enumerate(pairs)
    ]
    return analysed(rows).project(named).frame()


def quoted(name: str) -> str:
    """Return a column's name in backticks, so that Spark reads any character in it literally."""
    escaped = name.replace("`", "``")
    return f"`{escaped}`"


def resolved(frame: DataFrame, name: str) -> Expression:
    """Return the attribute of a DataFrame's column."""
    return Expression.of(Column(frame._jdf.col(quoted(name))))


def _expressions(sequence: Any) -> list[Expression]:
    return [Expression(java) for java in scala_list(sequence)]


def check_streaming(plan: Plan, output_mode: str) -> None:
    """Run Spark's check of a query in an output mode.

    Raises
    ------
    pyspark.errors.AnalysisException
        Spark does not run the query.
    """
    modes = java_class("org.apache.spark.sql.streaming.OutputMode")
    checker = java_class(f"{CATALYST}.analysis.UnsupportedOperationChecker")
    checker.checkForStreaming(plan._java, getattr(modes, output_mode.capitalize())())


def refused_modes(plan: Plan, output_modes: Iterable[str]) -> dict[str, str]:
    """Return the output modes in which Spark refuses a query with its own operator in place of the fleet's, with its error texts.

    `plan` is the query up to the operator, with Spark's own. Spark does not recognise the fleet's operator, so it would start queries
    that it otherwise refuses. No mode is refused where ``spark.sql.streaming.unsupportedOperationCheck`` is false.
    """
    refused: dict[str, str] = {}
    if not plan.checks_streaming:
        return refused
    for mode in output_modes:
        try:
            check_streaming(plan, mode)
        except AnalysisException as error:
            refused[mode] = str(error).partition("\n")[0].rstrip(";")
    return refused


def with_condition(join: Plan, condition: Expression | None) -> Plan:
    """Return a join of streams as if it had another condition."""
    join_class, java = java_class(f"{CATALYST}.plans.logical.Join"), join._java
    return Plan(join_class(java.left(), java.right(), java.joinType(), _option(condition), java.hint()), join.spark)


def pushed_down(join: Plan) -> Plan:
    """Return the join with the filters on its sides that Spark derives from its condition."""
    push = java_class(f"{CATALYST}.optimizer.PushPredicateThroughJoin")
    infer = java_class(f"{CATALYST}.optimizer.InferFiltersFromConstraints")
    return Plan(push.apply(infer.apply(push.apply(join._java))), join.spark)


def equi_join(join: Plan) -> tuple[tuple[list[Expression], list[Expression]], Expression | None] | None:
    """Return the equal keys of both sides of a join, and the rest of its condition; None if it has no such keys."""
    extracted = optional(java_class(f"{CATALYST}.planning.ExtractEquiJoinKeys").unapply(join._java))
    if extracted is None:
        return None
    left, right = ([Expression(key) for key in scala_list(keys)] for keys in (extracted._2(), extracted._3()))
    rest = optional(extracted._4())
    return (left, right), None if rest is None else Expression(rest)


def state_watermarks_ms(
    join: Plan,
    keys: tuple[Sequence[Expression], Sequence[Expression]],
    condition: Expression | None,
    watermark_ms: int,
    *,
    is_first_enough: bool,
) -> tuple[int | None, int | None]:
    """Return, for each side, the event time up to which Spark removes rows at a watermark; None if it keeps them for ever.

    `is_first_enough` says that Spark may use only the first of several watermark columns of a side.
    """
    helper = java_class("org.apache.spark.sql.execution.streaming.StreamingSymmetricHashJoinHelper")
    answer = helper.getStateWatermark(
        join._java.left().output(),
        join._java.right().output(),
        *(scala_seq(key._java for key in side) for side in keys),
        _option(condition),
        java_class("scala.Some")(watermark_ms),
        is_first_enough,
    )
    return optional(answer._1()), optional(answer._2())


def _option(expression: Expression | None) -> Any:
    return java_class("scala.Option").apply(None if expression is None else expression._java)

"""Spark's logical plans: the analysed plans of DataFrames, taken apart and rebuilt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

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

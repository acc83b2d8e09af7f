"""Spark's own logical plans: what the analysis of a DataFrame made of it, taken apart and put together again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.types import StructType

from spark_jobs.plan.catalyst import CATALYST, Expression, java_class, optional, scala_list, scala_seq

__all__ = ["Plan", "SortOrder", "analysed", "empty_frame", "projected", "quoted", "resolved"]


class SortOrder(NamedTuple):
    """One of the expressions that a plan sorts by."""

    expression: Expression
    sql: str
    descending: bool
    nulls_first: bool


@dataclass(frozen=True, eq=False)
class Plan:
    """A node of a plan with what is below it; a property says of what kinds it is, if not of all."""

    _java: Any
    _spark: SparkSession

    def frame(self) -> DataFrame:
        """DataFrame of an analysed plan."""
        dataset = java_class("org.apache.spark.sql.Dataset")
        return DataFrame(dataset.ofRows(self._spark._jsparkSession, self._java), self._spark)

    def optimised(self) -> Plan:
        """The plan as Spark would run it."""
        return self._plan(self._spark._jsparkSession.sessionState().optimizer().execute(self._java))

    @cached_property
    def kind(self) -> str:
        """Simple name of its class, such as ``Project``."""
        return str(self._java.getClass().getSimpleName())

    @property
    def node_name(self) -> str:
        """What Spark calls it in plans."""
        return str(self._java.nodeName())

    @property
    def text(self) -> str:
        """One line of it."""
        return str(self._java.simpleString(20))

    @property
    def children(self) -> list[Plan]:
        return [self._plan(one) for one in scala_list(self._java.children())]

    @property
    def child(self) -> Plan:
        """The only child."""
        return self._plan(self._java.child())

    @property
    def output(self) -> list[Expression]:
        """Its columns."""
        return _expressions(self._java.output())

    def covers(self, expression: Expression) -> bool:
        """Whether an expression reads no other columns than the plan's."""
        return bool(expression._java.references().subsetOf(self._columns))

    def reads(self, column: Expression) -> bool:
        """Whether its own expressions read a column."""
        return bool(self._java.references().contains(column._java))

    @property
    def is_streaming(self) -> bool:
        return bool(self._java.isStreaming())

    @property
    def checks_streaming(self) -> bool:
        """Whether Spark refuses what it does not support of a stream."""
        return bool(self._spark._jsparkSession.sessionState().conf().isUnsupportedOperationCheckEnabled())

    @property
    def streaming_sources(self) -> int:
        """How many streams are read, each as often as it is."""
        children = self.children
        return sum(one.streaming_sources for one in children) if children else int(self.is_streaming)

    def has_result_of(self, other: Plan) -> bool:
        """Whether both have the same result, as Spark tells."""
        return bool(self._java.sameResult(other._java))

    # -- of some kinds --------------------------------------------------------------------------------------------

    @property
    def projected(self) -> list[Expression]:
        """What a projection selects."""
        return _expressions(self._java.projectList())

    @property
    def grouping(self) -> list[Expression]:
        """What an aggregation groups by."""
        return _expressions(self._java.groupingExpressions())

    @property
    def aggregates(self) -> list[Expression]:
        """What an aggregation selects of its groups."""
        return _expressions(self._java.aggregateExpressions())

    @property
    def keys(self) -> list[Expression]:
        """Columns of which a deduplication leaves no two rows alike."""
        return _expressions(self._java.keys())

    @property
    def partitioning(self) -> list[Expression]:
        """What rows are repartitioned by."""
        return _expressions(self._java.partitionExpressions())

    @property
    def sorting(self) -> list[SortOrder]:
        """What rows are sorted by."""
        return [
            SortOrder(
                Expression(one.child()),
                str(one.sql()),
                one.direction().sql() == "DESC",
                one.nullOrdering().sql() == "NULLS FIRST",
            )
            for one in scala_list(self._java.order())
        ]

    @property
    def condition(self) -> Expression:
        """What a filter keeps."""
        return Expression(self._java.condition())

    @property
    def is_outer(self) -> bool:
        """Whether a generator keeps rows that it makes nothing of."""
        return bool(self._java.outer())

    @property
    def output_mode(self) -> str:
        """Of an operator with a function of the user."""
        return str(self._java.outputMode().toString())

    @property
    def join_type(self) -> str:
        """A join's type in SQL."""
        return str(self._java.joinType().sql())

    @property
    def join_condition(self) -> Expression | None:
        """A join's condition, if it has one."""
        found = optional(self._java.condition())
        return None if found is None else Expression(found)

    @property
    def left(self) -> Plan:
        """A join's left side."""
        return self._plan(self._java.left())

    @property
    def right(self) -> Plan:
        """A join's right side."""
        return self._plan(self._java.right())

    # -- others made of it ----------------------------------------------------------------------------------------

    def with_children(self, children: Iterable[Plan]) -> Plan:
        """The same node above other ones."""
        return self._plan(self._java.withNewChildren(scala_seq(one._java for one in children)))

    def project(self, columns: Iterable[Expression]) -> Plan:
        """Named expressions over its columns."""
        project = java_class(f"{CATALYST}.plans.logical.Project")
        return self._plan(project(scala_seq(one._java for one in columns), self._java))

    @cached_property
    def _columns(self) -> Any:
        return self._java.outputSet()

    def _plan(self, java: Any) -> Plan:
        return Plan(java, self._spark)


def analysed(frame: DataFrame) -> Plan:
    """The plan of a DataFrame, as Spark analysed it."""
    return Plan(frame._jdf.queryExecution().analyzed(), frame.sparkSession)


def empty_frame(spark: SparkSession, kind: StructType) -> DataFrame:
    """A DataFrame of a type, without rows."""
    session = spark._jsparkSession
    rows = java_class("java.util.ArrayList")()
    return DataFrame(session.createDataFrame(rows, session.parseDataType(kind.json())), spark)


def projected(frame: DataFrame, columns: Iterable[tuple[Column, Expression]]) -> DataFrame:
    """Columns over a DataFrame, each in the place of an attribute: with its name, id, qualifier, metadata and nullability.

    What refers to the attribute (``df.k``, ``"a.k"``) then refers to the column.
    """
    pairs = list(columns)
    rows = frame.select(*(column.alias(f"c{place}") for place, (column, _) in enumerate(pairs)))
    # What is left of a column in the state can tell less, or more, of nulls than the query does.
    named = [
        resolved(rows, f"c{place}").as_nullable_as(attribute).named_as(attribute)
        for place, (_, attribute) in enumerate(pairs)
    ]
    return analysed(rows).project(named).frame()


def quoted(name: str) -> str:
    """A column's name as Spark reads it, whatever is in it."""
    escaped = name.replace("`", "``")
    return f"`{escaped}`"


def resolved(frame: DataFrame, name: str) -> Expression:
    """Attribute of a DataFrame's column."""
    return Expression(frame._jdf.col(quoted(name)).expr())


def _expressions(sequence: Any) -> list[Expression]:
    return [Expression(one) for one in scala_list(sequence)]

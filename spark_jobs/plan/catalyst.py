"""Reading and rebuilding Spark's own (Catalyst) expressions through Py4J.

Statefleet lets Spark analyse a query and takes the analysed expressions apart, so names, types, casts and final formulas are
Spark's, not a copy of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.types import DataType, _parse_datatype_json_string

__all__ = [
    "Expression",
    "class_name",
    "column_of",
    "data_type",
    "frame_of",
    "rebuild",
    "resolved",
    "scala_list",
    "walk",
    "watermark_delay_ms",
]

#: A JVM object of Catalyst's Expression or LogicalPlan.
Expression = Any

_WATERMARK_KEY = "spark.watermarkDelayMs"


def class_name(node: Expression) -> str:
    """Simple name of a node's class, such as ``Sum``."""
    name: str = node.getClass().getSimpleName()
    return name


def scala_list(sequence: Any) -> list[Any]:
    """Python list of a Scala Seq."""
    return [sequence.apply(position) for position in range(sequence.size())]


def data_type(expression: Expression) -> DataType:
    """PySpark type of a resolved expression."""
    return _parse_datatype_json_string(expression.dataType().json())


def column_of(spark: SparkSession, expression: Expression) -> Column:
    """PySpark Column of an expression."""
    assert spark._jvm is not None
    return Column(spark._jvm.org.apache.spark.sql.Column(expression))


def frame_of(spark: SparkSession, plan: Expression) -> DataFrame:
    """DataFrame of an analysed logical plan."""
    assert spark._jvm is not None
    return DataFrame(spark._jvm.org.apache.spark.sql.Dataset.ofRows(spark._jsparkSession, plan), spark)


def resolved(frame: DataFrame, name: str) -> Expression:
    """Attribute of a DataFrame's column."""
    return frame._jdf.col(f"`{name}`").expr()


def rebuild(
    spark: SparkSession, node: Expression, replacement: Callable[[Expression], Expression | None]
) -> Expression:
    """Copy of a tree in which every node that `replacement` answers for (not None) is replaced by the answer."""
    replaced = replacement(node)
    if replaced is not None:
        return replaced
    children = scala_list(node.children())
    if not children:
        return node
    assert spark._jvm is not None
    rebuilt = [rebuild(spark, child, replacement) for child in children]
    return node.withNewChildren(spark._jvm.PythonUtils.toSeq(rebuilt))


def walk(node: Expression) -> Iterator[Expression]:
    """A plan's nodes, parents first."""
    yield node
    for child in scala_list(node.children()):
        yield from walk(child)


def watermark_delay_ms(attribute: Expression) -> int | None:
    """Delay of an attribute that carries a watermark, as Spark marks it; None for any other."""
    if class_name(attribute) != "AttributeReference" or not attribute.metadata().contains(_WATERMARK_KEY):
        return None
    return int(attribute.metadata().getLong(_WATERMARK_KEY))

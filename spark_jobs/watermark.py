"""Which watermark a stateful operator has, and whether the fleet can follow it exactly.

Spark takes the largest event time where ``withWatermark`` stands in the plan; the fleet takes it from the rows that reach
the operator. The two agree if nothing between drops rows, which is checked on the plan as Spark optimises it: a filter that
Spark itself moves below the watermark is no obstacle. With two watermarks in a query Spark uses the smaller one of both.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.errors import InvalidRequestError
from spark_jobs.catalyst import Expression, class_name, column_of, data_type, scala_list, walk, watermark_delay_ms

__all__ = ["check_watermark", "event_time"]

_WATERMARK = "EventTimeWatermark"
#: Nodes that pass every row of their (only) child on.
_TRANSPARENT = frozenset({"Project", "SubqueryAlias", "Repartition", "RepartitionByExpression"})


def check_watermark(df: DataFrame) -> None:
    """Refuse a DataFrame whose watermark the fleet could not follow exactly.

    Raises
    ------
    InvalidRequestError
        Several watermarks, or something between ``withWatermark`` and the operator that can drop or add rows.
    """
    spark = df.sparkSession
    plan = df._jdf.queryExecution().analyzed()
    marks = _count(plan)
    if marks > 1:
        raise InvalidRequestError(
            "a stateful operator of the fleet takes one watermark for now; union or join the streams first and call "
            "withWatermark once, on the result"
        )
    if not marks:
        return
    node = spark._jsparkSession.sessionState().optimizer().execute(plan)
    while class_name(node) != _WATERMARK:
        if not _passes_all_rows(node):
            raise InvalidRequestError(
                "something between withWatermark and the stateful operator can change which rows the watermark counts; call "
                "withWatermark after it, as the last step before fleet.stateful",
                operator=node.nodeName(),
                plan=node.simpleString(20),
            )
        node = scala_list(node.children())[0]


def _count(plan: Expression) -> int:
    return sum(class_name(node) == _WATERMARK for node in walk(plan))


def _passes_all_rows(node: Expression) -> bool:
    name = class_name(node)
    if name == "Join":
        # The left side of a left outer join loses nothing; the watermark must be on that side.
        left, right = scala_list(node.children())
        return node.joinType().sql() == "LEFT OUTER" and _count(left) > _count(right)
    if name == "Filter":
        # Rows without an event time count for no watermark.
        return all(_is_event_time_there(part) for part in _conjuncts(node.condition()))
    return name in _TRANSPARENT or (name == "Generate" and node.outer())


def _conjuncts(condition: Expression) -> list[Expression]:
    if class_name(condition) != "And":
        return [condition]
    return [part for side in scala_list(condition.children()) for part in _conjuncts(side)]


def _is_event_time_there(condition: Expression) -> bool:
    return class_name(condition) == "IsNotNull" and watermark_delay_ms(condition.child()) is not None


def event_time(spark: SparkSession, attributes: Sequence[Expression]) -> tuple[int | None, Column | None]:
    """Watermark delay and event time, both in milliseconds, of the attributes that reach an operator; None without a watermark.

    Raises
    ------
    InvalidRequestError
        The event-time column itself is not among the attributes.
    """
    marked = [(attribute, watermark_delay_ms(attribute)) for attribute in attributes]
    marked = [(attribute, delay) for attribute, delay in marked if delay is not None]
    if not marked:
        return None, None
    times = [(attribute, delay) for attribute, delay in marked if not isinstance(data_type(attribute), T.StructType)]
    if not times:
        raise InvalidRequestError(
            "the column that withWatermark named is gone before the stateful operator, which needs it to move the watermark; "
            "keep it in the select",
            columns=[attribute.name() for attribute, _ in marked],
        )
    attribute, delay = times[0]
    # unix_millis floors, as Spark does when it takes the largest event time.
    return delay, F.unix_millis(column_of(spark, attribute).cast("timestamp"))

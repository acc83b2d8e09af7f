"""A join of two streams as Spark would run it: its keys, the filters below it, and how long rows may still match."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from coordinator.errors import InvalidRequestError
from spark_jobs.operators.join_condition import conjuncts
from spark_jobs.plan.catalyst import Expression, class_name, data_type, scala_list, watermark_delay_ms
from store_actors.operators.join_schema import JoinType

__all__ = ["JoinNode", "analysed_join", "is_time", "lags_ms"]

_TYPES = {
    "INNER": JoinType.INNER,
    "CROSS": JoinType.INNER,
    "LEFT OUTER": JoinType.LEFT_OUTER,
    "RIGHT OUTER": JoinType.RIGHT_OUTER,
    "FULL OUTER": JoinType.FULL_OUTER,
    "LEFT SEMI": JoinType.LEFT_SEMI,
}
#: Sides whose columns are null where the other side's row matched nothing.
_NULL_SIDES = {JoinType.LEFT_OUTER: (1,), JoinType.RIGHT_OUTER: (0,), JoinType.FULL_OUTER: (0, 1)}
#: Watermarks, in milliseconds, at which Spark is asked what it would remove.
_PROBES = (10**12, 2 * 10**12)
_ALLOW_MULTIPLE = "spark.sql.streaming.statefulOperator.allowMultiple"


@dataclass(frozen=True)
class JoinNode:
    """A join as Spark would run it.

    Attributes
    ----------
    own
        As analysed: its output is the query's.
    sides
        Both sides' plans, without the filters at their top; their event time is among their columns.
    filters
        Parts of each side's filters: the query's, and those that Spark pushes or infers.
    keys
        Equal expressions of both sides.
    rest
        The condition without these.
    kind
        Its type.
    """

    own: Expression
    outputs: tuple[Expression, ...]
    sides: tuple[Expression, Expression]
    filters: tuple[list[Expression], list[Expression]]
    keys: tuple[list[Expression], list[Expression]]
    rest: Expression | None
    kind: JoinType

    def attributes(self, side: int) -> list[Expression]:
        """Columns of a side, nullable where the result's are."""
        mine = scala_list((self.own.left() if side == 0 else self.own.right()).output())
        return [one.withNullability(True) for one in mine] if self.is_null_side(side) else mine

    def is_null_side(self, side: int) -> bool:
        """Whether a side's columns are null where the other side's row matched nothing."""
        return side in _NULL_SIDES.get(self.kind, ())


def analysed_join(spark: SparkSession, joined: DataFrame) -> JoinNode:
    """Take a join of two streams out of the plan that Spark made of it.

    Raises
    ------
    InvalidRequestError
        Spark does not run such a join.
    """
    top = joined._jdf.queryExecution().analyzed()
    own = top.child() if class_name(top) == "Project" else top
    outputs = scala_list(top.projectList() if own is not top else top.output())
    jvm = spark._jvm
    assert jvm is not None
    sql = own.joinType().sql()
    _check(spark, own, sql)
    # The filters that Spark makes of the condition decide which rows count for a watermark, so they are Spark's own.
    rules = jvm.org.apache.spark.sql.catalyst.optimizer
    pushed = rules.PushPredicateThroughJoin.apply(own)
    pushed = rules.PushPredicateThroughJoin.apply(rules.InferFiltersFromConstraints.apply(pushed))
    found = jvm.org.apache.spark.sql.catalyst.planning.ExtractEquiJoinKeys.unapply(pushed)
    if found.isEmpty():
        raise InvalidRequestError(
            "a join of two streams needs an equality between columns of both sides, as in Spark; add one to the condition",
            join=sql,
        )
    equal = found.get()
    plans, filters = zip(*(_unfiltered(side) for side in (pushed.left(), pushed.right())), strict=True)
    sides = tuple(_with_event_time(spark, plan) for plan in plans)
    return JoinNode(
        own=own,
        outputs=tuple(outputs),
        sides=(sides[0], sides[1]),
        filters=(filters[0], filters[1]),
        keys=(scala_list(equal._2()), scala_list(equal._3())),
        rest=equal._4().get() if equal._4().isDefined() else None,
        kind=_TYPES[sql],
    )


def _check(spark: SparkSession, plan: Expression, sql: str) -> None:
    """Refuse what Spark does not run."""
    if sql not in _TYPES:
        raise InvalidRequestError(
            "Spark has inner, left outer, right outer, full outer and left semi joins of two streams; use one of these",
            join=sql,
        )
    jvm = spark._jvm
    assert jvm is not None
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    logical = jvm.org.apache.spark.sql.catalyst.plans.logical
    condition = _of_event_time(spark, plan, plan.condition().get() if plan.condition().isDefined() else None)
    bounded = logical.Join(plan.left(), plan.right(), plan.joinType(), condition, plan.hint())
    try:
        checker.checkForStreaming(bounded, jvm.org.apache.spark.sql.streaming.OutputMode.Append())
    except AnalysisException as error:
        raise InvalidRequestError(
            "Spark does not run this join of two streams; an outer or semi join needs withWatermark on both streams and event time "
            "among the equal keys, or in a condition that says how far apart the two times may be",
            join=sql,
            reason=str(error).partition("\n")[0].rstrip(";"),
        ) from error


def _of_event_time(spark: SparkSession, join: Expression, condition: Expression | None) -> Any:
    """The parts of a condition that read both sides, and nothing but their event times, as a Scala option.

    Spark takes a comparison of any numbers or times for a bound of event time. With ``x > 4`` it never removes a row, nor emits one
    that matched nothing; with ``left.ts < right.expires`` it removes rows that later ones would have matched. So it is not shown these.
    """
    jvm = spark._jvm
    assert jvm is not None
    sides = [scala_list(side.output()) for side in (join.left(), join.right())]
    ids = [{one.exprId().id() for one in side} for side in sides]
    event_times = {one.exprId().id() for side in sides for one in side if watermark_delay_ms(one) is not None}
    parts = []
    for part in conjuncts(condition) if condition is not None else []:
        read = {one.exprId().id() for one in scala_list(part.references().toSeq())}
        if read <= event_times and all(read & own for own in ids):
            parts.append(part)
    return jvm.scala.Option.apply(reduce(jvm.org.apache.spark.sql.catalyst.expressions.And, parts) if parts else None)


def _unfiltered(plan: Expression) -> tuple[Expression, list[Expression]]:
    """A plan without the filters at its top, and the parts of those."""
    parts: list[Expression] = []
    while class_name(plan) in ("Filter", "SubqueryAlias", "ResolvedHint"):
        if class_name(plan) == "Filter":
            parts += conjuncts(plan.condition())
        plan = plan.child()
    return plan, parts


def _with_event_time(spark: SparkSession, plan: Expression) -> Expression:
    """A plan that passes on the column that its ``withWatermark`` names."""
    jvm = spark._jvm
    assert jvm is not None
    if class_name(plan) in ("SubqueryAlias", "Filter"):
        return plan.withNewChildren(jvm.PythonUtils.toSeq([_with_event_time(spark, plan.child())]))
    if class_name(plan) != "Project":
        return plan
    child = _with_event_time(spark, plan.child())
    listed = scala_list(plan.projectList())
    ids = {one.exprId().id() for one in listed}
    hidden = [
        one
        for one in scala_list(child.output())
        if watermark_delay_ms(one) is not None and is_time(one) and one.exprId().id() not in ids
    ]
    if not hidden:
        return plan
    return jvm.org.apache.spark.sql.catalyst.plans.logical.Project(jvm.PythonUtils.toSeq([*listed, *hidden]), child)


def is_time(attribute: Expression) -> bool:
    return not isinstance(data_type(attribute), T.StructType)


def lags_ms(spark: SparkSession, node: JoinNode) -> tuple[int | None, int | None]:
    """How far behind the watermark each side's rows are still needed; None if for ever.

    Raises
    ------
    InvalidRequestError
        It is not a fixed time.
    """
    jvm = spark._jvm
    assert jvm is not None
    helper = jvm.org.apache.spark.sql.execution.streaming.StreamingSymmetricHashJoinHelper
    rest = _of_event_time(spark, node.own, node.rest)
    names = [jvm.PythonUtils.toSeq(keys) for keys in node.keys]
    outputs = node.own.left().output(), node.own.right().output()
    is_first_enough = spark.conf.get(_ALLOW_MULTIPLE, "true") != "true"
    answers = [
        helper.getStateWatermark(*outputs, *names, rest, jvm.scala.Some(probe), is_first_enough) for probe in _PROBES
    ]
    lags: list[int | None] = []
    for part in ("_1", "_2"):
        options = [getattr(answer, part)() for answer in answers]
        found = {
            probe - option.get() if option.isDefined() else None for probe, option in zip(_PROBES, options, strict=True)
        }
        if len(found) > 1:
            raise InvalidRequestError(
                "the times of this join's condition are not a fixed time apart; compare them with intervals added or subtracted"
            )
        lags.append(found.pop())
    return lags[0], lags[1]

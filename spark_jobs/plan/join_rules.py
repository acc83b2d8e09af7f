"""Spark's own rules for a join of two streams: which it refuses, its equal keys, its filters, how long rows may still match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spark_jobs.plan.catalyst import CATALYST, Expression, java_class, optional, scala_list, scala_seq
from spark_jobs.plan.logical import Plan
from spark_jobs.plan.streaming_rules import check_streaming


@dataclass(frozen=True)
class EquiJoin:
    """The equal expressions of both sides, and the rest of the condition."""

    keys: tuple[list[Expression], list[Expression]]
    rest: Expression | None


def check_join(join: Plan, condition: Expression | None) -> None:
    """Run Spark's check of a join of streams as if it had another condition.

    Raises
    ------
    pyspark.errors.AnalysisException
        Spark does not run such a join.
    """
    check_streaming(with_condition(join, condition), "append")


def with_condition(join: Plan, condition: Expression | None) -> Plan:
    """Return a join with another condition."""
    join_class, java = java_class(f"{CATALYST}.plans.logical.Join"), join._java
    return Plan(join_class(java.left(), java.right(), java.joinType(), _option(condition), java.hint()), join._spark)


def pushed_down(join: Plan) -> Plan:
    """Return the join with the filters on its sides that Spark derives from its condition."""
    push = java_class(f"{CATALYST}.optimizer.PushPredicateThroughJoin")
    infer = java_class(f"{CATALYST}.optimizer.InferFiltersFromConstraints")
    return Plan(push.apply(infer.apply(push.apply(join._java))), join._spark)


def equi_join(join: Plan) -> EquiJoin | None:
    """Return the equal keys of a join; None if it has none."""
    extracted = optional(java_class(f"{CATALYST}.planning.ExtractEquiJoinKeys").unapply(join._java))
    if extracted is None:
        return None
    left, right = ([Expression(key) for key in scala_list(keys)] for keys in (extracted._2(), extracted._3()))
    rest = optional(extracted._4())
    return EquiJoin((left, right), None if rest is None else Expression(rest))


def state_watermarks_ms(
    join: Plan,
    keys: tuple[Sequence[Expression], Sequence[Expression]],
    condition: Expression | None,
    watermark_ms: int,
    *,
    is_first_enough: bool,
) -> tuple[int | None, int | None]:
    """Return, for each side, the event time up to which Spark removes rows at a watermark; None if it keeps them for ever.

    Parameters
    ----------
    is_first_enough
        Whether Spark may use only the first of several watermark columns of a side.
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

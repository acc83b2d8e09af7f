"""Spark's own rules for streaming queries: its check, which ``writeStream.start`` runs on a plan; and of a join of two streams which it
refuses, its equal keys, its filters, how long rows may still match."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pyspark.errors import AnalysisException

from spark_jobs.plan.catalyst import CATALYST, Expression, java_class, optional, scala_list, scala_seq
from spark_jobs.plan.logical import Plan


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

    Spark does not recognise the fleet's operator, so it would start queries that it otherwise refuses. No mode is refused where
    ``spark.sql.streaming.unsupportedOperationCheck`` is false.

    Parameters
    ----------
    plan
        The query up to the operator, with Spark's own operator.
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

"""A join of two streams as Spark runs it: its keys, the filters below it, and how long rows may still match."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from spark_jobs.plan.catalyst import Expression, conjunction
from spark_jobs.plan.event_time import ALLOWS_MULTIPLE
from spark_jobs.plan.logical import (
    Plan,
    analysed,
    check_streaming,
    equi_join,
    pushed_down,
    state_watermarks_ms,
    with_condition,
)
from spark_jobs.plan.spark_errors import RefusedQueryError
from store_actors.operators.join_schema import JoinType

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
#: Watermarks, in milliseconds, at which Spark computes the rows that it would remove.
_PROBES = (10**12, 2 * 10**12)


@dataclass(frozen=True)
class JoinNode:
    """A join as Spark runs it."""

    #: The plan as Spark analysed it, whose output is the query's.
    analysed: Plan
    join: Plan
    outputs: tuple[Expression, ...]
    #: Both sides' plans, with the filters that Spark pushes to them or infers.
    sides: tuple[Plan, Plan]
    keys: tuple[list[Expression], list[Expression]]
    rest: Expression | None
    kind: JoinType

    def attributes(self, side: int) -> list[Expression]:
        """Return the columns of a side, nullable where the result's are."""
        columns = (self.join.left if side == 0 else self.join.right).output
        return [column.nullable_attribute() for column in columns] if self.is_null_side(side) else columns

    def is_null_side(self, side: int) -> bool:
        """Return whether a side's columns are null where the other side's row matched nothing."""
        return side in _NULL_SIDES.get(self.kind, ())


def analysed_join(joined: DataFrame, *, is_checked: bool = True) -> JoinNode:
    """Return the join of two streams in the plan that Spark analysed it to; if `is_checked`, it raises InvalidRequestError for one that
    Spark does not run.
    """
    top = analysed(joined)
    join = top.child if top.kind == "Project" else top
    outputs = top.output if join is top else top.projected
    condition = join.join_condition
    if condition is not None:
        join = with_condition(join, condition.with_comparisons())
    sql = join.join_type
    if is_checked:
        _check(join, sql)
    # Rows that no match needs take no room in the state: Spark's own rules derive such filters from the condition.
    pushed = pushed_down(join)
    equal = equi_join(pushed)
    if equal is None:
        raise RefusedQueryError(
            "a join of two streams needs an equality between columns of both sides, as in Spark; add one to the condition",
            join=sql,
        )
    keys, rest = equal
    return JoinNode(
        analysed=top,
        join=join,
        outputs=tuple(outputs),
        sides=(pushed.left, pushed.right),
        keys=keys,
        rest=rest,
        kind=_TYPES[sql],
    )


def _check(join: Plan, sql: str) -> None:
    if sql not in _TYPES:
        raise RefusedQueryError(
            "Spark has inner, left outer, right outer, full outer and left semi joins of two streams; use one of these",
            join=sql,
        )
    try:
        check_streaming(with_condition(join, _of_event_time(join, join.join_condition, needs_both=False)), "append")
    except AnalysisException as error:
        raise RefusedQueryError(
            "Spark does not run this join of two streams; an outer or semi join needs event time with a watermark among its equal "
            "keys, or a watermark on the side that may lack a match (the right one of a left outer or left semi join) and a "
            "condition that bounds the other side's rows by it",
            join=sql,
            reason=str(error).partition("\n")[0].rstrip(";"),
        ) from error


def _of_event_time(join: Plan, condition: Expression | None, *, needs_both: bool) -> Expression | None:
    """Return the conjuncts of a condition that compare event time of one side with the other side.

    Spark takes any comparison of numbers or times for a bound of event time. With ``x > 4`` it never removes a row, and never emits a
    row that matched nothing; with ``left.ts < right.expires`` it removes rows that later rows would have matched. So Spark's rules get
    only these conjuncts. Unless it `needs_both` sides to be compared by event time, any column of a side without a watermark will do:
    its rows are kept for ever, and Spark runs the join.
    """
    if condition is None:
        return None
    sides = [side.output for side in (join.left, join.right)]
    ids = [{attribute.id for attribute in side} for side in sides]
    marked = [{attribute.id for attribute in side if attribute.watermark_delay_ms is not None} for side in sides]
    bounding = marked
    if not needs_both and any(marked):
        bounding = [marked_ids or all_ids for marked_ids, all_ids in zip(marked, ids, strict=True)]
    conjuncts = []
    for conjunct in condition.conjuncts():
        read = {attribute.id for attribute in conjunct.references}
        if read <= set().union(*bounding) and all(read & side_ids for side_ids in ids):
            conjuncts.append(conjunct)
    return conjunction(conjuncts)


def lags_ms(spark: SparkSession, node: JoinNode) -> tuple[int | None, int | None]:
    """Return how far behind the watermark each side's rows are still needed, in milliseconds; None if for ever.

    Raises
    ------
    InvalidRequestError
        The lag is not a fixed time.
    """
    rest = _of_event_time(node.join, node.rest, needs_both=True)
    is_first_enough = spark.conf.get(ALLOWS_MULTIPLE, "true") != "true"
    kept = [
        state_watermarks_ms(node.join, node.keys, rest, probe, is_first_enough=is_first_enough) for probe in _PROBES
    ]
    lags: list[int | None] = []
    for side in (0, 1):
        ends = [watermarks[side] for watermarks in kept]
        side_lags = {None if end is None else probe - end for probe, end in zip(_PROBES, ends, strict=True)}
        if len(side_lags) > 1:
            raise RefusedQueryError(
                "the times of this join's condition are not a fixed time apart; compare them with intervals added or subtracted"
            )
        lags.append(side_lags.pop())
    return lags[0], lags[1]

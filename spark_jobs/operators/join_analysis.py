"""A join of two streams as Spark would run it: its keys, the filters below it, and how long rows may still match."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from coordinator.model.errors import InvalidRequestError
from spark_jobs.plan.catalyst import Expression, conjunction
from spark_jobs.plan.join_rules import check_join, equi_join, pushed_down, state_watermarks_ms
from spark_jobs.plan.logical import Plan, analysed
from store_actors.operators.join_schema import JoinType

__all__ = ["JoinNode", "analysed_join", "lags_ms"]

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
    analysed
        As Spark analysed it: its output is the query's.
    own
        The join in it.
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

    analysed: Plan
    own: Plan
    outputs: tuple[Expression, ...]
    sides: tuple[Plan, Plan]
    filters: tuple[list[Expression], list[Expression]]
    keys: tuple[list[Expression], list[Expression]]
    rest: Expression | None
    kind: JoinType

    def attributes(self, side: int) -> list[Expression]:
        """Columns of a side, nullable where the result's are."""
        mine = (self.own.left if side == 0 else self.own.right).output
        return [one.nullable_attribute() for one in mine] if self.is_null_side(side) else mine

    def is_null_side(self, side: int) -> bool:
        """Whether a side's columns are null where the other side's row matched nothing."""
        return side in _NULL_SIDES.get(self.kind, ())


def analysed_join(joined: DataFrame) -> JoinNode:
    """Take a join of two streams out of the plan that Spark made of it.

    Raises
    ------
    InvalidRequestError
        Spark does not run such a join.
    """
    top = analysed(joined)
    own = top.child if top.kind == "Project" else top
    outputs = top.output if own is top else top.projected
    sql = own.join_type
    _check(own, sql)
    # The filters that Spark makes of the condition decide which rows count for a watermark, so they are Spark's own.
    pushed = pushed_down(own)
    found = equi_join(pushed)
    if found is None:
        raise InvalidRequestError(
            "a join of two streams needs an equality between columns of both sides, as in Spark; add one to the condition",
            join=sql,
        )
    plans, filters = zip(*(_unfiltered(side) for side in (pushed.left, pushed.right)), strict=True)
    return JoinNode(
        analysed=top,
        own=own,
        outputs=tuple(outputs),
        sides=(_with_event_time(plans[0]), _with_event_time(plans[1])),
        filters=(filters[0], filters[1]),
        keys=found.keys,
        rest=found.rest,
        kind=_TYPES[sql],
    )


def _check(join: Plan, sql: str) -> None:
    """Refuse what Spark does not run."""
    if sql not in _TYPES:
        raise InvalidRequestError(
            "Spark has inner, left outer, right outer, full outer and left semi joins of two streams; use one of these",
            join=sql,
        )
    try:
        check_join(join, _of_event_time(join, join.join_condition, needs_both=False))
    except AnalysisException as error:
        raise InvalidRequestError(
            "Spark does not run this join of two streams; an outer or semi join needs event time with a watermark among its equal "
            "keys, or a watermark on the side that may lack a match (the right one of a left outer or left semi join) and a "
            "condition that bounds the other side's rows by it",
            join=sql,
            reason=str(error).partition("\n")[0].rstrip(";"),
        ) from error


def _of_event_time(join: Plan, condition: Expression | None, *, needs_both: bool) -> Expression | None:
    """The parts of a condition that compare event time of one side with the other side.

    Spark takes a comparison of any numbers or times for a bound of event time. With ``x > 4`` it never removes a row, nor emits one
    that matched nothing; with ``left.ts < right.expires`` it removes rows that later ones would have matched. So it is not shown these.

    Parameters
    ----------
    needs_both
        Whether only event times are compared. Else a side without a watermark may be compared by any column: its rows have no end, and
        Spark runs the join.
    """
    if condition is None:
        return None
    sides = [side.output for side in (join.left, join.right)]
    ids = [{one.id for one in side} for side in sides]
    marked = [{one.id for one in side if one.watermark_delay_ms is not None} for side in sides]
    bounding = marked if needs_both or not any(marked) else [some or own for some, own in zip(marked, ids, strict=True)]
    parts = []
    for part in condition.conjuncts():
        read = {one.id for one in part.references}
        if read <= set().union(*bounding) and all(read & own for own in ids):
            parts.append(part)
    return conjunction(parts)


def _unfiltered(plan: Plan) -> tuple[Plan, list[Expression]]:
    """A plan without the filters at its top, and the parts of those."""
    parts: list[Expression] = []
    while plan.kind in ("Filter", "SubqueryAlias", "ResolvedHint"):
        if plan.kind == "Filter":
            parts += plan.condition.conjuncts()
        plan = plan.child
    return plan, parts


def _with_event_time(plan: Plan) -> Plan:
    """A plan that passes on the column that its ``withWatermark`` names."""
    if plan.kind in ("SubqueryAlias", "Filter"):
        return plan.with_children([_with_event_time(plan.child)])
    if plan.kind != "Project":
        return plan
    child = _with_event_time(plan.child)
    listed = plan.projected
    ids = {one.id for one in listed}
    hidden = [one for one in child.output if one.watermark_delay_ms is not None and _is_time(one) and one.id not in ids]
    return child.project([*listed, *hidden]) if hidden else plan


def _is_time(attribute: Expression) -> bool:
    return not isinstance(attribute.type, T.StructType)


def lags_ms(spark: SparkSession, node: JoinNode) -> tuple[int | None, int | None]:
    """How far behind the watermark each side's rows are still needed; None if for ever.

    Raises
    ------
    InvalidRequestError
        It is not a fixed time.
    """
    rest = _of_event_time(node.own, node.rest, needs_both=True)
    is_first_enough = spark.conf.get(_ALLOW_MULTIPLE, "true") != "true"
    kept = [state_watermarks_ms(node.own, node.keys, rest, probe, is_first_enough=is_first_enough) for probe in _PROBES]
    lags: list[int | None] = []
    for side in (0, 1):
        ends = [one[side] for one in kept]
        found = {None if end is None else probe - end for probe, end in zip(_PROBES, ends, strict=True)}
        if len(found) > 1:
            raise InvalidRequestError(
                "the times of this join's condition are not a fixed time apart; compare them with intervals added or subtracted"
            )
        lags.append(found.pop())
    return lags[0], lags[1]

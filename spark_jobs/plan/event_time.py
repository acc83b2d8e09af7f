"""Where a stateful operator's rows come from, and whose watermark it goes by.

An operator is fed by *branches*: the children of the unions above it (one, without a union). Event time enters a branch where
``withWatermark`` stands in it, or from another operator of the fleet below it.

By default an operator goes by Spark's own watermark, and only :class:`Upstream` is asked. For one that closes early the fleet has to
know the watermark of the batch itself. Spark takes the largest event time where ``withWatermark`` stands in the plan; the fleet takes
it from the rows that reach the operator. The two agree if nothing between drops rows, which is checked on the plan as Spark optimises
it: a filter that Spark itself moves below the watermark is no obstacle.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import EventTime
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.logical import Plan, analysed
from spark_jobs.worker.exchange import EVENT_TIME_COLUMN, ROUTE_COLUMN

__all__ = [
    "Branch",
    "Upstream",
    "branches_of",
    "event_time",
    "event_time_column",
    "event_time_rules",
    "operators_of",
    "state_of_task",
    "used_of",
    "watermark_time",
]

_WATERMARK = "EventTimeWatermark"
_POLICY = "spark.sql.streaming.multipleWatermarkPolicy"
#: Nodes that pass every row of their (only) child on.
_TRANSPARENT = frozenset({"Project", "SubqueryAlias", "Repartition", "RepartitionByExpression", "Expand"})
#: Nodes through which the rows of a union may be taken branch by branch.
_ROW_BY_ROW = frozenset({"Project", "SubqueryAlias", "Filter", "Generate", "Expand", "MapInPandas", "PythonMapInArrow"})


@dataclass(frozen=True, slots=True)
class Upstream:
    """An operator of the fleet that feeds another one; it is written into the plan, where the other finds it.

    Attributes
    ----------
    state, uri
        Name of its state, and the fleet.
    sources
        Every watermark source of it and of those that feed it.
    appends
        Whether a row that it emitted stands: an aggregation in update mode, say, emits a group again when it changes. One that has the
        query's mode may append; whether it does is known when the query starts.
    has_watermark
        Whether its output moves in event time.
    name, again, lag_ms
        What Spark's progress calls it, when Spark runs it again, and its lag (:mod:`spark_jobs.plan.timing`).
    mode
        Its output mode; None if it has the query's.
    modes
        Output modes of a query whose last operator it is.
    refused
        By output mode, why Spark or the fleet does not run it as a query's last operator.
    together
        Whether a task may have several shards.
    late_columns
        Columns of its input by which rows are late, each with the columns that it emits of the same time. Spark drops late rows by a
        column only if something reads it, as it prunes others; ``LateRowsRule.java`` makes the column null where nothing does.
    shards
        How many shards the program asks for; None if it takes what is there.
    """

    state: str
    uri: str
    sources: tuple[str, ...]
    appends: bool
    has_watermark: bool
    name: str
    again: str
    lag_ms: int
    mode: str | None
    modes: tuple[str, ...]
    refused: Mapping[str, str]
    together: bool
    late_columns: Mapping[str, Sequence[str]]
    shards: int | None = None

    def route_column(self) -> str:
        """Name of the column by which the operator's exchange is partitioned; ``Route.java`` reads it, too."""
        return f"{ROUTE_COLUMN}:{json.dumps(asdict(self))}"

    @classmethod
    def of_plan(cls, node: Plan) -> Upstream | None:
        """The operator whose exchange a plan's node is."""
        if node.kind != "RepartitionByExpression":
            return None
        for expression in node.partitioning:
            name = expression.name if expression.is_attribute else ""
            if name.startswith(f"{ROUTE_COLUMN}:"):
                facts = json.loads(name.partition(":")[2])
                return cls(**{**facts, "sources": tuple(facts["sources"])})
        return None


@dataclass(frozen=True, slots=True)
class Branch:
    """Rows of one origin: of a source with a watermark (its delay, in milliseconds), of operators of the fleet, or of neither."""

    frame: DataFrame
    delay_ms: int | None
    upstream: tuple[Upstream, ...]


def branches_of(frame: DataFrame) -> list[Branch]:
    """The branches of what reaches an operator.

    Raises
    ------
    InvalidRequestError
        Something between ``withWatermark`` and the operator can drop or add rows.
    """
    plans = _split(analysed(frame))
    return [_branch(frame)] if len(plans) == 1 else [_branch(plan.frame()) for plan in plans]


def _split(plan: Plan) -> list[Plan]:
    """A plan for each child of the unions at its top, with all that stands above them."""
    if plan.kind == "Union":
        attributes = plan.output
        return [_renamed(part, attributes) for child in plan.children for part in _split(child)]
    if plan.kind not in _ROW_BY_ROW:
        return [plan]
    parts = _split(plan.child)
    return [plan] if len(parts) == 1 else [plan.with_children([part]) for part in parts]


def _renamed(plan: Plan, attributes: Sequence[Expression]) -> Plan:
    """A union's child with the union's own attributes."""
    return plan.project(own.named_as(wanted) for own, wanted in zip(plan.output, attributes, strict=True))


def _branch(frame: DataFrame) -> Branch:
    plan = analysed(frame)
    upstream = tuple(_operators_below(plan))
    marks = _count(plan)
    if marks > 1 or (marks and upstream):
        raise InvalidRequestError(
            "several watermarks meet below this operator in a join of Spark's own, and an operator that closes early must know each; "
            "leave closing out, join the streams with fleet.stateful(..).join, or call withWatermark once, on the result"
        )
    if not marks:
        return Branch(frame, None, upstream)
    node = plan.optimised()
    while node.kind != _WATERMARK:
        if not _passes_all_rows(node):
            raise InvalidRequestError(
                "something between withWatermark and an operator that closes early can change which rows the watermark counts; leave "
                "closing out, or call withWatermark after it, as the last step before fleet.stateful",
                operator=node.node_name,
                plan=node.text,
            )
        node = node.children[0]
    delays = [attribute.watermark_delay_ms for attribute in node.output]
    return Branch(frame, next(delay for delay in delays if delay is not None), ())


def _operators_below(plan: Plan) -> Iterator[Upstream]:
    """Operators of the fleet that a plan's rows come from; not those below them."""
    found = Upstream.of_plan(plan)
    if found is not None:
        yield found
        return
    for child in plan.children:
        yield from _operators_below(child)


def operators_of(plan: Plan) -> list[Upstream]:
    """All operators of the fleet in a plan, each before those that feed it."""
    own = Upstream.of_plan(plan)
    found = [] if own is None else [own]
    for child in plan.children:
        found += [one for one in operators_of(child) if one not in found]
    return found


def used_of(plan: Plan, state: str) -> set[str]:
    """Names of the columns that an operator of the fleet emits and that something above it in a plan reads, as Spark would run it."""
    run = plan.optimised()
    tasks, others = list[Plan](), list[Plan]()

    def walk(node: Plan) -> None:
        if state_of_task(node) == state:
            tasks.append(node)
            return
        others.append(node)
        for child in node.children:
            walk(child)

    walk(run)
    shown = {one.id for one in run.output}
    return {
        column.name
        for task in tasks
        for column in task.output
        if column.id in shown or any(one.reads(column) for one in others)
    }


def state_of_task(node: Plan) -> str | None:
    """State of the operator of the fleet behind whose exchange a node is the task; None of any other node."""
    if not node.kind.endswith("MapInArrow"):
        return None
    below = node.child
    while (
        (found := Upstream.of_plan(below)) is None
        and len(below.children) == 1
        and not below.kind.endswith("MapInArrow")
    ):
        below = below.child
    return None if found is None else found.state


def _count(plan: Plan) -> int:
    """Watermarks of a plan that no operator of the fleet stands above."""
    if Upstream.of_plan(plan) is not None:
        return 0
    return (plan.kind == _WATERMARK) + sum(_count(child) for child in plan.children)


def _passes_all_rows(node: Plan) -> bool:
    if node.kind == "Join":
        # The left side of a left outer join loses nothing; the watermark must be on that side.
        return node.join_type == "LEFT OUTER" and _count(node.left) > _count(node.right)
    if node.kind == "Filter":
        return all(_is_event_time_there(part) or _is_in_window(part) for part in node.condition.conjuncts())
    return node.kind in _TRANSPARENT or (node.kind == "Generate" and node.is_outer)


def _is_in_window(condition: Expression) -> bool:
    """Whether it compares event time with windows of it, nothing else: sliding windows leave out only superfluous copies of rows."""
    return all(leaf.watermark_delay_ms is not None for leaf in condition.leaves())


def _is_event_time_there(condition: Expression) -> bool:
    """Rows without an event time count for no watermark."""
    return condition.kind == "IsNotNull" and condition.child.watermark_delay_ms is not None


def event_time(attributes: Sequence[Expression]) -> tuple[int | None, Column | None]:
    """Watermark delay, in milliseconds, and event time of the attributes that reach an operator.

    The delay is None without a watermark, the time if only windows of it are there.
    """
    marked = [(one, delay) for one in attributes if (delay := one.watermark_delay_ms) is not None]
    if not marked:
        return None, None
    times = [(one, delay) for one, delay in marked if not isinstance(one.type, T.StructType)]
    if not times:
        return marked[0][1], None
    attribute, delay = times[0]
    return delay, attribute.column().cast("timestamp")


def watermark_time(attribute: Expression) -> Column:
    """The time that Spark compares with the watermark, of a column that has one: of a window its end."""
    column = attribute.column()
    return (column.getField("end") if isinstance(attribute.type, T.StructType) else column).cast("timestamp")


def event_time_column(time: Column | None) -> list[Column]:
    """The column that tells map tasks a row's event time, if there is one."""
    # unix_millis floors, as Spark does when it takes the largest event time.
    return [] if time is None else [F.unix_millis(time).alias(EVENT_TIME_COLUMN)]


def event_time_rules(spark: SparkSession, state: str, branches: Sequence[Branch]) -> EventTime:
    """What moves the event time of an operator that is fed by `branches`."""
    marked = [branch for branch in branches if branch.delay_ms is not None]
    upstream = {one.state: one for branch in branches for one in branch.upstream}
    return EventTime(
        sources=tuple(f"{state}/{number}" for number in range(len(marked))),
        upstream=tuple(sorted(upstream)),
        upstream_sources=tuple(sorted({name for one in upstream.values() for name in one.sources})),
        policy=str(spark.conf.get(_POLICY, "min")),
    )

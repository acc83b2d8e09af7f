"""The sources of a stateful operator's rows, and the watermark that it follows.

The input of an operator has *branches*: the children of the unions in it, or a single branch without a union. Event time enters a
branch at ``withWatermark``, or from another operator of the fleet below.

By default an operator follows Spark's own watermark, and only :class:`Upstream` is used. For an operator that closes early the
fleet has to compute the watermark of the batch itself. Spark takes the largest event time at ``withWatermark``; the fleet takes it
from the rows that reach the operator. The two are equal if no node between them drops rows. That is checked on Spark's optimised
plan, so a filter that Spark moves below the watermark is allowed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.schema import EventTime
from coordinator.model.state_metadata import StateMetadata
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.logical import Plan, analysed
from spark_jobs.plan.spark_errors import RefusedQueryError
from spark_jobs.plan.stateful_exchange import compiled_entry
from spark_jobs.worker.exchange import EVENT_TIME_COLUMN, ROUTE_COLUMN

__all__ = [
    "Branch",
    "Upstream",
    "branches_of",
    "event_time",
    "event_time_column",
    "event_time_rules",
    "operators_of",
    "several_event_times",
    "state_of_task",
    "used_of",
    "watermark_time",
]

_WATERMARK = "EventTimeWatermark"
#: With it off, Spark takes the first of several columns of event time.
_ALLOWS_MULTIPLE = "spark.sql.streaming.statefulOperator.allowMultiple"
_POLICY = "spark.sql.streaming.multipleWatermarkPolicy"
#: Nodes that pass on every row of their only child.
_TRANSPARENT = frozenset({"Project", "SubqueryAlias", "Repartition", "RepartitionByExpression", "Expand"})
#: Nodes that can be applied to each branch of a union separately.
_ROW_BY_ROW = frozenset({"Project", "SubqueryAlias", "Filter", "Generate", "Expand", "MapInPandas", "PythonMapInArrow"})


@dataclass(frozen=True, slots=True)
class Upstream:
    """An operator of the fleet as others see it: the plan has a name of its facts, by which the operators that it feeds find them.

    Attributes
    ----------
    state, uri
        Name of its state, and URI of the fleet.
    sources
        Every watermark source of the operator and of the operators that feed it.
    appends
        Whether an emitted row is final: an aggregation in update mode, for example, emits a group again when it changes. An
        operator with the query's mode may append; whether it does is known when the query starts.
    has_watermark
        Whether its output has a watermark.
    name, again, lag_ms
        Its name in Spark's progress, when Spark runs it again, and its lag (:mod:`spark_jobs.plan.timing`).
    mode
        Its output mode; None if it has the query's.
    modes
        Output modes of a query whose last operator it is.
    refused
        By output mode, why Spark or the fleet does not run it as a query's last operator.
    together
        Whether a task may have several shards.
    late_columns
        Columns of its input by which rows are late, each with the emitted columns of the same time. Spark prunes a column that no
        node reads, and then drops no late rows by it; ``LateRowsRule.java`` makes such a column null.
    shards
        Number of shards that the program asks for; None if it accepts the current number.
    sockets
        How the paths of the sockets begin to which its tasks hand rows over; None if Python workers send them.
    by_python
        Why Python workers send them; None if they need not.
    accumulators
        Kind, inputs and state fields of each accumulator of an aggregation (``PartialAggregation.java``); None for other operators.
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
    sockets: str | None = None
    by_python: str | None = None
    accumulators: Sequence[Mapping[str, Any]] | None = None

    def route_column(self, spark: SparkSession, requested: StateMetadata) -> str:
        """Return the name of the column by which the operator's exchange is partitioned, under which its facts are kept.

        The facts are not in the plan, as users see the plan in errors. An operator that asks for another state has another name.
        """
        facts = json.dumps(asdict(self))
        digest = hashlib.sha256(f"{facts}{requested.to_json()}".encode()).hexdigest()
        # What explain() shows has to say why tasks do not hand rows over.
        why = f": {self.by_python}" if self.by_python else ""
        name = f"{ROUTE_COLUMN}:{self.state}:{digest[:16]}{why}"
        compiled_entry(spark).keepFacts(name, facts)
        return name

    @classmethod
    def of_plan(cls, node: Plan) -> Upstream | None:
        """Return the operator whose exchange a node of a plan is; None for any other node."""
        if node.kind != "RepartitionByExpression":
            return None
        for expression in node.partitioning:
            name = expression.name if expression.is_attribute else ""
            if name.startswith(f"{ROUTE_COLUMN}:"):
                facts = json.loads(compiled_entry(node.spark).factsOf(name))
                return cls(**{**facts, "sources": tuple(facts["sources"])})
        return None


@dataclass(frozen=True, slots=True)
class Branch:
    """Rows of one origin: a source with a watermark (its delay in milliseconds), operators of the fleet, or neither."""

    frame: DataFrame
    delay_ms: int | None
    upstream: tuple[Upstream, ...]


def branches_of(frame: DataFrame) -> list[Branch]:
    """Return the branches of an operator's input.

    Raises
    ------
    InvalidRequestError
        A node between ``withWatermark`` and the operator can drop or add rows.
    """
    plans = _split(analysed(frame))
    return [_branch(frame)] if len(plans) == 1 else [_branch(plan.frame()) for plan in plans]


def _split(plan: Plan) -> list[Plan]:
    """Return a plan for each child of the unions at its top, each with the nodes above the unions."""
    if plan.kind == "Union":
        attributes = plan.output
        return [_renamed(branch, attributes) for child in plan.children for branch in _split(child)]
    if plan.kind not in _ROW_BY_ROW:
        return [plan]
    branches = _split(plan.child)
    return [plan] if len(branches) == 1 else [plan.with_children([branch]) for branch in branches]


def _renamed(plan: Plan, attributes: Sequence[Expression]) -> Plan:
    """Return a union's child with the union's attributes."""
    return plan.project(column.named_as(attribute) for column, attribute in zip(plan.output, attributes, strict=True))


def _branch(frame: DataFrame) -> Branch:
    plan = analysed(frame)
    upstream = tuple(_operators_below(plan))
    marks = _count(plan)
    if marks > 1 or (marks and upstream):
        raise RefusedQueryError(
            "several watermarks meet below this operator in a join of Spark's own, and an operator that closes early must know each; "
            "leave closing out, join the streams with fleet.stateful(..).join, or call withWatermark once, on the result"
        )
    if not marks:
        return Branch(frame, None, upstream)
    node = plan.optimised()
    while node.kind != _WATERMARK:
        if not _passes_all_rows(node):
            raise RefusedQueryError(
                "something between withWatermark and an operator that closes early can change which rows the watermark counts; leave "
                "closing out, or call withWatermark after it, as the last step before fleet.stateful",
                operator=node.node_name,
                plan=node.text,
            )
        node = node.children[0]
    delays = [attribute.watermark_delay_ms for attribute in node.output]
    return Branch(frame, next(delay for delay in delays if delay is not None), ())


def _operators_below(plan: Plan) -> Iterator[Upstream]:
    """Yield the fleet's operators that a plan's rows come from, without the operators below them."""
    operator = Upstream.of_plan(plan)
    if operator is not None:
        yield operator
        return
    for child in plan.children:
        yield from _operators_below(child)


def operators_of(plan: Plan) -> list[Upstream]:
    """Return all operators of the fleet in a plan, each before those that feed it."""
    top = Upstream.of_plan(plan)
    operators = [] if top is None else [top]
    for child in plan.children:
        operators += [operator for operator in operators_of(child) if operator not in operators]
    return operators


def used_of(plan: Plan, state: str) -> set[str]:
    """Return the names of the columns that an operator emits and that a node above it reads, in the plan as Spark optimises it."""
    optimised = plan.optimised()
    tasks, other_nodes = list[Plan](), list[Plan]()

    def walk(node: Plan) -> None:
        if state_of_task(node) == state:
            tasks.append(node)
            return
        other_nodes.append(node)
        for child in node.children:
            walk(child)

    walk(optimised)
    output = {column.id for column in optimised.output}
    return {
        column.name
        for task in tasks
        for column in task.output
        if column.id in output or any(node.reads(column) for node in other_nodes)
    }


def state_of_task(node: Plan) -> str | None:
    """Return the state's name if a node runs the tasks behind an operator's exchange; None for any other node."""
    if not node.kind.endswith("MapInArrow"):
        return None
    below = node.child
    while (
        (operator := Upstream.of_plan(below)) is None
        and len(below.children) == 1
        and not below.kind.endswith("MapInArrow")
    ):
        below = below.child
    return None if operator is None else operator.state


def _count(plan: Plan) -> int:
    """Return the number of watermarks of a plan that are not below an operator of the fleet."""
    if Upstream.of_plan(plan) is not None:
        return 0
    return (plan.kind == _WATERMARK) + sum(_count(child) for child in plan.children)


def _passes_all_rows(node: Plan) -> bool:
    if node.kind == "Join":
        # The left side of a left outer join loses nothing; the watermark must be on that side.
        return node.join_type == "LEFT OUTER" and _count(node.left) > _count(node.right)
    if node.kind == "Filter":
        return all(_is_event_time_there(conjunct) or _is_in_window(conjunct) for conjunct in node.condition.conjuncts())
    return node.kind in _TRANSPARENT or (node.kind == "Generate" and node.is_outer)


def _is_in_window(condition: Expression) -> bool:
    """Whether a condition only compares event time with its windows: sliding windows filter superfluous copies of rows by that."""
    return all(leaf.watermark_delay_ms is not None for leaf in condition.leaves())


def _is_event_time_there(condition: Expression) -> bool:
    """Whether a condition only drops rows without an event time, which count for no watermark."""
    return condition.kind == "IsNotNull" and condition.child.watermark_delay_ms is not None


def event_time(attributes: Sequence[Expression]) -> tuple[int | None, Column | None]:
    """Return the watermark delay, in milliseconds, and the event time of the attributes that reach an operator.

    The delay is None without a watermark. The time is None if the attributes have only windows of it.
    """
    marked = [(attribute, delay) for attribute in attributes if (delay := attribute.watermark_delay_ms) is not None]
    if not marked:
        return None, None
    times = [(attribute, delay) for attribute, delay in marked if not isinstance(attribute.type, T.StructType)]
    if not times:
        return marked[0][1], None
    attribute, delay = times[0]
    return delay, attribute.column().cast("timestamp")


def several_event_times(expressions: Iterable[Expression], spark: SparkSession) -> str | None:
    """Return why an operator with these columns cannot run: Spark cannot tell by which one rows are late; None if it can."""
    marked = {expression.id: expression.name for expression in expressions if expression.watermark_delay_ms is not None}
    if len(marked) < 2 or spark.conf.get(_ALLOWS_MULTIPLE, "true") != "true":
        return None
    return (
        "the operator has several columns of event time with a watermark, and Spark ends such a query in its first batch (More than "
        "one event time columns are available); keep one, and make the others expressions, such as ts + interval 0 seconds: "
        + ", ".join(marked.values())
    )


def watermark_time(attribute: Expression) -> Column:
    """Return the time of a column that Spark compares with the watermark: of a window, its end."""
    column = attribute.column()
    return (column.getField("end") if isinstance(attribute.type, T.StructType) else column).cast("timestamp")


def event_time_column(time: Column | None) -> list[Column]:
    """Return the column by which map tasks get a row's event time; empty without an event time."""
    # unix_millis floors, as Spark does when it computes the largest event time.
    return [] if time is None else [F.unix_millis(time).alias(EVENT_TIME_COLUMN)]


def event_time_rules(spark: SparkSession, state: str, branches: Sequence[Branch]) -> EventTime:
    """Return the sources of event time of an operator whose input is `branches`."""
    marked = [branch for branch in branches if branch.delay_ms is not None]
    upstream = {operator.state: operator for branch in branches for operator in branch.upstream}
    return EventTime(
        sources=tuple(f"{state}/{number}" for number in range(len(marked))),
        upstream=tuple(sorted(upstream)),
        upstream_sources=tuple(sorted({name for operator in upstream.values() for name in operator.sources})),
        policy=str(spark.conf.get(_POLICY, "min")),
    )

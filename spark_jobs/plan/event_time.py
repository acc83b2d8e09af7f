"""The fleet's operators in a plan, and the event time of the rows that reach them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, SparkSession
from pyspark.sql import types as T

from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.logical import Plan
from spark_jobs.plan.spark_errors import InvalidArgumentError
from spark_jobs.plan.stateful_exchange import jvm_classes
from spark_jobs.worker.exchange import ROUTE_COLUMN

#: With it off, Spark takes the first of several columns of event time.
ALLOWS_MULTIPLE = "spark.sql.streaming.statefulOperator.allowMultiple"


@dataclass(frozen=True, slots=True)
class Upstream:
    """An operator of the fleet as others see it: the plan has a name of its facts, by which the operators that it feeds find them."""

    #: ``state``, ``uri``: Name of its state, and URI of the fleet.
    state: str
    uri: str
    #: Whether an emitted row is final: an aggregation in update mode, for example, emits a group again when it changes. An
    #: operator with the query's mode may append; whether it does is known when the query starts.
    appends: bool
    has_watermark: bool
    #: ``name``, ``again``, ``lag_ms``: Its name in Spark's progress, when Spark runs it again, and its lag
    #: (:mod:`spark_jobs.plan.operator_rules`).
    name: str
    again: str
    lag_ms: int
    #: Its output mode; None if it has the query's.
    mode: str | None
    #: Output modes of a query whose last operator it is.
    modes: tuple[str, ...]
    #: By output mode, why Spark or the fleet does not run it as a query's last operator.
    refused: Mapping[str, str]
    #: Columns of its input by which rows are late, each with the emitted columns of the same time. Spark prunes a column that no
    #: node reads, and then drops no late rows by it; ``LateRowsRule`` (``Rules.scala``) makes such a column null.
    late_columns: Mapping[str, Sequence[str]]
    #: Number of shards that the program asks for; None if it accepts the current number.
    shards: int | None = None
    #: How the paths of the store actors' sockets begin.
    sockets: str | None = None
    #: Why a Python worker gets them; None if none does.
    by_python: str | None = None
    #: After how many milliseconds without rows a source's watermark holds those of others back no longer; None if it always does.
    idle_ms: int | None = None
    #: Kind, inputs, state fields and words of registers of each accumulator of an aggregation (``OperatorRows.scala``); None
    #: for other operators.
    accumulators: Sequence[Mapping[str, Any]] | None = None

    def to_json(self) -> str:
        """Return it as the exchange of a plan has it (``Operators.scala``)."""
        return json.dumps(asdict(self))

    def route_column(self, task: str) -> str:
        """Return the name of the column by which the operator's exchange is partitioned. `task` is the operator as store actors get it,
        in JSON.

        An operator that asks for another state has another name.
        """
        digest = hashlib.sha256(f"{self.to_json()}{task}".encode()).hexdigest()
        # What explain() shows has to say why tasks do not hand rows over.
        why = f": {self.by_python}" if self.by_python else ""
        return f"{ROUTE_COLUMN}:{self.state}:{digest[:16]}{why}"

    @classmethod
    def of_plan(cls, node: Plan) -> Upstream | None:
        """Return the operator whose exchange a node of a plan is; None for any other node."""
        if node.kind != "StatefulExchange":
            return None
        return cls(**json.loads(jvm_classes(node.spark).factsOf(node._java)))


def interval_ms(spark: SparkSession, interval: str) -> int:
    """Return an interval as ``withWatermark`` takes it, such as ``1 minute``, in milliseconds.

    Raises
    ------
    InvalidRequestError
        It is none, or not positive.
    """
    try:
        milliseconds = int(jvm_classes(spark).milliseconds(interval))
    except (Py4JError, PySparkException) as error:
        raise InvalidArgumentError(
            "not an interval of time; give one as of withWatermark, such as '1 minute'", interval=interval
        ) from error
    if milliseconds <= 0:
        raise InvalidArgumentError("an interval is longer than nothing", interval=interval)
    return milliseconds


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
    if not _are_tasks(node):
        return None
    below = node.child
    while (operator := Upstream.of_plan(below)) is None and len(below.children) == 1 and not _are_tasks(below):
        below = below.child
    return None if operator is None else operator.state


def _are_tasks(node: Plan) -> bool:
    return node.kind == "HandedOver" or node.kind.endswith("MapInArrow")


def watermark_delay_ms(attributes: Sequence[Expression]) -> int | None:
    """Return the delay of the watermark of the attributes that reach an operator, in milliseconds; None without a watermark.

    Where there are several, it is that of the column of :func:`event_time`, before those of windows.
    """
    marked = _marked(attributes)
    return marked[0].watermark_delay_ms if marked else None


def event_time(attributes: Sequence[Expression]) -> Column | None:
    """Return the event time of the attributes that reach an operator; None without one, or if there are only windows of it."""
    marked = _marked(attributes)
    return marked[0].column().cast("timestamp") if marked and not _is_window(marked[0]) else None


def _marked(attributes: Sequence[Expression]) -> list[Expression]:
    """Return the attributes with a watermark, windows last."""
    return sorted((item for item in attributes if item.watermark_delay_ms is not None), key=_is_window)


def several_event_times(expressions: Iterable[Expression], spark: SparkSession) -> str | None:
    """Return why an operator with these columns cannot run: Spark cannot tell by which one rows are late; None if it can."""
    marked = {expression.id: expression.name for expression in expressions if expression.watermark_delay_ms is not None}
    if len(marked) < 2 or spark.conf.get(ALLOWS_MULTIPLE, "true") != "true":
        return None
    return (
        "the operator has several columns of event time with a watermark, and Spark ends such a query in its first batch (More than "
        "one event time columns are available); keep one, and make the others expressions, such as ts + interval 0 seconds: "
        + ", ".join(marked.values())
    )


def late_column(attributes: Iterable[Expression]) -> Expression | None:
    """Return the column by which rows are late: as for Spark, the first with a watermark; None if none has one."""
    return next((attribute for attribute in attributes if attribute.watermark_delay_ms is not None), None)


def watermark_time(attribute: Expression) -> Column:
    """Return the time of a column that Spark compares with the watermark: of a window, its end."""
    column = attribute.column()
    return (column.getField("end") if _is_window(attribute) else column).cast("timestamp")


def _is_window(attribute: Expression) -> bool:
    return isinstance(attribute.type, T.StructType)

"""A stateful operator on its way into a streaming plan: what the plans of all kinds have, and the plan around its tasks.

An exchange gives the rows of an operator's inputs to its shards, and the tasks above it hand them over to store actors; or a user's
function above it gets them, in Python workers. Both are nodes of ours in Spark's plan (``spark_jobs/jvm/common/Operators.scala``).
Partition p is shard p, and it is the partition where Spark's own aggregation would put the same keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import types as T
from pyspark.sql.types import StructType

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, OperatorKind, StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.type_names import string_to_type
from spark_jobs.plan.catalyst import CATALYST, WATERMARK_KEY, java_class, java_type
from spark_jobs.plan.event_time import Upstream
from spark_jobs.plan.logical import Plan, analysed
from spark_jobs.plan.operator_rules import output_lag_ms, query_modes, runs_again, warn_if_unbounded
from spark_jobs.plan.spark_errors import RefusedQueryError
from spark_jobs.plan.spark_version import SPARK
from spark_jobs.plan.stateful_exchange import jvm_classes
from spark_jobs.worker.exchange import END_COLUMN, HASH_COLUMN
from store_actors.client.operator_task import OperatorTask
from store_actors.operators.operator_names import operator_name

#: A ``mapInArrow`` function, from the batches of a partition of the exchange to the batches that it emits.
ReduceTask = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
#: Spark's own operators with a user's function and its state.
_OF_A_FUNCTION = frozenset({"FlatMapGroupsInPandasWithState", "FlatMapGroupsWithState"})
#: By the name of an operator's route column, the state as the program asks for it.
_REQUESTED: dict[str, StateMetadata] = {}


@dataclass(frozen=True, kw_only=True)
class OperatorPlan:
    """An analysed operator: the rows to shuffle to its shards, and the results of the rows that they emit."""

    #: For each of the schema's ``input_schemas`` that is read, its columns, and the hash of the keys.
    inputs: tuple[DataFrame, ...]
    schema: StateSchema
    #: Spark's type of the rows that shards emit.
    emitted: StructType
    #: Whether an emitted row is final.
    appends: bool = True
    #: The columns by which emitted rows are late (:class:`~spark_jobs.plan.event_time.Upstream`), if it uses them for nothing else.
    late_columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: Spark's own operator, with the columns of the results, if Spark has it and moves filters through it.
    analysed: Plan | None = None

    def finish(self, emitted: DataFrame) -> DataFrame:
        """Return the results, with Spark's names, types and nullability, of emitted rows."""
        return emitted


@runtime_checkable
class TaskMaker(Protocol):
    """A plan with a reduce task of its own, in place of the task that passes the rows to a shard."""

    def reduce_task(self, schema: StateSchema, metadata: StateMetadata) -> ReduceTask:
        """Return the task for the operator's final schema."""


@runtime_checkable
class Collector(Protocol):
    """A plan whose tasks need further rows, such as an initial state: they are collected before the operator is routed."""

    def collected(self, newest: int, num_shards: int) -> OperatorPlan:
        """Run the Spark jobs that collect the rows, and return the plan with them.

        `newest` is the newest version that every shard of the state has, 0 without any; the first batch has `num_shards`.
        """


class QueryModes(NamedTuple):
    """The output modes of a query whose last operator this is."""

    #: The operator's own output mode; None if it has the query's.
    mode: str | None
    modes: tuple[str, ...]
    #: By output mode, why the query may not use it.
    refused: Mapping[str, str]

    @classmethod
    def of(cls, schema: StateSchema) -> QueryModes:
        """Return the modes for an operator with a mode of its own."""
        return cls(schema.output_mode, query_modes(schema), {})


@dataclass(frozen=True)
class RoutedOperator:
    """An operator with its schema, and as the operators that it feeds see it."""

    plan: OperatorPlan
    schema: StateSchema
    upstream: Upstream

    @classmethod
    def of(
        cls,
        plan: OperatorPlan,
        state: str,
        uri: str,
        *,
        modes: QueryModes | None = None,
    ) -> RoutedOperator:
        """Return an operator with a name; without `modes`, it has those of an operator with a mode of its own.

        Raises InvalidRequestError if an operator below emits rows that are not final, or lives in another fleet. Warns with
        UnboundedStateWarning if its state grows for ever.
        """
        below = _check_below(plan.inputs, state)
        for operator in below:
            if operator.uri != uri:
                raise RefusedQueryError(
                    "the stateful operators of a query live in one fleet; connect to the same one for all of them",
                    state=state,
                    other_state=operator.state,
                    other_fleet=operator.uri,
                )
        schema = plan.schema
        warn_if_unbounded(schema, state)
        mode, possible, refused = modes or QueryModes.of(schema)
        # A user's function is called in a Python worker, and sees a single partition of its state.
        is_of_function = isinstance(plan, TaskMaker)
        upstream = Upstream(
            state,
            uri,
            "append" in possible if mode is None else plan.appends,
            schema.delay_ms is not None,
            name=operator_name(schema),
            again=runs_again(schema),
            lag_ms=output_lag_ms(schema),
            mode=mode,
            modes=possible,
            refused=dict(refused),
            late_columns=dict(plan.late_columns),
            by_python="a function of the user's is called in them" if is_of_function else None,
            accumulators=_accumulators(schema),
        )
        return cls(plan, schema, upstream)


def _accumulators(schema: StateSchema) -> list[dict[str, Any]] | None:
    if schema.operator is not OperatorKind.AGGREGATE:
        return None
    return [
        {
            "kind": item.kind,
            "inputs": item.inputs,
            "state": [field.name for field in item.state],
            "words": _words(item),
        }
        for item in schema.accumulators
    ]


def _words(accumulator: Accumulator) -> int | None:
    if accumulator.kind is not AccumulatorKind.DISTINCT_REGISTERS:
        return None
    return int(string_to_type(accumulator.state[0].type).byte_width) // 8


def check_output_mode(operator: str, output_mode: str, supported: Sequence[str]) -> None:
    """Refuse an output mode that an operator does not support.

    Raises
    ------
    InvalidRequestError
        The mode is not supported; the error names those that are.
    """
    if output_mode not in supported:
        raise RefusedQueryError(
            f"{operator} has no {output_mode} mode; leave outputMode out, or use {' or '.join(supported)} mode",
            outputMode=output_mode,
        )


def _check_below(inputs: Sequence[DataFrame], state: str) -> list[Upstream]:
    """Return the fleet's operators below one; refuse inputs with rows that are not final, or with a state's rows twice."""
    exchanges: dict[str, Plan] = {}
    below: dict[str, Upstream] = {}
    for frame in inputs:
        for operator, exchange in _operators_below(analysed(frame), state):
            # A DataFrame may be an input twice, as in a self join: it is the same operator, which commits each batch once.
            if operator.state == state or not exchange.has_result_of(exchanges.setdefault(operator.state, exchange)):
                raise RefusedQueryError(
                    "two stateful operators of a query have the same name, and would share one state; give each a name of its own",
                    state=operator.state,
                )
            if not operator.appends:
                raise RefusedQueryError(
                    "an operator that emits a row again when it changes cannot feed another stateful operator, which would count it "
                    "twice; use append mode below, or write its results to a sink and read them in a second query",
                    state=operator.state,
                )
            below[operator.state] = operator
    return list(below.values())


def _operators_below(plan: Plan, state: str) -> Iterator[tuple[Upstream, Plan]]:
    """Yield the fleet's operators in a plan, with their exchanges; refuse Spark's own whose rows may change, as Spark does."""
    operator = Upstream.of_plan(plan)
    if operator is not None:
        yield operator, plan
    if plan.kind == "Aggregate" and _is_mark(plan):
        yield from _operators_below(plan.child, state)
        return
    may_change = plan.kind == "Aggregate" or (plan.kind in _OF_A_FUNCTION and plan.output_mode != "Append")
    if may_change and plan.is_streaming:
        raise RefusedQueryError(
            "a stateful operator of Spark's own stands below this one, which would count its rows again whenever they change; make "
            "that one an operator of the fleet in append mode (fleet.stateful), or write its results to a sink and read them in a "
            "second query",
            state=state,
            operator=plan.node_name,
        )
    for child in plan.children:
        yield from _operators_below(child, state)


def _is_mark(aggregate: Plan) -> bool:
    """Return whether an aggregation only marks an operator in complete mode (:func:`_marked_as_aggregation`)."""
    return Upstream.of_plan(aggregate.child) is not None


def requested_state(route: str, query_mode: str | None) -> StateMetadata:
    """Return the state that an operator of a plan asks for, by the name of its route column; in the query's mode if it has none of its
    own.
    """
    requested = _REQUESTED[route]
    if query_mode is None or requested.schema is None:
        return requested
    return requested.in_output_mode(requested.schema.in_output_mode(query_mode))


def route_plan(operator: RoutedOperator, metadata: StateMetadata) -> DataFrame:
    """Return the streaming DataFrame of an operator's results, with its state in the fleet."""
    schema, plan, upstream = operator.schema, operator.plan, operator.upstream
    task = OperatorTask(schema, metadata).to_json()
    facts = upstream.to_json()
    route = upstream.route_column(task)
    _REQUESTED[route] = metadata
    is_marked = upstream.mode in (None, "complete")
    # Spark's checks look for the event time of groups, as append mode asks for.
    marks = {WATERMARK_KEY: 0} if is_marked and "append" in upstream.modes else None
    columns = [T.StructField(route, T.IntegerType(), metadata=marks)]
    if isinstance(plan, TaskMaker):
        (rows,) = plan.inputs
        values = [T.StructField(item.name, item.dataType) for item in rows.schema if item.name != HASH_COLUMN]
        columns = [*values, T.StructField(END_COLUMN, T.BinaryType()), *columns]
    rows = _exchanged(plan.inputs, T.StructType(columns), metadata.num_shards, facts)
    if is_marked:
        rows = _marked_as_aggregation(rows)
    if isinstance(plan, TaskMaker):
        emitted = rows.mapInArrow(plan.reduce_task(schema, metadata), plan.emitted)
    else:
        emitted = _handed_over(rows, plan.emitted, task)
    results = plan.finish(emitted)
    return results if plan.analysed is None else _with_sparks_own(results, plan.analysed)


def _exchanged(inputs: Sequence[DataFrame], columns: T.StructType, shards: int, facts: str) -> DataFrame:
    """Return the rows of an operator's inputs, each by its shard, under these columns, of which the last one is the route."""
    spark = inputs[0].sparkSession
    frames, kind = [rows._jdf for rows in inputs], java_type(spark, columns)
    return DataFrame(jvm_classes(spark).exchanged(frames, kind, shards, facts), spark)


def _handed_over(rows: DataFrame, columns: T.StructType, task: str) -> DataFrame:
    """Return the rows that an operator's tasks emit, which hand its rows over to store actors."""
    spark = rows.sparkSession
    return DataFrame(jvm_classes(spark).handedOver(rows._jdf, java_type(spark, columns), task), spark)


def _marked_as_aggregation(exchange: DataFrame) -> DataFrame:
    """Return the exchange below an aggregation of nothing, so that Spark's checks treat its operator as an aggregation.

    The mark is removed before the query is planned.
    """
    plan = exchange._jdf.queryExecution().analyzed()
    columns = plan.output()
    aggregate = SPARK.aggregate_of_nothing(java_class, columns, plan)
    return Plan(aggregate, exchange.sparkSession).frame()


def _with_sparks_own(results: DataFrame, own: Plan) -> DataFrame:
    """Tag an operator's results with Spark's own operator as it was analysed, and return them.

    Filters that Spark would move through its own operator are moved by the tag (``FilterPushdown.scala``).
    """
    tag = java_class(f"{CATALYST}.trees.TreeNodeTag")("statefleet.analysed")
    results._jdf.queryExecution().analyzed().setTagValue(tag, own._java)
    return results

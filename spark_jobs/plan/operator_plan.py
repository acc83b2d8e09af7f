"""A stateful operator on its way into a streaming plan: what its kind says of it, and where its rows come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from spark_jobs.plan.bounds import warn_if_unbounded
from spark_jobs.plan.event_time import Branch, Upstream, branches_of, event_time_rules
from spark_jobs.plan.logical import Plan, analysed
from spark_jobs.plan.timing import output_lag_ms, query_modes, runs_again
from spark_jobs.worker.exchange import EVENT_TIME_COLUMN
from spark_jobs.worker.fleet_client import FleetAddress
from store_actors.operators.operator_names import operator_name

__all__ = [
    "Collector",
    "OperatorPlan",
    "QueryModes",
    "ReduceTask",
    "RoutedOperator",
    "SparksOwn",
    "TaskMaker",
    "check_output_mode",
]

#: A ``mapInArrow`` function: what one partition of the exchange received in, what it emits out.
ReduceTask = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
#: Spark's own operators with state of the user's.
_OF_A_FUNCTION = frozenset({"FlatMapGroupsInPandasWithState", "FlatMapGroupsWithState"})


class OperatorPlan(Protocol):
    """One operator, analysed: what to shuffle to its shards and what to make of that which they emit."""

    @property
    def inputs(self) -> tuple[DataFrame, ...]:
        """For each of the schema's ``input_schemas`` that is read: its columns, the hash of the keys, and any event time."""

    @property
    def schema(self) -> StateSchema:
        """The operator's schema, which does not say yet what moves its event time."""

    @property
    def appends(self) -> bool:
        """Whether a row that was emitted stands."""

    def row_type(self) -> StructType:
        """Spark's form of the rows that shards emit."""

    def finish(self, emitted: DataFrame) -> DataFrame:
        """Results, with Spark's names, types and nullability, of a DataFrame in ``row_type``."""


@runtime_checkable
class TaskMaker(Protocol):
    """A plan that has its own task on the reduce side, in place of one that hands the rows to a shard."""

    def reduce_task(self, schema: StateSchema, metadata: StateMetadata, address: FleetAddress) -> ReduceTask:
        """The task, for the operator's final schema."""


@runtime_checkable
class Collector(Protocol):
    """A plan whose tasks need rows besides those of the stream: they are collected once the state is known, before it is routed."""

    def collected(self, newest: int, num_shards: int) -> OperatorPlan:
        """The plan with these rows. It runs Spark jobs.

        Parameters
        ----------
        newest
            Newest version that every shard of the state has; 0 for one that has none yet.
        num_shards
            How many shards its first batch has.
        """


class QueryModes(NamedTuple):
    """How an operator goes with the output mode of a query whose last operator it is.

    Attributes
    ----------
    mode
        The operator's own output mode; None if it has the query's.
    modes
        Output modes that the query may have.
    refused
        By output mode, why it may not have it.
    """

    mode: str | None
    modes: tuple[str, ...]
    refused: Mapping[str, str]

    @classmethod
    def of(cls, schema: StateSchema) -> QueryModes:
        """Those of an operator with a mode of its own."""
        return cls(schema.output_mode, query_modes(schema), {})


@runtime_checkable
class FiltersLateRows(Protocol):
    """A plan that drops late rows by columns which nothing else of it needs."""

    @property
    def late_columns(self) -> Mapping[str, Sequence[str]]:
        """See :class:`~spark_jobs.plan.event_time.Upstream`."""


@runtime_checkable
class SparksOwn(Protocol):
    """A plan of an operator that Spark has, too, and moves filters through."""

    @property
    def analysed(self) -> Plan:
        """Spark's own operator, whose columns are those of the results."""


@dataclass(frozen=True)
class RoutedOperator:
    """An operator with its name, its watermark rules and the branches that feed each input."""

    plan: OperatorPlan
    schema: StateSchema
    branches: tuple[tuple[Branch, ...], ...]
    upstream: Upstream

    @classmethod
    def of(
        cls,
        plan: OperatorPlan,
        state: str,
        uri: str,
        existing: StateMetadata | None,
        *,
        modes: QueryModes | None = None,
        closes_early: bool = False,
    ) -> RoutedOperator:
        """Find out what feeds an operator; a state that exists keeps the policy for several watermarks that it was made with.

        Parameters
        ----------
        modes
            By default those of an operator with a mode of its own.
        closes_early
            Whether it goes by the watermark that includes the batch, and not by Spark's.

        Raises
        ------
        InvalidRequestError
            What feeds it emits rows that do not stand; or it closes early and the fleet could not follow its watermark exactly.

        Warns
        -----
        UnboundedStateWarning
            Its state grows for ever.
        """
        below = _check_below(plan.inputs, state)
        for one in below:
            if one.uri != uri:
                raise InvalidRequestError(
                    "the stateful operators of a query live in one fleet; connect to the same one for all of them",
                    state=state,
                    other_state=one.state,
                    other_fleet=one.uri,
                )
        if not closes_early:
            # Spark knows the time; nobody asks for that of a row.
            frames = tuple((Branch(frame.drop(EVENT_TIME_COLUMN), None, ()),) for frame in plan.inputs)
            moves = plan.schema.delay_ms is not None
            return cls._named(plan, plan.schema, frames, state, uri, (), modes=modes, moves=moves)
        branches = tuple(tuple(branches_of(frame)) for frame in plan.inputs)
        flat = [branch for some in branches for branch in some]
        for frame, some in zip(plan.inputs, branches, strict=True):
            if EVENT_TIME_COLUMN not in frame.columns and any(branch.delay_ms is not None for branch in some):
                raise InvalidRequestError(
                    "the column that withWatermark named is gone before the stateful operator, which needs it to move the "
                    "watermark; keep it in the select",
                    state=state,
                )
        rules = event_time_rules(plan.inputs[0].sparkSession, state, flat)
        former = None if existing is None or existing.schema is None else existing.schema.event_time
        if former is not None:
            rules = replace(rules, policy=former.policy)
        sources = (*rules.sources, *rules.upstream_sources)
        moves = bool(rules.sources) or any(one.has_watermark for branch in flat for one in branch.upstream)
        schema = replace(plan.schema, event_time=rules)
        return cls._named(plan, schema, branches, state, uri, sources, modes=modes, moves=moves)

    @classmethod
    def _named(
        cls,
        plan: OperatorPlan,
        schema: StateSchema,
        branches: tuple[tuple[Branch, ...], ...],
        state: str,
        uri: str,
        sources: tuple[str, ...],
        *,
        modes: QueryModes | None,
        moves: bool,
    ) -> RoutedOperator:
        warn_if_unbounded(schema, state)
        mode, possible, refused = modes or QueryModes.of(schema)
        upstream = Upstream(
            state,
            uri,
            sources,
            "append" in possible if mode is None else plan.appends,
            moves,
            name=operator_name(schema),
            again=runs_again(schema),
            lag_ms=output_lag_ms(schema),
            mode=mode,
            modes=possible,
            refused=dict(refused),
            # A function of the user's sees one partition of its state.
            together=not isinstance(plan, TaskMaker),
            late_columns=dict(plan.late_columns) if isinstance(plan, FiltersLateRows) else {},
        )
        return cls(plan, schema, branches, upstream)


def check_output_mode(operator: str, output_mode: str, supported: Sequence[str]) -> None:
    """Refuse an output mode that an operator does not have.

    Raises
    ------
    InvalidRequestError
        Names the modes that it has.
    """
    if output_mode not in supported:
        raise InvalidRequestError(
            f"{operator} has no {output_mode} mode; leave outputMode out, or use {' or '.join(supported)} mode",
            outputMode=output_mode,
        )


def _check_below(inputs: Sequence[DataFrame], state: str) -> list[Upstream]:
    """Operators of the fleet below one; refuses what would feed it with rows that do not stand, or with one state's rows twice."""
    found: dict[str, Plan] = {}
    below: dict[str, Upstream] = {}
    for frame in inputs:
        for one, exchange in _operators_below(analysed(frame), state):
            # One DataFrame may come in twice, as in a self join: it is the same operator, which commits each batch once.
            if one.state == state or not exchange.has_result_of(found.setdefault(one.state, exchange)):
                raise InvalidRequestError(
                    "two stateful operators of a query have the same name, and would share one state; give each a name of its own",
                    state=one.state,
                )
            if not one.appends:
                raise InvalidRequestError(
                    "an operator that emits a row again when it changes cannot feed another stateful operator, which would count it "
                    "twice; use append mode below, or write its results to a sink and read them in a second query",
                    state=one.state,
                )
            below[one.state] = one
    return list(below.values())


def _operators_below(plan: Plan, state: str) -> Iterator[tuple[Upstream, Plan]]:
    """Operators of the fleet in a plan, with their exchanges; refuses Spark's own ones whose rows may change, as Spark does."""
    one = Upstream.of_plan(plan)
    if one is not None:
        yield one, plan
    if plan.kind == "Aggregate" and _is_mark(plan):
        yield from _operators_below(plan.child, state)
        return
    may_change = plan.kind == "Aggregate" or (plan.kind in _OF_A_FUNCTION and plan.output_mode != "Append")
    if may_change and plan.is_streaming:
        raise InvalidRequestError(
            "a stateful operator of Spark's own stands below this one, which would count its rows again whenever they change; make "
            "that one an operator of the fleet in append mode (fleet.stateful), or write its results to a sink and read them in a "
            "second query",
            state=state,
            operator=plan.node_name,
        )
    for child in plan.children:
        yield from _operators_below(child, state)


def _is_mark(aggregate: Plan) -> bool:
    """Whether an aggregation is only the mark of an operator in complete mode (:mod:`spark_jobs.plan.stateful_exchange`)."""
    return Upstream.of_plan(aggregate.child) is not None

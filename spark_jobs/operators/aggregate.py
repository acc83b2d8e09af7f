"""Aggregations: from ``groupBy(...).agg(...)``, as Spark analyses it, to a plan of the fleet.

Spark analyses the aggregation of the streaming DataFrame and never executes it. The analysed plan gives the columns to shuffle
(:attr:`AggregatePlan.inputs`), the state's schema, and the projection from accumulators to results by Spark's own final expressions
(:meth:`AggregatePlan.finish`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from msgspec import structs
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.schema import Accumulator, StateSchema
from spark_jobs.operators.accumulator_parts import Part
from spark_jobs.operators.accumulators import FUNCTIONS, emitted_result, parts_of
from spark_jobs.operators.session_windows import Session
from spark_jobs.operators.view_aggregates import aggregation_view
from spark_jobs.plan.aggregate_functions import AggregateExpression
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.event_time import several_event_times, watermark_delay_ms
from spark_jobs.plan.keys import Key, key_of, leaf_field
from spark_jobs.plan.logical import Plan, analysed, empty_frame, projected, resolved
from spark_jobs.plan.operator_plan import OperatorPlan
from spark_jobs.plan.spark_errors import RefusedQueryError
from spark_jobs.plan.storable import restored, spark_field, stored_type
from spark_jobs.worker.exchange import HASH_COLUMN


@dataclass
class _Aggregate:
    """A distinct aggregate of the query, and the names of the columns that its parts emit."""

    expression: AggregateExpression
    buffers: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class AggregatePlan(OperatorPlan):
    """An aggregation as the fleet runs it; its only input has key leaves and inputs, named as in the schema."""

    analysed: Plan
    #: If it has the query's output mode, the modes that it does not support, and why; None if it has a mode of its own.
    refused: Mapping[str, str] | None
    #: The keys of the groups, a session last.
    keys: tuple[Key, ...]
    aggregates: tuple[_Aggregate, ...]
    outputs: tuple[Expression, ...]

    @property
    def uses(self) -> list[AggregateExpression]:
        """Distinct aggregates of the query."""
        return [aggregate.expression for aggregate in self.aggregates]

    def accumulators(self, number: int) -> list[Accumulator]:
        """Return the accumulators of one of :attr:`uses`, by its index."""
        prefix = f"{_name(number)}_"
        return [accumulator for accumulator in self.schema.accumulators if accumulator.state[0].name.startswith(prefix)]

    def finish(self, reduced: DataFrame) -> DataFrame:
        """Return the results, the columns of Spark's own aggregation, of emitted rows."""
        keys = [(key.expression, _resolve(reduced, key.tree.column())) for key in self.keys]

        def replacement(node: Expression) -> Expression | None:
            for expression, column in keys:
                if node.matches(expression):
                    return column
            aggregate = AggregateExpression.at(node)
            return None if aggregate is None else self._evaluate(reduced, aggregate)

        outputs = zip(self.outputs, self.analysed.output, strict=True)
        return projected(
            reduced, ((output.unaliased.rebuilt(replacement).column(), attribute) for output, attribute in outputs)
        )

    def with_view(self) -> AggregatePlan:
        empty = empty_frame(self.inputs[0].sparkSession, self.emitted)
        view = aggregation_view(self.schema, self.keys, self.outputs, partial(self._evaluate, empty))
        return replace(self, schema=structs.replace(self.schema, shown=view))

    def _evaluate(self, reduced: DataFrame, node: AggregateExpression) -> Expression:
        """Return Spark's final expression of an aggregate over the state's columns."""
        aggregate = next(item for item in self.aggregates if item.expression.matches(node))
        function = aggregate.expression.function
        make = FUNCTIONS[function.kind].result
        if make is emitted_result:
            (name,) = aggregate.buffers
            return _restored(reduced, resolved(reduced, name), node.type).as_nullable_as(node)
        if make is not None:
            result = _resolve(reduced, make(function, [F.col(name) for name in aggregate.buffers]))
            return _restored(reduced, result, node.type).as_nullable_as(node)
        attributes = function.buffer
        # Where Spark's buffer has a null before the first value, the state has a field is_empty.
        names = aggregate.buffers
        empty: dict[str, str] = {}
        if len(names) > len(attributes):
            empty = {name.removesuffix("_is_empty") + "_sum": name for name in names if name.endswith("_is_empty")}
            names = [name for name in names if not name.endswith("_is_empty")]

        def buffer_column(name: str) -> Expression:
            if name not in empty:
                return resolved(reduced, name)
            return _resolve(reduced, F.when(~F.col(empty[name]), F.col(name)))

        by_id = {
            attribute.id: _restored(reduced, buffer_column(name), attribute.type)
            for attribute, name in zip(attributes, names, strict=True)
        }

        def buffer(inner: Expression) -> Expression | None:
            return by_id.get(inner.id) if inner.is_attribute else None

        return function.result.rebuilt(buffer)


def _name(number: int) -> str:
    """Return the prefix of the names of an aggregate's state fields, without the underscore."""
    return f"a{number}"


def _restored(frame: DataFrame, column: Expression, data_type: T.DataType) -> Expression:
    if isinstance(data_type, T.ArrayType | T.MapType | T.StructType):
        is_unchanged = column.type == data_type
    else:
        # Looking at a column costs much less than an analysis, and comparing types that are at hand even less.
        is_unchanged = stored_type(data_type) == data_type
    return column if is_unchanged else _resolve(frame, restored(column.column(), data_type))


def _resolve(frame: DataFrame, column: Column) -> Expression:
    return analysed(frame.select(column.alias("resolved"))).projected[0].child


def build_plan(aggregated: DataFrame, output_mode: str | None) -> AggregatePlan:
    """Plan one of Spark's aggregations, such as ``df.groupBy(..).agg(..)`` and ``df.rollup(..).sum(..)``.

    The output mode None stands for the query's, which is known when it starts; the schema then has update mode, or append mode if
    update is not supported, or for sessions. Raises InvalidRequestError if the fleet does not support a part of it; the error names the
    part and says what to use instead.
    """
    node = analysed(aggregated)
    if node.kind != "Aggregate":
        raise RefusedQueryError(
            "the fleet runs plain aggregations of groups; this one becomes something else in Spark; aggregate first, and put what "
            "goes beyond that into a select on the result",
            operator=node.kind,
        )
    outputs = node.aggregates
    grouping = _Grouping.of(node)
    builder = _Builder(aggregated.sparkSession)
    for output in outputs:
        builder.collect(output, grouping.expressions)
    refused = grouping.refused_modes()
    if several := several_event_times(grouping.expressions, aggregated.sparkSession):
        refused |= {"append": several, "update": several}
    # As of an import, which is told no mode: Spark itself runs sessions in append mode.
    is_append = "update" in refused or (grouping.session is not None and "append" not in refused)
    mode = output_mode or ("append" if is_append else "update")
    if output_mode in refused:
        raise RefusedQueryError(refused[output_mode])
    inputs = [*([] if grouping.session is None else grouping.session.inputs()), *builder.inputs]
    prepared = _prepared(node.child, grouping, [*inputs, *builder.hashed.items()])
    schema = _schema(prepared, grouping, [name for name, _ in inputs], tuple(builder.accumulators), mode)
    schema = structs.replace(
        schema,
        inputs=tuple(
            structs.replace(item, type=builder.input_types.get(item.name, item.type)) for item in schema.inputs
        ),
    )
    plan = AggregatePlan(
        inputs=(prepared,),
        schema=schema,
        emitted=T.StructType([spark_field(item) for item in (*schema.input_keys, *schema.emitted_fields)]),
        appends=mode == "append",
        analysed=node,
        refused=refused if output_mode is None else None,
        keys=grouping.result_keys,
        aggregates=tuple(builder.aggregates),
        outputs=tuple(outputs),
    )
    return plan.with_view()


@dataclass(frozen=True)
class _Grouping:
    expressions: tuple[Expression, ...]
    #: Keys of the exchange and the state: all but a session.
    keys: tuple[Key, ...]
    session: Session | None
    #: The delay of the watermark; None if there is none.
    delay_ms: int | None

    @classmethod
    def of(cls, node: Plan) -> _Grouping:
        expressions = tuple(node.grouping)
        session = Session.among(expressions)
        if session is not None and node.child.kind == "Expand":
            raise RefusedQueryError(
                "session windows are not rolled up (Spark fails in the first batch of such a query); group by them, and once more "
                "without the columns that are to be left out"
            )
        keys = tuple(
            key_of(expression, f"k{number}")
            for number, expression in enumerate(expressions)
            if session is None or not expression.matches(session.window)
        )
        return cls(expressions, keys, session, watermark_delay_ms(node.child.output))

    @property
    def result_keys(self) -> tuple[Key, ...]:
        """Keys that the results have: those of the state, and a session."""
        return self.keys if self.session is None else (*self.keys, self.session.key())

    @property
    def expiry(self) -> str | None:
        """Column by which the watermark closes groups."""
        if self.session is not None:
            return self.session.expiry
        return next((key.expiry for key in self.keys if key.expiry is not None), None)

    def refused_modes(self) -> dict[str, str]:
        """Return the output modes that such groups do not support, and why."""
        refused = {}
        if self.delay_ms is None or self.expiry is None:
            refused["append"] = (
                "append mode needs a watermark and its event-time column, or a window over it, among the grouping columns: "
                "without them no group is ever final; add withWatermark and group by window, or use update mode"
            )
        return refused


def _prepared(rows: Plan, grouping: _Grouping, inputs: Sequence[tuple[str, Column]]) -> DataFrame:
    """Return the rows to shuffle: key leaves, inputs, and the hash of the keys."""
    columns = [
        column.alias(leaf.name) for key in grouping.keys for leaf, column in zip(key.leaves, key.columns, strict=True)
    ]
    columns += [column.alias(name) for name, column in inputs]
    hashed = [column for key in grouping.keys for column in key.columns]
    return rows.frame().select(*columns, (F.hash(*hashed) if hashed else F.lit(0)).alias(HASH_COLUMN))


def _schema(
    prepared: DataFrame,
    grouping: _Grouping,
    inputs: Sequence[str],
    accumulators: tuple[Accumulator, ...],
    output_mode: str,
) -> StateSchema:
    types = {item.name: item for item in prepared.schema.fields}
    schema = StateSchema(
        keys=tuple(leaf_field(types[leaf.name]) for key in grouping.keys for leaf in key.leaves),
        inputs=tuple(leaf_field(types[name]) for name in inputs),
        accumulators=accumulators,
        expiry_key=grouping.expiry,
        delay_ms=grouping.delay_ms,
        output_mode="append",
    )
    return (schema if grouping.session is None else grouping.session.schema(schema)).in_output_mode(output_mode)


class _Builder:
    """Collects the distinct aggregates of the result expressions."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self.aggregates: list[_Aggregate] = []
        self.accumulators: list[Accumulator] = []
        self.inputs: list[tuple[str, Column]] = []
        #: Values of which an input has hashes, by ``__`` and the input's name.
        self.hashed: dict[str, Column] = {}
        #: Types of inputs in the state's schema that differ from Spark's column.
        self.input_types: dict[str, str] = {}
        self._input_keys: dict[str, str] = {}
        self._fingerprints: Counter[tuple[str, str]] = Counter()

    def collect(self, node: Expression, grouping: Sequence[Expression]) -> None:
        if any(node.matches(expression) for expression in grouping):
            return
        aggregate = AggregateExpression.at(node)
        if aggregate is not None:
            if not any(item.expression.matches(node) for item in self.aggregates):
                self._add(aggregate)
            return
        for child in node.children:
            self.collect(child, grouping)

    def _add(self, expression: AggregateExpression) -> None:
        aggregate = _Aggregate(expression)
        number = len(self.aggregates)
        for unnamed in parts_of(self._spark, expression):
            part = unnamed.named(_name(number))
            aggregate.buffers += [item.name for item in part.result or part.state]
            fingerprint = self._distinct(part.fingerprint, part.cast)
            self.accumulators.append(
                Accumulator(part.kind, self._input(part), part.state, fingerprint, part.cast, part.result, part.options)
            )
        self.aggregates.append(aggregate)

    def _distinct(self, fingerprint: str, cast: str) -> str:
        """Number a repeated fingerprint: columns of the same name, of two tables of a join, have the same text."""
        self._fingerprints[fingerprint, cast] += 1
        number = self._fingerprints[fingerprint, cast]
        return fingerprint if number == 1 else f"{fingerprint} #{number}"

    def _input(self, part: Part) -> tuple[str, ...]:
        """Return the names of a part's input columns; equal inputs are shuffled once."""
        names = tuple(self._named(column, part.input_type) for column in part.inputs)
        if part.hashed is not None:
            self.hashed[f"__{names[0]}"] = part.hashed
        return names

    def _named(self, column: Column, input_type: str | None) -> str:
        expression = Expression.of(column)
        key = expression.canonical if expression.is_resolved else f"input {len(self.inputs)}"
        if key not in self._input_keys:
            self._input_keys[key] = f"v{len(self.inputs)}"
            self.inputs.append((self._input_keys[key], column))
            if input_type is not None:
                self.input_types[self._input_keys[key]] = input_type
        return self._input_keys[key]

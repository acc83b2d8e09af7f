"""Groups and session windows of Spark's own streaming aggregation, in the columns of the fleet's state.

Spark's state of a group are the buffers of its aggregate functions. The optimiser decides which buffers there are: a decimal that fits
into 64 bits is summed as a number, ``count(x)`` of a column that is never null counts rows, and two equal aggregates share a buffer;
below a select the buffers are in the order of the select. So the buffers are derived from the whole query as Spark would run it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from msgspec import structs
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.errors import InvalidRequestError, StateMismatchError
from coordinator.model.schema import Accumulator, Field, OperatorKind, StateSchema
from spark_jobs.operators.aggregate import AggregatePlan
from spark_jobs.plan.aggregate_functions import AggregateExpression, AggregateFunction
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.checkpoint_state import SparkStore, state_rows
from spark_jobs.plan.event_time import operators_of, state_of_task
from spark_jobs.plan.logical import Plan
from spark_jobs.plan.storable import stored, stored_type
from statefleet.migration.checkpoint import SparkOperator
from statefleet.migration.columns import check_types, hashed, key_columns, key_name, keys_over, named_columns, store_of

#: Setting in the offset log: whether values contain the keys as well (1) or not (2).
_FORMAT = "spark.sql.streaming.aggregation.stateFormatVersion"
#: Kinds whose state is the result of the function.
_RESULTS = (AccumulatorKind.COLLECT_LIST, AccumulatorKind.COLLECT_SET)
#: Functions that count values in Spark as well, without a sketch.
_COUNTING = ("Mode", "Percentile", "PercentileDisc")
_LONG = T.DecimalType(20, 0)


def without(plan: AggregatePlan, schema: StateSchema, names: Container[str]) -> StateSchema:
    """Return a schema of an aggregation's state without the aggregates in some columns of its results.

    It has no view columns: they come with the query's first batch, which has all aggregates.
    """
    left_out = {use.sql for output in plan.analysed.aggregates if output.name in names for use in _uses(output)}
    removed = [
        accumulator
        for number, use in enumerate(plan.uses)
        if use.sql in left_out
        for accumulator in plan.accumulators(number)
    ]
    return structs.replace(
        schema, accumulators=tuple(kept for kept in schema.accumulators if kept not in removed), shown={}
    )


def aggregation_rows(
    plan: AggregatePlan, schema: StateSchema, operator: SparkOperator, in_query: Plan | None
) -> DataFrame:
    """Return the groups of a Spark operator, in the columns of the plan's state, whose schema may be :func:`without` some aggregates.

    `in_query` is the aggregation as Spark runs it in the whole query; None if Spark does not run it as one aggregation. Raises
    StateMismatchError if the operator is another aggregation, InvalidRequestError if Spark's buffer of an aggregate cannot be converted
    to the fleet's state; the error names the aggregate.
    """
    node = plan.analysed
    run = _as_run(node)
    if in_query is None:
        raise _refused(
            "does not run each aggregation of the query by itself",
            "build the query as it was built for Spark",
            operator,
        )
    kept: list[AggregateExpression] = []
    for use in (use for output in _outputs(in_query) for use in _uses(output)):
        if _columns_of(use, kept) is None:
            kept.append(use)
    uses = _pairs(node, run, operator)
    store = store_of(operator)
    is_session = plan.schema.operator is OperatorKind.SESSION
    if len(node.grouping) != len(run.grouping):
        raise _refused(
            "groups by a constant or by one column twice, which Spark leaves out", "group by each column once", operator
        )
    grouped = list(zip(node.grouping, run.grouping, strict=True))
    rows, buffer_columns = _stored_groups(operator, store, grouped, kept, is_session=is_session)
    stored_keys = [key for key in plan.keys if key.leaves]
    leaves = keys_over(rows, stored_keys, [f"key{index}" for index in range(len(stored_keys))])
    selected = key_columns(leaves)
    if is_session:
        session = next(number for number, (written, _) in enumerate(grouped) if written.is_session)
        selected += [F.col(f"group{session}.{part}").alias(f"session_{part}") for part in ("start", "end")]
    for number, aggregate in enumerate(plan.uses):
        accumulators = [accumulator for accumulator in plan.accumulators(number) if accumulator in schema.accumulators]
        if not accumulators:
            continue
        run_as = next(spark for written, spark in uses if written.matches(aggregate))
        indexes = _columns_of(run_as, kept)
        if indexes is None:
            raise _refused(
                f"leaves out {aggregate.sql}, as nothing in the query uses it, or makes something else of it",
                "leave it out, or give the name of its column in from_nothing",
                operator,
            )
        selected += state_columns(aggregate, accumulators, buffer_columns[indexes])
    return rows.select(*selected, hashed(leaves))


def _stored_groups(
    operator: SparkOperator,
    store: SparkStore,
    grouped: Sequence[tuple[Expression, Expression]],
    kept: Sequence[AggregateExpression],
    *,
    is_session: bool,
) -> tuple[DataFrame, list[T.StructField]]:
    """Return the rows of Spark's store of an aggregation, and their buffer columns.

    Columns of the rows are ``key0``, .., the keys without a session, whose begin is ``start``; ``group0``, .., all grouping columns, if
    Spark stores them with the buffers; and ``buffer0``, .. `grouped` are the grouping expressions, each as written and as Spark runs
    it; `kept` the distinct aggregates as Spark runs them, in the order of their buffers. Raises StateMismatchError if the store has
    other columns.
    """
    by_key = [pair for pair in grouped if not (is_session and pair[0].is_session)]
    keys = [(key_name(spark), written.type) for written, spark in by_key]
    if is_session:
        keys.append((None, T.TimestampType()))
    check_types(operator, "grouping columns", store.schema.keys, keys)
    # The function that a column serialises, if it does.
    buffers = [
        (column.name, column.type, aggregate.function if aggregate.function.is_serialised else None)
        for aggregate in kept
        for column in aggregate.function.buffer
    ]
    buffer_types = [(name, kind) for name, kind, _ in buffers]
    has_keys = is_session or operator.checkpoint.conf.get(_FORMAT) == "1"
    before: list[tuple[str | None, T.DataType]] = [(None, written.type) for written, _ in grouped] if has_keys else []
    check_types(operator, "aggregates", store.schema.values, [*before, *buffer_types])

    columns = [
        *named_columns("key", [(written.type, written.nullable) for written, _ in by_key]),
        *([T.StructField("start", T.TimestampType())] if is_session else []),
        *named_columns("group", [(written.type, written.nullable) for written, _ in grouped] if has_keys else []),
        *named_columns("buffer", [(_result_type(kind, function), True) for _, kind, function in buffers]),
    ]
    opened = [*[None] * len(before), *(function for _, _, function in buffers)]
    rows = state_rows(
        operator.spark,
        store,
        T.StructType(columns),
        prefix=len(by_key) if is_session else 0,
        functions=opened if any(function is not None for function in opened) else (),
    )
    return rows, columns[len(columns) - len(buffers) :]


def _columns_of(aggregate: AggregateExpression, kept: Sequence[AggregateExpression]) -> slice | None:
    """Return the indexes of an aggregate's buffer columns; None if Spark does not keep it, since nothing uses it."""
    begin = 0
    for other in kept:
        end = begin + len(other.function.buffer)
        if other.matches(aggregate):
            return slice(begin, end)
        begin = end
    return None


def state_columns(
    aggregate: AggregateExpression, accumulators: Sequence[Accumulator], buffer: Sequence[T.StructField]
) -> list[Column]:
    """Return the fleet's state columns of an aggregate, converted from Spark's buffer.

    Raises
    ------
    InvalidRequestError
        The buffer cannot be converted.
    """
    fields = [state for accumulator in accumulators for state in accumulator.state]
    kinds = {accumulator.kind for accumulator in accumulators}
    if kinds == {AccumulatorKind.DISTINCT_REGISTERS}:
        columns = [F.array(*(F.col(part.name) for part in buffer))]
    elif kinds <= set(_RESULTS):
        columns = [stored(F.col(part.name), part.dataType) for part in buffer]
    elif kinds == {AccumulatorKind.COUNTED} and aggregate.function.kind in _COUNTING:
        columns = [_counted(accumulators[0], buffer[0])]
    elif any(accumulator.result for accumulator in accumulators) or not _have_same_fields(fields, buffer):
        raise InvalidRequestError(
            "what Spark keeps of this aggregate cannot be made what the fleet keeps; nothing was written; give the name of its column "
            "in from_nothing, and it tells of what comes from there on",
            aggregate=aggregate.sql,
            function=aggregate.function.sql_name,
        )
    elif len(fields) == len(buffer):
        columns = [stored(F.col(part.name), part.dataType) for part in buffer]
        if aggregate.function.kind == "Average":
            # Spark begins with a sum of 0.
            columns[0] = F.when(columns[1] > 0, columns[0])
    else:
        columns = _summed(aggregate, fields, buffer)
    return [column.alias(state.name) for column, state in zip(columns, fields, strict=True)]


def _counted(accumulator: Accumulator, buffer: T.StructField) -> Column:
    """Return the values with their counts; the values of percentiles as doubles."""
    assert isinstance(buffer.dataType, T.ArrayType)
    assert isinstance(buffer.dataType.elementType, T.StructType)
    kind = buffer.dataType.elementType["value"].dataType
    is_double = accumulator.state[0].type == "counts<float64>"

    def stored_entry(entry: Column) -> Column:
        value = entry.getField("value")
        value = value.cast("double") if is_double else stored(value, kind)
        return F.struct(value.alias("value"), entry.getField("count").alias("count"))

    return F.transform(buffer.name, stored_entry)


def _have_same_fields(fields: Sequence[Field], buffer: Sequence[T.StructField]) -> bool:
    """Return whether the state has a field for each column of a buffer, and perhaps one more: whether there is no value yet."""
    extra = [state for state in fields if state.name.endswith("_is_empty")]
    return len(fields) in (len(buffer), len(buffer) + len(extra))


def _summed(aggregate: AggregateExpression, fields: Sequence[Field], buffer: Sequence[T.StructField]) -> list[Column]:
    """Return a sum, whether it has no value (which Spark marks by a null, or by the count), and the other columns (a count)."""
    total, *other_columns = (stored(F.col(part.name), part.dataType) for part in buffer)
    kind = fields[0].type
    if kind.startswith("decimal(") and not isinstance(buffer[0].dataType, T.DecimalType):
        total = _scaled(total, kind)
    is_empty = other_columns[0] == 0 if aggregate.function.kind == "Average" else total.isNull()
    nothing = (
        F.lit(0).cast(stored_type(buffer[0].dataType))
        if not kind.startswith("decimal(")
        else F.lit(0).cast(_decimal(kind))
    )
    return [F.when(is_empty, nothing).otherwise(total), is_empty, *other_columns]


def _decimal(kind: str) -> T.DecimalType:
    precision, scale = kind[len("decimal(") : -1].split(",")
    return T.DecimalType(int(precision), int(scale))


def _scaled(number: Column, kind: str) -> Column:
    """Return a decimal that Spark stored as an unscaled integer."""
    decimal = _decimal(kind)
    unit = (
        F.lit(1).cast(T.DecimalType(1, 0))
        if decimal.scale == 0
        else F.lit(f"0.{'0' * (decimal.scale - 1)}1").cast(T.DecimalType(decimal.scale, decimal.scale))
    )
    return (number.cast("long").cast(_LONG) * unit).cast(decimal)


# -- the query as Spark runs it ---------------------------------------------------------------------------------------


def aggregations_as_run(plan: Plan, spark_plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Return each aggregation of a query, by the name of its state, as Spark would run it; nothing if Spark would not run one for each.

    The whole query is rebuilt with Spark's own plans of the fleet's aggregations, as analysed. The plan above an aggregation decides on
    its buffers, too: the optimiser merges a select into it, so they are in the order of the select (``CollapseProject``), and unused
    aggregates have no buffer (``ColumnPruning``).
    """
    names = [operator.state for operator in operators_of(plan) if operator.state in spark_plans]
    run = _as_spark(plan, spark_plans).optimised()
    aggregations = [node for node in _all_of(run) if node.kind == "Aggregate" and node.is_streaming]
    return dict(zip(names, aggregations, strict=True)) if len(names) == len(aggregations) else {}


def _as_spark(node: Plan, spark_plans: Mapping[str, Plan]) -> Plan:
    state = _aggregation_at(node, spark_plans)
    if state is not None:
        spark = spark_plans[state].with_children([_as_spark(spark_plans[state].child, spark_plans)])
        # Under the ids by which the plan above refers to the columns.
        return spark.project(column.named_as(output) for column, output in zip(spark.output, node.output, strict=True))
    children = node.children
    return node.with_children([_as_spark(child, spark_plans) for child in children]) if children else node


def _aggregation_at(node: Plan, spark_plans: Mapping[str, Plan]) -> str | None:
    """Return the state of the aggregation whose result a node is: of the nodes with its columns, the one nearest to its task."""
    path = [node]
    while (state := state_of_task(path[-1])) is None:
        if len(path[-1].children) != 1:
            return None
        path.append(path[-1].child)
    if state not in spark_plans:
        return None
    columns = [column.name for column in spark_plans[state].output]
    results = [step for step in path if [column.name for column in step.output] == columns]
    return state if results and results[-1] is node else None


def _all_of(node: Plan) -> Iterator[Plan]:
    yield node
    for child in node.children:
        yield from _all_of(child)


def _as_run(node: Plan) -> Plan:
    run = node.optimised()
    while run.kind != "Aggregate":
        (run,) = run.children
    return run


def _outputs(run: Plan) -> list[Expression]:
    """Return what an optimised aggregation selects, over the columns of its input.

    What an aggregate reads twice (``count_if``), Spark 4 computes in a projection below, under an id that it has in no other plan.
    """
    below = run.child
    shared = {
        column.id: column.unaliased
        for column in (below.projected if below.kind == "Project" else ())
        if column.name.startswith("_common_expr_")
    }
    return [
        output.rebuilt(lambda node: shared.get(node.id) if node.is_attribute else None) for output in run.aggregates
    ]


def _uses(node: Expression) -> list[AggregateExpression]:
    """Return the aggregates in an expression, from the top."""
    aggregate = AggregateExpression.at(node)
    return [aggregate] if aggregate is not None else [use for child in node.children for use in _uses(child)]


def _pairs(node: Plan, run: Plan, operator: SparkOperator) -> list[tuple[AggregateExpression, AggregateExpression]]:
    """Return each aggregate of the query, with the one that Spark runs for it."""
    by_id = {output.id: output for output in _outputs(run)}
    pairs: list[tuple[AggregateExpression, AggregateExpression]] = []
    for output in node.aggregates:
        written, spark = _uses(output), _uses(by_id[output.id]) if output.id in by_id else []
        if len(written) != len(spark):
            raise _refused(
                f"computes {output.name} in another way than it is written",
                "give each aggregate a column of its own",
                operator,
            )
        pairs += zip(written, spark, strict=True)
    return pairs


def _result_type(kind: T.DataType, function: AggregateFunction | None) -> T.DataType:
    """Return the type of a column of a buffer, or of the deserialised value of the function that it serialises."""
    if function is None:
        return kind
    if function.kind not in _COUNTING:
        return function.type
    entry = [T.StructField("value", function.children[0].type, False), T.StructField("count", T.LongType(), False)]
    return T.ArrayType(T.StructType(entry), containsNull=False)


def _refused(problem: str, remedy: str, operator: SparkOperator) -> StateMismatchError:
    return StateMismatchError(
        f"Spark {problem}, so its state does not say which column is which; nothing was written; {remedy}",
        checkpoint=operator.checkpoint.folder.uri,
        operator=operator.number,
    )

"""From ``groupBy(...).agg(...)``, analysed by Spark itself, to what the fleet runs.

Spark analyses the aggregation on the streaming DataFrame (it is never executed). From the analysed plan come the columns to
shuffle (:attr:`AggregatePlan.prepared`), the state's schema, and the projection that turns accumulators into results with
Spark's own final expressions (:meth:`AggregatePlan.finish`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.errors import InvalidRequestError
from spark_jobs.aggregates import Part, parts_of, unwrap
from spark_jobs.catalyst import (
    Expression,
    class_name,
    column_of,
    data_type,
    frame_of,
    rebuild,
    resolved,
    scala_list,
    walk,
    watermark_delay_ms,
)
from spark_jobs.exchange import EVENT_TIME_COLUMN, HASH_COLUMN, ROUTE_COLUMN
from spark_jobs.types import spark_field, type_name
from spark_jobs.watermark import check_watermark, event_time
from store_actors.schema import Accumulator, Field, StateSchema

__all__ = ["AggregatePlan", "build_plan"]


@dataclass(frozen=True)
class _Key:
    """One grouping expression: its leaves, and how they make it again."""

    expression: Expression
    leaves: tuple[Field, ...]
    columns: tuple[Column, ...]
    tree: _KeyTree
    expiry: str | None


@dataclass(frozen=True)
class _KeyTree:
    """A leaf's name, or the (name, tree) fields of a struct, whose null is told by a leaf if it can be null."""

    leaf: str | None = None
    fields: tuple[tuple[str, _KeyTree], ...] = ()
    null_leaf: str | None = None

    def column(self) -> Column:
        if self.leaf is not None:
            return F.col(self.leaf)
        struct = F.struct(*(tree.column().alias(name) for name, tree in self.fields))
        return struct if self.null_leaf is None else F.when(~F.col(self.null_leaf), struct)


@dataclass
class _Aggregate:
    """One distinct aggregate of the query: its function and the names of its state fields."""

    expression: Expression
    function: Expression
    buffers: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class AggregatePlan:
    """What the fleet needs of one aggregation.

    Attributes
    ----------
    prepared
        Key leaves and inputs, named as in `schema`, the hash of the keys and (with a watermark) the event time.
    schema
        The state's schema.
    """

    prepared: DataFrame
    schema: StateSchema
    _keys: tuple[_Key, ...]
    _aggregates: tuple[_Aggregate, ...]
    _outputs: tuple[Expression, ...]

    def row_type(self) -> T.StructType:
        """Spark's form of ``schema.row_schema()``."""
        return T.StructType([spark_field(item) for item in (*self.schema.keys, *self.schema.state_fields)])

    def finish(self, reduced: DataFrame) -> DataFrame:
        """Results, with Spark's names, types and nullability, of a DataFrame in ``row_schema``."""
        spark = reduced.sparkSession
        keys = [(key.expression, _resolve(reduced, key.tree.column())) for key in self._keys]

        def replacement(node: Expression) -> Expression | None:
            for expression, column in keys:
                if node.semanticEquals(expression):
                    return column
            if class_name(node) == "AggregateExpression":
                return self._evaluate(reduced, node)
            return None

        columns = []
        for output in self._outputs:
            node = output.child() if class_name(output) == "Alias" else output
            columns.append(column_of(spark, rebuild(spark, node, replacement)).alias(output.name()))
        return reduced.select(*columns)

    def _evaluate(self, reduced: DataFrame, node: Expression) -> Expression:
        """Spark's final expression of an aggregate, over the state's columns."""
        aggregate = next(item for item in self._aggregates if item.expression.semanticEquals(node))
        attributes = scala_list(aggregate.function.aggBufferAttributes())
        # An average of decimals has a state field that Spark's buffer has not (is_empty); match by what is needed.
        names = aggregate.buffers
        if len(names) > len(attributes):
            names = [name for name in names if not name.endswith("_is_empty")]
        by_id = {
            attribute.exprId().id(): resolved(reduced, name) for attribute, name in zip(attributes, names, strict=True)
        }

        def buffer(inner: Expression) -> Expression | None:
            return by_id.get(inner.exprId().id()) if class_name(inner) == "AttributeReference" else None

        return rebuild(reduced.sparkSession, aggregate.function.evaluateExpression(), buffer)


def _resolve(frame: DataFrame, column: Column) -> Expression:
    """Resolved expression of a column over a DataFrame's columns."""
    analysed = frame.select(column.alias("resolved"))._jdf.queryExecution().analyzed()
    return scala_list(analysed.projectList())[0].child()


def build_plan(df: DataFrame, keys: Sequence[Any], aggregates: Sequence[Any], output_mode: str) -> AggregatePlan:
    """Plan of ``df.groupBy(*keys).agg(*aggregates)``.

    Raises
    ------
    InvalidRequestError
        Something in it is not held by the fleet; names it and says what to use.
    pyspark.errors.AnalysisException
        Spark itself refuses it: an unknown column, a type that does not fit.
    """
    spark = df.sparkSession
    _check_chain(df)
    check_watermark(df)
    node = df.groupBy(*keys).agg(*aggregates)._jdf.queryExecution().analyzed()
    if class_name(node) != "Aggregate":
        raise InvalidRequestError(
            "the fleet runs plain aggregations of groups; this one becomes something else in Spark",
            operator=class_name(node),
        )
    grouping = scala_list(node.groupingExpressions())
    outputs = tuple(scala_list(node.aggregateExpressions()))
    child = frame_of(spark, node.child())
    builder = _Builder(spark)
    plan_keys = tuple(_key(spark, expression, number) for number, expression in enumerate(grouping))
    for output in outputs:
        builder.collect(output, grouping)
    delay_ms, time = event_time(spark, scala_list(node.child().output()))
    expiry = next((key.expiry for key in plan_keys if key.expiry is not None), None)
    if output_mode == "append" and (delay_ms is None or expiry is None):
        raise InvalidRequestError(
            "append mode needs a watermark and its event-time column, or a window over it, among the grouping columns: "
            "without them no group is ever final; add withWatermark and group by window, or use update mode"
        )
    columns = [
        column.alias(leaf.name) for key in plan_keys for leaf, column in zip(key.leaves, key.columns, strict=True)
    ]
    columns += [column.alias(name) for name, column in builder.inputs]
    if time is not None:
        columns.append(time.alias(EVENT_TIME_COLUMN))
    hashed = [column for key in plan_keys for column in key.columns]
    prepared = child.select(*columns, (F.hash(*hashed) if hashed else F.lit(0)).alias(HASH_COLUMN))
    types = {item.name: item for item in prepared.schema.fields}
    schema = StateSchema(
        keys=tuple(_leaf_field(types[leaf.name]) for key in plan_keys for leaf in key.leaves),
        inputs=tuple(_leaf_field(types[name]) for name, _ in builder.inputs),
        accumulators=tuple(builder.accumulators),
        # Complete mode keeps everything: nothing is evicted, and nothing is late (as in Spark).
        expiry_key=None if output_mode == "complete" else expiry,
        delay_ms=delay_ms,
        output_mode=output_mode,
    )
    return AggregatePlan(prepared, schema, plan_keys, tuple(builder.aggregates), outputs)


def _check_chain(df: DataFrame) -> None:
    """Refuse a second operator of the fleet in one query.

    It would take the changed rows of the first for new ones, and count them again.
    """
    for node in walk(df._jdf.queryExecution().analyzed()):
        if class_name(node) == "RepartitionByExpression":
            routes = {one.toString().partition("#")[0] for one in scala_list(node.partitionExpressions())}
            if ROUTE_COLUMN in routes:
                raise InvalidRequestError(
                    "one stateful operator of the fleet cannot feed another in the same query yet; write the results of the first "
                    "to a sink, and read them in a second query"
                )


def _leaf_field(item: T.StructField) -> Field:
    return Field(item.name, type_name(item.dataType, item.name), item.nullable)


class _Builder:
    """Collects the distinct aggregates of the result expressions."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self.aggregates: list[_Aggregate] = []
        self.accumulators: list[Accumulator] = []
        self.inputs: list[tuple[str, Column]] = []
        self._input_keys: dict[str, str] = {}

    def collect(self, node: Expression, grouping: Sequence[Expression]) -> None:
        if any(node.semanticEquals(expression) for expression in grouping):
            return
        if class_name(node) == "AggregateExpression":
            if not any(item.expression.semanticEquals(node) for item in self.aggregates):
                self._add(node)
            return
        for child in scala_list(node.children()):
            self.collect(child, grouping)

    def _add(self, node: Expression) -> None:
        function = unwrap(self._spark, node.aggregateFunction())
        aggregate = _Aggregate(node, function)
        number = len(self.aggregates)
        for part in parts_of(self._spark, node, function):
            fields = part.fields(f"a{number}")
            aggregate.buffers += [item.name for item in fields]
            self.accumulators.append(Accumulator(part.kind, self._input(part), fields))
        self.aggregates.append(aggregate)

    def _input(self, part: Part) -> tuple[str, ...]:
        """Name of the part's input column; equal inputs are shuffled once."""
        if part.input is None:
            return ()
        key = part.input._jc.expr().canonicalized().toString()
        if key not in self._input_keys:
            self._input_keys[key] = f"v{len(self.inputs)}"
            self.inputs.append((self._input_keys[key], part.input))
        return (self._input_keys[key],)


def _key(spark: SparkSession, expression: Expression, number: int) -> _Key:
    if class_name(expression) == "SessionWindow" or _is_session(expression):
        raise InvalidRequestError(
            "session windows are not held by the fleet yet; use F.window, or Spark's own groupBy for this query",
            column=expression.sql(),
        )
    leaves: list[Field] = []
    columns: list[Column] = []

    def flatten(column: Column, kind: T.DataType, path: str, *, nullable: bool) -> _KeyTree:
        if isinstance(kind, T.StructType):
            null_leaf = None
            if nullable:
                null_leaf = f"{path}_null"
                leaves.append(Field(null_leaf, "bool", nullable=False))
                columns.append(column.isNull())
            fields = tuple(
                (
                    item.name,
                    flatten(column.getField(item.name), item.dataType, f"{path}_{place}", nullable=item.nullable),
                )
                for place, item in enumerate(kind.fields)
            )
            return _KeyTree(fields=fields, null_leaf=null_leaf)
        leaves.append(Field(path, type_name(kind, expression.sql()), nullable))
        columns.append(_normalised(spark, column, kind))
        return _KeyTree(leaf=path)

    kind = data_type(expression)
    tree = flatten(column_of(spark, expression), kind, f"k{number}", nullable=expression.nullable())
    expiry = None
    if watermark_delay_ms(expression) is not None:
        ends = {name: inner.leaf for name, inner in tree.fields}
        expiry = ends.get("end") if isinstance(kind, T.StructType) else tree.leaf
    return _Key(expression, tuple(leaves), tuple(columns), tree, expiry)


def _is_session(expression: Expression) -> bool:
    return class_name(expression) == "AttributeReference" and expression.metadata().contains("spark.sessionWindow")


def _normalised(spark: SparkSession, column: Column, kind: T.DataType) -> Column:
    """Floating-point keys as Spark groups them: one NaN, and -0.0 is 0.0."""
    if not isinstance(kind, T.FloatType | T.DoubleType):
        return column
    assert spark._jvm is not None
    normalise = spark._jvm.org.apache.spark.sql.catalyst.optimizer.NormalizeNaNAndZero
    return column_of(spark, normalise(column._jc.expr()))

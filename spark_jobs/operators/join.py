"""``join`` of two streams, analysed by Spark, as the fleet runs it.

Spark analyses ``left.join(right, on, how)``, which is never executed, and says what it refuses. From its plan come the equal keys
(Spark's ``ExtractEquiJoinKeys``), the filters that Spark itself would push or infer below the join, how long rows of either side may
still match (Spark's ``StreamingSymmetricHashJoinHelper``), and the columns of the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.schema import Field, StateSchema
from spark_jobs.operators.join_analysis import JoinNode, analysed_join, lags_ms
from spark_jobs.operators.join_condition import JoinCondition, split_condition
from spark_jobs.operators.join_keys import JoinKeys, join_keys
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.event_time import event_time, event_time_column, watermark_time
from spark_jobs.plan.keys import leaf_field
from spark_jobs.plan.logical import Plan, projected, resolved
from spark_jobs.plan.operator_plan import check_output_mode
from spark_jobs.plan.row_columns import RowColumns
from spark_jobs.plan.view_components import ViewComponent, column
from spark_jobs.worker.exchange import HASH_COLUMN, KEEP_COLUMN
from store_actors.operators.join_schema import MATCHED_COLUMN, SIDE_COLUMN, JoinType, join_schema

__all__ = ["JoinPlan", "JoinedSide", "build_join"]


@dataclass(frozen=True)
class JoinedSide:
    """A side of a join, as columns over its rows.

    Attributes
    ----------
    attributes
        Columns of its rows.
    keys
        Expressions that are equal to those of the other side.
    leaves, columns
        The leaves of the keys, and what else there may be of a row in the schema, named so.
    """

    attributes: tuple[Expression, ...]
    keys: tuple[Expression, ...]
    leaves: tuple[tuple[Field, Column], ...]
    columns: tuple[Column, ...]


@dataclass(frozen=True)
class JoinPlan:
    """What the fleet needs of one join; see :class:`~spark_jobs.plan.operator_plan.OperatorPlan`.

    Attributes
    ----------
    columns
        The join's own columns: Spark's attribute, and what it is over the rows that shards emit.
    outputs
        The results, over the join's columns.
    later
        Parts of the condition that Spark evaluates on the rows emitted.
    sides
        Each side, for whoever has its rows from elsewhere.
    late_columns
        See :class:`~spark_jobs.plan.event_time.Upstream`.
    analysed
        Spark's own join.
    """

    inputs: tuple[DataFrame, ...]
    schema: StateSchema
    emitted: T.StructType
    columns: tuple[tuple[Expression, Column], ...]
    outputs: tuple[Expression, ...]
    later: tuple[Expression, ...]
    sides: tuple[JoinedSide, JoinedSide]
    late_columns: Mapping[str, Sequence[str]]
    analysed: Plan
    appends: bool = True

    def row_type(self) -> T.StructType:
        """Spark's form of the rows that shards emit."""
        return self.emitted

    def finish(self, emitted: DataFrame) -> DataFrame:
        """Results, with Spark's names, types and nullability; columns of the joined DataFrames name them as in Spark's own."""
        rows = emitted.select(*(column.alias(f"c{place}") for place, (_, column) in enumerate(self.columns)))
        by_id = {attribute.id: resolved(rows, f"c{place}") for place, (attribute, _) in enumerate(self.columns)}

        def over_rows(node: Expression) -> Expression | None:
            return by_id.get(node.id) if node.is_attribute else None

        for part in self.later:
            rows = rows.where(part.rebuilt(over_rows).column())
        return projected(
            rows, ((output.unaliased.rebuilt(over_rows).column(), output.attribute) for output in self.outputs)
        )


def build_join(left: DataFrame, right: DataFrame, on: Any, how: str | None, output_mode: str) -> JoinPlan:
    """Plan of ``left.join(right, on, how)``.

    Raises
    ------
    InvalidRequestError
        Spark does not run such a join of two streams, or the fleet cannot hold or evaluate something of it; says what.
    pyspark.errors.AnalysisException
        Spark cannot resolve it: an unknown column, types that do not fit.
    """
    spark = left.sparkSession
    check_output_mode("a join of two streams", output_mode, ("append",))
    node = analysed_join(left.join(right, on, how))
    keys = join_keys(*node.keys)
    if node.kind is JoinType.FULL_OUTER:
        keys = keys.without_structs()
    # Where a key's column is among the results, it is emitted once, by the side that is there whenever the key is.
    owner = 1 if node.kind is JoinType.RIGHT_OUTER else 0
    rows = [
        RowColumns.stored(node.attributes(side), keys.of_side[side] if side == owner else (), "lr"[side])
        for side in (0, 1)
    ]
    shared = keys.of_side[1 - owner] if node.kind is JoinType.INNER else ()
    if shared:
        rows[1 - owner] = RowColumns.stored(node.attributes(1 - owner), shared, "lr"[1 - owner])
    if node.kind is JoinType.LEFT_SEMI:
        rows[1] = RowColumns((), (), ())
    condition = split_condition(node.rest, node.sides, _held(node, rows, keys), is_inner=node.kind is JoinType.INNER)
    lags = lags_ms(spark, node)
    sides = [_side(node, side, keys, rows[side], condition, lags[side]) for side in (0, 1)]
    return _planned(node, keys, rows, condition, lags, sides, owner)


def _held(node: JoinNode, rows: Sequence[RowColumns], keys: JoinKeys) -> dict[int, Field]:
    """Fields of the columns that are held whole, by expression id."""
    held = {
        key.expression.id: key.leaves[0]
        for some in keys.of_side
        for key in some
        if key.tree.leaf is not None and key.expression.is_attribute
    }
    for side, some in enumerate(rows):
        named = {field.name: field for field in some.fields}
        for attribute, leaf in zip(node.attributes(side), some.leaves, strict=False):
            if leaf is not None:
                held[attribute.id] = named[leaf]
    return held


# -- what each side sends ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Side:
    """One side: its rows for the exchange, its fields, and the names that the options give."""

    prepared: DataFrame
    joined: JoinedSide
    fields: tuple[Field, ...]
    event_time: str | None
    expiry: str | None
    pre: str | None
    late_columns: Mapping[str, Sequence[str]]


def _side(
    node: JoinNode,
    side: int,
    keys: JoinKeys,
    rows: RowColumns,
    condition: JoinCondition,
    lag_ms: int | None,
) -> _Side:
    prefix = "lr"[side]
    extra = list(condition.computed[side])
    attributes = node.attributes(side)
    marked = next((one for one in attributes if one.watermark_delay_ms is not None), None)
    late = expiry = pre = None
    late_columns: dict[str, Sequence[str]] = {}
    if marked is not None:
        time = watermark_time(marked)
        late = f"{prefix}_late"
        extra.append((Field(late, "timestamp"), time))
        if not _is_compared(node, side, marked):
            name = f"{prefix}{attributes.index(marked)}"
            late_columns[late] = [
                one.name for one in rows.fields if one.name == name or one.name.startswith(f"{name}_")
            ]
        if keys.expiry is None and lag_ms is not None:
            expiry = f"{prefix}_expires"
            extra.append((Field(expiry, "timestamp"), F.timestamp_micros(F.unix_micros(time) + lag_ms * 1000)))
    if condition.pre[side]:
        pre = f"{prefix}_pre"
        extra.append((Field(pre, "bool"), _all(condition.pre[side])))
    columns = [*rows.selected, *(c.alias(one.name) for one, c in extra)]
    prepared = _prepared(node, side, keys, columns)
    leaves = tuple(zip(keys.leaves, keys.columns[side], strict=True))
    joined = JoinedSide(tuple(node.sides[side].output), tuple(node.keys[side]), leaves, tuple(columns))
    fields = (*rows.fields, *(one for one, _ in extra))
    return _Side(prepared, joined, fields, late, keys.expiry or expiry, pre, late_columns)


def _is_compared(node: JoinNode, side: int, attribute: Expression) -> bool:
    """Whether a join itself reads a column of a side, so that Spark does not prune it whatever the query does with the results."""
    compared = [*node.keys[side], *([] if node.rest is None else [node.rest])]
    return any(one.id == attribute.id for part in compared for one in part.references)


def _prepared(node: JoinNode, side: int, keys: JoinKeys, columns: list[Column]) -> DataFrame:
    plan = node.sides[side]
    own = keys.columns[side]
    leaves = [column.alias(leaf.name) for leaf, column in zip(keys.leaves, own, strict=True)]
    _, time = event_time(plan.output)
    frame = plan.frame()
    kept: list[Expression] = []
    for part in node.filters[side]:
        if _is_of_event_time(part):
            kept.append(part)
        else:
            frame = frame.where(part.column())
    # Spark leaves a filter of event time above the watermark, which its rows move all the same.
    keep = [F.coalesce(_all(kept), F.lit(False)).alias(KEEP_COLUMN)] if kept else []
    return frame.select(*leaves, *columns, *keep, *event_time_column(time), F.hash(*own).alias(HASH_COLUMN))


def _all(parts: Sequence[Expression]) -> Column:
    return reduce(Column.__and__, (part.column() for part in parts))


def _is_of_event_time(part: Expression) -> bool:
    return part.kind != "IsNotNull" and any(one.watermark_delay_ms is not None for one in part.references)


# -- the plan ---------------------------------------------------------------------------------------------------------


def _planned(
    node: JoinNode,
    keys: JoinKeys,
    rows: Sequence[RowColumns],
    condition: JoinCondition,
    lags: tuple[int | None, int | None],
    sides: Sequence[_Side],
    owner: int,
) -> JoinPlan:
    types = [{item.name: item for item in side.prepared.schema.fields} for side in sides]
    output = [[field.name for field in some.fields] for some in rows]
    output[owner] = [*_emitted_leaves(node, keys, owner), *output[owner]]
    if node.kind is JoinType.LEFT_SEMI:
        output[1] = []
    options: dict[str, Any] = {
        "join_type": str(node.kind),
        "output": output,
        "null_safe": list(keys.null_safe),
        "event_time": [side.event_time for side in sides],
        "expiry": [side.expiry for side in sides],
        "pre": [side.pre for side in sides],
        "condition": condition.tree,
        "output_lag_us": [None if lag is None else lag * 1000 for lag in lags],
    }
    fields = [tuple(leaf_field(types[side][field.name]) for field in sides[side].fields) for side in (0, 1)]
    delays = [
        delay for side in (0, 1) for one in node.attributes(side) if (delay := one.watermark_delay_ms) is not None
    ]
    emitted = [
        T.StructField(name, types[side][name].dataType, types[side][name].nullable or node.is_null_side(side))
        for side in (0, 1)
        for name in output[side]
    ]
    results = [
        (attribute, result.column)
        for side in (0, 1)
        for attribute, result in zip(node.attributes(side), rows[side].results, strict=False)
    ]
    schema = join_schema(keys.leaves, fields[0], fields[1], options, delays[0] if delays else None)
    shown = {name: _shown(node, side, keys, rows[side], condition) for side, name in enumerate(("left", "right"))}
    return JoinPlan(
        inputs=tuple(side.prepared for side in sides),
        schema=replace(schema, shown=shown),
        emitted=T.StructType(emitted),
        columns=tuple(results),
        outputs=node.outputs,
        later=tuple(condition.later),
        sides=(sides[0].joined, sides[1].joined),
        late_columns={**sides[0].late_columns, **sides[1].late_columns},
        analysed=node.analysed,
    )


def _emitted_leaves(node: JoinNode, keys: JoinKeys, owner: int) -> list[str]:
    """Leaves of the keys that columns of the results are made of."""
    sides = (0, 1) if node.kind is JoinType.INNER else (owner,)
    return [
        leaf.name
        for pair in zip(*keys.of_side, strict=True)
        if any(pair[side].expression.is_attribute for side in sides)
        for leaf in pair[0].leaves
    ]


def _shown(node: JoinNode, side: int, keys: JoinKeys, rows: RowColumns, condition: JoinCondition) -> dict[str, Any]:
    """What readers are shown of a side: the join's keys, then its other columns that state holds."""
    number = {"op": "literal", "type": "int8", "value": side}
    part = ViewComponent(where={"op": "=", "args": [column(SIDE_COLUMN), number]})
    expressions = node.keys[side]
    for expression, tree in zip(expressions, keys.trees, strict=True):
        part.key(expression.column_name, tree.view_tree())
    for attribute, one in zip(node.attributes(side), rows.results, strict=False):
        if one.tree is not None and not any(attribute.matches(key) for key in expressions):
            part.value(one.attribute.name, one.tree)
    for field, computed in condition.computed[side]:
        # A left semi join emits nothing of its right side, of which the condition still reads columns.
        if (read := Expression.of(computed)).is_attribute:
            part.value(read.name, column(field.name))
    if node.kind.is_outer(side):
        part.extra("matched", column(MATCHED_COLUMN))
    return part.to_json()

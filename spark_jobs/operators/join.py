"""The join of two streams: from Spark's analysis to a plan of the fleet.

Spark analyses ``left.join(right, on, how)``, refuses joins that it does not support, and never executes it. Its plan gives the
equal keys (Spark's ``ExtractEquiJoinKeys``), the filters that Spark itself would push or infer below the join, how long rows of
either side may still match (Spark's ``StreamingSymmetricHashJoinHelper``), and the columns of the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any

from msgspec import structs
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.schema import Field
from spark_jobs.operators.join_analysis import JoinNode, analysed_join, lags_ms
from spark_jobs.operators.join_keys import JoinCondition, JoinKeys, join_keys, split_condition
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.event_time import late_column, watermark_time
from spark_jobs.plan.keys import leaf_field
from spark_jobs.plan.logical import analysed, projected, resolved
from spark_jobs.plan.operator_plan import OperatorPlan, check_output_mode
from spark_jobs.plan.row_columns import RowColumns
from spark_jobs.plan.spark_errors import RefusedQueryError
from spark_jobs.plan.view_components import ViewComponent, column
from spark_jobs.worker.exchange import HASH_COLUMN
from store_actors.operators.join_schema import MATCHED_COLUMN, SIDE_COLUMN, AsOf, JoinOptions, JoinType, join_schema


@dataclass(frozen=True)
class JoinedSide:
    """A side of a join as columns of its rows."""

    attributes: tuple[Expression, ...]
    #: Expressions that are equal to those of the other side.
    keys: tuple[Expression, ...]
    #: ``leaves``, ``columns``: The leaves of the keys, and the other columns of a row by their names in the schema.
    leaves: tuple[tuple[Field, Column], ...]
    columns: Mapping[str, Column]


@dataclass(frozen=True, kw_only=True)
class JoinPlan(OperatorPlan):
    """A join as the fleet runs it."""

    #: The join's own columns: Spark's attribute, and the column computed from the rows that shards emit.
    columns: tuple[tuple[Expression, Column], ...]
    outputs: tuple[Expression, ...]
    #: Parts of the condition that Spark evaluates on the emitted rows.
    later: tuple[Expression, ...]
    #: Each side, for an import of its rows from another source.
    sides: tuple[JoinedSide, JoinedSide]

    def finish(self, emitted: DataFrame) -> DataFrame:
        """Return the results, with Spark's names, types and nullability; columns of the joined DataFrames refer to them as in Spark."""
        rows = emitted.select(*(column.alias(f"c{index}") for index, (_, column) in enumerate(self.columns)))
        by_id = {attribute.id: resolved(rows, f"c{index}") for index, (attribute, _) in enumerate(self.columns)}

        def over_rows(node: Expression) -> Expression | None:
            return by_id.get(node.id) if node.is_attribute else None

        for conjunct in self.later:
            rows = rows.where(conjunct.rebuilt(over_rows).column())
        return projected(
            rows, ((output.unaliased.rebuilt(over_rows).column(), output.attribute) for output in self.outputs)
        )


def build_join(left: DataFrame, right: DataFrame, on: Any, how: str | None, output_mode: str) -> JoinPlan:
    """Plan ``left.join(right, on, how)``.

    Raises
    ------
    InvalidRequestError
        Spark does not run such a join of two streams, or the fleet cannot store or evaluate a part of it; the error names the part.
    pyspark.errors.AnalysisException
        Spark cannot resolve it: an unknown column, types that do not fit.
    """
    spark = left.sparkSession
    check_output_mode("a join of two streams", output_mode, ("append",))
    node = analysed_join(left.join(right, on, how))
    keys = join_keys(*node.keys)
    if node.kind is JoinType.FULL_OUTER:
        keys = keys.without_structs()
    return _planned(node, keys, _split(node, keys), lags_ms(spark, node), None)


def build_as_of_join(
    left: DataFrame,
    right: DataFrame,
    times: tuple[str | Column, str | Column],
    on: Any,
    how: str,
    tolerance_ms: int | None,
    output_mode: str,
    *,
    is_strict: bool,
) -> JoinPlan:
    """Plan ``left.joinAsOf(right, *times, on, how)``; `times` is the column of each side by which its rows have a watermark.

    Raises InvalidRequestError if a time is another column, the join is of another type or has another condition than equal columns, or
    state cannot store a part of it; AnalysisException if Spark cannot resolve it.
    """
    check_output_mode("an as-of join", output_mode, ("append",))
    node = analysed_join(left.join(right, on, how), is_checked=False)
    if node.kind not in (JoinType.INNER, JoinType.LEFT_OUTER):
        raise RefusedQueryError(
            "an as-of join is an inner or a left outer one, as each left row has one match at most", join=node.kind
        )
    keys = replace(join_keys(*node.keys), expiry=None)  # rows are kept by the times that are compared
    split = _split(node, keys)
    if split.condition.tree is not None or split.condition.later:
        raise RefusedQueryError(
            "an as-of join compares equal columns and the times, and nothing else of both sides; give equalities, and filter the rows "
            "of either side before",
            join=node.kind,
        )
    for side, (frame, time) in enumerate(zip((left, right), times, strict=True)):
        columns = node.attributes(side)
        marked = late_column(columns)
        compared = analysed(frame.select(time)).projected[0].unaliased
        # Of a stream that is joined with itself, Spark gives the columns of one side other ids.
        places = {column.id: place for place, column in enumerate(analysed(frame).output)}
        if marked is None or not compared.is_attribute or columns[places[compared.id]].id != marked.id:
            raise RefusedQueryError(
                "an as-of join takes the columns of both sides by which their rows have a watermark: until it has passed a left row, "
                "a nearer right one may come; call withWatermark on both streams, and name its column",
                column=compared.sql,
                watermark=None if marked is None else marked.name,
            )
        # A row without a time is before and after nothing.
        split.condition.pre[side].append(Expression.of(marked.column().isNotNull()))
    as_of = AsOf(("l_late", "r_late"), None if tolerance_ms is None else tolerance_ms * 1000, is_strict)
    return _planned(node, keys, split, (0, tolerance_ms), as_of)


@dataclass(frozen=True)
class _Split:
    """What each side stores, and the condition by where it is evaluated; `owner` is the side that emits shared columns of the keys."""

    rows: Sequence[RowColumns]
    condition: JoinCondition
    owner: int


def _split(node: JoinNode, keys: JoinKeys) -> _Split:
    # A key's column that is among the results is emitted once, by the side that has a row in every result.
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
    condition = split_condition(
        node.rest, node.sides, _stored_fields(node, rows, keys), is_inner=node.kind is JoinType.INNER
    )
    return _Split(rows, condition, owner)


def _stored_fields(node: JoinNode, rows: Sequence[RowColumns], keys: JoinKeys) -> dict[int, Field]:
    """Return the fields of columns that are stored as a single field, by expression id."""
    fields = {
        key.expression.id: key.leaves[0]
        for side_keys in keys.of_side
        for key in side_keys
        if key.tree.leaf is not None and key.expression.is_attribute
    }
    for side, columns in enumerate(rows):
        by_name = {field.name: field for field in columns.fields}
        for attribute, leaf in zip(node.attributes(side), columns.leaves, strict=False):
            if leaf is not None:
                fields[attribute.id] = by_name[leaf]
    return fields


# -- the rows of each side --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Side:
    """A side: its rows for the exchange, its fields, and the names that the schema's options have for it."""

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
    as_of: AsOf | None,
) -> _Side:
    prefix = "lr"[side]
    extra = list(condition.computed[side])
    attributes = node.attributes(side)
    marked = late_column(attributes)
    late = expiry = pre = None
    late_columns: dict[str, Sequence[str]] = {}
    if marked is not None:
        time = watermark_time(marked)
        late = f"{prefix}_late"
        extra.append((Field(late, "timestamp"), time))
        if as_of is None and not _is_compared(node, side, marked):
            name = f"{prefix}{attributes.index(marked)}"
            late_columns[late] = [
                field.name for field in rows.fields if field.name == name or field.name.startswith(f"{name}_")
            ]
        if as_of is not None and side == 0:
            expiry = late
        elif as_of is not None:
            # Until the watermark has reached it; then the store actor says for how long.
            expiry = f"{prefix}_expires"
            extra.append((Field(expiry, "timestamp"), time))
        elif keys.expiry is None and lag_ms is not None:
            expiry = f"{prefix}_expires"
            extra.append((Field(expiry, "timestamp"), F.timestamp_micros(F.unix_micros(time) + lag_ms * 1000)))
    if condition.pre[side]:
        pre = f"{prefix}_pre"
        extra.append((Field(pre, "bool"), _all(condition.pre[side])))
    columns = [*rows.selected, *(value.alias(field.name) for field, value in extra)]
    prepared = _prepared(node, side, keys, columns)
    leaves = tuple(zip(keys.leaves, keys.columns[side], strict=True))
    fields = (*rows.fields, *(field for field, _ in extra))
    named = {field.name: column for field, column in zip(fields, columns, strict=True)}
    joined = JoinedSide(tuple(node.sides[side].output), tuple(node.keys[side]), leaves, named)
    return _Side(prepared, joined, fields, late, keys.expiry or expiry, pre, late_columns)


def _is_compared(node: JoinNode, side: int, attribute: Expression) -> bool:
    """Return whether the join itself reads a column of a side, so that Spark never prunes it."""
    compared = [*node.keys[side], *([] if node.rest is None else [node.rest])]
    return any(read.id == attribute.id for expression in compared for read in expression.references)


def _prepared(node: JoinNode, side: int, keys: JoinKeys, columns: list[Column]) -> DataFrame:
    plan = node.sides[side]
    key_columns = keys.columns[side]
    leaves = [column.alias(leaf.name) for leaf, column in zip(keys.leaves, key_columns, strict=True)]
    return plan.frame().select(*leaves, *columns, F.hash(*key_columns).alias(HASH_COLUMN))


def _all(conditions: Sequence[Expression]) -> Column:
    return reduce(Column.__and__, (condition.column() for condition in conditions))


# -- the plan ---------------------------------------------------------------------------------------------------------


def _planned(
    node: JoinNode,
    keys: JoinKeys,
    split: _Split,
    lags: tuple[int | None, int | None],
    as_of: AsOf | None,
) -> JoinPlan:
    rows, condition, owner = split.rows, split.condition, split.owner
    sides = [_side(node, side, keys, rows[side], condition, lags[side], as_of) for side in (0, 1)]
    types = [{item.name: item for item in side.prepared.schema.fields} for side in sides]
    output = [[field.name for field in columns.fields] for columns in rows]
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
    if as_of is not None:
        options["as_of"] = {**asdict(as_of), "times": [*as_of.times]}
    fields = [tuple(leaf_field(types[side][field.name]) for field in sides[side].fields) for side in (0, 1)]
    delays = [
        delay
        for side in (0, 1)
        for attribute in node.attributes(side)
        if (delay := attribute.watermark_delay_ms) is not None
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
    view = {
        name: _side_view(
            node, side, keys, rows[side], condition, is_marked=JoinOptions.of(schema.options).is_marked(side)
        )
        for side, name in enumerate(("left", "right"))
    }
    return JoinPlan(
        inputs=tuple(side.prepared for side in sides),
        schema=structs.replace(schema, shown=view),
        emitted=T.StructType(emitted),
        columns=tuple(results),
        outputs=node.outputs,
        later=tuple(condition.later),
        sides=(sides[0].joined, sides[1].joined),
        late_columns={**sides[0].late_columns, **sides[1].late_columns},
        # No filter moves through an as-of join, which Spark does not have: without some right rows, others would be the nearest.
        analysed=node.analysed if as_of is None else None,
    )


def _emitted_leaves(node: JoinNode, keys: JoinKeys, owner: int) -> list[str]:
    """Return the leaves of the keys from which columns of the results are restored."""
    sides = (0, 1) if node.kind is JoinType.INNER else (owner,)
    return [
        leaf.name
        for pair in zip(*keys.of_side, strict=True)
        if any(pair[side].expression.is_attribute for side in sides)
        for leaf in pair[0].leaves
    ]


def _side_view(
    node: JoinNode, side: int, keys: JoinKeys, rows: RowColumns, condition: JoinCondition, *, is_marked: bool
) -> dict[str, Any]:
    """Return the view of a side for readers: the join's keys, then the side's other stored columns."""
    number = {"op": "literal", "type": "int8", "value": side}
    component = ViewComponent(where={"op": "=", "args": [column(SIDE_COLUMN), number]})
    expressions = node.keys[side]
    for expression, tree in zip(expressions, keys.trees, strict=True):
        component.key(expression.column_name, tree.view_tree())
    for attribute, result in zip(node.attributes(side), rows.results, strict=False):
        if result.tree is not None and not any(attribute.matches(key) for key in expressions):
            component.value(result.attribute.name, result.tree)
    for field, computed in condition.computed[side]:
        # A left semi join emits no column of its right side, but its condition may read some.
        if (read := Expression.of(computed)).is_attribute:
            component.value(read.name, column(field.name))
    if is_marked:
        component.extra("matched", column(MATCHED_COLUMN))
    return component.to_json()

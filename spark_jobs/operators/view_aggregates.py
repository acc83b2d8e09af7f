"""What readers are shown of the groups of an aggregation: its results, as Spark computes them, without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from coordinator.model.schema import StateSchema
from coordinator.model.type_names import string_to_type
from spark_jobs.plan.aggregate_functions import AggregateExpression
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.expression_trees import Node, NotExpressibleError, TreeWriter, stored_type_name
from spark_jobs.plan.keys import Key
from spark_jobs.plan.view_components import ViewComponent, column
from store_actors.operators.expressions import ExpressionTree, NotComputableError

__all__ = ["shown_aggregation"]


def shown_aggregation(
    schema: StateSchema,
    keys: Sequence[Key],
    outputs: Sequence[Expression],
    evaluated: Callable[[AggregateExpression], Expression],
) -> dict[str, Any]:
    """The description of an aggregation's groups.

    Where something in a result is not known without Spark, the aggregates in it are shown in its place, under Spark's own names.

    Parameters
    ----------
    keys
        What rows are grouped by; a session among them is no key of the state.
    outputs
        The results, over keys and aggregates.
    evaluated
        Spark's final expression of an aggregate, over columns named as what the state emits.
    """
    return {"": _Results(schema, keys, evaluated).described(outputs)}


class _Results:
    def __init__(
        self, schema: StateSchema, keys: Sequence[Key], evaluated: Callable[[AggregateExpression], Expression]
    ) -> None:
        self._keys, self._evaluated = keys, evaluated
        fields = (*schema.keys, *schema.emitted_fields)
        self._types: Mapping[str, pa.DataType] = {field.name: string_to_type(field.type) for field in fields}
        self._writer, self._columns = TreeWriter(self._leaf), TreeWriter(_column)
        self._part = ViewComponent()

    def described(self, outputs: Sequence[Expression]) -> dict[str, Any]:
        """The part of the description with these results."""
        bare = [output.unaliased for output in outputs]
        self._show_keys(outputs, bare)
        whole = [one for one in bare if AggregateExpression.at(one) is not None]
        for output, result in zip(outputs, bare, strict=True):
            if self._key(result) is None:
                self._show(output.name, result, whole)
        return self._part.to_json()

    def _show_keys(self, outputs: Sequence[Expression], bare: Sequence[Expression]) -> None:
        for key in self._keys:
            names = [o.name for o, one in zip(outputs, bare, strict=True) if one.matches(key.expression)]
            # Rows are not found by a session, which has no leaves among the keys.
            show = self._part.key if key.leaves else self._part.value
            show(names[0] if names else key.expression.column_name, key.tree.view_tree())
            for name in names[1:]:
                self._part.value(name, key.tree.view_tree())

    def _show(self, name: str, result: Expression, whole: list[Expression]) -> None:
        """Show a result, or else the aggregates in it that are not among those that are shown by themselves."""
        try:
            self._part.value(name, self._computable(result))
            return
        except NotExpressibleError as error:
            self._part.leave_out(name, f"readers cannot compute {error}")
        for aggregate in _aggregates(result):
            if any(one.matches(aggregate) for one in whole):
                continue
            whole.append(aggregate)
            try:
                self._part.value(aggregate.column_name, self._computable(aggregate))
            except NotExpressibleError as error:
                self._part.leave_out(aggregate.column_name, f"readers cannot compute {error}")

    def _computable(self, result: Expression) -> Node:
        """The tree of a result, which is known to give its type."""
        tree = self._writer.written(result)
        try:
            found = ExpressionTree(tree, self._types).type
        except NotComputableError as error:
            raise NotExpressibleError(f"{result.sql}: {error}") from error
        wanted = string_to_type(stored_type_name(result))
        if not _alike(found, wanted):
            raise NotExpressibleError(f"{result.sql}: it would be {found}")
        return tree

    def _leaf(self, node: Expression) -> Node | None:
        key = self._key(node)
        if key is not None:
            return key.tree.view_tree()
        aggregate = AggregateExpression.at(node)
        return None if aggregate is None else self._columns.written(self._evaluated(aggregate))

    def _key(self, node: Expression) -> Key | None:
        return next((key for key in self._keys if node.matches(key.expression)), None)


def _column(node: Expression) -> Node | None:
    return column(node.name) if node.is_attribute else None


def _aggregates(node: Expression) -> Iterator[AggregateExpression]:
    aggregate = AggregateExpression.at(node)
    if aggregate is not None:
        yield aggregate
        return
    for child in node.children:
        yield from _aggregates(child)


def _alike(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether two types are the same, whatever they say of nulls inside."""
    if one.num_fields == 0 or one.num_fields != other.num_fields or one.id != other.id:
        return bool(one == other)
    parts = [(one.field(place), other.field(place)) for place in range(one.num_fields)]
    return all(
        _alike(mine.type, theirs.type) and (mine.name == theirs.name or not pa.types.is_struct(one))
        for mine, theirs in parts
    )

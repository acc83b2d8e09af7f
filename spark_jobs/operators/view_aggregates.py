"""The view of an aggregation's groups: its results, as Spark computes them, for readers without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from coordinator.model.schema import StateSchema
from coordinator.model.type_names import string_to_type
from spark_jobs.plan.aggregate_functions import AggregateExpression
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.keys import Key
from spark_jobs.plan.view_components import (
    Node,
    NotExpressibleError,
    TreeWriter,
    ViewComponent,
    column,
    stored_type_name,
)
from store_actors.operators.expressions import ExpressionTree, NotComputableError


def aggregation_view(
    schema: StateSchema,
    keys: Sequence[Key],
    outputs: Sequence[Expression],
    evaluated: Callable[[AggregateExpression], Expression],
) -> dict[str, Any]:
    """Return the view of an aggregation's groups, by their keys: a session among these is not a key of the state.

    A result, an expression of keys and aggregates, that only Spark can compute is replaced by the aggregates in it, under Spark's own
    names. `evaluated` returns Spark's final expression of an aggregate, over columns named as the state emits them.
    """
    return {"": _Results(schema, keys, evaluated).view(outputs)}


class _Results:
    def __init__(
        self, schema: StateSchema, keys: Sequence[Key], evaluated: Callable[[AggregateExpression], Expression]
    ) -> None:
        self._keys, self._evaluated = keys, evaluated
        fields = (*schema.keys, *schema.emitted_fields)
        self._types: Mapping[str, pa.DataType] = {field.name: string_to_type(field.type) for field in fields}
        self._writer, self._columns = TreeWriter(self._leaf), TreeWriter(_column)
        self._component = ViewComponent()

    def view(self, outputs: Sequence[Expression]) -> dict[str, Any]:
        bare = [output.unaliased for output in outputs]
        self._show_keys(outputs, bare)
        whole = [result for result in bare if AggregateExpression.at(result) is not None]
        for output, result in zip(outputs, bare, strict=True):
            if self._key(result) is None:
                self._show(output.name, result, whole)
        return self._component.to_json()

    def _show_keys(self, outputs: Sequence[Expression], bare: Sequence[Expression]) -> None:
        for key in self._keys:
            names = [
                output.name for output, result in zip(outputs, bare, strict=True) if result.matches(key.expression)
            ]
            # Readers cannot find rows by a session, which has no leaves among the keys.
            show = self._component.key if key.leaves else self._component.value
            show(names[0] if names else key.expression.column_name, key.tree.view_tree())
            for name in names[1:]:
                self._component.value(name, key.tree.view_tree())

    def _show(self, name: str, result: Expression, whole: list[Expression]) -> None:
        """Add a result to the view, or else the aggregates in it that are not results themselves."""
        try:
            self._component.value(name, self._computable(result))
            return
        except NotExpressibleError as error:
            self._component.leave_out(name, f"readers cannot compute {error}")
        for aggregate in _aggregates(result):
            if any(result.matches(aggregate) for result in whole):
                continue
            whole.append(aggregate)
            try:
                self._component.value(aggregate.column_name, self._computable(aggregate))
            except NotExpressibleError as error:
                self._component.leave_out(aggregate.column_name, f"readers cannot compute {error}")

    def _computable(self, result: Expression) -> Node:
        """Return the tree of a result, checked to compute its type."""
        tree = self._writer.written(result)
        try:
            computed_type = ExpressionTree(tree, self._types).type
        except NotComputableError as error:
            raise NotExpressibleError(f"{result.sql}: {error}") from error
        if not _equal_types(computed_type, string_to_type(stored_type_name(result))):
            raise NotExpressibleError(f"{result.sql}: it would be {computed_type}")
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


def _equal_types(left: pa.DataType, right: pa.DataType) -> bool:
    """Return whether two types are equal, apart from the nullability inside of them."""
    if left.num_fields == 0 or left.num_fields != right.num_fields or left.id != right.id:
        return bool(left == right)
    fields = [(left.field(index), right.field(index)) for index in range(left.num_fields)]
    return all(
        _equal_types(inner.type, counterpart.type) and (inner.name == counterpart.name or not pa.types.is_struct(left))
        for inner, counterpart in fields
    )

"""A join's condition beyond its keys, sorted by who decides it: one side alone, the fleet on pairs, or Spark on the results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import Column, SparkSession

from coordinator.errors import InvalidRequestError
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.logical import Plan
from spark_jobs.plan.state_types import state_field
from store_actors.operators.join_condition import PairCondition
from store_actors.schema import Field
from store_actors.type_names import string_to_type

__all__ = ["JoinCondition", "split_condition"]

Node = dict[str, Any]

_LOGIC = {"And": "and", "Or": "or", "Not": "not", "IsNull": "isnull"}
_COMPARISONS = {
    "EqualTo": "=",
    "EqualNullSafe": "<=>",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
}
_ARITHMETIC = {"Add": "+", "Subtract": "-", "Multiply": "*", "SubtractTimestamps": "-"}


class _NotExpressible(Exception):
    """The fleet has no such expression over two sides."""


@dataclass
class JoinCondition:
    """The rest of a join's condition. Pairs are (left, right).

    Attributes
    ----------
    pre
        What only one side decides, which Spark evaluates on that side's rows.
    tree
        What the fleet evaluates on pairs, as :mod:`store_actors.operators.join_condition` reads it.
    computed
        Fields and columns that the tree reads and a side does not have as they are.
    later
        What only Spark can evaluate on pairs: a filter of an inner join's results.
    """

    pre: tuple[list[Expression], list[Expression]] = field(default_factory=lambda: ([], []))
    tree: Node | None = None
    computed: tuple[list[tuple[Field, Column]], list[tuple[Field, Column]]] = field(default_factory=lambda: ([], []))
    later: list[Expression] = field(default_factory=list)


def split_condition(
    spark: SparkSession,
    condition: Expression | None,
    sides: tuple[Plan, Plan],
    held: Mapping[int, Field],
    *,
    is_inner: bool,
) -> JoinCondition:
    """Sort the parts of a condition.

    Parameters
    ----------
    condition
        Without the equalities that are keys.
    sides
        Both sides' plans.
    held
        Fields of the columns that state holds anyway, by expression id.
    is_inner
        Whether results may be filtered after the join.

    Raises
    ------
    InvalidRequestError
        A part over both sides cannot be evaluated by the fleet, nor after an outer or semi join.
    """
    found = JoinCondition()
    writer = _Writer(spark, sides, held, found)
    trees: list[Node] = []
    for part in condition.conjuncts() if condition is not None else []:
        side = writer.side_of(part) if part.deterministic else None
        if side is not None:
            found.pre[side].append(part)
            continue
        before = tuple(len(some) for some in found.computed)
        try:
            trees.append(writer.checked(part))
        except _NotExpressible as error:
            for some, size in zip(found.computed, before, strict=True):
                del some[size:]
            if not is_inner:
                raise InvalidRequestError(
                    "the fleet cannot evaluate a part of this join's condition on pairs of rows, and after an outer or semi join "
                    "it would be too late; write it with comparisons, and/or/not and + - * over expressions of one side each",
                    part=part.sql,
                    expression=str(error),
                ) from error
            found.later.append(part)
    if trees:
        found.tree = trees[0] if len(trees) == 1 else {"op": "and", "args": trees}
    return found


class _Writer:
    """Writes expressions over both sides as trees whose leaves are columns of one side, which Spark computes."""

    def __init__(
        self,
        spark: SparkSession,
        sides: tuple[Plan, Plan],
        held: Mapping[int, Field],
        found: JoinCondition,
    ) -> None:
        self._sides, self._held, self._found = sides, held, found
        self._is_ansi = spark.conf.get("spark.sql.ansi.enabled") == "true"

    def side_of(self, node: Expression) -> int | None:
        """The side whose columns are all that an expression reads; the left one if it reads none."""
        return next((side for side, plan in enumerate(self._sides) if plan.covers(node)), None)

    def checked(self, node: Expression) -> Node:
        """The tree of an expression, which the fleet is known to evaluate."""
        if not node.deterministic:
            raise _NotExpressible(node.sql)
        tree = self._written(node)
        fields = [one for some in self._found.computed for one, _ in some] + list(self._held.values())
        try:
            PairCondition(tree, {one.name: string_to_type(one.type) for one in fields})
        except InvalidRequestError as error:
            raise _NotExpressible(node.sql) from error
        return tree

    def _written(self, node: Expression) -> Node:
        if node.kind == "Literal":
            return self._literal(node)
        side = self.side_of(node)
        if side is not None:
            return {"op": "column", "name": self._column(node, side)}
        if node.kind == "IsNotNull":
            return {"op": "not", "args": [{"op": "isnull", "args": self._args(node)}]}
        if node.kind == "Cast" and not self._is_ansi:
            return {"op": "cast", "type": self._type(node), "args": self._args(node)}
        operation = _LOGIC.get(node.kind) or _COMPARISONS.get(node.kind)
        if operation is None and not self._is_ansi:
            operation = _ARITHMETIC.get(node.kind)
        if operation is None:
            raise _NotExpressible(node.sql)
        return {"op": operation, "args": self._args(node)}

    def _args(self, node: Expression) -> list[Node]:
        return [self._written(child) for child in node.children]

    def _type(self, node: Expression) -> str:
        return self._field("", node).type

    def _field(self, name: str, node: Expression) -> Field:
        try:
            return state_field(name, node.type, nullable=True, what=node.sql)
        except InvalidRequestError as error:
            raise _NotExpressible(node.sql) from error

    def _column(self, node: Expression, side: int) -> str:
        if node.is_attribute and node.id in self._held:
            return self._held[node.id].name
        computed = self._found.computed[side]
        for one, other in computed:
            if Expression.of(other).matches(node):
                return one.name
        computed.append((self._field(f"{'lr'[side]}x{len(computed)}", node), node.column()))
        return computed[-1][0].name

    def _literal(self, node: Expression) -> Node:
        return {"op": "literal", "type": self._type(node), "value": node.literal}

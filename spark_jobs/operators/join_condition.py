"""A join's condition beyond its keys, sorted by who decides it: one side alone, the fleet on pairs, or Spark on the results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql import Column

from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import Field
from coordinator.model.type_names import string_to_type
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.expression_trees import Node, NotExpressibleError, TreeWriter
from spark_jobs.plan.logical import Plan
from spark_jobs.plan.state_types import state_field
from store_actors.operators.join_condition import PairCondition

__all__ = ["JoinCondition", "split_condition"]


@dataclass
class JoinCondition:
    """The rest of a join's condition. Pairs are (left, right).

    Attributes
    ----------
    pre
        What only one side decides, which Spark evaluates on that side's rows.
    tree
        What the fleet evaluates on pairs, as :mod:`store_actors.operators.expressions` has it.
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
    writer = _Writer(sides, held, found)
    trees: list[Node] = []
    for part in condition.conjuncts() if condition is not None else []:
        side = writer.side_of(part) if part.deterministic else None
        if side is not None:
            found.pre[side].append(part)
            continue
        before = tuple(len(some) for some in found.computed)
        try:
            trees.append(writer.checked(part))
        except NotExpressibleError as error:
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

    def __init__(self, sides: tuple[Plan, Plan], held: Mapping[int, Field], found: JoinCondition) -> None:
        self._sides, self._held, self._found = sides, held, found
        self._trees = TreeWriter(self._leaf)

    def side_of(self, node: Expression) -> int | None:
        """The side whose columns are all that an expression reads; the left one if it reads none."""
        return next((side for side, plan in enumerate(self._sides) if plan.covers(node)), None)

    def checked(self, node: Expression) -> Node:
        """The tree of an expression, which the fleet is known to evaluate."""
        if not node.deterministic:
            raise NotExpressibleError(node.sql)
        tree = self._trees.written(node)
        fields = [one for some in self._found.computed for one, _ in some] + list(self._held.values())
        try:
            PairCondition(tree, {one.name: string_to_type(one.type) for one in fields})
        except InvalidRequestError as error:
            raise NotExpressibleError(node.sql) from error
        return tree

    def _leaf(self, node: Expression) -> Node | None:
        side = None if node.kind == "Literal" else self.side_of(node)
        return None if side is None else {"op": "column", "name": self._column(node, side)}

    def _field(self, name: str, node: Expression) -> Field:
        try:
            return state_field(name, node.type, nullable=True, what=node.sql)
        except InvalidRequestError as error:
            raise NotExpressibleError(node.sql) from error

    def _column(self, node: Expression, side: int) -> str:
        if node.is_attribute and node.id in self._held:
            return self._held[node.id].name
        computed = self._found.computed[side]
        for one, other in computed:
            if Expression.of(other).matches(node):
                return one.name
        computed.append((self._field(f"{'lr'[side]}x{len(computed)}", node), node.column()))
        return computed[-1][0].name

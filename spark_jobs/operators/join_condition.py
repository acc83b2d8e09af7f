"""A join's condition beyond its keys, split by where it is evaluated: on one side, by the fleet on pairs, by Spark on the results."""

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
from spark_jobs.plan.spark_errors import RefusedQueryError
from spark_jobs.plan.state_types import state_field
from store_actors.operators.expressions import PairCondition


@dataclass
class JoinCondition:
    """The rest of a join's condition. Pairs are (left, right).

    Attributes
    ----------
    pre
        Conjuncts of a single side, which Spark evaluates on that side's rows.
    tree
        The condition that the fleet evaluates on pairs (:mod:`store_actors.operators.expressions`).
    computed
        Fields and columns that the tree reads and that Spark computes for it.
    later
        Conjuncts that only Spark can evaluate: a filter of an inner join's results.
    """

    pre: tuple[list[Expression], list[Expression]] = field(default_factory=lambda: ([], []))
    tree: Node | None = None
    computed: tuple[list[tuple[Field, Column]], list[tuple[Field, Column]]] = field(default_factory=lambda: ([], []))
    later: list[Expression] = field(default_factory=list)


def split_condition(
    condition: Expression | None,
    sides: tuple[Plan, Plan],
    stored: Mapping[int, Field],
    *,
    is_inner: bool,
) -> JoinCondition:
    """Split a condition by where its conjuncts are evaluated.

    Parameters
    ----------
    condition
        The condition without the equalities that are keys.
    stored
        Fields of the columns that are stored in any case, by expression id.
    is_inner
        Whether results may be filtered after the join.

    Raises
    ------
    InvalidRequestError
        The fleet cannot evaluate a conjunct over both sides, and the join is an outer or semi join, after which Spark cannot.
    """
    split = JoinCondition()
    writer = _Writer(sides, stored, split)
    trees: list[Node] = []
    for conjunct in condition.conjuncts() if condition is not None else []:
        side = writer.side_of(conjunct) if conjunct.deterministic else None
        if side is not None:
            split.pre[side].append(conjunct)
            continue
        before = tuple(len(computed) for computed in split.computed)
        try:
            trees.append(writer.checked(conjunct))
        except NotExpressibleError as error:
            for computed, size in zip(split.computed, before, strict=True):
                del computed[size:]
            if not is_inner:
                raise RefusedQueryError(
                    "the fleet cannot evaluate a part of this join's condition on pairs of rows, and after an outer or semi join "
                    "it would be too late; write it with comparisons, and/or/not and + - * over expressions of one side each",
                    part=conjunct.sql,
                    expression=str(error),
                ) from error
            split.later.append(conjunct)
    if trees:
        split.tree = trees[0] if len(trees) == 1 else {"op": "and", "args": trees}
    return split


class _Writer:
    """Writes expressions over both sides as trees whose leaves are columns of one side, which Spark computes."""

    def __init__(self, sides: tuple[Plan, Plan], stored: Mapping[int, Field], condition: JoinCondition) -> None:
        self._sides, self._stored, self._condition = sides, stored, condition
        self._trees = TreeWriter(self._leaf)

    def side_of(self, node: Expression) -> int | None:
        """Return the side to which all columns of an expression belong; the left side if it reads none, None for columns of both."""
        return next((side for side, plan in enumerate(self._sides) if plan.covers(node)), None)

    def checked(self, node: Expression) -> Node:
        """Return the tree of an expression, checked to be one that the fleet can evaluate."""
        if not node.deterministic:
            raise NotExpressibleError(node.sql)
        tree = self._trees.written(node)
        fields = [field for computed in self._condition.computed for field, _ in computed] + list(self._stored.values())
        try:
            PairCondition(tree, {field.name: string_to_type(field.type) for field in fields})
        except InvalidRequestError as error:
            raise NotExpressibleError(node.sql) from error
        return tree

    def _leaf(self, node: Expression) -> Node | None:
        side = None if node.kind == "Literal" else self.side_of(node)
        return None if side is None else {"op": "column", "name": self._column(node, side)}

    def _field(self, name: str, node: Expression) -> Field:
        try:
            return state_field(name, node.type, nullable=True, subject=node.sql)
        except InvalidRequestError as error:
            raise NotExpressibleError(node.sql) from error

    def _column(self, node: Expression, side: int) -> str:
        if node.is_attribute and node.id in self._stored:
            return self._stored[node.id].name
        computed = self._condition.computed[side]
        for expression, column in computed:
            if Expression.of(column).matches(node):
                return expression.name
        computed.append((self._field(f"{'lr'[side]}x{len(computed)}", node), node.column()))
        return computed[-1][0].name

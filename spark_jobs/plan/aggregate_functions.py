"""What Spark knows of an aggregate: its function, the columns of its buffer, and the final expression over these."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from spark_jobs.plan.catalyst import Expression, optional, scala_list

__all__ = ["AggregateExpression", "AggregateFunction"]


@dataclass(frozen=True, eq=False)
class AggregateFunction(Expression):
    """An aggregate function over its arguments, such as ``Sum``."""

    @property
    def shown_name(self) -> str:
        """Its name in SQL."""
        return str(self._java.prettyName())

    @property
    def buffer(self) -> list[Expression]:
        """Columns of its buffer."""
        return [Expression(one) for one in scala_list(self._java.aggBufferAttributes())]

    @property
    def result(self) -> Expression:
        """Its result, over the columns of its buffer."""
        return Expression(self._java.evaluateExpression())

    @property
    def ignores_nulls(self) -> bool:
        """Whether ``first`` or ``last`` does."""
        return bool(self._java.ignoreNulls())

    @property
    def is_legacy(self) -> bool:
        """Whether a sum wraps on overflow."""
        return str(self._java.evalMode().toString()) == "LEGACY"


@dataclass(frozen=True, eq=False)
class AggregateExpression(Expression):
    """A use of an aggregate function in a query."""

    @classmethod
    def at(cls, node: Expression) -> AggregateExpression | None:
        """The use that a node is; None if it is something else."""
        return cls(node._java) if node.kind == "AggregateExpression" else None

    @cached_property
    def function(self) -> AggregateFunction:
        """The function that Spark really runs."""
        return AggregateFunction(Expression(self._java.aggregateFunction()).unwrapped()._java)

    @property
    def is_distinct(self) -> bool:
        return bool(self._java.isDistinct())

    @cached_property
    def where(self) -> Expression | None:
        """The condition of its FILTER."""
        found = optional(self._java.filter())
        return None if found is None else Expression(found)

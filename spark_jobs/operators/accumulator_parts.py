"""What an aggregate function is made of: accumulators, each over columns of the query where the FILTER of its use holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.schema import AccumulatorKind, Field
from spark_jobs.plan.aggregate_functions import AggregateFunction
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.state_types import state_field
from spark_jobs.plan.storable import stored, stored_type

__all__ = ["Part", "Use", "doubles"]


@dataclass(frozen=True)
class Part:
    """One accumulator of an aggregate: its kind, its inputs (none for rows), its state fields, and what it means.

    The state fields of all parts, in order, stand for the function's ``aggBufferAttributes``.
    """

    kind: AccumulatorKind
    inputs: tuple[Column, ...]
    #: Named by suffixes.
    state: tuple[Field, ...]
    meaning: str = ""
    cast: str = ""
    #: What is emitted of it, if not its state; named as that is.
    result: tuple[Field, ...] = ()
    #: What else that depends on (``coordinator.model.schema.Accumulator``).
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Type of its inputs in the state's schema, if not what Spark's column tells.
    input_type: str | None = None

    def named(self, prefix: str) -> Part:
        """Its fields with a prefix of their aggregate's own."""

        def prefixed(fields: tuple[Field, ...]) -> tuple[Field, ...]:
            return tuple(replace(one, name=f"{prefix}_{one.name}") for one in fields)

        return replace(self, state=prefixed(self.state), result=prefixed(self.result))


@dataclass(frozen=True)
class Use:
    """One use of a function in a query."""

    function: AggregateFunction
    text: str
    where: Column | None

    def child(self, number: int = 0) -> Expression:
        return self.function.children[number]

    def kept(self, column: Column) -> Column:
        """The column where the aggregate's FILTER holds, null elsewhere."""
        return column if self.where is None else F.when(self.where, column)

    def column(self, number: int = 0) -> Column:
        """An argument, as a state holds it, where the FILTER holds."""
        child = self.child(number)
        return self.kept(stored(child.column(), child.type))

    def double(self, number: int = 0) -> Column:
        """An argument as a double, where the FILTER holds."""
        return self.kept(self.child(number).column().cast(T.DoubleType()))

    def value(self, name: str, number: int = 0) -> Field:
        """State field for an argument."""
        return state_field(name, stored_type(self.child(number).type), what=self.text, nested=True)


def doubles(*names: str) -> tuple[Field, ...]:
    """State fields that are doubles and never null."""
    return tuple(state_field(name, T.DoubleType(), False) for name in names)

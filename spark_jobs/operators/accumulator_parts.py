"""The accumulators of an aggregate function, each over columns of the query where the FILTER of its use holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Field
from spark_jobs.plan.aggregate_functions import AggregateFunction
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.state_types import state_field
from spark_jobs.plan.storable import stored, stored_type


@dataclass(frozen=True)
class Part:
    """An accumulator of an aggregate: its kind, its inputs (none for rows), its state fields, and its fingerprint.

    The state fields of all parts of an aggregate, in order, correspond to the function's ``aggBufferAttributes``.
    """

    kind: AccumulatorKind
    inputs: tuple[Column, ...]
    #: Their names are suffixes until :meth:`named`.
    state: tuple[Field, ...]
    fingerprint: str = ""
    cast: str = ""
    #: Fields that are emitted, if not the state; named in the same way.
    result: tuple[Field, ...] = ()
    #: Options of the emitted result (``coordinator.model.schema.Accumulator``).
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Type of its inputs in the state's schema, if it differs from that of Spark's column.
    input_type: str | None = None
    #: The values of which the input has hashes: Spark's own partial aggregation hashes them itself.
    hashed: Column | None = None

    def named(self, prefix: str) -> Part:
        """Return the part with the prefix of its aggregate on its fields."""

        def prefixed(fields: tuple[Field, ...]) -> tuple[Field, ...]:
            return tuple(structs.replace(field, name=f"{prefix}_{field.name}") for field in fields)

        return replace(self, state=prefixed(self.state), result=prefixed(self.result))


@dataclass(frozen=True)
class Use:
    """A use of a function in a query."""

    function: AggregateFunction
    text: str
    where: Column | None

    def child(self, number: int = 0) -> Expression:
        return self.function.children[number]

    def kept(self, column: Column) -> Column:
        """Return the column where the aggregate's FILTER holds, and null where it does not."""
        return column if self.where is None else F.when(self.where, column)

    def column(self, number: int = 0) -> Column:
        """Return an argument as it is stored, where the FILTER holds."""
        child = self.child(number)
        return self.kept(stored(child.column(), child.type))

    def double(self, number: int = 0) -> Column:
        """Return an argument as a double, where the FILTER holds."""
        return self.kept(self.child(number).column().cast(T.DoubleType()))

    def value(self, name: str, number: int = 0) -> Field:
        """Return the state field of an argument."""
        return state_field(name, stored_type(self.child(number).type), subject=self.text, nested=True)


def doubles(*names: str) -> tuple[Field, ...]:
    """Return state fields of doubles that are never null."""
    return tuple(state_field(name, T.DoubleType(), False) for name in names)

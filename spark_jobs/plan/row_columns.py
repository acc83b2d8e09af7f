"""Columns of rows that an operator keeps or passes on as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from coordinator.model.schema import Field, StateSchema
from coordinator.model.type_names import payload_type
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.expression_trees import Node
from spark_jobs.plan.keys import Key, key_of
from spark_jobs.plan.logical import projected
from spark_jobs.plan.storable import restored, stored, stored_type
from spark_jobs.plan.view_components import ViewComponent

__all__ = ["ProjectedPlan", "Result", "RowColumns"]


@dataclass(frozen=True)
class Result:
    """A column of the results over the rows that shards emit.

    Attributes
    ----------
    attribute
        What Spark's own operator has in its place.
    tree
        The same over the state's rows (:mod:`store_actors.operators.expressions`), if they have it.
    key
        The key that it is, if it is one.
    """

    column: Column
    attribute: Expression
    tree: Node | None = None
    key: Key | None = None


@dataclass(frozen=True)
class RowColumns:
    """The columns of a row besides an operator's keys.

    Attributes
    ----------
    fields
        As the operator's schema names them.
    selected
        What they are over the operator's input.
    results
        The row's columns, in their order, over what is emitted.
    leaves
        For each of the row's columns its name in the state, if it is held there as one of an atomic type (and not as a key).
    """

    fields: tuple[Field, ...]
    selected: tuple[Column, ...]
    results: tuple[Result, ...]
    leaves: tuple[str | None, ...] = ()

    @classmethod
    def passing(cls, attributes: Sequence[Expression], keys: Sequence[Key], prefix: str) -> RowColumns:
        """Columns of any type, which no state holds; those that are keys come back from these."""
        fields: list[Field] = []
        selected: list[Column] = []
        results: list[Result] = []
        for place, attribute in enumerate(attributes):
            held = next((key for key in keys if key.expression.matches(attribute)), None)
            name = f"{prefix}{place}"
            if held is None:
                kind = payload_type(to_arrow_type(stored_type(attribute.type)))
                fields.append(Field(name, kind, attribute.nullable))
                selected.append(stored(attribute.column(), attribute.type, nullable=attribute.nullable).alias(name))
            as_it_was = restored(F.col(name), attribute.type, nullable=attribute.nullable)
            column = as_it_was if held is None else held.tree.column()
            results.append(Result(column, attribute))
        return cls(tuple(fields), tuple(selected), tuple(results))

    @classmethod
    def held(cls, attributes: Sequence[Expression], keys: Sequence[Key], prefix: str) -> RowColumns:
        """Columns that state holds, structs flattened to leaves; those that are keys come back from these.

        Raises
        ------
        InvalidRequestError
            State cannot hold a column's type.
        """
        fields: list[Field] = []
        selected: list[Column] = []
        results: list[Result] = []
        leaves: list[str | None] = []
        for place, attribute in enumerate(attributes):
            own = key = next((key for key in keys if key.expression.matches(attribute)), None)
            if own is None:
                own = key_of(attribute, f"{prefix}{place}", normalised=False)
                fields += own.leaves
                selected += [column.alias(leaf.name) for leaf, column in zip(own.leaves, own.columns, strict=True)]
                leaves.append(own.tree.leaf if own.is_atomic else None)
            else:
                leaves.append(None)
            results.append(Result(own.tree.column(), attribute, own.tree.shown_tree(), key))
        return cls(tuple(fields), tuple(selected), tuple(results), tuple(leaves))

    def show(self, part: ViewComponent) -> None:
        """Show readers the columns that a state holds and that are not among the part's keys."""
        for one in self.results:
            if one.tree is not None and one.key is None:
                part.value(one.attribute.name, one.tree)


@dataclass(frozen=True)
class ProjectedPlan:
    """An operator whose results are columns of emitted rows; see :class:`~spark_jobs.plan.operator_plan.OperatorPlan`.

    Attributes
    ----------
    keys
        Of which it keeps rows; none if it has no keys.
    late_columns
        See :class:`~spark_jobs.plan.event_time.Upstream`.
    """

    inputs: tuple[DataFrame, ...]
    schema: StateSchema
    emitted: T.StructType
    results: tuple[Result, ...]
    appends: bool = True
    keys: tuple[Key, ...] = ()
    late_columns: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def row_type(self) -> T.StructType:
        """Spark's form of the rows that shards emit."""
        return self.emitted

    def finish(self, emitted: DataFrame) -> DataFrame:
        """Results: the columns of Spark's own operator."""
        return projected(emitted, [(one.column, one.attribute) for one in self.results])

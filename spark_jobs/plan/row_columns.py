"""Columns of rows that an operator stores or passes on unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from coordinator.model.schema import Field
from coordinator.model.type_names import payload_type
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.keys import Key, key_of
from spark_jobs.plan.logical import projected
from spark_jobs.plan.operator_plan import OperatorPlan
from spark_jobs.plan.spark_version import SPARK
from spark_jobs.plan.storable import restored, stored, stored_type
from spark_jobs.plan.view_components import Node, ViewComponent


@dataclass(frozen=True)
class Result:
    """A column of the results, computed from the rows that shards emit."""

    column: Column
    #: The same column of Spark's own operator.
    attribute: Expression
    #: The column computed from the state's rows (:mod:`store_actors.operators.expressions`), if they have it.
    tree: Node | None = None
    key: Key | None = None


@dataclass(frozen=True)
class RowColumns:
    """The columns of a row besides an operator's keys."""

    fields: tuple[Field, ...]
    selected: tuple[Column, ...]
    #: The row's columns, in their order, computed from the emitted rows.
    results: tuple[Result, ...]
    #: For each of the row's columns its name in the state, if that is a single column of an atomic type, and not a key.
    leaves: tuple[str | None, ...] = ()

    @classmethod
    def passing(cls, attributes: Sequence[Expression], keys: Sequence[Key]) -> RowColumns:
        """Return columns of any type, which are not stored; columns that are keys are restored from the keys."""
        fields: list[Field] = []
        selected: list[Column] = []
        results: list[Result] = []
        for index, attribute in enumerate(attributes):
            key = next((key for key in keys if key.expression.matches(attribute)), None)
            name = f"c{index}"
            if key is None:
                kind = payload_type(SPARK.arrow_type(stored_type(attribute.type)))
                fields.append(Field(name, kind, attribute.nullable))
                selected.append(stored(attribute.column(), attribute.type, nullable=attribute.nullable).alias(name))
            unchanged = restored(F.col(name), attribute.type, nullable=attribute.nullable)
            column = unchanged if key is None else key.tree.column()
            results.append(Result(column, attribute))
        return cls(tuple(fields), tuple(selected), tuple(results))

    @classmethod
    def stored(cls, attributes: Sequence[Expression], keys: Sequence[Key], prefix: str) -> RowColumns:
        """Return columns that are stored, structs flattened to leaves; columns that are keys are restored from the keys.

        Raises
        ------
        InvalidRequestError
            State cannot store a column's type.
        """
        fields: list[Field] = []
        selected: list[Column] = []
        results: list[Result] = []
        leaves: list[str | None] = []
        for index, attribute in enumerate(attributes):
            column_key = key = next((key for key in keys if key.expression.matches(attribute)), None)
            if column_key is None:
                column_key = key_of(attribute, f"{prefix}{index}", normalised=False, compared=False)
                fields += column_key.leaves
                pairs = zip(column_key.leaves, column_key.columns, strict=True)
                selected += [column.alias(leaf.name) for leaf, column in pairs]
                leaves.append(column_key.tree.leaf if column_key.is_atomic else None)
            else:
                leaves.append(None)
            results.append(Result(column_key.tree.column(), attribute, column_key.tree.view_tree(), key))
        return cls(tuple(fields), tuple(selected), tuple(results), tuple(leaves))

    def add_to_view(self, component: ViewComponent) -> None:
        """Add the stored columns to a component of the view, except those among its keys."""
        for result in self.results:
            if result.tree is not None and result.key is None:
                component.value(result.attribute.name, result.tree)


@dataclass(frozen=True, kw_only=True)
class ProjectedPlan(OperatorPlan):
    """An operator whose results are columns of emitted rows."""

    results: tuple[Result, ...]
    #: The keys by which it stores rows; empty if it has none.
    keys: tuple[Key, ...] = ()

    def finish(self, emitted: DataFrame) -> DataFrame:
        """Return the results: the columns of Spark's own operator."""
        return projected(emitted, [(result.column, result.attribute) for result in self.results])

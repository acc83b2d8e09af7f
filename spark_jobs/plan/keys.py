"""Key expressions of a stateful operator: flattened to leaves for the shuffle and the state, and made again for the results."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.state_types import state_field
from store_actors.schema import Field

__all__ = ["Key", "KeyTree", "key_of", "leaf_field"]


@dataclass(frozen=True)
class Key:
    """One grouping expression: its leaves, and how they make it again.

    Attributes
    ----------
    expiry
        Leaf by which the rows of the key come to an end with the watermark; None if the key is no event time.
    """

    expression: Expression
    leaves: tuple[Field, ...]
    columns: tuple[Column, ...]
    tree: KeyTree
    expiry: str | None


@dataclass(frozen=True)
class KeyTree:
    """A leaf's name, or the (name, tree) fields of a struct, whose null is told by a leaf if it can be null."""

    leaf: str | None = None
    fields: tuple[tuple[str, KeyTree], ...] = ()
    null_leaf: str | None = None

    def column(self) -> Column:
        """The value, made of columns named as the leaves."""
        if self.leaf is not None:
            return F.col(self.leaf)
        struct = F.struct(*(tree.column().alias(name) for name, tree in self.fields))
        return struct if self.null_leaf is None else F.when(~F.col(self.null_leaf), struct)


def key_of(expression: Expression, path: str, *, normalised: bool = True) -> Key:
    """A key expression whose leaves are named after `path`; floating-point ones as Spark groups them, if `normalised`.

    Raises
    ------
    InvalidRequestError
        State cannot hold a value of it.
    """
    leaves: list[Field] = []
    columns: list[Column] = []

    def flatten(column: Column, kind: T.DataType, path: str, *, nullable: bool) -> KeyTree:
        if isinstance(kind, T.StructType):
            null_leaf = None
            if nullable:
                null_leaf = f"{path}_null"
                leaves.append(Field(null_leaf, "bool", nullable=False))
                columns.append(column.isNull())
            fields = tuple(
                (
                    item.name,
                    flatten(column.getField(item.name), item.dataType, f"{path}_{place}", nullable=item.nullable),
                )
                for place, item in enumerate(kind.fields)
            )
            return KeyTree(fields=fields, null_leaf=null_leaf)
        leaves.append(state_field(path, kind, nullable, what=expression.sql))
        columns.append(_normalised(column, kind) if normalised else column)
        return KeyTree(leaf=path)

    kind = expression.type
    tree = flatten(expression.column(), kind, path, nullable=expression.nullable)
    expiry = None
    if expression.watermark_delay_ms is not None:
        ends = {name: inner.leaf for name, inner in tree.fields}
        expiry = ends.get("end") if isinstance(kind, T.StructType) else tree.leaf
    return Key(expression, tuple(leaves), tuple(columns), tree, expiry)


def leaf_field(item: T.StructField) -> Field:
    """State's form of a Spark column."""
    return state_field(item.name, item.dataType, item.nullable, metadata=item.metadata)


def _normalised(column: Column, kind: T.DataType) -> Column:
    """Floating-point keys as Spark groups them: one NaN, and -0.0 is 0.0."""
    if not isinstance(kind, T.FloatType | T.DoubleType):
        return column
    return Expression.of(column).normalised().column()

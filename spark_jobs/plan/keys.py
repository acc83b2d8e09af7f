"""Key expressions of a stateful operator: flattened to leaves for the shuffle and the state, and made again for the results."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_jobs.plan.catalyst import Expression, class_name, column_of, data_type, watermark_delay_ms
from spark_jobs.plan.state_types import state_field
from store_actors.schema import Field

__all__ = ["Key", "KeyTree", "is_session", "key_of", "leaf_field", "metadata_of"]


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


def key_of(spark: SparkSession, expression: Expression, path: str, *, normalised: bool = True) -> Key:
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
        leaves.append(state_field(path, kind, nullable, what=expression.sql()))
        columns.append(_normalised(spark, column, kind) if normalised else column)
        return KeyTree(leaf=path)

    kind = data_type(expression)
    tree = flatten(column_of(spark, expression), kind, path, nullable=expression.nullable())
    expiry = None
    if watermark_delay_ms(expression) is not None:
        ends = {name: inner.leaf for name, inner in tree.fields}
        expiry = ends.get("end") if isinstance(kind, T.StructType) else tree.leaf
    return Key(expression, tuple(leaves), tuple(columns), tree, expiry)


def leaf_field(item: T.StructField) -> Field:
    """State's form of a Spark column."""
    return state_field(item.name, item.dataType, item.nullable, metadata=item.metadata)


def metadata_of(attribute: Expression) -> dict[str, Any]:
    """Metadata of a resolved attribute: that it is event time, or a window, goes with the column."""
    told: dict[str, Any] = json.loads(attribute.metadata().json())
    return told


def is_session(expression: Expression) -> bool:
    """Whether a grouping expression is a session window."""
    return class_name(expression) == "SessionWindow" or _is_session_column(expression)


def _is_session_column(expression: Expression) -> bool:
    return class_name(expression) == "AttributeReference" and expression.metadata().contains("spark.sessionWindow")


def _normalised(spark: SparkSession, column: Column, kind: T.DataType) -> Column:
    """Floating-point keys as Spark groups them: one NaN, and -0.0 is 0.0."""
    if not isinstance(kind, T.FloatType | T.DoubleType):
        return column
    assert spark._jvm is not None
    normalise = spark._jvm.org.apache.spark.sql.catalyst.optimizer.NormalizeNaNAndZero
    return column_of(spark, normalise(column._jc.expr()))

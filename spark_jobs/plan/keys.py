"""Key expressions of a stateful operator: flattened to leaves for the shuffle and the state, and restored in the results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.schema import Field
from coordinator.model.type_names import is_nested
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.spark_errors import RefusedQueryError
from spark_jobs.plan.storable import check_compared, has_map, is_changed, restored, state_field, stored, stored_type


@dataclass(frozen=True)
class Key:
    """A grouping expression: its leaves, and how it is restored from them."""

    expression: Expression
    leaves: tuple[Field, ...]
    columns: tuple[Column, ...]
    tree: KeyTree
    #: Leaf by which the watermark removes rows of the key; None if the key is not event time.
    expiry: str | None

    @property
    def is_atomic(self) -> bool:
        """Whether it is a single leaf of an atomic type, with the expression's values unchanged."""
        return self.tree.leaf is not None and self.tree.spark_type is None and not is_nested(self.leaves[0].type)


@dataclass(frozen=True)
class KeyTree:
    """A leaf's name, or the (name, tree) fields of a struct. If the struct can be null, a leaf says whether it is."""

    leaf: str | None = None
    fields: tuple[tuple[str, KeyTree], ...] = ()
    null_leaf: str | None = None
    #: Spark's type of the leaf's values, if they are stored in another (:mod:`spark_jobs.plan.storable`).
    spark_type: T.DataType | None = None
    #: Whether it can be null in a struct that is not null.
    nullable: bool = True

    def column(self) -> Column:
        """Return the value, computed from columns named as the leaves."""
        if self.leaf is not None:
            return F.col(self.leaf) if self.spark_type is None else restored(F.col(self.leaf), self.spark_type)
        struct = F.struct(*(tree._field().alias(name) for name, tree in self.fields))
        return struct if self.null_leaf is None else F.when(~F.col(self.null_leaf), struct)

    def view_tree(self) -> dict[str, Any]:
        """Return the value as readers compute it (:mod:`store_actors.operators.expressions`); intervals of months are their number."""
        if self.leaf is not None:
            return {"op": "column", "name": self.leaf}
        null = {} if self.null_leaf is None else {"null": self.null_leaf}
        names, args = [name for name, _ in self.fields], [tree.view_tree() for _, tree in self.fields]
        return {"op": "struct", "names": names, "args": args, **null}

    def _field(self) -> Column:
        # The leaves of a null struct are null, also where its type says that they cannot be.
        return self.column() if self.nullable else Expression.of(self.column()).known(nullable=False).column()


def key_of(expression: Expression, path: str, *, normalised: bool = True, compared: bool = True) -> Key:
    """Return a key whose leaves are named after `path`; with `normalised`, floating-point numbers are as Spark groups them.

    If it is not `compared`, its values are only stored and returned. Raises InvalidRequestError if state cannot store its values, or
    compare them, as maps (which Spark 4 groups by).
    """
    if compared:
        check_compared(expression.type, expression.sql)
        if has_map(expression.type):
            raise RefusedQueryError(
                "maps are no keys: two that are equal may have their entries in another order; use "
                "array_sort(map_entries(..)) of the map instead",
                column=expression.sql,
            )
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
                    flatten(
                        Expression.of(column).field(index, item.name).column(),
                        item.dataType,
                        f"{path}_{index}",
                        nullable=item.nullable,
                    ),
                )
                for index, item in enumerate(kind.fields)
            )
            return KeyTree(fields=fields, null_leaf=null_leaf, nullable=nullable)
        leaves.append(state_field(path, stored_type(kind), nullable, subject=expression.sql, nested=True))
        columns.append(stored(column, kind, normalised=normalised))
        spark_type = kind if is_changed(kind, normalised=False) else None
        return KeyTree(leaf=path, spark_type=spark_type, nullable=nullable)

    kind = expression.type
    tree = flatten(expression.column(), kind, path, nullable=expression.nullable)
    expiry = None
    if expression.watermark_delay_ms is not None:
        ends = {name: inner.leaf for name, inner in tree.fields}
        expiry = ends.get("end") if isinstance(kind, T.StructType) else tree.leaf
    return Key(expression, tuple(leaves), tuple(columns), tree, expiry)


def leaf_field(item: T.StructField) -> Field:
    """Return the state's field for a Spark column."""
    return state_field(item.name, item.dataType, item.nullable, metadata=item.metadata, nested=True)

"""Keys of a join: the expressions that are equal on both sides, flattened alike for the shuffle and the state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.schema import Field
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.keys import Key, KeyTree
from spark_jobs.plan.state_types import state_field
from spark_jobs.plan.storable import check_compared, is_changed, stored, stored_type


@dataclass(frozen=True)
class JoinKeys:
    """The keys of a join. Pairs are (left, right).

    Attributes
    ----------
    leaves
        The leaves of the keys, named alike on both sides.
    columns
        The leaves computed from each side's columns.
    trees
        For each key, how it is restored from the leaves.
    of_side
        For each side, the keys from which one of its columns can be restored.
    null_safe
        Leaves whose nulls are equal: those inside a struct, as Spark compares structs.
    expiry
        Leaf that is event time, or the end of a window of it, on either side, as for Spark; None if there is none.
    """

    leaves: tuple[Field, ...]
    columns: tuple[tuple[Column, ...], tuple[Column, ...]]
    trees: tuple[KeyTree, ...]
    of_side: tuple[tuple[Key, ...], tuple[Key, ...]]
    null_safe: tuple[str, ...]
    expiry: str | None

    def without_structs(self) -> JoinKeys:
        """Return the keys without structs to restore: in a row of the other side only, a struct must be null as a whole."""
        kept = [[key for key in side_keys if key.tree.leaf is not None] for side_keys in self.of_side]
        return replace(self, of_side=(tuple(kept[0]), tuple(kept[1])))


@dataclass
class _Leaves:
    subject: str
    fields: list[Field] = field(default_factory=list)
    columns: tuple[list[Column], list[Column]] = field(default_factory=lambda: ([], []))
    null_safe: list[str] = field(default_factory=list)
    #: Whether leaves have the values of the columns: among keys, floats have a single NaN and a single zero.
    is_exact: bool = True

    def flatten(
        self, pair: tuple[Column, Column], kinds: tuple[T.DataType, T.DataType], path: str, *, nullable: bool, top: bool
    ) -> KeyTree:
        left, right = kinds
        if isinstance(left, T.StructType) and isinstance(right, T.StructType):
            null_leaf = None
            if nullable:
                null_leaf = f"{path}_null"
                # A key that is null itself equals no key.
                flags = [F.when(column.isNotNull(), F.lit(False)) if top else column.isNull() for column in pair]
                self._add(Field(null_leaf, "bool", nullable=top), (flags[0], flags[1]), top=top)
            fields = tuple(
                (
                    left_field.name,
                    self.flatten(
                        (
                            Expression.of(pair[0]).field(index, left_field.name).column(),
                            Expression.of(pair[1]).field(index, right_field.name).column(),
                        ),
                        (left_field.dataType, right_field.dataType),
                        f"{path}_{index}",
                        nullable=left_field.nullable or right_field.nullable,
                        top=False,
                    ),
                )
                for index, (left_field, right_field) in enumerate(zip(left.fields, right.fields, strict=True))
            )
            return KeyTree(fields=fields, null_leaf=null_leaf)
        check_compared(left, self.subject)
        is_atomic = not isinstance(left, T.ArrayType) and not is_changed(left, normalised=False)
        self.is_exact = self.is_exact and is_atomic and not isinstance(left, T.FloatType | T.DoubleType)
        # The engine stores equal floats as equal slots, and Spark hashes them alike; floats inside an array are normalised here.
        columns = (
            pair if is_atomic else (stored(pair[0], left, normalised=True), stored(pair[1], right, normalised=True))
        )
        self._add(state_field(path, stored_type(left), nullable, subject=self.subject, nested=True), columns, top=top)
        return KeyTree(leaf=path)

    def _add(self, leaf: Field, columns: tuple[Column, Column], *, top: bool) -> None:
        self.fields.append(leaf)
        for side_columns, column in zip(self.columns, columns, strict=True):
            side_columns.append(column)
        if not top:
            self.null_safe.append(leaf.name)


def join_keys(left: list[Expression], right: list[Expression]) -> JoinKeys:
    """Flatten the equal expressions of both sides.

    Raises
    ------
    InvalidRequestError
        State cannot store a key.
    """
    leaves: list[Field] = []
    columns: tuple[list[Column], list[Column]] = ([], [])
    keys: tuple[list[Key], list[Key]] = ([], [])
    null_safe: list[str] = []
    trees: list[KeyTree] = []
    expiry: str | None = None
    for index, pair in enumerate(zip(left, right, strict=True)):
        pair_leaves = _Leaves(pair[0].sql)
        kinds = pair[0].type, pair[1].type
        nullable = pair[0].nullable or pair[1].nullable
        tree = pair_leaves.flatten(
            (pair[0].column(), pair[1].column()), kinds, f"k{index}", nullable=nullable, top=True
        )
        trees.append(tree)
        leaves += pair_leaves.fields
        null_safe += pair_leaves.null_safe
        if expiry is None and any(expression.watermark_delay_ms is not None for expression in pair):
            expiry = dict(tree.fields)["end"].leaf if tree.fields else tree.leaf
        for side, expression in enumerate(pair):
            columns[side].extend(pair_leaves.columns[side])
            if pair_leaves.is_exact:
                side_columns = tuple(pair_leaves.columns[side])
                keys[side].append(Key(expression, tuple(pair_leaves.fields), side_columns, tree, None))
    key_columns = tuple(columns[0]), tuple(columns[1])
    return JoinKeys(
        tuple(leaves), key_columns, tuple(trees), (tuple(keys[0]), tuple(keys[1])), tuple(null_safe), expiry
    )

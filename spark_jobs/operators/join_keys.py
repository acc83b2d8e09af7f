"""Keys of a join: expressions of both sides that Spark found equal, flattened alike for the shuffle and the state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.schema import Field
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.keys import Key, KeyTree
from spark_jobs.plan.state_types import state_field
from spark_jobs.plan.storable import is_changed, stored, stored_type

__all__ = ["JoinKeys", "join_keys"]


@dataclass(frozen=True)
class JoinKeys:
    """The keys of a join. Pairs are (left, right).

    Attributes
    ----------
    leaves
        Their leaves, named alike on both sides.
    columns
        The leaves over each side's columns.
    trees
        How each key is made of the leaves.
    of_side
        Those from which a side's column can be made again.
    null_safe
        Leaves whose nulls are equal: those inside a struct, as Spark compares structs.
    expiry
        Leaf that is event time, or the end of a window of it, if one is: on either side, as for Spark.
    """

    leaves: tuple[Field, ...]
    columns: tuple[tuple[Column, ...], tuple[Column, ...]]
    trees: tuple[KeyTree, ...]
    of_side: tuple[tuple[Key, ...], tuple[Key, ...]]
    null_safe: tuple[str, ...]
    expiry: str | None

    def without_structs(self) -> JoinKeys:
        """Keys whose structs make no column again: one that is there on the other side only must be null as a whole."""
        kept = [[key for key in some if key.tree.leaf is not None] for some in self.of_side]
        return replace(self, of_side=(tuple(kept[0]), tuple(kept[1])))


@dataclass
class _Leaves:
    """Leaves of one pair of expressions."""

    what: str
    fields: list[Field] = field(default_factory=list)
    columns: tuple[list[Column], list[Column]] = field(default_factory=lambda: ([], []))
    null_safe: list[str] = field(default_factory=list)
    #: Whether the values are those of the columns: of floats there is one NaN and one zero among keys.
    is_exact: bool = True

    def flatten(
        self, pair: tuple[Column, Column], kinds: tuple[T.DataType, T.DataType], path: str, *, nullable: bool, top: bool
    ) -> KeyTree:
        left, right = kinds
        if isinstance(left, T.StructType) and isinstance(right, T.StructType):
            null_leaf = None
            if nullable:
                null_leaf = f"{path}_null"
                # A null of the key itself equals nothing.
                flags = [F.when(one.isNotNull(), F.lit(False)) if top else one.isNull() for one in pair]
                self._add(Field(null_leaf, "bool", nullable=top), (flags[0], flags[1]), top=top)
            fields = tuple(
                (
                    mine.name,
                    self.flatten(
                        (
                            Expression.of(pair[0]).field(place, mine.name).column(),
                            Expression.of(pair[1]).field(place, theirs.name).column(),
                        ),
                        (mine.dataType, theirs.dataType),
                        f"{path}_{place}",
                        nullable=mine.nullable or theirs.nullable,
                        top=False,
                    ),
                )
                for place, (mine, theirs) in enumerate(zip(left.fields, right.fields, strict=True))
            )
            return KeyTree(fields=fields, null_leaf=null_leaf)
        is_atomic = not isinstance(left, T.ArrayType) and not is_changed(left, normalised=False)
        self.is_exact = self.is_exact and is_atomic and not isinstance(left, T.FloatType | T.DoubleType)
        # The engine makes equal floats equal words, and Spark's hash is the same for them; those inside an array are made equal here.
        columns = (
            pair if is_atomic else (stored(pair[0], left, normalised=True), stored(pair[1], right, normalised=True))
        )
        self._add(state_field(path, stored_type(left), nullable, what=self.what, nested=True), columns, top=top)
        return KeyTree(leaf=path)

    def _add(self, leaf: Field, columns: tuple[Column, Column], *, top: bool) -> None:
        self.fields.append(leaf)
        for some, column in zip(self.columns, columns, strict=True):
            some.append(column)
        if not top:
            self.null_safe.append(leaf.name)


def join_keys(left: list[Expression], right: list[Expression]) -> JoinKeys:
    """Flatten the equal expressions of both sides.

    Raises
    ------
    InvalidRequestError
        State cannot hold a key.
    """
    leaves: list[Field] = []
    columns: tuple[list[Column], list[Column]] = ([], [])
    keys: tuple[list[Key], list[Key]] = ([], [])
    null_safe: list[str] = []
    trees: list[KeyTree] = []
    expiry: str | None = None
    for place, pair in enumerate(zip(left, right, strict=True)):
        found = _Leaves(pair[0].sql)
        kinds = pair[0].type, pair[1].type
        mine, theirs = (one.column() for one in pair)
        nullable = pair[0].nullable or pair[1].nullable
        tree = found.flatten((mine, theirs), kinds, f"k{place}", nullable=nullable, top=True)
        trees.append(tree)
        leaves += found.fields
        null_safe += found.null_safe
        if expiry is None and any(one.watermark_delay_ms is not None for one in pair):
            expiry = dict(tree.fields)["end"].leaf if tree.fields else tree.leaf
        for side, expression in enumerate(pair):
            columns[side].extend(found.columns[side])
            if found.is_exact:
                own = tuple(found.columns[side])
                keys[side].append(Key(expression, tuple(found.fields), own, tree, None))
    both = tuple(columns[0]), tuple(columns[1])
    return JoinKeys(tuple(leaves), both, tuple(trees), (tuple(keys[0]), tuple(keys[1])), tuple(null_safe), expiry)

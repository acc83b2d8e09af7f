"""A join's condition: its keys, the expressions that are equal on both sides, flattened alike for the shuffle and the state; and the
rest, split by where it is evaluated: on one side, by the fleet on pairs, by Spark on the results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import Field
from coordinator.model.type_names import string_to_type
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.keys import Key, KeyTree
from spark_jobs.plan.logical import Plan
from spark_jobs.plan.spark_errors import RefusedQueryError
from spark_jobs.plan.storable import check_compared, is_changed, state_field, stored, stored_type
from spark_jobs.plan.view_components import Node, NotExpressibleError, TreeWriter
from store_actors.operators.expressions import PairCondition


@dataclass(frozen=True)
class JoinKeys:
    """The keys of a join. Pairs are (left, right)."""

    #: The leaves of the keys, named alike on both sides.
    leaves: tuple[Field, ...]
    #: The leaves computed from each side's columns.
    columns: tuple[tuple[Column, ...], tuple[Column, ...]]
    #: For each key, how it is restored from the leaves.
    trees: tuple[KeyTree, ...]
    #: For each side, the keys from which one of its columns can be restored.
    of_side: tuple[tuple[Key, ...], tuple[Key, ...]]
    #: Leaves whose nulls are equal: those inside a struct, as Spark compares structs.
    null_safe: tuple[str, ...]
    #: Leaf that is event time, or the end of a window of it, on either side, as for Spark; None if there is none.
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


@dataclass
class JoinCondition:
    """The rest of a join's condition. Pairs are (left, right)."""

    #: Conjuncts of a single side, which Spark evaluates on that side's rows.
    pre: tuple[list[Expression], list[Expression]] = field(default_factory=lambda: ([], []))
    #: The condition that the fleet evaluates on pairs (:mod:`store_actors.operators.expressions`).
    tree: Node | None = None
    #: Fields and columns that the tree reads and that Spark computes for it.
    computed: tuple[list[tuple[Field, Column]], list[tuple[Field, Column]]] = field(default_factory=lambda: ([], []))
    #: Conjuncts that only Spark can evaluate: a filter of an inner join's results.
    later: list[Expression] = field(default_factory=list)


def split_condition(
    condition: Expression | None,
    sides: tuple[Plan, Plan],
    stored: Mapping[int, Field],
    *,
    is_inner: bool,
) -> JoinCondition:
    """Split a condition, without the equalities that are keys, by where its conjuncts are evaluated.

    `stored` are the fields of the columns that are stored in any case, by expression id; results of an inner join may be filtered after
    it. Raises InvalidRequestError if the fleet cannot evaluate a conjunct over both sides, and the join is an outer or semi join, after
    which Spark cannot.
    """
    split = JoinCondition()
    writer = _Writer(sides, stored, split)
    trees: list[Node] = []
    for conjunct in condition.conjuncts() if condition is not None else []:
        side = writer.side_of(conjunct) if conjunct.deterministic else None
        if side is not None:
            split.pre[side].append(conjunct)
            continue
        before = tuple(len(computed) for computed in split.computed)
        try:
            trees.append(writer.checked(conjunct))
        except NotExpressibleError as error:
            for computed, size in zip(split.computed, before, strict=True):
                del computed[size:]
            if not is_inner:
                raise RefusedQueryError(
                    "the fleet cannot evaluate a part of this join's condition on pairs of rows, and after an outer or semi join "
                    "it would be too late; write it with comparisons, and/or/not and + - * over expressions of one side each",
                    part=conjunct.sql,
                    expression=str(error),
                ) from error
            split.later.append(conjunct)
    if trees:
        split.tree = trees[0] if len(trees) == 1 else {"op": "and", "args": trees}
    return split


class _Writer:
    """Writes expressions over both sides as trees whose leaves are columns of one side, which Spark computes."""

    def __init__(self, sides: tuple[Plan, Plan], stored: Mapping[int, Field], condition: JoinCondition) -> None:
        self._sides, self._stored, self._condition = sides, stored, condition
        self._trees = TreeWriter(self._leaf)

    def side_of(self, node: Expression) -> int | None:
        """Return the side to which all columns of an expression belong; the left side if it reads none, None for columns of both."""
        return next((side for side, plan in enumerate(self._sides) if plan.covers(node)), None)

    def checked(self, node: Expression) -> Node:
        """Return the tree of an expression, checked to be one that the fleet can evaluate."""
        if not node.deterministic:
            raise NotExpressibleError(node.sql)
        tree = self._trees.written(node)
        fields = [field for computed in self._condition.computed for field, _ in computed] + list(self._stored.values())
        try:
            PairCondition(tree, {field.name: string_to_type(field.type) for field in fields})
        except InvalidRequestError as error:
            raise NotExpressibleError(node.sql) from error
        return tree

    def _leaf(self, node: Expression) -> Node | None:
        side = None if node.kind == "Literal" else self.side_of(node)
        return None if side is None else {"op": "column", "name": self._column(node, side)}

    def _field(self, name: str, node: Expression) -> Field:
        try:
            return state_field(name, node.type, nullable=True, subject=node.sql)
        except InvalidRequestError as error:
            raise NotExpressibleError(node.sql) from error

    def _column(self, node: Expression, side: int) -> str:
        if node.is_attribute and node.id in self._stored:
            return self._stored[node.id].name
        computed = self._condition.computed[side]
        for expression, column in computed:
            if Expression.of(column).matches(node):
                return expression.name
        computed.append((self._field(f"{'lr'[side]}x{len(computed)}", node), node.column()))
        return computed[-1][0].name

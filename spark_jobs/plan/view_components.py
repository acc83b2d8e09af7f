"""What readers see of a state without Spark, described when a query is built: Spark's expressions as trees
(:mod:`store_actors.operators.expressions`), and the tables of a view (:mod:`store_actors.operators.view_columns`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import msgspec
from pyspark.sql import types as T

from coordinator.model.errors import InvalidRequestError
from spark_jobs.plan.aggregate_functions import nearest_biases
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.keys import Key
from spark_jobs.plan.storable import collation_of, state_field, stored_type
from store_actors.messages.requests import StoreSpec

Node = dict[str, Any]

_PLAIN = {
    "And": "and", "Or": "or", "Not": "not", "IsNull": "isnull", "Coalesce": "coalesce",
    "EqualTo": "=", "EqualNullSafe": "<=>", "LessThan": "<", "LessThanOrEqual": "<=", "GreaterThan": ">", "GreaterThanOrEqual": ">=",
    "Abs": "abs", "UnaryMinus": "negate", "Sqrt": "sqrt", "Log": "ln", "Floor": "floor", "Ceil": "ceil",
}  # fmt: skip
#: Those among them that compare their children.
_COMPARISONS = frozenset(
    {"EqualTo", "EqualNullSafe", "LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual"}
)
_ARITHMETIC = {
    "Add": "+",
    "Subtract": "-",
    "Multiply": "*",
    "Divide": "/",
    "SubtractTimestamps": "-",
    "DecimalDivideWithOverflowCheck": "/",
}
#: Nodes without an effect here: hints for Spark, and handlers of errors that do not occur here.
_TRANSPARENT = frozenset({"Alias", "KnownNotNull", "KnownNullable", "KnownFloatingPointNormalized", "TryEval"})
_INTERVAL_DIVISIONS = frozenset({"DivideDTInterval", "DivideYMInterval"})
_MONTH = T.YearMonthIntervalType.MONTH


class NotExpressibleError(Exception):
    """The fleet has no such expression; its text is the expression in SQL."""


class TreeWriter:
    """Writes expressions as trees.

    `leaf` returns the tree of a node that is none of these operations, such as a column, and None for any other.
    """

    def __init__(self, leaf: Callable[[Expression], Node | None]) -> None:
        self._leaf = leaf
        self._others: Mapping[str, Callable[[Expression], Node]] = {
            "Literal": self._literal,
            "IsNotNull": lambda node: {"op": "not", "args": [{"op": "isnull", "args": self._args(node)}]},
            "Cast": self._cast,
            "CheckOverflowInSum": lambda node: self._typed("cast", node),
            "If": lambda node: {"op": "case", "args": self._args(node)},
            "CaseWhen": self._case,
            "CreateNamedStruct": self._struct,
            "GetStructField": lambda node: {"op": "field", "name": node.field_name, "args": self._args(node)},
            "ArrayTransform": self._transform,
            "Invoke": self._invoke,
            "Round": self._round,
        }

    def written(self, node: Expression) -> Node:
        """Return the tree of an expression.

        Raises
        ------
        NotExpressibleError
            The fleet lacks a part of the expression.
        """
        leaf = self._leaf(node)
        if leaf is not None:
            return leaf
        kind = node.kind
        if kind in _TRANSPARENT:
            return self.written(node.child)
        if kind in _COMPARISONS and any(collation_of(child.type) is not None for child in node.children):
            # It would compare the bytes of the strings.
            raise NotExpressibleError(node.sql)
        if kind == "Between" and node.deterministic:
            return self.written(node.with_comparisons())
        if kind in _PLAIN:
            return {"op": _PLAIN[kind], "args": self._args(node)}
        if kind in _ARITHMETIC:
            return self._arithmetic(node)
        if kind in _INTERVAL_DIVISIONS:
            return {"op": "rounded /", "args": self._args(node)}
        if kind not in self._others:
            raise NotExpressibleError(node.sql)
        return self._others[kind](node)

    def _args(self, node: Expression) -> list[Node]:
        return [self.written(child) for child in node.children]

    def _typed(self, op: str, node: Expression) -> Node:
        return {"op": op, "type": stored_type_name(node), "args": self._args(node)}

    def _literal(self, node: Expression) -> Node:
        return {"op": "literal", "type": stored_type_name(node), "value": node.literal}

    def _cast(self, node: Expression) -> Node:
        if node.eval_mode != "LEGACY" and not node.is_widening_cast:
            raise NotExpressibleError(node.sql)
        target, source = node.type, node.child.type
        if isinstance(source, T.NullType):
            return {"op": "literal", "type": stored_type_name(node), "value": None}
        if isinstance(target, T.YearMonthIntervalType) or isinstance(source, T.YearMonthIntervalType):
            # Intervals are stored as months: a number of years, or months truncated to years, would be another number.
            is_from_number = node.child.kind == "Cast" and isinstance(node.child.child.type, T.IntegerType)
            is_of_months = isinstance(source, T.IntegerType) and getattr(target, "endField", None) == _MONTH
            if not (
                is_of_months or (is_from_number and isinstance(source, T.YearMonthIntervalType)) or target == source
            ):
                raise NotExpressibleError(node.sql)
            return self.written(node.child)
        return self._typed("cast", node)

    def _arithmetic(self, node: Expression) -> Node:
        kind, operation = node.type, _ARITHMETIC[node.kind]
        if isinstance(kind, T.DecimalType):
            return self._typed(operation, node)
        is_floating = isinstance(kind, T.FloatType | T.DoubleType)
        if not is_floating and node.kind != "SubtractTimestamps" and node.eval_mode != "LEGACY":
            # Spark's fails, or returns null, where the fleet's wraps around.
            raise NotExpressibleError(node.sql)
        return {"op": operation, "args": self._args(node)}

    def _case(self, node: Expression) -> Node:
        args = self._args(node)
        if len(args) % 2 == 0:
            args.append({"op": "literal", "type": stored_type_name(node), "value": None})
        return {"op": "case", "args": args}

    def _struct(self, node: Expression) -> Node:
        names, values = node.children[::2], node.children[1::2]
        return {
            "op": "struct",
            "names": [name.literal for name in names],
            "args": [self.written(value) for value in values],
        }

    def _transform(self, node: Expression) -> Node:
        array, function = node.children
        body, *variables = function.children
        if len(variables) != 1:
            raise NotExpressibleError(node.sql)
        variable = variables[0].id

        def element(leaf: Expression) -> Node | None:
            return {"op": "element"} if leaf.kind == "NamedLambdaVariable" and leaf.id == variable else None

        return {"op": "each", "of": TreeWriter(element).written(body), "args": [self.written(array)]}

    def _round(self, node: Expression) -> Node:
        value, digits = node.children
        if isinstance(value.type, T.DecimalType):
            return {"op": "cast", "type": stored_type_name(node), "args": [self.written(value)]}
        if digits.kind != "Literal" or not isinstance(value.type, T.DoubleType):
            raise NotExpressibleError(node.sql)
        return {"op": "round", "digits": digits.literal, "args": [self.written(value)]}

    def _invoke(self, node: Expression) -> Node:
        tables = nearest_biases(node)
        if tables is None:
            raise NotExpressibleError(node.sql)
        raw, biases = tables
        return {"op": "bias", "raw": raw, "bias": biases, "args": [self.written(node.children[1])]}


def stored_type_name(node: Expression) -> str:
    """Return the name of the type that an expression's values are stored in.

    Raises
    ------
    NotExpressibleError
        State cannot store such values.
    """
    try:
        return state_field("", stored_type(node.type), subject=node.sql, nested=True).type
    except InvalidRequestError as error:
        raise NotExpressibleError(node.sql) from error


def column(name: str) -> Node:
    return {"op": "column", "name": name}


@dataclass
class ViewComponent:
    """A table of a state's view."""

    #: Condition for the state's rows that it has; None for all.
    where: Node | None = None
    #: The keyed store with its rows; None if they are an operator's own rows.
    store: StoreSpec | None = None
    _keys: list[Node] = field(default_factory=list)
    _columns: list[Node] = field(default_factory=list)
    _not_shown: list[Node] = field(default_factory=list)

    @classmethod
    def of_keys(cls, keys: Iterable[Key], attributes: Sequence[Expression] = ()) -> ViewComponent:
        """Return a component with these keys, each named as the first attribute that equals it, or else as Spark names it."""
        component = cls()
        for key in keys:
            equal = (attribute for attribute in attributes if attribute.matches(key.expression))
            component.key(next(equal, key.expression).column_name, key.tree.view_tree())
        return component

    def key(self, name: str, tree: Node) -> None:
        """Add a key column; one whose name is taken gets a number, as rows are found by all keys."""
        candidates = chain([name], (f"{name}_{number}" for number in count(2)))
        free = next(candidate for candidate in candidates if not self._has(candidate))
        self._keys.append({"name": free, "value": tree, "key": True})

    def value(self, name: str, tree: Node, *, of: str = "") -> None:
        """Add another column of the user's; if its name is taken, it is prefixed with the name of what it is `of`."""
        if of and self._has(name):
            name = f"{of}.{name}"
        if self._has(name):
            self.leave_out(name, "another column has this name")
        else:
            self._columns.append({"name": name, "value": tree})

    def extra(self, name: str, tree: Node) -> None:
        """Add a column that the user does not have; if its name is taken, it gets another."""
        self.value(f"__{name}" if self._has(name) else name, tree)

    def leave_out(self, name: str, why: str) -> None:
        """Record a column that is not shown."""
        self._not_shown.append({"name": name, "why": why})

    def _has(self, name: str) -> bool:
        return any(entry["name"] == name for entry in (*self._keys, *self._columns))

    def to_json(self) -> dict[str, Any]:
        description: dict[str, Any] = {"columns": [*self._keys, *self._columns]}
        if self.where is not None:
            description["where"] = self.where
        if self._not_shown:
            description["not_shown"] = self._not_shown
        if self.store is not None:
            # Lists, as JSON restores them.
            description["store"] = msgspec.json.decode(msgspec.json.encode(self.store))
        return description

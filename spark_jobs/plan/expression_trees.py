"""Spark's expressions as trees that the fleet evaluates without Spark (:mod:`store_actors.operators.expressions`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql import types as T

from coordinator.model.errors import InvalidRequestError
from spark_jobs.plan.aggregate_functions import nearest_biases
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.state_types import state_field
from spark_jobs.plan.storable import collation_of, stored_type

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

    Parameters
    ----------
    leaf
        Function that returns the tree of a node that is none of these operations, such as a column, and None for any other.
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

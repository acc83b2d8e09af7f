"""Conditions over pairs of rows of a join: small expression trees, evaluated on whole columns. Pure logic.

A tree is JSON. Every node has ``op``:

==================================  =====================================================================
``column``                          ``name``: a column of either side, or a key
``literal``                         ``type`` (named as in a schema) and ``value``: null, boolean, number, string;
                                    times and durations in microseconds, dates in days, decimals as strings,
                                    binaries as hexadecimal digits
``cast``                            ``type`` and ``args`` (one): to a number that holds the value, or a date to
                                    its days
``and``, ``or``                     ``args`` (one or more)
``not``, ``isnull``                 ``args`` (one)
``=  <=>  <  <=  >  >=``            ``args`` (two, of one type)
``+  -  *``                         ``args`` (two): integers and floats of one type; time and duration, two times,
                                    two durations, a duration and an integer
==================================  =====================================================================

The meaning is Spark's without ANSI mode: nulls by three-valued logic, NaN equal to NaN and larger than any number, -0.0 equal to
0.0, strings compared by bytes, integers wrap around.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.errors import InvalidRequestError
from store_actors.engine.arrays import Mask
from store_actors.type_names import string_to_type

__all__ = ["PairCondition"]

Node: TypeAlias = Mapping[str, Any]
Datum: TypeAlias = "pa.Array | pa.Scalar"
Columns: TypeAlias = Mapping[str, pa.Array]


class PairCondition:
    """A compiled condition.

    Parameters
    ----------
    tree
        As the module says.
    types
        Type of every column that it may name.

    Raises
    ------
    InvalidRequestError
        The tree has an unknown operation or column, or types that do not go together.
    """

    def __init__(self, tree: Node, types: Mapping[str, pa.DataType]) -> None:
        self._tree = tree
        #: Names of the columns that it reads.
        self.columns: tuple[str, ...] = tuple(sorted(_names(tree)))
        unknown = [name for name in self.columns if name not in types]
        if unknown:
            raise InvalidRequestError(
                "a join's condition names columns that neither side has; nothing was changed; use those of the inputs",
                unknown=unknown,
                columns=sorted(types),
            )
        # Run once without rows: whatever the types do not allow shows now, not in a batch.
        result = _evaluate(tree, {name: pa.array([], types[name]) for name in self.columns})
        if not pa.types.is_boolean(result.type):
            raise _refused(tree, f"it gives {result.type}, not booleans")

    def holds(self, columns: Columns, size: int) -> Mask:
        """Where the condition is true (null is not) among `size` pairs."""
        result = _evaluate(self._tree, columns)
        if isinstance(result, pa.Scalar):
            return np.full(size, result.as_py() is True)
        return np.asarray(result.fill_null(False).to_numpy(zero_copy_only=False), np.bool_)


def _names(node: Node) -> set[str]:
    if node.get("op") == "column":
        return {node["name"]}
    return set().union(*(_names(one) for one in node.get("args", ())))


def _evaluate(node: Node, columns: Columns) -> Datum:
    """Value of a node: one for each pair, or one for all."""
    op = str(node.get("op"))
    if op == "column":
        return columns[node["name"]]
    if op == "literal":
        return _literal(node)
    args = [_evaluate(one, columns) for one in node.get("args", ())]
    if op not in _OPERATIONS or not _fits(op, len(args)):
        raise _refused(node, "no operation has this name and number of arguments")
    try:
        return _OPERATIONS[op](node, args)
    except pa.ArrowException as error:
        raise _refused(node, str(error)) from error


def _fits(op: str, args: int) -> bool:
    if op in ("and", "or"):
        return args >= 1
    return args == (1 if op in ("not", "isnull", "cast") else 2)


def _refused(node: Node, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"a part of a join's condition cannot be evaluated: {reason}; nothing was changed; give that part as a column of one side",
        part=node,
    )


# -- leaves -----------------------------------------------------------------------------------------------------------


def _literal(node: Node) -> pa.Scalar:
    try:
        data_type, value = string_to_type(node["type"]), node["value"]
        if value is None:
            return pa.scalar(None, data_type)
        if pa.types.is_decimal(data_type):
            return pa.scalar(str(value)).cast(data_type)
        if pa.types.is_binary(data_type):
            return pa.scalar(bytes.fromhex(value), data_type)
        if pa.types.is_date32(data_type):
            return pa.scalar(value, pa.int32()).cast(data_type)
        if pa.types.is_temporal(data_type):
            return pa.scalar(value, pa.int64()).cast(data_type)
        return pa.scalar(value, data_type)
    except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise _refused(node, f"it is no literal ({error})") from error


def _cast(node: Node, value: Datum) -> Datum:
    try:
        wanted = string_to_type(node["type"])
    except KeyError as error:
        raise _refused(node, "no such type") from error
    if not _may_cast(value.type, wanted):
        raise _refused(node, f"{value.type} is not cast to {wanted} here")
    return value.cast(wanted, safe=False) if isinstance(value, pa.Array) else value.cast(wanted)


def _may_cast(former: pa.DataType, wanted: pa.DataType) -> bool:
    if former == wanted or (pa.types.is_date32(former) and pa.types.is_int32(wanted)):
        return True
    is_number = pa.types.is_integer(former) or pa.types.is_floating(former) or pa.types.is_decimal(former)
    if pa.types.is_floating(wanted):
        return bool(is_number and not (pa.types.is_float64(former) and pa.types.is_float32(wanted)))
    if pa.types.is_decimal(wanted):
        # Arrow itself refuses a precision that does not hold every value of an integer type.
        return bool(
            pa.types.is_integer(former)
            or (
                pa.types.is_decimal(former)
                and wanted.scale >= former.scale
                and wanted.precision - wanted.scale >= former.precision - former.scale
            )
        )
    return bool(pa.types.is_integer(former) and pa.types.is_integer(wanted) and wanted.bit_width >= former.bit_width)


# -- comparisons and logic --------------------------------------------------------------------------------------------


def _pair(node: Node, args: Sequence[Datum]) -> tuple[Datum, Datum]:
    left, right = args
    if left.type != right.type:
        raise _refused(node, f"its sides have the types {left.type} and {right.type}")
    return left, right


def _equal(left: Datum, right: Datum) -> Datum:
    same = pc.equal(left, right)
    if pa.types.is_floating(left.type):
        return pc.or_kleene(same, pc.and_kleene(pc.is_nan(left), pc.is_nan(right)))
    return same


def _less(left: Datum, right: Datum) -> Datum:
    if pa.types.is_boolean(left.type):
        left, right = left.cast(pa.int8()), right.cast(pa.int8())
    smaller = pc.less(left, right)
    if pa.types.is_floating(left.type):
        return pc.or_kleene(smaller, pc.and_kleene(pc.invert(pc.is_nan(left)), pc.is_nan(right)))
    return smaller


def _null_safe_equal(left: Datum, right: Datum) -> Datum:
    both_null = pc.and_(pc.is_null(left), pc.is_null(right))
    return pc.or_(both_null, pc.coalesce(_equal(left, right), pa.scalar(False)))


def _comparison(compare: Callable[[Datum, Datum], Datum]) -> Callable[[Node, Sequence[Datum]], Datum]:
    return lambda node, args: compare(*_pair(node, args))


# -- arithmetic -------------------------------------------------------------------------------------------------------


def _arithmetic(compute: Callable[[Datum, Datum], Datum]) -> Callable[[Node, Sequence[Datum]], Datum]:
    def run(node: Node, args: Sequence[Datum]) -> Datum:
        left, right = args
        if not _may_compute(node["op"], left.type, right.type):
            raise _refused(node, f"{left.type} {node['op']} {right.type} is not computed here")
        return compute(left, right)

    return run


def _may_compute(op: str, left: pa.DataType, right: pa.DataType) -> bool:
    if pa.types.is_integer(left) or pa.types.is_floating(left):
        return bool(left == right or (op == "*" and pa.types.is_integer(left) and pa.types.is_duration(right)))
    if pa.types.is_duration(left):
        if op == "*":
            return bool(pa.types.is_integer(right))
        return bool(pa.types.is_duration(right) or (op == "+" and pa.types.is_timestamp(right)))
    if pa.types.is_timestamp(left):
        return bool((op != "*" and pa.types.is_duration(right)) or (op == "-" and left == right))
    return False


def _times(left: Datum, right: Datum) -> Datum:
    # Arrow multiplies durations by 64-bit integers only.
    if pa.types.is_duration(left.type):
        return pc.multiply(left, right.cast(pa.int64()))
    return pc.multiply(left.cast(pa.int64()), right) if pa.types.is_duration(right.type) else pc.multiply(left, right)


_OPERATIONS: Mapping[str, Callable[[Node, Sequence[Datum]], Datum]] = {
    "cast": lambda node, args: _cast(node, args[0]),
    "and": lambda _, args: reduce(pc.and_kleene, args),
    "or": lambda _, args: reduce(pc.or_kleene, args),
    "not": lambda _, args: pc.invert(args[0]),
    "isnull": lambda _, args: pc.is_null(args[0]),
    "=": _comparison(_equal),
    "<=>": _comparison(_null_safe_equal),
    "<": _comparison(_less),
    ">": _comparison(lambda left, right: _less(right, left)),
    # By the order's totality, so that NaN needs no further case.
    "<=": _comparison(lambda left, right: pc.invert(_less(right, left))),
    ">=": _comparison(lambda left, right: pc.invert(_less(left, right))),
    "+": _arithmetic(pc.add),
    "-": _arithmetic(pc.subtract),
    "*": _arithmetic(_times),
}

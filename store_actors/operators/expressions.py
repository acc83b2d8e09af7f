"""Expressions over columns of rows: small trees, evaluated on whole columns. Pure logic, and light to import.

A tree is JSON. Every node has ``op``; but for the first three, what it works on are other nodes, in ``args``:

==================================  =====================================================================
``column``                          ``name``: a column of the rows
``element``                         in the ``of`` of an ``each``: the element
``literal``                         ``type`` (named as in a schema) and ``value``: null, boolean, number, string;
                                    times and durations in microseconds, dates in days, decimals, NaN and
                                    infinities as strings, binaries as hexadecimal digits; of nested types null only
``cast``                            ``type``: to a number that holds the value, a float or double to a decimal, or a date to its days;
                                    a decimal to another one is rounded, and null if it is too large
``and``, ``or``                     one or more
``not``, ``isnull``                 one
``=  <=>  <  <=  >  >=``            two, of one type
``+  -  *  /``                      two: integers (not divided) and floats of one type, decimals (``type`` is that of the result);
                                    time and duration, two times, two durations, a duration and an integer
``rounded /``                       a duration or integer, and an integer: to the nearest integer, halves away from zero
``negate  abs  sqrt  ln``           one number; decimals and durations, too, by the first two
``floor  ceil``                     a double, to a 64-bit integer
``round``                           ``digits`` after the point (0 to 20); a double
``bias``                            a double: the mean of those numbers of ``bias`` whose places in ``raw`` are nearest to it
``case``                            a condition and a value, as often as there are conditions, and a value at last
``coalesce``                        one or more, of one type
``struct``                          ``names`` of the fields; ``null``, if there is one, is a boolean column: where it is not
                                    false, the struct is null
``field``                           ``name``; a struct
``each``                            a list, and ``of``: what each of its elements becomes
``timestamp``                       ``unit`` (us, ms); an integer, since the epoch
``unpacked``                        ``type``; a binary of :func:`~store_actors.engine.columns.packed`
==================================  =====================================================================

The meaning is Spark's without ANSI mode: nulls by three-valued logic, NaN equal to NaN and larger than any number, -0.0 equal to
0.0, strings compared by bytes, integers wrap around, what is divided by 0 is null.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.errors import InvalidRequestError
from coordinator.model.type_names import string_to_type
from store_actors.engine.arrays import Mask
from store_actors.engine.columns import unpacked
from store_actors.operators import numbers
from store_actors.operators.numbers import Datum, UnfitError

Node: TypeAlias = Mapping[str, Any]
Columns: TypeAlias = Mapping[str, pa.Array]

#: Under which an element of a list stands among the columns.
_ELEMENT = ""


class NotComputableError(Exception):
    """A tree cannot be evaluated."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


class ExpressionTree:
    """A tree that is known to be computable.

    Raises
    ------
    NotComputableError
        It has an unknown operation or column, or types that do not go together.
    """

    def __init__(self, tree: Node, types: Mapping[str, pa.DataType]) -> None:
        self._tree = tree
        #: Names of the columns that it reads.
        self.columns: tuple[str, ...] = tuple(sorted(columns_of(tree)))
        unknown = [name for name in self.columns if name not in types]
        if unknown:
            raise NotComputableError(tree, f"there is no column {', '.join(unknown)}")
        # Run once without rows: operations that the types do not allow fail now, not in a batch.
        #: Type of its values.
        self.type: pa.DataType = _evaluate(tree, {name: pa.array([], types[name]) for name in self.columns}, 0).type

    def values(self, columns: Columns, size: int) -> Datum:
        """Return a value for each of `size` rows, or one for all.

        Raises
        ------
        NotComputableError
            Of these values it cannot.
        """
        return _evaluate(self._tree, columns, size)

    def array(self, columns: Columns, size: int) -> pa.Array:
        """Return a value for each of `size` rows; see :meth:`values`."""
        return numbers.as_array(self.values(columns, size), size)


def columns_of(node: Node) -> set[str]:
    """Return the names of the columns that a tree reads."""
    if node.get("op") == "column":
        return {node["name"]}
    names = {node["null"]} if node.get("null") else set()
    return names.union(*(columns_of(arg) for arg in node.get("args", ())))


def _evaluate(node: Node, columns: Columns, size: int) -> Datum:
    op = str(node.get("op"))
    if op == "column":
        return columns[node["name"]]
    if op == "element" and _ELEMENT in columns:
        return columns[_ELEMENT]
    if op == "literal":
        return _literal(node)
    args = [_evaluate(arg, columns, size) for arg in node.get("args", ())]
    if op not in _OPERATIONS or not _fits(op, len(args)):
        raise NotComputableError(node, "no operation has this name and number of arguments")
    try:
        if op == "struct":
            return _struct(node, args, columns, size)
        return _OPERATIONS[op](node, args)
    except (UnfitError, pa.ArrowException) as error:
        raise NotComputableError(node, str(error)) from error
    except KeyError as error:
        raise NotComputableError(node, f"{error} is missing, or unknown") from error


def _fits(op: str, args: int) -> bool:
    if op == "struct":
        return True
    if op in ("and", "or", "coalesce"):
        return args >= 1
    if op == "case":
        return args >= 3 and args % 2 == 1
    return args == (2 if op in _OF_TWO else 1)


# -- leaves and nested values -----------------------------------------------------------------------------------------


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
        if pa.types.is_floating(data_type):
            return pa.scalar(float(value), data_type)
        return pa.scalar(value, data_type)
    except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise NotComputableError(node, f"it is no literal ({error})") from error


def _struct(node: Node, args: Sequence[Datum], columns: Columns, size: int) -> pa.Array:
    parts = [numbers.as_array(arg, size) for arg in args]
    fields = [pa.field(name, part.type) for name, part in zip(node["names"], parts, strict=True)]
    null = node.get("null")
    mask = None if null is None else pc.fill_null(columns[null], True)
    return pa.StructArray.from_arrays(parts, fields=fields, mask=mask)


def _field(node: Node, args: Sequence[Datum]) -> Datum:
    kind = args[0].type
    if not pa.types.is_struct(kind) or kind.get_field_index(node["name"]) < 0:
        raise UnfitError(f"{kind} has no field {node['name']}")
    return pc.struct_field(args[0], kind.get_field_index(node["name"]))


def _each(node: Node, args: Sequence[Datum]) -> Datum:
    if not pa.types.is_list(args[0].type):
        raise UnfitError(f"{args[0].type} is no list")
    return numbers.on_arrays(partial(_each_of, node["of"]), args[0])


def _each_of(tree: Node, lists: pa.Array) -> pa.Array:
    flat = lists.flatten()
    elements = numbers.as_array(_evaluate(tree, {_ELEMENT: flat}, len(flat)), len(flat))
    ends = np.cumsum(np.concatenate([[0], np.asarray(pc.fill_null(pc.list_value_length(lists), 0))]), dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), elements, mask=pc.is_null(lists))


def _unpacked(node: Node, args: Sequence[Datum]) -> Datum:
    if not pa.types.is_binary(args[0].type):
        raise UnfitError(f"{args[0].type} is no binary")
    return numbers.on_arrays(partial(unpacked, kind=string_to_type(node["type"])), args[0])


def _case(_: Node, args: Sequence[Datum]) -> Datum:
    result = args[-1]
    for index in range(len(args) - 3, -1, -2):
        condition, value = args[index], args[index + 1]
        numbers.check_alike(value, result)
        result = pc.if_else(pc.coalesce(condition, pa.scalar(False)), value, result)
    return result


# -- comparisons and logic --------------------------------------------------------------------------------------------


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


Operation: TypeAlias = Callable[[Node, Sequence[Datum]], Datum]


def _comparison(compare: Callable[[Datum, Datum], Datum]) -> Operation:
    def run(_: Node, args: Sequence[Datum]) -> Datum:
        numbers.check_alike(*args)
        return compare(*args)

    return run


def _coalesce(_: Node, args: Sequence[Datum]) -> Datum:
    for arg in args:
        numbers.check_alike(args[0], arg)
    return pc.coalesce(*args)


def _arithmetic(op: str) -> Operation:
    return lambda node, args: numbers.computed(
        op, args[0], args[1], string_to_type(node["type"]) if "type" in node else None
    )


def _of_one(compute: Callable[[Datum], Datum]) -> Operation:
    return lambda _, args: compute(args[0])


_OF_TWO: Mapping[str, Operation] = {
    "=": _comparison(_equal),
    "<=>": _comparison(_null_safe_equal),
    "<": _comparison(_less),
    ">": _comparison(lambda left, right: _less(right, left)),
    # By the order's totality, so that NaN needs no further case.
    "<=": _comparison(lambda left, right: pc.invert(_less(right, left))),
    ">=": _comparison(lambda left, right: pc.invert(_less(left, right))),
    **{op: _arithmetic(op) for op in "+-*/"},
    "rounded /": lambda _, args: numbers.divided_to_nearest(*args),
}
_OPERATIONS: Mapping[str, Operation] = {
    **_OF_TWO,
    "cast": lambda node, args: numbers.cast(args[0], string_to_type(node["type"])),
    "and": lambda _, args: reduce(pc.and_kleene, args),
    "or": lambda _, args: reduce(pc.or_kleene, args),
    "not": _of_one(pc.invert),
    "isnull": _of_one(pc.is_null),
    "negate": _of_one(numbers.negated),
    "abs": _of_one(numbers.absolute),
    "sqrt": _of_one(numbers.square_root),
    "ln": _of_one(numbers.logarithm),
    "floor": _of_one(numbers.floor),
    "ceil": _of_one(numbers.ceiling),
    "round": lambda node, args: numbers.rounded(args[0], node["digits"]),
    "bias": lambda node, args: numbers.bias(args[0], node["raw"], node["bias"]),
    "timestamp": lambda node, args: numbers.timestamp(args[0], node["unit"]),
    "case": _case,
    "coalesce": _coalesce,
    "struct": lambda node, args: args[0],
    "field": _field,
    "each": _each,
    "unpacked": _unpacked,
}


class PairCondition:
    """A compiled condition over pairs of rows of a join.

    Raises
    ------
    InvalidRequestError
        The tree has an unknown operation or column, or types that do not go together.
    """

    def __init__(self, tree: Node, types: Mapping[str, pa.DataType]) -> None:
        try:
            self._tree = ExpressionTree(tree, types)
            if not pa.types.is_boolean(self._tree.type):
                raise NotComputableError(tree, f"it gives {self._tree.type}, not booleans")
        except NotComputableError as error:
            raise _refused(error) from error
        #: Names of the columns that it reads.
        self.columns: tuple[str, ...] = self._tree.columns

    def holds(self, columns: Mapping[str, pa.Array], size: int) -> Mask:
        """Return a mask of the pairs, `size` in number, for which the condition is true; null is not true."""
        try:
            result = self._tree.values(columns, size)
        except NotComputableError as error:
            raise _refused(error) from error
        if isinstance(result, pa.Scalar):
            return np.full(size, result.as_py() is True)
        return np.asarray(result.fill_null(False).to_numpy(zero_copy_only=False), np.bool_)


def _refused(error: NotComputableError) -> InvalidRequestError:
    return InvalidRequestError(
        f"a part of a join's condition cannot be evaluated: {error.reason}; nothing was changed; give that part as a column of one "
        "side",
        part=error.node,
    )

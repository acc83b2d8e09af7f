"""Arithmetic and casts of :mod:`store_actors.operators.expressions`, with Spark's meaning without ANSI mode. Pure logic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from store_actors.engine.arrays import whole_numbers

#: A value for each row, or one for all.
Datum: TypeAlias = "pa.Array | pa.Scalar"
Doubles: TypeAlias = npt.NDArray[np.float64]

#: Digits that a decimal has at most while it is computed with.
_DIGITS = 76
#: Digits after the point to which doubles are rounded at most.
_ROUNDED = 20
#: Furthest time, in milliseconds, that microseconds in 64 bits reach.
_FURTHEST_MS = (2**63 - 1) // 1000
#: Neighbours in its tables of which HyperLogLog++ takes the mean.
_NEIGHBOURS = 6


class UnfitError(Exception):
    """An operation is not for these types; says why."""


def as_array(value: Datum, size: int) -> pa.Array:
    """Return a value for each of `size` rows."""
    return pa.repeat(value, size) if isinstance(value, pa.Scalar) else value


def on_arrays(compute: Callable[..., pa.Array], *values: Datum) -> Datum:
    """Apply a function of arrays to these values: the result is one value for all rows if each of them is."""
    arrays = [value for value in values if isinstance(value, pa.Array)]
    if not arrays:
        return compute(*(pa.repeat(value, 1) for value in values))[0]
    return compute(*(as_array(value, len(arrays[0])) for value in values))


def check_alike(left: Datum, right: Datum) -> None:
    """Check that two values are of one type.

    Raises
    ------
    UnfitError
        Their types differ.
    """
    if left.type != right.type:
        raise UnfitError(f"its sides have the types {left.type} and {right.type}")


# -- casts ------------------------------------------------------------------------------------------------------------


def cast(value: Datum, target: pa.DataType) -> Datum:
    """Return a value cast to another type.

    Raises
    ------
    UnfitError
        Values of this type cannot be cast to `target`.
    """
    source = value.type
    if source == target:
        return value
    if pa.types.is_decimal(target) and pa.types.is_decimal(source):
        return _fitted(_wide(value), target)
    if pa.types.is_decimal(target) and pa.types.is_integer(source):
        return _fitted(pc.cast(value, pa.decimal256(20, 0)), target)
    if pa.types.is_decimal(target) and pa.types.is_floating(source):
        return _decimal_of_float(value, target)
    if pa.types.is_floating(target) and pa.types.is_decimal(source):
        # By way of its digits, so that the nearest double comes out, as in Java.
        return pc.cast(pc.cast(value, pa.string()), target)
    if not _may_cast(source, target):
        raise UnfitError(f"{source} is not cast to {target} here")
    return pc.cast(value, target, safe=False)


def _may_cast(source: pa.DataType, target: pa.DataType) -> bool:
    if pa.types.is_date32(source) and pa.types.is_int32(target):
        return True
    if pa.types.is_floating(target):
        is_narrower = pa.types.is_float64(source) and pa.types.is_float32(target)
        return bool(pa.types.is_integer(source) or (pa.types.is_floating(source) and not is_narrower))
    return bool(pa.types.is_integer(source) and pa.types.is_integer(target) and target.bit_width >= source.bit_width)


def timestamp(value: Datum, unit: str) -> Datum:
    """Return the instant that is `value` of `unit` after the epoch; null if 64-bit microseconds do not reach it."""
    if not pa.types.is_int64(value.type) or unit not in ("us", "ms"):
        raise UnfitError(f"{value.type} is no count of {unit}")
    if unit == "ms":
        is_near = pc.and_(pc.less_equal(value, _FURTHEST_MS), pc.greater_equal(value, -_FURTHEST_MS))
        value = pc.if_else(is_near, pc.multiply(value, 1000), pa.scalar(None, pa.int64()))
    return pc.cast(value, pa.timestamp("us", "UTC"))


# -- decimals ---------------------------------------------------------------------------------------------------------


def _wide(value: Datum, more: int = 0) -> Datum:
    """Return a decimal as a 256-bit one, with `more` digits after the point added."""
    kind = value.type
    return pc.cast(value, pa.decimal256(kind.precision + more, kind.scale + more))


def _fitted(value: Datum, target: pa.DataType) -> Datum:
    """Return a decimal rounded to a type's scale, halves away from zero; null if it has too many digits."""
    if value.type.scale > target.scale:
        value = pc.round(value, ndigits=target.scale, round_mode="half_towards_infinity")
    whole = target.precision - target.scale
    if value.type.precision - value.type.scale >= whole:
        limit = pa.scalar(Decimal(10) ** whole).cast(pa.decimal256(_DIGITS, value.type.scale))
        value = pc.if_else(pc.less(pc.abs(value), limit), value, pa.scalar(None, value.type))
    return pc.cast(value, target)


def _decimal_of_float(value: Datum, target: pa.DataType) -> Datum:
    """Convert by the fewest digits that identify the number, as Java writes it."""
    whole, scale = target.precision - target.scale, target.scale
    # Smaller numbers round to 0. Larger numbers, NaN and infinities become null.
    is_small = pc.less(pc.abs(value), 10.0 ** -(scale + 2))
    is_near = pc.less(pc.abs(value), 10.0**whole)
    zero, null = pa.scalar(0.0, value.type), pa.scalar(None, value.type)
    near = pc.if_else(is_small, zero, pc.if_else(is_near, value, null))
    return _fitted(pc.cast(pc.cast(near, pa.string()), pa.decimal256(_DIGITS, scale + 20)), target)


def rounded(value: Datum, digits: int) -> Datum:
    """Return a double rounded to `digits` after the point, halves away from zero, by the fewest digits that identify it, as in Java."""
    if not pa.types.is_float64(value.type) or not 0 <= digits <= _ROUNDED:
        raise UnfitError(f"{value.type} is not rounded to {digits} digits here")
    # Larger ones have no digits after the point; NaN stays what it is, too.
    near = pc.if_else(pc.less(pc.abs(value), 1e16), value, pa.scalar(None, value.type))
    decimal = _decimal_of_float(near, pa.decimal128(17 + digits, digits))
    return pc.coalesce(cast(decimal, value.type), value)


def _of_decimals(op: str, left: Datum, right: Datum, target: pa.DataType | None) -> Datum:
    if target is None or not pa.types.is_decimal(target):
        raise UnfitError("it does not say what decimal it gives")
    if op != "/":
        return _fitted(_COMPUTED[op](_wide(left), _wide(right)), target)
    # Arrow truncates the quotient: one digit more than is kept is enough to round correctly.
    digits = left.type.scale + right.type.precision - right.type.scale + 1
    return _fitted(pc.divide(_wide(left, max(0, target.scale + 1 - digits)), _without_zero(_wide(right))), target)


def _without_zero(value: Datum) -> Datum:
    zero = pa.scalar(Decimal(0) if pa.types.is_decimal(value.type) else 0, value.type)
    return pc.if_else(pc.equal(value, zero), pa.scalar(None, value.type), value)


# -- arithmetic -------------------------------------------------------------------------------------------------------


def computed(op: str, left: Datum, right: Datum, target: pa.DataType | None) -> Datum:
    """Return ``left op right``.

    Parameters
    ----------
    target
        Type of the result of decimals; None for all other types.

    Raises
    ------
    UnfitError
        The operation is not for these types.
    """
    if pa.types.is_decimal(left.type) and pa.types.is_decimal(right.type):
        return _of_decimals(op, left, right, target)
    if not _may_compute(op, left.type, right.type):
        raise UnfitError(f"{left.type} {op} {right.type} is not computed here")
    return _COMPUTED[op](left, right)


def _may_compute(op: str, left: pa.DataType, right: pa.DataType) -> bool:
    if op == "/":
        return bool(pa.types.is_floating(left) and left == right)
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


_COMPUTED: Mapping[str, Callable[[Datum, Datum], Datum]] = {
    "+": pc.add,
    "-": pc.subtract,
    "*": _times,
    "/": lambda left, right: pc.divide(left, _without_zero(right)),
}


def divided_to_nearest(left: Datum, right: Datum) -> Datum:
    """Return a duration or integer divided by an integer, rounded to the nearest, halves away from zero; null by 0.

    Raises
    ------
    UnfitError
        The operation is not for these types.
    """
    if not ((pa.types.is_duration(left.type) or pa.types.is_integer(left.type)) and pa.types.is_integer(right.type)):
        raise UnfitError(f"{left.type} / {right.type} is not rounded here")
    return on_arrays(_divided, left, _without_zero(pc.cast(right, pa.int64())))


def _divided(dividends: pa.Array, divisors: pa.Array) -> pa.Array:
    is_null = np.asarray(pc.or_(pc.is_null(dividends), pc.is_null(divisors)))
    numbers, by = (np.asarray(pc.fill_null(pc.cast(operand, pa.int64()), 1)) for operand in (dividends, divisors))
    sizes, steps = (np.abs(operand).view(np.uint64) for operand in (numbers, by))
    quotients = sizes // steps
    quotients += (sizes - quotients * steps) >= steps - steps // np.uint64(2)
    signed = np.where((numbers < 0) != (by < 0), -quotients.view(np.int64), quotients.view(np.int64))
    return pc.cast(pa.array(signed, mask=is_null), dividends.type, safe=False)


def _number(value: Datum, quantity: str, *, floating: bool = False) -> Datum:
    kind = value.type
    is_other = pa.types.is_integer(kind) or pa.types.is_decimal(kind) or pa.types.is_duration(kind)
    if not (pa.types.is_floating(kind) or (is_other and not floating)):
        raise UnfitError(f"there is no {quantity} of {kind} here")
    return value


def negated(value: Datum) -> Datum:
    """Return the number with the opposite sign."""
    return pc.negate(_number(value, "negative"))


def absolute(value: Datum) -> Datum:
    """Return the absolute value."""
    if pa.types.is_duration(value.type):
        return pc.cast(pc.abs(pc.cast(value, pa.int64())), value.type)
    return pc.abs(_number(value, "absolute value"))


def square_root(value: Datum) -> Datum:
    """Return the square root; NaN for numbers below 0."""
    return pc.sqrt(_number(value, "square root", floating=True))


def logarithm(value: Datum) -> Datum:
    """Return the natural logarithm; null for 0 and numbers below."""
    _number(value, "logarithm", floating=True)
    return pc.ln(pc.if_else(pc.less_equal(value, 0.0), pa.scalar(None, value.type), value))


def floor(value: Datum) -> Datum:
    """Return the largest 64-bit integer that is not larger."""
    return on_arrays(_whole, pc.floor(_number(value, "floor", floating=True)))


def ceiling(value: Datum) -> Datum:
    """Return the smallest 64-bit integer that is not smaller."""
    return on_arrays(_whole, pc.ceil(_number(value, "ceiling", floating=True)))


def _whole(array: pa.Array) -> pa.Array:
    whole = whole_numbers(np.asarray(pc.fill_null(array, 0.0), np.float64))
    return pa.array(whole, mask=np.asarray(pc.is_null(array)))


def bias(value: Datum, raw: Sequence[float], biases: Sequence[float]) -> Datum:
    """Return the bias of HyperLogLog++'s estimates: the mean bias of the raw estimates that are nearest to each."""
    _number(value, "bias", floating=True)
    return on_arrays(partial(_mean_bias, np.asarray(raw, np.float64), np.asarray(biases, np.float64)), value)


def _mean_bias(estimates: Doubles, table: Doubles, array: pa.Array) -> pa.Array:
    raw = np.asarray(pc.fill_null(array, 0.0), np.float64)
    low = np.maximum(np.searchsorted(estimates, raw) - _NEIGHBOURS + 1, 0)
    high = np.minimum(low + _NEIGHBOURS, len(estimates))
    while True:
        # The window moves up for as long as the number above it is nearer than its lowest.
        above = estimates[np.minimum(high, len(estimates) - 1)]
        moves = (high < len(estimates)) & (np.abs(raw - above) < np.abs(raw - estimates[low]))
        if not moves.any():
            break
        low, high = low + moves, high + moves
    total = np.zeros(len(raw))
    for offset in range(_NEIGHBOURS):
        inside = low + offset < high
        total += np.where(inside, table[np.minimum(low + offset, len(table) - 1)], 0.0)
    return pa.array(total / (high - low), mask=np.asarray(pc.is_null(array)))

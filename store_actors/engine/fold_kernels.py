"""Compiled steps of the less common accumulators: checked sums, bits, products, moments, values by an ordering, states of many words.

They are called by ``row_kernels._step``, whose arguments they have; a line of ``ops`` is described at ``layout.Feed``.
"""

from __future__ import annotations

import numpy as np
from numba import njit, void
from numba.types import boolean, float64, int64, uint8, uint64

from store_actors.engine.nested_kernels import compare_nested
from store_actors.engine.op_code_kernels import OpCode
from store_actors.engine.sketch_kernels import sketch_step

_ONE = np.uint64(1)
_ZERO = np.uint64(0)
_INT_MAX = 2**31 - 1
#: The six bits of a register.
_REGISTER = np.uint64(63)

u64_2, i64_1, i64_2, f64_2 = uint64[:, ::1], int64[::1], int64[:, ::1], float64[:, ::1]
u8_1, u8_2 = uint8[::1], uint8[:, ::1]


@njit(boolean(u8_1, i64_1, int64, int64), cache=True, nogil=True)
def bytes_less(arena, offsets, left, right):
    """Return whether string `left` sorts before `right`: unsigned bytes, as Spark compares UTF8String and binary."""
    a, a_end = offsets[left], offsets[left + 1]
    b, b_end = offsets[right], offsets[right + 1]
    while a < a_end and b < b_end:
        if arena[a] != arena[b]:
            return arena[a] < arena[b]
        a += 1
        b += 1
    return a_end - a < b_end - b


@njit(boolean(uint64, int64, uint64, int64), cache=True, nogil=True)
def decimal_less(low, high, other_low, other_high):
    return high < other_high or (high == other_high and low < other_low)


@njit(void(u64_2, i64_2, int64, int64, int64, int64, int64, uint64), cache=True, nogil=True)
def _add_checked(rows, rows_i, slot, word, value, bits, flag_word, flag):
    """Add to a sum that is null once it does not fit its bits."""
    before = rows_i[slot, word]
    total = np.int64(np.uint64(before) + np.uint64(value))
    wrapped = (before >= 0) == (value >= 0) and (total >= 0) != (before >= 0)
    rows_i[slot, word] = total
    if wrapped or (bits == 32 and (total > _INT_MAX or total < -_INT_MAX - 1)):
        rows[slot, flag_word] &= ~flag


@njit(
    boolean(int64, u64_2, i64_2, f64_2, int64, int64, u64_2, f64_2, int64, int64, i64_2, int64, u8_1, i64_1),
    cache=True, nogil=True,
)  # fmt: skip
def _replaces(code, rows, rows_i, rows_f, slot, word, values, values_f, column, row, limits, parts, arena, offsets):
    """Return whether the ordering of a row replaces the group's: an equal one does."""
    if code == OpCode.MIN_BY_INT or code == OpCode.MAX_BY_INT:
        x, now = np.int64(values[column, row]), rows_i[slot, word]
        return x <= now if code == OpCode.MIN_BY_INT else x >= now
    if code == OpCode.MIN_BY_FLOAT or code == OpCode.MAX_BY_FLOAT:
        # NaN is larger than every number, and equal to itself.
        y, old = values_f[column, row], rows_f[slot, word]
        if code == OpCode.MIN_BY_FLOAT:
            return np.isnan(old) or y <= old
        return np.isnan(y) or y >= old
    if code == OpCode.MIN_BY_DECIMAL or code == OpCode.MAX_BY_DECIMAL:
        low, high = values[column, row], np.int64(values[column + 1, row])
        if code == OpCode.MIN_BY_DECIMAL:
            return not decimal_less(rows[slot, word], rows_i[slot, word + 1], low, high)
        return not decimal_less(low, high, rows[slot, word], rows_i[slot, word + 1])
    left, right = np.int64(values[column, row]), rows_i[slot, word]
    if code == OpCode.MIN_BY_STRING or code == OpCode.MAX_BY_STRING:
        if code == OpCode.MIN_BY_STRING:
            return not bytes_less(arena, offsets, right, left)
        return not bytes_less(arena, offsets, left, right)
    if code == OpCode.MIN_BY_NESTED or code == OpCode.MAX_BY_NESTED:
        order = compare_nested(arena, offsets, left, right, limits, parts)
        return order <= 0 if code == OpCode.MIN_BY_NESTED else order >= 0
    raise ValueError("no ordering is compared by this code")


@njit(void(f64_2, int64, int64, float64, int64), cache=True, nogil=True)
def add_moments(rows_f, slot, word, x, highest):
    """Add one value to n, avg and the moments from the second to the `highest` (2 to 4), in the order of Spark's CentralMomentAgg."""
    count = rows_f[slot, word] + 1.0
    delta = x - rows_f[slot, word + 1]
    delta_n = delta / count
    m2 = rows_f[slot, word + 2] + delta * (delta - delta_n)
    if highest >= 3:
        delta2, delta_n2 = delta * delta, delta_n * delta_n
        m3 = rows_f[slot, word + 3] - 3.0 * delta_n * m2 + delta * (delta2 - delta_n2)
        if highest == 4:
            rows_f[slot, word + 4] = (
                rows_f[slot, word + 4]
                - 4.0 * delta_n * m3
                - 6.0 * delta_n2 * m2
                + delta * (delta * delta2 - delta_n * delta_n2)
            )
        rows_f[slot, word + 3] = m3
    rows_f[slot, word] = count
    rows_f[slot, word + 1] += delta_n
    rows_f[slot, word + 2] = m2


@njit(void(f64_2, int64, int64, f64_2, int64, int64, int64), cache=True, nogil=True)
def merge_moments(rows_f, slot, word, values_f, a, row, highest):
    """Merge the moments of other values, from the columns ``a..``: Chan et al., as Spark merges."""
    n1, n2 = rows_f[slot, word], values_f[a, row]
    if n2 == 0.0:
        return
    total = n1 + n2
    delta = values_f[a + 1, row] - rows_f[slot, word + 1]
    delta_n = delta / total
    left2, right2 = rows_f[slot, word + 2], values_f[a + 2, row]
    if highest >= 3:
        left3, right3 = rows_f[slot, word + 3], values_f[a + 3, row]
        if highest == 4:
            rows_f[slot, word + 4] += (
                values_f[a + 4, row]
                + delta_n * delta_n * delta_n * delta * n1 * n2 * (n1 * n1 - n1 * n2 + n2 * n2)
                + 6.0 * delta_n * delta_n * (n1 * n1 * right2 + n2 * n2 * left2)
                + 4.0 * delta_n * (n1 * right3 - n2 * left3)
            )
        rows_f[slot, word + 3] = (
            left3 + right3
            + delta_n * delta_n * delta * n1 * n2 * (n1 - n2)
            + 3.0 * delta_n * (n1 * right2 - n2 * left2)
        )  # fmt: skip
    rows_f[slot, word + 2] = left2 + right2 + delta * delta_n * n1 * n2
    rows_f[slot, word + 1] += delta_n * n2
    rows_f[slot, word] = total


@njit(void(f64_2, int64, int64, float64, float64, int64), cache=True, nogil=True)
def _add_co_moments(rows_f, slot, word, x, y, with_squares):
    """Add one pair to n, both averages, ck and (`with_squares`) both second moments, as Spark's Covariance computes them."""
    count = rows_f[slot, word] + 1.0
    dx, dy = x - rows_f[slot, word + 1], y - rows_f[slot, word + 2]
    x_avg, y_avg = rows_f[slot, word + 1] + dx / count, rows_f[slot, word + 2] + dy / count
    rows_f[slot, word] = count
    rows_f[slot, word + 1] = x_avg
    rows_f[slot, word + 2] = y_avg
    rows_f[slot, word + 3] += dx * (y - y_avg)
    if with_squares != 0:
        rows_f[slot, word + 4] += dx * (x - x_avg)
        rows_f[slot, word + 5] += dy * (y - y_avg)


@njit(void(f64_2, int64, int64, f64_2, int64, int64, int64), cache=True, nogil=True)
def _merge_co_moments(rows_f, slot, word, values_f, a, row, with_squares):
    """Merge the co-moments of other pairs, from the columns ``a..``."""
    n1, n2 = rows_f[slot, word], values_f[a, row]
    if n2 == 0.0:
        return
    total = n1 + n2
    dx, dy = values_f[a + 1, row] - rows_f[slot, word + 1], values_f[a + 2, row] - rows_f[slot, word + 2]
    dx_n, dy_n = dx / total, dy / total
    rows_f[slot, word] = total
    rows_f[slot, word + 1] += dx_n * n2
    rows_f[slot, word + 2] += dy_n * n2
    rows_f[slot, word + 3] += values_f[a + 3, row] + dx * dy_n * n1 * n2
    if with_squares != 0:
        rows_f[slot, word + 4] += values_f[a + 4, row] + dx * dx_n * n1 * n2
        rows_f[slot, word + 5] += values_f[a + 5, row] + dy * dy_n * n1 * n2


@njit(
    void(i64_2, int64, u64_2, i64_2, f64_2, int64, u64_2, f64_2, u8_2, int64, i64_2, u8_1, i64_1),
    cache=True, nogil=True,
)  # fmt: skip
def _step_by(ops, n, rows, rows_i, rows_f, slot, values, values_f, valid, row, limits, arena, offsets):
    """Replace the group's value by a row's if the row comes first in the ordering."""
    code, a, column, width = ops[n, 0], ops[n, 1], ops[n, 3], ops[n, 7]
    word, flag_word, flag = ops[n, 4], ops[n, 5], np.uint64(ops[n, 6])
    ordering, ordering_flag_word, ordering_flag = ops[n, 9], ops[n, 10], np.uint64(ops[n, 11])
    if valid[column, row] == 0:
        return
    if rows[slot, ordering_flag_word] & ordering_flag != _ZERO and not _replaces(
        code, rows, rows_i, rows_f, slot, ordering, values, values_f, column, row, limits, ops[n, 2], arena, offsets
    ):
        return
    for number in range(width):
        rows[slot, word + number] = values[a + number, row]
    rows[slot, ordering] = values[column, row]
    if code == OpCode.MIN_BY_DECIMAL or code == OpCode.MAX_BY_DECIMAL:
        rows[slot, ordering + 1] = values[column + 1, row]
    rows[slot, ordering_flag_word] |= ordering_flag
    if valid[a, row] != 0:
        rows[slot, flag_word] |= flag
    else:
        rows[slot, flag_word] &= ~flag


@njit(void(u64_2, int64, int64, uint64, int64), cache=True, nogil=True)
def _add_hash(rows, slot, word, hashed, words):
    """Enter a hash in the registers: its first bits are the register's index, the number of zeros after them its rank."""
    bits = np.uint64(0)
    while (_ONE << bits) // np.uint64(10) + _ONE < np.uint64(words):
        bits += _ONE
    register = np.int64(hashed >> (np.uint64(64) - bits))
    remaining_bits = (hashed << bits) | (_ONE << (bits - _ONE))
    rank = _ONE
    while remaining_bits >> np.uint64(63) == _ZERO:
        remaining_bits <<= _ONE
        rank += _ONE
    at, shift = word + register // 10, np.uint64(register % 10 * 6)
    if (rows[slot, at] >> shift) & _REGISTER < rank:
        rows[slot, at] = (rows[slot, at] & ~(_REGISTER << shift)) | (rank << shift)


@njit(uint64(uint64, uint64), cache=True, nogil=True)
def _larger_registers(left_word, right_word):
    merged = _ZERO
    for number in range(10):
        shift = np.uint64(number * 6)
        left, right = (left_word >> shift) & _REGISTER, (right_word >> shift) & _REGISTER
        merged |= max(left, right) << shift
    return merged


@njit(void(int64, u64_2, int64, int64, u64_2, int64, int64, int64), cache=True, nogil=True)
def _step_words(code, rows, slot, word, values, a, row, words):
    """Move a state of many words by a row."""
    if code == OpCode.ADD_HASH:
        _add_hash(rows, slot, word, values[a, row], words)
    elif code == OpCode.MERGE_REGISTERS:
        for number in range(words):
            rows[slot, word + number] = _larger_registers(rows[slot, word + number], values[a + number, row])
    elif code == OpCode.SET_BIT:
        position = values[a, row]
        rows[slot, word + np.int64(position >> np.uint64(6))] |= _ONE << (position & np.uint64(63))
    elif code == OpCode.OR_WORDS:
        for number in range(words):
            rows[slot, word + number] |= values[a + number, row]
    else:
        raise ValueError("no state of words has a step of this code")


@njit(void(u64_2, f64_2), cache=True, nogil=True)
def sum_registers(registers, out):
    """Put into ``out``, for each row of registers, the sum of ``2**-register`` and the number of registers that are 0."""
    words = registers.shape[1]
    count = 1
    while count // 10 + 1 < words:
        count *= 2
    for row in range(registers.shape[0]):
        total, zeros = 0.0, 0.0
        for register in range(count):
            rank = (registers[row, register // 10] >> np.uint64(register % 10 * 6)) & _REGISTER
            total += 1.0 / np.float64(_ONE << rank)
            zeros += 1.0 if rank == _ZERO else 0.0
        out[row, 0] = total
        out[row, 1] = zeros


@njit(
    void(int64, u64_2, i64_2, int64, int64, int64, uint64, u64_2, int64, int64, i64_2, int64, u8_1, i64_1),
    cache=True, nogil=True, inline="always",
)  # fmt: skip
def _step_nested(code, rows, rows_i, slot, word, flag_word, flag, values, a, row, limits, parts, arena, offsets):
    """Keep the smaller or the larger of two arrays or structs."""
    new, old = np.int64(values[a, row]), rows_i[slot, word]
    is_first = rows[slot, flag_word] & flag == _ZERO
    order = 0 if is_first else compare_nested(arena, offsets, new, old, limits, parts)
    if is_first or (order < 0 if code == OpCode.MIN_NESTED else order > 0):
        rows_i[slot, word] = new
        rows[slot, flag_word] |= flag


@njit(
    void(int64, u64_2, f64_2, int64, int64, int64, uint64, u64_2, f64_2, int64, int64),
    cache=True, nogil=True, inline="always",
)  # fmt: skip
def _combine(code, rows, rows_f, slot, word, flag_word, flag, values, values_f, a, row):
    """Multiply, or combine the bits of, the group's value and the row's; the first value of a group stays as it is."""
    is_first = rows[slot, flag_word] & flag == _ZERO
    rows[slot, flag_word] |= flag
    if is_first:
        rows[slot, word] = values[a, row]
    elif code == OpCode.MULTIPLY_FLOAT:
        rows_f[slot, word] *= values_f[a, row]
    elif code == OpCode.AND_INT:
        rows[slot, word] &= values[a, row]
    elif code == OpCode.OR_INT:
        rows[slot, word] |= values[a, row]
    elif code == OpCode.XOR_INT:
        rows[slot, word] ^= values[a, row]
    else:
        raise ValueError("no accumulator combines values by this code")


@njit(
    void(i64_2, int64, u64_2, i64_2, f64_2, int64, u64_2, f64_2, u8_2, int64, i64_2, u8_1, i64_1),
    cache=True, nogil=True,
)  # fmt: skip
def fold_step(ops, n, rows, rows_i, rows_f, slot, values, values_f, valid, row, limits, arena, offsets):
    """Move accumulator ``n`` by one row: the steps that ``row_kernels`` does not have.

    Raises
    ------
    ValueError
        There is no step of that code.
    """
    code = ops[n, 0]
    a, b, c = ops[n, 1], ops[n, 2], ops[n, 3]
    word, flag_word, flag, extra = ops[n, 4], ops[n, 5], np.uint64(ops[n, 6]), ops[n, 7]
    present = valid[a, row] != 0
    if code == OpCode.MERGE_CO_MOMENTS:
        _merge_co_moments(rows_f, slot, word, values_f, a, row, extra)
    elif code == OpCode.ADD_INT_CHECKED:  # c the is_empty of a partial sum or -1
        if values[c, row] != _ZERO if c >= 0 else not present:
            return
        rows[slot, word + 1] = _ZERO
        if rows[slot, flag_word] & flag == _ZERO or not present:
            rows[slot, flag_word] &= ~flag  # overflowed, here or in the partial sum: null for good
            return
        _add_checked(rows, rows_i, slot, word, np.int64(values[a, row]), extra, flag_word, flag)
    elif (code >= OpCode.MIN_BY_INT and code <= OpCode.MAX_BY_STRING) or (
        code == OpCode.MIN_BY_NESTED or code == OpCode.MAX_BY_NESTED
    ):
        _step_by(ops, n, rows, rows_i, rows_f, slot, values, values_f, valid, row, limits, arena, offsets)
    elif code == OpCode.MIN_NESTED or code == OpCode.MAX_NESTED:  # b: the first line of the type's parts in `limits`
        if present:
            _step_nested(code, rows, rows_i, slot, word, flag_word, flag, values, a, row, limits, b, arena, offsets)
    elif code >= OpCode.COUNT_LONG and code <= OpCode.MERGE_BINS:
        if present:
            sketch_step(code, rows, rows_i, rows_f, slot, word, values, values_f, a, row, extra)
    elif code >= OpCode.ADD_HASH and code <= OpCode.OR_WORDS:
        if present:
            _step_words(code, rows, slot, word, values, a, row, extra)
    elif code == OpCode.CO_MOMENTS:
        if present and valid[b, row] != 0:
            _add_co_moments(rows_f, slot, word, values_f[a, row], values_f[b, row], extra)
    elif code >= OpCode.MULTIPLY_FLOAT and code <= OpCode.XOR_INT:
        if present:
            _combine(code, rows, rows_f, slot, word, flag_word, flag, values, values_f, a, row)
    else:
        raise ValueError("no accumulator has a step of this code")

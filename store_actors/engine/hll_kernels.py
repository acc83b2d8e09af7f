"""Compiled loops of HLL sketches: lists (``list_kernels.py``) of coupons, as Apache DataSketches makes them.

A coupon is a hash's first 26 bits and, above them, by how many zeros its rest begins, plus one. All distinct coupons are kept while
they are few; then, of those whose places in the registers are the same, the one with the most zeros. The first element is a marker,
below any coupon: bits 0 to 4 have the requested precision (``lg_k``), the bits above it that of the registers, 0 in coupon mode. Later
markers are of sketches that were merged in.

Lists are only appended to, so coupons may stand in them that count no more. A full list is rewritten without these, if that
gives it a quarter of its room back.
"""

from __future__ import annotations

import numpy as np
from numba import njit, void
from numba.types import Tuple, float64, int64, uint8, uint64

from store_actors.engine.list_kernels import _capacity

_LOW32 = np.uint64(0xFFFFFFFF)
_ZERO = np.uint64(0)
#: Coupons are not smaller.
_MARKS = np.uint64(1 << 26)
_KEY_MASK = np.uint64((1 << 26) - 1)
_S26 = np.uint64(26)
_S6 = np.uint64(6)
_S5 = np.uint64(5)
_PRECISION = np.uint64(31)
_SEED = np.uint64(9001)
#: Where registers begin in a sketch's bytes, and coupons in those of a small and of a middling one.
_REGISTERS_START, _LIST_START, _SET_START = 40, 8, 12

u64_1, u64_2, i64_1, u8_1, f64_1 = uint64[::1], uint64[:, ::1], int64[::1], uint8[::1], float64[::1]


# -- hashes -------------------------------------------------------------------------------------------------------------


@njit(uint64(uint64, int64), cache=True, nogil=True)
def _rotated(word, bits):
    return (word << np.uint64(bits)) | (word >> np.uint64(64 - bits))


@njit(uint64(uint64), cache=True, nogil=True)
def _mixed(word):
    word ^= word >> np.uint64(33)
    word *= np.uint64(0xFF51AFD7ED558CCD)
    word ^= word >> np.uint64(33)
    word *= np.uint64(0xC4CEB9FE1A85EC53)
    return word ^ (word >> np.uint64(33))


@njit(uint64(uint64), cache=True, nogil=True)
def _first_factor(word):
    return _rotated(word * np.uint64(0x87C37B91114253D5), 31) * np.uint64(0x4CF5AD432745937F)


@njit(uint64(uint64), cache=True, nogil=True)
def _second_factor(word):
    return _rotated(word * np.uint64(0x4CF5AD432745937F), 33) * np.uint64(0x87C37B91114253D5)


@njit(uint64(uint64, uint64, int64), cache=True, nogil=True)
def _coupon(h1, h2, length):
    """Return the coupon of a MurmurHash3 (128 bits, x64) before its last step."""
    h1 ^= np.uint64(length)
    h2 ^= np.uint64(length)
    h1 += h2
    h2 += h1
    h1, h2 = _mixed(h1), _mixed(h2)
    h1 += h2
    h2 += h1
    zeros = _ZERO
    while zeros < np.uint64(62) and (h2 << zeros) >> np.uint64(63) == _ZERO:
        zeros += np.uint64(1)
    return ((zeros + np.uint64(1)) << _S26) | (h1 & _KEY_MASK)


@njit(uint64(u8_1, int64, int64), cache=True, nogil=True)
def _word(data, at, count):
    word = _ZERO
    for byte in range(count):
        word |= np.uint64(data[at + byte]) << np.uint64(8 * byte)
    return word


@njit(void(u64_1, u64_1), cache=True, nogil=True)
def coupons_of_longs(values, out):
    """Compute the coupons of integers."""
    for row in range(values.shape[0]):
        out[row] = _coupon(_SEED ^ _first_factor(values[row]), _SEED, 8)


@njit(void(u8_1, i64_1, u64_1, u64_1), cache=True, nogil=True)
def coupons_of_texts(data, offsets, ids, out):
    """Compute the coupons of a pool's strings; that of the empty string, which is not counted, is 0."""
    for row in range(ids.shape[0]):
        begin, end = offsets[np.int64(ids[row])], offsets[np.int64(ids[row]) + 1]
        if begin == end:
            out[row] = _ZERO
            continue
        h1, h2, at = _SEED, _SEED, begin
        while end - at >= 16:
            h1 = _rotated(h1 ^ _first_factor(_word(data, at, 8)), 27) + h2
            h1 = h1 * np.uint64(5) + np.uint64(0x52DCE729)
            h2 = _rotated(h2 ^ _second_factor(_word(data, at + 8, 8)), 31) + h1
            h2 = h2 * np.uint64(5) + np.uint64(0x38495AB5)
            at += 16
        if end - at > 8:
            h2 ^= _second_factor(_word(data, at + 8, end - at - 8))
        h1 ^= _first_factor(_word(data, at, min(8, end - at)))
        out[row] = _coupon(h1, h2, end - begin)


# -- lists --------------------------------------------------------------------------------------------------------------


@njit(int64(uint64), cache=True, nogil=True)
def _most_coupons(lg_k):
    """Return the largest number of coupons without registers."""
    return 7 if lg_k < np.uint64(8) else 3 << (np.int64(lg_k) - 5)


@njit(int64(u64_1, int64, int64, u64_1), cache=True, nogil=True)
def combine(arena, offset, length, out):
    """Write a list without what counts no more to ``out``: its mark, then coupons in the order of their bits; returns how many."""
    if length == 0:
        return 0
    lg_k = arena[offset] & _PRECISION
    registers = _ZERO
    coupons, count = np.empty(length, np.uint64), 0
    for number in range(length):
        element = arena[offset + number] & _LOW32
        if element >= _MARKS:
            coupons[count] = element
            count += 1
        elif element >> _S5 != _ZERO and (registers == _ZERO or element >> _S5 < registers):
            registers = element >> _S5
    coupons = np.sort(coupons[:count])
    count = 0
    for number in range(coupons.shape[0]):
        if number == 0 or coupons[number] != coupons[number - 1]:
            coupons[count] = coupons[number]
            count += 1
    if registers == _ZERO and count > _most_coupons(lg_k):
        registers = lg_k
    registers = min(registers, lg_k)
    out[0] = (registers << _S5) | lg_k
    if registers == _ZERO:
        out[1 : count + 1] = coupons[:count]
        return count + 1
    register_mask = (np.uint64(1) << registers) - np.uint64(1)
    for number in range(count):
        coupons[number] = ((coupons[number] & register_mask) << _S6) | (coupons[number] >> _S26)
    coupons = np.sort(coupons[:count])
    kept = 1
    for number in range(count):
        if number + 1 == count or coupons[number] >> _S6 != coupons[number + 1] >> _S6:
            out[kept] = ((coupons[number] & np.uint64(63)) << _S26) | (coupons[number] >> _S6)
            kept += 1
    return kept


@njit(int64(u64_1, int64, u64_2, int64, int64, uint64), cache=True, nogil=True)
def _add(arena, used, rows, slot, word, element):
    """Add an element to the list at ``rows[slot, word]``; returns the words in use, or -1 without room."""
    offset, length = np.int64(rows[slot, word]), np.int64(rows[slot, word + 1])
    if length == _capacity(length):
        if used + max(2, 2 * length) > arena.shape[0]:
            return -1
        scratch = np.empty(max(1, length), np.uint64)
        kept = combine(arena, offset, length, scratch)
        if kept * 4 <= length * 3:
            length = kept
            arena[used : used + length] = scratch[:length]
        else:
            for step in range(length):
                arena[used + step] = arena[offset + step]
        offset = used
        used += _capacity(length + 1)
        rows[slot, word] = np.uint64(offset)
    arena[offset + length] = element
    rows[slot, word + 1] = np.uint64(length + 1)
    return used


@njit(
    Tuple((int64, int64, int64))(
        u64_1, int64, u64_2, i64_1, int64, u64_1, i64_1, i64_1, int64, int64, int64
    ),
    cache=True, nogil=True,
)  # fmt: skip
def merge(arena, used, rows, slots, word, source, begins, lengths, may_differ, start, element):
    """Add lists of another arena (``source``) to those at ``rows[slots, word]``, from the given element of row ``start`` on.

    Stops when the arena is full, or at a sketch of another precision unless these may differ; returns (row, element, words in use), and
    of the latter -1 - words.
    """
    for row in range(start, slots.shape[0]):
        slot = slots[row]
        while element < lengths[row]:
            coupon = source[begins[row] + element] & _LOW32
            if coupon < _MARKS and rows[slot, word + 1] != _ZERO:
                head = arena[np.int64(rows[slot, word])] & _LOW32
                if may_differ == 0 and (head ^ coupon) & _PRECISION != _ZERO:
                    return row, element, -1 - used
                if coupon == head or coupon >> _S5 == _ZERO:
                    element += 1
                    continue
            after = _add(arena, used, rows, slot, word, coupon)
            if after < 0:
                return row, element, used
            used = after
            element += 1
        element = 0
    return slots.shape[0], 0, used


# -- bytes --------------------------------------------------------------------------------------------------------------


@njit(int64(u8_1, i64_1, u64_1, u8_1, int64, u64_1, i64_1), cache=True, nogil=True)
def open_sketches(data, offsets, ids, valid, writes, out, lengths):
    """Write the elements of a pool's sketches, one after the other (if ``writes``), and how many each has; return the total number.

    They are as Spark's ``hll_union`` writes them: registers of a byte, and room for more coupons, which are 0 there.
    """
    total = 0
    for row in range(ids.shape[0]):
        lengths[row] = 0
        if valid[row] == 0:
            continue
        begin, end = offsets[np.int64(ids[row])], offsets[np.int64(ids[row]) + 1]
        lg_k, mode, first = np.uint64(data[begin + 3]), data[begin + 7] & 3, total
        if writes:
            out[total] = (lg_k << _S5 if mode == 2 else _ZERO) | lg_k
        total += 1
        if mode == 2:
            for register in range(1 << np.int64(lg_k)):
                zeros = np.uint64(data[begin + _REGISTERS_START + register])
                if zeros != _ZERO:
                    if writes:
                        out[total] = (zeros << _S26) | np.uint64(register)
                    total += 1
        else:
            for at in range(begin + (_SET_START if mode == 1 else _LIST_START), end - 3, 4):
                coupon = _word(data, at, 4)
                if coupon != _ZERO:
                    if writes:
                        out[total] = coupon
                    total += 1
        lengths[row] = total - first
    return total


@njit(void(u64_1, i64_1, int64, u64_1, i64_1), cache=True, nogil=True)
def marked(elements, ends, lg_k, out, out_ends):
    """Write lists, which end at ``ends``, without elements that no longer count; of an empty list the mark of an empty sketch."""
    begin = filled = 0
    for row in range(ends.shape[0]):
        kept = combine(elements, begin, ends[row] - begin, out[filled:])
        if kept == 0:
            out[filled] = np.uint64(lg_k)
            kept = 1
        filled += kept
        out_ends[row] = filled
        begin = ends[row]


@njit(void(u8_1, int64, uint64, int64), cache=True, nogil=True)
def _put(out, at, word, count):
    for byte in range(count):
        out[at + byte] = np.uint8((word >> np.uint64(8 * byte)) & np.uint64(255))


@njit(void(u64_1, i64_1, int64, i64_1, u8_1), cache=True, nogil=True)
def write_sketches(elements, ends, writes, sizes, out):
    """Write the bytes of sketches of :func:`marked`, one after the other (if ``writes``), and how many each has."""
    begin = at = 0
    harmonic = np.zeros(2, np.float64)
    for row in range(ends.shape[0]):
        count = ends[row] - begin - 1
        lg_k, registers = elements[begin] & _PRECISION, elements[begin] >> _S5
        # As coupons: a list, or (from 8 on) a set; as registers: in no order, so that their estimate is of the registers alone.
        mode = 2 if registers != _ZERO else (1 if count >= 8 else 0)
        head = _REGISTERS_START if mode == 2 else (_SET_START if mode == 1 else _LIST_START)
        sizes[row] = head + (1 << np.int64(registers) if mode == 2 else 4 * count)
        if writes:
            _put(out, at, np.uint64(10 if mode == 2 else 2 + mode), 1)
            out[at + 1], out[at + 2] = 1, 7
            out[at + 3] = registers if mode == 2 else lg_k
            out[at + 4] = 0 if mode == 2 else (5 if mode == 1 else 3)
            out[at + 5] = 16 if mode == 2 else (12 if count == 0 else 8)
            out[at + 6] = count if mode == 0 else 0
            out[at + 7] = 8 | mode
            if mode == 1:
                _put(out, at + 8, np.uint64(count), 4)
            for number in range(count):
                coupon = elements[begin + 1 + number]
                if mode == 2:
                    out[at + head + np.int64(coupon & _KEY_MASK)] = coupon >> _S26
                else:
                    _put(out, at + head + 4 * number, coupon, 4)
            if mode == 2:
                # As Spark's own that were merged: the smallest register, and how many there are of it.
                at_least = (1 << np.int64(registers)) - count
                harmonic[0], harmonic[1] = np.float64(at_least), 0.0
                least = 0 if at_least > 0 else 63
                for number in range(count):
                    power = np.int64(elements[begin + 1 + number] >> _S26)
                    harmonic[0 if power < 32 else 1] += 2.0 ** -np.float64(power)
                    if power < least:
                        least, at_least = power, 0
                    if power == least:
                        at_least += 1
                out[at + 6] = least
                sums = harmonic.view(np.uint64)
                _put(out, at + 16, sums[0], 8)
                _put(out, at + 24, sums[1], 8)
                _put(out, at + 32, np.uint64(at_least), 4)
        at += sizes[row]
        begin = ends[row]

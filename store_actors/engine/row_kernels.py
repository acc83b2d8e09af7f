"""Compiled loops that read and change the rows of a table: whole rows, and groups into which batches are folded.

``index_kernels.py`` has the layout of index and rows. A loop that writes stops when one of them is out of room, and goes on where it
stopped once there is more.

Folding: rows of a batch find their group, or make it, and move its accumulators. The commonest steps of accumulators are here, the
others in ``fold_kernels.py`` and ``sketch_kernels.py``.
"""

from __future__ import annotations

import numpy as np
from numba import njit, void
from numba.types import Tuple, boolean, float64, int64, uint8, uint32, uint64

from store_actors.engine.fold_kernels import add_moments, bytes_less, decimal_less, fold_step, merge_moments
from store_actors.engine.hash_kernels import hash_row
from store_actors.engine.index_kernels import (
    _BLOCK,
    _LOW32,
    _ONE,
    _S32,
    _ZERO,
    LIVE,
    _find,
    claim_slot,
    home,
    tag_block,
)
from store_actors.engine.machine_kernels import prefetch
from store_actors.engine.op_code_kernels import OpCode

#: Rows that are on their way to the cache.
_AHEAD = 24
ACCUMULATE_WORDS = 12  # columns of the `ops` table of `accumulate`

u8_1, u8_2, u64_1, u64_2 = uint8[::1], uint8[:, ::1], uint64[::1], uint64[:, ::1]
i64_1, i64_2, f64_2, bool_1 = int64[::1], int64[:, ::1], float64[:, ::1], boolean[::1]


@njit(
    int64(u64_1, u64_2, u64_2, uint64, int64, int64, u64_1, int64, i64_1, i64_1, int64, i64_1),
    cache=True, nogil=True,
)  # fmt: skip
def put(index, rows, new_rows, key_mask, first, key_words, secret, start, free, counters, spare_entries, out):
    """Store whole rows ``start..`` (their words already laid out), replacing those of the same key; ``out`` gets their slots.

    Stops when out of room; returns the first row not stored.
    """
    added = np.int64(0)
    for row in range(start, new_rows.shape[0]):
        nulls = new_rows[row, 0] & key_mask
        tag = hash_row(new_rows, row, first, key_words, nulls, secret)
        begin = home(tag, index)
        position = _find(index, rows, new_rows, row, first, first, key_words, nulls, key_mask, tag, begin)
        if position >= 0:
            slot = np.int64(index[position] & _LOW32) - 1
        else:
            slot = claim_slot(rows.shape[0], free, counters, spare_entries - added)
            if slot < 0:
                return row
            index[-1 - position] = (tag << _S32) | np.uint64(slot + 1)
            added += 1
        for word in range(rows.shape[1]):
            rows[slot, word] = new_rows[row, word]
        rows[slot, 0] |= LIVE
        out[row] = slot
    return new_rows.shape[0]


@njit(
    Tuple((int64, int64, int64))(
        u64_1, u64_2, u64_2, u64_2, u64_1, uint64, int64, u64_1, int64, uint32, i64_1, i64_1, int64, i64_1, i64_1, u64_2,
        i64_1, boolean, i64_1,
    ),
    cache=True, nogil=True,
)  # fmt: skip
def upsert(
    index, rows, new_rows, keys, nulls, key_mask, first, secret, start, stamp, free, counters, spare_entries, created,
    undo_slots, undo_rows, progress, only_new, sources,
):  # fmt: skip
    """Write whole rows ``start..`` under `stamp`, keeping what they overwrite (and where) unless that has the same stamp.

    ``progress`` is (created, undone) so far in this call. Stops early when a new key finds no free slot or no room in
    the index. Of rows with the same key the last one stays. With ``only_new`` those are written whose key is not there yet, and of rows
    with the same key the first one; ``sources`` gets the rows that the created ones come from.

    Returns
    -------
    tuple
        (first row not written, created, undone)
    """
    total = keys.shape[0]
    n_created, n_undone = progress[0], progress[1]
    added = np.int64(0)
    tags, positions = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64)
    stamp_word = np.uint64(stamp) << _S32
    block = start
    while block < total:
        end = min(block + _BLOCK, total)
        tag_block(index, rows, keys, nulls, secret, block, end, tags, positions)
        for row in range(block, end):
            tag, begin = tags[row - block], positions[row - block]
            position = _find(index, rows, keys, row, first, 0, keys.shape[1], nulls[row], key_mask, tag, begin)
            if position >= 0:
                if only_new:
                    continue
                slot = np.int64(index[position] & _LOW32) - 1
                if rows[slot, 0] >> _S32 != np.uint64(stamp):
                    undo_slots[n_undone] = slot
                    for word in range(rows.shape[1]):
                        undo_rows[n_undone, word] = rows[slot, word]
                    n_undone += 1
            else:
                slot = claim_slot(rows.shape[0], free, counters, spare_entries - added)
                if slot < 0:
                    return row, n_created, n_undone
                index[-1 - position] = (tag << _S32) | np.uint64(slot + 1)
                added += 1
                created[n_created] = slot
                if only_new:
                    sources[n_created] = row
                n_created += 1
            for word in range(1, rows.shape[1]):
                rows[slot, word] = new_rows[row, word]
            rows[slot, 0] = (new_rows[row, 0] & _LOW32) | LIVE | stamp_word
        block = end
    return total, n_created, n_undone


@njit(int64(u64_2, u8_1, int64, int64, i64_1, u64_2, int64), cache=True, nogil=True)
def take_columns(rows, chosen, begin, end, words, out, count):
    """Copy some words of the rows from `begin` up to `end` that are chosen, a line of ``out`` for each word, from `count` on.

    Returns how many there are in ``out`` then.
    """
    for slot in range(begin, end):
        if chosen[slot]:
            for column in range(words.shape[0]):
                word = words[column]
                out[word, count] = rows[slot, word]
            count += 1
    return count


@njit(void(u64_2, i64_1, int64), cache=True, nogil=True, inline="always")
def _prefetch_ahead(rows, slots, number):
    """Prefetch the row that is looked at some rows after that of a number."""
    at = max(slots[min(number + _AHEAD, slots.shape[0] - 1)], 0) * rows.shape[1]
    prefetch(rows, at)
    prefetch(rows, at + rows.shape[1] - 1)


@njit(void(u64_2, i64_1, int64, int64, u64_2), cache=True, nogil=True)
def gather(rows, slots, begin, end, out):
    """Copy the rows at the slots ``begin..end``, their first words to a line of ``out`` each; zeros for slot -1."""
    for number in range(begin, end):
        _prefetch_ahead(rows, slots, number)
        slot, is_row = max(slots[number], 0), slots[number] >= 0
        for word in range(out.shape[0]):
            value = rows[slot, word]
            out[word, number] = value if is_row else _ZERO


@njit(void(u64_2, i64_1, u64_2, uint64, bool_1), cache=True, nogil=True)
def differing(rows, slots, before, mask, out):
    """Find which of the rows at some slots are other ones than before; of word 0 only the bits of `mask` count. Slot -1: no row."""
    for number in range(slots.shape[0]):
        _prefetch_ahead(rows, slots, number)
        slot = max(slots[number], 0)
        differs = (rows[slot, 0] ^ before[number, 0]) & mask
        for word in range(1, rows.shape[1]):
            differs |= rows[slot, word] ^ before[number, word]
        out[number] = differs != _ZERO and slots[number] >= 0


@njit(void(u64_2, i64_2, int64, int64, uint64, int64, i64_2, int64, int64, uint64), cache=True, nogil=True)
def _add_decimal(rows, rows_i, slot, word, low, high, limits, limit, flag_word, flag):
    """Add 128-bit integers. A sum beyond the precision (``limits[limit]``: 10**precision - 1 as high, low) becomes null."""
    total_low = rows[slot, word] + low
    carry = np.int64(1) if total_low < low else np.int64(0)
    before = rows_i[slot, word + 1]
    total_high = np.int64(np.uint64(before) + np.uint64(high) + np.uint64(carry))
    wrapped = (before >= 0) == (high >= 0) and (total_high >= 0) != (before >= 0)
    rows[slot, word] = total_low
    rows_i[slot, word + 1] = total_high
    if total_high < 0:  # compare magnitudes
        total_low = ~total_low + _ONE
        total_high = np.int64(~np.uint64(total_high) + (_ONE if total_low == _ZERO else _ZERO))
    if wrapped or decimal_less(np.uint64(limits[limit, 1]), limits[limit, 0], total_low, total_high):
        rows[slot, flag_word] &= ~flag


@njit(
    void(i64_2, int64, u64_2, i64_2, f64_2, int64, u64_2, f64_2, u8_2, int64, i64_2, u8_1, i64_1),
    cache=True, nogil=True,
)  # fmt: skip
def _step(ops, n, rows, rows_i, rows_f, slot, values, values_f, valid, row, limits, arena, offsets):
    """Move accumulator ``n`` by one row. Codes that are not here are steps of `_fold_block` or of `fold_step`."""
    code = ops[n, 0]
    a, b, c = ops[n, 1], ops[n, 2], ops[n, 3]
    word = ops[n, 4]
    flag_word, flag = ops[n, 5], np.uint64(ops[n, 6])
    present = a < 0 or valid[a, row] != 0
    if code == OpCode.ADD_DECIMAL:  # a, b the two words, c the is_empty of a partial sum or -1
        if c >= 0:
            if values[c, row] != _ZERO:
                return
        elif not present:
            return
        rows[slot, word + 2] = _ZERO
        if rows[slot, flag_word] & flag == _ZERO or not present:
            rows[slot, flag_word] &= ~flag  # overflowed, here or in the partial sum: null for good
            return
        _add_decimal(
            rows, rows_i, slot, word, values[a, row], np.int64(values[b, row]), limits, ops[n, 7], flag_word, flag
        )
    elif code == OpCode.MIN_INT or code == OpCode.MAX_INT:
        if present:
            x = np.int64(values[a, row])
            current = rows_i[slot, word]
            if rows[slot, flag_word] & flag == _ZERO or (x < current if code == OpCode.MIN_INT else x > current):
                rows_i[slot, word] = x
                rows[slot, flag_word] |= flag
    elif code == OpCode.MIN_FLOAT or code == OpCode.MAX_FLOAT:  # NaN is larger than every number (Spark's ordering)
        if present:
            y = values_f[a, row]
            now = rows_f[slot, word]
            if code == OpCode.MIN_FLOAT:
                better = y < now or (np.isnan(now) and not np.isnan(y))
            else:
                better = y > now or (np.isnan(y) and not np.isnan(now))
            if rows[slot, flag_word] & flag == _ZERO or better:
                rows_f[slot, word] = y
                rows[slot, flag_word] |= flag
    elif code == OpCode.MIN_DECIMAL or code == OpCode.MAX_DECIMAL:
        if present:
            low, high = values[a, row], np.int64(values[b, row])
            if code == OpCode.MIN_DECIMAL:
                better = decimal_less(low, high, rows[slot, word], rows_i[slot, word + 1])
            else:
                better = decimal_less(rows[slot, word], rows_i[slot, word + 1], low, high)
            if rows[slot, flag_word] & flag == _ZERO or better:
                rows[slot, word] = low
                rows_i[slot, word + 1] = high
                rows[slot, flag_word] |= flag
    elif code == OpCode.MIN_STRING or code == OpCode.MAX_STRING:
        if present:
            new, old = np.int64(values[a, row]), rows_i[slot, word]
            first_value = rows[slot, flag_word] & flag == _ZERO
            if first_value or (
                bytes_less(arena, offsets, new, old)
                if code == OpCode.MIN_STRING
                else bytes_less(arena, offsets, old, new)
            ):
                rows_i[slot, word] = new
                rows[slot, flag_word] |= flag
    elif (
        code == OpCode.FIRST or code == OpCode.LAST
    ):  # c the value_set of a partial or -1; ops[n, 8]: nulls are skipped
        width = ops[n, 7]
        is_used = values[c, row] != _ZERO if c >= 0 else (present or ops[n, 8] == 0)
        if is_used and (code == OpCode.LAST or rows[slot, word + width] == _ZERO):
            rows[slot, word] = values[a, row]
            if width == 2:
                rows[slot, word + 1] = values[b, row]
            rows[slot, word + width] = _ONE
            if present:
                rows[slot, flag_word] |= flag
            else:
                rows[slot, flag_word] &= ~flag
    elif code == OpCode.MOMENTS:
        if present:
            add_moments(rows_f, slot, word, values_f[a, row], ops[n, 7])
    elif code == OpCode.MERGE_MOMENTS:
        merge_moments(rows_f, slot, word, values_f, a, row, ops[n, 7])
    else:
        fold_step(ops, n, rows, rows_i, rows_f, slot, values, values_f, valid, row, limits, arena, offsets)


@njit(
    void(i64_2, u64_2, i64_2, f64_2, i64_1, u64_2, f64_2, u8_2, int64, int64, i64_2, u8_1, i64_1),
    cache=True, nogil=True,
)  # fmt: skip
def _fold_block(ops, rows, rows_i, rows_f, slots, values, values_f, valid, begin, end, limits, arena, offsets):
    """Move every accumulator by rows ``begin..end``, whose groups are ``slots``; their rows are in the cache now."""
    for n in range(ops.shape[0]):
        code, a, word = ops[n, 0], ops[n, 1], ops[n, 4]
        flag_word, flag = ops[n, 5], np.uint64(ops[n, 6])
        # The commonest steps get a loop without a branch per row on the code.
        if code == OpCode.COUNT:
            for row in range(begin, end):
                rows_i[slots[row - begin], word] += 1 if a < 0 else np.int64(valid[a, row])
        elif code == OpCode.ADD_INT:
            for row in range(begin, end):
                if valid[a, row] != 0:
                    slot = slots[row - begin]
                    rows[slot, word] += values[a, row]
                    rows[slot, flag_word] |= flag
        elif code == OpCode.ADD_FLOAT:
            for row in range(begin, end):
                if valid[a, row] != 0:
                    slot = slots[row - begin]
                    rows_f[slot, word] += values_f[a, row]
                    rows[slot, flag_word] |= flag
        else:
            for row in range(begin, end):
                _step(ops, n, rows, rows_i, rows_f, slots[row - begin], values, values_f, valid, row, limits, arena,
                      offsets)  # fmt: skip


@njit(
    Tuple((int64, int64, int64))(
        u64_1, u64_2, u64_2, u64_1, uint64, int64, u64_1, int64, u64_2, u8_2, i64_2, i64_2, u8_1, i64_1, u64_1,
        uint32, i64_1, i64_1, int64, i64_1, i64_1, u64_2, i64_1,
    ),
    cache=True, nogil=True,
)  # fmt: skip
def accumulate(
    index, rows, keys, nulls, key_mask, first, secret, start, values, valid, ops, limits, arena, offsets, initial,
    stamp, free, counters, spare_entries, created, undo_slots, undo_rows, progress,
):  # fmt: skip
    """Fold rows ``start..`` of a batch into the table.

    ``counters`` is (slots ever used, free slots); ``progress`` is (created, undone) so far in this version. Stops early
    when a new key finds no free slot or no room in the index.

    Returns
    -------
    tuple
        (first row not folded, created, undone)
    """
    rows_i = rows.view(np.int64)
    rows_f = rows.view(np.float64)
    values_f = values.view(np.float64)
    total = keys.shape[0]
    n_created, n_undone = progress[0], progress[1]
    added = np.int64(0)
    tags, positions = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64)
    slots = np.empty(_BLOCK, np.int64)
    stamp_word = np.uint64(stamp) << _S32
    block = start
    while block < total:
        end = min(block + _BLOCK, total)
        tag_block(index, rows, keys, nulls, secret, block, end, tags, positions)
        for row in range(block, end):
            tag, begin = tags[row - block], positions[row - block]
            position = _find(index, rows, keys, row, first, 0, keys.shape[1], nulls[row], key_mask, tag, begin)
            if position >= 0:
                slot = np.int64(index[position] & _LOW32) - 1
                if rows[slot, 0] >> _S32 != np.uint64(stamp):
                    undo_slots[n_undone] = slot
                    for word in range(rows.shape[1]):
                        undo_rows[n_undone, word] = rows[slot, word]
                    n_undone += 1
                    rows[slot, 0] = (rows[slot, 0] & _LOW32) | stamp_word
            else:
                slot = claim_slot(rows.shape[0], free, counters, spare_entries - added)
                if slot < 0:
                    _fold_block(
                        ops, rows, rows_i, rows_f, slots, values, values_f, valid, block, row, limits, arena, offsets
                    )
                    return row, n_created, n_undone
                for word in range(rows.shape[1]):
                    rows[slot, word] = initial[word]
                rows[slot, 0] |= stamp_word | LIVE | nulls[row]
                for word in range(keys.shape[1]):
                    rows[slot, first + word] = keys[row, word]
                index[-1 - position] = (tag << _S32) | np.uint64(slot + 1)
                added += 1
                created[n_created] = slot
                n_created += 1
            slots[row - block] = slot
        _fold_block(ops, rows, rows_i, rows_f, slots, values, values_f, valid, block, end, limits, arena, offsets)
        block = end
    return total, n_created, n_undone

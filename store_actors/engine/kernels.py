"""Compiled loops of the shard engine: hash index, accumulate, evict, undo. No Python object is touched in here.

Everything a shard holds is 64-bit words, so one set of compiled signatures serves every schema and nothing is ever
compiled inside a batch: signatures are explicit, code is compiled (or read from its cache) when the module is imported.

Row layout, ``rows[slot]``::

    word 0          bits 0..30 null/valid flags (a key's bit: it is null; a state field's bit: it is valid),
                    bit 31 the row is live, bits 32..63 the version stamp that touched it last
    words 1..       further flag words, when a schema has more than 31 fields
    next words      key words, then state words (``layout.py`` assigns them)

A row sits in one or two cache lines, so an upsert costs two cache misses: one in the index, one in the row.

Index: open addressing with linear probing over ``tag << 32 | slot + 1`` (0 is empty). The tag is a keyed hash
(``hash_kernels.py``): every loop that looks up takes the table's ``secret``. The home position is the tag's top bits, which makes
growth a sequential pass and lets deletion shift entries back instead of leaving tombstones.
"""

from __future__ import annotations

import numpy as np
from numba import njit, void
from numba.types import Tuple, boolean, float64, int64, uint8, uint32, uint64

from store_actors.engine.fold_kernels import bytes_less, decimal_less, fold_step
from store_actors.engine.hash_kernels import hash_row

__all__ = [
    "ACCUMULATE_WORDS",
    "FLAG_BITS",
    "LIVE",
    "accumulate",
    "evict",
    "grow_index",
    "index_shift",
    "insert",
    "live_slots",
    "lookup",
    "put",
    "reindex",
    "remove",
    "upsert",
]

LIVE = np.uint64(1 << 31)
FLAG_BITS = 31
ACCUMULATE_WORDS = 12  # columns of the `ops` table of `accumulate`

_LOW32 = np.uint64(0xFFFFFFFF)
_S32 = np.uint64(32)
_ONE = np.uint64(1)
_ZERO = np.uint64(0)
#: A number that nothing comes to: what is compared with it only keeps loads from being optimised away.
_NEVER = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 256

u64_1 = uint64[::1]
u64_2 = uint64[:, ::1]
i64_1 = int64[::1]
i64_2 = int64[:, ::1]
u8_1 = uint8[::1]
f64_2 = float64[:, ::1]
u8_2 = uint8[:, ::1]


@njit(uint64(int64), cache=True, nogil=True)
def index_shift(size):
    bits = 0
    while (1 << bits) < size:
        bits += 1
    return np.uint64(32 - bits)


@njit(boolean(u64_2, int64, u64_2, int64, uint64, uint64, int64), cache=True, nogil=True, inline="always")
def _same_key(rows, slot, keys, row, nulls, key_mask, first):
    if rows[slot, 0] & key_mask != nulls:
        return False
    for word in range(keys.shape[1]):
        if rows[slot, first + word] != keys[row, word]:
            return False
    return True


@njit(void(u64_1, u64_1), cache=True, nogil=True)
def grow_index(old, new):
    """Re-insert every entry of `old` into the empty, larger `new`."""
    size = new.shape[0]
    mask = np.uint64(size - 1)
    shift = index_shift(size)
    for position in range(old.shape[0]):
        entry = old[position]
        if entry != _ZERO:
            place = (entry >> _S32) >> shift
            while new[place] != _ZERO:
                place = (place + _ONE) & mask
            new[place] = entry


@njit(int64(u64_1, u64_2, u64_2, int64, uint64, uint64, int64, uint64, uint64), cache=True, nogil=True)
def _find(index, rows, keys, row, nulls, key_mask, first, tag, shift):
    """Position in the index of the row's key, or -1 - position of the empty place where it belongs."""
    mask = np.uint64(index.shape[0] - 1)
    place = tag >> shift
    while True:
        entry = index[place]
        if entry == _ZERO:
            return -1 - np.int64(place)
        if entry >> _S32 == tag and _same_key(rows, np.int64(entry & _LOW32) - 1, keys, row, nulls, key_mask, first):
            return np.int64(place)
        place = (place + _ONE) & mask


@njit(void(u64_1, u64_2, u64_2, u64_1, uint64, int64, u64_1, i64_1), cache=True, nogil=True)
def lookup(index, rows, keys, nulls, key_mask, first, secret, out):
    """Slot of each key, -1 where there is none."""
    shift = index_shift(index.shape[0])
    tags = np.empty(_BLOCK, np.uint64)
    for block in range(0, keys.shape[0], _BLOCK):
        end = min(block + _BLOCK, keys.shape[0])
        for row in range(block, end):
            tags[row - block] = hash_row(keys, row, 0, keys.shape[1], nulls[row], secret)
        for row in range(block, end):  # as in `accumulate`: overlap the cache misses
            entry = index[tags[row - block] >> shift]
            out[row] = np.int64(rows[np.int64(entry & _LOW32) - 1, 0] >> _S32) if entry != _ZERO else 0
        for row in range(block, end):
            place = _find(index, rows, keys, row, nulls[row], key_mask, first, tags[row - block], shift)
            out[row] = np.int64(index[place] & _LOW32) - 1 if place >= 0 else -1


@njit(void(u64_2, i64_2, int64, int64, uint64, int64, i64_2, int64, int64, uint64), cache=True, nogil=True)
def _add_decimal(rows, rows_i, slot, word, low, high, limits, limit, flag_word, flag):
    """128-bit add; beyond the precision (``limits[limit]``: 10**precision - 1 as high, low) the sum becomes null."""
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
    """Move accumulator ``n`` by one row; kinds are numbered in ``accumulators.OpCode`` (those missing: `_fold_block`, `fold_step`)."""
    kind = ops[n, 0]
    a, b, c = ops[n, 1], ops[n, 2], ops[n, 3]
    word = ops[n, 4]
    flag_word, flag = ops[n, 5], np.uint64(ops[n, 6])
    present = a < 0 or valid[a, row] != 0
    if kind == 3:  # ADD_DECIMAL: a, b the two words, c the is_empty of a partial sum or -1
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
    elif kind == 4 or kind == 5:  # MIN_INT, MAX_INT
        if present:
            x = np.int64(values[a, row])
            current = rows_i[slot, word]
            if rows[slot, flag_word] & flag == _ZERO or (x < current if kind == 4 else x > current):
                rows_i[slot, word] = x
                rows[slot, flag_word] |= flag
    elif kind == 6 or kind == 7:  # MIN_FLOAT, MAX_FLOAT: NaN is larger than every number (Spark's ordering)
        if present:
            y = values_f[a, row]
            now = rows_f[slot, word]
            if kind == 6:
                better = y < now or (np.isnan(now) and not np.isnan(y))
            else:
                better = y > now or (np.isnan(y) and not np.isnan(now))
            if rows[slot, flag_word] & flag == _ZERO or better:
                rows_f[slot, word] = y
                rows[slot, flag_word] |= flag
    elif kind == 8 or kind == 9:  # MIN_DECIMAL, MAX_DECIMAL
        if present:
            low, high = values[a, row], np.int64(values[b, row])
            if kind == 8:
                better = decimal_less(low, high, rows[slot, word], rows_i[slot, word + 1])
            else:
                better = decimal_less(rows[slot, word], rows_i[slot, word + 1], low, high)
            if rows[slot, flag_word] & flag == _ZERO or better:
                rows[slot, word] = low
                rows_i[slot, word + 1] = high
                rows[slot, flag_word] |= flag
    elif kind == 10 or kind == 11:  # MIN_STRING, MAX_STRING
        if present:
            new, old = np.int64(values[a, row]), rows_i[slot, word]
            first_value = rows[slot, flag_word] & flag == _ZERO
            if first_value or (
                bytes_less(arena, offsets, new, old) if kind == 10 else bytes_less(arena, offsets, old, new)
            ):
                rows_i[slot, word] = new
                rows[slot, flag_word] |= flag
    elif kind == 12 or kind == 13:  # FIRST, LAST: c the value_set of a partial or -1; ops[n, 8]: nulls are skipped
        width = ops[n, 7]
        taken = values[c, row] != _ZERO if c >= 0 else (present or ops[n, 8] == 0)
        if taken and (kind == 13 or rows[slot, word + width] == _ZERO):
            rows[slot, word] = values[a, row]
            if width == 2:
                rows[slot, word + 1] = values[b, row]
            rows[slot, word + width] = _ONE
            if present:
                rows[slot, flag_word] |= flag
            else:
                rows[slot, flag_word] &= ~flag
    elif kind == 14:  # MOMENTS of a raw value: Welford, in the order Spark's CentralMomentAgg computes it
        if present:
            x_f = values_f[a, row]
            count = rows_f[slot, word] + 1.0
            delta = x_f - rows_f[slot, word + 1]
            delta_n = delta / count
            rows_f[slot, word] = count
            rows_f[slot, word + 1] += delta_n
            rows_f[slot, word + 2] += delta * (delta - delta_n)
    elif kind == 15:  # MERGE_MOMENTS, of a partial (n, avg, m2): Chan et al., as Spark merges
        n1, n2 = rows_f[slot, word], values_f[a, row]
        if n2 > 0.0:
            total = n1 + n2
            delta = values_f[b, row] - rows_f[slot, word + 1]
            delta_n = delta / total
            rows_f[slot, word] = total
            rows_f[slot, word + 1] += delta_n * n2
            rows_f[slot, word + 2] += values_f[c, row] + delta * delta_n * n1 * n2
    else:
        fold_step(ops, n, rows, rows_i, rows_f, slot, values, values_f, valid, row, limits, arena, offsets)


@njit(
    void(i64_2, u64_2, i64_2, f64_2, i64_1, u64_2, f64_2, u8_2, int64, int64, i64_2, u8_1, i64_1),
    cache=True, nogil=True,
)  # fmt: skip
def _fold_block(ops, rows, rows_i, rows_f, slots, values, values_f, valid, begin, end, limits, arena, offsets):
    """Move every accumulator by rows ``begin..end``, whose groups are ``slots``; their rows are in the cache now."""
    for n in range(ops.shape[0]):
        kind, a, word = ops[n, 0], ops[n, 1], ops[n, 4]
        flag_word, flag = ops[n, 5], np.uint64(ops[n, 6])
        # The commonest kinds get a loop without a branch per row on the kind.
        if kind == 0:  # COUNT
            for row in range(begin, end):
                rows_i[slots[row - begin], word] += 1 if a < 0 else np.int64(valid[a, row])
        elif kind == 1:  # ADD_INT
            for row in range(begin, end):
                if valid[a, row] != 0:
                    slot = slots[row - begin]
                    rows[slot, word] += values[a, row]
                    rows[slot, flag_word] |= flag
        elif kind == 2:  # ADD_FLOAT
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
    stamp, free, counters, index_room, created, undo_slots, undo_rows, progress,
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
    shift = index_shift(index.shape[0])
    n_created, n_undone = progress[0], progress[1]
    added = np.int64(0)
    tags = np.empty(_BLOCK, np.uint64)
    slots = np.empty(_BLOCK, np.int64)
    stamp_word = np.uint64(stamp) << _S32
    warmth = _ZERO
    block = start
    while block < total:
        end = min(block + _BLOCK, total)
        # Independent loads first: the processor overlaps their cache misses, which a loop that depends on each
        # probe before starting the next could not.
        for row in range(block, end):
            tags[row - block] = hash_row(keys, row, 0, keys.shape[1], nulls[row], secret)
        for row in range(block, end):
            entry = index[tags[row - block] >> shift]
            if entry != _ZERO:
                warmth ^= rows[np.int64(entry & _LOW32) - 1, 0]
        for row in range(block, end):
            tag = tags[row - block]
            place = _find(index, rows, keys, row, nulls[row], key_mask, first, tag, shift)
            if place >= 0:
                slot = np.int64(index[place] & _LOW32) - 1
                if rows[slot, 0] >> _S32 != np.uint64(stamp):
                    undo_slots[n_undone] = slot
                    for word in range(rows.shape[1]):
                        undo_rows[n_undone, word] = rows[slot, word]
                    n_undone += 1
                    rows[slot, 0] = (rows[slot, 0] & _LOW32) | stamp_word
            else:
                if added < index_room and counters[1] > 0:
                    counters[1] -= 1
                    slot = free[counters[1]]
                elif added < index_room and counters[0] < rows.shape[0]:
                    slot = counters[0]
                    counters[0] += 1
                else:
                    _fold_block(
                        ops, rows, rows_i, rows_f, slots, values, values_f, valid, block, row, limits, arena, offsets
                    )
                    return row, n_created, n_undone
                for word in range(rows.shape[1]):
                    rows[slot, word] = initial[word]
                rows[slot, 0] |= stamp_word | LIVE | nulls[row]
                for word in range(keys.shape[1]):
                    rows[slot, first + word] = keys[row, word]
                index[-1 - place] = (tag << _S32) | np.uint64(slot + 1)
                added += 1
                created[n_created] = slot
                n_created += 1
            slots[row - block] = slot
        _fold_block(ops, rows, rows_i, rows_f, slots, values, values_f, valid, block, end, limits, arena, offsets)
        block = end
    if warmth == _NEVER:
        counters[0] += 0  # keeps the warming loads from being optimised away
    return total, n_created, n_undone


@njit(
    int64(u64_1, u64_2, u64_2, uint64, int64, int64, u64_1, int64, i64_1, i64_1, int64, i64_1),
    cache=True, nogil=True,
)  # fmt: skip
def put(index, rows, new_rows, key_mask, first, key_words, secret, start, free, counters, index_room, out):
    """Store whole rows ``start..`` (their words already laid out), replacing those of the same key; ``out`` gets their slots.

    Stops when out of room; returns the first row not stored.
    """
    shift = index_shift(index.shape[0])
    keys = np.empty((1, key_words), np.uint64)
    added = np.int64(0)
    for row in range(start, new_rows.shape[0]):
        nulls = new_rows[row, 0] & key_mask
        for word in range(key_words):
            keys[0, word] = new_rows[row, first + word]
        tag = hash_row(keys, 0, 0, key_words, nulls, secret)
        place = _find(index, rows, keys, 0, nulls, key_mask, first, tag, shift)
        if place >= 0:
            slot = np.int64(index[place] & _LOW32) - 1
        else:
            if added >= index_room:
                return row
            if counters[1] > 0:
                counters[1] -= 1
                slot = free[counters[1]]
            elif counters[0] < rows.shape[0]:
                slot = counters[0]
                counters[0] += 1
            else:
                return row
            index[-1 - place] = (tag << _S32) | np.uint64(slot + 1)
            added += 1
        for word in range(rows.shape[1]):
            rows[slot, word] = new_rows[row, word]
        rows[slot, 0] |= LIVE
        out[row] = slot
    return new_rows.shape[0]


@njit(
    Tuple((int64, int64, int64))(
        u64_1, u64_2, u64_2, u64_2, u64_1, uint64, int64, u64_1, int64, uint32, i64_1, i64_1, int64, i64_1, u64_2, i64_1,
    ),
    cache=True, nogil=True,
)  # fmt: skip
def upsert(
    index, rows, new_rows, keys, nulls, key_mask, first, secret, start, stamp, free, counters, index_room, created,
    undo_rows, progress,
):  # fmt: skip
    """Write whole rows ``start..`` under `stamp`, keeping what they overwrite unless that has the same stamp.

    ``progress`` is (created, undone) so far in this call. Stops early when a new key finds no free slot or no room in
    the index. Of rows with the same key the last one stays.

    Returns
    -------
    tuple
        (first row not written, created, undone)
    """
    total = keys.shape[0]
    shift = index_shift(index.shape[0])
    n_created, n_undone = progress[0], progress[1]
    added = np.int64(0)
    tags = np.empty(_BLOCK, np.uint64)
    stamp_word = np.uint64(stamp) << _S32
    warmth = _ZERO
    block = start
    while block < total:
        end = min(block + _BLOCK, total)
        for row in range(block, end):
            tags[row - block] = hash_row(keys, row, 0, keys.shape[1], nulls[row], secret)
        for row in range(block, end):  # as in `accumulate`: overlap the cache misses
            entry = index[tags[row - block] >> shift]
            if entry != _ZERO:
                warmth ^= rows[np.int64(entry & _LOW32) - 1, 0]
        for row in range(block, end):
            tag = tags[row - block]
            place = _find(index, rows, keys, row, nulls[row], key_mask, first, tag, shift)
            if place >= 0:
                slot = np.int64(index[place] & _LOW32) - 1
                if rows[slot, 0] >> _S32 != np.uint64(stamp):
                    for word in range(rows.shape[1]):
                        undo_rows[n_undone, word] = rows[slot, word]
                    n_undone += 1
            else:
                if added < index_room and counters[1] > 0:
                    counters[1] -= 1
                    slot = free[counters[1]]
                elif added < index_room and counters[0] < rows.shape[0]:
                    slot = counters[0]
                    counters[0] += 1
                else:
                    return row, n_created, n_undone
                index[-1 - place] = (tag << _S32) | np.uint64(slot + 1)
                added += 1
                created[n_created] = slot
                n_created += 1
            for word in range(1, rows.shape[1]):
                rows[slot, word] = new_rows[row, word]
            rows[slot, 0] = (new_rows[row, 0] & _LOW32) | LIVE | stamp_word
        block = end
    if warmth == _NEVER:
        counters[0] += 0  # keeps the warming loads from being optimised away
    return total, n_created, n_undone


@njit(
    Tuple((int64, int64))(
        u64_1, u64_2, u64_2, u64_2, u64_1, uint64, int64, u64_1, int64, uint32, i64_1, i64_1, int64, i64_1, i64_1, int64,
    ),
    cache=True, nogil=True,
)  # fmt: skip
def insert(
    index, rows, new_rows, keys, nulls, key_mask, first, secret, start, stamp, free, counters, index_room, created,
    sources, made,
):  # fmt: skip
    """Write those of the whole rows ``start..`` whose key is not there yet; of rows with the same key the first one.

    ``created`` gets the slots from place ``made`` on, ``sources`` the rows they come from. Stops early when out of room.

    Returns
    -------
    tuple
        (first row not looked at, created)
    """
    total = keys.shape[0]
    shift = index_shift(index.shape[0])
    added = np.int64(0)
    tags = np.empty(_BLOCK, np.uint64)
    stamp_word = np.uint64(stamp) << _S32
    warmth = _ZERO
    block = start
    while block < total:
        end = min(block + _BLOCK, total)
        for row in range(block, end):
            tags[row - block] = hash_row(keys, row, 0, keys.shape[1], nulls[row], secret)
        for row in range(block, end):  # as in `accumulate`: overlap the cache misses
            entry = index[tags[row - block] >> shift]
            if entry != _ZERO:
                warmth ^= rows[np.int64(entry & _LOW32) - 1, 0]
        for row in range(block, end):
            tag = tags[row - block]
            place = _find(index, rows, keys, row, nulls[row], key_mask, first, tag, shift)
            if place >= 0:
                continue
            if added < index_room and counters[1] > 0:
                counters[1] -= 1
                slot = free[counters[1]]
            elif added < index_room and counters[0] < rows.shape[0]:
                slot = counters[0]
                counters[0] += 1
            else:
                return row, made
            index[-1 - place] = (tag << _S32) | np.uint64(slot + 1)
            added += 1
            for word in range(1, rows.shape[1]):
                rows[slot, word] = new_rows[row, word]
            rows[slot, 0] = (new_rows[row, 0] & _LOW32) | LIVE | stamp_word
            created[made] = slot
            sources[made] = row
            made += 1
        block = end
    if warmth == _NEVER:
        counters[0] += 0  # keeps the warming loads from being optimised away
    return total, made


@njit(void(u64_1, u64_2, int64, uint64, int64, int64, u64_1), cache=True, nogil=True)
def reindex(index, rows, used, key_mask, first, key_words, secret):
    """Enter every live row of the first `used` into an empty index, after key words changed in place."""
    shift = index_shift(index.shape[0])
    mask = np.uint64(index.shape[0] - 1)
    keys = np.empty((1, key_words), np.uint64)
    for slot in range(used):
        if rows[slot, 0] & LIVE == _ZERO:
            continue
        for word in range(key_words):
            keys[0, word] = rows[slot, first + word]
        tag = hash_row(keys, 0, 0, key_words, rows[slot, 0] & key_mask, secret)
        place = tag >> shift
        while index[place] != _ZERO:
            place = (place + _ONE) & mask
        index[place] = (tag << _S32) | np.uint64(slot + 1)


@njit(void(u64_1, int64), cache=True, nogil=True)
def _delete_at(index, place):
    """Empty a place and shift the entries behind it back, so that no probe ever stops short of its key."""
    size = index.shape[0]
    shift = index_shift(size)
    hole = place
    probe = place
    while True:
        probe = (probe + 1) & (size - 1)
        entry = index[probe]
        if entry == _ZERO:
            break
        home = np.int64((entry >> _S32) >> shift)
        # The entry may move into the hole unless its home lies cyclically in (hole, probe].
        if (hole < probe and (home <= hole or home > probe)) or (hole > probe and home <= hole and home > probe):
            index[hole] = entry
            hole = probe
    index[hole] = _ZERO


@njit(
    int64(u64_1, u64_2, u64_2, u64_1, uint64, int64, u64_1, i64_1, i64_1, i64_1),
    cache=True, nogil=True,
)  # fmt: skip
def remove(index, rows, keys, nulls, key_mask, first, secret, free, counters, out):
    """Remove keys; their slots go to the free list and to ``out``. Returns how many were there."""
    shift = index_shift(index.shape[0])
    removed = 0
    for row in range(keys.shape[0]):
        place = _find(
            index,
            rows,
            keys,
            row,
            nulls[row],
            key_mask,
            first,
            hash_row(keys, row, 0, keys.shape[1], nulls[row], secret),
            shift,
        )
        if place >= 0:
            slot = np.int64(index[place] & _LOW32) - 1
            _delete_at(index, place)
            rows[slot, 0] &= ~LIVE
            free[counters[1]] = slot
            counters[1] += 1
            out[removed] = slot
            removed += 1
    return removed


@njit(
    int64(u64_1, u64_2, i64_1, uint64, int64, int64, u64_1, int64, int64, i64_1, i64_1, i64_1),
    cache=True, nogil=True,
)  # fmt: skip
def evict(index, rows, candidates, key_mask, first, key_words, secret, expiry_word, limit, free, counters, out):
    """Remove those of the candidate slots that hold a live row with an expiry word of at most ``limit``.

    Their rows keep their content until reused. Returns how many.
    """
    shift = index_shift(index.shape[0])
    rows_i = rows.view(np.int64)
    keys = np.empty((_BLOCK, key_words), np.uint64)
    tags = np.empty(_BLOCK, np.uint64)
    warmth = _ZERO
    removed = 0
    for block in range(0, candidates.shape[0], _BLOCK):
        end = min(block + _BLOCK, candidates.shape[0])
        for position in range(block, end):
            slot = candidates[position]
            for word in range(key_words):
                keys[position - block, word] = rows[slot, first + word]
            tags[position - block] = hash_row(keys, position - block, 0, key_words, rows[slot, 0] & key_mask, secret)
        for position in range(block, end):  # as in `accumulate`: overlap the cache misses
            warmth ^= index[tags[position - block] >> shift]
        for position in range(block, end):
            slot, row = candidates[position], position - block
            if rows[slot, 0] & LIVE == _ZERO or rows_i[slot, expiry_word] > limit:
                continue
            place = _find(index, rows, keys, row, rows[slot, 0] & key_mask, key_mask, first, tags[row], shift)
            _delete_at(index, place)
            rows[slot, 0] &= ~LIVE
            free[counters[1]] = slot
            counters[1] += 1
            out[removed] = slot
            removed += 1
    if warmth == _NEVER:
        counters[0] += 0  # keeps the warming loads from being optimised away
    return removed


@njit(int64(u64_2, int64, i64_1), cache=True, nogil=True)
def live_slots(rows, used, out):
    """Slots of all live rows, in slot order."""
    count = 0
    for slot in range(used):
        if rows[slot, 0] & LIVE != _ZERO:
            out[count] = slot
            count += 1
    return count

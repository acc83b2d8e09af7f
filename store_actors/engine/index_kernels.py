"""Compiled loops of the shard engine's hash index: look up, grow, remove, evict. No Python object is touched in here.

Everything a shard holds is 64-bit words, so one set of compiled signatures serves every schema and nothing is ever
compiled inside a batch: signatures are explicit, code is compiled (or read from its cache) when the module is imported.

Row layout, ``rows[slot]``::

    word 0          bits 0..30 null/valid flags (a key's bit: it is null; a state field's bit: it is valid),
                    bit 31 the row is live, bits 32..63 the version stamp that touched it last
    words 1..       further flag words, when a schema has more than 31 fields
    next words      key words, then state words (``layout.py`` assigns them)

A row sits in one or two cache lines, so an upsert costs two cache misses: one in the index, one in the row.

Index: open addressing with linear probing over ``tag << 32 | slot + 1`` (0 is empty). The tag is a keyed hash
(``hash_kernels.py``): every loop that looks up takes the table's ``secret``. An index may have any size; home positions are in the
order of tags, which makes growth a sequential pass and lets deletion shift entries back instead of leaving tombstones.
"""

from __future__ import annotations

import numpy as np
from numba import njit, void
from numba.types import boolean, int64, uint8, uint64

from store_actors.engine.hash_kernels import hash_row
from store_actors.engine.machine_kernels import prefetch

LIVE = np.uint64(1 << 31)
FLAG_BITS = 31

_LOW32 = np.uint64(0xFFFFFFFF)
_S32 = np.uint64(32)
_ONE = np.uint64(1)
_ZERO = np.uint64(0)
#: Keys whose cache lines are loaded at once.
_BLOCK = 256

u8_1, u64_1, u64_2, i64_1 = uint8[::1], uint64[::1], uint64[:, ::1], int64[::1]


@njit(uint64(uint64, u64_1), cache=True, nogil=True, inline="always")
def home(tag, index):
    """Return the position of the index where a tag is looked for first."""
    return (tag * np.uint64(index.shape[0])) >> _S32


@njit(uint64(uint64, u64_1), cache=True, nogil=True, inline="always")
def next_position(position, index):
    """Return the position of the index behind a position; behind the last one comes the first."""
    position += _ONE
    return position if position < np.uint64(index.shape[0]) else _ZERO


@njit(boolean(u64_2, int64, u64_2, int64, int64, int64, int64, uint64, uint64), cache=True, nogil=True, inline="always")
def _same_key(rows, slot, words, row, first, words_first, key_words, nulls, key_mask):
    if rows[slot, 0] & key_mask != nulls:
        return False
    for word in range(key_words):
        if rows[slot, first + word] != words[row, words_first + word]:
            return False
    return True


@njit(void(u64_1, u64_1), cache=True, nogil=True)
def grow_index(old, new):
    """Re-insert every entry of `old` into the larger `new`.

    They come in about the order of their homes, so most belong right behind the one before: the positions ``run .. after`` are full.
    """
    size = np.uint64(new.shape[0])
    run, after = _ZERO, _ZERO
    for number in range(old.shape[0]):
        entry = old[number]
        if entry != _ZERO:
            begin = home(entry >> _S32, new)
            position = after if begin >= run and begin < after else begin
            position = position if position < size else _ZERO
            while new[position] != _ZERO:
                position = next_position(position, new)
            new[position] = entry
            # The first entries may be those for which there was no place at the end.
            if position >= after and position - after < size >> _ONE:
                run = run if position == after else position
                after = position + _ONE


@njit(int64(u64_1, u64_2, u64_2, int64, int64, int64, int64, uint64, uint64, uint64, uint64), cache=True, nogil=True)
def _find(index, rows, words, row, first, words_first, key_words, nulls, key_mask, tag, position):
    """Return the position in the index of a key, or -1 - the empty position where it belongs; not before `position`.

    The key's words are ``words[row, words_first:]``; those of a row begin at its word ``first``.
    """
    while True:
        entry = index[position]
        if entry == _ZERO:
            return -1 - np.int64(position)
        if entry >> _S32 == tag and _same_key(
            rows, np.int64(entry & _LOW32) - 1, words, row, first, words_first, key_words, nulls, key_mask
        ):
            return np.int64(position)
        position = next_position(position, index)


@njit(uint64(u64_1, uint64), cache=True, nogil=True, inline="always")
def find_tag(index, tag):
    """Return the first position at which an entry has a tag, or the empty position behind its home."""
    position = home(tag, index)
    entry = index[position]
    while entry != _ZERO and entry >> _S32 != tag:
        position = next_position(position, index)
        entry = index[position]
    return position


@njit(void(u64_1, u64_2, int64, u64_1, u64_1), cache=True, nogil=True, inline="always")
def prefetch_rows(index, rows, count, tags, positions):
    """Put the position of each tag (:func:`find_tag`) into ``positions``, and prefetch its row. The index is on its way already."""
    row_words = rows.shape[1]
    for number in range(count):
        position = find_tag(index, tags[number])
        positions[number] = position
        entry = index[position]
        if entry != _ZERO:
            begin = (np.int64(entry & _LOW32) - 1) * row_words
            prefetch(rows, begin)
            # Not every row begins with a cache line.
            prefetch(rows, begin + row_words - 1)


@njit(void(u64_1, u64_2, u64_2, u64_1, u64_1, int64, int64, u64_1, u64_1), cache=True, nogil=True)
def tag_block(index, rows, keys, nulls, secret, begin, end, tags, positions):
    """Put the tags of the keys ``begin..end`` into ``tags``, where :func:`_find` begins into ``positions``, and prefetch the rows.

    The positions are right for as long as no entry is removed.
    """
    for row in range(begin, end):
        tag = hash_row(keys, row, 0, keys.shape[1], nulls[row], secret)
        tags[row - begin] = tag
        prefetch(index, np.int64(home(tag, index)))
    prefetch_rows(index, rows, end - begin, tags, positions)


@njit(int64(int64, i64_1, i64_1, int64), cache=True, nogil=True)
def claim_slot(capacity, free, counters, spare_entries):
    """Return the slot of a new key; -1 if the index takes no more entries or if none of the `capacity` slots of rows is free.

    ``counters`` is (slots ever used, free slots). No array is touched in a branch: else Numba counts references to it in every call.
    """
    used, spare = counters[0], counters[1]
    last_free = free[max(spare - 1, 0)]
    slot = np.int64(-1)
    if spare_entries > 0:
        if spare > 0:
            slot = last_free
            spare -= 1
        elif used < capacity:
            slot = used
            used += 1
    counters[0], counters[1] = used, spare
    return slot


@njit(void(u64_2, u64_1, u64_1, u64_1), cache=True, nogil=True)
def hash_tags(keys, nulls, secret, out):
    """Compute the tag of each key; an index has its entries in about the order of the tags."""
    for row in range(keys.shape[0]):
        out[row] = hash_row(keys, row, 0, keys.shape[1], nulls[row], secret)


@njit(void(u64_1, u64_2, u64_2, u64_1, uint64, int64, u64_1, i64_1), cache=True, nogil=True)
def lookup(index, rows, keys, nulls, key_mask, first, secret, out):
    """Find the slot of each key, -1 where there is none."""
    tags, positions = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64)
    for block in range(0, keys.shape[0], _BLOCK):
        end = min(block + _BLOCK, keys.shape[0])
        tag_block(index, rows, keys, nulls, secret, block, end, tags, positions)
        for row in range(block, end):
            tag, position = tags[row - block], positions[row - block]
            found = _find(index, rows, keys, row, first, 0, keys.shape[1], nulls[row], key_mask, tag, position)
            out[row] = np.int64(index[found] & _LOW32) - 1 if found >= 0 else -1


@njit(void(u64_1, u64_2, int64, int64, uint64, int64, int64, u64_1), cache=True, nogil=True)
def reindex(index, rows, begin, end, key_mask, first, key_words, secret):
    """Enter every live row from `begin` up to `end` into an index that has none of them, after key words were changed in the rows."""
    for slot in range(begin, end):
        if rows[slot, 0] & LIVE == _ZERO:
            continue
        tag = hash_row(rows, slot, first, key_words, rows[slot, 0] & key_mask, secret)
        position = home(tag, index)
        while index[position] != _ZERO:
            position = next_position(position, index)
        index[position] = (tag << _S32) | np.uint64(slot + 1)


@njit(void(u64_1, uint64), cache=True, nogil=True)
def _delete_at(index, position):
    """Empty a position and shift the entries behind it back, so that no probe ever stops short of its key."""
    hole = position
    probe = position
    while True:
        probe = next_position(probe, index)
        entry = index[probe]
        if entry == _ZERO:
            break
        begin = home(entry >> _S32, index)
        # The entry may move into the hole unless its home lies cyclically in (hole, probe].
        if (hole < probe and (begin <= hole or begin > probe)) or (hole > probe and begin <= hole and begin > probe):
            index[hole] = entry
            hole = probe
    index[hole] = _ZERO


@njit(void(u64_1, u64_2, int64, int64, i64_1, i64_1), cache=True, nogil=True, inline="always")
def _release(index, rows, position, slot, free, counters):
    """Empty a row's position in the index, and put its slot on the free list; its words stay."""
    _delete_at(index, np.uint64(position))
    rows[slot, 0] &= ~LIVE
    free[counters[1]] = slot
    counters[1] += 1


@njit(
    int64(u64_1, u64_2, u64_2, u64_1, uint64, int64, u64_1, i64_1, i64_1, i64_1),
    cache=True, nogil=True,
)  # fmt: skip
def remove(index, rows, keys, nulls, key_mask, first, secret, free, counters, out):
    """Remove keys; their slots go to the free list and to ``out``. Returns how many were there."""
    tags, positions = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64)
    removed = 0
    for block in range(0, keys.shape[0], _BLOCK):
        end = min(block + _BLOCK, keys.shape[0])
        tag_block(index, rows, keys, nulls, secret, block, end, tags, positions)
        for row in range(block, end):
            # Its place may have changed: entries move back where others are removed.
            tag, begin = tags[row - block], home(tags[row - block], index)
            position = _find(index, rows, keys, row, first, 0, keys.shape[1], nulls[row], key_mask, tag, begin)
            if position >= 0:
                slot = np.int64(index[position] & _LOW32) - 1
                _release(index, rows, position, slot, free, counters)
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
    rows_i = rows.view(np.int64)
    tags = np.empty(_BLOCK, np.uint64)
    removed = 0
    for block in range(0, candidates.shape[0], _BLOCK):
        end = min(block + _BLOCK, candidates.shape[0])
        for number in range(block, end):
            slot = candidates[number]
            tag = hash_row(rows, slot, first, key_words, rows[slot, 0] & key_mask, secret)
            tags[number - block] = tag
            prefetch(index, np.int64(home(tag, index)))
        for number in range(block, end):
            slot, tag = candidates[number], tags[number - block]
            if rows[slot, 0] & LIVE == _ZERO or rows_i[slot, expiry_word] > limit:
                continue
            nulls, begin = rows[slot, 0] & key_mask, home(tag, index)
            position = _find(index, rows, rows, slot, first, first, key_words, nulls, key_mask, tag, begin)
            _release(index, rows, position, slot, free, counters)
            out[removed] = slot
            removed += 1
    return removed


@njit(int64(u64_2, int64, int64, i64_1), cache=True, nogil=True)
def live_slots(rows, begin, end, out):
    """Write the slots of all live rows from `begin` up to `end`, in slot order; return how many."""
    count = 0
    for slot in range(begin, end):
        if rows[slot, 0] & LIVE != _ZERO:
            out[count] = slot
            count += 1
    return count


@njit(void(u64_2, int64, int64, u8_1), cache=True, nogil=True)
def live_flags(rows, begin, end, out):
    """Write 1 to ``out`` at the slot of each live row from `begin` up to `end`, else 0."""
    for slot in range(begin, end):
        out[slot] = rows[slot, 0] & LIVE != _ZERO

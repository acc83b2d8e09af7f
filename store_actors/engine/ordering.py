"""In which order rows come: 64-bit words that compare as the values of their columns do.

Values compare as in Spark: NaN is larger than any number and equal to itself, -0.0 is 0.0, strings and binaries compare by their
bytes (unsigned), false is smaller than true.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.errors import InvalidRequestError
from store_actors.engine.arrays import Mask, Words
from store_actors.engine.layout import FieldSlot, RowLayout
from store_actors.engine.strings import StringPool

_SIGN = np.uint64(1 << 63)
_NAN = np.array([np.nan]).view(np.uint64)[0] & ~_SIGN


class RowOrder:
    """The order of a schema's rows.

    Parameters
    ----------
    order
        The most significant column first, each as ``{"column": name, "descending": bool, "nulls_first": bool}``; no column at
        all makes all rows equal.

    Raises
    ------
    InvalidRequestError
        A column is not held in the state.
    """

    def __init__(self, layout: RowLayout, order: Sequence[Mapping[str, Any]]) -> None:
        slots = {slot.name: slot for slot in (*layout.keys, *layout.state)}
        for column in order:
            if column["column"] not in slots:
                raise InvalidRequestError(
                    "rows are ordered by a column that is no part of the state; nothing was changed; add it to the schema",
                    column=column["column"],
                    columns=sorted(slots),
                )
        self._columns: list[tuple[FieldSlot, bool, bool]] = [
            (slots[column["column"]], bool(column["descending"]), bool(column["nulls_first"])) for column in order
        ]

    def words(self, blocks: Sequence[Words], pool: StringPool) -> Words:
        """Return the words of the rows of all blocks, one line a row: of two rows that with the smaller line comes first.

        They can be compared with those of the same call only.
        """
        columns: list[Words] = []
        for slot, descending, nulls_first in self._columns:
            valid = _column(blocks, slot.flag_word) & np.uint64(slot.flag) != np.uint64(0)
            if slot.is_key:
                valid = ~valid
            values = _value_words(slot, blocks, valid, pool)
            all_valid = bool(valid.all())
            if not all_valid:
                columns.append((valid if nulls_first else ~valid).astype(np.uint64))
            for value in values:
                ordered = ~value if descending else value
                columns.append(ordered if all_valid else np.where(valid, ordered, np.uint64(0)))
        size = sum(len(block) for block in blocks)
        return np.column_stack(columns) if columns else np.empty((size, 0), np.uint64)


def sorts_before(left: Words, right: Words, *, if_equal: bool) -> Mask:
    """Return whether each line of `left` comes before that of `right`."""
    before = np.full(len(left), if_equal)
    for word in reversed(range(left.shape[1])):
        left_words, right_words = left[:, word], right[:, word]
        before = (left_words < right_words) | ((left_words == right_words) & before)
    return before


def _column(blocks: Sequence[Words], word: int) -> Words:
    return np.concatenate([block[:, word] for block in blocks])


def _value_words(slot: FieldSlot, blocks: Sequence[Words], valid: Mask, pool: StringPool) -> list[Words]:
    """Return the ascending words of a column's values, the most significant first; those of nulls are anything."""
    value = _column(blocks, slot.word)
    if slot.words == 2:
        return [_column(blocks, slot.word + 1) ^ _SIGN, value]
    if pa.types.is_floating(slot.type):
        return [_float_words(value)]
    if slot.is_text:
        return [_string_words(value, valid, pool)]
    return [value ^ _SIGN]


def _float_words(bits: Words) -> Words:
    numbers = bits.view(np.float64)
    bits = np.where(np.isnan(numbers), _NAN, np.where(numbers == 0, np.uint64(0), bits))
    return np.where(bits & _SIGN != 0, ~bits, bits | _SIGN)


def _string_words(ids: Words, valid: Mask, pool: StringPool) -> Words:
    """Return the places of the strings among those at hand, by bytes; equal strings have equal ids."""
    string_ids = ids.view(np.int64)
    is_present = np.zeros(pool.count, np.bool_)
    is_present[string_ids[valid]] = True
    distinct = np.flatnonzero(is_present)
    ends, content = pool.gather(distinct, np.ones(len(distinct), np.uint8))
    strings = pa.Array.from_buffers(
        pa.large_binary(), len(distinct), [None, pa.py_buffer(ends), pa.py_buffer(content)], null_count=0
    )
    # Nulls have the id 0, which need be no string at hand, or no string at all.
    ranks = np.zeros(max(pool.count, 1), np.uint64)
    ranks[distinct[pc.sort_indices(strings).to_numpy()]] = np.arange(len(distinct), dtype=np.uint64)
    return ranks[string_ids]

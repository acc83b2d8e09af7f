"""Scans of one version of a keyed store: of all rows, by values of leading key columns, or by a range of one key column."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from store_actors.engine.arrays import Mask, Slots, Words
from store_actors.engine.layout import FieldSlot
from store_actors.engine.prefixes import PrefixMatch
from store_actors.engine.strings import StringPool
from store_actors.engine.table_view import VersionView
from store_actors.engine.words import encode_column, validity
from store_actors.keyed.checks import value_array
from store_actors.keyed.table import KeyedTable, RowScan

#: String types with 64-bit offsets, as all keys of a column together may have more than 2 GiB.
_LARGE_TYPES = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}


class KeyedView(VersionView):
    """A version of a keyed store, whose scans stay valid while the store changes.

    Parameters
    ----------
    version
        A retained version; None for the current rows of the store's table.
    """

    def __init__(self, store: KeyedTable, version: int | None) -> None:
        super().__init__(store, version)
        self._watch = store.watch
        store.read_by(self)

    def _scan(self, slots: Slots, extra: Words, batch_rows: int) -> RowScan:
        return self._watch(RowScan(self._table, slots, extra, batch_rows))

    def scan(self, batch_rows: int) -> RowScan:
        """Return all rows, in no particular order."""
        return self._scan(*self._all(), batch_rows)

    def prefix_scan(self, prefixes: Words, columns: int, batch_rows: int) -> RowScan:
        """Return the rows whose first `columns` key columns equal those of a row of `prefixes` (rows of this table's layout).

        The keys are read once, for any number of prefixes.
        """
        matching = PrefixMatch(self._table, prefixes, columns)
        slots, extra = self._all()
        chosen = matching.places(self._words(slots, matching.words)) >= 0
        return self._scan(slots[chosen], extra[matching.places(extra[:, matching.words]) >= 0], batch_rows)

    def range_scan(self, slot: FieldSlot, start: object, end: object, batch_rows: int) -> RowScan:
        """Return the rows whose key column is in ``[start, end)`` (None: open), ordered by it; nulls are last (Spark's order).

        Raises
        ------
        InvalidRequestError
            A bound of the range is not a value of the column's type.
        """
        slots, extra = self._all()
        if slot.words == 2 or slot.is_text:
            rows = np.concatenate([self._table.taken(slots), extra])
            large = _LARGE_TYPES.get(slot.type, slot.type)
            values = self._table.decode_field(slot, rows, data_type=large)
            order = _order_of_values(values, slot, start, end)
        else:
            columns = [slot.word, slot.flag_word]
            words = np.concatenate([self._words(slots, columns), extra[:, columns]])
            null = (words[:, 1] & np.uint64(slot.flag)) != 0
            order = _order_of_words(words[:, 0], null, slot, start, end)
        if not len(extra):
            return self._scan(slots[order], extra, batch_rows)
        rows = np.concatenate([self._table.taken(slots), extra])
        return self._scan(np.empty(0, np.int64), np.take(rows, order, axis=0), batch_rows)


def _order_of_words(words: Words, null: Mask, slot: FieldSlot, start: object, end: object) -> Slots:
    """Return the indices of the one-word values in the range, ordered by value; nulls are last."""
    values = _sortable(words, slot.type)
    chosen = np.ones(len(words), np.bool_) if end is None else ~null
    if start is not None:
        chosen &= null | (values >= _sortable_bound(start, slot))
    if end is not None:
        chosen &= values < _sortable_bound(end, slot)
    indices = np.flatnonzero(chosen)
    return indices[np.lexsort((values[indices], null[indices]))]


def _sortable(words: Words, data_type: pa.DataType) -> Slots:
    """Return integers with the order of the values; NaN is the largest float and -0.0 equals 0.0, as in Spark's order."""
    if not pa.types.is_floating(data_type):
        return words.view(np.int64)
    floats = np.ascontiguousarray(words).view(np.float64) + 0.0
    bits = np.where(np.isnan(floats), np.nan, floats).view(np.int64)
    return bits ^ ((bits >> 63) & np.int64(0x7FFFFFFFFFFFFFFF))


def _sortable_bound(bound: object, slot: FieldSlot) -> np.int64:
    array = value_array(bound, slot.type, slot.name)
    words: list[Words] = []
    encode_column(array, StringPool(), validity(array), words)
    return np.int64(_sortable(words[0], slot.type)[0])


def _order_of_values(values: pa.Array, slot: FieldSlot, start: object, end: object) -> Slots:
    """Return the indices of the values in the range, ordered by value (strings by their bytes); nulls are last."""
    chosen = pa.array(np.ones(len(values), np.bool_))
    if start is not None:
        chosen = pc.fill_null(
            pc.greater_equal(values, value_array(start, slot.type, slot.name).cast(values.type)[0]), True
        )
    if end is not None:
        bound = value_array(end, slot.type, slot.name).cast(values.type)[0]
        chosen = pc.and_(chosen, pc.fill_null(pc.less(values, bound), False))
    indices = np.flatnonzero(chosen.to_numpy(zero_copy_only=False))
    order = pc.sort_indices(pc.take(values, pa.array(indices)))  # nulls last
    ordered: Slots = indices[order.to_numpy()]
    return ordered

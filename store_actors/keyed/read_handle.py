"""Reading one version of a keyed store through a handle, and the states that every handle goes through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.errors import InvalidRequestError, OperationOutOfOrderError
from store_actors.engine.arrays import Slots, Words
from store_actors.engine.layout import FieldSlot
from store_actors.engine.table_view import PrefixMatch, VersionView
from store_actors.keyed.checks import Rows, checked_table, key_batch, value_array
from store_actors.keyed.table import KeyedTable, RowScan

#: Largest number of rows in a batch of a scan, unless the caller says otherwise.
BATCH_ROWS = 1 << 16
#: Last column of ``multi_get``: whether the key is there.
FOUND_COLUMN = "__found"
#: String types with 64-bit offsets, as all keys of a column together may have more than 2 GiB.
_LARGE_TYPES = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}


class HandleState(StrEnum):
    """Life of a handle: READING to RELEASED, or UPDATING to COMMITTED or ABORTED."""

    READING = "reading"
    RELEASED = "released"
    UPDATING = "updating"
    #: The change is described and cannot grow; it is being made durable.
    PREPARED = "prepared"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class KeyedMetrics:
    """Rows of the version, memory of the store with all its versions, and what the handle's version changes."""

    num_keys: int
    memory_used_bytes: int
    #: Distinct keys that were put and not removed again, also if the values were the same (as Spark counts).
    rows_updated: int
    rows_removed: int


def _order_in_range(values: pa.Array, slot: FieldSlot, start: object, end: object) -> Slots:
    """Return the indices of the values in the range, in Spark's order (strings by their bytes); nulls are last."""

    def bound(value: object) -> pa.Scalar:
        return _comparable(value_array(value, slot.type, slot.name).cast(values.type))[0]

    comparable, chosen = _comparable(values), pa.array(np.ones(len(values), np.bool_))
    if start is not None:
        chosen = pc.fill_null(pc.greater_equal(comparable, bound(start)), True)
    if end is not None:
        chosen = pc.and_(chosen, pc.fill_null(pc.less(comparable, bound(end)), False))
    indices = np.flatnonzero(chosen.to_numpy(zero_copy_only=False))
    order = pc.sort_indices(pc.take(comparable, pa.array(indices)))  # nulls last
    ordered: Slots = indices[order.to_numpy()]
    return ordered


def _comparable(values: pa.Array) -> pa.Array:
    """Return values that Arrow compares as Spark does these: NaN is the largest float and -0.0 equals 0.0."""
    if pa.types.is_boolean(values.type):
        return values.cast(pa.int8())
    if not pa.types.is_floating(values.type):
        return values
    floats = values.cast(pa.float64()).fill_null(0.0).to_numpy() + 0.0
    bits = np.where(np.isnan(floats), np.nan, floats).view(np.int64)
    sortable = bits ^ ((bits >> 63) & np.int64(0x7FFFFFFFFFFFFFFF))
    return pa.array(sortable, mask=values.is_null().to_numpy(zero_copy_only=False))


class Reads:
    """The reads of both kinds of handles: of their version, and for one that updates of its own puts and removes.

    Every method raises OperationOutOfOrderError once the handle is released, committed or aborted, and VersionNotFoundError once an
    error (memory exhausted) has cut a change of the store short.
    """

    _ALIVE: tuple[HandleState, ...] = (HandleState.READING, HandleState.UPDATING, HandleState.PREPARED)

    def __init__(self, store: KeyedTable, version: int, state: HandleState) -> None:
        self._store = store
        #: The version that is read; of an update handle the one before its updates.
        self.version = version
        self.state = state
        self._view = VersionView(store, version if state is HandleState.READING else None)
        store.read_by(self._view)

    def _require(self, operation: str, *states: HandleState) -> None:
        if self.state not in (states or self._ALIVE):
            raise OperationOutOfOrderError(
                f"{operation} on a handle that is {self.state}; nothing was changed; open a new handle for more",
                version=self.version,
                state=self.state.value,
            )
        self._store.check_whole()

    def __len__(self) -> int:
        self._require("len")
        return len(self._view)

    def __bool__(self) -> bool:
        # A handle of an empty version is a handle all the same: `if handle` asks whether there is one.
        return True

    def get(self, key: Sequence[object]) -> dict[str, Any] | None:
        """Return the values under one key, given as its parts in the order of the key columns; None if it is not there.

        Raises
        ------
        InvalidRequestError
            The key has another number of parts or a part of a wrong type.
        """
        row = self.multi_get(key_batch(key, self._store.schema.keys)).to_pylist()[0]
        values = self._store.schema.state_fields
        return {field.name: row[field.name] for field in values} if row[FOUND_COLUMN] else None

    def multi_get(self, keys: Rows) -> pa.Table:
        """Return the rows under keys, in their order: key columns, value columns (null if the key is missing), ``__found``.

        Raises
        ------
        InvalidRequestError
            A key column is missing or of another type.
        """
        self._require("multi_get")
        table, fields = self._store.table, self._store.schema
        schema = pa.schema(
            [
                *fields.key_schema(),
                *(field.arrow().with_nullable(True) for field in fields.state_fields),
                pa.field(FOUND_COLUMN, pa.bool_(), nullable=False),
            ]
        )
        pieces = []
        for batch in checked_table(keys, fields.keys).cast(fields.key_schema()).to_batches():
            rows, is_found = self._view.rows_of_keys(table.rows_of(batch, table.layout.keys))
            for cut in table.cut(rows, table.layout.state):
                values = [table.decode_field(slot, rows[cut]) for slot in table.layout.state]
                keys_of_cut = batch.slice(cut.start, cut.stop - cut.start).columns
                pieces.append(
                    pa.RecordBatch.from_arrays([*keys_of_cut, *values, pa.array(is_found[cut])], schema=schema)
                )
        return pa.Table.from_batches(pieces, schema)

    def iterator(self, batch_rows: int = BATCH_ROWS) -> RowScan:
        """Return all rows as they are now, in no particular order; puts and removes while iterating are not shown."""
        self._require("iterator")
        return self._scan(*self._view.everything(), batch_rows)

    def prefix_scan(self, prefixes: Rows, batch_rows: int = BATCH_ROWS) -> RowScan:
        """Return the rows whose leftmost key columns are as in one of the rows of `prefixes`, in no particular order.

        Parameters
        ----------
        prefixes
            The first one or more key columns. All prefixes are looked for in one pass over the store.

        Raises
        ------
        InvalidRequestError
            The columns are not the leftmost key columns, or of another type.
        """
        self._require("prefix_scan")
        table, keys = self._store.table, self._store.schema.keys
        leftmost = [field.name for field in keys[: prefixes.num_columns]]
        if not leftmost or set(prefixes.schema.names) != set(leftmost):
            raise InvalidRequestError(
                "a prefix is made of the leftmost key columns",
                keys=[field.name for field in keys],
                got=prefixes.schema.names,
            )
        count = len(leftmost)
        batches = checked_table(prefixes, keys[:count]).to_batches()
        rows = [table.rows_of(batch, table.layout.keys[:count]) for batch in batches]
        empty = np.empty((0, table.layout.row_words), np.uint64)
        # The keys are read once, for any number of prefixes.
        matching = PrefixMatch(table, np.concatenate([empty, *rows]), count)
        slots, extra = self._view.everything()
        chosen = matching.places(self._view.words_at(slots, matching.words)) >= 0
        return self._scan(slots[chosen], extra[matching.places(extra[:, matching.words]) >= 0], batch_rows)

    def range_scan(
        self, column: str, start: object = None, end: object = None, batch_rows: int = BATCH_ROWS
    ) -> RowScan:
        """Return the rows with ``start <= column < end``, ordered by that key column; None leaves an end open.

        Nulls come last and are in ranges without an end; NaN is the largest number; strings and binaries are ordered by
        their bytes. That is the order of Spark's range scans.

        Raises
        ------
        InvalidRequestError
            Not a key column, or one of arrays or structs, or an end that its type cannot hold.
        """
        self._require("range_scan")
        table = self._store.table
        atomic = {slot.name: slot for slot in table.layout.keys if slot.nested is None}
        if column not in atomic:
            raise InvalidRequestError(
                "ranges are scanned by a key column, of an atomic type", column=column, keys=list(atomic)
            )
        slot = atomic[column]
        slots, extra = self._view.everything()
        words = [slot.flag_word, *range(slot.word, slot.word + slot.words)]
        rows = np.concatenate([self._view.words_at(slots, words), extra[:, words]])
        # These have the column alone: its flags, and then its value.
        values = table.decode_field(
            replace(slot, flag_word=0, word=1), rows, data_type=_LARGE_TYPES.get(slot.type, slot.type)
        )
        order = _order_in_range(values, slot, start, end)
        if not len(extra):
            return self._scan(slots[order], extra, batch_rows)
        rows = np.concatenate([table.taken(slots), extra])
        return self._scan(np.empty(0, np.int64), np.take(rows, order, axis=0), batch_rows)

    def _scan(self, slots: Slots, extra: Words, batch_rows: int) -> RowScan:
        return self._store.watch(RowScan(self._store.table, slots, extra, batch_rows))

    def metrics(self) -> KeyedMetrics:
        """Return the statistics of this version and its store."""
        self._require("metrics")
        return KeyedMetrics(len(self), self._store.nbytes, *self._changed_rows())

    def _changed_rows(self) -> tuple[int, int]:
        """Return the rows updated and removed by the version that is being made."""
        return 0, 0


class ReadHandle(Reads):
    """Reads one version, also while the next ones are written, until memory no longer has it (VersionNotFoundError)."""

    def __init__(self, store: KeyedTable, version: int) -> None:
        super().__init__(store, version, HandleState.READING)

    def release(self) -> None:
        """End of reading. The store stays in memory; releasing twice is harmless."""
        self.state = HandleState.RELEASED

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

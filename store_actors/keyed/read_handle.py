"""Reading one version of a keyed store through a handle, and the states that every handle goes through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

import numpy as np
import pyarrow as pa

from coordinator.model.errors import InvalidRequestError, OperationOutOfOrderError
from store_actors.keyed.checks import Rows, checked_table, key_batch
from store_actors.keyed.table import KeyedTable, RowScan
from store_actors.keyed.view import KeyedView

#: Largest number of rows in a batch of a scan, unless the caller says otherwise.
BATCH_ROWS = 1 << 16
#: Last column of ``multi_get``: whether the key is there.
FOUND_COLUMN = "__found"


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
    """Rows of the version, memory of the store with all its versions, and what the handle's version changes.

    Attributes
    ----------
    rows_updated
        Distinct keys that were put and not removed again, also if the values were the same (as Spark counts).
    """

    num_keys: int
    memory_used_bytes: int
    rows_updated: int
    rows_removed: int


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
        self._view = KeyedView(store, version if state is HandleState.READING else None)

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
        return self._view.scan(batch_rows)

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
        return self._view.prefix_scan(np.concatenate([empty, *rows]), count, batch_rows)

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
        slots = {slot.name: slot for slot in self._store.table.layout.keys if slot.nested is None}
        if column not in slots:
            raise InvalidRequestError(
                "ranges are scanned by a key column, of an atomic type", column=column, keys=list(slots)
            )
        return self._view.range_scan(slots[column], start, end, batch_rows)

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

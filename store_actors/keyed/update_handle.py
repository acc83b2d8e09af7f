"""The handle that makes the next version of a keyed store, and the order in which its methods may be called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from coordinator.model.errors import InvalidRequestError
from store_actors.engine.versions import CHANGE_COLUMN, REMOVED, UPDATED, Change
from store_actors.keyed.checks import Condition, Rows, checked_table, key_batch, matches
from store_actors.keyed.read_handle import BATCH_ROWS, HandleState, Reads
from store_actors.keyed.table import KeyedTable

#: Values of ``__change`` in :meth:`UpdateHandle.updates`.
ADDED, CHANGED, GONE = "added", "changed", "removed"


class UpdateHandle(Reads):
    """Makes the next version of a store, until :meth:`commit` or :meth:`abort`."""

    def __init__(self, store: KeyedTable, next_version: int, on_end: Callable[[UpdateHandle], None]) -> None:
        super().__init__(store, store.version, HandleState.UPDATING)
        self.next_version = next_version
        self._step = store.begin(next_version)
        self._on_end = on_end
        self._rows_in = 0
        self._change: Change | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes of the rows that the version has overwritten, and of the keys that it has added, so far."""
        return self._step.nbytes

    # -- updates --------------------------------------------------------------------------------------------------

    def put(self, rows: Rows) -> None:
        """Set the values of keys. If rows have the same key, the last row's values are set.

        Parameters
        ----------
        rows
            All key and value columns; others are ignored.

        Raises
        ------
        InvalidRequestError
            A column is missing, of another type, or null where its field allows none. Nothing was changed.
        """
        self._require("put", HandleState.UPDATING)
        schema = self._store.schema
        # All batches are converted to words first, so that a value that cannot be stored is refused before any change.
        batches = checked_table(rows, (*schema.keys, *schema.state_fields)).to_batches()
        for words in [self._store.table.rows_of(batch) for batch in batches]:
            self._store.put_rows(words, self._step)
            self._rows_in += len(words)

    def put_row(self, columns: Mapping[str, object]) -> None:
        """Set the values of one key; all key and value columns by name.

        Raises
        ------
        InvalidRequestError
            A column is missing, unknown, of another type, or null where it may not be. Nothing was changed.
        """
        fields = (*self._store.schema.keys, *self._store.schema.state_fields)
        if set(columns) != {field.name for field in fields}:
            raise InvalidRequestError(
                "a row for a keyed store has each of its columns, and no other; nothing was changed",
                columns=[field.name for field in fields],
                got=list(columns),
            )
        self.put(key_batch([columns[field.name] for field in fields], fields))

    def remove_key(self, key: Sequence[object]) -> int:
        """Remove a key, given as for :meth:`get`, which raises the same errors; return 1 if it was there, else 0."""
        return self.remove(key_batch(key, self._store.schema.keys))

    def remove(self, keys: Rows) -> int:
        """Remove keys, and ignore those that are not there; return how many were there.

        Raises
        ------
        InvalidRequestError
            A key column is missing or of another type. Nothing was changed.
        """
        self._require("remove", HandleState.UPDATING)
        table, removed = self._store.table, 0
        batches = checked_table(keys, self._store.schema.keys).to_batches()
        for words in [table.rows_of(batch, table.layout.keys) for batch in batches]:
            removed += self._store.remove_rows(words, self._step)
            self._rows_in += len(words)
        return removed

    def remove_where(self, condition: Condition) -> int:
        """Remove every row for which a condition over key and value columns is true; return how many.

        Parameters
        ----------
        condition
            A ``pyarrow.compute`` expression, or a function that returns a boolean for each row of a record batch.

        Raises
        ------
        InvalidRequestError
            The condition cannot be evaluated. Nothing was removed.
        """
        self._require("remove_where", HandleState.UPDATING)
        table = self._store.table
        slots, chosen = table.live(), [np.empty(0, np.int64)]
        for begin in range(0, len(slots), BATCH_ROWS):
            block = slots[begin : begin + BATCH_ROWS]
            for batch in table.decode(table.taken(block)).to_batches():
                chosen.append(block[: batch.num_rows][matches(condition, batch)])
                block = block[batch.num_rows :]
        return self._store.remove_rows(table.taken(np.concatenate(chosen)), self._step)

    def due(self, limit: int) -> pa.Table:
        """Return the rows whose due column is at most `limit`, after the handle's puts and removes, in no particular order.

        The time is proportional to the number of due rows, not to the size of the store. A repeated call returns the same rows, unless
        they were changed.

        Raises
        ------
        InvalidRequestError
            The store was opened without such a column.
        """
        self._require("due", HandleState.UPDATING)
        return self._store.table.decode(self._store.due(limit))

    def earliest_due(self) -> int | None:
        """Return the smallest value of the due column; None if no row falls due. Raises errors as :meth:`due`."""
        self._require("earliest_due", HandleState.UPDATING)
        return self._store.earliest_due()

    # -- what changed ---------------------------------------------------------------------------------------------

    def updates(self) -> pa.Table:
        """Return the net changes of the version against its base: ``row_schema`` and ``__change``, a string.

        Rows that are ``added`` or ``changed`` have their new values, rows that are ``removed`` their last values. A key that was added
        and removed again is not a net change, and neither is a key that was put with the values that it had.
        """
        self._require("updates")
        net = self._store.net_change(self._step)
        kinds = np.repeat(np.arange(3, dtype=np.int8), [net.added, net.changed, net.removed])
        names = pa.DictionaryArray.from_arrays(kinds, pa.array([ADDED, CHANGED, GONE])).cast(pa.string())
        return self._store.table.decode(net.rows).append_column(CHANGE_COLUMN, names)

    def _changed_rows(self) -> tuple[int, int]:
        if self._change is not None:
            return self._change.rows_updated, self._change.rows_removed
        net = self._store.net_change(self._step)
        return net.rows_updated, net.removed

    # -- ends -----------------------------------------------------------------------------------------------------

    def prepare(self, watermark_ms: int | None = None, *, rows_in: int | None = None, rows_late: int = 0) -> Change:
        """Return the version's change, and refuse further updates. A repeated call returns the same change.

        Parameters
        ----------
        watermark_ms
            Watermark recorded with the version, in milliseconds since the epoch; by default that of the base version.
            Like the other parameters, it has no effect once the change is prepared.
        rows_in, rows_late
            Number of input rows, and of late rows that were dropped; by default the rows of all puts and removes, and 0.

        Returns
        -------
        Change
            The change, whose delta has the net changes: ``__change`` is UPDATED (new values) or REMOVED (last values).
        """
        self._require("prepare", HandleState.UPDATING, HandleState.PREPARED)
        if self._change is not None:
            return self._change
        if watermark_ms is not None:
            self._step.watermark_ms = watermark_ms
        net = self._store.net_change(self._step)
        kinds = np.full(len(net.rows), UPDATED, np.int8)
        kinds[len(net.rows) - net.removed :] = REMOVED
        self._change = self._step.change(
            self._store.table.decode(net.rows).append_column(CHANGE_COLUMN, pa.array(kinds)),
            rows_updated=net.rows_updated,
            rows_removed=net.removed,
            rows_in=self._rows_in if rows_in is None else rows_in,
            rows_late=rows_late,
        )
        self.state = HandleState.PREPARED
        return self._change

    def commit(self, watermark_ms: int | None = None) -> Change:
        """Make the version the newest one, even without any update; return the change, as :meth:`prepare`.

        Raises
        ------
        OperationOutOfOrderError
            The handle is committed or aborted.
        """
        self._require("commit", HandleState.UPDATING, HandleState.PREPARED)
        change = self.prepare(watermark_ms)
        self._store.commit()
        self.state = HandleState.COMMITTED
        self._on_end(self)
        return change

    def abort(self) -> None:
        """Undo all updates of the version. A repeated call does nothing. A store that an error broke is left as it is.

        Raises
        ------
        OperationOutOfOrderError
            The handle is committed.
        """
        if self.state is HandleState.ABORTED:
            return
        if not self._store.is_broken:
            self._require("abort", HandleState.UPDATING, HandleState.PREPARED)
            self._store.abort()
        self.state = HandleState.ABORTED
        self._on_end(self)

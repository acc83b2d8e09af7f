"""A version of a shard's rows as Arrow tables, for readers: by key, and all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import pyarrow as pa

from coordinator.model.schema import ROW_COLUMN, StateSchema
from store_actors.engine.arrays import Slots, Words
from store_actors.engine.frozen import FrozenRows
from store_actors.engine.layout import FieldSlot, all_words
from store_actors.engine.multimap import MultimapTable
from store_actors.engine.table import GroupTable
from store_actors.engine.version_view import VersionView
from store_actors.engine.versions import Frozen, VersionedTable, frozen_pieces

_Columns = tuple[list[FieldSlot], pa.Schema]

#: The index of each row's key among the queried keys, in ascending order; and the rows.
Found = tuple[Slots, pa.Table]


class ShardView(Protocol):
    """A version of a shard. The owner of the shard locks during each call."""

    @property
    def nbytes(self) -> int:
        """Memory besides the shard's, in bytes."""

    @property
    def is_there(self) -> bool:
        """Whether memory still holds the version."""

    @property
    def schema(self) -> StateSchema:
        """Schema of the rows."""

    def find(self, keys: pa.RecordBatch, columns: Sequence[str]) -> Found:
        """Return the rows with some keys.

        Parameters
        ----------
        keys
            The columns of the schema's ``input_keys``; of keyed stores also only the leading ones, of which none is given twice.
        columns
            Those of ``row_schema`` that are wanted.
        """

    def frozen(self, columns: Sequence[str]) -> Frozen:
        """Return all rows, in no particular order, in pieces that need no lock once they are taken."""


class TableView:
    """A version of one table.

    Parameters
    ----------
    store
        The table with its versions.
    version
        A retained version.
    """

    def __init__(self, store: VersionedTable, version: int) -> None:
        self._store = store
        self._view = VersionView(store, version)
        self.schema = store.schema
        self._planned: dict[tuple[str, ...], _Columns] = {}
        self._layout = store.table.layout

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    @property
    def is_there(self) -> bool:
        return self._view.is_there

    def find(self, keys: pa.RecordBatch, columns: Sequence[str]) -> Found:
        places, rows = self.words_of(keys)
        table = self._store.table
        return places, _decoded(table, rows, self._columns(columns), table.piece_bytes)

    def words_of(self, keys: pa.RecordBatch) -> tuple[Slots, Words]:
        """Return the rows with some keys as words, each with the place of its key."""
        table = self._store.table
        looking = table.looking()
        if isinstance(looking, MultimapTable):
            return self._view.rows_of_chains(*looking.chain_keys(keys))
        # Where each key has one row, a last key that numbers rows is 0.
        key_fields = tuple(slot for slot in table.layout.keys if slot.name != ROW_COLUMN)
        given_fields = key_fields[: keys.num_columns]
        if len(given_fields) < len(key_fields):
            return self._view.rows_of_prefixes(looking.rows_of(keys, given_fields), len(given_fields))
        rows, is_found = self._view.rows_of_keys(looking.rows_of(keys, given_fields))
        key_numbers = np.flatnonzero(is_found)
        return key_numbers, rows[key_numbers]

    def frozen(self, columns: Sequence[str]) -> Frozen:
        projection = self._columns(columns)
        return frozen_pieces(self._view.frozen(all_words(projection[0])), partial(self._of_piece, projection))

    def frozen_rows(self) -> FrozenRows:
        """Return all rows as words, made little by little."""
        return self._view.frozen()

    def _of_piece(self, columns: _Columns, rows: Words, frozen: FrozenRows) -> Iterator[pa.Table]:
        past = self._store.table.as_of(frozen)
        yield _decoded(past, rows, columns, past.snapshot_bytes)

    def _columns(self, names: Sequence[str]) -> _Columns:
        """Return the fields of some columns; worked out once, as look-ups of one key come by the thousand."""
        selected, layout = tuple(names), self._store.table.layout
        if layout is not self._layout:
            self._planned, self._layout = {}, layout
        if (projection := self._planned.get(selected)) is None:
            named = {slot.name: slot for slot in (*layout.keys, *layout.state)}
            types = layout.schema.row_schema()
            projection = [named[name] for name in selected], pa.schema([types.field(name) for name in selected])
            self._planned[selected] = projection
        return projection


def _decoded(table: GroupTable, rows: Words, columns: _Columns, limit: int) -> pa.Table:
    fields, schema = columns
    pieces = [
        pa.Table.from_arrays([table.decode_field(slot, rows[piece]) for slot in fields], schema=schema)
        for piece in table.cut(rows, fields, limit=limit)
    ]
    return pieces[0] if len(pieces) == 1 else pa.concat_tables([schema.empty_table(), *pieces])

"""A version of a shard's rows, for readers, while later ones are made: by key, by leading key columns, all of it.

A view lays the steps that were made since its version (:class:`~store_actors.engine.versions.VersionStep`) over the table, so an
older version is read without copying it, also while the next one is being written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import pyarrow as pa

from coordinator.model.schema import ROW_COLUMN, StateSchema
from store_actors.engine import index_kernels, row_kernels
from store_actors.engine.arrays import Mask, Slots, Words, distinct
from store_actors.engine.frozen import FrozenRows
from store_actors.engine.layout import FieldSlot, all_words
from store_actors.engine.memory import HEAP, new_index
from store_actors.engine.multimap import MultimapTable, first_of_keys
from store_actors.engine.table import GroupTable
from store_actors.engine.versions import Frozen, UndoPart, VersionedTable, frozen_pieces

_Columns = tuple[list[FieldSlot], pa.Schema]

#: The index of each row's key among the queried keys, in ascending order; and the rows.
Found = tuple[Slots, pa.Table]
_LOW32 = np.uint64(0xFFFFFFFF)
_S32 = np.uint64(32)
#: Version stamp of an overlay's row whose key the version does not have.
_ABSENT = np.uint64(1 << 32)
#: Up to this many keys are searched in each step's changes, at most this many times; then an overlay is built once, which serves all
#: later look-ups.
_FEW_KEYS, _FEW_LOOKS = 4, 8
_ALL_BITS = np.uint64((1 << 64) - 1)


#: Rows of a change, and how an overlay marks them.
_Changed = tuple[Words, np.uint64]


def _changed(parts: Sequence[UndoPart]) -> list[_Changed]:
    """Return the rows of changes, oldest first, without those that have none."""
    both = (of for part in parts for of in ((part.before, np.uint64(0)), (part.created, _ABSENT)))
    return [(rows, mark) for rows, mark in both if len(rows)]


class ShardView(Protocol):
    """A version of a shard. The owner of the shard locks during each call."""

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


class VersionView:
    """A view of one version of a table, or (`version` None) of its rows at each moment, pending changes included.

    The owner of the table locks during each call.
    """

    def __init__(self, store: VersionedTable, version: int | None) -> None:
        self._store = store
        self._version = version
        self._serial = -1 if version is None else store.retained()[version]
        self._forget()

    @property
    def _table(self) -> GroupTable:
        return self._store.table

    @property
    def nbytes(self) -> int:
        """Memory besides the store's, in bytes."""
        return self._overlay.nbytes - self._overlay.pool.nbytes

    @property
    def is_there(self) -> bool:
        """Whether memory still has the version, and not another attempt's of the same number."""
        return self._version is None or self._store.retained().get(self._version) == self._serial

    def _forget(self) -> None:
        #: Keys that changed since the version, with what they were in it.
        self._overlay = self._new_overlay()
        self._lists = self._table.lists
        #: Parts of each step (by serial) that are in the overlay; and look-ups that went without it.
        self._seen: dict[int, int] = {}
        self._looks = 0

    def _new_overlay(self) -> GroupTable:
        overlay = type(self._table)(self._store.schema, self._table.seed, self._table.memory)
        overlay.pool = self._table.pool
        return overlay

    def _catch_up(self) -> None:
        """Lay what changed since the last look over the version.

        Raises
        ------
        VersionNotFoundError
            Memory no longer holds the version.
        """
        if self._version is None:
            return
        steps = list(self._store.steps_since(self._version, self._serial))
        if self._overlay.pool is not self._table.pool or self._lists is not self._table.lists:
            # What was compacted has other words.
            self._forget()
        self._lay_over(
            self._overlay, _changed([part for step in steps for part in step.parts[self._seen.get(step.serial, 0) :]])
        )
        # Only now: after an error they are laid over again.
        self._seen |= {step.serial: len(step.parts) for step in steps}

    def _lay_over(self, overlay: GroupTable, changes: Sequence[_Changed]) -> None:
        """Lay rows over an overlay, all at once: an epoch has hundreds of changes, of a few rows each."""
        whole = np.zeros((sum(len(rows) for rows, _ in changes), self._table.layout.row_words), np.uint64)
        end = 0
        for rows, mark in changes:
            begin, end = end, end + len(rows)
            whole[begin:end, : rows.shape[1]] = rows
            whole[begin:end, 0] = (whole[begin:end, 0] & _LOW32) | mark
        # The oldest change of a key has its row in the version; later ones do not count.
        new = whole[overlay.find(whole) < 0]
        overlay.put(new[first_of_keys(overlay, new)])

    def _overlay_for(self, keys: Words, nulls: Words, mask: np.uint64) -> GroupTable:
        """Return at least the changes since the version to rows with some leading key words."""
        if len(keys) > _FEW_KEYS or self._looks >= _FEW_LOOKS or self._seen or self._version is None:
            self._catch_up()
            return self._overlay
        steps = list(self._store.steps_since(self._version, self._serial))
        changes = _changed([part for step in steps for part in step.parts])
        self._looks += len(changes)
        if len(changes) > _FEW_LOOKS:
            self._catch_up()
            return self._overlay
        chosen = [(rows[self._with_keys(rows, keys, nulls, mask)], mark) for rows, mark in changes]
        if not any(len(rows) for rows, _ in chosen):
            return self._overlay
        overlay = self._new_overlay()
        self._lay_over(overlay, chosen)
        return overlay

    def _with_keys(self, rows: Words, keys: Words, nulls: Words, mask: np.uint64) -> Slots:
        """Return the places of the rows that have one of a few keys."""
        first = self._table.layout.flag_words
        of_rows, matches = rows[:, first : first + keys.shape[1]], [np.empty(0, np.int64)]
        for key, null in zip(keys, nulls, strict=True):
            candidates = np.flatnonzero(of_rows[:, 0] == key[0]) if len(key) else np.arange(len(rows))
            is_same = (of_rows[candidates] == key).all(axis=1) & (rows[candidates, 0] & mask == null)
            matches.append(candidates[is_same])
        return distinct(np.concatenate(matches))

    def __len__(self) -> int:
        slots, extra = self.everything()
        return len(slots) + len(extra)

    # -- by key ---------------------------------------------------------------------------------------------------

    def rows_of_keys(self, keys: Words) -> tuple[Words, Mask]:
        """Return the rows with these keys (zeros where there is none), and whether each was found."""
        overlay = self._overlay_for(*self._table.keys_of(keys), self._table.layout.key_mask)
        slots = self._table.find(keys)
        is_found = slots >= 0
        rows = self._table.columns(slots)
        if len(overlay):
            hidden = overlay.find(keys)
            changed = hidden >= 0
            rows[changed] = overlay.rows[hidden[changed]]
            is_found[changed] = rows[changed, 0] >> _S32 == 0
            rows[~is_found] = 0
        return rows, is_found

    def rows_of_chains(self, keys: Words, nulls: Words) -> tuple[Slots, Words]:
        """Return all rows that have one of some leading keys, of a table whose rows share them.

        Parameters
        ----------
        keys, nulls
            As :meth:`MultimapTable.chain_keys <store_actors.engine.multimap.MultimapTable.chain_keys>` gives them.

        Returns
        -------
        tuple
            For each row the place of its key, in ascending order, and the row.
        """
        table, overlay = self._table, self._overlay_for(keys, nulls, self._table.layout.chain_mask)
        assert isinstance(table, MultimapTable)
        assert isinstance(overlay, MultimapTable)
        places, slots = table.match(keys, nulls)
        rows = table.taken(slots)
        if not len(overlay):
            return places, rows
        unchanged = overlay.find(rows) < 0
        then_places, then_slots = overlay.match(keys, nulls)
        then = overlay.taken(then_slots)
        was_there = then[:, 0] >> _S32 == 0
        places = np.concatenate([places[unchanged], then_places[was_there]])
        rows = np.concatenate([rows[unchanged], then[was_there]])
        order = np.argsort(places, kind="stable")
        return places[order], rows[order]

    def rows_of_prefixes(self, prefixes: Words, columns: int) -> tuple[Slots, Words]:
        """Return all rows whose first `columns` key columns are as in one of some distinct prefixes; in one pass over the keys.

        Returns
        -------
        tuple
            As :meth:`rows_of_chains`.
        """
        matching = PrefixMatch(self._table, prefixes, columns)
        slots, extra = self.everything()
        at_slots, at_extra = (
            matching.places(self.words_at(slots, matching.words)),
            matching.places(extra[:, matching.words]),
        )
        rows = np.concatenate([self._table.taken(slots[at_slots >= 0]), extra[at_extra >= 0]])
        places = np.concatenate([at_slots[at_slots >= 0], at_extra[at_extra >= 0]])
        order = np.argsort(places, kind="stable")
        return places[order], rows[order]

    def words_at(self, slots: Slots, words: Sequence[int]) -> Words:
        """Return some words of the rows at these slots."""
        return np.column_stack([np.take(self._table.rows[:, word], slots) for word in words])

    # -- all ------------------------------------------------------------------------------------------------------

    def everything(self) -> tuple[Slots, Words]:
        """Return every row of the version: slots of the table, and rows that are no longer in it."""
        self._catch_up()
        slots = self._table.live()
        changed = self._overlay.taken(self._overlay.live())
        if not len(changed):
            return slots, changed
        hidden = self._table.find(changed)
        is_unchanged = np.ones(len(self._table.rows), np.bool_)
        is_unchanged[hidden[hidden >= 0]] = False
        return slots[is_unchanged[slots]], changed[changed[:, 0] >> _S32 == 0]

    def frozen_rows(self, words: Slots | None = None) -> FrozenRows:
        """Return all rows, in no particular order, as copies of their words that are made little by little; see :class:`FrozenRows`."""
        self._catch_up()
        if not len(self._overlay):
            return FrozenRows(self._table, words=words)
        slots, extra = self.everything()
        selected = np.zeros(len(self._table.used_rows()), np.uint8)
        selected[slots] = 1
        return FrozenRows(self._table, selected, extra, words)


class TableView(VersionView):
    """A version of one table, as :class:`ShardView`."""

    def __init__(self, store: VersionedTable, version: int) -> None:
        super().__init__(store, version)
        self.schema = store.schema
        self._planned: dict[tuple[str, ...], _Columns] = {}

    def find(self, keys: pa.RecordBatch, columns: Sequence[str]) -> Found:
        places, rows = self.words_of(keys)
        table = self._table
        return places, _decoded(table, rows, self._columns(columns), table.piece_bytes)

    def words_of(self, keys: pa.RecordBatch) -> tuple[Slots, Words]:
        """Return the rows with some keys as words, each with the place of its key."""
        table = self._table
        looking = table.looking()
        if isinstance(looking, MultimapTable):
            return self.rows_of_chains(*looking.chain_keys(keys))
        # Where each key has one row, a last key that numbers rows is 0.
        key_fields = tuple(slot for slot in table.layout.keys if slot.name != ROW_COLUMN)
        given_fields = key_fields[: keys.num_columns]
        if len(given_fields) < len(key_fields):
            return self.rows_of_prefixes(looking.rows_of(keys, given_fields), len(given_fields))
        rows, is_found = self.rows_of_keys(looking.rows_of(keys, given_fields))
        key_numbers = np.flatnonzero(is_found)
        return key_numbers, rows[key_numbers]

    def frozen(self, columns: Sequence[str]) -> Frozen:
        projection = self._columns(columns)
        return frozen_pieces(self.frozen_rows(all_words(projection[0])), partial(self._of_piece, projection))

    def _of_piece(self, columns: _Columns, rows: Words, frozen: FrozenRows) -> Iterator[pa.Table]:
        past = self._table.as_of(frozen.pool, frozen.lists)
        yield _decoded(past, rows, columns, past.snapshot_bytes)

    def _columns(self, names: Sequence[str]) -> _Columns:
        """Return the fields of some columns; worked out once, as look-ups of one key come by the thousand."""
        selected, layout = tuple(names), self._table.layout
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


class PrefixMatch:
    """A match of rows with prefixes: one pass over the rows, for any number of prefixes.

    Parameters
    ----------
    prefixes
        Rows of its layout of which the first `columns` key columns count.
    """

    def __init__(self, table: GroupTable, prefixes: Words, columns: int) -> None:
        layout = table.layout
        first = layout.flag_words + layout.null_words
        width = sum(slot.words for slot in layout.keys[:columns])
        # The first columns have their nulls in word 0, those beyond them in words of their own.
        nulls = layout.null_bits(layout.keys[:columns])
        self._mask, self.words = nulls.pop(0), [0, *nulls, *range(first, first + width)]
        self._bits = np.array([self._mask, *nulls.values(), *[_ALL_BITS] * width], np.uint64)
        width += len(nulls)
        self._secret = table.secret
        masked = np.ascontiguousarray(prefixes[:, self.words] & self._bits)
        self._index = new_index(HEAP, len(masked))
        self._stored = np.empty((len(masked) + 1, 1 + width), np.uint64)
        nothing_free, counters, slots = (
            np.empty(0, np.int64),
            np.zeros(2, np.int64),
            np.empty(len(masked), np.int64),
        )
        row_kernels.put(
            self._index, self._stored, masked, self._mask, 1, width, self._secret, 0, nothing_free, counters, len(masked), slots
        )  # fmt: skip
        #: The last one of equal prefixes.
        self._prefix_at = np.zeros(len(masked) + 1, np.int64)
        self._prefix_at[slots] = np.arange(len(masked))

    def places(self, rows: Words) -> Slots:
        """Return the index of each row's prefix, -1 for none.

        Parameters
        ----------
        rows
            Only their :attr:`words`.
        """
        out = np.empty(len(rows), np.int64)
        rows = rows & self._bits
        keys = np.ascontiguousarray(rows[:, 1:])
        index_kernels.lookup(
            self._index, self._stored, keys, np.ascontiguousarray(rows[:, 0]), self._mask, 1, self._secret, out
        )
        return np.where(out >= 0, self._prefix_at[out], -1)

"""The base of shards of ordered rows: reading a batch, and making its delta and output (see ``top.py``)."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.schema import StateSchema
from store_actors.engine import multimap_kernels as chain_kernels
from store_actors.engine.arrays import Mask, Slots, Words
from store_actors.engine.index_kernels import LIVE
from store_actors.engine.larger_index import new_index
from store_actors.engine.memory import HEAP, Memory
from store_actors.engine.ordering import RowOrder
from store_actors.engine.versions import CHANGE_COLUMN, REMOVED, UPDATED, UPDATED_AND_REMOVED, VersionedTable
from store_actors.operators.top_schema import RANK_COLUMN


class OrderedRows(VersionedTable):
    """Rows of one partition of a ``topN`` or ``keepLast``; its subclasses say how a batch changes them."""

    def __init__(self, schema: StateSchema, seed: int = 0, memory: Memory = HEAP) -> None:
        super().__init__(schema, seed, memory)
        layout, options = self.table.layout, schema.options
        self._n = int(options["n"])
        self._last_wins = options.get("ties", "first") == "last"
        self._order = RowOrder(layout, options["order"])
        self._payload: list[str] = list(options.get("payload", [field.name for field in schema.inputs]))
        self._rank = next((slot for slot in layout.state if slot.name == RANK_COLUMN), None)
        self._row_word = layout.keys[-1].word
        self._expires_by_key = any(slot.word == layout.expiry_word for slot in layout.keys)

    # -- in -------------------------------------------------------------------------------------------------------

    def _on_time(self, batch: pa.Table) -> Words:
        """Return the rows of a batch that are not late, with number and rank 0."""
        layout = self.table.layout
        fields = (*layout.keys[:-1], *(slot for slot in layout.state if slot is not self._rank))
        words = self.table.rows_of_table(batch, fields)
        if layout.expiry_word < 0:
            return words
        keep = words[:, layout.expiry_word].view(np.int64) > self.late_ms * 1000
        return words if keep.all() else words[keep]

    def _number_partitions(self, words: Words) -> tuple[Slots, Slots]:
        """Return the number of each row's partition, and the first row of each partition."""
        layout, size = self.table.layout, len(words)
        ids, firsts = np.empty(size, np.int64), np.empty(size, np.int64)
        index = new_index(HEAP, size)
        count = chain_kernels.number_keys(
            words,
            layout.flag_words,
            layout.key_words - 1,
            layout.chain_mask,
            self.table.secret,
            index,
            ids,
            firsts,
        )
        return ids, firsts[:count]

    def _set_rank(self, rows: Words, ranks: Slots | int) -> None:
        if self._rank is not None:
            rows[:, self._rank.word] = ranks
            rows[:, self._rank.flag_word] |= np.uint64(self._rank.flag)

    def _ranks_of(self, slots: Slots) -> Words:
        """Return the ranks of rows; all are 0 if rows have no rank."""
        return np.zeros(len(slots), np.uint64) if self._rank is None else self.table.rows[slots, self._rank.word]

    def _without_rank(self, rows: Words) -> Words:
        rows = rows.copy()
        if self._rank is not None:
            rows[:, self._rank.flag_word] &= ~np.uint64(self._rank.flag)
        return rows

    # -- out ------------------------------------------------------------------------------------------------------

    def _evict(self, watermark_ms: int) -> tuple[Slots, Words]:
        """Remove the rows that the watermark has passed; return their slots, and the rows for the undo."""
        evicted = self.table.evict(watermark_ms * 1000)
        rows = self.table.taken(evicted)
        rows[:, 0] |= LIVE
        return evicted, rows

    def _is_among(self, slots: Slots, members: Slots) -> Mask:
        if not len(slots) or not len(members):
            return np.zeros(len(slots), np.bool_)
        marks = np.zeros(len(self.table.rows), np.bool_)
        marks[members] = True
        return marks[slots]

    def _nothing(self) -> Words:
        return np.empty((0, self.table.layout.row_words), np.uint64)

    def _delta(self, updated: Words, closed: Words, removed: Words) -> pa.Table:
        """Return the delta: rows in the version, rows that are emitted though the watermark closed them at once, rows that are gone."""
        kinds = np.repeat(
            np.array([UPDATED, UPDATED_AND_REMOVED, REMOVED], np.int8), [len(updated), len(closed), len(removed)]
        )
        rows = self.table.decode(np.concatenate([updated, closed, removed]))
        return rows.append_column(CHANGE_COLUMN, pa.array(kinds))

    def output(self, delta: pa.Table) -> pa.Table:
        """Return the rows that are new or moved: partition, payload and rank."""
        is_kept = pc.not_equal(delta.column(CHANGE_COLUMN), REMOVED)
        names = [*(field.name for field in self.schema.input_keys), *self._payload]
        if self._rank is not None:
            names.append(RANK_COLUMN)
        return delta.filter(is_kept).select(names)

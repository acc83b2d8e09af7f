"""First rows of each partition by an order: ``topN`` and ``keepLast``. Pure logic.

The result is a table: of each partition its first `n` rows. A batch emits those of its rows that are new or whose rank changed.
Rows that have left the table are forgotten, so a row never comes back when one before it goes.

Order: that of :mod:`store_actors.engine.ordering`. Rows that are equal in it stand in the order of their arrival (within a
batch the order in which they are handed over): the one that came first is first and keeps its place. With ``ties: "last"``, as
``keepLast`` has it, the one that came last is first and takes the place.

Event time: rows at or before the watermark are late. Where the expiry is a key (a window), the watermark closes partitions as
they are: nothing is emitted for that, their ranks are final. Where it is a value, the watermark takes single rows out of the table, and
the others move up. A row that the watermark of its own batch takes out is emitted once, with the rank it had among all.

Schema (:func:`~store_actors.operators.top_schema.top_schema` makes it): ``keys`` are the partition and ``__row``, which numbers
the rows in the order of their arrival; one ``VALUE`` for each input; with ranks, a last ``VALUE`` ``rank``, int32, from 1.
Options: ``n``; ``order`` (see :class:`~store_actors.engine.ordering.RowOrder`); ``ties``: "first" or "last"; ``payload``:
columns that are emitted, not only ordered by.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.errors import StateMismatchError
from coordinator.model.schema import ROW_COLUMN, StateSchema
from store_actors.engine import multimap_kernels as chain_kernels
from store_actors.engine.arrays import Mask, Slots, Words
from store_actors.engine.index_kernels import LIVE
from store_actors.engine.memory import HEAP, Memory
from store_actors.engine.multimap import MultiTable, numbered_keys
from store_actors.engine.ordering import RowOrder, sorts_before
from store_actors.engine.versions import (
    CHANGE_COLUMN,
    REMOVED,
    UPDATED,
    UPDATED_AND_REMOVED,
    Change,
    UndoPart,
    VersionedTable,
)
from store_actors.messages.requests import ShardInput
from store_actors.operators.top_schema import RANK_COLUMN

#: Arrival of a batch's rows: after all rows of the state.
_NEW = np.int64(1 << 62)


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

    def _is_among(self, slots: Slots, members: Slots) -> Mask:
        # Marks, as np.isin sorts where slots are spread over a large table.
        if not len(slots) or not len(members):
            return np.zeros(len(slots), np.bool_)
        marks = np.zeros(len(self.table.rows), np.bool_)
        marks[members] = True
        return marks[slots]

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


def top_shard(schema: StateSchema, seed: int = 0, memory: Memory = HEAP) -> FirstShard | TopShard:
    """Return an empty shard: the one for a single row of each partition, where that will do."""
    single_row = int(schema.options["n"]) == 1
    return FirstShard(schema, seed, memory) if single_row else TopShard(schema, seed, memory)


class FirstShard(OrderedRows):
    """The first row of each partition; all of them are number 0 of their partition, so a better row takes the other's place."""

    def apply(self, rows: ShardInput, watermark_ms: int, version: int, late_ms: int | None = None) -> Change:
        """Let better rows take the places of others; see :meth:`AggregateShard.apply`."""
        self.check_next(version, late_ms)
        words = self._on_time(rows.raw)
        best, is_replacing, before = self._best(words)
        slots = self.table.put(best)
        evicted, former = self._expired(watermark_ms)
        step = self.begin(version)
        step.watermark_ms = watermark_ms
        key_end = self.table.layout.flag_words + self.table.layout.key_words
        step.add(UndoPart(best[~is_replacing, :key_end].copy(), before), UndoPart(former[:0], former))
        closed, passed = self._is_among(slots, evicted), self._is_among(evicted, slots)
        return step.change(
            self._delta(best[~closed], best[closed], former[~passed]),
            rows_updated=len(best),
            rows_removed=len(evicted),
            rows_in=rows.rows_read,
            rows_late=rows.raw.num_rows - len(words),
        )

    def load(self, delta: pa.Table, version: int, watermark_ms: int) -> None:
        """Replay a delta; see :meth:`VersionedTable.load`.

        Raises
        ------
        StateMismatchError
            The rows were written by a query that kept several of each partition.
        """
        if delta.num_rows and pc.max(delta.column(ROW_COLUMN)).as_py() != 0:
            raise StateMismatchError(
                "the state holds several rows of each partition, and the query keeps one; nothing was changed; restore the query "
                "that wrote it, or use another name for the new one",
                version=version,
            )
        super().load(delta, version, watermark_ms)

    def _best(self, words: Words) -> tuple[Words, Mask, Words]:
        """Return the rows of the batch that are the first of their partitions now, which of them replace a row, and those rows."""
        ids, firsts = numbered_keys(self.table, words)
        slots = self.table.find(words[firsts])
        occupied = np.flatnonzero(slots >= 0)
        existing = self.table.taken(slots[occupied])
        order = self._order.words([existing, words], self.table.pool)
        winners = np.full(len(firsts), -1, np.int64)
        chain_kernels.first_of_each(order, np.concatenate([occupied, ids]), self._last_wins, winners)
        is_new = winners >= len(occupied)
        best = np.take(words, winners[is_new] - len(occupied), axis=0)
        best[:, 0] |= LIVE
        self._set_rank(best, 1)
        return best, slots[is_new] >= 0, existing[is_new[occupied]]


@dataclass(frozen=True, slots=True)
class _Picked:
    """The changes of a batch: its rows that enter, in the order of arrival, and slots of rows that leave or move."""

    entering: Slots
    entering_ranks: Slots
    leaving: Slots
    moved: Slots
    moved_ranks: Slots


class TopShard(OrderedRows, MultiTable):
    """The first rows of each partition."""

    def apply(self, rows: ShardInput, watermark_ms: int, version: int, late_ms: int | None = None) -> Change:
        """Let rows enter, and others leave; see :meth:`AggregateShard.apply`."""
        self.check_next(version, late_ms)
        words = self._on_time(rows.raw)
        picked = self._pick(words)
        parts: list[UndoPart] = []
        ranks_before = self._ranks_of(picked.moved)
        created, displaced = self._replace(words, picked, parts)
        evicted, former = self._expired(watermark_ms)
        parts.append(UndoPart(former[:0], former))
        moved = self._close_ranks(former, created, picked.moved, ranks_before, parts)
        step = self.begin(version)
        step.watermark_ms = watermark_ms
        step.add(*parts)
        # Final results of a window that closes are emitted even if only their rank moved.
        is_final = self._is_among(evicted, np.concatenate([created, moved]) if self._expires_by_key else created)
        removed = former[~is_final] if self._expires_by_key else self._without_rank(former[~is_final])
        kept = np.concatenate([created, moved])
        kept = kept[~self._is_among(kept, evicted)]
        gone = np.concatenate([self._without_rank(displaced), removed])
        return step.change(
            self._delta(self.table.taken(kept), former[is_final], gone),
            rows_updated=len(kept) + int(is_final.sum()),
            rows_removed=len(displaced) + len(evicted),
            rows_in=rows.rows_read,
            rows_late=rows.raw.num_rows - len(words),
        )

    # -- who is among the first -----------------------------------------------------------------------------------

    def _match(self, words: Words, firsts: Slots) -> tuple[Slots, Slots]:
        """Return the rows of the state in the partitions of new rows: the number of each row's partition, and its slot."""
        return self.table.match(*self.table.chain_keys_of(words[firsts]))

    def _pick(self, words: Words) -> _Picked:
        """Compare the rows of a batch with those of their partitions."""
        ids, firsts = numbered_keys(self.table, words)
        owners, slots = self._match(words, firsts)
        existing = self.table.taken(slots)
        order = self._order.words([existing, words], self.table.pool)
        chosen = self._contenders(order, owners, ids, len(firsts))
        arrival = np.concatenate([existing[:, self._row_word].view(np.int64), _NEW + np.arange(len(words))])
        partition = np.concatenate([owners, ids])
        room = np.minimum(np.bincount(partition[chosen], minlength=len(firsts)), self._n)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(room)])
        best = np.empty(starts[-1], np.int64)
        chain_kernels.first_n_of_each(order, -arrival if self._last_wins else arrival, partition, chosen, starts, best)
        ranks = np.arange(len(best)) - np.repeat(starts[:-1], room) + 1
        return self._compared(best, ranks, chosen[chosen < len(slots)], slots, existing)

    def _compared(self, best: Slots, ranks: Slots, challenged: Slots, slots: Slots, existing: Words) -> _Picked:
        """Return the changes that follow from the first rows and their ranks; rows of the state are those below ``len(slots)``."""
        is_old = best < len(slots)
        stays = np.zeros(len(slots), np.bool_)
        stays[best[is_old]] = True
        moved = best[is_old][:0]
        moved_ranks = ranks[:0]
        if self._rank is not None:
            differs = existing[best[is_old], self._rank.word] != ranks[is_old].view(np.uint64)
            moved, moved_ranks = best[is_old][differs], ranks[is_old][differs]
        entering = best[~is_old]
        by_arrival = np.argsort(entering)
        return _Picked(
            entering[by_arrival] - len(slots),
            ranks[~is_old][by_arrival],
            slots[challenged[~stays[challenged]]],
            slots[moved],
            moved_ranks,
        )

    def _contenders(self, order: Words, owners: Slots, ids: Slots, partitions: int) -> Slots:
        """Return the rows that have to be put in order: new ones that can enter, and what is in the partitions that they can enter."""
        num_existing = len(owners)
        is_full = np.bincount(owners, minlength=partitions) >= self._n
        worst = np.full(partitions, -1, np.int64)
        chain_kernels.first_of_each(~order[:num_existing], owners, False, worst)
        enters = ~is_full[ids]
        tested = np.flatnonzero(~enters)
        bound = worst[ids[tested]]
        enters[tested] = sorts_before(order[num_existing + tested], order[bound], if_equal=self._last_wins)
        is_touched = np.zeros(partitions, np.bool_)
        is_touched[ids[enters]] = True
        return np.concatenate([np.flatnonzero(is_touched[owners]), num_existing + np.flatnonzero(enters)])

    # -- changing -------------------------------------------------------------------------------------------------

    def _replace(self, words: Words, picked: _Picked, parts: list[UndoPart]) -> tuple[Slots, Words]:
        """Remove rows, move others and insert new ones; return the slots of the new rows, and the removed rows."""
        table = self.table
        displaced = table.taken(picked.leaving)
        moved = table.taken(picked.moved)
        new = np.take(words, picked.entering, axis=0)
        # Before any row is gone: a number that is taken out and used again in one version could not be told apart in its delta.
        new[:, self._row_word] = self.numbers(len(new))
        new[:, 0] |= LIVE
        self._set_rank(new, picked.entering_ranks)
        if self._rank is not None:
            table.will_change(picked.moved)
            table.rows[picked.moved, self._rank.word] = picked.moved_ranks
        table.remove_rows(displaced)
        created = table.put(new)
        parts.append(UndoPart(new, np.concatenate([displaced, moved])))
        return created, displaced

    def _close_ranks(
        self, evicted: Words, created: Slots, moved: Slots, ranks_before: Words, parts: list[UndoPart]
    ) -> Slots:
        """Move rows up to the ranks of expired ones; slots of all older rows whose rank is another than before the batch."""
        if self._rank is None or self._expires_by_key or not len(evicted):
            return moved
        table, word = self.table, self._rank.word
        _, firsts = numbered_keys(self.table, evicted)
        owners, slots = self._match(evicted, firsts)
        ranks = table.rows[slots, word]
        sequence = np.lexsort((ranks, owners))
        slots, ranks, positions = slots[sequence], ranks[sequence], _positions(owners[sequence])
        differs = ranks != positions.view(np.uint64) + 1
        slots, ranks = slots[differs], ranks[differs]
        before = table.taken(slots)
        parts.append(UndoPart(before[:0], before))
        table.will_change(slots)
        table.rows[slots, word] = positions[differs] + 1
        # A row may be back at the rank that it had: of the two ranks that it had so far in this batch the first one counts.
        changed, first = np.unique(np.concatenate([moved, slots]), return_index=True)
        is_other = table.rows[changed, word] != np.concatenate([ranks_before, ranks])[first]
        reranked: Slots = changed[is_other & ~self._is_among(changed, created)]
        return reranked


def _positions(partition: Slots) -> Slots:
    """Return the position of each row within its partition, from 0; rows of a partition are adjacent."""
    size = len(partition)
    starts = np.flatnonzero(np.concatenate([np.ones(min(size, 1), np.bool_), partition[1:] != partition[:-1]]))
    return np.arange(size) - np.repeat(starts, np.diff(np.append(starts, size)))

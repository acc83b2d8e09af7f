"""A hash table of groups: key words, state words, an index; folds batches in, and lets rows be written, found and removed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from weakref import WeakSet

import numpy as np
import pyarrow as pa

from store_actors.engine import accumulate_kernels, index_kernels, row_kernels
from store_actors.engine.arrays import Bytes, Slots, Words
from store_actors.engine.calendar import ExpiryCalendar
from store_actors.engine.frozen import SNAPSHOT_BYTES, FrozenRows
from store_actors.engine.hash_kernels import row_secrets, secret_words
from store_actors.engine.layout import Feed
from store_actors.engine.sketches import opened
from store_actors.engine.word_rows import EncodedBatch, WordRows
from store_actors.schema import StateSchema

__all__ = ["GroupTable", "Touched"]

#: Words of rows that are overwritten at once, at most: states of many words would need room for every row of a batch.
_UNDO_WORDS = 1 << 24
#: How full an index may be: beyond that linear probing gets slow.
_FULL = 0.6


@dataclass(slots=True)
class Touched:
    """What folding did: slots of new groups, slots of changed groups and what those held before."""

    created: Slots
    changed: Slots
    before: Words

    @classmethod
    def nothing(cls, row_words: int) -> Touched:
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, row_words), np.uint64))

    def joined(self, other: Touched) -> Touched:
        if not len(self.created) and not len(self.changed):
            return other
        return Touched(
            np.concatenate([self.created, other.created]),
            np.concatenate([self.changed, other.changed]),
            np.concatenate([self.before, other.before]),
        )


class GroupTable(WordRows):
    """All groups of one shard, or of one map task's batch. Not thread-safe; its owner locks.

    Parameters
    ----------
    schema
        The operator's schema.
    seed
        As :class:`~store_actors.engine.word_rows.WordRows`.
    capacity
        Groups to have room for from the start.
    """

    def __init__(self, schema: StateSchema, seed: int = 0, *, capacity: int = 1 << 8) -> None:
        super().__init__(schema, seed)
        #: What the hashes of keys are keyed by.
        self.secret: Words = secret_words(seed, "rows", row_secrets(self.layout.key_words))
        self.rows: Words = np.zeros((capacity, self.layout.row_words), np.uint64)
        self._index: Words = np.zeros(1 << (capacity * 2).bit_length(), np.uint64)
        self._free: Slots = np.empty(1 << 8, np.int64)
        #: Slots ever used, free slots among them.
        self._counters: Slots = np.zeros(2, np.int64)
        self._calendar = ExpiryCalendar()
        #: :attr:`piece_bytes` of pieces of a snapshot.
        self.snapshot_bytes = SNAPSHOT_BYTES
        self._frozen: WeakSet[FrozenRows] = WeakSet()

    def __len__(self) -> int:
        return int(self._counters[0] - self._counters[1])

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        beside = self._index.nbytes + self._free.nbytes + self._calendar.nbytes
        beside += sum(reader.nbytes for reader in list(self._frozen))
        return self.rows.nbytes + self.pool.nbytes + self.lists.nbytes + beside

    # -- in -------------------------------------------------------------------------------------------------------

    def accumulate(self, batch: EncodedBatch, stamp: int) -> Touched:
        """Fold a batch in. ``stamp`` (uint32) names the version: a group's old words are kept once per stamp."""
        layout = self.layout
        size, most = len(batch), max(1, _UNDO_WORDS // self.layout.row_words)
        if size > most:
            touched = Touched.nothing(layout.row_words)
            for begin in range(0, size, most):
                touched = touched.joined(self.accumulate(batch.take(slice(begin, begin + most)), stamp))
            return touched
        created, changed = np.empty(size, np.int64), np.empty(size, np.int64)
        before = np.empty((size, layout.row_words), np.uint64)
        progress = np.zeros(2, np.int64)
        row = 0
        if self._frozen:
            self.will_change(self._slots_of(batch.keys, batch.nulls))
        while True:
            row, progress[0], progress[1] = accumulate_kernels.accumulate(
                self._index, self.rows, batch.keys, batch.nulls, layout.key_mask, layout.flag_words, self.secret, row,
                batch.values, batch.valid, batch.feed.operations, batch.feed.limits, self.pool.arena, self.pool.offsets,
                layout.initial, np.uint32(stamp), self._free, self._counters, self._index_room(), created, changed,
                before, progress,
            )  # fmt: skip
            if row == size:
                break
            self._grow(size - row)
        self._schedule(created[: progress[0]])
        if batch.feed.lists:
            slots = self._slots_of(batch.keys, batch.nulls)
            self.extend(batch.feed, self.rows, slots, batch.values, batch.valid, batch.elements)
        # Copies of the used part: the buffers were sized for a batch in which every row is a group of its own.
        return Touched(created[: progress[0]].copy(), changed[: progress[1]].copy(), before[: progress[1]].copy())

    def extend(
        self, feed: Feed, rows: Words, targets: Slots, values: Words, valid: Bytes, elements: Words | None = None
    ) -> None:
        """Let the lists of ``rows[targets]`` grow by a batch (as in :class:`EncodedBatch`), in its order.

        Without `elements`, lists that are told by `values` are this table's own.
        """
        for field, column, often in feed.lists:
            if feed is self.layout.raw and field.sketch is not None:
                source = opened(field.sketch, values[column], valid[column], self.pool)
                self.lists.merge_sketches(rows, targets, field, *source)
            elif field.sketch is not None:
                begins, lengths = (np.ascontiguousarray(values[column + one]).view(np.int64) for one in range(2))
                self.lists.merge_sketches(rows, targets, field, elements, begins, lengths)
            elif feed is self.layout.raw and field.is_counted:
                self.lists.append_counted(rows, targets, field, values, valid, column, often)
            elif feed is self.layout.raw:
                self.lists.append(rows, targets, field, values, valid, column)
            else:
                self.lists.merge(rows, targets, field, elements, values, column)

    def touch_global_group(self, stamp: int) -> Touched:
        """Write the one group of an operator without keys as it is, or as it is before any input."""
        former = self.live()
        before = np.take(self.rows, former, axis=0)
        row = before.copy() if len(former) else self.layout.initial.reshape(1, -1).copy()
        row[0, 0] = row[0, 0] & np.uint64(0xFFFFFFFF) | np.uint64(stamp << 32)
        self.put(row)
        return Touched(self.live()[len(former) :], former, before)

    def put(self, rows: Words) -> Slots:
        """Store whole rows laid out as this table's (``before`` of an undo, or :meth:`rows_of` a delta); returns their slots."""
        layout, done = self.layout, 0
        slots = np.empty(len(rows), np.int64)
        if self._frozen:
            self.will_change(self.find(rows))
        while True:
            done = row_kernels.put(
                self._index, self.rows, rows, layout.key_mask, layout.flag_words, layout.key_words, self.secret, done,
                self._free, self._counters, self._index_room(), slots,
            )  # fmt: skip
            if done == len(rows):
                break
            self._grow(len(rows) - done)
        self._schedule(slots)
        return slots

    def upsert(self, rows: Words, stamp: int) -> tuple[Slots, Words]:
        """Write whole rows as the version that ``stamp`` (uint32) names; of rows with one key the last one stays.

        Returns
        -------
        tuple
            Slots of new keys, and what rows of older versions held before.
        """
        layout, size = self.layout, len(rows)
        keys, nulls = self.keys_of(rows)
        created, before = np.empty(size, np.int64), np.empty((size, layout.row_words), np.uint64)
        progress, row = np.zeros(2, np.int64), 0
        if self._frozen:
            self.will_change(self._slots_of(keys, nulls))
        while True:
            row, progress[0], progress[1] = row_kernels.upsert(
                self._index, self.rows, rows, keys, nulls, layout.key_mask, layout.flag_words, self.secret, row,
                np.uint32(stamp), self._free, self._counters, self._index_room(), created, before, progress,
            )  # fmt: skip
            if row == size:
                break
            self._grow(size - row)
        self._schedule(created[: progress[0]])
        return created[: progress[0]].copy(), before[: progress[1]].copy()

    def insert(self, rows: Words, stamp: int) -> tuple[Slots, Slots]:
        """Write those whole rows whose key is not there yet, as the version that ``stamp`` (uint32) names.

        Returns
        -------
        tuple
            Slots of the new keys, and which of `rows` each is: of rows with the same key the first one.
        """
        layout, size = self.layout, len(rows)
        keys, nulls = self.keys_of(rows)
        created, sources = np.empty(size, np.int64), np.empty(size, np.int64)
        row = made = 0
        while True:
            row, made = row_kernels.insert(
                self._index, self.rows, rows, keys, nulls, layout.key_mask, layout.flag_words, self.secret, row,
                np.uint32(stamp), self._free, self._counters, self._index_room(), created, sources, made,
            )  # fmt: skip
            if row == size:
                break
            self._grow(size - row)
        self._schedule(created[:made])
        return created[:made].copy(), sources[:made].copy()

    def _schedule(self, slots: Slots) -> None:
        """Note when rows expire. A row's expiry stays as long as the row is there."""
        word = self.layout.expiry_word
        if word >= 0 and len(slots):
            self._calendar.add(self.rows[slots, word].view(np.int64), slots.copy())
            if self._calendar.is_cluttered(len(self)):
                live = self.live()
                self._calendar = ExpiryCalendar()
                self._calendar.add(self.rows[live, word].view(np.int64), live)

    def keys_of(self, rows: Words) -> tuple[Words, Words]:
        """Key words and key-null bits of rows given as words."""
        first = self.layout.flag_words
        keys = np.ascontiguousarray(rows[:, first : first + self.layout.key_words])
        return keys, rows[:, 0] & self.layout.key_mask

    def find(self, rows: Words) -> Slots:
        """Slots of the groups with the keys of these rows; -1 where there is none."""
        return self._slots_of(*self.keys_of(rows))

    def _slots_of(self, keys: Words, nulls: Words) -> Slots:
        """Slot of each key; -1 where there is none."""
        out = np.empty(len(nulls), np.int64)
        index_kernels.lookup(
            self._index, self.rows, keys, nulls, self.layout.key_mask, self.layout.flag_words, self.secret, out
        )
        return out

    # -- out ------------------------------------------------------------------------------------------------------

    def remove_rows(self, rows: Words) -> Slots:
        """Remove the groups with the keys of these rows; returns the slots they had."""
        layout = self.layout
        keys, nulls = self.keys_of(rows)
        if self._frozen:
            self.will_change(self._slots_of(keys, nulls))
        self._reserve_free(len(rows))
        out = np.empty(len(rows), np.int64)
        count = index_kernels.remove(
            self._index, self.rows, keys, nulls, layout.key_mask, layout.flag_words, self.secret, self._free,
            self._counters, out,
        )  # fmt: skip
        return out[:count]

    def evict(self, limit: int) -> Slots:
        """Remove every group whose expiry is at most ``limit`` (microseconds); returns their slots, words intact."""
        layout = self.layout
        candidates = self._calendar.due(limit)
        self.will_change(candidates)
        self._reserve_free(len(candidates))
        out = np.empty(len(candidates), np.int64)
        count = index_kernels.evict(
            self._index, self.rows, candidates, layout.key_mask, layout.flag_words, layout.key_words,
            self.secret, layout.expiry_word, limit, self._free, self._counters, out,
        )  # fmt: skip
        return out[:count].copy()

    def used_rows(self) -> Words:
        """Every row that was ever used, live or not (word 0 tells)."""
        return self.rows[: int(self._counters[0])]

    def live(self) -> Slots:
        """Slots of all groups."""
        out = np.empty(len(self), np.int64)
        index_kernels.live_slots(self.rows, int(self._counters[0]), out)
        return out

    # -- readers that outlive changes -----------------------------------------------------------------------------

    @property
    def is_frozen(self) -> bool:
        """Whether somebody reads the table as it was."""
        return len(self._frozen) > 0

    def frozen_by(self, reader: FrozenRows) -> None:
        """Tell a reader of changes from now on, before they are made."""
        self._frozen.add(reader)

    def thawed_by(self, reader: FrozenRows) -> None:
        """Tell it no more."""
        self._frozen.discard(reader)

    def will_change(self, slots: Slots) -> None:
        """Called before rows at these slots are changed or removed; -1 is no slot."""
        for reader in list(self._frozen):
            reader.keep((slots,))

    def will_undo(self) -> None:
        """Called when versions were undone: what is behind their lists will be written over."""
        if self._frozen and self.layout.lists:
            for reader in list(self._frozen):
                reader.keep_lists()
            self.lists.detach()

    def decode_frozen(self, rows: Words, frozen: FrozenRows) -> Iterator[pa.Table]:
        """Arrow tables in ``row_schema`` of rows that frozen rows gave out, a piece of a snapshot each; no lock is needed."""
        past, fields = self.as_of(frozen), (*self.layout.keys, *self.layout.state)
        for some in past.cut(rows, fields, limit=self.snapshot_bytes):
            yield past.decode(rows[some])

    def as_of(self, frozen: FrozenRows) -> GroupTable:
        """A table that knows what the words of frozen rows mean, and nothing else."""
        past = copy.copy(self)
        past.pool, past.lists = frozen.pool, frozen.lists
        return past

    # -- strings --------------------------------------------------------------------------------------------------

    def reindex(self) -> None:
        """Make the index anew, after key words changed in place."""
        layout = self.layout
        self._index[:] = 0
        index_kernels.reindex(
            self._index,
            self.rows,
            len(self.used_rows()),
            layout.key_mask,
            layout.flag_words,
            layout.key_words,
            self.secret,
        )

    # -- room -----------------------------------------------------------------------------------------------------

    def room(self) -> dict[str, int]:
        """How much the table holds, for :meth:`reserve`."""
        return {
            "rows": len(self),
            "texts": self.pool.count,
            "text_bytes": self.pool.used,
            "list_words": self.lists.used,
        }

    def reserve(self, room: Mapping[str, int]) -> None:
        """Make room at once for what a table of the same rows had (:meth:`room`), so that nothing is moved while they come."""
        rows = room["rows"]
        if rows > len(self.rows):
            used = self.used_rows()
            self.rows = np.empty((rows, self.layout.row_words), np.uint64)
            self.rows[: len(used)] = used
        size = 1 << int(rows / _FULL).bit_length()
        if size > len(self._index):
            index = np.zeros(size, np.uint64)
            index_kernels.grow_index(self._index, index)
            self._index = index
        self.pool.reserve(room["texts"], room["text_bytes"])
        self.lists.reserve(room["list_words"])

    def _index_room(self) -> int:
        """Keys that still fit before the index is full."""
        return int(len(self._index) * _FULL) - len(self)

    def _grow(self, wanted: int) -> None:
        """Make room for at least one more key; for `wanted` (the rest of a batch) as far as doubling goes."""
        if self._index_room() <= 0:
            index = np.zeros(len(self._index) * 2, np.uint64)
            index_kernels.grow_index(self._index, index)
            self._index = index
        used, capacity = int(self._counters[0]), len(self.rows)
        if used == capacity and self._counters[1] == 0:
            # Half more, not double, once large: at most a third of a big shard's rows are spare.
            extra = capacity if capacity < 1 << 20 else capacity // 2
            rows = np.empty((capacity + max(extra, min(wanted, 1 << 16)), self.layout.row_words), np.uint64)
            rows[:used] = self.rows
            self.rows = rows

    def _reserve_free(self, more: int) -> None:
        needed = int(self._counters[1]) + more
        if needed > len(self._free):
            free = np.empty(max(needed, 2 * len(self._free)), np.int64)
            free[: self._counters[1]] = self._free[: self._counters[1]]
            self._free = free

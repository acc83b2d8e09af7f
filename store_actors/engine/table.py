"""A hash table of groups: key words, state words, an index; folds batches in, and lets rows be written, found and removed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coordinator.model.schema import StateSchema
from store_actors.engine import index_kernels, row_kernels
from store_actors.engine.arrays import Bytes, Mask, Slots, Words, distinct
from store_actors.engine.expiry_queue import ExpiryQueue
from store_actors.engine.frozen import FrozenRows
from store_actors.engine.hash_kernels import row_secrets, secret_words
from store_actors.engine.index_kernels import LIVE
from store_actors.engine.layout import Feed
from store_actors.engine.lists import ListPool, opened
from store_actors.engine.memory import HEAP, Memory, blocks, index_room, larger_index, new_index, steps
from store_actors.engine.strings import StringPool
from store_actors.engine.word_rows import EncodedBatch, WordRows

#: Bytes of rows that are overwritten at once, at most: states of many words would need room for every row of a batch.
_UNDO_BYTES = 1 << 27
#: Fewest keys that are put in order first, where that pays.
_SORTED = 1 << 10
Item = TypeVar("Item", bound=np.generic)


@dataclass(slots=True)
class Touched:
    """The effect of folding or writing rows: slots of new groups, slots of changed ones, and the rows that these had before."""

    created: Slots
    changed: Slots
    before: Words

    @classmethod
    def nothing(cls, row_words: int) -> Touched:
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, row_words), np.uint64))

    @classmethod
    def of(cls, created: Slots, changed: Slots, before: Words, progress: Slots) -> Touched:
        """Return the used parts of arrays that were made for a batch in which every row is a group of its own."""
        return cls(_used(created, progress[0]), _used(changed, progress[1]), _used(before, progress[1]))

    def joined(self, later: Touched) -> Touched:
        if not len(self.created) and not len(self.changed):
            return later
        return Touched(
            np.concatenate([self.created, later.created]),
            np.concatenate([self.changed, later.changed]),
            np.concatenate([self.before, later.before]),
        )


class GroupTable(WordRows):
    """All groups of one shard, or of one map task's batch. Not thread-safe; its owner locks."""

    def __init__(self, schema: StateSchema, seed: int = 0, memory: Memory = HEAP, *, capacity: int = 1 << 8) -> None:
        super().__init__(schema, seed, memory)
        #: Secret that the hashes of keys are keyed by.
        self.secret: Words = secret_words(seed, "rows", row_secrets(self.layout.key_words))
        self.rows: Words = memory.zeros((capacity, self.layout.row_words), np.uint64)
        self._index: Words = new_index(memory, capacity)
        self._free: Slots = memory.zeros(1 << 8, np.int64)
        #: Slots ever used, free slots among them.
        self._counters: Slots = np.zeros(2, np.int64)
        self._expiry_queue = ExpiryQueue(memory)
        #: :attr:`piece_bytes` of pieces of a snapshot.
        self.snapshot_bytes = memory.snapshot_bytes
        self._frozen: WeakSet[FrozenRows] = WeakSet()

    def __len__(self) -> int:
        return int(self._counters[0] - self._counters[1])

    @property
    def nbytes(self) -> int:
        """Memory of the table, in bytes. Room to grow is not used yet, and takes none."""
        beside = self._index.nbytes + 8 * int(self._counters[1]) + self._expiry_queue.nbytes
        beside += sum(reader.nbytes for reader in list(self._frozen))
        return self.used_rows().nbytes + self.pool.nbytes + self.lists.nbytes + beside

    # -- in -------------------------------------------------------------------------------------------------------

    def accumulate(self, batch: EncodedBatch, stamp: int) -> Touched:
        """Fold a batch in. ``stamp`` (uint32) names the version: a group's old words are kept once per stamp."""
        layout = self.layout
        row_bytes = 8 * layout.row_words
        size, most = len(batch), max(1, min(_UNDO_BYTES, 2 * self.piece_bytes) // row_bytes)
        if size > most:
            touched = Touched.nothing(layout.row_words)
            for begin in range(0, size, most):
                touched = touched.joined(self.accumulate(batch.take(slice(begin, begin + most)), stamp))
            return touched
        self.memory.check(size * row_bytes)
        if (order := self._order(batch.keys, batch.nulls)) is not None:
            batch = batch.take(order)
        created, changed = np.empty(size, np.int64), np.empty(size, np.int64)
        before = np.empty((size, layout.row_words), np.uint64)
        progress = np.zeros(2, np.int64)
        row = 0
        if self._frozen:
            self.will_change(self._slots_of(batch.keys, batch.nulls))
        while row < size:
            end = row + self.memory.step(size - row)
            row, progress[0], progress[1] = row_kernels.accumulate(
                self._index, self.rows, batch.keys[:end], batch.nulls, layout.key_mask, layout.flag_words, self.secret, row,
                batch.values, batch.valid, batch.feed.operations, batch.feed.limits, self.pool.arena, self.pool.offsets,
                layout.initial, np.uint32(stamp), self._free, self._counters, self._index_room(), created, changed,
                before, progress,
            )  # fmt: skip
            if row < end:
                self._grow(size - row)
        self._schedule(created[: progress[0]])
        if batch.feed.lists:
            slots = self._slots_of(batch.keys, batch.nulls)
            self.extend(batch.feed, self.rows, slots, batch.values, batch.valid, batch.elements)
        return Touched.of(created, changed, before, progress)

    def extend(
        self, feed: Feed, rows: Words, targets: Slots, values: Words, valid: Bytes, elements: Words | None = None
    ) -> None:
        """Let the lists of ``rows[targets]`` grow by a batch (as in :class:`EncodedBatch`), in its order.

        Without `elements`, lists in `values` are this table's own.
        """
        for field, column, often in feed.lists:
            if feed is self.layout.raw and field.sketch is not None:
                source = opened(field.sketch, values[column], valid[column], self.pool)
                self.lists.merge_sketches(rows, targets, field, *source)
            elif field.sketch is not None:
                begins, lengths = (np.ascontiguousarray(values[column + number]).view(np.int64) for number in range(2))
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
        before = self.taken(former)
        row = before.copy() if len(former) else self.layout.initial.reshape(1, -1).copy()
        row[0, 0] = row[0, 0] & np.uint64(0xFFFFFFFF) | np.uint64(stamp << 32)
        self.put(row)
        return Touched(self.live()[len(former) :], former, before)

    def put(self, rows: Words) -> Slots:
        """Store whole rows laid out as this table's (``before`` of an undo, or :meth:`rows_of` a delta); returns their slots."""
        layout, done = self.layout, 0
        if (order := self._order(*self.keys_of(rows))) is not None:
            rows = rows[order]
        slots = np.empty(len(rows), np.int64)
        if self._frozen:
            self.will_change(self.find(rows))
        while done < len(rows):
            end = done + self.memory.step(len(rows) - done)
            done = row_kernels.put(
                self._index, self.rows, rows[:end], layout.key_mask, layout.flag_words, layout.key_words, self.secret, done,
                self._free, self._counters, self._index_room(), slots,
            )  # fmt: skip
            if done < end:
                self._grow(len(rows) - done)
        self._schedule(slots)
        return slots if order is None else _put_back(slots, order)

    def upsert(self, rows: Words, stamp: int) -> Touched:
        """Write whole rows as the version that ``stamp`` (uint32) names; of rows with one key the last one stays."""
        layout, size = self.layout, len(rows)
        keys, nulls = self.keys_of(rows)
        if (order := self._order(keys, nulls)) is not None:
            rows, keys, nulls = rows[order], keys[order], nulls[order]
        created, changed = np.empty(size, np.int64), np.empty(size, np.int64)
        before = np.empty((size, layout.row_words), np.uint64)
        progress, row = np.zeros(2, np.int64), 0
        if self._frozen:
            self.will_change(self._slots_of(keys, nulls))
        while row < size:
            end = row + self.memory.step(size - row)
            row, progress[0], progress[1] = row_kernels.upsert(
                self._index, self.rows, rows, keys[:end], nulls, layout.key_mask, layout.flag_words, self.secret, row,
                np.uint32(stamp), self._free, self._counters, self._index_room(), created, changed, before, progress, False,
                created,
            )  # fmt: skip
            if row < end:
                self._grow(size - row)
        self._schedule(created[: progress[0]])
        return Touched.of(created, changed, before, progress)

    def insert(self, rows: Words, stamp: int) -> tuple[Slots, Slots]:
        """Write those whole rows whose key is not there yet, as the version that ``stamp`` (uint32) names.

        Returns
        -------
        tuple
            Slots of the new keys, and which of `rows` each is: of rows with the same key the first one.
        """
        layout, size = self.layout, len(rows)
        keys, nulls = self.keys_of(rows)
        if (order := self._order(keys, nulls)) is not None:
            rows, keys, nulls = rows[order], keys[order], nulls[order]
        created, sources = np.empty(size, np.int64), np.empty(size, np.int64)
        progress, row = np.zeros(2, np.int64), 0
        while row < size:
            end = row + self.memory.step(size - row)
            row, progress[0], _ = row_kernels.upsert(
                self._index, self.rows, rows, keys[:end], nulls, layout.key_mask, layout.flag_words, self.secret, row,
                np.uint32(stamp), self._free, self._counters, self._index_room(), created, created, rows, progress, True,
                sources,
            )  # fmt: skip
            if row < end:
                self._grow(size - row)
        made = int(progress[0])
        self._schedule(created[:made])
        if order is not None:
            came = np.argsort(order[sources[:made]])
            return created[:made][came], order[sources[:made]][came]
        return created[:made].copy(), sources[:made].copy()

    def _schedule(self, slots: Slots) -> None:
        """Note when rows expire. A row's expiry stays as long as the row is there."""
        word = self.layout.expiry_word
        if word >= 0 and len(slots):
            self._expiry_queue.add(self.rows[slots, word].view(np.int64), slots.copy())
            if self._expiry_queue.is_cluttered(len(self)):
                live = self.live()
                self._expiry_queue = ExpiryQueue(self.memory)
                self._expiry_queue.add(self.rows[live, word].view(np.int64), live)

    def keys_of(self, rows: Words) -> tuple[Words, Words]:
        """Return the key words and key-null bits of rows given as words."""
        first = self.layout.flag_words
        keys = np.ascontiguousarray(rows[:, first : first + self.layout.key_words])
        return keys, rows[:, 0] & self.layout.key_mask

    def find(self, rows: Words) -> Slots:
        """Return the slots of the groups with the keys of these rows; -1 where there is none."""
        return self._slots_of(*self.keys_of(rows))

    def _slots_of(self, keys: Words, nulls: Words) -> Slots:
        """Return the slot of each key; -1 where there is none."""
        if (order := self._order(keys, nulls)) is not None:
            keys, nulls = keys[order], nulls[order]
        out = np.empty(len(nulls), np.int64)
        for piece in steps(self.memory, len(nulls)):
            index_kernels.lookup(
                self._index,
                self.rows,
                keys[piece],
                nulls[piece],
                self.layout.key_mask,
                self.layout.flag_words,
                self.secret,
                out[piece],
            )
        return out if order is None else _put_back(out, order)

    def _order(self, keys: Words, nulls: Words) -> Slots | None:
        """Return the order in which keys are best looked at, equal ones as they come; None for the order that they have.

        That of the index; and rows that were made in it lie in it, too. So no page of either is looked at twice.
        """
        if not self.memory.is_slow_at_random or len(nulls) < _SORTED:
            return None
        tags = np.empty(len(nulls), np.uint64)
        index_kernels.hash_tags(keys, nulls, self.secret, tags)
        return np.argsort(tags, kind="stable")

    # -- out ------------------------------------------------------------------------------------------------------

    def remove_rows(self, rows: Words) -> Slots:
        """Remove the groups with the keys of these rows; returns the slots they had."""
        layout = self.layout
        keys, nulls = self.keys_of(rows)
        if self._frozen:
            self.will_change(self._slots_of(keys, nulls))
        if (order := self._order(keys, nulls)) is not None:
            keys, nulls = keys[order], nulls[order]
        self._reserve_free(len(rows))
        out = np.empty(len(rows), np.int64)
        count = 0
        for piece in steps(self.memory, len(rows)):
            count += index_kernels.remove(
                self._index, self.rows, keys[piece], nulls[piece], layout.key_mask, layout.flag_words, self.secret,
                self._free, self._counters, out[count:],
            )  # fmt: skip
        return out[:count]

    def evict(self, limit: int) -> Slots:
        """Remove every group whose expiry is at most ``limit`` (microseconds); returns their slots, words intact."""
        layout = self.layout
        candidates = self._expiry_queue.due(limit)
        if self.memory.is_slow_at_random:
            candidates.sort()
        self.will_change(candidates)
        self._reserve_free(len(candidates))
        out = np.empty(len(candidates), np.int64)
        count = 0
        for piece in steps(self.memory, len(candidates)):
            count += index_kernels.evict(
                self._index, self.rows, candidates[piece], layout.key_mask, layout.flag_words, layout.key_words,
                self.secret, layout.expiry_word, limit, self._free, self._counters, out[count:],
            )  # fmt: skip
        return out[:count].copy()

    def due(self, limit: int) -> Slots:
        """Return the slots of groups whose expiry is at most ``limit`` (microseconds); the caller removes or :meth:`put`s each."""
        slots = distinct(self._expiry_queue.due(limit))
        is_there = (self.rows[slots, 0] & LIVE) != 0
        due: Slots = slots[is_there & (self.rows[slots, self.layout.expiry_word].view(np.int64) <= limit)]
        return due

    def taken(self, slots: Slots) -> Words:
        """Return copies of the rows at these slots."""
        if self.memory.step(len(slots)) >= len(slots):
            return np.take(self.rows, slots, axis=0)
        out = np.empty((len(slots), self.layout.row_words), np.uint64)
        for piece in steps(self.memory, len(slots)):
            out[piece] = np.take(self.rows, slots[piece], axis=0)
        return out

    def columns(self, slots: Slots, words: int | None = None) -> Words:
        """Return copies of the rows at these slots (zeros for slot -1); copies of the same word are adjacent in memory.

        Parameters
        ----------
        words
            The number of words, from the first, that are copied; all by default.
        """
        out = np.empty((self.layout.row_words if words is None else words, len(slots)), np.uint64)
        for piece in steps(self.memory, len(slots)):
            row_kernels.gather(self.rows, slots, piece.start, piece.stop, out)
        return out.T

    def differing(self, slots: Slots, before: Words, mask: np.uint64) -> Mask:
        """Return which of the rows at these slots are other ones than `before`; of word 0 only the bits of `mask` count."""
        out = np.empty(len(slots), np.bool_)
        for piece in steps(self.memory, len(slots)):
            row_kernels.differing(self.rows, slots[piece], before[piece], mask, out[piece])
        return out

    def taken_columns(self, chosen: Bytes, span: slice, words: Slots) -> Words:
        """Return copies of some words of the chosen rows in a range of slots; copies of the same word are adjacent in memory.

        Parameters
        ----------
        chosen
            1 for each slot whose row is copied, else 0.
        words
            Indices of the words to copy; the other words of the result are undefined.
        """
        out = np.empty((self.layout.row_words, int(np.count_nonzero(chosen[span]))), np.uint64)
        count = 0
        for piece in steps(self.memory, span.stop - span.start):
            begin, end = span.start + piece.start, span.start + piece.stop
            count = row_kernels.take_columns(self.rows, chosen, begin, end, words, out, count)
        return out.T

    def used_rows(self) -> Words:
        """Return every row that was ever used, live or not (word 0 tells)."""
        return self.rows[: int(self._counters[0])]

    def live(self) -> Slots:
        """Return the slots of all groups."""
        out = np.empty(len(self), np.int64)
        count = 0
        for block in blocks(self.memory, self.used_rows()):
            count += index_kernels.live_slots(self.rows, block.start, block.stop, out[count:])
        return out

    def live_flags(self) -> Bytes:
        """Return for every row that was ever used whether it is live: 1, or 0."""
        used = self.used_rows()
        live = self.memory.zeros(len(used), np.uint8)
        for block in blocks(self.memory, used):
            index_kernels.live_flags(used, block.start, block.stop, live)
        return live

    # -- readers that outlive changes -----------------------------------------------------------------------------

    @property
    def is_frozen(self) -> bool:
        """Whether a reader has the table frozen."""
        return len(self._frozen) > 0

    def frozen_by(self, reader: FrozenRows) -> None:
        """Report changes to a reader from now on, before they are made."""
        self._frozen.add(reader)

    def thawed_by(self, reader: FrozenRows) -> None:
        """Report no more changes to it."""
        self._frozen.discard(reader)

    def will_change(self, slots: Slots) -> None:
        """Called before rows at these slots are changed or removed; -1 means no slot."""
        for reader in list(self._frozen):
            reader.keep(slots)

    def will_undo(self) -> None:
        """Called when versions were undone: what is behind their lists will be written over."""
        if self._frozen and self.layout.lists:
            for reader in list(self._frozen):
                reader.keep_lists()
            self.lists.detach()

    def decode_frozen(self, rows: Words, frozen: FrozenRows) -> Iterator[pa.Table]:
        """Yield the Arrow tables in ``row_schema`` of rows that frozen rows gave out, a piece of a snapshot each; no lock is needed."""
        past, fields = self.as_of(frozen.pool, frozen.lists), (*self.layout.keys, *self.layout.state)
        for piece in past.cut(rows, fields, limit=self.snapshot_bytes):
            yield past.decode(rows[piece])

    def as_of(self, pool: StringPool, lists: ListPool) -> GroupTable:
        """Return a table that only decodes words of former rows, by the pools of then."""
        past = copy.copy(self)
        past.pool, past.lists = pool, lists
        return past

    # -- strings --------------------------------------------------------------------------------------------------

    def reindex(self) -> None:
        """Rebuild the index, after key words were changed in the rows."""
        layout = self.layout
        self._index[:] = 0
        for block in blocks(self.memory, self.used_rows()):
            index_kernels.reindex(
                self._index, self.rows, block.start, block.stop, layout.key_mask, layout.flag_words, layout.key_words,
                self.secret,
            )  # fmt: skip

    # -- capacity -----------------------------------------------------------------------------------------------------

    def room(self) -> dict[str, int]:
        """Return the sizes of the table, for :meth:`reserve`."""
        return {
            "rows": len(self),
            "texts": self.pool.count,
            "text_bytes": self.pool.used,
            "list_words": self.lists.used,
        }

    def reserve(self, room: Mapping[str, int]) -> None:
        """Allocate at once for a table of such sizes (:meth:`room`), so that nothing is moved while rows are added."""
        rows = room["rows"]
        if rows > len(self.rows):
            self.rows = self.memory.larger(self.rows, int(self._counters[0]), rows)
        if rows > index_room(self._index):
            self._index = larger_index(self.memory, self._index, rows)
        self.pool.reserve(room["texts"], room["text_bytes"])
        self.lists.reserve(room["list_words"])

    def _index_room(self) -> int:
        """Return the number of keys that the index takes before it has to grow."""
        return index_room(self._index) - len(self)

    def _grow(self, remaining: int) -> None:
        """Grow for at least one more key; for `remaining` (rows of the batch that are left) as far as doubling goes."""
        if self._index_room() <= 0:
            self._index = larger_index(self.memory, self._index, len(self) + 1)
        used, capacity = int(self._counters[0]), len(self.rows)
        if used == capacity and self._counters[1] == 0:
            # Half more, not double, once large: at most a third of a big shard's rows are spare.
            extra = capacity if capacity < 1 << 20 else capacity // 2
            self.rows = self.memory.larger(self.rows, used, capacity + max(extra, min(remaining, 1 << 16)))

    def _reserve_free(self, more: int) -> None:
        needed = int(self._counters[1]) + more
        if needed > len(self._free):
            self._free = self.memory.larger(self._free, int(self._counters[1]), max(needed, 2 * len(self._free)))


def _used(array: npt.NDArray[Item], count: int) -> npt.NDArray[Item]:
    """Return the first lines of an array; as a copy if the others, which it would hold, are many."""
    used = array[:count]
    return used if 4 * count >= 3 * len(array) else used.copy()


def _put_back(slots: Slots, order: Slots) -> Slots:
    """Return slots that were looked up in `order`, in the order of the query."""
    back = np.empty_like(slots)
    back[order] = slots
    return back

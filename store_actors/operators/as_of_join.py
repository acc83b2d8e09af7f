"""As-of joins of two streams: each left row with the newest right row of its key that is not later than it. Pure logic.

A left row is kept until the watermark has passed it, as until then a right row may come that is nearer, and then emitted once, with
the match that is final. Of right rows that are as old as the watermark only the newest of its key is still needed: left rows that come
later are later than it. So a key has that one and those that the watermark has not reached. These expire at their own time, and then
the newest of them stays for as long as a left row may be near to it.

Schema and options: :mod:`store_actors.operators.join_schema`. Rows of equal time: the one that came last is the newest.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from coordinator.model.schema import StateSchema
from store_actors.engine.arrays import Mask, Slots, Words
from store_actors.engine.expiry_queue import NEVER
from store_actors.engine.memory import HEAP, Memory
from store_actors.engine.multimap import numbered_keys
from store_actors.engine.versions import Change
from store_actors.messages.requests import ShardInput
from store_actors.operators.join import JoinShard


class AsOfShard(JoinShard):
    """Both sides of an as-of join in one partition; see :class:`~store_actors.operators.join.JoinShard`."""

    def __init__(self, schema: StateSchema, seed: int = 0, memory: Memory = HEAP) -> None:
        super().__init__(schema, seed, memory)
        assert self._options.as_of is not None
        self._as_of = self._options.as_of

    def _applied(self, rows: ShardInput, watermark_ms: int, version: int, number: int) -> Change:
        left, right = self._sides
        new = [side.read(table) for side, table in zip(self._sides, rows.tables, strict=True)]
        kept = 0
        for side, side_rows in zip(self._sides, new, strict=True):
            kept += side.enter(side_rows, None, number + kept)
        self._next_number = number + kept
        due = left.expire(watermark_ms)
        emitted = [*self._excluded(0, new[0]), *self._with_matches(due)]
        gone = self._pass(watermark_ms * 1000)
        passing = right.count_new(gone)
        kept -= left.count_new(due) + passing
        # As of other joins, what leaves the state through the results is not counted as removed.
        return self._change(rows, new, emitted, watermark_ms, version, kept, len(gone) - passing)

    def _with_matches(self, due: Words) -> list[pa.Table]:
        """Return left rows with their matches; those without one with nulls if the left side is an outer one."""
        left, right = self._sides
        ids, firsts = numbered_keys(left.table, due)
        owners, slots = right.table.match(*left.table.chain_keys_of(due[firsts]))
        position = self._newest(owners, slots, ids, left.times(due))
        has_match = position >= 0
        emitted = self._pair_tables(0, due, np.flatnonzero(has_match), slots[position[has_match]])
        if self._options.join_type.is_outer(0):
            emitted += self._alone(0, due[~has_match])
        return emitted

    def _newest(self, owners: Slots, slots: Slots, ids: Slots, times: Slots) -> Slots:
        """Return the position among `slots` of each left row's match, or -1.

        Parameters
        ----------
        owners, ids
            The number of the key of each right and of each left row.
        times
            Of left rows.
        """
        right = self._sides[1]
        right_rows = right.table.taken(slots)
        count = len(slots)
        all_keys = np.concatenate([owners, ids])
        all_times = np.concatenate([right.times(right_rows), times])
        # At equal times, rows of the right side are before those of the left one if they match.
        is_left = np.repeat([self._as_of.is_strict, not self._as_of.is_strict], [count, len(ids)])
        arrival = np.concatenate([right.arrival(right_rows), np.zeros(len(ids), np.int64)])
        order = np.lexsort((arrival, is_left, all_times, all_keys))
        newest = np.maximum.accumulate(np.where(order < count, np.arange(len(order)), -1))
        found = np.full(len(order), -1, np.int64)
        found[order] = np.where(newest >= 0, order[newest], -1)
        found = found[count:]
        matches: Mask = found >= 0
        pairs = found[matches]
        is_near = all_keys[pairs] == ids[matches]
        if self._as_of.within_us is not None:
            # As Spark's own as-of join has it, which leaves out both ends or neither.
            is_near &= times[matches] - all_times[pairs] <= self._as_of.within_us - self._as_of.is_strict
        found[matches] = np.where(is_near, pairs, -1)
        return found

    def _pass(self, watermark_us: int) -> Words:
        """Remove the right rows that no left row can match any more, as the watermark has reached a newer one of their key, or as all
        that they are near to were emitted; return them."""
        right = self._sides[1]
        passed = right.table.taken(right.table.due(watermark_us))
        _, firsts = numbered_keys(right.table, passed)
        owners, slots = right.table.match(*right.table.chain_keys_of(passed[firsts]))
        rows = right.table.taken(slots)
        is_passed = right.times(rows) <= watermark_us
        owners, slots, rows = owners[is_passed], slots[is_passed], rows[is_passed]
        order = np.lexsort((right.arrival(rows), right.times(rows), owners))
        owners, slots, rows = owners[order], slots[order], rows[order]
        until = np.full(len(rows), NEVER)
        if self._as_of.within_us is not None:
            until = right.times(rows) + self._as_of.within_us
        stays = (until > watermark_us) & np.append(owners[1:] != owners[:-1], np.ones(min(1, len(owners)), np.bool_))
        gone = right.take_out(slots[~stays])
        right.keep_until(slots[stays], until[stays])
        return gone

"""A batch of one partition in a processor: initial state, rows, timers, expired values; in this order, by blocks of keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from spark_jobs.functions.group_task import GroupView
from spark_jobs.functions.groups import Groups, key_codes
from spark_jobs.transform.block import Block
from spark_jobs.transform.handle import StatefulProcessorHandle
from spark_jobs.transform.processor import ExpiredTimerInfo, StatefulProcessor, TimerValues
from spark_jobs.transform.rows import Rows
from spark_jobs.transform.variables import TIMER

__all__ = ["TransformWork"]

#: Keys whose state is in memory at once.
_BLOCK_KEYS = 1 << 14


@dataclass
class TransformWork:
    """A processor that is at work on an open store.

    Parameters
    ----------
    processor, handle
        The processor, and what it was initialised with.
    block
        Where it is.
    view, form
        How it sees keys and rows.
    """

    processor: StatefulProcessor
    handle: StatefulProcessorHandle
    block: Block
    view: GroupView
    form: Rows

    def take_initial(self, groups: Groups, view: GroupView, form: Rows, times: TimerValues) -> None:
        """Give the processor the initial state of keys, whose columns are another DataFrame's."""
        for part in _blocks(groups):
            seen = view.of(part)
            with self.block.of(part.keys):
                for place, (key, rows) in enumerate(zip(self.form.keys(seen.keys), form.rows(seen), strict=True)):
                    self.block.enter(place)
                    for one in rows:
                        self.processor.handleInitialState(key, one, times)

    def process(self, rows: pa.Table, times: TimerValues) -> Iterator[pa.Table]:
        """Give it the rows of every key that has some."""
        for part in _blocks(Groups.of(rows, self.view.leaves)):
            with self.block.of(part.keys):
                yield from self._tables(self._handle_rows(self.view.of(part), times))

    def fire_timers(self, now_ms: int, times: TimerValues) -> Iterator[pa.Table]:
        """Give it the keys whose timers have expired, timer by timer in the order of their times.

        As in Spark these are the timers that there were when the rows were done: one that is registered, or deleted, while they fire,
        makes a difference to the next batch only.
        """
        due = self.handle.timers.due(now_ms)
        for begin in range(0, due.num_rows, _BLOCK_KEYS):
            some = due.slice(begin, _BLOCK_KEYS)
            found = np.unique(key_codes(some, self.view.leaves), return_index=True, return_inverse=True)
            keys = some.select(self.view.leaves).take(pa.array(found[1])).combine_chunks()
            timers = list(zip(found[2].tolist(), some.column(TIMER.name).to_pylist(), strict=True))
            with self.block.of(keys):
                yield from self._tables(self._handle_timers(keys, timers, times))

    def _handle_rows(self, seen: Groups, times: TimerValues) -> Iterator[Iterator[Any]]:
        inputs = zip(self.form.keys(seen.keys), self.form.rows(seen), strict=True)
        for place, (key, rows) in enumerate(inputs):
            self.block.enter(place)
            yield self.form.checked(self.processor.handleInputRows(key, rows, times))

    def _handle_timers(
        self, leaves: pa.Table, timers: list[tuple[int, int]], times: TimerValues
    ) -> Iterator[Iterator[Any]]:
        keys = list(self.form.keys(self.view.key_columns(leaves)))
        for place, time_ms in timers:
            self.block.enter(place)
            yield self.form.checked(self.processor.handleExpiredTimer(keys[place], times, ExpiredTimerInfo(time_ms)))
            # Also if it was registered anew meanwhile, as in Spark: a timer fires once.
            self.handle.timers.delete(time_ms)

    def _tables(self, calls: Iterator[Iterator[Any]]) -> Iterator[pa.Table]:
        """What calls emit; each is at work until it has been asked for all of it."""
        pending: list[Any] = []
        size = 0
        for emitted in calls:
            for one in emitted:
                if self.form.size(one):
                    pending.append(one)
                    size += self.form.size(one)
            if size > self.form.max_rows:
                yield self.form.table(pending)
                pending, size = [], 0
        if pending:
            yield self.form.table(pending)

    def evict(self) -> int:
        """Remove what has expired, of all keys; returns how many rows that were."""
        return sum(state.evict() for state in self.handle.states)


def _blocks(groups: Groups) -> Iterator[Groups]:
    for begin in range(0, len(groups), _BLOCK_KEYS):
        yield groups.part(begin, min(len(groups), begin + _BLOCK_KEYS))

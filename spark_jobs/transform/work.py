"""A processor's work on a batch of a partition: initial state, rows, timers, expired values; in this order, by blocks of keys."""

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

#: Number of keys whose state is in memory at once.
_BLOCK_KEYS = 1 << 14


@dataclass
class TransformWork:
    """A processor at work on an open store."""

    processor: StatefulProcessor
    handle: StatefulProcessorHandle
    block: Block
    view: GroupView
    form: Rows

    def take_initial(self, groups: Groups, view: GroupView, form: Rows, times: TimerValues) -> None:
        """Have the processor take the initial state of keys, whose columns are another DataFrame's."""
        for block in _blocks(groups):
            viewed = view.of(block)
            with self.block.of(block.keys):
                for index, (key, rows) in enumerate(zip(self.form.keys(viewed.keys), form.rows(viewed), strict=True)):
                    self.block.enter(index)
                    for row in rows:
                        self.processor.handleInitialState(key, row, times)

    def process(self, rows: pa.Table, times: TimerValues) -> Iterator[pa.Table]:
        """Have the processor handle the rows of each key that has any; yield what it emits."""
        for block in _blocks(Groups.of(rows, self.view.leaves)):
            with self.block.of(block.keys):
                yield from self._tables(self._handle_rows(self.view.of(block), times))

    def fire_timers(self, now_ms: int, times: TimerValues) -> Iterator[pa.Table]:
        """Have the processor handle the expired timers, in the order of their times; yield what it emits.

        As in Spark these are the timers at the end of the rows: a timer that is registered or deleted while they fire only affects
        the next batch.
        """
        due = self.handle.timers.due(now_ms)
        for begin in range(0, due.num_rows, _BLOCK_KEYS):
            block = due.slice(begin, _BLOCK_KEYS)
            codes = key_codes(block, self.view.leaves)
            _, firsts, key_of_row = np.unique(codes, return_index=True, return_inverse=True)
            keys = block.select(self.view.leaves).take(pa.array(firsts)).combine_chunks()
            timers = list(zip(key_of_row.tolist(), block.column(TIMER.name).to_pylist(), strict=True))
            with self.block.of(keys):
                yield from self._tables(self._handle_timers(keys, timers, times))

    def _handle_rows(self, groups: Groups, times: TimerValues) -> Iterator[Iterator[Any]]:
        inputs = zip(self.form.keys(groups.keys), self.form.rows(groups), strict=True)
        for index, (key, rows) in enumerate(inputs):
            self.block.enter(index)
            yield self.form.checked(self.processor.handleInputRows(key, rows, times))

    def _handle_timers(
        self, leaves: pa.Table, timers: list[tuple[int, int]], times: TimerValues
    ) -> Iterator[Iterator[Any]]:
        keys = list(self.form.keys(self.view.key_columns(leaves)))
        for index, time_ms in timers:
            self.block.enter(index)
            yield self.form.checked(self.processor.handleExpiredTimer(keys[index], times, ExpiredTimerInfo(time_ms)))
            # Even if it was registered again meanwhile, as in Spark: a timer fires once.
            self.handle.timers.delete(time_ms)

    def _tables(self, calls: Iterator[Iterator[Any]]) -> Iterator[pa.Table]:
        """Yield the rows that calls emit, as tables; each call is read to its end before the next begins."""
        pending: list[Any] = []
        size = 0
        for emitted in calls:
            for piece in emitted:
                if self.form.size(piece):
                    pending.append(piece)
                    size += self.form.size(piece)
            if size > self.form.max_rows:
                yield self.form.table(pending)
                pending, size = [], 0
        if pending:
            yield self.form.table(pending)

    def evict(self) -> int:
        """Remove the expired values of all keys; return how many rows that were."""
        return sum(state.evict() for state in self.handle.states)


def _blocks(groups: Groups) -> Iterator[Groups]:
    for begin in range(0, len(groups), _BLOCK_KEYS):
        yield groups.part(begin, min(len(groups), begin + _BLOCK_KEYS))

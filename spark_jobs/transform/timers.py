"""Timers of a processor: a timer is registered for a key and a time, and fires once."""

from __future__ import annotations

import pyarrow as pa

from coordinator.model.identities import DEFAULT_STORE
from spark_jobs.functions.groups import key_codes
from spark_jobs.plan.spark_errors import StateCallError
from spark_jobs.transform.block import Block
from spark_jobs.transform.variables import DUE, TIMER

#: Times are milliseconds in 64 bits, as in Spark; the largest one is never reached.
_FURTHEST_MS = (1 << 63) - 1


class Timers:
    """Timers of the keys of the block, and the due timers of all keys."""

    def __init__(self, block: Block) -> None:
        self._block = block
        #: By index of the key, times with whether there is to be a timer.
        self._changed: dict[int, dict[int, bool]] = {}
        #: Timers of the block's keys as read; None before that.
        self._stored: list[set[int]] | None = None
        block.join(self)

    def register(self, time_ms: int) -> None:
        """Register a timer for a time, which may be in the past.

        Raises
        ------
        InvalidRequestError
            The time is not a number of milliseconds.
        """
        self._change(time_ms, exists=True)

    def delete(self, time_ms: int) -> None:
        """Delete the timer for a time, if there is one."""
        self._change(time_ms, exists=False)

    def _change(self, time_ms: int, *, exists: bool) -> None:
        index = self._block.here()
        if not -_FURTHEST_MS <= time_ms <= _FURTHEST_MS:
            raise StateCallError("a timer's time is in milliseconds since the epoch", expiryTimestampMs=time_ms)
        self._changed.setdefault(index, {})[int(time_ms)] = exists

    def times(self) -> list[int]:
        """Return the times of the current key's timers, including the one that fires now, in order."""
        index = self._block.here()
        if self._stored is None:
            self._stored = self._read()
        times = set(self._stored[index])
        for time_ms, exists in self._changed.get(index, {}).items():
            (times.add if exists else times.discard)(time_ms)
        return sorted(times)

    def _read(self) -> list[set[int]]:
        keys = self._block.keys
        leaves = keys.column_names
        batches = list(self._block.store(DEFAULT_STORE).prefix_scan(keys))
        timers: list[set[int]] = [set() for _ in range(keys.num_rows)]
        all_keys = pa.concat_tables(
            [keys, *(pa.Table.from_batches([batch]).select(leaves).cast(keys.schema) for batch in batches)]
        )
        codes = key_codes(all_keys, leaves).tolist()
        indices = {code: index for index, code in enumerate(codes[: len(timers)])}
        times = [time_ms for batch in batches for time_ms in batch.column(TIMER.name).to_pylist()]
        for code, time_ms in zip(codes[len(timers) :], times, strict=True):
            timers[indices[code]].add(time_ms)
        return timers

    def due(self, now_ms: int) -> pa.Table:
        """Return the timers of all keys that are due at a time, the earliest first; the block's changes have to be written before."""
        return self._block.store(DEFAULT_STORE).due(now_ms).sort_by(TIMER.name)

    def write(self) -> None:
        """Write the changes for the block's keys, and drop what was read."""
        for exists in (True, False):
            changes = [
                (index, time_ms)
                for index, times in self._changed.items()
                for time_ms, is_registered in times.items()
                if is_registered is exists
            ]
            if not changes:
                continue
            indices, times_ms = (pa.array(column, pa.int64()) for column in zip(*changes, strict=True))
            rows = self._block.keys.take(indices).append_column(TIMER.name, times_ms)
            store = self._block.store(DEFAULT_STORE)
            if exists:
                store.later("put", rows.append_column(DUE.name, times_ms))
            else:
                store.later("remove", rows)
        self._changed, self._stored = {}, None

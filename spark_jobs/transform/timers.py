"""Timers of a processor: registered for a key and a time, each fires once."""

from __future__ import annotations

import pyarrow as pa

from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import DEFAULT_STORE
from spark_jobs.functions.groups import key_codes
from spark_jobs.transform.block import Block
from spark_jobs.transform.variables import DUE, TIMER

__all__ = ["Timers"]

#: Times are milliseconds in 64 bits, as in Spark: the largest one never comes.
_FURTHEST_MS = (1 << 63) - 1


class Timers:
    """Timers of the keys of the block, and those of all keys that are to fire."""

    def __init__(self, block: Block) -> None:
        self._block = block
        #: By place of the key: times, and whether there is to be a timer.
        self._changed: dict[int, dict[int, bool]] = {}
        self._held: list[set[int]] | None = None
        block.join(self)

    def register(self, time_ms: int) -> None:
        """Have a timer at a time; it may be in the past.

        Raises
        ------
        InvalidRequestError
            It is no number of milliseconds.
        """
        self._change(time_ms, is_there=True)

    def delete(self, time_ms: int) -> None:
        """Have no timer at a time."""
        self._change(time_ms, is_there=False)

    def _change(self, time_ms: int, *, is_there: bool) -> None:
        place = self._block.here()
        if not -_FURTHEST_MS <= time_ms <= _FURTHEST_MS:
            raise InvalidRequestError("a timer's time is in milliseconds since the epoch", expiryTimestampMs=time_ms)
        self._changed.setdefault(place, {})[int(time_ms)] = is_there

    def times(self) -> list[int]:
        """Times of the current key's timers, one that fires right now included, in order."""
        place = self._block.here()
        if self._held is None:
            self._held = self._read()
        times = set(self._held[place])
        for time_ms, is_there in self._changed.get(place, {}).items():
            (times.add if is_there else times.discard)(time_ms)
        return sorted(times)

    def _read(self) -> list[set[int]]:
        keys = self._block.keys
        leaves = keys.column_names
        batches = list(self._block.store(DEFAULT_STORE).prefix_scan(keys))
        held: list[set[int]] = [set() for _ in range(keys.num_rows)]
        found = pa.concat_tables(
            [keys, *(pa.Table.from_batches([one]).select(leaves).cast(keys.schema) for one in batches)]
        )
        codes = key_codes(found, leaves).tolist()
        places = {code: place for place, code in enumerate(codes[: len(held)])}
        times = [time_ms for batch in batches for time_ms in batch.column(TIMER.name).to_pylist()]
        for code, time_ms in zip(codes[len(held) :], times, strict=True):
            held[places[code]].add(time_ms)
        return held

    def due(self, now_ms: int) -> pa.Table:
        """Timers of all keys that fire at or before a time, the earliest first; the block's changes must be written."""
        return self._block.store(DEFAULT_STORE).due(now_ms).sort_by(TIMER.name)

    def write(self) -> None:
        """Write what was changed for the block's keys, and forget what was read."""
        for is_there in (True, False):
            changes = [
                (place, time_ms)
                for place, times in self._changed.items()
                for time_ms, one in times.items()
                if one is is_there
            ]
            if not changes:
                continue
            places, times_ms = (pa.array(part, pa.int64()) for part in zip(*changes, strict=True))
            rows = self._block.keys.take(places).append_column(TIMER.name, times_ms)
            store = self._block.store(DEFAULT_STORE)
            if is_there:
                store.later("put", rows.append_column(DUE.name, times_ms))
            else:
                store.later("remove", rows)
        self._changed, self._held = {}, None

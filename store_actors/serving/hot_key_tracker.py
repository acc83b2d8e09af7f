"""The keys of one process's shards that are met most often, in batches and in look-ups: some of them are counted. No Ray."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.runtime.runtime import Lock

log = logging.getLogger(__name__)

#: Shards whose keys are counted: those that were met last.
_SHARDS = 1024
#: Parts of batches and of look-ups that are counted: most look-ups are of one key, which takes hardly longer than to count it.
_BATCHES, _LOOK_UPS = 1 / 4, 1 / 8
#: Keys that are kept.
COUNTERS = 64
#: Batches that are counted all; after them, the part of a summary.
_FIRST = 16
#: Rows of a batch that are looked at, and rows that are counted at once.
_SAMPLE = 64
_COUNTED = 512
#: Batches that wait to be counted, at most: one row of each may do.
_WAITING = 256
#: Share of the previous counts that stays each time.
_KEPT = 0.9
#: Bytes of a sample's keys at most, and of all that are kept or wait: of longer ones there are fewer, or none.
_LONGEST, _MOST_BYTES = 1 << 14, 1 << 16
_GOLDEN = 0.6180339887498949
#: Smallest share of all rows of a key that counts as hot.
SHARE_COLUMN = "__share"
_COUNT = "__count"


class HotKeys:
    """The hottest keys of one shard: a few rows of each batch are counted, in bounded memory.

    A summary after Misra and Gries keeps some counters. Where more keys come than it has, each counter is lowered by the largest that
    is left out: a count is at least what is reported, and a key that has more than one part in :data:`COUNTERS` + 1 of all is never
    left out. Older rows count less and less, so that what was hot once gives way.

    Parameters
    ----------
    part
        What part of the batches is counted.
    """

    def __init__(self, columns: Sequence[str], part: float = 1.0) -> None:
        self._columns = list(columns)
        self._part = part
        self._counted: pa.Table | None = None
        self._total = 0.0
        self._waiting: list[pa.Table] = []
        self._rows = self._bytes = 0
        self._batches = 0
        self._is_countable = bool(columns)

    def add(self, rows: pa.Table) -> None:
        """Take some of a batch's rows, which has the key columns among others."""
        if not rows.num_rows or not self._is_countable:
            return
        self._batches += 1
        part = 1.0 if self._batches <= _FIRST else self._part
        # Multiples of the golden ratio fall evenly between 0 and 1, and no writer's or reader's own rhythm is theirs.
        chance = self._batches * _GOLDEN % 1.0
        if chance >= part:
            return
        sample = self._sample(rows, chance / part)
        if sample.nbytes > _LONGEST:
            return
        weight = np.full(sample.num_rows, rows.num_rows / sample.num_rows / part)
        self._waiting.append(sample.append_column(_COUNT, pa.array(weight)))
        self._rows += sample.num_rows
        self._bytes += sample.nbytes
        if self._rows >= _COUNTED or self._bytes >= _MOST_BYTES or len(self._waiting) >= _WAITING:
            self._count()

    def hottest(self, most: int) -> pa.Table | None:
        """Return the keys with the most rows, hottest first, each with its smallest share of all rows; None if none were counted."""
        self._count()
        if self._counted is None:
            return None
        first = self._counted.slice(0, most)
        shares = pc.divide(first.column(_COUNT), self._total)
        return first.select(self._columns).append_column(SHARE_COLUMN, shares)

    def _sample(self, rows: pa.Table, begin: float) -> pa.Table:
        """Return rows at equal distances, the first a part of one away, as copies: nothing else of the batch is kept."""
        size = rows.num_rows
        spread = (np.arange(_SAMPLE) + begin) * (size / _SAMPLE)
        places = np.arange(size) if size <= _SAMPLE else spread.astype(np.int64)
        return _rows_at(rows.select(self._columns), places)

    def _count(self) -> None:
        if not self._waiting:
            return
        new = pa.concat_tables(self._waiting).combine_chunks()
        self._waiting, self._rows, self._bytes = [], 0, 0
        self._total = self._total * _KEPT + pc.sum(new.column(_COUNT)).as_py()
        if self._counted is not None:
            lower = pc.multiply(self._counted.column(_COUNT), _KEPT)
            new = pa.concat_tables([new, self._counted.select(self._columns).append_column(_COUNT, lower)])
        try:
            # Threads would take longer to begin than it takes.
            sums = new.group_by(self._columns, use_threads=False).aggregate([(_COUNT, "sum")])
        except pa.ArrowNotImplementedError:  # Arrow has no groups by lists
            self._is_countable = False
            return
        order = pc.select_k_unstable(sums, COUNTERS + 1, sort_keys=[(f"{_COUNT}_sum", "descending")])
        most = sums.take(order)
        counts = most.column(f"{_COUNT}_sum").to_numpy()
        left_out = counts[COUNTERS] if len(counts) > COUNTERS else 0.0
        kept = int(np.count_nonzero(counts[:COUNTERS] > left_out))
        keys = most.select(self._columns)
        while kept > 1 and keys.slice(0, kept).nbytes > _MOST_BYTES:
            kept //= 2
        self._counted = keys.slice(0, kept).append_column(_COUNT, pa.array(counts[:kept] - left_out))


def _rows_at(table: pa.Table, places: npt.NDArray[np.int64]) -> pa.Table:
    """Return the rows at some places, in ascending order: of each piece its own, as Arrow would put all pieces together first."""
    pieces = table.to_batches()
    ends = np.cumsum([piece.num_rows for piece in pieces])
    owners = np.searchsorted(ends, places, side="right")
    batches = []
    for owner in np.unique(owners):
        piece = pieces[owner]
        piece_rows = places[owners == owner] - (ends[owner] - piece.num_rows)
        batches.append(piece.take(pa.array(piece_rows)))
    return pa.Table.from_batches(batches, table.schema)


@dataclass(frozen=True, slots=True)
class HottestKeys:
    """The keys of a shard that were met most often lately, hottest first, as state has them; None where nothing was counted."""

    #: By rows of batches. The last column, :data:`SHARE_COLUMN`, is the part of all rows that a key has
    #: at least.
    written: pa.Table | None
    looked_up: pa.Table | None


class HotKeyTracker:
    """Counts keys. Thread-safe; an error in here fails no batch and no read."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        #: By state, partition, and whether it is of look-ups.
        self._keys: OrderedDict[tuple[str, int, bool], HotKeys] = OrderedDict()

    def written(self, state_name: str, partition_id: int, columns: Sequence[str], tables: Iterable[pa.Table]) -> None:
        """Count some rows of a batch."""
        with self._lock:
            self._add((state_name, partition_id, False), columns, tables, _BATCHES)

    def looked_up(self, state_name: str, partition_id: int, keys: pa.Table) -> None:
        """Count some keys of a look-up."""
        with self._lock:
            self._add((state_name, partition_id, True), keys.column_names, [keys], _LOOK_UPS)

    def hottest(self, state_name: str, partition_id: int, most: int) -> HottestKeys:
        """Return the hottest keys of a shard, `most` at most of each kind."""
        with self._lock:
            return HottestKeys(
                *(self._hottest((state_name, partition_id, of_reads), most) for of_reads in (False, True))
            )

    def _hottest(self, which: tuple[str, int, bool], most: int) -> pa.Table | None:
        counted = self._keys.get(which)
        try:
            return None if counted is None else counted.hottest(most)
        except pa.ArrowException as error:
            self._restart(which, error)
            return None

    def _add(
        self, which: tuple[str, int, bool], columns: Sequence[str], tables: Iterable[pa.Table], part: float
    ) -> None:
        counted = self._keys.pop(which, None) or HotKeys(columns, part)
        try:
            for table in tables:
                counted.add(table)
        except pa.ArrowException as error:
            self._restart(which, error)
            return
        self._keys[which] = counted
        if len(self._keys) > 2 * _SHARDS:
            self._keys.popitem(last=False)

    def _restart(self, which: tuple[str, int, bool], error: Exception) -> None:
        """Count from the start, since the state's keys have other types than before."""
        log.debug("the hottest keys of %s are counted anew: %s", which, error)
        self._keys.pop(which, None)

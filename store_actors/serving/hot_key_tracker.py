"""The keys of one process's shards that are met most often, in batches and in look-ups: some of them are counted. No Ray."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from coordinator.runtime.runtime import Lock
from store_actors.engine.hot_keys import HotKeys

log = logging.getLogger(__name__)

#: Shards whose keys are counted: those that were met last.
_SHARDS = 1024
#: Parts of batches and of look-ups that are counted: most look-ups are of one key, which takes hardly longer than to count it.
_BATCHES, _LOOK_UPS = 1 / 4, 1 / 8


@dataclass(frozen=True, slots=True)
class HottestKeys:
    """The keys of a shard that were met most often lately, hottest first, as state has them; None where nothing was counted.

    Attributes
    ----------
    written
        By rows of batches. The last column, :data:`~store_actors.engine.hot_keys.SHARE_COLUMN`, is the part of all rows that a key has
        at least.
    """

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

"""A continuous query whose rows are held until the seal: the first rows of windows (``topN``), or the last row of each name
(``keepLast``). Rows of the model are by end, name and mark, and say their rank.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from coordinator.model.schema import Field, StateSchema
from store_actors.operators.top_schema import RANK_COLUMN, top_schema
from tests.simulation.event_time import changed, seconds, unique
from tests.simulation.scheduler import Violation
from tests.simulation.state_rows import RowStream
from tests.simulation.streaming import Record
from tests.simulation.workload import Groups, Key

_END, _NAME, _MARK = Field("end", "timestamp"), Field("name", "string"), Field("mark", "int64")


class HeldStream(RowStream):
    """The rows that come first in each partition of a held operator, by their order."""

    #: How many rows of a partition are kept.
    _n = 1

    def _partition_of(self, key: tuple[Any, ...]) -> Key:
        return key[0], key[1]

    def results_of(self, table: pa.Table) -> Groups:
        names, marks = table.column("name").to_pylist(), table.column("mark").to_pylist()
        has_ranks = RANK_COLUMN in table.column_names
        ranks = table.column(RANK_COLUMN).to_pylist() if has_ranks else [1] * len(names)
        return unique(list(zip(seconds(table, "end"), names, marks, strict=True)), ranks)

    def rows_of(self, table: pa.Table) -> Groups:
        return self.results_of(table)

    # -- the model ----------------------------------------------------------------------------------------------------

    def _applied(self, before: Groups, records: Sequence[Record]) -> Groups:
        rows: defaultdict[Key, list[tuple[Any, ...]]] = defaultdict(list)
        for key in [*before, *((self.end_of(record), record.name, record.bit) for record in records)]:
            rows[self._partition_of(key)].append(key)
        # By time and mark; of a partition that is a window, all have one time.
        first = {partition: sorted(keys, key=lambda key: (key[0], key[2]))[::-1] for partition, keys in rows.items()}
        return {key: rank for keys in first.values() for rank, key in enumerate(keys[: self._n], 1)}

    def _emitted(self, before: Groups, applied: Groups, closed: Groups) -> Groups:
        return changed(before, applied)

    def check_result(self, key: tuple[Any, ...], row: Any) -> None:
        known = {(self.end_of(record), record.name, record.bit) for records in self.source for record in records}
        if key not in known or not 1 <= row <= self._n:
            raise Violation(f"a row is emitted that never was, or has no place: {key} as number {row}")

    def _replaced(self, rows: Groups, key: tuple[Any, ...]) -> Iterable[tuple[Any, ...]]:
        # A single row takes the place of the one before.
        return [key] if self._n > 1 else [row for row in rows if self._partition_of(row) == self._partition_of(key)]


class TopStream(HeldStream):
    """The first rows of windows, by their marks."""

    def _draw_schema(self, rng: random.Random) -> StateSchema:
        self._n, self._window_s = rng.choice((1, 2, 3)), rng.choice((2, 4))
        order = [{"column": "mark", "descending": True, "nulls_first": False}]
        return top_schema((_END, _NAME), (_MARK,), self._n, order, expiry="end", delay_ms=self.delay_s * 1000)

    def end_of(self, record: Record) -> int:
        return (record.time // self._window_s + 1) * self._window_s


class LastStream(HeldStream):
    """The last row of each name, by its time, until that is over."""

    def _draw_schema(self, rng: random.Random) -> StateSchema:
        self.watermark = False
        order = [{"column": name, "descending": True, "nulls_first": False} for name in ("end", "mark")]
        delay_ms = self.delay_s * 1000
        return top_schema((_NAME,), (_END, _MARK), 1, order, ties="last", rank=False, expiry="end", delay_ms=delay_ms)

    def end_of(self, record: Record) -> int:
        return record.time

    def _partition_of(self, key: tuple[Any, ...]) -> Key:
        return None, key[1]

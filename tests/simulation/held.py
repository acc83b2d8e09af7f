"""A continuous query whose rows are held until the seal: the first rows of windows (``topN``), or the last row of each name
(``keepLast``). Rows of the model are by end, name and mark, and say their rank.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.schema import Field, StateSchema
from coordinator.storage.protocol import ObjectStore
from store_actors.operators.top_schema import RANK_COLUMN, top_schema
from store_actors.serving.operator_shards import OperatorShards
from store_actors.serving.partitions import Partitions
from tests.simulation.event_time import TimedStream, changed, check_same
from tests.simulation.scheduler import Violation
from tests.simulation.streaming import Record
from tests.simulation.workload import Entry, Groups, Key, Read
from tests.stored_shards import stored_rows

_SECOND_US = 1_000_000
_END, _NAME, _MARK = Field("end", "timestamp"), Field("name", "string"), Field("mark", "int64")


class HeldStream(TimedStream):
    """The rows that come first in each partition of a held operator, by their order."""

    #: How many rows of a partition are kept.
    _n = 1

    def _partition_of(self, key: tuple[Any, ...]) -> Key:
        """Return the partition of a row."""
        return key[0], key[1]

    def key_of(self, record: Record) -> Key:
        return self._partition_of((self.end_of(record), record.name))

    def results_of(self, table: pa.Table) -> Groups:
        ends = [end // _SECOND_US for end in table.column("end").cast(pa.int64()).to_pylist()]
        names, marks = table.column("name").to_pylist(), table.column("mark").to_pylist()
        has_ranks = RANK_COLUMN in table.column_names
        ranks = table.column(RANK_COLUMN).to_pylist() if has_ranks else [1] * len(names)
        keys = list(zip(ends, names, marks, strict=True))
        if len(set(keys)) < len(keys):
            raise Violation(f"a row is there twice: {sorted(keys)}")
        return dict(zip(keys, ranks, strict=True))

    # -- the model ----------------------------------------------------------------------------------------------------

    def _own(self, groups: Groups, partition: int) -> Groups:
        shard, num_shards = self._partitions[partition]
        return {key: rank for key, rank in groups.items() if self._shard(self._partition_of(key), num_shards) == shard}

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

    # -- audits -------------------------------------------------------------------------------------------------------

    def check_version(
        self, objects: ObjectStore, coordinator: Any, grant: LeaseGrant, version: int, forms: Sequence[int]
    ) -> None:
        """As of :class:`~tests.simulation.event_time.TimedStream`, with the rows of this operator."""
        self._check_watermark(f"version {version} as leased", version, grant.watermarks.input_ms)
        store_id = grant.lease.store_id
        rows = stored_rows(OperatorShards(Partitions(objects, coordinator)), store_id, version, self.schema)
        subject = f"version {version} of shard {store_id.partition_id} as loaded"
        check_same(subject, self.results_of(rows), self.rows_at(version, store_id.partition_id))

    def check_snapshot(self, snapshot: Entry, read: Read) -> None:
        if self._counts(snapshot):
            expected = self.rows_at(snapshot["version"], snapshot["partition_id"])
            check_same(f"snapshot {snapshot['file']}", self.results_of(read(snapshot)), expected)

    def check_history(
        self, shard: int, chains: dict[str, list[Entry]], read: Read, form_of: Callable[[str], int]
    ) -> None:
        """As of :class:`~tests.simulation.event_time.TimedStream`, with the rows of this operator."""
        entries = self._check_commits(shard, chains)
        rows = dict(self.rows_at(entries[0]["base_version"], shard)) if entries else {}
        for entry in entries:
            delta = read(entry)
            kinds = delta.column("__change").to_pylist()
            for (key, rank), kind in zip(self.results_of(delta).items(), kinds, strict=True):
                # A single row takes the place of the one before.
                gone = [key] if self._n > 1 else [row for row in rows if self._is_beside(row, key)]
                for row in gone:
                    rows.pop(row, None)
                if kind == 0:
                    rows[key] = rank
            subject = f"version {entry['version']} of shard {shard} by its deltas"
            check_same(subject, rows, self.rows_at(entry["version"], shard))

    def _is_beside(self, row: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
        return self._partition_of(row) == self._partition_of(other)


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

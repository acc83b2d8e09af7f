"""Continuous queries whose rows of state are compared as they are, however they were made."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.storage.protocol import ObjectStore
from store_actors.engine.versions import CHANGE_COLUMN, UPDATED
from store_actors.serving.operator_shards import OperatorShards
from store_actors.serving.partitions import Partitions
from tests.simulation.event_time import TimedStream, check_same
from tests.simulation.streaming import Record
from tests.simulation.workload import Entry, Groups, Key, Read
from tests.stored_shards import stored_rows


class RowStream(TimedStream):
    """A source, and an operator whose rows of state have the keys of its model."""

    @abstractmethod
    def rows_of(self, table: pa.Table) -> Groups:
        """Return the rows of a table of state."""

    @abstractmethod
    def _partition_of(self, key: tuple[Any, ...]) -> Key:
        """Return the key by which a row of the model, or a record with its end and name, goes to its shard."""

    def _replaced(self, rows: Groups, key: tuple[Any, ...]) -> Iterable[tuple[Any, ...]]:
        """Return the rows that are gone once a delta has one with a key."""
        return [key]

    def key_of(self, record: Record) -> Key:
        return self._partition_of((self.end_of(record), record.name))

    def _own(self, groups: Groups, partition: int) -> Groups:
        shard, num_shards = self._partitions[partition]
        return {key: row for key, row in groups.items() if self._shard(self._partition_of(key), num_shards) == shard}

    # -- audits -------------------------------------------------------------------------------------------------------

    def check_version(
        self, objects: ObjectStore, coordinator: Any, grant: LeaseGrant, version: int, forms: Sequence[int]
    ) -> None:
        """As of :class:`~tests.simulation.event_time.TimedStream`, with the rows of this operator."""
        self._check_watermark(f"version {version} as leased", version, grant.watermarks.input_ms)
        store_id = grant.lease.store_id
        rows = stored_rows(OperatorShards(Partitions(objects, coordinator)), store_id, version, self.schema)
        subject = f"version {version} of shard {store_id.partition_id} as loaded"
        check_same(subject, self.rows_of(rows), self.rows_at(version, store_id.partition_id))

    def check_snapshot(self, snapshot: Entry, read: Read) -> None:
        if self._counts(snapshot):
            expected = self.rows_at(snapshot["version"], snapshot["partition_id"])
            check_same(f"snapshot {snapshot['file']}", self.rows_of(read(snapshot)), expected)

    def check_history(
        self, shard: int, chains: dict[str, list[Entry]], read: Read, form_of: Callable[[str], int]
    ) -> None:
        """As of :class:`~tests.simulation.event_time.TimedStream`, with the rows of this operator."""
        entries = self._check_commits(shard, chains)
        rows = dict(self.rows_at(entries[0]["base_version"], shard)) if entries else {}
        for entry in entries:
            delta = read(entry)
            for (key, row), kind in zip(self.rows_of(delta).items(), delta[CHANGE_COLUMN].to_pylist(), strict=True):
                for gone in list(self._replaced(rows, key)):
                    rows.pop(gone, None)
                if kind == UPDATED:
                    rows[key] = row
            subject = f"version {entry['version']} of shard {shard} by its deltas"
            check_same(subject, rows, self.rows_at(entry["version"], shard))

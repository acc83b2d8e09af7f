"""A continuous query with event time: groups in windows, which are mostly emitted once they are closed, and the model of its watermark.

Records of a partition come with times that mostly grow, and partitions are ahead of one another. So the watermark, which is that of the
task that is ahead, leaves records of others late, and a task without records holds nothing back.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from msgspec import structs

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.identities import DEFAULT_STORE
from coordinator.model.schema import StateSchema
from coordinator.storage.protocol import ObjectStore
from tests.simulation.scheduler import Violation
from tests.simulation.streaming import Offsets, Record, Stream
from tests.simulation.workload import Entry, Groups, Key, Read, schema_of

_SECOND_US = 1_000_000


@dataclass(frozen=True, slots=True)
class Modelled:
    """What an epoch should leave, by all epochs that count up to it.

    Attributes
    ----------
    rows
        The state after it.
    emitted
        What it emits.
    late
        How many of its records are late.
    merged
        How many of the others are of rows that were there before, or make one row of several.
    """

    rows: Groups
    emitted: Groups
    watermark_ms: int
    late: int
    merged: int = 0


class TimedStream(Stream):
    """A source of records with event times; subclasses say what becomes of them. Keys of its model begin with an end and a name.

    Attributes
    ----------
    delay_s
        Seconds that the watermark is behind the newest record.
    is_sealed
        Whether results come when an epoch is sealed, and not before.
    emits
        Of others, how it is noted that they come.
    """

    is_sealed = True
    emits = "emitted_by_windows"
    #: Step by which all records are there: late, so that there are epochs after many restarts.
    _last_steps = (400, 1500, 2800)

    def __init__(self, rng: random.Random, decided: Callable[[], Mapping[int, Offsets]]) -> None:
        super().__init__(rng, decided)
        self.delay_s, self.watermark = rng.choice((0, 1, 3)), True
        # In no order of their own: so the first rows by their marks are not those that came first.
        bits: dict[str, list[int]] = {}
        for name in sorted({record.name for records in self.source for record in records}):
            bits[name] = rng.sample(range(62), 62)
        slower = rng.choice(self._last_steps) / max(1, *(record.at for records in self.source for record in records))
        self.source = [self._timed(rng, records, bits, slower) for records in self.source]
        self.schema = self._draw_schema(rng)
        self._schemas = [self.schema]
        self._modelled = [Modelled({}, {}, 0, 0)]

    @staticmethod
    def _timed(
        rng: random.Random, records: Sequence[Record], bits: Mapping[str, list[int]], slower: float
    ) -> list[Record]:
        """Give records times, and marks of their own; they come slower, or faster."""
        now, timed = rng.randint(1, 4), []
        steps = rng.choice(((0, 0, 1), (0, 1, 2), (0, 0, 0, 7)))
        for record in records:
            now += rng.choice(steps)
            time = max(1, now - rng.choice((0, 0, 0, 1, 3, 6)))
            mark, at = 1 << bits[record.name].pop(), int(record.at * slower)
            timed.append(replace(record, time=time, bit=mark, at=at))
        return timed

    @abstractmethod
    def _draw_schema(self, rng: random.Random) -> StateSchema:
        """Return the schema of the operator."""

    @abstractmethod
    def end_of(self, record: Record) -> int:
        """Return the second by which a record is over: it is late once the watermark has come to it."""

    @abstractmethod
    def _applied(self, before: Groups, records: Sequence[Record]) -> Groups:
        """Return the rows after some records, none of which is late, before any are closed."""

    @abstractmethod
    def _emitted(self, before: Groups, applied: Groups, closed: Groups) -> Groups:
        """Return what is emitted of an epoch."""

    @abstractmethod
    def check_result(self, key: tuple[Any, ...], row: Any) -> None:
        """Check that a row may be a result of some records of the source, each counted once."""

    # -- what tasks send ----------------------------------------------------------------------------------------------

    def _columns(self, records: Sequence[Record]) -> dict[str, pa.Array]:
        ends = pa.array([self.end_of(record) * _SECOND_US for record in records], pa.timestamp("us", tz="UTC"))
        return {**super()._columns(records), "end": ends}

    def key_of(self, record: Record) -> Key:
        return self.end_of(record), record.name

    def watermark_of(self, records: Sequence[Record]) -> int:
        return max([super().watermark_of(records), *((record.time - self.delay_s) * 1000 for record in records)])

    # -- the model ----------------------------------------------------------------------------------------------------

    def at(self, version: int) -> Groups:
        return self._model(version).rows

    def watermark_at(self, version: int) -> int:
        """Return the watermark after a version."""
        return self._model(version).watermark_ms

    def emitted_in(self, epoch: int) -> Groups:
        """Return what an epoch that counts emits."""
        return self._model(epoch + 1).emitted

    def happened_in(self, epoch: int) -> dict[str, int]:
        """Return how often something happened in an epoch that counts, by what it is."""
        model = self._model(epoch + 1)
        return {"late": model.late, "emitted_at_seal" if self.is_sealed else self.emits: len(model.emitted)}

    def _model(self, version: int) -> Modelled:
        decided = self.decided()
        if version and version - 1 not in decided:
            raise Violation(f"version {version} is looked at, and epoch {version - 1} does not count")
        while len(self._modelled) <= version:
            epoch, before = len(self._modelled) - 1, self._modelled[-1]
            begin = decided[epoch - 1] if epoch else (0,) * len(self.source)
            records = list(self._records(begin, decided[epoch]))
            on_time = [record for record in records if self.end_of(record) * 1000 > before.watermark_ms]
            watermark_ms = max(before.watermark_ms, self.watermark_of(records))
            applied = self._applied(before.rows, on_time)
            closed = {key: row for key, row in applied.items() if key[0] * 1000 <= watermark_ms}  # type: ignore[operator]
            rows = {key: row for key, row in applied.items() if key not in closed}
            emitted = self._emitted(before.rows, applied, closed)
            merged = len(before.rows) + len(on_time) - len(applied)
            self._modelled.append(Modelled(rows, emitted, watermark_ms, len(records) - len(on_time), merged))
        return self._modelled[version]

    def _records(self, begin: Offsets, end: Offsets) -> Iterator[Record]:
        for records, first, last in zip(self.source, begin, end, strict=True):
            yield from records[first:last]

    # -- audits -------------------------------------------------------------------------------------------------------

    def check_version(
        self, objects: ObjectStore, coordinator: Any, grant: LeaseGrant, version: int, forms: Sequence[int]
    ) -> None:
        """As of others; and the watermark that the next run begins with is the model's."""
        self._check_watermark(f"version {version} as leased", version, grant.watermarks.input_ms)
        super().check_version(objects, coordinator, grant, version, forms)

    def check_history(
        self, shard: int, chains: dict[str, list[Entry]], read: Read, form_of: Callable[[str], int]
    ) -> None:
        """As of others; and each commit has the model's watermark."""
        super().check_history(shard, chains, read, form_of)
        self._check_commits(shard, chains)

    def _check_commits(self, shard: int, chains: dict[str, list[Entry]]) -> list[Entry]:
        """Check the watermarks of commits that count, and return these."""
        counted = [entry for entry in chains[DEFAULT_STORE] if self._counts(entry)]
        for entry in counted:
            subject = f"version {entry['version']} of shard {shard}"
            self._check_watermark(subject, entry["version"], entry["watermark_ms"])
        return counted

    def _check_watermark(self, subject: str, version: int, watermark_ms: int) -> None:
        if watermark_ms != self.watermark_at(version):
            raise Violation(f"{subject} has the watermark {watermark_ms}, should be {self.watermark_at(version)}")


class WindowedStream(TimedStream):
    """An aggregation whose groups end by their windows: in append mode, or in update mode."""

    def _draw_schema(self, rng: random.Random) -> StateSchema:
        self._window_s = rng.choice((1, 2, 4))
        mode = rng.choice(("append", "append", "update"))
        self.is_sealed = mode == "append"
        schema = schema_of(watermark=True, output_mode=mode, whole=False)
        return structs.replace(schema, delay_ms=self.delay_s * 1000)

    def end_of(self, record: Record) -> int:
        return (record.time // self._window_s + 1) * self._window_s

    def all_keys(self, schema: StateSchema) -> pa.RecordBatch:
        records = [record for of_partition in self.source for record in of_partition]
        columns, fields = self._columns(records), [key.arrow() for key in schema.input_keys]
        rows = pa.table([columns[field.name] for field in fields], schema=pa.schema(fields))
        keys = rows.group_by([field.name for field in fields], use_threads=False).aggregate([])
        return keys.cast(rows.schema).combine_chunks().to_batches()[0]

    def _applied(self, before: Groups, records: Sequence[Record]) -> Groups:
        groups = dict(before)
        for record in records:
            n, total, _ = groups.get(self.key_of(record), (0, 0, 0))
            groups[self.key_of(record)] = n + 1, total + record.bit, 0
        return groups

    def _emitted(self, before: Groups, applied: Groups, closed: Groups) -> Groups:
        return closed if self.is_sealed else changed(before, applied)

    def check_result(self, key: tuple[Any, ...], row: Any) -> None:
        n, total, _ = row
        marks = {record.bit for records in self.source for record in records if self.key_of(record) == key}
        if total.bit_count() != n or total & ~sum(marks):
            raise Violation(f"a result counts {n} records of {key}, and these were {total:b}")


def changed(before: Groups, after: Groups) -> Groups:
    """Return the rows that are new, or others than before."""
    return {key: row for key, row in after.items() if before.get(key) != row}


def check_same(subject: str, actual: Mapping[Any, Any], expected: Mapping[Any, Any]) -> None:
    """Raise a Violation that shows which rows are others than the model's."""
    lines = [
        f"  {key}: {actual.get(key)}, should be {expected.get(key)}"
        for key in sorted(actual.keys() | expected.keys(), key=str)
        if actual.get(key) != expected.get(key)
    ]
    if lines:
        raise Violation("\n".join([f"{subject} differ from the model's", *lines]))


def seconds(table: pa.Table, column: str) -> list[int]:
    """Return a column of times, in seconds since the epoch."""
    return [time // _SECOND_US for time in table.column(column).cast(pa.int64()).to_pylist()]


def unique(keys: Sequence[Any], rows: Sequence[Any]) -> dict[Any, Any]:
    """Return rows by their keys, none of which is there twice."""
    if len(set(keys)) < len(keys):
        raise Violation(f"a row is there twice: {sorted(keys)}")
    return dict(zip(keys, rows, strict=True))

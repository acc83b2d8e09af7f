"""What a continuous query reads: a source of several partitions, Spark's two logs of epochs, and their model.

Each record of a key has a bit of its own, so the sum of a group's bits tells which records were counted, and that each was once.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from coordinator.model.identities import DEFAULT_STORE
from coordinator.model.schema import StateSchema
from store_actors.epochs.barrier import NEVER_MS
from store_actors.messages.requests import ShardInput
from tests.simulation.rescaling import RescaledWorkload
from tests.simulation.scheduler import Violation
from tests.simulation.spark import CommitLog
from tests.simulation.workload import Entry, Groups, Key, Read, groups_of, schema_of

#: Offset of each partition of the source.
Offsets = tuple[int, ...]

_KEYS = "abcde"


@dataclass(frozen=True, slots=True)
class Record:
    """A record of the source, which is there from a step on; its event time is in seconds."""

    name: str
    bit: int
    at: int
    time: int = 0


class Checkpoint(CommitLog):
    """The logs of a continuous query. Spark does not look whether somebody else has written an epoch: what is there stays."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[int, Offsets] = {}

    def add_end(self, epoch: int, end: Offsets) -> None:
        """Write where an epoch ends, unless that is written."""
        self.ends.setdefault(epoch, end)

    def ends_with(self, epoch: int, end: Offsets) -> bool:
        """Return whether an epoch ends there."""
        return self.ends.get(epoch) == end


class OffsetLog:
    """The log of ends as Spark's object of a query has it, which remembers the last two that it wrote."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._written: dict[int, Offsets] = {}

    def get(self, epoch: int) -> Offsets | None:
        """Return where an epoch ends; None if that is not written."""
        return self._written.get(epoch, self._checkpoint.ends.get(epoch))

    def add(self, epoch: int, end: Offsets) -> None:
        """Write where an epoch ends, unless that is written."""
        if self.get(epoch) is None:
            self._checkpoint.add_end(epoch, end)
            self._written = dict([*self._written.items(), (epoch, end)][-2:])

    def forget(self, epoch: int) -> None:
        """Forget what was written of an epoch."""
        self._written.pop(epoch, None)


class Stream(RescaledWorkload):
    """A source, and what a serial count makes of each epoch, by the ends that Spark's log has.

    Attributes
    ----------
    decided
        Returns the ends of the epochs that count.
    is_called
        Whether a function of the user is called for its rows, in Python workers.
    source
        The records of each partition.
    """

    forms = 1
    together = True
    is_called = False
    _most_records = 25
    #: There is no last epoch: a query goes on for as long as there are records.
    batches = sys.maxsize

    def __init__(self, rng: random.Random, decided: Callable[[], Mapping[int, Offsets]]) -> None:
        self.decided = decided
        self.watermark = False
        self._schemas = [schema_of(watermark=False, output_mode="update", whole=False)]
        self.schema = self._schemas[0]
        self.shards = rng.choice((1, 2, 2, 3))
        self._partitions = {shard: (shard, self.shards) for shard in range(self.shards)}
        self._shard_of = {}
        self._counted: dict[Offsets, Groups] = {}
        bits: defaultdict[str, int] = defaultdict(int)
        self.source = [self._draw_partition(rng, bits) for _ in range(rng.choice((1, 2, 2, 3)))]

    @classmethod
    def _draw_partition(cls, rng: random.Random, bits: dict[str, int]) -> list[Record]:
        """Draw records that come one after the other, often several at once, and after breaks."""
        records: list[Record] = []
        at, pause = 0, rng.choice((20, 60, 400))
        for _ in range(rng.randint(4, cls._most_records)):
            at += rng.choice((0, 0, 1)) * rng.randrange(pause)
            name = rng.choice(_KEYS)
            records.append(Record(name, 1 << bits[name], at))
            bits[name] = min(bits[name] + 1, 61)
        return records

    def is_whole(self, end: Offsets) -> bool:
        """Return whether an epoch's end is that of the source."""
        return end == tuple(map(len, self.source))

    def available(self, partition: int, offset: int, now: int) -> int:
        """Return how many records there are from an offset on."""
        records = self.source[partition]
        return next((at for at in range(offset, len(records)) if records[at].at > now), len(records)) - offset

    def rows(self, records: Sequence[Record]) -> ShardInput:
        """Return a piece of these records."""
        raw, columns = self.schema.raw_schema(), self._columns(records)
        zeros = pa.array([0] * len(records), pa.int64())
        batch = pa.record_batch([columns.get(name, zeros) for name in raw.names], schema=raw)
        return ShardInput.of_raw(self.schema, batch)

    def _columns(self, records: Sequence[Record]) -> dict[str, pa.Array]:
        """Return the columns of records that are not all zeros."""
        return {
            "name": pa.array([record.name for record in records], pa.string()),
            "mark": pa.array([record.bit for record in records], pa.int64()),
        }

    def key_of(self, record: Record) -> Key:
        """Return the key by which a record goes to its shard."""
        return None, record.name

    def shard_of(self, record: Record, shards: int) -> int:
        """Return the shard of a record, of so many."""
        return self._shard(self.key_of(record), shards)

    def watermark_of(self, records: Sequence[Record]) -> int:
        """Return the watermark by some records; without event time they have none."""
        return NEVER_MS

    def results_of(self, table: pa.Table) -> Groups:
        """Return what a table of results says."""
        return groups_of(table)

    # -- the model ----------------------------------------------------------------------------------------------------

    def counted(self, end: Offsets) -> Groups:
        """Return the groups of all records up to some offsets."""
        groups = self._counted.get(end)
        if groups is None:
            groups = {}
            for records, offset in zip(self.source, end, strict=True):
                for record in records[:offset]:
                    n, total, _ = groups.get((None, record.name), (0, 0, 0))
                    groups[None, record.name] = (n + 1, total + record.bit, 0)
            self._counted[end] = groups
        return groups

    def at(self, version: int) -> Groups:
        """Return all groups at a version, by the end of the epoch that made it."""
        if version == 0:
            return {}
        if version - 1 not in self.decided():
            raise Violation(f"version {version} is looked at, and epoch {version - 1} does not count")
        return self.counted(self.decided()[version - 1])

    def rows_at(self, version: int, partition: int) -> Groups:
        return self._own(self.at(version), partition)

    def all_keys(self, schema: StateSchema) -> pa.RecordBatch:
        return pa.record_batch([pa.array(_KEYS, pa.string())], schema=pa.schema([schema.input_keys[0].arrow()]))

    def check_history(
        self, shard: int, chains: dict[str, list[Entry]], read: Read, form_of: Callable[[str], int]
    ) -> None:
        """As of batches; of a version that does not count nothing is promised but that another run replaces it."""
        counted = [entry for entry in chains[DEFAULT_STORE] if self._counts(entry)]
        super().check_history(shard, {DEFAULT_STORE: counted}, read, form_of)

    def check_snapshot(self, snapshot: Entry, read: Read) -> None:
        if self._counts(snapshot):
            super().check_snapshot(snapshot, read)

    def _counts(self, entry: Entry) -> bool:
        """Return whether the version of a commit, or snapshot, counts."""
        return int(entry["version"]) <= len(self.decided())


def by_shard(stream: Stream, records: Sequence[Record], shards: int) -> Mapping[int, list[Record]]:
    """Return records by their shard."""
    parts: defaultdict[int, list[Record]] = defaultdict(list)
    for record in records:
        parts[stream.shard_of(record, shards)].append(record)
    return parts

"""The coordinator's record of a state since it started: times, counts, refusals and slow batches. In memory only. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.ledger.batch_stats import BatchStats
from coordinator.model.commits import CommitEntry
from coordinator.model.metric_table import Sample
from coordinator.telemetry.slow_batches import PHASES, RECENT, EndedBatch, PartitionTime, SlowBatch, moments, phases

#: Newest versions, refusals and slow batches that are kept of a state.
_VERSIONS = 16
_REFUSALS = 16
_SLOW = 8
#: Durations of batches that wait to be exported; the oldest of more are dropped.
_NOT_EXPORTED = 1000
_NO_TIME = PartitionTime()


@dataclass(slots=True)
class BatchRecord:
    """Moments of a batch, and what is known of it until it ends."""

    partitions: defaultdict[int, PartitionTime] = field(default_factory=lambda: defaultdict(PartitionTime))
    #: When the driver was told that all shards have committed, after the sink; None until then.
    ended_ms: int | None = None
    #: The commit that was accepted last; None before the first one and after the batch has ended.
    last: CommitEntry | None = None
    rows_in: int = 0

    def add(self, last: CommitEntry, rows_in: int) -> None:
        """Add an accepted commit; those of a run that was replaced do not count."""
        if self.last is not None and self.last.run_id != last.run_id:
            self.rows_in = 0
        self.last = last
        self.rows_in += rows_in

    def end(self, now_ms: int) -> EndedBatch | None:
        """End the batch; None if that happened before, or a previous coordinator accepted its commits."""
        self.ended_ms = now_ms
        last, rows_in = self.last, self.rows_in
        if last is None:
            return None
        self.last, self.rows_in = None, 0
        time = self.partitions[last.partition_id]
        times = {"planned_ms": last.batch_time_ms, **moments(last, time), "ended_ms": now_ms}
        begun_ms = next(ms for ms in (last.batch_time_ms, time.asked_ms, last.committed_at_ms) if ms is not None)
        return EndedBatch(max(0, now_ms - begun_ms), tuple(phases(times)), rows_in, last)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A commit or a lease that was refused."""

    #: Number of the refusal among all of the state, from 1.
    number: int
    at_ms: int
    partition_id: int
    kind: str
    text: str


@dataclass(slots=True)
class StateRecord:
    """The coordinator's record of one state since it started."""

    #: A number that is another one once something was added.
    changes: int = 0
    #: By the name of the metric, for those that have no label but the state.
    counts: Counter[str] = field(default_factory=Counter)
    phase_ms: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    recent: deque[EndedBatch] = field(default_factory=lambda: deque(maxlen=RECENT))
    #: ``refusals``, ``slow_batches``: The newest ones, oldest first.
    refusals: deque[Refusal] = field(default_factory=lambda: deque(maxlen=_REFUSALS))
    slow_batches: deque[SlowBatch] = field(default_factory=lambda: deque(maxlen=_SLOW))
    _batches: dict[int, BatchRecord] = field(default_factory=dict)
    _not_exported_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NOT_EXPORTED))

    def add_lease(self, version: int, partition_id: int, asked_ms: int, leased_ms: int) -> None:
        """Add a lease that was given to a task which makes a version."""
        time = self._batch(version).partitions[partition_id]
        time.asked_ms, time.leased_ms = asked_ms, leased_ms

    def add_commits(self, entries: Sequence[CommitEntry], now_ms: int, *, is_new: bool) -> None:
        """Add the commits of all stores of a partition that count.

        Parameters
        ----------
        is_new
            Whether they were accepted now, and not repeated by a caller that missed the answer.
        """
        last = entries[0]
        batch = self._batch(last.version)
        time = batch.partitions[last.partition_id]
        time.counted_ms = time.counted_ms or now_ms
        if is_new:
            stats = BatchStats([entries])
            self.counts.update(commits=stats.commits, **stats.counts())
            batch.add(last, stats.rows_in)

    def end_batch(self, version: int, now_ms: int) -> EndedBatch | None:
        """End the batch that makes a version; see :meth:`BatchRecord.end`."""
        ended = self._batch(version).end(now_ms)
        if ended is not None:
            self.counts["batches"] += 1
            self.phase_ms.update({name: took for name, took in zip(PHASES, ended.phases, strict=True) if took})
            self._not_exported_s.append(ended.took_ms / 1000)
        return ended

    def is_ended(self, version: int) -> bool:
        """Return whether the batch that makes a version is known to have ended."""
        return version in self._batches and self._batches[version].ended_ms is not None

    def add_refusal(self, partition_id: int, kind: str, text: str, now_ms: int) -> None:
        """Add a request that was refused with an error of a kind."""
        self.changes += 1
        self.refused[kind] += 1
        self.refusals.append(Refusal(self.refused.total(), now_ms, partition_id, kind, text))

    def add_slow_batch(self, ended: EndedBatch, at_ms: int, shard: int, text: str) -> None:
        """Add a batch that took much longer than usual, with the shard that committed last and a text on where the time went."""
        self.changes += 1
        self.counts["slow_batches"] += 1
        number, batch_id = self.counts["slow_batches"], ended.last.version - 1
        self.slow_batches.append(SlowBatch(number, at_ms, batch_id, shard, ended.took_ms, text))

    def batch(self, version: int) -> BatchRecord | None:
        """Return the record of the batch that made a version; None if that was before this coordinator, or long ago."""
        return self._batches.get(version)

    def time_of(self, entry: CommitEntry | None) -> PartitionTime:
        """Return the moments of the task that made a commit, as far as they are known."""
        batch = None if entry is None else self._batches.get(entry.version)
        return _NO_TIME if batch is None or entry is None else batch.partitions.get(entry.partition_id, _NO_TIME)

    def forget_run(self) -> None:
        """Drop the batches of a run that was replaced: they do not end, and the next run gives their numbers again."""
        self.changes += 1
        self._batches.clear()

    def samples(self, state_name: str, operations: Mapping[str, int]) -> Iterator[Sample]:
        """Return the counts as metrics; the duration of each batch is returned once."""
        for name, count in self.counts.items():
            yield Sample(f"statefleet_{name}_total", count, (state_name,))
        for phase, took_ms in self.phase_ms.items():
            yield Sample("statefleet_batch_phase_seconds_total", took_ms / 1000, (state_name, phase))
        for kind, count in self.moves.items():
            yield Sample("statefleet_moves_total", count, (state_name, kind))
        for error, count in self.refused.items():
            yield Sample("statefleet_refusals_total", count, (state_name, error))
        for label, count in operations.items():
            yield Sample("statefleet_leases_total", count, (state_name, label))
        while self._not_exported_s:
            yield Sample("statefleet_batch_seconds", self._not_exported_s.popleft(), (state_name,))

    def _batch(self, version: int) -> BatchRecord:
        self.changes += 1
        batch = self._batches.get(version)
        if batch is None:
            batch = self._batches[version] = BatchRecord()
            while len(self._batches) > _VERSIONS:
                del self._batches[min(self._batches)]
        return batch

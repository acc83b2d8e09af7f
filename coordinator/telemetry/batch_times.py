"""When the coordinator was asked what in the newest batches of each state; in memory only, for whoever looks. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from coordinator.model.commits import CommitEntry
from coordinator.telemetry.slow_batches import SlowBatch

__all__ = ["BatchTimes", "PartitionTime", "Refusal", "TimesOfBatch", "moments"]

#: Newest versions, and newest refusals, that are remembered of a state.
_VERSIONS = 16
_REFUSALS = 16
#: Newest slow batches.
_SLOW = 8


@dataclass(slots=True)
class PartitionTime:
    """Moments of one partition's task, in milliseconds since the epoch.

    Attributes
    ----------
    asked_ms, leased_ms
        When it asked for a lease, and had it; None where that came with the commit before.
    counted_ms
        When its commit was in the log; None until then.
    """

    asked_ms: int | None = None
    leased_ms: int | None = None
    counted_ms: int | None = None


def moments(entry: CommitEntry | None, time: PartitionTime) -> dict[str, int | None]:
    """When a shard's newest commit was at what. Only the coordinator that counted a commit knows how long it took."""
    is_known = entry is not None and time.counted_ms is not None
    return {
        "asked_ms": time.asked_ms,
        "leased_ms": time.leased_ms,
        "begun_ms": entry.committed_at_ms if entry else None,
        "apply_ms": entry.apply_ms if entry and is_known else None,
        "write_ms": entry.write_ms if entry and is_known else None,
        "counted_ms": time.counted_ms,
    }


@dataclass(slots=True)
class TimesOfBatch:
    """Moments of a batch.

    Attributes
    ----------
    ended_ms
        When the driver was told that all shards have it, after the sink; None until then.
    """

    partitions: defaultdict[int, PartitionTime] = field(default_factory=lambda: defaultdict(PartitionTime))
    ended_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A commit or a lease that was refused.

    Attributes
    ----------
    number
        Of all that the state's callers were refused, counted from 1.
    kind, text
        Name of the error, and what was said.
    """

    number: int
    at_ms: int
    partition_id: int
    kind: str
    text: str


class BatchTimes:
    """What is remembered of one state.

    Attributes
    ----------
    changes
        Goes up whenever something is added.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._versions: dict[int, TimesOfBatch] = {}
        self._refusals: deque[Refusal] = deque(maxlen=_REFUSALS)
        self._refused = 0
        self._slow: deque[SlowBatch] = deque(maxlen=_SLOW)

    def leased(self, version: int, partition_id: int, asked_ms: int, leased_ms: int) -> None:
        """A task was given the lease for a version that it is to make."""
        times = self._of(version).partitions[partition_id]
        times.asked_ms, times.leased_ms = asked_ms, leased_ms

    def counted(self, version: int, partition_id: int, now_ms: int) -> PartitionTime:
        """A version of a partition counts; returns its moments."""
        times = self._of(version).partitions[partition_id]
        # A retry is told of the commit that counts since then.
        times.counted_ms = times.counted_ms or now_ms
        return times

    def ended(self, version: int, now_ms: int) -> None:
        """The batch that makes a version is at its end."""
        self._of(version).ended_ms = now_ms

    def is_ended(self, version: int) -> bool:
        """Whether the batch that makes a version is known to be at its end."""
        return version in self._versions and self._versions[version].ended_ms is not None

    def refused(self, partition_id: int, kind: str, text: str, now_ms: int) -> None:
        """A caller was refused."""
        self.changes += 1
        self._refused += 1
        self._refusals.append(Refusal(self._refused, now_ms, partition_id, kind, text))

    def was_slow(self, batch: SlowBatch) -> None:
        """A batch took much longer than usual."""
        self.changes += 1
        self._slow.append(batch)

    def slow_batches(self) -> tuple[SlowBatch, ...]:
        """The newest slow batches, oldest first."""
        return tuple(self._slow)

    def of(self, version: int) -> TimesOfBatch | None:
        """What is known of the batch that made a version; None of one before this coordinator, or long ago."""
        return self._versions.get(version)

    def refusals(self) -> tuple[Refusal, ...]:
        """The newest refusals, oldest first."""
        return tuple(self._refusals)

    def forget_run(self) -> None:
        """Another run began: its batches may have the numbers of the former run's."""
        self.changes += 1
        self._versions.clear()

    def _of(self, version: int) -> TimesOfBatch:
        self.changes += 1
        found = self._versions.get(version)
        if found is None:
            found = self._versions[version] = TimesOfBatch()
            while len(self._versions) > _VERSIONS:
                del self._versions[min(self._versions)]
        return found

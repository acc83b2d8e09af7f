"""What a coordinator counted of a state since it started: figures for metrics, and how its newest batches went. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.model.commits import CommitEntry
from coordinator.model.metric_table import Sample
from coordinator.telemetry.batch_phases import PHASES, phases
from coordinator.telemetry.batch_times import PartitionTime, moments
from coordinator.telemetry.slow_batches import RECENT, EndedBatch

__all__ = ["StateCounters"]

#: Batches that are being made, or whose end nobody has told yet, that are remembered.
_AT_WORK = 16
#: Durations of batches that wait to be told; older ones of more are not.
_UNTOLD = 1000


@dataclass(slots=True)
class _BatchAtWork:
    """A batch some of whose commits were counted.

    Attributes
    ----------
    last
        The commit that was counted last, and when its partition was at what.
    """

    last: CommitEntry
    time: PartitionTime
    rows_in: int = 0


@dataclass(slots=True)
class StateCounters:
    """Figures of one state.

    Attributes
    ----------
    counts
        By the name of the metric, for those that have no label but the state.
    phase_ms
        Time of batches by phase.
    moves, refusals
        By kind, and by error.
    recent
        The batches that ended last.
    """

    counts: Counter[str] = field(default_factory=Counter)
    phase_ms: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    recent: deque[EndedBatch] = field(default_factory=lambda: deque(maxlen=RECENT))
    _at_work: dict[int, _BatchAtWork] = field(default_factory=dict)
    _untold_s: deque[float] = field(default_factory=lambda: deque(maxlen=_UNTOLD))

    def counted(self, entries: Sequence[CommitEntry], time: PartitionTime) -> None:
        """Commits of all stores of a partition count, for the first time."""
        first = entries[0]
        # Each store of a shard tells of all rows that reached it.
        rows_in = max(entry.rows_in for entry in entries)
        self.counts["commits"] += 1
        self.counts["rows_in"] += rows_in
        self.counts["rows_late"] += max(entry.rows_late for entry in entries)
        self.counts["rows_updated"] += sum(entry.rows_updated for entry in entries)
        self.counts["rows_removed"] += sum(entry.rows_removed for entry in entries)
        self.counts["delta_bytes"] += sum(entry.file_bytes for entry in entries)
        batch = self._at_work.get(first.version)
        if batch is None or batch.last.run_id != first.run_id:
            batch = self._at_work[first.version] = _BatchAtWork(first, time)
            while len(self._at_work) > _AT_WORK:
                del self._at_work[min(self._at_work)]
        batch.last, batch.time = first, time
        batch.rows_in += rows_in

    def ended(self, version: int, ended_ms: int) -> EndedBatch | None:
        """A batch is at its end; None if that was told before, or its commits were counted by a former coordinator."""
        batch = self._at_work.pop(version, None)
        if batch is None:
            return None
        last, time = batch.last, batch.time
        told = {"planned_ms": last.batch_time_ms, **moments(last, time), "ended_ms": ended_ms}
        begun_ms = next(one for one in (last.batch_time_ms, time.asked_ms, last.committed_at_ms) if one is not None)
        ended = EndedBatch(max(0, ended_ms - begun_ms), tuple(phases(told)), batch.rows_in, last)
        self.counts["batches"] += 1
        self.phase_ms.update({name: took for name, took in zip(PHASES, ended.phases, strict=True) if took})
        self._untold_s.append(ended.took_ms / 1000)
        return ended

    def forget_run(self) -> None:
        """Another run began: batches of the former one do not end."""
        self._at_work.clear()

    def samples(self, state_name: str, operations: Mapping[str, int]) -> Iterator[Sample]:
        """As metrics; each batch is told once.

        Parameters
        ----------
        operations
            State operations by where their tasks ran.
        """
        for name, count in self.counts.items():
            yield Sample(f"statefleet_{name}_total", count, (state_name,))
        for phase, took_ms in self.phase_ms.items():
            yield Sample("statefleet_batch_phase_seconds_total", took_ms / 1000, (state_name, phase))
        for kind, count in self.moves.items():
            yield Sample("statefleet_moves_total", count, (state_name, kind))
        for error, count in self.refusals.items():
            yield Sample("statefleet_refusals_total", count, (state_name, error))
        for place, count in operations.items():
            yield Sample("statefleet_leases_total", count, (state_name, place))
        while self._untold_s:
            yield Sample("statefleet_batch_seconds", self._untold_s.popleft(), (state_name,))

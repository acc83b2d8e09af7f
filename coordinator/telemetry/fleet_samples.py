"""What a coordinator's ledgers and lists tell of a fleet, as metrics. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.identities import ActorLocation
from coordinator.model.metric_table import Sample
from coordinator.model.state_metadata import StateMetadata
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.placement.move_planner import ELSEWHERE, LOCAL, MOVED, NO_EXECUTOR, UNPLACED, MovePlanner
from coordinator.telemetry.status import has_watermark

__all__ = ["StateStats", "coordinator_samples"]

#: What became of state operations, as a label.
_PLACES = {
    LOCAL: "local",
    MOVED: "moved",
    NO_EXECUTOR: "no_executor",
    ELSEWHERE: "elsewhere",
    UNPLACED: "unplaced",
}


def coordinator_samples(started_at_ms: int, lives: ActorRegistry) -> Iterator[Sample]:
    """What is known of the fleet's processes."""
    yield Sample("statefleet_coordinator_start_timestamp_seconds", started_at_ms / 1000)
    actors = lives.all()
    lost = sum(map(lives.is_over, actors))
    yield Sample("statefleet_store_actors", len(actors) - lost, ("alive",))
    yield Sample("statefleet_store_actors", lost, ("lost",))


@dataclass(slots=True)
class StateStats:
    """Sums over a state's shards, which are added one by one: there may be many.

    Attributes
    ----------
    holders
        How many shards each store actor has.
    operations
        State operations by where their tasks ran.
    """

    shards: int = 0
    rows: int = 0
    bytes: int = 0
    version: int | None = None
    last_commit_ms: int | None = None
    watermark_ms: int | None = None
    holders: Counter[ActorLocation] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    _without_watermark: bool = False

    def add(
        self, ledger: StateLedger, metadata: StateMetadata, placing: MovePlanner, partitions: Iterable[int]
    ) -> None:
        """Add some shards."""
        for partition in partitions:
            rows, size = ledger.held(partition)
            self.shards, self.rows, self.bytes = self.shards + 1, self.rows + rows, self.bytes + size
            # As StateLedger.committed_version, which looks at all shards in one turn.
            version = ledger.newest_version(partition)
            self.version = version if self.version is None else min(self.version, version)
            holder, entry = ledger.holder(partition), ledger.newest(partition)
            if holder is not None and not ledger.is_taken_over(partition):
                self.holders[holder] += 1
            for place, count in placing.operations(metadata.state_name, partition).items():
                self.operations[_PLACES[place]] += count
            if entry is None or not has_watermark(metadata):
                self._without_watermark = True
            else:
                known = self.watermark_ms
                self.watermark_ms = entry.watermark_ms if known is None else min(known, entry.watermark_ms)
            if entry is not None:
                self.last_commit_ms = max(self.last_commit_ms or 0, entry.committed_at_ms)

    def samples(self, state_name: str, lives: ActorRegistry, *, is_active: bool) -> Iterator[Sample]:
        """As metrics."""
        labels = (state_name,)
        lost = sum(count for holder, count in self.holders.items() if lives.is_over(holder))
        yield Sample("statefleet_state_rows", self.rows, labels)
        yield Sample("statefleet_state_bytes", self.bytes, labels)
        yield Sample("statefleet_state_shards", self.shards, labels)
        yield Sample("statefleet_state_shards_lost", lost, labels)
        yield Sample("statefleet_state_active", int(is_active), labels)
        yield Sample("statefleet_state_version", self.version or 0, labels)
        if self.watermark_ms is not None and not self._without_watermark:
            yield Sample("statefleet_watermark_timestamp_seconds", self.watermark_ms / 1000, labels)
        if self.last_commit_ms is not None:
            yield Sample("statefleet_last_commit_timestamp_seconds", self.last_commit_ms / 1000, labels)

"""Sums over the shards of a state, where its tasks ran, and the metrics that are made of them. Pure, in memory only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.ledger.ledger_state import Assignment
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.commits import CommitEntry
from coordinator.model.identities import ActorLocation
from coordinator.model.metric_table import Sample
from coordinator.model.state_metadata import StateMetadata
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.placement.policies import ActorSlot

#: Outcome of a state operation: its task ran on the node of its shard, or why it did not.
LOCAL = "local"
MOVED = "the shard was moved to another node with this batch"
NO_EXECUTOR = "the shard's node has no executor"
ELSEWHERE = "Spark ran the task on another node than it was asked to"
UNPLACED = "the driver told of no executors"
#: The same as labels.
_PLACES = {
    LOCAL: "local",
    MOVED: "moved",
    NO_EXECUTOR: "no_executor",
    ELSEWHERE: "elsewhere",
    UNPLACED: "unplaced",
}


class TaskLocality:
    """State operations of all shards since the coordinator started."""

    def __init__(self) -> None:
        self._outcomes: defaultdict[tuple[str, int], Counter[str]] = defaultdict(Counter)

    def count(
        self,
        state_name: str,
        partition_id: int,
        asking: ActorLocation,
        previous: ActorLocation | None,
        holder: ActorLocation,
        slots: Sequence[ActorSlot],
    ) -> None:
        """Count a task that asked for its shard's lease."""
        if asking.node_id == holder.node_id:
            outcome = LOCAL
        elif not slots:
            outcome = UNPLACED
        elif not any(slot.location.node_id == holder.node_id and slot.cores > 0 for slot in slots):
            outcome = NO_EXECUTOR
        else:
            outcome = MOVED if previous is not None and previous.node_id == asking.node_id else ELSEWHERE
        self._outcomes[state_name, partition_id][outcome] += 1

    def count_local(self, state_name: str, partition_id: int) -> None:
        """Count a task that ran on the node of its shard."""
        self._outcomes[state_name, partition_id][LOCAL] += 1

    def forget(self, state_name: str) -> None:
        """Drop the counts of a state."""
        for key in [key for key in self._outcomes if key[0] == state_name]:
            del self._outcomes[key]

    def of(self, state_name: str, partition_id: int) -> dict[str, int]:
        """Return how many state operations of a shard had which outcome."""
        return dict(self._outcomes.get((state_name, partition_id), {}))


@dataclass(frozen=True, slots=True)
class ShardStats:
    """A shard, as the ledger has it."""

    partition_id: int
    version: int
    #: ``rows``, ``bytes``: Of that version, all stores together.
    rows: int
    bytes: int
    #: Newest commit of the default store; None without any.
    entry: CommitEntry | None
    #: None if the shard was never leased.
    lease: Assignment | None
    #: State operations since the coordinator started, by where their tasks ran.
    operations: Mapping[str, int]

    @classmethod
    def of(cls, ledger: StateLedger, locality: TaskLocality, partition_id: int) -> ShardStats:
        """Return the shard of a partition."""
        rows, size = ledger.rows_and_bytes(partition_id)
        return cls(
            partition_id,
            ledger.newest_version(partition_id),
            rows,
            size,
            ledger.newest(partition_id),
            ledger.assignment(partition_id),
            locality.of(ledger.state_name, partition_id),
        )


@dataclass(slots=True)
class StateStats:
    """Sums over a state's shards, which are added one by one: there may be many.

    Attributes
    ----------
    version
        Newest version that every shard has; None without shards.
    last_commit_ms
        When the newest commit was made; None without any.
    watermark_ms
        The lowest watermark; None unless every shard has one.
    """

    shards: int = 0
    rows: int = 0
    bytes: int = 0
    version: int | None = None
    last_commit_ms: int | None = None
    holders: Counter[ActorLocation] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    _lowest_watermark_ms: int | None = None
    _lacks_watermark: bool = False

    @property
    def watermark_ms(self) -> int | None:
        return None if self._lacks_watermark else self._lowest_watermark_ms

    def add(self, metadata: StateMetadata, shards: Iterable[ShardStats]) -> None:
        """Add shards of the state that the metadata describe."""
        has_watermark = metadata.schema is not None and metadata.schema.delay_ms is not None
        for shard in shards:
            self.shards, self.rows, self.bytes = self.shards + 1, self.rows + shard.rows, self.bytes + shard.bytes
            self.version = shard.version if self.version is None else min(self.version, shard.version)
            for locality, count in shard.operations.items():
                self.operations[locality] += count
            if shard.lease is not None:
                self.holders[shard.lease.location] += 1
            entry = shard.entry
            if entry is not None:
                self.last_commit_ms = max(self.last_commit_ms or 0, entry.committed_at_ms)
            if entry is None or not has_watermark:
                self._lacks_watermark = True
            else:
                lowest_ms = self._lowest_watermark_ms
                self._lowest_watermark_ms = (
                    entry.watermark_ms if lowest_ms is None else min(lowest_ms, entry.watermark_ms)
                )

    @property
    def labelled_operations(self) -> dict[str, int]:
        """Return the number of state operations by the label of the metric."""
        return {_PLACES[locality]: count for locality, count in self.operations.items()}

    def samples(self, state_name: str, actors: ActorRegistry, *, is_active: bool) -> Iterator[Sample]:
        """Return the sums as metrics."""
        labels = (state_name,)
        lost = sum(count for holder, count in self.holders.items() if actors.is_dead(holder))
        yield Sample("statefleet_state_rows", self.rows, labels)
        yield Sample("statefleet_state_bytes", self.bytes, labels)
        yield Sample("statefleet_state_shards", self.shards, labels)
        yield Sample("statefleet_state_shards_lost", lost, labels)
        yield Sample("statefleet_state_active", int(is_active), labels)
        yield Sample("statefleet_state_version", self.version or 0, labels)
        if self.watermark_ms is not None:
            yield Sample("statefleet_watermark_timestamp_seconds", self.watermark_ms / 1000, labels)
        if self.last_commit_ms is not None:
            yield Sample("statefleet_last_commit_timestamp_seconds", self.last_commit_ms / 1000, labels)

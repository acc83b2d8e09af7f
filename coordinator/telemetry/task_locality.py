"""Counts of state operations by where their tasks ran: on the node of their shard, or why not. Pure, in memory only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from coordinator.model.identities import ActorLocation
from coordinator.placement.policies import ActorSlot

#: Outcome of a state operation: its task ran on the node of its shard, or why it did not.
LOCAL = "local"
MOVED = "the shard was moved to another node with this batch"
NO_EXECUTOR = "the shard's node has no executor"
ELSEWHERE = "Spark ran the task on another node than it was asked to"
UNPLACED = "the driver told of no executors"


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

"""One partition's keyed stores in memory: who is on them, and how they come to the version that a session wants. No Ray.

Memory may be used for a version if the commit that made it there is the one that the coordinator counts; otherwise the version
is loaded. All stores of a partition go to a version together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from coordinator.model import CommitEntry, LoadPlan
from store_actors.engine.versions import CHANGE_COLUMN
from store_actors.keyed.shard import KeyedShard, ReadHandle, UpdateHandle
from store_actors.messages import OpenRequest, StoreSpec
from store_actors.serving.evolution import evolve
from store_actors.serving.loading import Loader
from store_actors.serving.operator_shards import CoordinatorClient

__all__ = ["Partition", "Positioner", "Session", "adapter"]

#: Versions behind the newest whose attempt is remembered; more than memory can go back.
_KNOWN_ATTEMPTS = 4


@dataclass(slots=True)
class Partition:
    """The named stores of one partition in memory, with what proves which lineage they belong to.

    Attributes
    ----------
    lock
        Held by whoever looks at or changes anything else here.
    shards, specs
        By store name, with the columns that each was loaded for.
    attempts
        Counted attempt of each version that memory can still reach.
    writer
        The one session that updates, if there is one.
    newest
        Newest counted commit of each store, once one was made here.
    deltas
        Commits since the last snapshot.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    shards: dict[str, KeyedShard] = field(default_factory=dict)
    specs: dict[str, StoreSpec] = field(default_factory=dict)
    attempts: dict[int, str] = field(default_factory=dict)
    writer: Session | None = None
    newest: dict[str, CommitEntry] = field(default_factory=dict)
    deltas: int = 0

    def forget(self) -> None:
        """Let go of everything in memory; what is stored is loaded when it is wanted again."""
        self.shards.clear()
        self.attempts.clear()
        self.newest.clear()

    def remember(self, counted: Sequence[CommitEntry]) -> None:
        """Take note of the commits, one a store, that made the version which memory now holds."""
        newest = counted[0].version
        self.attempts[newest] = counted[0].attempt_id
        for version in [v for v in self.attempts if v < newest - _KNOWN_ATTEMPTS]:
            del self.attempts[version]
        self.newest = {entry.store_name: entry for entry in counted}
        self.deltas += 1


@dataclass(slots=True)
class Session:
    """One handle on all named stores of a partition, at one version.

    Attributes
    ----------
    used_s
        Monotonic time of the last call, in seconds.
    committed
        Version that it made.
    ended
        Why it is over; empty while it is open.
    fenced
        Whether somebody newer ended it.
    """

    request: OpenRequest
    partition: Partition
    handles: dict[str, UpdateHandle] | dict[str, ReadHandle]
    used_s: float
    committed: int | None = None
    ended: str = ""
    fenced: bool = False
    scans: dict[str, Iterator[pa.RecordBatch]] = field(default_factory=dict)

    def end(self, reason: str, *, fenced: bool = False) -> None:
        """Abort its updates or release its reads; the partition has no writer any more if this was it."""
        for handle in self.handles.values():
            if isinstance(handle, UpdateHandle):
                handle.abort()
            else:
                handle.release()
        self.ended, self.fenced = reason, fenced
        self.scans.clear()
        if self.partition.writer is self:
            self.partition.writer = None


class Positioner:
    """Brings partitions to versions: in memory if that is the counted lineage, else from storage.

    Parameters
    ----------
    coordinator
        Knows which commits count.
    loader
        Reads files.
    """

    def __init__(self, coordinator: CoordinatorClient, loader: Loader) -> None:
        self._coordinator = coordinator
        self._loader = loader

    def reader(self, partition: Partition, request: OpenRequest, spec: StoreSpec) -> ReadHandle:
        """A handle on one store at the request's base version; a version that is loaded is the handle's own."""
        plan = self._plan(request, spec)
        counted = plan.deltas[-1].attempt_id if plan.deltas else ""
        shard = partition.shards.get(spec.name)
        known = partition.attempts.get(request.base_version, "")
        if (
            shard is not None
            and partition.specs[spec.name] == spec
            and known == counted
            and request.base_version in shard.retained
        ):
            return shard.read(request.base_version)
        return self._loader.load(_maker(spec), plan, adapter(spec))[0].read()

    def position(self, partition: Partition, request: OpenRequest) -> None:
        """Bring every store to the request's base version, in memory if it is the counted one."""
        base = request.base_version
        plans = {spec.name: self._plan(request, spec) for spec in request.stores}
        counted = next((plan.deltas[-1].attempt_id for plan in plans.values() if plan.deltas), "")
        # Every store of the partition goes along, also those that this session did not ask for.
        in_memory = (
            bool(partition.shards)
            and partition.attempts.get(base, "") == counted
            and all(shard.rollback(base) for shard in partition.shards.values())
        )
        if not in_memory:
            partition.forget()
        # Memory may have gone back: its rows must not become the snapshot of a newer commit.
        partition.newest = {name: entry for name, entry in partition.newest.items() if entry.version == base}
        for spec in request.stores:
            if partition.specs.get(spec.name) != spec or spec.name not in partition.shards:
                shard, deltas = self._loader.load(_maker(spec), plans[spec.name], adapter(spec))
                if shard.version < base:
                    # A store without versions, or added later than its siblings, is empty at the base version.
                    shard.load(_empty(shard), base)
                partition.shards[spec.name], partition.specs[spec.name] = shard, spec
                partition.deltas = max(partition.deltas, deltas)
        partition.attempts[base] = counted

    def _plan(self, request: OpenRequest, spec: StoreSpec) -> LoadPlan:
        state_name = request.lease.store_id.state_name
        return self._coordinator.load_plan(state_name, request.task.partition_id, request.base_version, spec.name)


def adapter(spec: StoreSpec) -> Callable[[pa.Table, str], pa.Table]:
    """Turns the rows of a file (named second) into a store's present columns."""
    return lambda rows, file: evolve(rows, spec.keys, spec.values, file)


def _maker(spec: StoreSpec) -> Callable[[], KeyedShard]:
    return lambda: KeyedShard(spec.keys, spec.values, spec.due)


def _empty(shard: KeyedShard) -> pa.Table:
    return shard.schema.row_schema().empty_table().append_column(CHANGE_COLUMN, pa.array([], pa.int8()))

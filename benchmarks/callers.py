"""The callers of the coordinator in :mod:`benchmarks.scale`: tasks and store actors as coroutines, and an object store that counts."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from benchmarks.without_spark import COUNT_AND_SUM
from coordinator.ledger.state_ledger import AcceptedCommits, LeaseGrant
from coordinator.model.commits import CommitEntry, PartitionCommit
from coordinator.model.errors import StateStoreError
from coordinator.model.identities import ActorLocation, TaskIdentity
from coordinator.model.state_metadata import StateMetadata
from coordinator.placement.policies import ActorSlot
from coordinator.runtime.runtime import MachineClock
from coordinator.service.coordinator import Coordinator
from coordinator.storage.memory import MemoryObjectStore
from coordinator.storage.protocol import ObjectInfo
from store_actors.actor.store_actor import SHARDS_AT_ONCE
from store_actors.serving.coordinator_ref import GroupedCommits

Result = TypeVar("Result")

FLEET_URI = "memory://"
_CORES = 16


class CountedObjects(MemoryObjectStore):
    """An object store in memory that counts requests, and waits for each."""

    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()
        self.bytes_put: Counter[str] = Counter()
        self.delay_s = delay_s

    def _count(self, kind: str, path: str, size: int = 0) -> None:
        folder = path.split("/")[1] if path.count("/") > 1 else "other"
        self.requests[f"{kind} {folder}"] += 1
        self.bytes_put[folder] += size
        if self.delay_s:
            time.sleep(self.delay_s)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        self._count("PUT", path, len(data))
        return super().put_if_absent(path, data)

    def put(self, path: str, data: bytes) -> None:
        self._count("PUT", path, len(data))
        super().put(path, data)

    def get(self, path: str) -> bytes:
        self._count("GET", path)
        return super().get(path)

    def list(self, prefix: str) -> list[ObjectInfo]:
        self._count("LIST", f"{prefix}/")
        return super().list(prefix)


def actors(count: int) -> list[ActorLocation]:
    """Return a number of store actors, each on a node of its own."""
    return [
        ActorLocation(
            f"statefleet-store-{n:05d}", uuid.uuid4().hex, uuid.uuid4().hex * 2, f"ip-10-0-{n >> 8}-{n & 255}", n
        )
        for n in range(count)
    ]


class Query:
    """A query: its tasks, and the store actors that commit for them."""

    def __init__(self, coordinator: Coordinator, name: str, shards: int, present: Sequence[ActorLocation]) -> None:
        self._coordinator = coordinator
        self.name, self.shards, self.actors = name, shards, present
        self.query_id, self.run_id = str(uuid.uuid4()), str(uuid.uuid4())
        self.metadata = StateMetadata(name, self.query_id, shards, "update", COUNT_AND_SUM)
        #: Store actor of the node on which Spark runs the task of each shard.
        self.where = [present[partition % len(present)] for partition in range(shards)]
        self._grants: dict[int, LeaseGrant] = {}

    async def place(self) -> None:
        """Report the nodes that have executors, and run tasks on the nodes that the coordinator chooses."""
        for actor in self.actors:
            await self._coordinator.report_store_actor(actor)
        slots = [ActorSlot(actor, _CORES) for actor in self.actors]
        placement = await self._coordinator.place_shards(self.name, self.query_id, range(self.shards), slots)
        self.where = [holder for holder in placement.holders if holder is not None]

    def leases(self, batch: int) -> Iterator[Awaitable[None]]:
        return (self._lease(partition, batch) for partition in range(self.shards))

    async def _lease(self, partition: int, batch: int) -> None:
        task = self.task_of(partition, batch)
        self._grants[partition] = await self._coordinator.attach_and_lease(task, self.metadata, self.where[partition])

    def task_of(self, partition: int, batch: int) -> TaskIdentity:
        """Return the task of a shard, on the node that the coordinator chose."""
        where = self.where[partition]
        return TaskIdentity(
            self.name,
            self.query_id,
            self.run_id,
            batch,
            partition,
            0,
            f"{where.host}:{where.pid}",
            1000 * batch,
            1000 * batch - 1000,
        )

    async def ask_for_leases(self, partitions: Sequence[int], batch: int) -> list[LeaseGrant]:
        """Return the leases of a task with several shards."""
        tasks = [self.task_of(partition, batch) for partition in partitions]
        return await self._coordinator.attach_and_lease_all(tasks, self.metadata, self.where[partitions[0]])

    def commits(self, batch: int) -> Iterator[Awaitable[object]]:
        return (self._commit(partition, batch) for partition in range(self.shards))

    async def _commit(self, partition: int, batch: int) -> None:
        epoch = self._grants[partition].lease.epoch
        (counted,) = await self._coordinator.commit_partitions(
            self.name, [PartitionCommit((commit_of(self, partition, batch + 1, epoch),))]
        )
        if isinstance(counted, StateStoreError):
            raise counted

    async def settle(self, batch: int) -> None:
        result, placement, _ = await self._coordinator.batch_result(self.task_of(0, batch), range(self.shards))
        if result.missing:
            raise AssertionError(f"{len(result.missing)} shards have not committed batch {batch}")
        self.where = [holder for holder in placement.holders if holder is not None]

    def reassigned(self) -> Iterator[Awaitable[object]]:
        """Return the requests that store actors make in each round of maintenance."""
        partitions: dict[str, list[int]] = {}
        for partition in range(self.shards):
            partitions.setdefault(self.where[partition].actor_name, []).append(partition)
        return (
            self._coordinator.reassigned(self.name, actor.actor_name, partitions.get(actor.actor_name, []))
            for actor in self.actors
        )


def commit_of(query: Query, partition: int, version: int, epoch: int) -> CommitEntry:
    """Return a commit as a store actor sends it."""
    where, attempt = query.where[partition], uuid.uuid4().hex
    return CommitEntry(
        partition_id=partition,
        version=version,
        base_version=version - 1,
        epoch=epoch,
        run_id=query.run_id,
        attempt_id=attempt,
        file=f"{query.name}/0/{partition}/{version}-{attempt}.delta",
        file_bytes=123_456,
        checksum=3_735_928_559,
        delta_rows=5_000,
        rows_updated=5_000,
        rows_removed=0,
        state_rows=100_000,
        state_bytes=12_345_678,
        rows_in=5_000,
        rows_late=0,
        watermark_ms=1_700_000_000_000,
        committed_at_ms=int(time.time() * 1000),
        executor=f"{where.host}:{where.pid}",
        output_watermark_ms=1_700_000_000_000,
        batch_time_ms=1000 * (version - 1),
        apply_ms=12,
        write_ms=34,
    )


class Node:
    """A node that runs a task on each core, each task for several shards, with the calls of its store actors to the coordinator."""

    def __init__(
        self,
        query: Query,
        coordinator: Coordinator,
        objects: CountedObjects,
        loop: asyncio.AbstractEventLoop,
        cores: int,
    ) -> None:
        self._query, self._coordinator, self._objects, self._loop = query, coordinator, objects, loop
        self._tasks = ThreadPoolExecutor(cores)
        self._shares = [range(first, query.shards, cores) for first in range(min(cores, query.shards))]
        self._appliers = {actor.instance_id: ThreadPoolExecutor(SHARDS_AT_ONCE) for actor in query.actors}
        self._commits = {
            actor.instance_id: GroupedCommits(self._send, threading.RLock, MachineClock()) for actor in query.actors
        }
        #: Number of calls of the coordinator, by kind.
        self.calls: Counter[str] = Counter()

    def _send(self, state_name: str, commits: Sequence[PartitionCommit]) -> Sequence[AcceptedCommits | StateStoreError]:
        return self._ask("commit", self._coordinator.commit_partitions(state_name, commits))

    def _ask(self, kind: str, call: Coroutine[Any, Any, Result]) -> Result:
        self.calls[kind] += 1
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    async def batch(self, batch: int) -> None:
        """Run the tasks and the end of a batch."""
        await asyncio.gather(
            *(self._loop.run_in_executor(self._tasks, self._task, share, batch) for share in self._shares)
        )
        self.calls["end of batch"] += 1
        await self._query.settle(batch)

    def _task(self, share: Sequence[int], batch: int) -> None:
        """Wait as a task does: for leases, unless they came with the commits before, then for each shard's delta and commit."""
        query = self._query
        actors = [query.where[partition].instance_id for partition in share]
        grants = [
            self._commits[actor].piggybacked(query.task_of(partition, batch))
            for actor, partition in zip(actors, share, strict=True)
        ]
        if None in grants:
            grants = self._ask("lease", query.ask_for_leases(share, batch))
        for actor in set(actors):
            self._commits[actor].expect(query.name, [p for a, p in zip(actors, share, strict=True) if a == actor])
        waiting = [
            self._appliers[actor].submit(self._shard, actor, partition, batch, grant)
            for actor, partition, grant in zip(actors, share, grants, strict=True)
        ]
        for shard in waiting:
            shard.result()

    def _shard(self, actor: str, partition: int, batch: int, grant: LeaseGrant) -> None:
        name = self._query.name
        self._objects.put(f"{name}/0/{partition}/{batch + 1}.delta", b"")
        self._commits[actor].commit_all(name, [commit_of(self._query, partition, batch + 1, grant.lease.epoch)])

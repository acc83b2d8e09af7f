"""Coordinator services over an object store, and the requests of queries."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from coordinator.ledger.read_views import WantedView
from coordinator.ledger.state_ledger import AcceptedCommits, LeaseGrant
from coordinator.log.cleaner import Cleaner
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.commits import CommitEntry, PartitionCommit
from coordinator.model.identities import ActorLocation, TaskIdentity
from coordinator.model.maintenance import Maintenance
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.placement.lease_plans import stay_else_local
from coordinator.runtime.runtime import MachineClock, Runtime, now_ms
from coordinator.service.coordinator import Coordinator
from coordinator.service.versions import Branching
from coordinator.storage.memory import MemoryObjectStore
from coordinator.storage.protocol import ObjectInfo
from tests.clocks import LaterClock
from tests.unit.ledger_harness import FakeFleetView, actor, entry, task

HERE = ActorLocation("a", "a-1", "node", "host", 1)
CREATED = StateMetadata("s", "query", 1, "update", StateSchema((), (), (), None, None, "update"))
#: A state of several shards.
SHARDS = 4
METADATA = StateMetadata("clicks", "query", SHARDS, "keyed")
GRACE_S = 1.0


class ServiceHarness:
    """A coordinator over an object store, and the requests that queries send to it."""

    def __init__(self, objects: MemoryObjectStore, maintenance: Maintenance | None = None) -> None:
        self.objects = objects
        self.clock = LaterClock()
        runtime = Runtime(clock=self.clock)
        self.coordinator = Coordinator("memory://", objects, maintenance or Maintenance(), "node", runtime=runtime)

    async def lease(
        self,
        run: str,
        batch: int,
        state: str = "s",
        query: str = "query",
        *,
        created: StateMetadata = CREATED,
        shard: int = 0,
        is_temporary: bool = False,
    ) -> Any:
        identity = TaskIdentity(state, query, run, batch, shard, 0, "executor", is_temporary=is_temporary)
        metadata = structs.replace(created, state_name=state, query_id=query)
        return await self.coordinator.attach_and_lease(identity, metadata, HERE)

    async def commit(self, run: str, batch: int, state: str = "s", query: str = "query", **more: Any) -> Any:
        grant = await self.lease(run, batch, state, query, **more)
        version, shard = batch + 1, grant.lease.store_id.partition_id
        commit = structs.replace(
            entry(grant, version, f"attempt-{shard}"), file=f"{state}/0/{shard}/{version}-{ord(run[-1]):x}.delta"
        )
        self.objects.put(commit.file, b"delta")
        (outcome,) = await self.coordinator.commit_partitions(state, [PartitionCommit((commit,))])
        if not isinstance(outcome, AcceptedCommits):
            raise outcome
        return commit

    async def end(self, run: str) -> None:
        await self.coordinator.deactivate_instances(run)

    async def version(self, state: str = "s") -> int:
        view = await self.coordinator.read_view(state, WantedView(is_committed=True), None)
        assert view is not None
        return view.version


def coordinator_over(store: MemoryObjectStore) -> Coordinator:
    return Coordinator("memory://", store, Maintenance(), "node")


def commit_of(grant: LeaseGrant, version: int) -> CommitEntry:
    name = f"attempt-{grant.lease.store_id.partition_id}"
    return structs.replace(entry(grant, version, name), committed_at_ms=now_ms(MachineClock()))


async def lease_all_shards(coordinator: Coordinator, run_id: str = "run-1", batch: int = 0) -> list[LeaseGrant]:
    """Return the leases of the tasks of all shards."""
    return [
        await coordinator.attach_and_lease(task(run_id, batch, shard=shard), METADATA, actor("a"))
        for shard in range(SHARDS)
    ]


# -- coordinators whose requests can be made to hang ----------------------------------------------------------------


class GatedObjectStore(MemoryObjectStore):
    """The objects of a store as one coordinator reaches them: while the gate is shut, one kind of request hangs."""

    def __init__(self, objects: MemoryObjectStore, hangs: str = "") -> None:
        super().__init__()
        self._objects, self._modified_s, self._lock = objects._objects, objects._modified_s, objects._lock
        self._hangs = hangs
        self.gate, self.reached = threading.Event(), threading.Event()
        self.gate.set()
        self.lists = self.deletes = 0

    def _pass(self, request: str) -> None:
        if request == self._hangs and not self.gate.is_set():
            self.reached.set()
            assert self.gate.wait(30)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        self._pass("put_if_absent")
        return super().put_if_absent(path, data)

    def list(self, prefix: str) -> list[ObjectInfo]:
        # Requests for the store's time do not hang.
        self.lists += not prefix.startswith("_probe")
        infos = super().list(prefix)
        self._pass("list")
        return infos

    def delete_all(self, paths: Sequence[str]) -> None:
        self._pass("delete")
        self.deletes += 1
        super().delete_all(paths)


class CoordinatorHarness:
    """A coordinator: a writer of the state's log and a cleaner, as the coordinator actor has them."""

    def __init__(self, objects: MemoryObjectStore, name: str) -> None:
        self.objects, self.name = objects, name
        self.writers: dict[str, LedgerWriter] = {}
        self.cleaner = Cleaner(objects, Maintenance(grace_s=GRACE_S), MachineClock(), self.opened, self.notice_deleted)
        self.branching = Branching(self.opened, MachineClock())

    @property
    def writer(self) -> LedgerWriter:
        """The writer of the ledger of ``s``."""
        return self.writers["s"]

    async def opened(self, state_name: str) -> LedgerWriter:
        """Return the writer of a state's ledger."""
        if state_name not in self.writers:
            writer = LedgerWriter(ManifestLog(self.objects, state_name, self.name))
            await writer.open()
            self.writers[state_name] = writer
        return self.writers[state_name]

    async def notice_deleted(self, state_name: str) -> None:
        writer = self.writers.get(state_name)
        if writer is not None and await writer.is_deleted():
            del self.writers[state_name]

    async def begin(self, run: str, batch: int, state_name: str = "s") -> CommitEntry:
        """Return a commit of a new run that is not accepted yet."""
        task = TaskIdentity(state_name, "query", run, batch, 0, 0, "executor")
        writer = await self.opened(state_name)
        grant = await writer.decide(lambda ledger: ledger.decide_lease(task, HERE, FakeFleetView(), stay_else_local))
        version = batch + 1
        commit = entry(grant, version)
        return structs.replace(
            commit, file=f"{state_name}/0/0/{version}-{ord(run[-1]):x}.delta", committed_at_ms=int(time.time() * 1000)
        )

    async def accept(self, commit: CommitEntry, state_name: str = "s") -> None:
        """Accept a commit, as ``Coordinator.commit_partitions`` does."""
        await (await self.opened(state_name)).decide(lambda ledger: ledger.decide_commits([commit]))

    async def commit(self, run: str, batch: int, state_name: str = "s") -> CommitEntry:
        """Write the delta of a commit of a new run, and accept it."""
        commit = await self.begin(run, batch, state_name)
        self.objects.put(commit.file, b"delta")
        await self.accept(commit, state_name)
        return commit

    async def clean(self, state_name: str = "s") -> list[str]:
        cleaned = await self.cleaner.clean(await self.opened(state_name), state_name, dry_run=False)
        return [file["path"] for file in cleaned["files"]]


async def wait_for_event(reached: threading.Event) -> None:
    assert await asyncio.to_thread(reached.wait, 30)


async def two_coordinators(
    hangs: str = "",
) -> tuple[CoordinatorHarness, CoordinatorHarness, MemoryObjectStore, GatedObjectStore]:
    """Return an old coordinator, whose requests can be made to hang, its successor, and the stores of both."""
    objects = MemoryObjectStore()
    gated = GatedObjectStore(objects, hangs)
    old, new = CoordinatorHarness(gated, "old"), CoordinatorHarness(objects, "new")
    for coordinator in (old, new):
        await coordinator.opened("s")
    return old, new, objects, gated

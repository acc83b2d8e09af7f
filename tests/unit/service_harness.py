"""A coordinator over an object store, and the requests of queries."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Self

from msgspec import structs

from coordinator.ledger.read_views import WantedView
from coordinator.ledger.state_ledger import AcceptedCommits, LeaseGrant
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.model.commits import CommitEntry, PartitionCommit
from coordinator.model.errors import StateStoreError
from coordinator.model.identities import ActorLocation, TaskIdentity
from coordinator.model.maintenance import Maintenance
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.runtime.runtime import Clock, Runtime, now_ms
from coordinator.service.coordinator import Coordinator
from tests.clocks import LaterClock
from tests.memory_store import MemoryObjectStore
from tests.unit.ledger_harness import actor, entry
from tests.unit.observed_objects import ObservedObjectStore

HERE = actor("a")
CREATED = StateMetadata("s", "query", 1, "update", StateSchema((), (), (), None, None, "update"))
#: A state of several shards.
SHARDS = 4
METADATA = StateMetadata("clicks", "query", SHARDS, "keyed")
GRACE_S = 1.0


class QueriedCoordinator(Coordinator):
    """A coordinator, and the requests that the tasks of queries send to it.

    Parameters
    ----------
    created
        Metadata of the state and the query that a request means if it names no others.
    log_options
        Options of the manifest logs: ``checkpoint_interval`` and ``part_records``.
    """

    def __init__(
        self,
        objects: MemoryObjectStore | None = None,
        maintenance: Maintenance | None = None,
        created: StateMetadata = CREATED,
        **log_options: int,
    ) -> None:
        self.objects = MemoryObjectStore() if objects is None else objects
        self.created, self.clock = created, LaterClock()
        runtime = Runtime(clock=self.clock)
        super().__init__(
            "memory://", self.objects, maintenance or Maintenance(), "node", runtime=runtime, **log_options
        )

    def restarted(self) -> Self:
        """Return another coordinator over the same objects."""
        return type(self)(self.objects, self._maintenance, self.created)

    async def opened(self, state: str = "s") -> LedgerWriter:
        """Return the writer of a state's ledger."""
        return await self._writer_of(state)

    async def lease(
        self,
        run: str = "run-1",
        batch: int = 0,
        state: str = "",
        query: str = "",
        *,
        created: StateMetadata | None = None,
        shard: int = 0,
        at: ActorLocation = HERE,
        is_temporary: bool = False,
    ) -> LeaseGrant:
        created = created or self.created
        metadata = structs.replace(created, state_name=state or created.state_name, query_id=query or created.query_id)
        identity = TaskIdentity(
            metadata.state_name, metadata.query_id, run, batch, shard, 0, "executor", is_temporary=is_temporary
        )
        return await self.attach_and_lease(identity, metadata, at)

    async def lease_all(self, run: str = "run-1", batch: int = 0) -> list[LeaseGrant]:
        """Return the leases of the tasks of all shards."""
        return [await self.lease(run, batch, shard=shard) for shard in range(self.created.num_shards)]

    async def begin(self, run: str, batch: int, state: str = "", query: str = "", **more: Any) -> CommitEntry:
        """Return a commit whose delta is written, and which is not accepted yet."""
        commit = commit_of(await self.lease(run, batch, state, query, **more), batch + 1)
        self.objects.put(commit.file, b"delta")
        return commit

    async def outcome(self, *commits: CommitEntry, is_piggybacked: bool = False) -> AcceptedCommits | StateStoreError:
        """Send the commits of a shard's stores, and return what became of them."""
        state = commits[0].file.partition("/")[0]
        (outcome,) = await self.commit_partitions(state, [PartitionCommit(commits, is_piggybacked)])
        return outcome

    async def accept(self, *commits: CommitEntry) -> AcceptedCommits:
        outcome = await self.outcome(*commits)
        if not isinstance(outcome, AcceptedCommits):
            raise outcome
        return outcome

    async def commit(
        self, run: str = "run-1", batch: int = 0, state: str = "", query: str = "", **more: Any
    ) -> CommitEntry:
        """Run a task of one shard."""
        commit = await self.begin(run, batch, state, query, **more)
        await self.accept(commit)
        return commit

    async def version(self, state: str = "s") -> int:
        view = await self.read_view(state, WantedView(is_committed=True), None)
        assert view is not None
        return view.version

    async def cleaned(self, state: str = "s") -> list[str]:
        """Clean a state, and return the files that were deleted."""
        return [file["path"] for file in (await self.clean(state, dry_run=False))["files"]]


def commit_of(grant: LeaseGrant, version: int) -> CommitEntry:
    store_id, run = grant.lease.store_id, grant.lease.run_id
    commit = entry(grant, version, f"attempt-{store_id.partition_id}")
    file = f"{store_id.state_name}/0/{store_id.partition_id}/{version}-{ord(run[-1]):x}.delta"
    return structs.replace(commit, file=file, committed_at_ms=now_ms(Clock()))


# -- coordinators whose requests can be made to hang ----------------------------------------------------------------


class GatedObjectStore(ObservedObjectStore):
    """The objects of a store as one coordinator reaches them: while the gate is shut, one kind of request hangs."""

    def __init__(self, objects: MemoryObjectStore, hangs: str = "") -> None:
        super().__init__(self.pass_gate)
        self._objects, self._modified_s, self._lock = objects._objects, objects._modified_s, objects._lock
        self._hangs = hangs
        self.gate, self.reached = threading.Event(), threading.Event()
        self.gate.set()

    def pass_gate(self, request: str, _path: str = "") -> None:
        if request == self._hangs and not self.gate.is_set():
            self.reached.set()
            assert self.gate.wait(30)

    async def wait_until_it_hangs(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 30)


async def two_coordinators(
    hangs: str = "",
) -> tuple[QueriedCoordinator, QueriedCoordinator, MemoryObjectStore, GatedObjectStore]:
    """Return an old coordinator, whose requests can be made to hang, its successor, and the stores of both."""
    objects = MemoryObjectStore()
    gated = GatedObjectStore(objects, hangs)
    old, new = (QueriedCoordinator(store, Maintenance(grace_s=GRACE_S)) for store in (gated, objects))
    for coordinator in (old, new):
        await coordinator.opened()
    return old, new, objects, gated

"""A coordinator service over an object store, and the requests of queries."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from coordinator.ledger.read_views import WantedView
from coordinator.ledger.state_ledger import AcceptedCommits
from coordinator.model.commits import PartitionCommit
from coordinator.model.identities import ActorLocation, TaskIdentity
from coordinator.model.maintenance import Maintenance
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.runtime.runtime import Runtime
from coordinator.service.coordinator import Coordinator
from coordinator.storage.memory import MemoryObjectStore
from tests.clocks import LaterClock
from tests.unit.ledger_harness import entry

HERE = ActorLocation("a", "a-1", "node", "host", 1)
CREATED = StateMetadata("s", "query", 1, "update", StateSchema((), (), (), None, None, "update"))


class ServiceHarness:
    """A coordinator over an object store, and the requests that queries send to it."""

    def __init__(self, objects: MemoryObjectStore, maintenance: Maintenance | None = None) -> None:
        self.objects = objects
        self.clock = LaterClock()
        runtime = Runtime(clock=self.clock)
        self.coordinator = Coordinator("memory://", objects, maintenance or Maintenance(), "node", runtime=runtime)

    async def lease(self, run: str, batch: int, state: str = "s", query: str = "query") -> Any:
        task = TaskIdentity(state, query, run, batch, 0, 0, "executor")
        metadata = structs.replace(CREATED, state_name=state, query_id=query)
        return await self.coordinator.attach_and_lease(task, metadata, HERE)

    async def commit(self, run: str, batch: int, state: str = "s", query: str = "query") -> Any:
        grant = await self.lease(run, batch, state, query)
        version = batch + 1
        commit = structs.replace(
            entry(grant, version), file=f"{state}/0/0/{version}-{ord(run[-1]):x}.delta", run_id=run
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

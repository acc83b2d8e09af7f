"""Coordinators over one object store, whose requests can be made to hang."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

from msgspec import structs

from coordinator.ledger.state_ledger import Record, StateLedger
from coordinator.log.cleaner import Cleaner
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.commits import CommitEntry
from coordinator.model.identities import ActorLocation, TaskIdentity
from coordinator.model.maintenance import Maintenance
from coordinator.placement.lease_placer import stay_else_local
from coordinator.runtime.runtime import MachineClock
from coordinator.service.versions import Branching
from coordinator.storage.memory import MemoryObjectStore
from coordinator.storage.protocol import ObjectInfo, ObjectStore
from tests.unit.ledger_harness import FakeFleetView, entry

GRACE_S = 1.0
HERE = ActorLocation("a", "a-1", "node", "host", 1)


class GatedObjectStore:
    """The shared objects as a coordinator reaches them: while the gate is shut, one kind of request hangs."""

    tells_writers_apart = True

    def __init__(self, objects: MemoryObjectStore, hangs: str = "") -> None:
        self.uri = objects.uri
        self._objects, self._hangs = objects, hangs
        self.gate, self.reached = threading.Event(), threading.Event()
        self.gate.set()
        self.lists = self.deletes = 0

    def _pass(self, request: str) -> None:
        if request == self._hangs and not self.gate.is_set():
            self.reached.set()
            assert self.gate.wait(30)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        self._pass("put_if_absent")
        return self._objects.put_if_absent(path, data)

    def put(self, path: str, data: bytes) -> None:
        self._objects.put(path, data)

    def get(self, path: str) -> bytes:
        return self._objects.get(path)

    def ensure_durable(self, path: str) -> None:
        self._objects.ensure_durable(path)

    def list_unfinished(self, prefix: str) -> Sequence[ObjectInfo]:
        return self._objects.list_unfinished(prefix)

    def list(self, prefix: str) -> list[ObjectInfo]:
        # Requests for the store's time do not hang.
        self.lists += not prefix.startswith("_probe")
        infos = self._objects.list(prefix)
        self._pass("list")
        return infos

    def delete(self, path: str) -> None:
        self._objects.delete(path)

    def delete_all(self, paths: Sequence[str]) -> None:
        self._pass("delete")
        self.deletes += 1
        self._objects.delete_all(paths)

    def folders(self) -> Sequence[str]:
        return self._objects.folders()


class CoordinatorHarness:
    """A coordinator: a writer of the state's log and a cleaner, as the coordinator actor has them."""

    def __init__(self, objects: ObjectStore, name: str) -> None:
        self.objects, self.name = objects, name
        self.writers: dict[str, LedgerWriter] = {}
        self.writer = self.of("s")
        self.cleaner = Cleaner(objects, Maintenance(grace_s=GRACE_S), MachineClock(), self.opened, self.notice_deleted)
        self.branching = Branching(self.opened, MachineClock())

    def of(self, state_name: str) -> LedgerWriter:
        """Return the writer of a state's ledger."""
        if state_name not in self.writers:
            self.writers[state_name] = LedgerWriter(ManifestLog(self.objects, state_name, self.name))
        return self.writers[state_name]

    async def opened(self, state_name: str) -> LedgerWriter:
        writer = self.of(state_name)
        if writer.ledger is None:
            await writer.open()
        return writer

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

        def decide(ledger: StateLedger) -> tuple[list[Record], None]:
            return ledger.decide_commits([commit])[0], None

        await (await self.opened(state_name)).decide(decide)

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
    await old.writer.open()
    await new.writer.open()
    return old, new, objects, gated

"""Batches of a query of three shards, decided by a ledger."""

from __future__ import annotations

from msgspec import structs

from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.model.identities import TaskIdentity
from tests.unit.ledger_harness import LedgerHarness, actor, entry, task

SHARDS = 3


class LedgerQuery(LedgerHarness):
    """A query of three shards; batch `b` is planned at time ``100 + b`` of its own history."""

    def __init__(self, begins_ms: int = 100) -> None:
        super().__init__()
        self.begins_ms = begins_ms

    def task(self, batch: int, shard: int, run: str = "run-1", begins_ms: int | None = None) -> TaskIdentity:
        begin_ms = self.begins_ms if begins_ms is None else begins_ms
        previous_ms = begin_ms + batch - 1 if batch else None
        return structs.replace(task(run, batch, shard), batch_time_ms=begin_ms + batch, former_time_ms=previous_ms)

    def begin(self, identity: TaskIdentity) -> None:
        self.ledger.check_whole(identity, ShardLayout(SHARDS))

    def run(self, batch: int, shards: list[int], run: str = "run-1") -> None:
        for shard in shards:
            identity = self.task(batch, shard, run)
            self.begin(identity)
            commit = entry(self.lease(identity, actor("a")), batch + 1)
            self.commit(structs.replace(commit, batch_time_ms=identity.batch_time_ms))

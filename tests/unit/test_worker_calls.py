"""Sessions that a worker opens through a store actor: those of continuous queries are of that process, or of none."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from msgspec import structs

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.errors import FencedError
from coordinator.model.identities import ActorLocation, StateStoreId, TaskIdentity
from coordinator.model.leases import Lease
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.watermarks import Watermarks
from store_actors.client.fleet_client import FleetClient
from store_actors.connections import worker_calls
from store_actors.connections.session_calls import answered, encoded_call
from store_actors.connections.worker_calls import WorkerCalls
from tests.unit.aggregation_fleet import SCHEMA
from tests.unit.keyed_fleet import COUNTS

HERE, FORMER = (ActorLocation("store", instance, "node", "host", 1) for instance in ("here", "former"))
EPOCH = TaskIdentity("s", "query", "run", 3, 0, 0, "executor", is_epoch=True)
METADATA = StateMetadata("s", "", 1, "update")


class Session:
    """A session that is open in some store actor."""

    session_id = "session"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, method: str, *arguments: Any) -> None:
        self.calls.append(method)


class Calls:
    """The calls of a worker in a store actor whose leases are first of one process, and then of another."""

    def __init__(self, *locations: ActorLocation) -> None:
        self.session, self.opened = Session(), 0
        self._locations = list(locations)
        self.leased: list[tuple[Sequence[TaskIdentity], StateMetadata]] = []
        self.calls = WorkerCalls(
            cast("FleetClient", self), self._lease, lambda grant: grant.lease.location == HERE, lambda error: None
        )

    def _grant(self) -> LeaseGrant:
        location = self._locations.pop(0)
        return LeaseGrant(lease=Lease(StateStoreId("fleet/s", 0, 0), "s", 1, location), base_version=3)

    def _lease(self, tasks: Sequence[TaskIdentity], metadata: StateMetadata) -> Sequence[LeaseGrant]:
        self.leased.append((tasks, metadata))
        return [self._grant()]

    def open_session(self, task: TaskIdentity, metadata: StateMetadata, stores: Any) -> tuple[Session, LeaseGrant]:
        self.opened += 1
        return self.session, self._grant()

    def open(self, task: TaskIdentity) -> tuple[str, LeaseGrant]:
        return self.calls.open_session(task, METADATA.to_json(), (COUNTS,))


def test_the_shard_of_a_run_is_leased_by_the_process_itself_before_its_session_is_opened() -> None:
    """The process tells a coordinator that takes it for a former one of its name that it is there; other clients do not."""
    calls = Calls(HERE, HERE)
    assert calls.open(EPOCH)[0] == "session"
    assert calls.leased == [([EPOCH], structs.replace(METADATA, query_id="query"))]


def test_no_session_is_opened_of_a_shard_that_is_elsewhere() -> None:
    calls = Calls(FORMER)
    with pytest.raises(FencedError, match="is at another store actor than was planned"):
        calls.open(EPOCH)
    assert calls.opened == 0


def test_a_session_of_a_shard_that_has_moved_meanwhile_is_ended_with_its_worker() -> None:
    calls = Calls(HERE, FORMER)
    with pytest.raises(FencedError, match="is at another store actor than was planned"):
        calls.open(EPOCH)
    calls.calls.end()
    assert calls.session.calls == ["end_session"]


def test_a_session_of_a_batch_may_be_anywhere() -> None:
    calls = Calls(FORMER)
    assert calls.open(structs.replace(EPOCH, is_epoch=False))[0] == "session"
    assert calls.leased == []


def test_an_import_is_of_the_pieces_that_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_calls, "RayActors", lambda: SimpleNamespace(put=pa.Table.to_pylist))
    imported: list[tuple[Any, ...]] = []
    client = SimpleNamespace(import_rows=lambda *arguments: imported.append(arguments))
    calls = WorkerCalls(cast("FleetClient", client), lambda *_: [], lambda grant: True, lambda error: None)
    wanted = (EPOCH, METADATA.to_json(), SCHEMA, Watermarks(1, 2))
    for value in (1, 2):
        answered(calls, encoded_call("import_piece", (pa.table({"v": [value]}),)))
    for _ in range(2):
        answered(calls, encoded_call("import_rows", wanted))
    first = (EPOCH, METADATA, SCHEMA, [[{"v": 1}], [{"v": 2}]], Watermarks(1, 2))
    assert imported == [first, (*first[:3], [], first[4])]

"""What a Python worker of Spark's asks of the store actor of its connection: sessions on the keyed stores of its shards, and imports.

A worker has no other way to the fleet. The store actor gets the leases; the session is in the store actor that has the shard.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyarrow as pa
from msgspec import structs

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.errors import OperationOutOfOrderError, StateStoreError
from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.watermarks import Watermarks
from coordinator.service.calls import RayActors
from store_actors.client.fleet_client import FleetClient
from store_actors.client.leased_calls import SessionCalls
from store_actors.epochs.runs import Lease, check_is_here
from store_actors.messages.requests import BatchFacts, StoreSpec, Write


class WorkerCalls:
    """The calls of one worker, by the names and arguments of :mod:`store_actors.connections.session_calls`.

    Parameters
    ----------
    lease
        Gives the leases of this process; it tells a coordinator that takes it for a former process of its name that it is there.
    is_here
        Whether a lease is of this process.
    tell_failed
        Tells the worker why an epoch was not committed.
    """

    def __init__(
        self,
        client: FleetClient,
        lease: Lease,
        is_here: Callable[[LeaseGrant], bool],
        tell_failed: Callable[[BaseException], None],
    ) -> None:
        self._client, self._lease, self._is_here, self._tell_failed = client, lease, is_here, tell_failed
        #: By their ids.
        self._sessions: dict[str, SessionCalls] = {}
        #: Rows of an import, which Ray keeps until they are committed, if need be on disk.
        self._pieces: list[Any] = []

    def open_session(
        self, task: TaskIdentity, metadata: dict[str, Any], stores: tuple[StoreSpec, ...]
    ) -> tuple[str, LeaseGrant]:
        """Begin a version of a shard; return the session's id, and the lease, which has the base version."""
        of_state = StateMetadata.from_json(metadata)
        if task.is_epoch:
            (grant,) = self._lease([task], structs.replace(of_state, query_id=task.query_id))
            check_is_here(task, grant, self._is_here)
        session, grant = self._client.open_session(task, of_state, stores)
        self._sessions[session.session_id] = session
        if task.is_epoch:
            check_is_here(task, grant, self._is_here)
        return session.session_id, grant

    def filled_stores(self, task: TaskIdentity, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the stores of a shard that may have rows in the version that the task's batch reads."""
        plans = self._client.load_plans(task, names)
        return tuple(name for name in names if plans[name].may_have_rows())

    def session_call(
        self, session_id: str, store: str, method: str, arguments: tuple[Any, ...], writes: tuple[Write, ...]
    ) -> Any:
        return self._open(session_id)("session_call", store, method, arguments, writes)

    def next_batch(self, session_id: str, scan_id: str) -> Any:
        return self._open(session_id)("next_batch", scan_id)

    def commit_session(self, session_id: str, facts: BatchFacts | int | None, writes: tuple[Write, ...]) -> int:
        version = int(self._open(session_id)("commit_session", facts, writes))
        del self._sessions[session_id]
        return version

    def seal_session(self, session_id: str, facts: BatchFacts, writes: tuple[Write, ...]) -> int:
        return int(self._open(session_id)("seal_session", facts, writes, self._tell_failed))

    def session_committed(self, session_id: str) -> bool:
        return bool(self._open(session_id)("session_committed"))

    def end_session(self, session_id: str) -> None:
        self._open(session_id)("end_session")
        del self._sessions[session_id]

    def import_piece(self, rows: pa.Table) -> None:
        self._pieces.append(RayActors().put(rows))

    def import_rows(
        self, task: TaskIdentity, metadata: dict[str, Any], schema: StateSchema, watermarks: Watermarks
    ) -> None:
        """Make the rows that have come the first version of a shard."""
        pieces, self._pieces = self._pieces, []
        self._client.import_rows(task, StateMetadata.from_json(metadata), schema, pieces, watermarks)

    def _open(self, session_id: str) -> SessionCalls:
        if session_id not in self._sessions:
            raise OperationOutOfOrderError(
                "the handle has been committed or aborted; nothing was changed; open a new one"
            )
        return self._sessions[session_id]

    def end(self) -> None:
        """End what is open: a worker that was killed has not done so."""
        for session in self._sessions.values():
            # It may be committed, or gone with its store actor.
            with suppress(StateStoreError):
                session("end_session")

"""The keyed stores of a shard as a Python worker of Spark's has them, over its connection to a store actor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.watermarks import Watermarks
from store_actors.client.state_store import StateStore, default_store
from store_actors.messages.requests import StoreSpec


class WorkerClient:
    """Opens the stores of a worker's shards.

    Parameters
    ----------
    call
        Calls a method of the store actor, by its name and arguments (:mod:`store_actors.connections.session_calls`).
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def open_granted(
        self, task: TaskIdentity, metadata: StateMetadata, stores: tuple[StoreSpec, ...]
    ) -> tuple[StateStore, LeaseGrant]:
        """Return a handle that makes the next version of a shard, and the lease, whose watermarks are for operators of event time.

        Raises errors as :meth:`~store_actors.client.fleet_client.FleetClient.open_update`, and a StoreUnavailableError if the store
        actor was lost.
        """
        session_id, grant = self._call("open_session", task, metadata.to_json(), stores)
        store_id = default_store(grant.lease.store_id, stores)
        return StateStore(partial(self._ask, session_id), store_id, grant.base_version), grant

    def import_rows(
        self,
        task: TaskIdentity,
        metadata: StateMetadata,
        schema: StateSchema,
        pieces: Iterable[pa.Table],
        watermarks: Watermarks,
    ) -> None:
        """Make rows of state, in pieces, the first version of a shard; errors as above."""
        for piece in pieces:
            self._call("import_piece", piece)
        self._call("import_rows", task, metadata.to_json(), schema, watermarks)

    def _ask(self, session_id: str, method: str, *arguments: Any) -> Any:
        return self._call(method, session_id, *arguments)

    def filled_stores(self, task: TaskIdentity, names: Sequence[str]) -> Sequence[str]:
        """Return those of a shard's stores that may have rows in the version that the task's batch reads; errors as above."""
        filled: Sequence[str] = self._call("filled_stores", task, tuple(names))
        return filled

"""A user's program in a continuous query: one shard's, called for pieces of rows as they come, for as long as the run.

The store actor of the shard sends pieces, and the ends of epochs (:mod:`store_actors.connections.function_stream`). To the program each
of them is a batch: timers fire after any. A run has one session on the keyed stores, under the lease of its first epoch. At the end of
each epoch it seals a version, which is stored and committed while the rows of the next one are taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import partial
from typing import Any

import pyarrow as pa
from msgspec import structs

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.errors import StateStoreError
from coordinator.model.watermarks import Watermarks
from spark_jobs.functions.user_program import OpenProgram, UserBatch, UserTask
from spark_jobs.worker.process import fleet_client, task_identity
from store_actors.actor.fleet_clients import fleet_client_of
from store_actors.client.leased_calls import LocalActors
from store_actors.client.operator_task import BatchHeader, EventTimes
from store_actors.client.state_store import StateStore
from store_actors.connections.function_stream import PIECE, FunctionConnection
from store_actors.engine.columns import in_schema
from store_actors.messages.requests import BatchFacts


def serve(task: UserTask, header: BatchHeader, where: dict[str, Any]) -> None:
    """Call the program until the run ends.

    Parameters
    ----------
    where
        Arguments of :class:`~store_actors.connections.function_stream.FunctionConnection`.

    Raises
    ------
    StateStoreError
        The run cannot go on; its tasks are told.
    """
    with closing(FunctionConnection(**where)) as connection:
        try:
            # For leases. Calls of the store actor of the shard take the connection.
            fleet_client(task.address)
            name = connection.call("location").actor_name
            client = fleet_client_of(task.address, LocalActors(name, _StoreActor(connection), _Calls()))
            identity = structs.replace(task_identity(task.metadata, header), is_epoch=True)
            with task.program.opened(client, identity, task.schema) as program:
                store, grant = client.open_granted(identity, task.metadata, program.stores)
                _EpochProgram(task, header.shard, program, store, grant).serve(connection)
        except Exception as error:
            connection.fail(error)
            raise


class _StoreActor:
    """The methods of the store actor at the other end of a connection."""

    def __init__(self, connection: FunctionConnection) -> None:
        self._connection = connection

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._connection.call, method)


class _Calls:
    """Makes calls at once; see :class:`~coordinator.runtime.runtime.Pool`."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised where the result is taken
            future.set_exception(error)
        return future


class _EpochProgram:
    """A program, and its session on the state."""

    def __init__(self, task: UserTask, shard: int, program: OpenProgram, store: StateStore, grant: LeaseGrant) -> None:
        self._task, self._shard, self._program = task, shard, program
        self._raw = task.schema.raw_schema()
        self._store = store
        self._watermarks = grant.watermarks
        self._base_version = grant.base_version
        self._rows = self._late = 0

    def serve(self, connection: FunctionConnection) -> None:
        """Answer frames until there are no more; the open epoch is dropped then."""
        try:
            while (frame := connection.next()) is not None:
                if frame.kind == PIECE:
                    connection.answer(frame, self._run(frame.rows, self._watermarks))
                else:
                    after = self._watermarks.reached(frame.watermark_ms)
                    after = structs.replace(after, output_ms=max(after.output_ms, after.input_ms))
                    connection.answer(frame, self._run(self._raw.empty_table(), after))
                    self._store.seal(BatchFacts(after, self._rows, self._late, self._task.due_per_ms))
                    self._watermarks, self._rows, self._late = after, 0, 0
        finally:
            # Where the session or its store actor is gone, so are its writes.
            with suppress(StateStoreError):
                self._store.abort()

    def _run(self, rows: pa.Table, after: Watermarks) -> pa.Table:
        """Return what the program emits for rows, and for what is due by the watermarks after them."""
        rows = pa.Table.from_batches([in_schema(self._raw, batch) for batch in rows.to_batches()], self._raw)
        on_time = self._task.on_time(rows, self._watermarks.input_ms)
        times = EventTimes(self._watermarks.input_ms, after)
        batch = UserBatch(on_time, times, round(1000 * time.time()), self._base_version, self._shard)
        emitted = self._program.run(self._store, batch)
        self._rows += rows.num_rows
        self._late += rows.num_rows - on_time.num_rows
        # An initial state is taken once.
        self._base_version = max(1, self._base_version)
        return pa.concat_tables(emitted) if emitted else pa.table({})

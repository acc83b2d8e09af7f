"""A user's program in a continuous query: one shard's, called for pieces of rows as they come, for as long as the run.

The store actor of the shard sends pieces, and the ends of epochs (:mod:`store_actors.connections.function_stream`). To the program each
of them is a batch: timers fire after any. A run has one session on the keyed stores, under the lease of its first epoch. At the end of
each epoch it seals a version, which is stored and committed while the rows of the next one are taken.
"""

from __future__ import annotations

import time
from contextlib import closing, suppress

import pyarrow as pa
from msgspec import structs

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.errors import StateStoreError
from coordinator.model.watermarks import Watermarks
from spark_jobs.functions.user_program import OpenProgram, UserBatch, UserTask
from spark_jobs.worker.process import task_identity
from store_actors.client.operator_task import BatchHeader, EventTimes
from store_actors.client.state_store import StateStore
from store_actors.client.worker_client import WorkerClient
from store_actors.connections.function_stream import PIECE, FunctionConnection
from store_actors.engine.columns import in_schema
from store_actors.messages.requests import BatchFacts


def serve(task: UserTask, header: BatchHeader) -> None:
    """Call the program until the run ends.

    Raises
    ------
    StateStoreError
        The run cannot go on; its tasks are told.
    """
    assert header.store_actor is not None, "Spark's task says where it is"
    assert header.run is not None, "it is one of a continuous query"
    with closing(FunctionConnection(**header.store_actor, request=header.run)) as connection:
        try:
            client, identity = WorkerClient(connection.call), task_identity(task.metadata, header)
            identity = structs.replace(identity, is_epoch=True)
            with task.program.opened(client, identity, task.schema) as program:
                store, grant = client.open_granted(identity, task.metadata, program.stores)
                _EpochProgram(task, header.shard, program, store, grant).serve(connection)
        except Exception as error:
            connection.fail(error)
            raise


class _EpochProgram:
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

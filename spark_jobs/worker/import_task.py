"""The import of state in Spark's tasks: the rows of a shard go to that shard, as its first version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs
from pyspark import TaskContext

from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import ROW_COLUMN, StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.watermarks import Watermarks
from spark_jobs.worker.process import executor_name, nearest, worker_client
from store_actors.engine.columns import as_type, of_words, packed
from store_actors.messages.requests import BatchFacts, StoreSpec

#: The shard of a row, and whether the row is a row of state. A row that is not only marks that the shard exists.
SHARD_COLUMN = "__shard"
PRESENT_COLUMN = "__present"
#: Number of the store that a row belongs to, for operators with several; its columns are in :func:`row_column`.
STORE_COLUMN = "__store"
#: The report of a task: a shard, and the number of rows that this attempt had.
IMPORTED_SCHEMA = pa.schema([pa.field("shard", pa.int32()), pa.field("rows", pa.int64())])
#: Bytes of rows that a task gathers before it sends them.
_PIECE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class ImportTask:
    """A ``mapInArrow`` function from the rows of a shard to :data:`IMPORTED_SCHEMA`, once the rows are its first version."""

    schema: StateSchema
    metadata: StateMetadata
    #: Where rows may be sent to; each store actor takes rows of all shards.
    store_actors: Sequence[Mapping[str, Any]]
    #: The task of shard 0.
    task: TaskIdentity
    watermarks: Watermarks

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for task, rows in _of_shard(batches, self.task):
            numbering = _Numbering(self.schema)
            with worker_client(nearest(self.store_actors, task.partition_id)) as client:
                pieces = in_pieces(numbering.numbered(rows))
                client.import_rows(task, self.metadata, self.schema, pieces, self.watermarks)
            yield _report(task, numbering.rows)


@dataclass(frozen=True, slots=True)
class StoresImportTask:
    """The same for an operator with several keyed stores. A row has the number of its store, and its columns in a struct."""

    #: The stores; the first is the one that has rows which fall due.
    stores: tuple[StoreSpec, ...]
    metadata: StateMetadata
    store_actors: Sequence[Mapping[str, Any]]
    task: TaskIdentity
    watermarks: Watermarks
    due_per_ms: int | None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for task, rows in _of_shard(batches, self.task):
            count = 0
            with (
                worker_client(nearest(self.store_actors, task.partition_id)) as client,
                client.open_granted(task, self.metadata, self.stores)[0] as handle,
            ):
                for piece in in_pieces(rows):
                    for number, spec in enumerate(self.stores):
                        of_store = piece.filter(pc.equal(piece.column(STORE_COLUMN), number)).combine_chunks()
                        for batch in of_store.to_batches():
                            columns = pa.RecordBatch.from_struct_array(batch.column(row_column(number)))
                            handle.store(spec.name).put(as_state(columns, StateSchema.keyed(spec.keys, spec.values), 0))
                        count += of_store.num_rows
                handle.commit(BatchFacts(self.watermarks, rows_in=0, due_per_ms=self.due_per_ms))
            yield _report(task, count)


def row_column(store: int) -> str:
    """Return the name of the column with the rows of a store, by its number."""
    return f"__row{store}"


def _of_shard(
    batches: Iterable[pa.RecordBatch], first_task: TaskIdentity
) -> Iterator[tuple[TaskIdentity, Iterator[pa.RecordBatch]]]:
    """Yield the task and the rows of the shard whose rows these are, unless there is nothing of any shard."""
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    if first is None:
        return
    context = TaskContext.get()
    assert context is not None, "Spark runs it"
    shard = first.column(SHARD_COLUMN)[0].as_py()
    task = structs.replace(first_task, partition_id=shard, attempt=context.taskAttemptId(), executor=executor_name())
    yield task, (batch.filter(batch.column(PRESENT_COLUMN)) for batch in chain([first], filled))


def _report(task: TaskIdentity, rows: int) -> pa.RecordBatch:
    return pa.record_batch([[task.partition_id], [rows]], schema=IMPORTED_SCHEMA)


@dataclass(slots=True)
class _Numbering:
    """One numbering for all rows of a shard."""

    schema: StateSchema
    rows: int = 0

    def numbered(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield as_state(batch, self.schema, self.rows)
            self.rows += batch.num_rows


def in_pieces(batches: Iterable[pa.RecordBatch], least_bytes: int = _PIECE_BYTES) -> Iterator[pa.Table]:
    """Yield the rows in pieces that have at least `least_bytes`, but for the last."""
    pending: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        pending.append(batch)
        size += batch.nbytes
        if size >= least_bytes:
            yield pa.Table.from_batches(pending)
            pending, size = [], 0
    if pending:
        yield pa.Table.from_batches(pending)


def as_state(batch: pa.RecordBatch, schema: StateSchema, first_number: int) -> pa.RecordBatch:
    """Return rows as a shard stores them: in ``row_schema``, with numbers if a key can have many rows."""
    row_schema = schema.row_schema()
    columns = []
    for field in row_schema:
        if field.name == ROW_COLUMN:
            columns.append(pa.array(np.arange(first_number, first_number + batch.num_rows)))
        elif pa.types.is_binary(field.type) and pa.types.is_nested(batch.column(field.name).type):
            # A nested value of a function's state.
            columns.append(packed(batch.column(field.name)))
        elif pa.types.is_fixed_size_binary(field.type) and pa.types.is_list(batch.column(field.name).type):
            # 64-bit words that came as lists of integers, all of one length.
            words = batch.column(field.name).flatten().to_numpy(zero_copy_only=False).astype("<i8")
            columns.append(of_words(field.type, words))
        else:
            columns.append(as_type(field.type, batch.column(field.name)))
    return pa.RecordBatch.from_arrays(columns, schema=row_schema)

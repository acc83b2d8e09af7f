"""The columnar exchange between a query's map tasks and its shards.

Spark shuffles rows one by one. A map task here partitions its Arrow batches itself and gives Spark's shuffle a few rows
that each hold a *chunk*, an Arrow record batch of many rows for one shard. It stays Spark's own shuffle, with its retries and
its barrier; only the rows in it are larger, and the JVM looks at no value between the source and the shard.

Where groups repeat within a task's block of rows, the block is partially aggregated first. Spark's driver sends each task the watermark
in the first row of its partition, a :class:`~spark_jobs.worker.batch.BatchHeader`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.schema import OperatorKind, StateSchema
from coordinator.runtime.runtime import random_seed
from spark_jobs.worker.batch import BatchHeader
from spark_jobs.worker.daemon import settle_process
from spark_jobs.worker.routing import marker_routes
from store_actors.engine import pieces
from store_actors.messages import ShardInput

if TYPE_CHECKING:
    from store_actors.engine.table import GroupTable

__all__ = [
    "END",
    "EXCHANGE_SCHEMA",
    "HASH_COLUMN",
    "HEADER",
    "ROUTE_COLUMN",
    "ExchangeTask",
    "Received",
    "as_type",
    "unpack",
    "unpack_shards",
]

#: The column that the map side reads besides the keys and inputs: Spark's ``hash(keys)``.
HASH_COLUMN = "__hash"

#: Source of the row that has a :class:`~spark_jobs.worker.batch.BatchHeader` for its chunk.
HEADER = -3
#: Source of the row after the last one of a shard.
END = -4

ROUTE_COLUMN = "__route"
#: The rows that are shuffled: the route, and a chunk (an IPC record batch, its number of input rows, the index of its schema in
#: ``input_schemas``), a header or an end.
EXCHANGE_SCHEMA = pa.schema(
    [
        pa.field(ROUTE_COLUMN, pa.int32(), nullable=False),
        pa.field("rows_read", pa.int64(), nullable=False),
        pa.field("input", pa.int8(), nullable=False),
        pa.field("source", pa.int16(), nullable=False),
        pa.field("chunk", pa.binary()),
    ]
)

#: Rows and bytes that a map task gathers before it partitions them: enough to find repeated groups, little enough to keep in memory.
_BLOCK_ROWS = 1 << 18
_BLOCK_BYTES = 32 << 20
#: Aim of a chunk's size. Spark hands a task up to ``maxRecordsPerBatch`` shuffled rows at once, so chunks must stay small.
_CHUNK_BYTES = 32 << 10
#: Blocks of fewer rows are small enough to look at every row's group.
_SAMPLE_FROM = 1 << 14
#: Index of partially aggregated rows in an aggregation's ``input_schemas``.
_PARTIAL = 1
#: A block is partially aggregated if it has at most this many groups a row.
_WORTHWHILE = 0.5


@cache
def _table_class() -> type[GroupTable]:
    # The engine's compiled code is loaded once, by a worker that combines; the reduce side never needs it.
    from store_actors.engine.table import GroupTable

    settle_process()
    return GroupTable


@cache
def _hash_seed() -> int:
    """Return the seed under which this worker's keys are hashed."""
    return random_seed()


@dataclass(frozen=True, slots=True)
class ExchangeTask:
    """The map side, a ``mapInArrow`` function from rows with ``__hash`` to :data:`EXCHANGE_SCHEMA`.

    If a batch has another number of shards than the query was built with, the name of the column of hashes has the number
    (``ExchangeStrategy.java``): ``__hash/8``.

    Parameters
    ----------
    schema
        The operator's schema.
    num_shards
        Number of its shards when the query was built.
    input
        Index of the rows' schema in ``schema.input_schemas()``.
    state
        Name of the operator's state. It makes the exchanges of two operators differ: Spark would plan a single exchange for equal
        ones, and know only one of the operators.
    """

    schema: StateSchema
    num_shards: int
    input: int = 0
    state: str = ""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        num_shards = self.num_shards
        for block in _blocks(batches):
            hashed = next(name for name in block.schema.names if name.startswith(HASH_COLUMN))
            num_shards = int(hashed.partition("/")[2] or num_shards)
            yield self._exchange(block, hashed, num_shards)

    def _exchange(self, block: pa.RecordBatch, hashed: str, num_shards: int) -> pa.RecordBatch:
        hashes = block.column(hashed).to_numpy()
        partial = self._combines(hashes)
        input_schema = self.schema.input_schemas()[self.input]
        rows = block.select(input_schema.names)
        if num_shards == 1:
            bounds = np.array([0, len(hashes)])
        else:
            shards = np.mod(hashes, np.int32(num_shards)).astype(np.uint16)
            rows = rows.take(pa.array(np.argsort(shards, kind="stable")))
            bounds = np.concatenate([[0], np.cumsum(np.bincount(shards, minlength=num_shards))])
        rows_read = np.diff(bounds)
        if partial:
            rows, bounds = self._combine(rows, bounds)
        else:
            rows = pa.RecordBatch.from_arrays(
                [as_type(field.type, column) for column, field in zip(rows.columns, input_schema, strict=True)],
                schema=input_schema,
            )
        return self._pack(rows, bounds, rows_read, _PARTIAL if partial else self.input)

    def _combines(self, hashes: npt.NDArray[np.int32]) -> bool:
        """Return whether a block is partially aggregated."""
        if self.schema.operator is not OperatorKind.AGGREGATE:
            return False
        if not self.schema.keys or self.schema.expiry_key is not None:
            # Spark counts late rows after its partial aggregation, and so do we.
            return True
        # All rows of a key share its hash, so a sample by hash estimates the groups of the whole block without bias.
        sample = hashes if len(hashes) < _SAMPLE_FROM else hashes[(hashes >> 20) & 31 == 0]
        return len(np.unique(sample)) <= _WORTHWHILE * len(sample)

    def _combine(
        self, rows: pa.RecordBatch, bounds: npt.NDArray[np.int64]
    ) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
        """Return a row for each group, in the order of shards as before."""
        table = _table_class()(self.schema, _hash_seed(), capacity=1 << 12)
        encoded = table.encode(rows)
        groups = [0]
        for begin, end in pairwise(bounds):
            if end > begin:
                table.accumulate(encoded.take(slice(begin, end)), 1)
            groups.append(len(table))
        # A table that nothing was removed from has its groups in the order in which they came.
        combined = table.decode(table.rows[: len(table)]).combine_chunks().to_batches()
        return combined[0], np.array(groups)

    def _pack(
        self, rows: pa.RecordBatch, bounds: npt.NDArray[np.int64], rows_read: npt.NDArray[np.int64], kind: int
    ) -> pa.RecordBatch:
        per_chunk = max(1, _CHUNK_BYTES * rows.num_rows // max(1, rows.nbytes))
        routes = marker_routes(len(rows_read))
        sink = pa.BufferOutputStream()
        ends, chunk_routes, counts = [0], [], []
        for shard in np.flatnonzero(np.diff(bounds)):
            begin, end = int(bounds[shard]), int(bounds[shard + 1])
            for start in range(begin, end, per_chunk):
                sink.write(rows.slice(start, min(per_chunk, end - start)).serialize())
                ends.append(sink.tell())
                chunk_routes.append(routes[shard])
                # The first chunk of a shard has the number of input rows of all its chunks.
                counts.append(rows_read[shard] if start == begin else 0)
        size = len(counts)
        chunks = pa.Array.from_buffers(
            pa.binary(), size, [None, pa.py_buffer(np.array(ends, np.int32)), sink.getvalue()]
        )
        columns = [
            pa.array(chunk_routes, pa.int32()),
            pa.array(counts, pa.int64()),
            pa.array(np.full(size, kind, np.int8)),
            pa.array(np.zeros(size, np.int16)),
            chunks,
        ]
        return pa.record_batch(columns, schema=EXCHANGE_SCHEMA)


def as_type(data_type: pa.DataType, column: pa.Array) -> pa.Array:
    """Return a column in a type that holds all its values."""
    # Arrow takes even a cast to the same type for a promise that fields of a struct are never null. Below a null struct they are null.
    return column if column.type == data_type else column.cast(data_type)


def _blocks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows in larger batches."""
    pending: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if batch.num_rows:
            pending.append(batch)
            rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= _BLOCK_ROWS or size >= _BLOCK_BYTES:
            yield pa.concat_batches(pending)
            pending, rows, size = [], 0, 0
    if pending:
        yield pa.concat_batches(pending)


@dataclass(frozen=True, slots=True)
class Received:
    """The part of a micro-batch that one shard received.

    Attributes
    ----------
    rows
        The shard's rows.
    header
        The batch; None outside a streaming query.
    """

    rows: ShardInput
    header: BatchHeader | None


def unpack(batches: Iterable[pa.RecordBatch], schema: StateSchema, piece_bytes: int = pieces.PIECE_BYTES) -> Received:
    """Return the part of a micro-batch that the map tasks sent to one shard.

    Parameters
    ----------
    batches
        The rows that a partition of the exchange received, in :data:`EXCHANGE_SCHEMA` without the route. In a streaming query the first
        is a header, and the last an end.
    schema
        The operator's schema.
    piece_bytes
        Bytes of a piece of the result: Arrow counts the strings of lists in 32 bits, so larger tables have several pieces.

    Raises
    ------
    EOFError
        The rows of a batch end in the middle: the task was killed, or could not fetch the next ones. What Spark sends a worker ends
        alike then.
    """
    schemas = schema.input_schemas()
    chunks: list[list[pa.RecordBatch]] = [[] for _ in schemas]
    rows_read = 0
    header: BatchHeader | None = None
    is_whole = False
    for batch in batches:
        rows_read += pc.sum(batch.column("rows_read")).as_py() or 0
        facts = (batch.column(name).to_pylist() for name in ("input", "source"))
        for number, source, chunk in zip(*facts, batch.column("chunk"), strict=True):
            if source == HEADER:
                header = BatchHeader.of_json(chunk.as_py())
            elif source == END:
                is_whole = True
            else:
                chunks[number].append(pa.ipc.read_record_batch(chunk.as_buffer(), schemas[number]))
    if header is not None and not is_whole:
        raise EOFError(
            f"the rows of shard {header.shard} ended in the middle of batch {header.batch_id}; nothing of them was committed, and "
            "Spark's next attempt of the task sends all of them"
        )
    # Few pieces each, so that the store actor is sent a few large buffers.
    tables = tuple(
        pa.Table.from_batches(pieces.batches(pa.Table.from_batches(of_input, kind), piece_bytes), kind)
        for of_input, kind in zip(chunks, schemas, strict=True)
    )
    return Received(ShardInput(tables, rows_read), header)


def unpack_shards(batches: Iterable[pa.RecordBatch], schema: StateSchema) -> Iterator[Received]:
    """Yield the part of a micro-batch of each shard of a task, one after the other.

    Parameters
    ----------
    batches
        The rows that a task of the exchange received: for each of its shards a header, the rows, and an end.
    """
    of_shard: list[pa.RecordBatch] = []
    for batch in batches:
        begun = 0
        for header in np.flatnonzero(batch.column("source").to_numpy() == HEADER).tolist():
            of_shard.append(batch.slice(begun, header - begun))
            if any(len(piece) for piece in of_shard):
                yield unpack(of_shard, schema)
            of_shard, begun = [], header
        of_shard.append(batch.slice(begun))
    yield unpack(of_shard, schema)

"""The reduce side of operators in Spark's tasks: the rows of each shard go to that shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from spark_jobs.worker.batch import BatchHeader
from spark_jobs.worker.exchange import Received, as_type, unpack_shards
from spark_jobs.worker.fleet_client import FleetAddress, FleetClient, executor_name, fleet_client
from spark_jobs.worker.store_calls import ShardWork
from store_actors.hand_over import HandedOver
from store_actors.local_calls import LocalActors
from store_actors.messages import ShardInput

__all__ = ["StateTask", "in_output_mode", "task_identity"]

#: Columns of rows that a task hands over: the number of a row's input, where there are several, and the number of rows that a
#: partially aggregated one stands for.
_INPUT = "__input"
_ROWS = "__rows"


@dataclass(frozen=True, slots=True)
class StateTask:
    """The reduce side: sends the rows of a task's shards to their store actors, and yields the rows that they emit."""

    schema: StateSchema
    metadata: StateMetadata
    address: FleetAddress

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        works = map(self._received, unpack_shards(batches, self.schema))
        # All of a task's shards are of one batch.
        if (first := next(works, None)) is not None:
            yield from self._emitted(fleet_client(self.address), first, works)

    def handed_over(self, work: HandedOver, actors: LocalActors) -> Iterator[pa.RecordBatch]:
        """Do the same in a store actor, to which a task of Spark's handed its rows over.

        Parameters
        ----------
        actors
            The fleet's actors, as the store actor's process sees them.
        """
        works = self._works(work)
        return self._emitted(_store_actors_client(self.address, actors), next(works), works)

    def _works(self, work: HandedOver) -> Iterator[ShardWork]:
        inputs: list[_InputColumns] = []
        for shard, rows in zip(work.shards, work.rows, strict=True):
            # The rows of all shards have the same columns.
            inputs = inputs or [
                _InputColumns.of(number, schema, rows) for number, schema in enumerate(self.schema.input_schemas())
            ]
            header = BatchHeader(**work.batch, shard=shard)
            task = _task_of(self.metadata, header, work.attempt, work.executor)
            tables = tuple(columns.table(rows) for columns in inputs)
            yield _work(task, ShardInput(tables, _rows_read(rows)), header)

    def _received(self, received: Received) -> ShardWork:
        task = task_identity(self.metadata, received.header)
        assert received.header is not None, "the task's identity was made of it"
        return _work(task, received.rows, received.header)

    def _emitted(self, client: FleetClient, first: ShardWork, others: Iterable[ShardWork]) -> Iterator[pa.RecordBatch]:
        schema = self.schema.in_output_mode(first.output_mode or self.schema.output_mode)
        metadata = in_output_mode(self.metadata, schema)
        for emitted in client.apply_all(chain([first], others), metadata, schema):
            # Columns such as the numbers of rows are of use to the shard only.
            visible = emitted.drop_columns([name for name in emitted.column_names if name.startswith("__")])
            yield from visible.to_batches(max_chunksize=1 << 16)


@dataclass(frozen=True, slots=True)
class _InputColumns:
    """The columns of one of an operator's inputs, among the columns of rows that a task handed over.

    Rows of several inputs share columns. A column's name has its name in each input, in their order: ``k0|k0``, ``|r1``
    (``HandedOver.java``).

    Attributes
    ----------
    number
        Number of the input, by which its rows are chosen; None if all rows are of it.
    names
        For each column of the input, the name of the column that has it; empty if no row is of the input.
    """

    number: int | None
    schema: pa.Schema
    names: Sequence[str]

    @classmethod
    def of(cls, number: int, schema: pa.Schema, rows: pa.Table) -> _InputColumns:
        of_input = {name.split("|")[number]: name for name in rows.column_names if name.count("|") >= number}
        names = [of_input[name] for name in schema.names if name in of_input]
        chosen = number if _INPUT in rows.column_names else None
        return cls(chosen, schema, names if len(names) == len(schema) else [])

    def table(self, rows: pa.Table) -> pa.Table:
        """Return the input's rows among some rows."""
        if not self.names:
            return self.schema.empty_table()
        if self.number is not None:
            rows = rows.filter(pc.equal(rows.column(_INPUT), self.number))
        columns = [as_type(field.type, rows.column(name)) for field, name in zip(self.schema, self.names, strict=True)]
        return pa.Table.from_arrays(columns, schema=self.schema)


def _rows_read(rows: pa.Table) -> int:
    """Return the number of rows that the operator read."""
    return pc.sum(rows.column(_ROWS)).as_py() or 0 if _ROWS in rows.column_names else rows.num_rows


@cache
def _store_actors_client(address: FleetAddress, actors: LocalActors) -> FleetClient:
    return FleetClient(address, actors=actors)


def in_output_mode(metadata: StateMetadata, schema: StateSchema) -> StateMetadata:
    """Return the metadata of an operator with the output mode of a schema."""
    if metadata.output_mode == schema.output_mode:
        return metadata
    # Not the operator's schema itself: only the metadata have the view for readers.
    assert metadata.schema is not None
    mode = schema.output_mode
    described = replace(metadata.schema, output_mode=mode, expiry_key=schema.expiry_key, delay_ms=schema.delay_ms)
    return replace(metadata, output_mode=mode, schema=described)


def task_identity(metadata: StateMetadata, header: BatchHeader | None) -> TaskIdentity:
    """Return the identity of this Spark task.

    Raises
    ------
    InvalidRequestError
        The DataFrame runs outside a streaming query, where there is no batch.
    """
    context = TaskContext.get()
    if context is None or header is None:
        raise InvalidRequestError(
            "a stateful DataFrame of the fleet runs only inside a streaming query; start it with writeStream",
            state=metadata.state_name,
        )
    return _task_of(metadata, header, context.taskAttemptId(), executor_name())


def _work(task: TaskIdentity, rows: ShardInput, header: BatchHeader) -> ShardWork:
    return ShardWork(task, rows, header.late_ms, header.evict_ms, header.output_mode)


def _task_of(metadata: StateMetadata, header: BatchHeader, attempt: int, executor: str) -> TaskIdentity:
    return TaskIdentity(
        state_name=metadata.state_name,
        query_id=header.query_id,
        run_id=header.run_id,
        batch_id=header.batch_id,
        partition_id=header.first_partition + header.shard,
        attempt=attempt,
        executor=executor,
        batch_time_ms=header.time_ms,
        former_time_ms=header.former_time_ms,
        is_temporary=header.is_temporary,
    )

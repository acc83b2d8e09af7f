"""The work of a task of Spark's: its micro-batch, with number, query and watermarks, and the rows of its shards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.stored_json import from_json
from coordinator.model.watermarks import Watermarks
from store_actors.engine.columns import as_type, of_words
from store_actors.messages.requests import ShardInput

#: Columns of rows that a task hands over: the number of a row's input, where there are several, and the number of rows that a
#: partially aggregated one stands for.
_INPUT = "__input"
_ROWS = "__rows"


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """The batch as Spark's driver sends it to each task of a stateful operator (``StatefulExchangeExec.scala``).

    Attributes
    ----------
    shard
        Number of the task's shard; its partition in Spark may have another number, in a stage with a union.
    first_partition
        Partition id of the state's shard 0 in this batch (:mod:`coordinator.ledger.shard_layouts`).
    late_ms, evict_ms
        Spark's own watermarks of this operator and batch: rows up to the first are late, state up to the second is closed.
    time_ms
        When Spark planned the batch: its processing time. In the offset log, so a repeated batch has the same.
    former_time_ms
        `time_ms` of the batch before; None in the first batch.
    """

    query_id: str
    run_id: str
    batch_id: int
    shard: int
    late_ms: int
    evict_ms: int
    time_ms: int
    former_time_ms: int | None = None
    first_partition: int = 0
    output_mode: str = ""
    is_temporary: bool = False

    @classmethod
    def of_json(cls, text: bytes) -> BatchHeader:
        return cls(**json.loads(text))

    def task(self, state_name: str, attempt: int, executor: str) -> TaskIdentity:
        """Return the identity of the shard's task, of which an attempt runs on an executor."""
        return TaskIdentity(
            state_name=state_name,
            query_id=self.query_id,
            run_id=self.run_id,
            batch_id=self.batch_id,
            partition_id=self.first_partition + self.shard,
            attempt=attempt,
            executor=executor,
            batch_time_ms=self.time_ms,
            former_time_ms=self.former_time_ms,
            is_temporary=self.is_temporary,
        )


@dataclass(frozen=True, slots=True)
class EventTimes:
    """The watermarks of an operator in a batch.

    Attributes
    ----------
    late_ms
        Watermark up to which rows are late.
    after
        The watermarks of the version that the batch makes: state up to ``after.input_ms`` is closed.
    """

    late_ms: int
    after: Watermarks

    @property
    def seen_ms(self) -> int:
        """Watermark that a user's function sees while it gets rows."""
        return self.after.input_ms


def event_times(grant: LeaseGrant, late_ms: int, evict_ms: int) -> EventTimes:
    """Return the event times of a batch, of which Spark gives the watermarks (:class:`BatchHeader`); they never go back."""
    before = grant.watermarks
    return EventTimes(max(late_ms, before.input_ms), before.reached(evict_ms))


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The work of a task of Spark's.

    Attributes
    ----------
    operator
        The operator, as :meth:`OperatorTask.to_json` writes it.
    attempt, executor
        Spark's id of the task attempt, and ``host:pid`` of its executor.
    """

    operator: bytes
    batch: dict[str, Any]
    attempt: int
    executor: str
    shards: Sequence[int]
    rows: Iterator[pa.Table]


@dataclass(frozen=True, slots=True)
class ShardWork:
    """The rows of a task for one shard."""

    task: TaskIdentity
    rows: ShardInput
    late_ms: int = 0
    evict_ms: int = 0
    output_mode: str = ""


@dataclass(frozen=True, slots=True)
class OperatorTask:
    """An operator, for which the rows of a task's shards are sent to their store actors."""

    schema: StateSchema
    metadata: StateMetadata

    def to_json(self) -> str:
        """Return the operator as a task sends it."""
        return msgspec.json.encode({"schema": self.schema, "metadata": self.metadata.to_json()}).decode()

    @classmethod
    @lru_cache(maxsize=256)
    def of_json(cls, text: bytes) -> OperatorTask:
        """Return the operator that a task sent; the same one for the same bytes."""
        data = msgspec.json.decode(text)
        return cls(from_json(data["schema"], StateSchema), StateMetadata.from_json(data["metadata"]))

    def works(self, work: HandedOver) -> Iterator[ShardWork]:
        """Yield the work of each of a task's shards."""
        inputs: list[_InputColumns] = []
        for shard, rows in zip(work.shards, work.rows, strict=True):
            # The rows of all shards have the same columns.
            inputs = inputs or [
                _InputColumns.of(number, schema, rows) for number, schema in enumerate(self.schema.input_schemas())
            ]
            header = BatchHeader(**work.batch, shard=shard)
            task = header.task(self.metadata.state_name, work.attempt, work.executor)
            shard_input = ShardInput(tuple(columns.table(rows) for columns in inputs), _rows_read(rows))
            yield ShardWork(task, shard_input, header.late_ms, header.evict_ms, header.output_mode)


@dataclass(frozen=True, slots=True)
class _InputColumns:
    """The columns of one of an operator's inputs, among the columns of rows that a task handed over.

    Rows of several inputs share columns. A column's name has its name in each input, in their order: ``k0|k0``, ``|r1``
    (``OperatorRows.scala``). The words of a state of several are in a column each: ``|registers#0``, ``|registers#1``.

    Attributes
    ----------
    number
        Number of the input, by which its rows are chosen; None if all rows are of it.
    names
        For each column of the input, the names of the columns that have it; empty if no row is of the input.
    """

    number: int | None
    schema: pa.Schema
    names: Sequence[Sequence[str]]

    @classmethod
    def of(cls, number: int, schema: pa.Schema, rows: pa.Table) -> _InputColumns:
        of_input: dict[str, list[str]] = {}
        for name in rows.column_names:
            if name.count("|") >= number:
                of_input.setdefault(name.split("|")[number].partition("#")[0], []).append(name)
        names = [of_input[name] for name in schema.names if name in of_input]
        chosen = number if _INPUT in rows.column_names else None
        return cls(chosen, schema, names if len(names) == len(schema) else [])

    def table(self, rows: pa.Table) -> pa.Table:
        """Return the input's rows among some rows."""
        if not self.names:
            return self.schema.empty_table()
        if self.number is not None:
            rows = rows.filter(pc.equal(rows.column(_INPUT), self.number))
        columns = [
            of_words(field.type, np.stack([rows.column(name).to_numpy() for name in names], axis=1))
            if len(names) > 1
            else as_type(field.type, rows.column(names[0]))
            for field, names in zip(self.schema, self.names, strict=True)
        ]
        return pa.Table.from_arrays(columns, schema=self.schema)


def _rows_read(rows: pa.Table) -> int:
    return pc.sum(rows.column(_ROWS)).as_py() or 0 if _ROWS in rows.column_names else rows.num_rows

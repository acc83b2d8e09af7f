"""The rows that Spark's tasks handed over go to their shards, and what the shards emit goes back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.stored_json import from_json
from store_actors.client.batch import BatchHeader
from store_actors.client.fleet_client import FleetClient
from store_actors.client.leased_calls import ShardWork
from store_actors.engine.columns import as_type, of_words
from store_actors.messages.requests import ShardInput

#: Columns of rows that a task hands over: the number of a row's input, where there are several, and the number of rows that a
#: partially aggregated one stands for.
_INPUT = "__input"
_ROWS = "__rows"


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


def emitted_rows(client: FleetClient, work: HandedOver) -> Iterator[pa.RecordBatch]:
    """Yield the rows that the shards of a task emit."""
    operator = OperatorTask.of_json(work.operator)
    works = operator.works(work)
    first = next(works)
    schema = operator.schema.in_output_mode(first.output_mode or operator.schema.output_mode)
    metadata = operator.metadata.in_output_mode(schema)
    for emitted in client.apply_all(chain([first], works), metadata, schema):
        # Columns such as the numbers of rows are of use to the shard only.
        visible = emitted.drop_columns([name for name in emitted.column_names if name.startswith("__")])
        yield from visible.to_batches(max_chunksize=1 << 16)


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

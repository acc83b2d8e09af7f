"""The work of a task of Spark's: a micro-batch, with number, query and watermarks, and its rows, which are sent to their shards."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.errors import StateStoreError
from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.stored_json import from_json
from coordinator.model.watermarks import Watermarks
from store_actors.client.leased_call import Granted, LeasedCall
from store_actors.engine.columns import as_type, of_words
from store_actors.messages.requests import ApplyRequest, ShardInput

if TYPE_CHECKING:  # Spark's workers import this module, and may have no Ray
    from store_actors.client.leased_calls import LeasedCalls

#: Columns of rows that a task hands over: the number of a row's input, where there are several, and the number of rows that a
#: partially aggregated one stands for.
_INPUT = "__input"
_ROWS = "__rows"
#: Bytes of rows from which on a task sends them before it reads more.
_GROUP_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """The batch as Spark's driver sends it to each task of a stateful operator (``StatefulExchangeExec.scala``)."""

    query_id: str
    run_id: str
    batch_id: int
    #: Number of the task's shard; its partition in Spark may have another number, in a stage with a union.
    shard: int
    #: ``late_ms``, ``evict_ms``: Spark's own watermarks of this operator and batch: rows up to the first are late, state up to
    #: the second is closed.
    late_ms: int
    evict_ms: int
    #: When Spark planned the batch: its processing time. In the offset log, so a repeated batch has the same.
    time_ms: int
    #: `time_ms` of the batch before; None in the first batch.
    former_time_ms: int | None = None
    #: Partition id of the state's shard 0 in this batch (:mod:`coordinator.ledger.shard_layouts`).
    first_partition: int = 0
    output_mode: str = ""
    is_temporary: bool = False
    #: Where a user's program finds its store actor, as arguments of a
    #: :class:`~store_actors.connections.function_stream.FunctionConnection`; None for other operators.
    store_actor: dict[str, Any] | None = dataclasses.field(default=None, repr=False)
    #: What the program asks for in a continuous query, of which this is the first epoch (``EpochTask.scala``); None in a batch.
    run: dict[str, Any] | None = dataclasses.field(default=None, repr=False)

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
    """The watermarks of an operator in a batch."""

    #: Watermark up to which rows are late.
    late_ms: int
    #: The watermarks of the version that the batch makes: state up to ``after.input_ms`` is closed.
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
    """The work of a task of Spark's."""

    #: The operator, as :meth:`OperatorTask.to_json` writes it.
    operator: bytes
    batch: dict[str, Any]
    #: ``attempt``, ``executor``: Spark's id of the task attempt, and ``host:pid`` of its executor.
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
        inputs: list[InputColumns] = []
        for shard, rows in zip(work.shards, work.rows, strict=True):
            # The rows of all shards have the same columns.
            inputs = inputs or [
                InputColumns.of(number, schema, rows.schema)
                for number, schema in enumerate(self.schema.input_schemas())
            ]
            header = BatchHeader(**work.batch, shard=shard)
            task = header.task(self.metadata.state_name, work.attempt, work.executor)
            shard_input = ShardInput(tuple(columns.table(rows) for columns in inputs), _rows_read(rows))
            yield ShardWork(task, shard_input, header.late_ms, header.evict_ms, header.output_mode)


@dataclass(frozen=True)
class InputColumns:
    """The columns of one of an operator's inputs, among the columns of rows that a task handed over.

    Rows of several inputs share columns. A column's name has its name in each input, in their order: ``k0|k0``, ``|r1``
    (``OperatorRows.scala``). The words of a state of several are in a column each: ``|registers#0``, ``|registers#1``.
    """

    #: Number of the input, by which its rows are chosen; None if all rows are of it.
    number: int | None
    schema: pa.Schema
    #: For each column of the input, the names of the columns that have it; empty if no row is of the input.
    names: Sequence[Sequence[str]]

    @classmethod
    def of(cls, number: int, schema: pa.Schema, rows: pa.Schema) -> InputColumns:
        of_input: dict[str, list[str]] = {}
        for name in rows.names:
            if name.count("|") >= number:
                of_input.setdefault(name.split("|")[number].partition("#")[0], []).append(name)
        names = [of_input[name] for name in schema.names if name in of_input]
        chosen = number if _INPUT in rows.names else None
        return cls(chosen, schema, names if len(names) == len(schema) else [])

    def renamed(self, rows: pa.Schema) -> pa.Schema | None:
        """Return a schema of the same columns, in which the input's have its names; None if that is not all to be done."""
        if self.number is not None or not self.names:
            return None
        for field, names in zip(self.schema, self.names, strict=True):
            place = rows.get_field_index(names[0])
            if len(names) > 1 or rows.field(place).type != field.type:
                return None
            rows = rows.set(place, field)
        return rows

    @cached_property
    def _empty(self) -> pa.Table:
        return self.schema.empty_table()

    def table(self, rows: pa.Table) -> pa.Table:
        """Return the input's rows among some rows."""
        batches = rows.to_batches() if self.names else ()
        return pa.Table.from_batches([self._batch(batch) for batch in batches], self.schema) if batches else self._empty

    def _batch(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if self.number is not None:
            rows = rows.filter(pc.equal(rows.column(_INPUT), self.number))
        columns = [
            of_words(field.type, np.stack([rows.column(name).to_numpy() for name in names], axis=1))
            if len(names) > 1
            else as_type(field.type, rows.column(names[0]))
            for field, names in zip(self.schema, self.names, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def _rows_read(rows: pa.Table) -> int:
    return pc.sum(rows.column(_ROWS)).as_py() or 0 if _ROWS in rows.column_names else rows.num_rows


def emitted_rows(calls: LeasedCalls, work: HandedOver, *, is_limited: bool) -> Iterator[pa.RecordBatch]:
    """Yield the rows that the shards of a task of Spark's emit; see :func:`apply_all`."""
    operator = OperatorTask.of_json(work.operator)
    works = operator.works(work)
    first = next(works)
    schema = operator.schema.in_output_mode(first.output_mode or operator.schema.output_mode)
    metadata = operator.metadata.in_output_mode(schema)
    for emitted in apply_all(calls, chain([first], works), metadata, schema, is_limited=is_limited):
        yield from visible(emitted).to_batches(max_chunksize=1 << 16)


def visible(emitted: pa.Table) -> pa.Table:
    """Return emitted rows as a task gets them: columns such as the numbers of rows are of use to the shard only."""
    return emitted.drop_columns([name for name in emitted.column_names if name.startswith("__")])


def apply_all(
    calls: LeasedCalls, works: Iterable[ShardWork], metadata: StateMetadata, schema: StateSchema, *, is_limited: bool
) -> Iterator[pa.Table]:
    """Send rows to shards of one operator and batch; yield the rows that each emits, in their order, once its commit is durable.

    The shards commit side by side, so that a task with many shards waits for the object store once. A large batch is sent to some
    shards at a time, so that their rows need not be in memory together. After the loss of a store actor or a lease the call is
    repeated: the commit protocol makes that safe. Raises errors as :meth:`LeasedCalls.under_leases`.

    Parameters
    ----------
    is_limited
        Whether the memory of the fleet's processes is.
    """
    # In complete mode each shard emits all its rows.
    is_large = schema.output_mode == "complete" and is_limited
    for group in _groups(works, 0 if is_large else _GROUP_BYTES):
        yield from _apply(calls, group, metadata, schema)


def _apply(
    calls: LeasedCalls, works: Sequence[ShardWork], metadata: StateMetadata, schema: StateSchema
) -> list[pa.Table]:
    def arguments(granted: Granted, node_id: str) -> tuple[Any, ...]:
        requests = []
        for number, grant in granted:
            work = works[number]
            times = event_times(grant, work.late_ms, work.evict_ms)
            requests.append(
                ApplyRequest(work.task, grant.lease, grant.base_version, schema, times.after, times.late_ms, node_id)
            )
        return requests, calls.actors.put([works[number].rows for number, _ in granted])

    def results(answer: Any, granted: Granted, handle: Any) -> Sequence[pa.Table | StateStoreError]:
        return [outcome if isinstance(outcome, StateStoreError) else outcome[0] for outcome in answer]

    return calls.under_leases([work.task for work in works], metadata, LeasedCall("apply", arguments, results))


def _groups(works: Iterable[ShardWork], most_bytes: int) -> Iterator[list[ShardWork]]:
    """Yield groups of consecutive works; a group ends once it has `most_bytes` of rows."""
    group: list[ShardWork] = []
    size = 0
    for work in works:
        group.append(work)
        size += sum(table.nbytes for table in work.rows.tables)
        if size >= most_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group

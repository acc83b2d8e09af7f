"""The reduce side of ``transformWithState``: one partition's batch in Spark's worker, with its state in the fleet. Rows of keys as a
processor gets and emits them; initial state, rows, timers, expired values, in this order, by blocks of keys."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import Field, StateSchema
from spark_jobs.functions.groups import Groups, Rows, key_codes, tables_of
from spark_jobs.functions.user_program import UserBatch
from spark_jobs.functions.user_state_task import GroupView
from spark_jobs.functions.values import Raw, RowValues
from spark_jobs.plan.spark_errors import StateCallError
from spark_jobs.plan.spark_version import SPARK
from spark_jobs.transform.block import Block
from spark_jobs.transform.processor import ExpiredTimerInfo, StatefulProcessor, StatefulProcessorHandle, TimerValues
from spark_jobs.transform.variables import PLACE, TIMER, TimeMode, Variable, VariableKind, processor_stores, store_name
from store_actors.client.state_store import StateStore
from store_actors.client.worker_client import WorkerClient
from store_actors.messages.requests import StoreSpec

#: Number of keys whose state is in memory at once.
_BLOCK_KEYS = 1 << 14
#: (state, run, partition, store) of deleted variables that have no rows, nor will have any in this run: each worker asks for them once.
_EMPTY_STORES: set[tuple[str, str, int, str]] = set()


@dataclass(frozen=True)
class RowForm:
    """Rows as PySpark's ``Row``."""

    output: T.StructType
    key_type: T.StructType
    row_type: T.StructType
    #: Number of rows from which on emitted rows are sent.
    max_rows: int

    @cached_property
    def _output_rows(self) -> RowValues:
        return RowValues(self.output, "the output", needs_names=True)

    def keys(self, keys: pa.Table) -> Iterator[tuple[Any, ...]]:
        values = RowValues(self.key_type, "a key")
        return map(values.shown, values.tuples(keys.itercolumns()))

    def rows(self, groups: Groups) -> Iterator[Iterator[T.Row]]:
        values = RowValues(self.row_type, "a row")
        raw = values.tuples(groups.rows.itercolumns())
        new_row = T.Row(*self.row_type.names)
        for begin, end in zip(groups.offsets[:-1].tolist(), groups.offsets[1:].tolist(), strict=True):
            yield (new_row(*values.shown(row)) for row in raw[begin:end])

    def checked(self, emitted: Any) -> Iterator[Raw]:
        if not isinstance(emitted, Iterable) or isinstance(emitted, str | bytes | T.Row | dict):
            raise StateCallError(
                "a processor returns an iterator of Rows; yield them, or return a list", got=type(emitted).__name__
            )
        for row in emitted:
            values = tuple(row.get(name) for name in self.output.names) if isinstance(row, dict) else row
            yield self._output_rows.raw(values)

    def size(self, emitted: Raw) -> int:
        return 1

    def table(self, emitted: Sequence[Raw]) -> pa.Table:
        schema = SPARK.arrow_schema(self.output)
        return pa.Table.from_arrays(self._output_rows.arrays(emitted, schema.types), schema=schema)


def _blocks(groups: Groups) -> Iterator[Groups]:
    for begin in range(0, len(groups), _BLOCK_KEYS):
        yield groups.part(begin, min(len(groups), begin + _BLOCK_KEYS))


@dataclass(frozen=True)
class InitialRows:
    """Rows of the initial state, by shard."""

    #: By shard, a broadcast of chunks (IPC record batches), which a worker loads when it uses the value.
    shards: dict[int, Any]
    #: Columns of the rows: key leaves and the DataFrame's.
    schema: pa.Schema
    view: GroupView
    form: Rows

    def groups(self, shard: int) -> Groups:
        chunks = self.shards[shard].value if shard in self.shards else []
        batches = [pa.ipc.read_record_batch(pa.py_buffer(chunk), self.schema) for chunk in chunks]
        return Groups.of(pa.Table.from_batches(batches, self.schema).combine_chunks(), self.view.leaves)


@dataclass(frozen=True)
class ProcessorProgram:
    """A user's processor; see :class:`~spark_jobs.functions.user_program.UserProgram`."""

    #: The processor, pickled: each attempt has a copy as it was when the query was built.
    processor: bytes
    view: GroupView
    form: Rows
    time_mode: TimeMode
    #: ``variables``, ``schemas``: Variables that its ``init`` requested when the query was built, and types by their DDL.
    variables: tuple[Variable, ...]
    schemas: dict[str, T.DataType]
    #: The initial state; None if the first batch was over when the query was built.
    initial: InitialRows | None
    #: Emitted column that later operators use as event time; empty if there is none.
    event_time: str
    has_watermark: bool

    @contextmanager
    def opened(self, client: WorkerClient, task: TaskIdentity, schema: StateSchema) -> Iterator[OpenProcessor]:
        with closing(load_processor(self.processor)) as processor:
            block = Block([field.name for field in schema.keys])
            handle = StatefulProcessorHandle(block, self.time_mode, self.schemas)
            processor.init(handle)
            handle.end_of_init()
            self._check(handle)
            purged = _purged(client, task, handle.deleted, schema.keys)
            stores = processor_stores(handle.variables, schema.keys)
            yield OpenProcessor(self, processor, handle, block, purged, (*stores, *purged))

    def _check(self, handle: StatefulProcessorHandle) -> None:
        if handle.variables != self.variables:
            raise StateCallError(
                "init asks for other state variables than it did when the query was built; it must ask for the same ones each time",
                built=[variable.name for variable in self.variables],
                now=[variable.name for variable in handle.variables],
            )


@dataclass(frozen=True)
class OpenProcessor:
    """A processor with its stores, ready for one batch."""

    program: ProcessorProgram
    processor: StatefulProcessor
    handle: StatefulProcessorHandle
    block: Block
    #: Stores of deleted variables, whose rows are removed.
    purged: tuple[StoreSpec, ...]
    stores: tuple[StoreSpec, ...]

    def run(self, store: StateStore, batch: UserBatch) -> list[pa.Table]:
        for spec in self.purged:
            _remove_all(store.store(spec.name), spec)
        self.block.open(store, batch.time_ms)
        emitted = list(self._emitted(batch))
        self._check_event_times(emitted, batch.times.seen_ms)
        return emitted

    def _emitted(self, batch: UserBatch) -> Iterator[pa.Table]:
        """Do a batch in Spark's order."""
        time_mode, initial = self.program.time_mode, self.program.initial
        now_ms, times = batch.time_ms, batch.times
        before = self._times(now_ms, times.seen_ms)
        if batch.base_version == 0 and initial is not None:
            self.take_initial(initial.groups(batch.shard), initial.view, initial.form, before)
        yield from self.process(batch.rows, before)
        if time_mode is TimeMode.EVENT_TIME:
            watermark_ms = times.after.input_ms
            yield from self.fire_timers(watermark_ms, self._times(now_ms, watermark_ms))
        elif time_mode is TimeMode.PROCESSING_TIME:
            yield from self.fire_timers(now_ms, before)
        self.evict()

    def _times(self, now_ms: int, watermark_ms: int) -> TimerValues:
        if self.program.time_mode is TimeMode.NONE:
            return TimerValues()
        return TimerValues(now_ms, watermark_ms if self.program.has_watermark else -1)

    def take_initial(self, groups: Groups, view: GroupView, form: Rows, times: TimerValues) -> None:
        """Have the processor take the initial state of keys, whose columns are another DataFrame's."""
        for block in _blocks(groups):
            viewed = view.of(block)
            with self.block.of(block.keys):
                for index, (key, rows) in enumerate(
                    zip(self.program.form.keys(viewed.keys), form.rows(viewed), strict=True)
                ):
                    self.block.enter(index)
                    for row in rows:
                        self.processor.handleInitialState(key, row, times)

    def process(self, rows: pa.Table, times: TimerValues) -> Iterator[pa.Table]:
        """Have the processor handle the rows of each key that has any; yield what it emits."""
        for block in _blocks(Groups.of(rows, self.program.view.leaves)):
            with self.block.of(block.keys):
                yield from tables_of(self.program.form, self._handle_rows(self.program.view.of(block), times))

    def fire_timers(self, now_ms: int, times: TimerValues) -> Iterator[pa.Table]:
        """Have the processor handle the expired timers, in the order of their times; yield what it emits.

        As in Spark these are the timers at the end of the rows: a timer that is registered or deleted while they fire only affects
        the next batch.
        """
        due = self.handle.timers.due(now_ms)
        for begin in range(0, due.num_rows, _BLOCK_KEYS):
            block = due.slice(begin, _BLOCK_KEYS)
            codes = key_codes(block, self.program.view.leaves)
            _, firsts, key_of_row = np.unique(codes, return_index=True, return_inverse=True)
            keys = block.select(self.program.view.leaves).take(pa.array(firsts)).combine_chunks()
            timers = list(zip(key_of_row.tolist(), block.column(TIMER.name).to_pylist(), strict=True))
            with self.block.of(keys):
                yield from tables_of(self.program.form, self._handle_timers(keys, timers, times))

    def _handle_rows(self, groups: Groups, times: TimerValues) -> Iterator[Iterator[Any]]:
        inputs = zip(self.program.form.keys(groups.keys), self.program.form.rows(groups), strict=True)
        for index, (key, rows) in enumerate(inputs):
            self.block.enter(index)
            yield self.program.form.checked(self.processor.handleInputRows(key, rows, times))

    def _handle_timers(
        self, leaves: pa.Table, timers: list[tuple[int, int]], times: TimerValues
    ) -> Iterator[Iterator[Any]]:
        keys = list(self.program.form.keys(self.program.view.key_columns(leaves)))
        for index, time_ms in timers:
            self.block.enter(index)
            yield self.program.form.checked(
                self.processor.handleExpiredTimer(keys[index], times, ExpiredTimerInfo(time_ms))
            )
            # Even if it was registered again meanwhile, as in Spark: a timer fires once.
            self.handle.timers.delete(time_ms)

    def evict(self) -> int:
        """Remove the expired values of all keys; return how many rows that were."""
        return sum(state.evict() for state in self.handle.states)

    def _check_event_times(self, emitted: list[pa.Table], watermark_ms: int) -> None:
        """Refuse rows that would be late for the operator that they feed, as Spark does."""
        event_time = self.program.event_time
        for table in emitted if event_time else ():
            times = table.column(event_time).cast(pa.int64())
            earliest_us = pc.min(times).as_py()
            if earliest_us is not None and earliest_us <= watermark_ms * 1000:
                raise StateCallError(
                    "the processor emitted a row whose event time is not after the watermark, by which the operators that follow go; "
                    "nothing was committed; emit later times, or leave late rows out",
                    column=event_time,
                    event_time_us=earliest_us,
                    watermark_ms=watermark_ms,
                )


def _purged(
    client: WorkerClient, task: TaskIdentity, deleted: Iterable[str], keys: tuple[Field, ...]
) -> tuple[StoreSpec, ...]:
    """Return the stores of deleted variables that still have rows."""
    kinds = {store_name(kind, name): kind for name in sorted(deleted) for kind in VariableKind}
    stores = [store for store in kinds if _known(task, store) not in _EMPTY_STORES]
    if not stores or task.batch_id == 0:
        return ()
    filled = client.filled_stores(task, stores)
    _EMPTY_STORES.update(_known(task, store) for store in stores if store not in filled)
    return tuple(
        StoreSpec(store, keys if kinds[store] is VariableKind.VALUE else (*keys, PLACE), ()) for store in filled
    )


def _known(task: TaskIdentity, store: str) -> tuple[str, str, int, str]:
    return task.state_name, task.run_id, task.partition_id, store


def load_processor(pickled: bytes) -> StatefulProcessor:
    processor = pickle.loads(pickled)
    assert isinstance(processor, StatefulProcessor), "its class was checked before it was pickled"
    return processor


def _remove_all(store: StateStore, spec: StoreSpec) -> None:
    for batch in store.iterator():
        store.remove(batch.select([field.name for field in spec.keys]))

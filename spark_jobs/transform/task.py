"""The reduce side of ``transformWithState``: one partition's batch in Spark's worker, with its state in the fleet."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import Field, StateSchema
from spark_jobs.functions.group_task import GroupView
from spark_jobs.functions.groups import Groups
from spark_jobs.functions.user_state_task import UserBatch
from spark_jobs.plan.spark_errors import StateCallError
from spark_jobs.transform.block import Block
from spark_jobs.transform.handle import StatefulProcessorHandle
from spark_jobs.transform.processor import StatefulProcessor, TimerValues
from spark_jobs.transform.rows import Rows
from spark_jobs.transform.variables import PLACE, TimeMode, Variable, VariableKind, processor_stores, store_name
from spark_jobs.transform.work import TransformWork
from store_actors.client.fleet_client import FleetClient
from store_actors.client.state_store import StateStore
from store_actors.messages.requests import StoreSpec

#: (state, run, partition, store) of deleted variables that have no rows, nor will have any in this run: each worker asks for them once.
_EMPTY_STORES: set[tuple[str, str, int, str]] = set()


@dataclass(frozen=True)
class InitialRows:
    """Rows of the initial state, by shard.

    Attributes
    ----------
    shards
        By shard, a broadcast of chunks (IPC record batches), which a worker loads when it uses the value.
    schema
        Columns of the rows: key leaves and the DataFrame's.
    """

    shards: dict[int, Any]
    schema: pa.Schema
    view: GroupView
    form: Rows

    def groups(self, shard: int) -> Groups:
        """Return the rows of a shard, grouped by key."""
        chunks = self.shards[shard].value if shard in self.shards else []
        batches = [pa.ipc.read_record_batch(pa.py_buffer(chunk), self.schema) for chunk in chunks]
        return Groups.of(pa.Table.from_batches(batches, self.schema).combine_chunks(), self.view.leaves)


@dataclass(frozen=True)
class ProcessorProgram:
    """A user's processor; see :class:`~spark_jobs.functions.user_state_task.UserProgram`.

    Attributes
    ----------
    processor
        The processor, pickled: each attempt has a copy as it was when the query was built.
    variables, schemas
        Variables that its ``init`` requested when the query was built, and types by their DDL.
    initial
        The initial state; None if the first batch was over when the query was built.
    event_time
        Emitted column that later operators use as event time; empty if there is none.
    """

    processor: bytes
    view: GroupView
    form: Rows
    time_mode: TimeMode
    variables: tuple[Variable, ...]
    schemas: dict[str, T.DataType]
    initial: InitialRows | None
    event_time: str
    has_watermark: bool

    @contextmanager
    def opened(self, client: FleetClient, task: TaskIdentity, schema: StateSchema) -> Iterator[_OpenProcessor]:
        """Yield the processor with its stores, ready for one batch."""
        with closing(load_processor(self.processor)) as processor:
            block = Block([field.name for field in schema.keys])
            handle = StatefulProcessorHandle(block, self.time_mode, self.schemas)
            processor.init(handle)
            handle.end_of_init()
            self._check(handle)
            purged = _purged(client, task, handle.deleted, schema.keys)
            stores = processor_stores(handle.variables, schema.keys)
            work = TransformWork(processor, handle, block, self.view, self.form)
            yield _OpenProcessor(self, work, purged, (*stores, *purged))

    def _check(self, handle: StatefulProcessorHandle) -> None:
        if handle.variables != self.variables:
            raise StateCallError(
                "init asks for other state variables than it did when the query was built; it must ask for the same ones each time",
                built=[variable.name for variable in self.variables],
                now=[variable.name for variable in handle.variables],
            )


@dataclass(frozen=True)
class _OpenProcessor:
    """A processor with its stores, ready for one batch.

    Attributes
    ----------
    purged
        Stores of deleted variables, whose rows are removed.
    """

    program: ProcessorProgram
    work: TransformWork
    purged: tuple[StoreSpec, ...]
    stores: tuple[StoreSpec, ...]

    def run(self, store: StateStore, batch: UserBatch) -> list[pa.Table]:
        for spec in self.purged:
            _remove_all(store.store(spec.name), spec)
        self.work.block.open(store, batch.time_ms)
        emitted = list(self._emitted(batch))
        self._check_event_times(emitted, batch.times.seen_ms)
        return emitted

    def _emitted(self, batch: UserBatch) -> Iterator[pa.Table]:
        """Do a batch in Spark's order."""
        work, time_mode, initial = self.work, self.program.time_mode, self.program.initial
        now_ms, times = batch.time_ms, batch.times
        before = self._times(now_ms, times.seen_ms)
        if batch.base_version == 0 and initial is not None:
            work.take_initial(initial.groups(batch.shard), initial.view, initial.form, before)
        yield from work.process(batch.rows, before)
        if time_mode is TimeMode.EVENT_TIME:
            watermark_ms = times.after.input_ms
            yield from work.fire_timers(watermark_ms, self._times(now_ms, watermark_ms))
        elif time_mode is TimeMode.PROCESSING_TIME:
            yield from work.fire_timers(now_ms, before)
        work.evict()

    def _times(self, now_ms: int, watermark_ms: int) -> TimerValues:
        if self.program.time_mode is TimeMode.NONE:
            return TimerValues()
        return TimerValues(now_ms, watermark_ms if self.program.has_watermark else -1)

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
    client: FleetClient, task: TaskIdentity, deleted: Iterable[str], keys: tuple[Field, ...]
) -> tuple[StoreSpec, ...]:
    """Return the stores of deleted variables that still have rows."""
    kinds = {store_name(kind, name): kind for name in sorted(deleted) for kind in VariableKind}
    stores = [store for store in kinds if _known(task, store) not in _EMPTY_STORES]
    if not stores or task.batch_id == 0:
        return ()
    plans = client.load_plans(task, stores)
    filled = [store for store in stores if plans[store].may_have_rows()]
    _EMPTY_STORES.update(_known(task, store) for store in stores if store not in filled)
    return tuple(
        StoreSpec(store, keys if kinds[store] is VariableKind.VALUE else (*keys, PLACE), ()) for store in filled
    )


def _known(task: TaskIdentity, store: str) -> tuple[str, str, int, str]:
    return task.state_name, task.run_id, task.partition_id, store


def load_processor(pickled: bytes) -> StatefulProcessor:
    """Return a copy of a processor."""
    processor = pickle.loads(pickled)
    assert isinstance(processor, StatefulProcessor), "its class was checked before it was pickled"
    return processor


def _remove_all(store: StateStore, spec: StoreSpec) -> None:
    for batch in store.iterator():
        store.remove(batch.select([field.name for field in spec.keys]))

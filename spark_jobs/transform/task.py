"""The reduce side of ``transformWithState``: one partition's batch in Spark's worker, with its state in the fleet."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from spark_jobs.functions.group_task import GroupView, do_batch, rows_on_time, times_of_function
from spark_jobs.functions.groups import Groups
from spark_jobs.transform.block import Block
from spark_jobs.transform.handle import StatefulProcessorHandle
from spark_jobs.transform.processor import StatefulProcessor, TimerValues
from spark_jobs.transform.rows import Rows
from spark_jobs.transform.variables import PLACE, TimeMode, Variable, VariableKind, store_name, timer_spec
from spark_jobs.transform.work import TransformWork
from spark_jobs.worker.batch import EventTimes
from spark_jobs.worker.exchange import Received
from spark_jobs.worker.fleet_client import FleetAddress, FleetClient, fleet_client
from spark_jobs.worker.state_store import StateStore
from spark_jobs.worker.task import task_identity
from store_actors.messages import BatchFacts, StoreSpec

__all__ = ["InitialRows", "TransformTask", "load_processor"]

#: (state, run, partition, store) of deleted variables that have no rows, nor will have any in this run: asked for once a worker.
_EMPTY_STORES: set[tuple[str, str, int, str]] = set()


@dataclass(frozen=True)
class InitialRows:
    """Rows of the initial state, by shard.

    Attributes
    ----------
    shards
        For each shard that has some a broadcast of chunks (IPC record batches), loaded by whoever asks for its value.
    schema
        Their columns: key leaves and the DataFrame's.
    view, form
        How the processor sees them.
    """

    shards: dict[int, Any]
    schema: pa.Schema
    view: GroupView
    form: Rows

    def groups(self, shard: int) -> Groups:
        """Rows of a shard, by key."""
        chunks = self.shards[shard].value if shard in self.shards else []
        batches = [pa.ipc.read_record_batch(pa.py_buffer(chunk), self.schema) for chunk in chunks]
        return Groups.of(pa.Table.from_batches(batches, self.schema).combine_chunks(), self.view.leaves)


@dataclass(frozen=True)
class TransformTask:
    """A ``mapInArrow`` function: a partition's chunks in, what the user's processor emits out.

    Attributes
    ----------
    processor
        The processor, pickled: each attempt has a copy as it was when the query was built.
    view, form
        How it sees keys and rows.
    time_mode
        What timers go by.
    variables, schemas
        What its ``init`` asked for when the query was built, and what its DDL means.
    initial
        The initial state, unless the state had got over its first batch by then.
    event_time
        Column of what is emitted that later operators go by; empty without.
    has_watermark
        Whether event time reaches the operator.
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
    schema: StateSchema
    metadata: StateMetadata
    address: FleetAddress

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """See :func:`~spark_jobs.functions.group_task.do_batch`."""
        return do_batch(batches, self.schema, self._run)

    def _run(self, received: Received) -> list[pa.Table]:
        task, rows = task_identity(self.metadata, received.header), received.rows.raw
        client = fleet_client(self.address)
        with closing(load_processor(self.processor)) as processor:
            block = Block([field.name for field in self.schema.keys])
            handle = StatefulProcessorHandle(block, self.time_mode, self.schemas)
            processor.init(handle)
            handle.end_of_init()
            self._check(handle)
            purged = self._purged(client, task, handle.deleted)
            specs = [variable.spec(self.schema.keys) for variable in handle.variables]
            store, grant = client.open_granted(task, self.metadata, (timer_spec(self.schema.keys), *specs, *purged))
            with store:
                for spec in purged:
                    _remove_all(store.store(spec.name), spec)
                times = times_of_function(self.schema, grant, received)
                is_timed = self.time_mode is TimeMode.EVENT_TIME
                on_time = rows_on_time(rows, times.late_ms) if is_timed else rows
                block.open(store, task.batch_time_ms or 0)
                work = TransformWork(processor, handle, block, self.view, self.form)
                assert received.header is not None, "who the task is was told by it"
                emitted = list(self._emitted(work, on_time, grant, times, received.header.shard))
                self._check_event_times(emitted, times.seen_ms)
                due_per_ms = 1 if self.time_mode is TimeMode.PROCESSING_TIME else None
                late = rows.num_rows - on_time.num_rows
                store.commit(BatchFacts(times.after, received.rows.rows_read, late, due_per_ms))
        return emitted

    def _emitted(
        self, work: TransformWork, rows: pa.Table, grant: LeaseGrant, times: EventTimes, shard: int
    ) -> Iterator[pa.Table]:
        """Do a batch in Spark's order."""
        now_ms = work.block.now_ms
        before = self._times(now_ms, times.seen_ms)
        if grant.base_version == 0 and self.initial is not None:
            initial = self.initial
            work.take_initial(initial.groups(shard), initial.view, initial.form, before)
        yield from work.process(rows, before)
        if self.time_mode is TimeMode.EVENT_TIME:
            watermark_ms = times.after.input_ms
            yield from work.fire_timers(watermark_ms, self._times(now_ms, watermark_ms))
        elif self.time_mode is TimeMode.PROCESSING_TIME:
            yield from work.fire_timers(now_ms, before)
        work.evict()

    def _times(self, now_ms: int, watermark_ms: int) -> TimerValues:
        if self.time_mode is TimeMode.NONE:
            return TimerValues()
        return TimerValues(now_ms, watermark_ms if self.has_watermark else -1)

    def _check(self, handle: StatefulProcessorHandle) -> None:
        if handle.variables != self.variables:
            raise InvalidRequestError(
                "init asks for other state variables than it did when the query was built; it must ask for the same ones each time",
                built=[variable.name for variable in self.variables],
                now=[variable.name for variable in handle.variables],
            )

    def _purged(self, client: FleetClient, task: TaskIdentity, deleted: Iterable[str]) -> tuple[StoreSpec, ...]:
        """Stores of deleted variables that still have rows."""
        kinds = {store_name(kind, name): kind for name in sorted(deleted) for kind in VariableKind}
        asked = [store for store in kinds if self._known(task, store) not in _EMPTY_STORES]
        if not asked or task.batch_id == 0:
            return ()
        plans = client.load_plans(task, asked)
        found = [store for store in asked if plans[store].may_have_rows()]
        _EMPTY_STORES.update(self._known(task, store) for store in asked if store not in found)
        keys = self.schema.keys
        return tuple(
            StoreSpec(store, keys if kinds[store] is VariableKind.VALUE else (*keys, PLACE), ()) for store in found
        )

    @staticmethod
    def _known(task: TaskIdentity, store: str) -> tuple[str, str, int, str]:
        return task.state_name, task.run_id, task.partition_id, store

    def _check_event_times(self, emitted: list[pa.Table], watermark_ms: int) -> None:
        """Refuse rows that would be late for the operator that they feed, as Spark does."""
        for table in emitted if self.event_time else ():
            times = table.column(self.event_time).cast(pa.int64())
            earliest_us = pc.min(times).as_py()
            if earliest_us is not None and earliest_us <= watermark_ms * 1000:
                raise InvalidRequestError(
                    "the processor emitted a row whose event time is not after the watermark, by which the operators that follow go; "
                    "nothing was committed; emit later times, or leave late rows out",
                    column=self.event_time,
                    event_time_us=earliest_us,
                    watermark_ms=watermark_ms,
                )


def load_processor(pickled: bytes) -> StatefulProcessor:
    """A copy of a processor."""
    processor = pickle.loads(pickled)
    assert isinstance(processor, StatefulProcessor), "its class was checked before it was pickled"
    return processor


def _remove_all(store: StateStore, spec: StoreSpec) -> None:
    for batch in store.iterator():
        store.remove(batch.select([field.name for field in spec.keys]))

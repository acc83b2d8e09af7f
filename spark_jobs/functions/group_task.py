"""The reduce side of operators with user-defined state: one partition's keys, rows and timeouts of one batch.

The function runs in Spark's Python worker. State comes and goes in a few calls whatever the number of keys: one look-up, one put
and one remove a block of keys, one question for the keys that are due, one commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.streaming.state import GroupStateTimeout

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.errors import InvalidRequestError, StoreUnavailableError
from coordinator.model.schema import Field, StateSchema
from coordinator.model.state_metadata import StateMetadata
from spark_jobs.functions.groups import EXISTS, TIMEOUT, Groups, StateColumns, single_chunk
from spark_jobs.functions.state_batch import NO_TIMEOUT, BatchFunction, Mask, Moment, StateBatch
from spark_jobs.plan.keys import KeyTree
from spark_jobs.plan.view_components import ViewComponent
from spark_jobs.worker.batch import EventTimes, event_times
from spark_jobs.worker.exchange import Received, unpack
from spark_jobs.worker.fleet_client import FleetAddress, fleet_client
from spark_jobs.worker.state_store import StateStore
from spark_jobs.worker.task import task_identity
from store_actors.messages import BatchFacts

__all__ = [
    "EVENT_TIME_FIELD",
    "FOUND",
    "KEY_INDEX",
    "ArrowCalls",
    "GroupStateTask",
    "GroupView",
    "KeyedBatch",
    "do_batch",
    "rows_on_time",
    "times_of_function",
]

Emitted = TypeVar("Emitted")

#: Column of a row's event time, in microseconds, by which it is late; there if timeouts are of event time.
EVENT_TIME_FIELD = Field("event_us", "int64")
#: Last column of the rows that an Arrow function is given: their place in the table of keys.
KEY_INDEX = "key_index"
#: Keys for which a function is called at once.
_BLOCK_KEYS = 1 << 17
#: How often a batch is done again, within the task, whose store actor was lost.
_ATTEMPTS = 3
#: Last column of what a store finds.
FOUND = "__found"


@dataclass(frozen=True)
class GroupView:
    """Keys and rows as the function sees them.

    Attributes
    ----------
    keys
        Name of each grouping column, and how it is made of the state's leaves.
    rows
        Name of each column of the DataFrame, and of the column that reaches the shard.
    """

    keys: tuple[tuple[str, KeyTree], ...]
    rows: tuple[tuple[str, str], ...]

    @property
    def leaves(self) -> list[str]:
        """The state's key columns."""
        return [leaf for _, tree in self.keys for leaf in _leaves(tree)]

    def show_keys(self, part: ViewComponent) -> None:
        """Show readers the keys under the names of their columns."""
        for name, tree in self.keys:
            part.key(name, tree.view_tree())

    def key_columns(self, leaves: pa.Table) -> pa.Table:
        """The grouping columns of keys of the state."""
        return pa.table([_value(tree, leaves) for _, tree in self.keys], [name for name, _ in self.keys])

    def of(self, groups: Groups) -> Groups:
        """The same groups in the function's columns."""
        keys = self.key_columns(groups.keys)
        rows = pa.table([groups.rows.column(column) for _, column in self.rows], [name for name, _ in self.rows])
        return Groups(keys, rows, groups.offsets)


def _value(tree: KeyTree, leaves: pa.Table) -> pa.Array:
    if tree.leaf is not None:
        return single_chunk(leaves.column(tree.leaf))
    parts = [_value(inner, leaves) for _, inner in tree.fields]
    mask = None if tree.null_leaf is None else single_chunk(leaves.column(tree.null_leaf))
    return pa.StructArray.from_arrays(parts, [name for name, _ in tree.fields], mask=mask)


class Calls(Protocol):
    """Calls a user's function for the keys of a block; changes `state` and yields what to emit, in the output's columns."""

    def __call__(self, groups: Groups, state: StateBatch) -> Iterator[pa.Table]: ...


@dataclass(frozen=True)
class ArrowCalls:
    """A function of many keys.

    Attributes
    ----------
    function
        The user's.
    output
        Columns of what it emits.
    """

    function: BatchFunction
    output: pa.Schema

    def __call__(self, groups: Groups, state: StateBatch) -> Iterator[pa.Table]:
        """See :class:`Calls`."""
        index = np.repeat(np.arange(len(groups)), np.diff(groups.offsets))
        emitted = self.function(groups.keys, groups.rows.append_column(KEY_INDEX, pa.array(index)), state)
        if emitted is None:
            return
        if not isinstance(emitted, pa.Table | pa.RecordBatch):
            raise InvalidRequestError(
                "the function of applyInArrowWithState returns an Arrow table or record batch, or None",
                got=type(emitted).__name__,
            )
        if sorted(emitted.schema.names) != sorted(self.output.names):
            raise InvalidRequestError(
                "the function returned other columns than its outputStructType has",
                columns=self.output.names,
                got=emitted.schema.names,
            )
        columns = [emitted.column(field.name).cast(field.type) for field in self.output]
        yield pa.Table.from_arrays(columns, schema=self.output)


@dataclass
class KeyedBatch:
    """One partition's work of one batch on an open store.

    Parameters
    ----------
    store
        Where state is; see :class:`GroupStateTask` for its columns.
    """

    store: StateStore
    calls: Calls
    view: GroupView
    columns: StateColumns
    timeout_conf: str

    def process(self, rows: pa.Table, moment: Moment) -> Iterator[pa.Table]:
        """Call the function for every key that has rows."""
        groups = Groups.of(rows, self.view.leaves)
        for begin in range(0, len(groups), _BLOCK_KEYS):
            part = groups.part(begin, min(len(groups), begin + _BLOCK_KEYS))
            yield from self._call(part, self.store.multi_get(part.keys), moment)

    def process_timeouts(self, schema: pa.Schema, moment: Moment) -> Iterator[pa.Table]:
        """Call the function for every key that has timed out; `schema` is that of the rows, of which there are none."""
        now_ms = moment.watermark_ms
        if self.timeout_conf == GroupStateTimeout.ProcessingTimeTimeout:
            now_ms = moment.processing_time_ms
        if self.timeout_conf == GroupStateTimeout.NoTimeout or now_ms is None:
            return
        # Spark: a key has timed out once its time is before now.
        due = self.store.due(now_ms * 1000 - 1)
        due = due.append_column(FOUND, pa.array(np.ones(due.num_rows, np.bool_)))
        for begin in range(0, due.num_rows, _BLOCK_KEYS):
            some = due.slice(begin, _BLOCK_KEYS)
            keys = some.select(self.view.leaves)
            yield from self._call(Groups.without_rows(keys, schema), some, moment)

    def _call(self, groups: Groups, held: pa.Table, moment: Moment) -> Iterator[pa.Table]:
        found = _mask(held.column(FOUND))
        exists = found & _mask(held.column(EXISTS.name))
        former = pc.fill_null(single_chunk(held.column(TIMEOUT.name)), NO_TIMEOUT * 1000).to_numpy() // 1000
        seen = self.view.of(groups)
        state = StateBatch(self.columns, self.columns.shown(held), exists, former, groups.offsets, moment)
        yield from self.calls(seen, state)
        self._keep(groups.keys, found, state)

    def _keep(self, keys: pa.Table, found: Mask, state: StateBatch) -> None:
        written, gone, timeouts_ms = state.outcome()
        if written.any():
            mask = pa.array(written)
            timeouts = pa.array(timeouts_ms * 1000, mask=timeouts_ms == NO_TIMEOUT)
            values = [single_chunk(column) for column in state.values.itercolumns()]
            columns = [*self.columns.held([value.filter(mask) for value in values])]
            columns += [pa.array(state.exists).filter(mask), timeouts.filter(mask)]
            names = [field.name for field in (*self.columns.fields, EXISTS, TIMEOUT)]
            rows = keys.filter(mask)
            self.store.later("put", pa.table([*rows.columns, *columns], [*rows.column_names, *names]))
        gone = gone & found
        if gone.any():
            self.store.later("remove", keys.filter(pa.array(gone)))


def _leaves(tree: KeyTree) -> Iterator[str]:
    if tree.leaf is not None:
        yield tree.leaf
    if tree.null_leaf is not None:
        yield tree.null_leaf
    for _, inner in tree.fields:
        yield from _leaves(inner)


def _mask(column: pa.ChunkedArray) -> Mask:
    mask: Mask = pc.fill_null(single_chunk(column), False).to_numpy(zero_copy_only=False)
    return mask


@dataclass(frozen=True)
class GroupStateTask:
    """A ``mapInArrow`` function: a partition's chunks in, what the user's function emits out.

    The store's keys are the schema's; its values are those of `columns`, ``exists`` and ``timeout_us``, by which rows fall due.

    Attributes
    ----------
    has_watermark
        Whether event time reaches the operator.
    """

    calls: Calls
    view: GroupView
    columns: StateColumns
    timeout_conf: str
    has_watermark: bool
    schema: StateSchema
    metadata: StateMetadata
    address: FleetAddress

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """See :func:`do_batch`."""
        return do_batch(batches, self.schema, self._run)

    def _run(self, received: Received) -> list[pa.Table]:
        task, rows = task_identity(self.metadata, received.header), received.rows.raw
        spec = self.columns.group_store(self.schema.keys)
        store, grant = fleet_client(self.address).open_granted(task, self.metadata, (spec,))
        with store:
            times = times_of_function(self.schema, grant, received)
            # Spark drops late rows if timeouts are of event time, else none.
            is_timed = self.timeout_conf == GroupStateTimeout.EventTimeTimeout
            on_time = rows_on_time(rows, times.late_ms) if is_timed else rows
            batch = KeyedBatch(store, self.calls, self.view, self.columns, self.timeout_conf)
            emitted = list(self._emitted(batch, on_time, times, task.batch_time_ms or 0))
            due_per_ms = 1000 if self.timeout_conf == GroupStateTimeout.ProcessingTimeTimeout else None
            late = rows.num_rows - on_time.num_rows
            store.commit(BatchFacts(times.after, received.rows.rows_read, late, due_per_ms))
        return emitted

    def _emitted(self, batch: KeyedBatch, rows: pa.Table, times: EventTimes, now_ms: int) -> Iterator[pa.Table]:
        yield from batch.process(rows, self._moment(times.seen_ms, now_ms, has_timed_out=False))
        yield from batch.process_timeouts(rows.schema, self._moment(times.after.input_ms, now_ms, has_timed_out=True))

    def _moment(self, watermark_ms: int, now_ms: int, *, has_timed_out: bool) -> Moment:
        return Moment(self.timeout_conf, watermark_ms if self.has_watermark else None, now_ms, has_timed_out)


def do_batch(
    batches: Iterable[pa.RecordBatch], schema: StateSchema, run: Callable[[Received], list[pa.Table]]
) -> Iterator[pa.RecordBatch]:
    """Do a partition's batch and commit it, then yield: whoever reads only a part of its results does not stop it.

    Parameters
    ----------
    run
        Commits what it is called with, and returns what to emit.
    """
    received = unpack(batches, schema)
    emitted = _again_if_lost(lambda: run(received))
    for table in emitted:
        yield from table.to_batches(max_chunksize=1 << 16)


def _again_if_lost(run: Callable[[], Emitted]) -> Emitted:
    """Do a batch; once more, from the start, if its store actor was lost meanwhile.

    Raises
    ------
    StoreUnavailableError
        It was lost each time.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return run()
        except StoreUnavailableError:
            # Nothing was counted, or what was is found and adopted: the same batch again, on another store actor.
            pass
    return run()


def times_of_function(schema: StateSchema, grant: LeaseGrant, received: Received) -> EventTimes:
    """Where event time stands in a batch; what a function emits later is newer than the operator's own watermark."""
    times = event_times(schema, grant, received.header, received.watermarks_ms)
    after = times.after
    return replace(times, after=replace(after, output_ms=max(after.output_ms, after.input_ms)))


def rows_on_time(rows: pa.Table, watermark_ms: int) -> pa.Table:
    """Rows whose :data:`EVENT_TIME_FIELD` is not late."""
    is_newer = pc.greater(rows.column(EVENT_TIME_FIELD.name), watermark_ms * 1000)
    return rows.filter(pc.fill_null(is_newer, True))

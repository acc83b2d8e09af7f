"""The reduce side of operators that run a user's program with state: one partition's batch, from its rows to its commit.

State comes and goes in a few calls for any number of keys: the program's stores are open for the batch, and committed with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs
from pyspark.sql.streaming.state import GroupStateTimeout

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.errors import InvalidRequestError, StoreUnavailableError
from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import StateSchema
from spark_jobs.functions.groups import EXISTS, TIMEOUT, Groups, StateColumns, single_chunk
from spark_jobs.functions.state_batch import NO_TIMEOUT, BatchClock, BatchFunction, Mask, StateBatch
from spark_jobs.functions.user_program import UserBatch, UserTask
from spark_jobs.worker.exchange import Received, unpack
from spark_jobs.worker.process import task_identity, worker_client
from store_actors.client.operator_task import BatchHeader, EventTimes, event_times
from store_actors.client.state_store import StateStore
from store_actors.client.worker_client import WorkerClient
from store_actors.messages.requests import BatchFacts, StoreSpec

# Spark's daemon imports this module before it forks its workers: nothing of plans, which import pandas.
if TYPE_CHECKING:
    from spark_jobs.plan.keys import KeyTree
    from spark_jobs.plan.view_components import ViewComponent

#: How often a batch is done again, within the task, whose store actor was lost.
_ATTEMPTS = 3
#: Last column of the rows that an Arrow function gets: the index of their key in the table of keys.
KEY_INDEX = "key_index"
#: Keys for which a function is called at once.
_BLOCK_KEYS = 1 << 17
#: Last column of the rows that a store returns for keys: whether it has the key.
FOUND = "__found"


class UserStateTask(UserTask):
    """A ``mapInArrow`` function from a partition's rows to the rows that the user's program emits."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Do a partition's batch and commit it, then yield: a reader of only a part of its results does not stop it.

        Raises
        ------
        StoreUnavailableError
            The store actor was lost in each attempt.
        """
        received = unpack(batches, self.schema.raw_schema(), self.metadata.state_name)
        if received.header.run is not None:
            # Of continuous queries alone.
            from spark_jobs.functions.epoch_worker import serve

            serve(self, received.header)
            return
        for table in self._repeated(received):
            yield from table.to_batches(max_chunksize=1 << 16)

    def _repeated(self, received: Received) -> list[pa.Table]:
        """Do a batch; again, from the start, if its store actor was lost meanwhile."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._run(received)
            except StoreUnavailableError:
                # Nothing was counted, or what was is found and adopted: the same batch again, on another store actor.
                pass
        return self._run(received)

    def _run(self, received: Received) -> list[pa.Table]:
        """Do a partition's batch and commit it; return the rows that the program emits.

        Raises
        ------
        StoreUnavailableError
            The store actor was lost.
        """
        task, rows = task_identity(self.metadata, received.header), received.rows.raw
        with (
            worker_client(received.header.store_actor) as client,
            self.program.opened(client, task, self.schema) as program,
        ):
            store, grant = client.open_granted(task, self.metadata, program.stores)
            with store:
                times = _times(grant, received.header)
                on_time = self.on_time(rows, times.late_ms)
                batch = UserBatch(on_time, times, task.batch_time_ms or 0, grant.base_version, received.header.shard)
                emitted = program.run(store, batch)
                late = rows.num_rows - on_time.num_rows
                store.commit(BatchFacts(times.after, received.rows.rows_read, late, self.due_per_ms))
        return emitted


def _times(grant: LeaseGrant, header: BatchHeader) -> EventTimes:
    """Return the watermarks of a batch; rows that a program emits later are newer than the operator's own watermark."""
    times = event_times(grant, header.late_ms, header.evict_ms)
    after = times.after
    return replace(times, after=structs.replace(after, output_ms=max(after.output_ms, after.input_ms)))


@dataclass(frozen=True)
class GroupView:
    """Keys and rows as the function sees them."""

    #: Name of each grouping column, and how it is made of the state's leaves.
    keys: tuple[tuple[str, KeyTree], ...]
    #: Name of each column of the DataFrame, and of the column that reaches the shard.
    rows: tuple[tuple[str, str], ...]

    @property
    def leaves(self) -> list[str]:
        return [leaf for _, tree in self.keys for leaf in _leaves(tree)]

    def show_keys(self, part: ViewComponent) -> None:
        """Show readers the keys under the names of their columns."""
        for name, tree in self.keys:
            part.key(name, tree.view_tree())

    def key_columns(self, leaves: pa.Table) -> pa.Table:
        """Return the grouping columns of keys of the state."""
        return pa.table([_value(tree, leaves) for _, tree in self.keys], [name for name, _ in self.keys])

    def of(self, groups: Groups) -> Groups:
        """Return the groups in the function's columns."""
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
    """Calls a user's function for the keys of a block; changes `state` and yields the rows to emit, in the output's columns."""

    def __call__(self, groups: Groups, state: StateBatch) -> Iterator[pa.Table]: ...


@dataclass(frozen=True)
class ArrowCalls:
    """A function of many keys."""

    function: BatchFunction
    output: pa.Schema

    def __call__(self, groups: Groups, state: StateBatch) -> Iterator[pa.Table]:
        """Call the function for the keys of a block; change `state` and yield the rows to emit."""
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
class GroupStateProgram:
    """A function that is called for each key; see :class:`~spark_jobs.functions.user_program.UserProgram`."""

    calls: Calls
    view: GroupView
    columns: StateColumns
    #: Its store, whose keys are the schema's; values are those of `columns`, ``exists`` and ``timeout_us``, by which rows fall due.
    stores: tuple[StoreSpec]
    timeout_conf: str
    has_watermark: bool

    def opened(
        self, client: WorkerClient, task: TaskIdentity, schema: StateSchema
    ) -> AbstractContextManager[GroupStateProgram]:
        """Return itself: nothing has to be made for a batch."""
        return nullcontext(self)

    def run(self, store: StateStore, batch: UserBatch) -> list[pa.Table]:
        times = batch.times
        before = self._clock(batch, times.seen_ms, has_timed_out=False)
        emitted = [*self.process(store, batch.rows, before)]
        after = self._clock(batch, times.after.input_ms, has_timed_out=True)
        return [*emitted, *self.process_timeouts(store, batch.rows.schema, after)]

    def _clock(self, batch: UserBatch, watermark_ms: int, *, has_timed_out: bool) -> BatchClock:
        return BatchClock(self.timeout_conf, watermark_ms if self.has_watermark else None, batch.time_ms, has_timed_out)

    def process(self, store: StateStore, rows: pa.Table, clock: BatchClock) -> Iterator[pa.Table]:
        """Call the function for every key that has rows."""
        groups = Groups.of(rows, self.view.leaves)
        for begin in range(0, len(groups), _BLOCK_KEYS):
            part = groups.part(begin, min(len(groups), begin + _BLOCK_KEYS))
            yield from self._call(store, part, store.multi_get(part.keys), clock)

    def process_timeouts(self, store: StateStore, schema: pa.Schema, clock: BatchClock) -> Iterator[pa.Table]:
        """Call the function for every key that has timed out; `schema` is that of the rows, of which there are none."""
        now_ms = clock.watermark_ms
        if self.timeout_conf == GroupStateTimeout.ProcessingTimeTimeout:
            now_ms = clock.processing_time_ms
        if self.timeout_conf == GroupStateTimeout.NoTimeout or now_ms is None:
            return
        # Spark: a key has timed out once its time is before now.
        due = store.due(now_ms * 1000 - 1)
        due = due.append_column(FOUND, pa.array(np.ones(due.num_rows, np.bool_)))
        for begin in range(0, due.num_rows, _BLOCK_KEYS):
            block = due.slice(begin, _BLOCK_KEYS)
            keys = block.select(self.view.leaves)
            yield from self._call(store, Groups.without_rows(keys, schema), block, clock)

    def _call(self, store: StateStore, groups: Groups, stored: pa.Table, clock: BatchClock) -> Iterator[pa.Table]:
        is_found = _mask(stored.column(FOUND))
        exists = is_found & _mask(stored.column(EXISTS.name))
        former_ms = pc.fill_null(single_chunk(stored.column(TIMEOUT.name)), NO_TIMEOUT * 1000).to_numpy() // 1000
        visible = self.view.of(groups)
        state = StateBatch(self.columns, self.columns.shown(stored), exists, former_ms, groups.offsets, clock)
        yield from self.calls(visible, state)
        self._keep(store, groups.keys, is_found, state)

    def _keep(self, store: StateStore, keys: pa.Table, is_found: Mask, state: StateBatch) -> None:
        written, removed, timeouts_ms = state.outcome()
        if written.any():
            mask = pa.array(written)
            timeouts = pa.array(timeouts_ms * 1000, mask=timeouts_ms == NO_TIMEOUT)
            values = [single_chunk(column) for column in state.values.itercolumns()]
            columns = [*self.columns.held([value.filter(mask) for value in values])]
            columns += [pa.array(state.exists).filter(mask), timeouts.filter(mask)]
            names = [field.name for field in (*self.columns.fields, EXISTS, TIMEOUT)]
            rows = keys.filter(mask)
            store.later("put", pa.table([*rows.columns, *columns], [*rows.column_names, *names]))
        removed = removed & is_found
        if removed.any():
            store.later("remove", keys.filter(pa.array(removed)))

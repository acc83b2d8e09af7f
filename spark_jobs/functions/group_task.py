"""A user's function with state: one partition's keys, rows and timeouts of one batch.

The function runs in Spark's Python worker. State comes and goes in a few calls for any number of keys: one look-up, one put
and one remove a block of keys, one question for the keys that are due, one commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.streaming.state import GroupStateTimeout

from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import StateSchema
from spark_jobs.functions.groups import EXISTS, TIMEOUT, Groups, StateColumns, single_chunk
from spark_jobs.functions.state_batch import NO_TIMEOUT, BatchClock, BatchFunction, Mask, StateBatch
from spark_jobs.functions.user_state_task import UserBatch
from spark_jobs.plan.keys import KeyTree
from spark_jobs.plan.view_components import ViewComponent
from store_actors.client.fleet_client import FleetClient
from store_actors.client.state_store import StateStore
from store_actors.messages.requests import StoreSpec

#: Last column of the rows that an Arrow function gets: the index of their key in the table of keys.
KEY_INDEX = "key_index"
#: Keys for which a function is called at once.
_BLOCK_KEYS = 1 << 17
#: Last column of the rows that a store returns for keys: whether it has the key.
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
        """Return the state's key columns."""
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


@dataclass
class KeyedBatch:
    """The work of a batch of one partition on an open store.

    Parameters
    ----------
    store
        Where state is; see :class:`GroupStateProgram` for its columns.
    """

    store: StateStore
    calls: Calls
    view: GroupView
    columns: StateColumns
    timeout_conf: str

    def process(self, rows: pa.Table, clock: BatchClock) -> Iterator[pa.Table]:
        """Call the function for every key that has rows."""
        groups = Groups.of(rows, self.view.leaves)
        for begin in range(0, len(groups), _BLOCK_KEYS):
            part = groups.part(begin, min(len(groups), begin + _BLOCK_KEYS))
            yield from self._call(part, self.store.multi_get(part.keys), clock)

    def process_timeouts(self, schema: pa.Schema, clock: BatchClock) -> Iterator[pa.Table]:
        """Call the function for every key that has timed out; `schema` is that of the rows, of which there are none."""
        now_ms = clock.watermark_ms
        if self.timeout_conf == GroupStateTimeout.ProcessingTimeTimeout:
            now_ms = clock.processing_time_ms
        if self.timeout_conf == GroupStateTimeout.NoTimeout or now_ms is None:
            return
        # Spark: a key has timed out once its time is before now.
        due = self.store.due(now_ms * 1000 - 1)
        due = due.append_column(FOUND, pa.array(np.ones(due.num_rows, np.bool_)))
        for begin in range(0, due.num_rows, _BLOCK_KEYS):
            block = due.slice(begin, _BLOCK_KEYS)
            keys = block.select(self.view.leaves)
            yield from self._call(Groups.without_rows(keys, schema), block, clock)

    def _call(self, groups: Groups, stored: pa.Table, clock: BatchClock) -> Iterator[pa.Table]:
        is_found = _mask(stored.column(FOUND))
        exists = is_found & _mask(stored.column(EXISTS.name))
        former_ms = pc.fill_null(single_chunk(stored.column(TIMEOUT.name)), NO_TIMEOUT * 1000).to_numpy() // 1000
        visible = self.view.of(groups)
        state = StateBatch(self.columns, self.columns.shown(stored), exists, former_ms, groups.offsets, clock)
        yield from self.calls(visible, state)
        self._keep(groups.keys, is_found, state)

    def _keep(self, keys: pa.Table, is_found: Mask, state: StateBatch) -> None:
        written, removed, timeouts_ms = state.outcome()
        if written.any():
            mask = pa.array(written)
            timeouts = pa.array(timeouts_ms * 1000, mask=timeouts_ms == NO_TIMEOUT)
            values = [single_chunk(column) for column in state.values.itercolumns()]
            columns = [*self.columns.held([value.filter(mask) for value in values])]
            columns += [pa.array(state.exists).filter(mask), timeouts.filter(mask)]
            names = [field.name for field in (*self.columns.fields, EXISTS, TIMEOUT)]
            rows = keys.filter(mask)
            self.store.later("put", pa.table([*rows.columns, *columns], [*rows.column_names, *names]))
        removed = removed & is_found
        if removed.any():
            self.store.later("remove", keys.filter(pa.array(removed)))


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
    """A function that is called for each key; see :class:`~spark_jobs.functions.user_state_task.UserProgram`.

    The store's keys are the schema's; its values are those of `columns`, ``exists`` and ``timeout_us``, by which rows fall due.
    """

    calls: Calls
    view: GroupView
    columns: StateColumns
    timeout_conf: str
    has_watermark: bool

    @contextmanager
    def opened(self, client: FleetClient, task: TaskIdentity, schema: StateSchema) -> Iterator[_OpenFunction]:
        """Yield the function with its store, ready for one batch."""
        yield _OpenFunction(self, (self.columns.group_store(schema.keys),))


@dataclass(frozen=True)
class _OpenFunction:
    """A function with its store, ready for one batch."""

    program: GroupStateProgram
    stores: tuple[StoreSpec, ...]

    def run(self, store: StateStore, batch: UserBatch) -> list[pa.Table]:
        program = self.program
        work = KeyedBatch(store, program.calls, program.view, program.columns, program.timeout_conf)
        times = batch.times
        emitted = [*work.process(batch.rows, self._clock(batch, times.seen_ms, has_timed_out=False))]
        after = self._clock(batch, times.after.input_ms, has_timed_out=True)
        return [*emitted, *work.process_timeouts(batch.rows.schema, after)]

    def _clock(self, batch: UserBatch, watermark_ms: int, *, has_timed_out: bool) -> BatchClock:
        program = self.program
        return BatchClock(
            program.timeout_conf, watermark_ms if program.has_watermark else None, batch.time_ms, has_timed_out
        )

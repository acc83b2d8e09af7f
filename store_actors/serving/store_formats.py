"""Formats of the rows of operators' shards and keyed stores, in memory and in files.

All differences between the two kinds of stores in loading, catching up and viewing are in this module. All other code of a partition
treats its stores alike.

Rows may have been written under another schema. A keyed store (:class:`EvolvingStore`) accepts these changes of value columns:

- A new column must be nullable; older rows have null.
- The values of a dropped column are skipped. If the column is added again, it is a new column.
- A type may become wider.

An aggregation (:func:`groups_adapter`) accepts what :mod:`coordinator.ledger.compatibility` allows. Key columns are fixed, as a row
with another key is another row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.ledger.compatibility import continued, same_state
from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.errors import CorruptStateError, StateMismatchError, VersionNotFoundError
from coordinator.model.identities import StateStoreId
from coordinator.model.load_plans import LoadPlan
from coordinator.model.schema import Accumulator, Field, StateSchema
from coordinator.model.type_names import is_wider, type_to_string
from store_actors.engine.memory import HEAP, Memory
from store_actors.engine.table import GroupTable
from store_actors.engine.table_view import ShardView
from store_actors.engine.versions import CHANGE_COLUMN, VersionedStore
from store_actors.keyed.shard import KeyedShard
from store_actors.messages.requests import StoreSpec
from store_actors.operators.make_shard import OperatorShard, make_shard, view_of
from store_actors.serving.files import schema_of
from store_actors.serving.loading import IN_MEMORY, Adapt, InMemory, Loader

#: The schema of an operator's shard, or the name and columns of a keyed store.
StoreDefinition: TypeAlias = StateSchema | StoreSpec


def groups_adapter(plan: LoadPlan, schema: StateSchema) -> Callable[[pa.Table, str], pa.Table]:
    """Return a function that converts the rows of an aggregation's file, whose name is its second argument, to a query's schema.

    It applies the query's schemas one after the other. So an aggregate that was dropped and added again starts from its initial value,
    regardless of the file in which its group was written last.
    """
    later: list[tuple[int, StateSchema]] = []
    epochs: dict[str, int] = {}
    for part in plan.parts():
        later += [(epoch, step) for epoch, step in part.schemas if epoch not in dict(later)]
        epoch_of = {entry.version: entry.epoch for entry in part.deltas}
        epochs |= {entry.file: entry.epoch for entry in part.deltas}
        epochs |= {snapshot.file: epoch_of[snapshot.version] for snapshot in part.snapshots}
    later.sort(key=itemgetter(0))

    def adapt(rows: pa.Table, file: str) -> pa.Table:
        if file == IN_MEMORY:
            return rows
        written = schema_of(rows)
        for step in [*(later_schema for epoch, later_schema in later if epoch > epochs[file]), schema]:
            rows, written = evolve_groups(rows, written, step, file), step
        return rows

    return adapt


class EvolvingStore:
    """A keyed store that is being loaded from its files in order; each file may have other columns.

    A version that was written without a column has dropped it. Values of that column in older files are ignored, of any type. A row
    has null there until it is written with the column again. So the result does not depend on which versions have snapshots.
    """

    def __init__(self, make: Callable[[], KeyedShard], spec: StoreSpec) -> None:
        self._make, self._spec = make, spec

    def restart(self) -> EvolvingStore:
        """Drop what was loaded so far, and begin with an empty store."""
        self._shard = self._make()
        #: Columns that the current file lacks, and columns that earlier files have.
        self._absent_columns: set[str] = set()
        self._loaded_columns: set[str] = set()
        #: Errors of columns whose type in a file cannot be converted. They do not matter if a later file has dropped the column.
        self._mismatches: dict[str, StateMismatchError] = {}
        return self

    def reserve(self, room: Mapping[str, Any]) -> None:
        """Allocate memory for a snapshot's rows; see :meth:`VersionedStore.reserve`."""
        self._shard.reserve(room)

    def adapted(self, rows: pa.Table, file: str) -> pa.Table:
        """Return the rows of the next file in the current columns; ``__change`` is the last column.

        Raises
        ------
        StateMismatchError
            The file has other key columns, or lacks a column that is not nullable.
        """
        columns = _Columns(rows, self._spec.keys, self._spec.values, file)
        self._absent_columns = {field.name for field in self._spec.values if field.name not in columns.written}
        self._mismatches = {name: error for name, error in self._mismatches.items() if name not in self._absent_columns}
        mismatches = columns.mismatches()
        self._mismatches |= mismatches
        return columns.adapted(leave_out=mismatches.keys())

    def load(self, delta: pa.Table, version: int, watermark_ms: int) -> None:
        """Replay the rows of a file, as :meth:`adapted` returned them."""
        if dropped := self._absent_columns & self._loaded_columns:
            self._shard.clear_columns(dropped)
        self._shard.load(delta, version, watermark_ms)
        self._loaded_columns |= {field.name for field in self._spec.values} - self._absent_columns
        self._loaded_columns -= dropped

    def loaded(self) -> KeyedShard:
        """Return the store; to be called once all files are loaded.

        Raises
        ------
        StateMismatchError
            A column cannot be converted to its current type.
        """
        for error in self._mismatches.values():
            raise error
        return self._shard


def evolve_groups(rows: pa.Table, written: StateSchema, schema: StateSchema, file: str) -> pa.Table:
    """Convert the rows of an aggregation's file from the schema `written` to another schema; ``__change`` is the last column.

    Raises
    ------
    StateMismatchError
        The two schemas are not compatible; the error shows both.
    """
    same_keys = [(field.name, field.type) for field in written.keys] == [
        (field.name, field.type) for field in schema.keys
    ]
    if same_keys and same_state(written, schema):
        return rows
    try:
        if not same_keys:
            raise ValueError("its key columns are fixed")
        indices = continued(written.accumulators, schema.accumulators)
    except ValueError as error:
        raise _groups_mismatch(error, written, schema, file) from error
    # The initial row is repeated for every row of the file.
    initial, first = _initial_group(schema), np.zeros(rows.num_rows, np.int64)
    columns = [rows.column(field.name) for field in schema.keys]
    for accumulator, index in zip(schema.accumulators, indices, strict=True):
        if index is None:
            columns += [initial.column(field.name).take(first) for field in accumulator.state]
        else:
            columns += _continued(rows, written.accumulators[index], accumulator)
    return pa.table(
        [*columns, rows.column(CHANGE_COLUMN)], schema=schema.row_schema().append(rows.schema.field(CHANGE_COLUMN))
    )


def _continued(rows: pa.Table, previous: Accumulator, new: Accumulator) -> Iterator[pa.ChunkedArray]:
    kinds = previous.kind, new.kind
    if kinds == (AccumulatorKind.SUM_INT, AccumulatorKind.SUM_INT_CHECKED):
        # A checked sum begins with 0, and says beside it whether a value came; the other one is null until then.
        total = rows.column(previous.state[0].name)
        yield from (total.fill_null(0), total.is_null())
        return
    if kinds == (AccumulatorKind.SUM_INT_CHECKED, AccumulatorKind.SUM_INT):
        total, is_empty = (rows.column(field.name) for field in previous.state)
        yield pc.if_else(is_empty, None, total)
        return
    for before, after in zip(previous.state, new.state, strict=True):
        yield rows.column(before.name).cast(after.arrow().type)


def _initial_group(schema: StateSchema) -> pa.Table:
    """Return one row with the initial values of all accumulators, as the engine makes it; its keys have no meaning."""
    table = GroupTable(schema, capacity=1)
    return table.decode(table.layout.initial.reshape(1, -1))


class _Columns:
    """The columns of a keyed store's file, compared with the requested columns."""

    def __init__(self, rows: pa.Table, keys: Sequence[Field], values: Sequence[Field], file: str) -> None:
        self._rows, self._keys, self._values, self._file = rows, keys, values, file
        self.written = {field.name: type_to_string(field.type) for field in rows.schema if field.name != CHANGE_COLUMN}
        if any(self.written.get(field.name) != field.type for field in keys):
            raise self._mismatch("its key columns are fixed")
        for field in values:
            if field.name not in self.written and not field.nullable:
                raise self._mismatch(f"the new column {field.name} must be nullable")

    def mismatches(self) -> dict[str, StateMismatchError]:
        """Return an error for each column whose type cannot be converted to the requested type, by name."""
        return {
            field.name: self._mismatch(f"column {field.name} cannot become {field.type}")
            for field in self._values
            if field.name in self.written and not is_wider(self.written[field.name], field.type)
        }

    def adapted(self, leave_out: Collection[str] = ()) -> pa.Table:
        """Return the requested columns, with nulls in columns that the file lacks and in those to leave out."""
        columns = [self._rows.column(field.name) for field in self._keys]
        for field in self._values:
            if field.name in self.written and field.name not in leave_out:
                columns.append(self._rows.column(field.name).cast(field.arrow().type))
            else:
                columns.append(pa.chunked_array([pa.nulls(self._rows.num_rows, field.arrow().type)]))
        fields = [field.arrow() for field in (*self._keys, *self._values)]
        return pa.table(
            [*columns, self._rows.column(CHANGE_COLUMN)],
            schema=pa.schema([*fields, self._rows.schema.field(CHANGE_COLUMN)]),
        )

    def _mismatch(self, reason: str) -> StateMismatchError:
        requested = (*self._keys, *self._values)
        return StateMismatchError(
            f"the store was written with another schema: {reason}; nothing was changed; ask for the columns that are there, with "
            "new nullable ones, fewer, or wider types",
            written=", ".join(f"{name} {kind}" for name, kind in self.written.items()),
            asked=", ".join(f"{field.name} {field.type}" for field in requested),
            keys=[field.name for field in self._keys],
            file=self._file,
        )


def _groups_mismatch(reason: ValueError, written: StateSchema, schema: StateSchema, file: str) -> StateMismatchError:
    def described(schema: StateSchema) -> str:
        fields = ", ".join(f"{field.name} {field.type}" for field in schema.keys)
        state = (
            f"{item.meaning or item.kind} {' '.join(field.type for field in item.state)}"
            for item in schema.accumulators
        )
        return f"{fields}; {', '.join(state)}"

    return StateMismatchError(
        f"a file of the state cannot be read in the query's schema: {reason}; nothing was changed; restore the query that wrote "
        "it, or use another name for the new one",
        written=described(written),
        asked=described(schema),
        file=file,
    )


class OperatorFormat:
    """The format of an operator's shard. A changed query reads the rows of its earlier definitions if they are compatible."""

    def __init__(self, schema: StateSchema, seed: int, memory: Memory) -> None:
        self.definition = self.schema = schema
        self._seed, self._memory = seed, memory

    def empty(self) -> OperatorShard:
        """Return a store without rows."""
        return make_shard(self.schema, self._seed, self._memory)

    def load(self, loader: Loader, plan: LoadPlan, in_memory: InMemory | None = None) -> tuple[VersionedStore, int]:
        """Return a store at the plan's version, and how many deltas were replayed; see :meth:`Loader.load`."""
        return loader.load(self.empty, plan, self.adapter(plan), in_memory)

    def catch_up(self, loader: Loader, store: VersionedStore, plan: LoadPlan, version: int) -> int | None:
        """Apply the plan's deltas after `version`; return their number, or None if a delta has other columns than the store."""
        return loader.replay(store, plan, version, self.adapter(plan))

    def has_columns_of(self, rows: pa.Table) -> bool:
        """Return whether a delta's rows have exactly the columns of the store."""
        return schema_of(rows) == self.schema

    def view(self, store: VersionedStore, version: int) -> ShardView:
        """Return a view of a retained version of a store."""
        return view_of(store, version)

    def adapter(self, plan: LoadPlan) -> Adapt:
        """Return a function that converts the rows of a plan's file to the store's columns."""
        return groups_adapter(plan, self.schema)

    def adopted(self, rows: pa.Table, file: str) -> pa.Table:
        """Convert the rows of another attempt's delta to the store's columns."""
        # All attempts of a run have one schema.
        return rows


class _OtherColumnsError(Exception):
    """A delta was written with other columns than the store in memory has."""


class KeyedFormat:
    """The format of a keyed store; its methods are those of :class:`OperatorFormat`."""

    def __init__(self, spec: StoreSpec, seed: int, memory: Memory) -> None:
        self.definition = spec
        self._seed, self._memory = seed, memory

    @cached_property
    def schema(self) -> StateSchema:
        return StateSchema.keyed(self.definition.keys, self.definition.values)

    def empty(self) -> KeyedShard:
        spec = self.definition
        return KeyedShard(spec.keys, spec.values, spec.due, self._seed, self._memory)

    def load(self, loader: Loader, plan: LoadPlan, in_memory: InMemory | None = None) -> tuple[VersionedStore, int]:
        evolving = EvolvingStore(self.empty, self.definition)
        _, replayed = loader.load(evolving.restart, plan, evolving.adapted, in_memory)
        return evolving.loaded(), replayed

    def catch_up(self, loader: Loader, store: VersionedStore, plan: LoadPlan, version: int) -> int | None:
        def check_columns(rows: pa.Table, _: str) -> pa.Table:
            if self.has_columns_of(rows):
                return rows
            raise _OtherColumnsError

        try:
            return loader.replay(store, plan, version, check_columns)
        except _OtherColumnsError:
            return None

    def has_columns_of(self, rows: pa.Table) -> bool:
        return bool(rows.drop_columns([CHANGE_COLUMN]).schema.equals(self.schema.row_schema()))

    def view(self, store: VersionedStore, version: int) -> ShardView:
        assert isinstance(store, KeyedShard)
        return store.view(version)

    def adapter(self, plan: LoadPlan) -> Adapt:
        return self.adopted

    def adopted(self, rows: pa.Table, file: str) -> pa.Table:
        """Convert the rows of a delta or snapshot file to the store's columns; ``__change`` is the last column.

        Raises
        ------
        StateMismatchError
            The two schemas are not compatible; the error shows both.
        """
        columns = _Columns(rows, self.definition.keys, self.definition.values, file)
        for error in columns.mismatches().values():
            raise error
        return columns.adapted()


StoreFormat: TypeAlias = OperatorFormat | KeyedFormat


def store_format(definition: StoreDefinition, seed: int, memory: Memory = HEAP) -> StoreFormat:
    """Return the format of a store; for `seed` and `memory` see :class:`~store_actors.engine.word_rows.WordRows`."""
    if isinstance(definition, StoreSpec):
        return KeyedFormat(definition, seed, memory)
    return OperatorFormat(definition, seed, memory)


def newest_spec(loader: Loader, plan: LoadPlan, store_id: StateStoreId) -> StoreSpec:
    """Return a keyed store's name and the columns of its newest file.

    If the newest version has a delta and a snapshot and one of them is damaged, the columns are read from the other.

    Raises
    ------
    VersionNotFoundError
        The partition has no such store at the version.
    CorruptStateError
        The newest files are missing or damaged.
    """
    entries: list[CommitEntry | SnapshotEntry] = [*plan.deltas, *plan.snapshots]
    for parent in () if entries or plan.origin is None else plan.origin.parents:
        entries += [*parent.plan.deltas, *parent.plan.snapshots]
    if not entries:
        raise VersionNotFoundError(
            "the partition has no such store at this version",
            state=store_id.state_name,
            partition=store_id.partition_id,
            store=store_id.store_name,
        )
    newest = max(entry.version for entry in entries)
    first, *further = (entry for entry in entries if entry.version == newest)
    try:
        written = schema_of(loader.read(first))
    except CorruptStateError:
        if not further:
            raise
        written = schema_of(loader.read(further[-1]))
    return StoreSpec(store_id.store_name, written.keys, written.state_fields)

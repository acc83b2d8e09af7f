"""Reading rows that were written under another schema.

A keyed store (:class:`EvolvingStore`) accepts these changes of value columns:

- A new column must be nullable; older rows have null.
- The values of a dropped column are skipped. If the column is added again, it is a new column.
- A type may become wider.

An aggregation (:func:`groups_adapter`) accepts what :mod:`coordinator.ledger.compatibility` allows. Key columns are fixed, as a row
with another key is another row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.ledger.compatibility import continued, same_state
from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.errors import StateMismatchError
from coordinator.model.load_plans import LoadPlan
from coordinator.model.schema import Accumulator, Field, StateSchema
from coordinator.model.type_names import is_wider, type_to_string
from store_actors.engine.table import GroupTable
from store_actors.engine.versions import CHANGE_COLUMN
from store_actors.keyed.shard import KeyedShard
from store_actors.messages.requests import StoreSpec
from store_actors.serving.files import schema_of
from store_actors.serving.loading import IN_MEMORY


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


def evolve(rows: pa.Table, keys: Sequence[Field], values: Sequence[Field], file: str) -> pa.Table:
    """Convert the rows of a delta or snapshot file to the current columns of a store; ``__change`` is the last column.

    Raises
    ------
    StateMismatchError
        The two schemas are not compatible; the error shows both.
    """
    columns = _Columns(rows, keys, values, file)
    for error in columns.mismatches().values():
        raise error
    return columns.adapted()


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

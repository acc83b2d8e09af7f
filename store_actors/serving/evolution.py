"""Reading rows that were written under another schema.

Of a keyed store (:class:`EvolvingStore`) is accepted: a value column that is new and nullable (older rows have null), one that is gone
(older values are left out; should it come back, it is new), and one whose type has become wider. Of an aggregation
(:func:`groups_adapter`): what :mod:`coordinator.ledger.compatibility` lets a query change. Keys are fixed: a row under another key
is another row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from coordinator.ledger.compatibility import continued, same_state
from coordinator.model.errors import StateMismatchError
from coordinator.model.load_plans import LoadPlan
from coordinator.model.schema import Accumulator, Field, StateSchema
from coordinator.model.type_names import is_wider, type_to_string
from store_actors.engine.table import GroupTable
from store_actors.engine.versions import CHANGE_COLUMN
from store_actors.keyed.shard import KeyedShard
from store_actors.messages import StoreSpec
from store_actors.serving.files import schema_of
from store_actors.serving.loading import IN_MEMORY

__all__ = ["EvolvingStore", "evolve", "evolve_groups", "groups_adapter"]


def groups_adapter(plan: LoadPlan, schema: StateSchema) -> Callable[[pa.Table, str], pa.Table]:
    """Return what turns the rows of a file of an aggregation (named second) into a query's schema.

    It goes the way that the query went, one schema after the other: an aggregate that was gone for a while starts from nothing when
    it is back, in whichever file its group was written last.
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
    """A keyed store that is loaded from its files, one after the other, of which each may have columns of its own.

    A version that was written without a column has dropped it: what older files have of it counts no more, also with another type; a
    row has null there until it is written with the column again. So it is the same whether a snapshot was made meanwhile or not.

    Parameters
    ----------
    make
        Makes the store without rows.
    spec
        The store's present columns.
    """

    def __init__(self, make: Callable[[], KeyedShard], spec: StoreSpec) -> None:
        self._make, self._spec = make, spec

    def restart(self) -> EvolvingStore:
        """Drop what was loaded until now, and begin with a store without rows."""
        self._shard = self._make()
        #: Columns that the file at hand does not have, and those that the files before had.
        self._gone: set[str] = set()
        self._held: set[str] = set()
        #: Columns whose type in a file does not go with the present one: no harm where a later file has dropped them.
        self._unfit: dict[str, StateMismatchError] = {}
        return self

    def reserve(self, room: Mapping[str, Any]) -> None:
        """Make room for a snapshot."""
        self._shard.reserve(room)

    def adapted(self, rows: pa.Table, file: str) -> pa.Table:
        """Rows of the next file in the present columns, ``__change`` last.

        Raises
        ------
        StateMismatchError
            Its keys are others, or it lacks a column that is never null.
        """
        columns = _Columns(rows, self._spec.keys, self._spec.values, file)
        self._gone = {field.name for field in self._spec.values if field.name not in columns.written}
        self._unfit = {name: error for name, error in self._unfit.items() if name not in self._gone}
        unfit = columns.unfit()
        self._unfit |= unfit
        return columns.adapted(leave_out=unfit.keys())

    def load(self, delta: pa.Table, version: int, watermark_ms: int) -> None:
        """Replay what :meth:`adapted` made of a file."""
        if gone := self._gone & self._held:
            self._shard.clear_columns(gone)
        self._shard.load(delta, version, watermark_ms)
        self._held |= {field.name for field in self._spec.values} - self._gone
        self._held -= gone

    def loaded(self) -> KeyedShard:
        """The store, once all files are loaded.

        Raises
        ------
        StateMismatchError
            A column cannot become what it is asked for as.
        """
        for error in self._unfit.values():
            raise error
        return self._shard


def evolve_groups(rows: pa.Table, written: StateSchema, schema: StateSchema, file: str) -> pa.Table:
    """Rows of an aggregation's file, as `written`, in the columns of another schema, ``__change`` last.

    Raises
    ------
    StateMismatchError
        The two schemas do not go together; shows both.
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
    # One row, as often as there are rows.
    beginning, first = _beginning(schema), np.zeros(rows.num_rows, np.int64)
    columns = [rows.column(field.name) for field in schema.keys]
    for accumulator, index in zip(schema.accumulators, indices, strict=True):
        if index is None:
            columns += [beginning.column(field.name).take(first) for field in accumulator.state]
        else:
            columns += _continued(rows, written.accumulators[index], accumulator)
    return pa.table(
        [*columns, rows.column(CHANGE_COLUMN)], schema=schema.row_schema().append(rows.schema.field(CHANGE_COLUMN))
    )


def _continued(rows: pa.Table, former: Accumulator, new: Accumulator) -> Iterator[pa.ChunkedArray]:
    for before, after in zip(former.state, new.state, strict=True):
        yield rows.column(before.name).cast(after.arrow().type)


def _beginning(schema: StateSchema) -> pa.Table:
    """A group that nothing was accumulated in, as the engine itself makes it: one row, whose keys say nothing."""
    table = GroupTable(schema, capacity=1)
    return table.decode(table.layout.initial.reshape(1, -1))


def evolve(rows: pa.Table, keys: Sequence[Field], values: Sequence[Field], file: str) -> pa.Table:
    """Rows of a delta or snapshot file in the columns of a store's present schema, ``__change`` last.

    Raises
    ------
    StateMismatchError
        The two schemas do not go together; shows both.
    """
    columns = _Columns(rows, keys, values, file)
    for error in columns.unfit().values():
        raise error
    return columns.adapted()


class _Columns:
    """The columns of a keyed store's file beside those that are asked for."""

    def __init__(self, rows: pa.Table, keys: Sequence[Field], values: Sequence[Field], file: str) -> None:
        self._rows, self._keys, self._values, self._file = rows, keys, values, file
        self.written = {field.name: type_to_string(field.type) for field in rows.schema if field.name != CHANGE_COLUMN}
        if any(self.written.get(field.name) != field.type for field in keys):
            raise self._mismatch("its key columns are fixed")
        for field in values:
            if field.name not in self.written and not field.nullable:
                raise self._mismatch(f"the new column {field.name} must be nullable")

    def unfit(self) -> dict[str, StateMismatchError]:
        """Columns that cannot become what is asked for."""
        return {
            field.name: self._mismatch(f"column {field.name} cannot become {field.type}")
            for field in self._values
            if field.name in self.written and not is_wider(self.written[field.name], field.type)
        }

    def adapted(self, leave_out: Collection[str] = ()) -> pa.Table:
        """Return the columns asked for; null in columns that the file has not, and in those to leave out."""
        columns = [self._rows.column(field.name) for field in self._keys]
        for field in self._values:
            if field.name in self.written and field.name not in leave_out:
                columns.append(self._rows.column(field.name).cast(field.arrow().type))
            else:
                columns.append(pa.chunked_array([pa.nulls(self._rows.num_rows, field.arrow().type)]))
        named = [field.arrow() for field in (*self._keys, *self._values)]
        return pa.table(
            [*columns, self._rows.column(CHANGE_COLUMN)],
            schema=pa.schema([*named, self._rows.schema.field(CHANGE_COLUMN)]),
        )

    def _mismatch(self, reason: str) -> StateMismatchError:
        asked = (*self._keys, *self._values)
        return StateMismatchError(
            f"the store was written with another schema: {reason}; nothing was changed; ask for the columns that are there, with "
            "new nullable ones, fewer, or wider types",
            written=", ".join(f"{name} {kind}" for name, kind in self.written.items()),
            asked=", ".join(f"{field.name} {field.type}" for field in asked),
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

"""Reading rows that were written under another schema.

Of a keyed store (:func:`columns_adapter`) is accepted: a value column that is new and nullable (older rows have null), one that is gone
(older values are left out), and one whose type has become wider. Of an aggregation (:func:`groups_adapter`): what
:mod:`coordinator.compatibility` lets a query change. Keys are fixed: a row under another key is another row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from coordinator.compatibility import continued, is_wider, same_state
from coordinator.errors import StateMismatchError
from coordinator.model import LoadPlan
from store_actors.engine.table import GroupTable
from store_actors.engine.versions import CHANGE_COLUMN
from store_actors.messages import StoreSpec
from store_actors.schema import Accumulator, Field, StateSchema, type_to_string
from store_actors.serving.files import schema_of

__all__ = ["columns_adapter", "evolve", "evolve_groups", "groups_adapter"]


def groups_adapter(plan: LoadPlan, schema: StateSchema) -> Callable[[pa.Table, str], pa.Table]:
    """What turns the rows of a file of an aggregation (named second) into a query's schema.

    It goes the way that the query went, one schema after the other: an aggregate that was gone for a while starts from nothing when
    it is back, wherever its group was written last.
    """
    later = [(epoch, StateSchema.from_json(data)) for epoch, data in plan.schemas]
    made = {entry.version: entry.epoch for entry in plan.deltas}
    epochs = {entry.file: entry.epoch for entry in plan.deltas}
    epochs |= {snapshot.file: made[snapshot.version] for snapshot in plan.snapshots}

    def adapt(rows: pa.Table, file: str) -> pa.Table:
        written = schema_of(rows)
        for step in [*(one for epoch, one in later if epoch > epochs[file]), schema]:
            rows, written = evolve_groups(rows, written, step, file), step
        return rows

    return adapt


def columns_adapter(spec: StoreSpec) -> Callable[[pa.Table, str], pa.Table]:
    """What turns the rows of a keyed store's file (named second) into its present columns."""
    return lambda rows, file: evolve(rows, spec.keys, spec.values, file)


def evolve_groups(rows: pa.Table, written: StateSchema, schema: StateSchema, file: str) -> pa.Table:
    """Rows of an aggregation's file, as `written`, in the columns of another schema, ``__change`` last.

    Raises
    ------
    StateMismatchError
        The two schemas do not go together; shows both.
    """
    former, new = written.to_json(), schema.to_json()
    same_keys = [(field.name, field.type) for field in written.keys] == [
        (field.name, field.type) for field in schema.keys
    ]
    if same_keys and same_state(former, new):
        return rows
    try:
        if not same_keys:
            raise ValueError("its key columns are fixed")
        places = continued(former["accumulators"], new["accumulators"])
    except ValueError as error:
        raise _groups_mismatch(error, written, schema, file) from error
    # One row, as often as there are rows.
    beginning, first = _beginning(schema), np.zeros(rows.num_rows, np.int64)
    columns = [rows.column(field.name) for field in schema.keys]
    for accumulator, place in zip(schema.accumulators, places, strict=True):
        if place is None:
            columns += [beginning.column(field.name).take(first) for field in accumulator.state]
        else:
            columns += _continued(rows, written.accumulators[place], accumulator)
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
    written = {field.name: type_to_string(field.type) for field in rows.schema if field.name != CHANGE_COLUMN}
    if any(written.get(field.name) != field.type for field in keys):
        raise _mismatch("its key columns are fixed", written, keys, values, file)
    columns = [rows.column(field.name) for field in keys]
    for field in values:
        former = written.get(field.name)
        if former is None and not field.nullable:
            raise _mismatch(f"the new column {field.name} must be nullable", written, keys, values, file)
        if former is None:
            columns.append(pa.chunked_array([pa.nulls(rows.num_rows, field.arrow().type)]))
        elif is_wider(former, field.type):
            columns.append(rows.column(field.name).cast(field.arrow().type))
        else:
            raise _mismatch(f"column {field.name} cannot become {field.type}", written, keys, values, file)
    named = [field.arrow() for field in (*keys, *values)]
    return pa.table(
        [*columns, rows.column(CHANGE_COLUMN)], schema=pa.schema([*named, rows.schema.field(CHANGE_COLUMN)])
    )


def _groups_mismatch(reason: ValueError, written: StateSchema, schema: StateSchema, file: str) -> StateMismatchError:
    def told(one: StateSchema) -> str:
        fields = ", ".join(f"{field.name} {field.type}" for field in one.keys)
        state = (
            f"{item.meaning or item.kind} {' '.join(field.type for field in item.state)}" for item in one.accumulators
        )
        return f"{fields}; {', '.join(state)}"

    return StateMismatchError(
        f"a file of the state cannot be read in the query's schema: {reason}; nothing was changed; restore the query that wrote "
        "it, or use another name for the new one",
        written=told(written),
        asked=told(schema),
        file=file,
    )


def _mismatch(
    reason: str, written: dict[str, str], keys: Sequence[Field], values: Sequence[Field], file: str
) -> StateMismatchError:
    return StateMismatchError(
        f"the store was written with another schema: {reason}; nothing was changed; ask for the columns that are there, with "
        "new nullable ones, fewer, or wider types",
        written=", ".join(f"{name} {kind}" for name, kind in written.items()),
        asked=", ".join(f"{field.name} {field.type}" for field in (*keys, *values)),
        keys=[field.name for field in keys],
        file=file,
    )

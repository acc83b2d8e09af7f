"""Reading rows that were written under another schema of a keyed store.

Accepted: a value column that is new and nullable (older rows have null), one that is gone (older values are left out), and one
whose type has become wider. Keys are fixed: a row under another key is another row.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from coordinator.errors import StateMismatchError
from store_actors.schema import Field, type_to_string
from store_actors.versions import CHANGE_COLUMN

__all__ = ["evolve"]

_WIDER = {
    "int8": ("int16", "int32", "int64", "float32", "float64"),
    "int16": ("int32", "int64", "float32", "float64"),
    "int32": ("int64", "float64"),
    "float32": ("float64",),
}


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
        elif former == field.type or _is_wider(former, field.type):
            columns.append(rows.column(field.name).cast(field.arrow().type))
        else:
            raise _mismatch(f"column {field.name} cannot become {field.type}", written, keys, values, file)
    named = [field.arrow() for field in (*keys, *values)]
    return pa.table(
        [*columns, rows.column(CHANGE_COLUMN)], schema=pa.schema([*named, rows.schema.field(CHANGE_COLUMN)])
    )


def _is_wider(former: str, new: str) -> bool:
    if former.startswith("decimal(") and new.startswith("decimal("):
        (precision, scale), (wide, same) = (name[8:-1].split(",") for name in (former, new))
        return int(wide) >= int(precision) and same == scale
    return new in _WIDER.get(former, ())


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

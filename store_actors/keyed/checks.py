"""What a caller gives to a keyed store: batches, which are checked before a word of it is changed, and conditions over its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import Field
from coordinator.model.type_names import string_to_type
from store_actors.engine.arrays import Mask
from store_actors.engine.pieces import batches

Rows: TypeAlias = "pa.RecordBatch | pa.Table"
#: A ``pyarrow.compute`` expression over key and value columns, or a function that gives a boolean for every row of a batch.
Condition: TypeAlias = "pc.Expression | Callable[[pa.RecordBatch], pa.Array | Mask]"

_ROW = "__row"


def checked_table(rows: Rows, fields: Sequence[Field]) -> pa.Table:
    """Return the `fields` of a batch or table, in their order, in as few chunks as Arrow can, without further columns.

    Raises
    ------
    InvalidRequestError
        A column is missing or there twice, has another type, or holds nulls that its field does not allow. Names the
        column and both types.
    """
    if not isinstance(rows, pa.Table | pa.RecordBatch):
        raise InvalidRequestError("rows are given as an Arrow table or record batch", got=type(rows).__name__)
    for field in fields:
        _check_column(rows, field)
    table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    chosen = table.select([field.name for field in fields])
    return pa.Table.from_batches(batches(chosen), chosen.schema)


def _check_column(rows: Rows, field: Field) -> None:
    places = rows.schema.get_all_field_indices(field.name)
    if len(places) != 1:
        raise InvalidRequestError(
            "rows for a keyed store need each of its columns once; nothing was changed; add or rename the column",
            column=field.name,
            type=field.type,
            times=len(places),
            got={present.name: str(present.type) for present in rows.schema},
        )
    column = rows.column(places[0])
    if not _same_type(column.type, string_to_type(field.type)):
        raise InvalidRequestError(
            "a column for a keyed store has another type than the store; nothing was changed; cast it",
            column=field.name,
            type=field.type,
            got=str(column.type),
        )
    if not field.nullable and column.null_count:
        raise InvalidRequestError(
            "a column for a keyed store that is never null has nulls; nothing was changed; fill or drop them",
            column=field.name,
            type=field.type,
            nulls=column.null_count,
        )


def _same_type(got: pa.DataType, expected: pa.DataType) -> bool:
    """Return whether the types are equal; a timestamp may be in any zone, because its instant is the same in all."""
    if pa.types.is_timestamp(got) and pa.types.is_timestamp(expected):
        return got.unit == expected.unit and (got.tz is None) == (expected.tz is None)
    return bool(got == expected)


def key_batch(key: Sequence[object], fields: Sequence[Field]) -> pa.RecordBatch:
    """Return a batch of the one key whose parts are given in the order of the fields.

    Raises
    ------
    InvalidRequestError
        The key has another number of parts, or a part that its field's type cannot hold.
    """
    if len(key) != len(fields):
        raise InvalidRequestError(
            "a key has one part for each key column", key=key, columns=[field.name for field in fields]
        )
    arrays = [
        value_array(part, string_to_type(field.type), field.name) for part, field in zip(key, fields, strict=True)
    ]
    return pa.record_batch(arrays, names=[field.name for field in fields])


def value_array(value: object, data_type: pa.DataType, column: str) -> pa.Array:
    """Return an array of one value.

    Raises
    ------
    InvalidRequestError
        The type cannot hold it.
    """
    plain = value.as_py() if isinstance(value, pa.Scalar) else value
    try:
        return pa.array([plain], data_type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(
            f"a value does not fit its column ({error}); nothing was changed",
            column=column,
            type=str(data_type),
            value=value,
        ) from error


def matches(condition: Condition, batch: pa.RecordBatch) -> Mask:
    """Return the rows for which the condition is true; null is not true.

    Raises
    ------
    InvalidRequestError
        The expression names an unknown column or does not give booleans, or the function gives something else than one
        boolean for every row.
    """
    if isinstance(condition, pc.Expression):
        return _matches_expression(condition, batch)
    answer = condition(batch)
    array = answer.combine_chunks() if isinstance(answer, pa.ChunkedArray) else pa.array(answer)
    if not pa.types.is_boolean(array.type) or len(array) != batch.num_rows:
        raise InvalidRequestError(
            "a condition gives one boolean for every row of the batch; nothing was removed",
            type=str(array.type),
            got=len(array),
            rows=batch.num_rows,
        )
    return np.asarray(array.fill_null(False).to_numpy(zero_copy_only=False), np.bool_)


def _matches_expression(condition: pc.Expression, batch: pa.RecordBatch) -> Mask:
    numbered = pa.Table.from_batches([batch]).append_column(_ROW, pa.array(np.arange(batch.num_rows)))
    try:
        kept = numbered.filter(condition).column(_ROW)
    except (pa.ArrowException, TypeError) as error:
        raise InvalidRequestError(
            f"a condition cannot be evaluated ({error}); nothing was removed; use the store's columns",
            columns=batch.schema.names,
        ) from error
    mask = np.zeros(batch.num_rows, np.bool_)
    mask[kept.to_numpy()] = True
    return mask

"""Conditions over the rows of a keyed store: Arrow expressions, or functions from a batch to booleans."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.errors import InvalidRequestError
from store_actors.engine.arrays import Mask

#: A ``pyarrow.compute`` expression over key and value columns, or a function that gives a boolean for every row of a batch.
Condition: TypeAlias = "pc.Expression | Callable[[pa.RecordBatch], pa.Array | Mask]"

_ROW = "__row"


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

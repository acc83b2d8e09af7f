"""Schema of a ``topN`` or ``keepLast`` operator (``top.py``). Light to import: the driver has no need of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import ROW_COLUMN, Accumulator, Field, OperatorKind, StateSchema

#: Place of a row in its partition, from 1.
RANK_COLUMN = "rank"


def top_schema(
    partition: Sequence[Field],
    columns: Sequence[Field],
    n: int,
    order: Sequence[Mapping[str, Any]],
    *,
    order_columns: Sequence[Field] = (),
    ties: str = "first",
    rank: bool = True,
    expiry: str | None = None,
    delay_ms: int | None = None,
) -> StateSchema:
    """Return the schema of a ``topN``, or with ``n=1, ties="last", rank=False`` of a ``keepLast``.

    Parameters
    ----------
    partition, columns
        Key leaves and the other columns of a row.
    order
        See :class:`~store_actors.engine.ordering.RowOrder`; names columns and order columns.
    order_columns
        What is ordered by and not emitted.
    ties
        Which of rows that are equal in the order is first: the one that came "first" or "last".
    expiry
        Timestamp column or key leaf that rows expire by.

    Raises
    ------
    InvalidRequestError
        `n` is less than 1, or `ties` is neither.
    """
    if n < 1 or ties not in ("first", "last"):
        raise InvalidRequestError(
            "a top keeps at least one row and breaks ties for the first or the last row; "
            "nothing was changed; correct the options",
            n=n,
            ties=ties,
        )
    inputs = (*columns, *order_columns)
    stored = (*inputs, Field(RANK_COLUMN, "int32")) if rank else inputs
    return StateSchema(
        keys=(*partition, Field(ROW_COLUMN, "int64", False)),
        inputs=inputs,
        accumulators=tuple(Accumulator(AccumulatorKind.VALUE, (), (field,)) for field in stored),
        expiry_key=expiry,
        delay_ms=delay_ms,
        output_mode="update",
        operator=OperatorKind.TOP,
        options={
            "n": n,
            "order": [dict(term) for term in order],
            "ties": ties,
            "payload": [field.name for field in columns],
            "emit_removed": False,  # no reader asks for it; schemas of all releases carry it, and are compared
        },
    )

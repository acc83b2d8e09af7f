"""Keys as readers give them, and what was found of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coordinator.ledger.read_views import ReadView
from coordinator.model.errors import InvalidRequestError
from statefleet.reads.projections import Projection
from store_actors.key_queries import FoundRows

__all__ = ["FOUND_COLUMN", "Answers", "FoundKey", "Keys", "key_array", "key_table", "one_each"]

#: Last column of :meth:`LiveState.multi_get` where a key has one row: whether it is there.
FOUND_COLUMN = "__found"

#: What is given as keys: a table, or rows.
Keys: TypeAlias = pa.Table | pa.RecordBatch | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class FoundKey:
    """What :meth:`LiveState.find` found of a key, and of what: the same read told all of it.

    Attributes
    ----------
    rows
        Rows of the key; none if it is not there.
    state, query_id
        Name of the state, and the id of the query that it belongs to (``""`` as long as no batch was begun).
    shard
        Shard that the key is on; None where any shard may have it, and none or several have.
    version
        Version that was read: ``state.at(version)`` reads it again.
    """

    rows: tuple[dict[str, Any], ...]
    state: str
    query_id: str
    shard: int | None
    version: int


@dataclass(frozen=True, slots=True)
class Answers:
    """Rows of some keys, with what they were found by."""

    view: ReadView
    form: Projection
    #: Of each key its shard, if that is known beforehand.
    shards: npt.NDArray[Any] | None
    #: Of each shard that was asked the places of its keys, and what it answered.
    answers: dict[int, tuple[npt.NDArray[np.int64], FoundRows]]

    def of_key(self, place: int, rows: Sequence[dict[str, Any]], having: Collection[int]) -> FoundKey:
        """What was found of one key, which some shards have rows of."""
        view, shard = self.view, None
        if self.shards is not None:
            shard = int(self.shards[place])
        elif len(having) == 1:
            (shard,) = having
        answer = None if shard is None else self.answers.get(shard)
        version = view.version if answer is None else answer[1].version
        return FoundKey(tuple(rows), view.metadata.state_name, view.metadata.query_id, shard, version)


def key_table(keys: Keys, form: Projection) -> pa.Table:
    """Keys as a table of the key columns as they are shown.

    Raises
    ------
    InvalidRequestError
        A column is missing or unknown, or a value is of a wrong type.
    """
    if isinstance(keys, pa.RecordBatch):
        return pa.Table.from_batches([keys])
    if isinstance(keys, pa.Table):
        return keys
    names = form.shown.keys
    for key in keys:
        if set(key) != set(names):
            raise InvalidRequestError(
                "a key has a value for each key column", keys=", ".join(names), got=", ".join(key)
            )
    fields = [form.shown.schema.field(name) for name in names]
    return pa.table([key_array([key[one.name] for key in keys], one) for one in fields], names=list(names))


def key_array(values: list[Any], field: pa.Field) -> pa.Array:
    """Values of a key column.

    Raises
    ------
    InvalidRequestError
        One is of a wrong type.
    """
    try:
        return pa.array(values, field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(
            "a value does not fit its key column", column=field.name, type=str(field.type), cause=error
        ) from error


def one_each(asked: pa.Table, rows: pa.Table, places: npt.NDArray[np.int64], form: Projection) -> pa.Table:
    """A row for each key that was asked for, also for those that are not there."""
    where = np.full(asked.num_rows, -1, np.int64)
    where[places] = np.arange(len(places))
    is_found = where >= 0
    keys = form.shown.keys
    values = rows.drop_columns([name for name in rows.column_names if name in keys])
    chosen = values.take(pa.array(where, mask=~is_found))
    columns = {name: asked.column(name) for name in keys} | {name: chosen.column(name) for name in values.column_names}
    return pa.table(columns).append_column(pa.field(FOUND_COLUMN, pa.bool_(), nullable=False), pa.array(is_found))

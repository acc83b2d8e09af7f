"""Keys as readers give them, and the rows that were found for them."""

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
from store_actors.messages.key_queries import FoundRows

#: Last column of :meth:`LiveState.multi_get` where a key has at most one row: whether the key has one.
FOUND_COLUMN = "__found"

#: Keys as a reader gives them: a table, or rows.
Keys: TypeAlias = pa.Table | pa.RecordBatch | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class FoundKey:
    """Rows of a key that :meth:`LiveState.find` found, with their query, shard and version, all from one read.

    Attributes
    ----------
    rows
        Rows of the key; empty if it has none.
    state, query_id
        Name of the state, and the id of its query (``""`` until a batch has begun).
    shard
        Shard of the key; None where any shard may have it, and none or several do.
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
    """Rows of keys, by shard.

    Attributes
    ----------
    shards
        Shard of each key, int64, if that is known beforehand.
    by_shard
        For each shard that was queried, the indexes of its keys (int64) and the rows that it found.
    """

    view: ReadView
    projection: Projection
    shards: npt.NDArray[Any] | None
    by_shard: dict[int, tuple[npt.NDArray[np.int64], FoundRows]]

    def of_key(self, index: int, rows: Sequence[dict[str, Any]], shards: Collection[int]) -> FoundKey:
        """Return the rows of one key, given the shards that have some of them."""
        view, shard = self.view, None
        if self.shards is not None:
            shard = int(self.shards[index])
        elif len(shards) == 1:
            (shard,) = shards
        answer = None if shard is None else self.by_shard.get(shard)
        version = view.version if answer is None else answer[1].version
        return FoundKey(tuple(rows), view.metadata.state_name, view.metadata.query_id, shard, version)


def key_table(keys: Keys, projection: Projection) -> pa.Table:
    """Return keys as a table of the key columns of the view.

    Raises
    ------
    InvalidRequestError
        A column is missing or unknown, or a value is of a wrong type.
    """
    if isinstance(keys, pa.RecordBatch):
        return pa.Table.from_batches([keys])
    if isinstance(keys, pa.Table):
        return keys
    names = projection.view_columns.keys
    for key in keys:
        if set(key) != set(names):
            raise InvalidRequestError(
                "a key has a value for each key column", keys=", ".join(names), got=", ".join(key)
            )
    fields = [projection.view_columns.schema.field(name) for name in names]
    return pa.table([key_array([key[field.name] for key in keys], field) for field in fields], names=list(names))


def key_array(values: list[Any], field: pa.Field) -> pa.Array:
    """Return values of a key column as an array of its type.

    Raises
    ------
    InvalidRequestError
        A value is of a wrong type.
    """
    try:
        return pa.array(values, field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(
            "a value does not fit its key column", column=field.name, type=str(field.type), cause=error
        ) from error


def one_row_each(of_keys: pa.Table, rows: pa.Table, indexes: npt.NDArray[np.int64], projection: Projection) -> pa.Table:
    """Return a row for each key: its columns, with nulls and a false ``__found`` for a key that has no row.

    Parameters
    ----------
    of_keys
        The key columns.
    rows, indexes
        Rows that were found, and the index of the key of each.
    """
    where = np.full(of_keys.num_rows, -1, np.int64)
    where[indexes] = np.arange(len(indexes))
    is_found = where >= 0
    keys = projection.view_columns.keys
    values = rows.drop_columns([name for name in rows.column_names if name in keys])
    chosen = values.take(pa.array(where, mask=~is_found))
    columns = {name: of_keys.column(name) for name in keys} | {
        name: chosen.column(name) for name in values.column_names
    }
    return pa.table(columns).append_column(pa.field(FOUND_COLUMN, pa.bool_(), nullable=False), pa.array(is_found))

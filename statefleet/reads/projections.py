"""What a reader asks for and gets of a state: columns, keys, the shards that have the rows of a key, and what was found for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.ledger.compatibility import same_description
from coordinator.ledger.read_views import ReadView
from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import DEFAULT_STORE
from coordinator.model.schema import OperatorKind, StateSchema
from statefleet.reads.shard_reads import ReadVersion, ShardReads
from store_actors.engine.spark_hash import shards_of
from store_actors.messages.key_queries import is_few
from store_actors.messages.requests import ReadProjection
from store_actors.operators.view_columns import ViewColumns

#: Last column of :meth:`LiveState.multi_get` where a key has at most one row: whether the key has one.
FOUND_COLUMN = "__found"
#: Keys as a reader gives them: a table, or rows.
Keys: TypeAlias = pa.Table | pa.RecordBatch | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Projection:
    """Columns and keys of one part of a state, as readers see it."""

    read: ReadProjection
    store_name: str
    view_columns: ViewColumns
    #: Key columns, as the state stores them, whose hash decides the shard of a row; empty where any shard may have any row.
    routing: tuple[str, ...]
    #: Whether a key has at most one row.
    has_one: bool
    _encoded: dict[tuple[str, ...] | None, bytes] = field(default_factory=dict)

    def encoded(
        self,
        columns: Sequence[str] | None,
        chosen: pc.Expression | None = None,
        filtered: Sequence[str] | None = None,
    ) -> bytes:
        """Return the encoded projection of some columns, or of all; and of a scan's filter, which has the columns of `filtered`.

        Raises
        ------
        InvalidRequestError
            A column does not exist.
        """
        names = None if columns is None else tuple(columns)
        if chosen is None and names in self._encoded:
            return self._encoded[names]
        of_filter = None if filtered is None else tuple(filtered)
        known = self.view_columns.schema.names
        unknown = [name for name in (*(names or ()), *(of_filter or ())) if name not in known]
        if unknown:
            raise InvalidRequestError(
                "the state has no such columns", unknown=", ".join(unknown), columns=", ".join(known)
            )
        if chosen is not None:
            return replace(self.read, columns=names, filter=chosen, filtered=of_filter).encoded()
        self._encoded[names] = replace(self.read, columns=names).encoded()
        return self._encoded[names]

    def by_shard(
        self, view: ReadView, leaves: pa.RecordBatch, shards: npt.NDArray[Any] | None
    ) -> dict[int, tuple[npt.NDArray[np.int64], pa.Table]]:
        """Return the keys (`leaves`, as the state stores them) of each shard that may have rows of them: their indexes (int64), and the
        keys.
        """
        written = view.written
        if shards is None:
            every, keys = np.arange(leaves.num_rows), pa.Table.from_batches([leaves])
            return {shard: (every, keys) for shard in written if leaves.num_rows}
        order = np.argsort(shards, kind="stable")
        begins = np.searchsorted(shards[order], np.arange(len(view.versions) + 1))
        # Few keys are put in order at once. Of many keys, a slice would be sent with the whole buffers that it is a part of.
        are_few = is_few(leaves)
        in_order = leaves.take(pa.array(order)) if are_few and leaves.num_rows > 1 else leaves
        by_shard = {}
        for shard in written:
            begin, end = begins[shard], begins[shard + 1]
            if begin < end:
                indexes = order[begin:end]
                # Keys that are all on one shard are in their order already, and need no copy.
                if len(indexes) == leaves.num_rows:
                    of_shard = leaves
                else:
                    of_shard = in_order.slice(begin, end - begin) if are_few else leaves.take(pa.array(indexes))
                by_shard[shard] = indexes, pa.Table.from_batches([of_shard])
        return by_shard

    def shards_of(self, view: ReadView, leaves: pa.RecordBatch) -> npt.NDArray[Any] | None:
        """Return the shard of each key (int64); None where any shard may have any key."""
        if len(view.versions) == 1:
            return np.zeros(leaves.num_rows, np.int64)
        return shards_of(leaves, self.routing, len(view.versions)) if self.routing else None


def parts_of(view: ReadView) -> tuple[str, ...]:
    """Return the names of the parts of a state, one of which is read; empty if the state has only one."""
    schema = view.metadata.schema
    if schema is None or schema.operator is OperatorKind.PARTITIONS:
        return view.stores if view.stores != (DEFAULT_STORE,) else ()
    return ViewColumns.parts_of(schema)


def projection_of(view: ReadView, part: str, describe: Callable[[str], StateSchema]) -> Projection:
    """Return the projection of a part of a state; `describe` returns the columns of a keyed store whose schema only its user knows.

    Raises InvalidRequestError if the state has no such part, or has several and none is named.
    """
    part = _named_part(view, part)
    schema = view.metadata.schema
    if schema is None or schema.operator is OperatorKind.PARTITIONS:
        store_name = part or DEFAULT_STORE
        return Projection(ReadProjection(None), store_name, ViewColumns.of(describe(store_name)), (), True)
    view_columns = ViewColumns.of(schema, part)
    keys = schema.keys if view_columns.store is None else view_columns.store.keys
    has_one = len(keys) == len(schema.input_keys)
    read = ReadProjection(schema, part)
    store_name = DEFAULT_STORE if view_columns.store is None else view_columns.store.name
    # The keyed stores of a function are on the shards of its keys, which their own schema does not say.
    routing = tuple(key.name for key in schema.input_keys)
    return Projection(read, store_name, view_columns, routing, has_one)


def _named_part(view: ReadView, part: str) -> str:
    """Return the full name of a part, which may be named without its kind: ``count`` for ``value.count``, if that is unique.

    Raises
    ------
    InvalidRequestError
        The state has no such part, or has several and none is named.
    """
    parts = parts_of(view)
    named = [name for name in parts if name == part]
    named = named or [name for name in parts if name.partition(".")[2] == part != ""]
    if part != "" or parts:
        if len(named) == 1:
            return named[0]
        raise InvalidRequestError(
            "the state has several parts; name one: fleet.state(name, part)"
            if parts
            else "the state has only one part; name none",
            state=view.metadata.state_name,
            part=part,
            parts=", ".join(parts),
        )
    return part


class StatePart:
    """One part of a state at a read version, with its projection.

    The part is ``left`` or ``right`` of a join, a state variable, a keyed store; empty for the only one.
    """

    def __init__(
        self,
        reads: ShardReads,
        open_fleet: Callable[[], Any],
        name: str,
        part: str = "",
        read_version: ReadVersion | None = None,
    ) -> None:
        self.name = name
        self._open_fleet = open_fleet
        self.part = part
        self._reads = reads
        self._read_version = read_version or ReadVersion()
        self._last_projection: tuple[StateSchema | None, int, Projection] | None = None

    def _view(self) -> ReadView:
        return self._reads.view(self._read_version)

    def _cached_projection(self) -> Projection:
        """Return a projection that may be a moment old: columns change only with a query's program."""
        return self._projection(self._reads.cached_view(self._read_version))

    def _projection(self, view: ReadView) -> Projection:
        schema, epoch = view.metadata.schema, view.id.epoch
        if self._last_projection is not None:
            last_schema, known_epoch, known_projection = self._last_projection
            if last_schema == schema and same_description(last_schema, schema) and (schema or known_epoch == epoch):
                return known_projection
        projection = projection_of(view, self.part, self._described)
        self._last_projection = schema, epoch, projection
        return projection

    def _described(self, store_name: str) -> StateSchema:
        """Return the columns of a store whose schema only its user knows."""
        schema = self._reads.describe(self._read_version, store_name, ReadProjection(None).encoded())
        if schema is None:
            raise InvalidRequestError(
                "nothing was ever written to the store, so its columns are not known", state=self.name, part=self.part
            )
        return schema


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
    """Return a row for each key: its columns, with nulls and a false ``__found`` for a key that has no row."""
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

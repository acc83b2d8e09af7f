"""The state of one operator as a table: queried by key or scanned, at the newest version or any retained one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coordinator.ledger.read_views import ReadView, VersionStats
from coordinator.model.errors import InvalidRequestError
from statefleet.reads.batching import Batcher
from statefleet.reads.projections import FoundKey, Keys, Projection, key_table, one_row_each, parts_of
from statefleet.reads.scans import StateScans
from statefleet.reads.shard_reads import KeyPlan, ReadVersion, ShardReads
from statefleet.reads.version_diff import Side, differing
from store_actors.messages.key_queries import FoundRows
from store_actors.serving.hot_key_tracker import SHARE_COLUMN

#: What accessed a key, and the smallest share of all accesses that it can have had.
HEAT_FIELDS = (pa.field("_met_by", pa.string()), pa.field("_share", pa.float64()))


@dataclass(frozen=True, slots=True)
class _RoutedKeys(KeyPlan):
    """Keys by the shards that may have them."""

    of: Projection
    #: Shard of each key, int64; None where any shard may have any key.
    shards: npt.NDArray[Any] | None
    #: For each shard, the indexes of its keys, int64.
    indexes: Mapping[int, npt.NDArray[np.int64]]


class LiveState(StateScans):
    """A state's rows. Made by ``fleet.state(name)``; making one costs nothing.

    Reads delay no batch and change nothing. By default each read sees the newest version whose batch Spark has finished, on *all*
    shards of all operators of the query. Threads may share an instance: keys that several of them query at once are sent in one call.
    """

    def __init__(
        self,
        reads: ShardReads,
        open_fleet: Callable[[], Any],
        name: str,
        part: str = "",
        read_version: ReadVersion | None = None,
    ) -> None:
        super().__init__(reads, open_fleet, name, part, read_version)
        #: Batcher of key queries, by the columns of the rows.
        self._batchers: dict[tuple[str, ...] | None, Batcher[Mapping[str, Any], FoundKey]] = {}

    def __repr__(self) -> str:
        return f"LiveState({', '.join(map(repr, filter(None, (self.name, self.part))))})"

    # -- versions and columns --------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version that a call reads now."""
        return self._view().version

    @property
    def schema(self) -> pa.Schema:
        """Columns of the rows, keys first."""
        return self._cached_projection().view_columns.schema

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the key columns."""
        return self._cached_projection().view_columns.keys

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts of the state, one of which is read; empty if the state has only one."""
        return parts_of(self._view())

    def versions(self) -> range:
        """Return the versions that can be read, from the oldest to the newest."""
        view = self._reads.view()
        return range(view.oldest, view.version + 1)

    def history(self, count: int = 20) -> tuple[VersionStats, ...]:
        """Return commit times, rows, bytes and runs of the newest `count` versions, newest first."""
        return self._reads.version_stats(count)

    def at(self, version: int) -> LiveState:
        """Return the same state at a retained version.

        Raises
        ------
        VersionNotFoundError
            There is no such version, or it is not retained any more. Reads raise this as well, or
            :class:`~coordinator.model.errors.VersionReplacedError` once another attempt has made the version.
        """
        return self.with_read_version(ReadVersion(version, lineage=self._reads.view(ReadVersion(version)).lineage))

    def with_read_version(self, read_version: ReadVersion) -> LiveState:
        """Return the same state at another read version."""
        return LiveState(self._reads, self._open_fleet, self.name, self.part, read_version)

    # -- by key ---------------------------------------------------------------------------------------------------

    def get(self, key: Mapping[str, Any], *, columns: Sequence[str] | None = None) -> dict[str, Any] | None:
        """Return the row of a key, by column; None if the key has no row.

        Parameters
        ----------
        key
            A value for each key column; ``{}`` for a state without keys, which has one row.
        columns
            Columns to return; all by default.

        Raises
        ------
        InvalidRequestError
            The key lacks a column, has an unknown one or a value of a wrong type; a column does not exist, or `columns` is empty; or a
            key may have several rows in this state.
        """
        projection = self._cached_projection()
        if not projection.has_one:
            raise InvalidRequestError(
                "a key of this state may have several rows; use get_all or multi_get",
                state=self.name,
                keys=", ".join(projection.view_columns.keys),
            )
        rows = self._rows_of(key, columns, projection)
        return rows[0] if rows else None

    def get_all(self, key: Mapping[str, Any], *, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return all rows of a key: rows of a side of a join, sessions, the first n of a partition.

        Raises
        ------
        InvalidRequestError
            As :meth:`get`.
        """
        return self._rows_of(key, columns, self._cached_projection())

    def _rows_of(
        self, key: Mapping[str, Any], columns: Sequence[str] | None, projection: Projection
    ) -> list[dict[str, Any]]:
        if not projection.view_columns.keys:
            rows: list[dict[str, Any]] = self.scan(columns, limit=1).to_arrow().to_pylist()
            return rows
        return list(self._find_batched(key, columns).rows)

    def find(self, key: Mapping[str, Any], *, columns: Sequence[str] | None = None) -> FoundKey:
        """Return all rows of a key, as :meth:`get_all`, with their query, shard and version.

        The row of a state without keys is always of a committed version.

        Raises
        ------
        InvalidRequestError
            As :meth:`get`.
        """
        projection = self._cached_projection()
        if not projection.view_columns.keys:
            return self._only_row(columns)
        return self._find_batched(key, columns)

    def _find_batched(self, key: Mapping[str, Any], columns: Sequence[str] | None) -> FoundKey:
        """Query a key in one call with the keys that other threads query meanwhile."""
        names = None if columns is None else tuple(columns)
        if names == ():
            raise InvalidRequestError("no column is asked for; leave columns out for all of them", state=self.name)
        batcher = self._batchers.get(names)
        if batcher is None:
            batcher = Batcher(
                lambda keys: self.find_each(keys, names, is_patient=len(keys) == 1), self._reads.runtime.threads
            )
            batcher = self._batchers.setdefault(names, batcher)
        return batcher.find(key)

    def find_each(
        self, keys: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None, *, is_patient: bool = True
    ) -> list[FoundKey]:
        """Return what :meth:`find` returns for each key, from one call, for a state with keys.

        Parameters
        ----------
        is_patient
            Whether to wait for a shard that is lost.
        """
        view, routed, found = self._find(keys, columns, is_patient=is_patient)
        rows: list[list[dict[str, Any]]] = [[] for _ in keys]
        shards: list[set[int]] = [set() for _ in keys]
        for number, of_shard in found.items():
            indexes = routed.indexes[number][of_shard.places].tolist()
            for index, row in zip(indexes, of_shard.rows.to_pylist(), strict=True):
                rows[index].append(row)
                shards[index].add(number)
        of_state, results = view.metadata, []
        for index, key_rows in enumerate(rows):
            shard: int | None = None
            if routed.shards is not None:
                shard = int(routed.shards[index])
            elif len(shards[index]) == 1:
                (shard,) = shards[index]
            version = view.version if shard is None or shard not in found else found[shard].version
            results.append(FoundKey(tuple(key_rows), of_state.state_name, of_state.query_id, shard, version))
        return results

    def _only_row(self, columns: Sequence[str] | None) -> FoundKey:
        view = self._view()
        rows = self._scan(columns, None, None, 1, view, read_version=ReadVersion.to(view))
        tables = ((shard, table) for shard in range(rows.num_shards) for table in rows.of_shard(shard, 1))
        shard, table = next(tables, (None, rows.schema.empty_table()))
        return FoundKey(tuple(table.to_pylist()), self.name, view.metadata.query_id, shard, view.version)

    def multi_get(self, keys: Keys, *, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows of many keys, all of one version, in the order of the keys.

        Parameters
        ----------
        keys
            A table with the key columns, or rows.
        columns
            Columns to return besides the keys; all by default.

        Returns
        -------
        pyarrow.Table
            Where a key has at most one row: a row for each key, with nulls where the key has none, and ``__found``. Else all rows of
            the keys.

        Raises
        ------
        InvalidRequestError
            As :meth:`get`.
        """
        projection = self._cached_projection()
        names = None if columns is None else [*dict.fromkeys((*projection.view_columns.keys, *columns))]
        table = key_table(keys, projection)
        _, routed, found = self._find(table, names)
        projection = routed.of
        schema = projection.view_columns.schema
        empty = pa.schema([schema.field(name) for name in names or schema.names]).empty_table()
        rows = pa.concat_tables([empty, *(of_shard.rows for of_shard in found.values())])
        indexes = np.concatenate(
            [np.empty(0, np.int64), *(routed.indexes[shard][of_shard.places] for shard, of_shard in found.items())]
        )
        if not projection.has_one:
            return rows.take(pa.array(np.argsort(indexes, kind="stable")))
        return one_row_each(table, rows, indexes, projection)

    def _find(
        self, keys: Keys, columns: Sequence[str] | None, is_patient: bool = True
    ) -> tuple[ReadView, _RoutedKeys, dict[int, FoundRows]]:
        """Return the results of each shard that may have some of the keys, in their order; see :meth:`ShardReads.find`."""

        def plan(view: ReadView) -> _RoutedKeys:
            projection = self._projection(view)
            leaves = projection.view_columns.key_leaves(key_table(keys, projection))
            shards = projection.shards_of(view, leaves)
            routed = projection.by_shard(view, leaves, shards)
            tables = {shard: table for shard, (_, table) in routed.items()}
            indexes = {shard: of_shard for shard, (of_shard, _) in routed.items()}
            encoded = projection.encoded(columns)
            return _RoutedKeys(projection.store_name, encoded, tables, projection, shards, indexes)

        view, routed, found = self._reads.find(self._read_version, plan, is_patient)
        return view, routed, dict(sorted(found.items()))

    def hottest_keys(self, shard: int, most: int = 10) -> pa.Table:
        """Return the keys of a shard that batches and readers accessed most often lately, as its store actor estimates them.

        Returns
        -------
        pyarrow.Table
            Key columns; ``_met_by``: ``batches`` (by their rows; not for functions with state of their own) or ``look_ups``; and
            ``_share``, the smallest share of all accesses that the key can have had. Hottest first, `most` of each kind; empty
            where no process counts, as offline.

        Raises
        ------
        InvalidRequestError
            There is no such shard.
        """
        hottest, view_columns = self._reads.hottest_keys(shard, most), self._cached_projection().view_columns
        fields = [*(view_columns.schema.field(name) for name in view_columns.keys), *HEAT_FIELDS]
        tables = [pa.schema(fields).empty_table()]
        for kind, counts in (("batches", hottest.written), ("look_ups", hottest.looked_up)):
            if counts is not None:
                columns = [pa.repeat(kind, counts.num_rows), counts.column(SHARE_COLUMN)]
                keys = view_columns.keys_of(counts.drop_columns([SHARE_COLUMN]))
                for field, column in zip(HEAT_FIELDS, columns, strict=True):
                    keys = keys.append_column(field, column)
                tables.append(keys)
        return pa.concat_tables(tables)

    # -- differences ---------------------------------------------------------------------------------------------

    def diff(self, before: int, after: int | None = None, *, limit: int | None = None) -> pa.Table:
        """Return the rows in which two versions differ.

        Where the commits between them are retained, only the keys that these touched are compared. Else all rows of both versions are
        compared, shard by shard, or at once if the state was rescaled in between.

        Parameters
        ----------
        before, after
            Retained versions; the newest by default.
        limit
            Maximum number of rows.

        Returns
        -------
        pyarrow.Table
            Rows that only one of the versions has, with ``_change_type``: ``delete`` for those of `before`, ``insert`` for those of
            `after`. A row that changed is there twice.

        Raises
        ------
        VersionNotFoundError
            One of the versions is not retained.
        InvalidRequestError
            The versions have different columns.
        """
        newest = self.version if after is None else after
        earlier, later = (self.at(version)._side() for version in (before, newest))
        changed = None
        if later.projection.view_columns.keys and earlier.rows.schema == later.rows.schema:
            changed = self.changes(*sorted((before, newest)), columns=later.projection.view_columns.keys)
        return differing(earlier, later, changed, limit)

    def _side(self) -> Side:
        view = self._view()
        return Side(self._reads, view, self._projection(view), self._scan(None, None, None, None, view))

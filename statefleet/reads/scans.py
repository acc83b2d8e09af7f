"""Scans of one part of a state: all rows, those of a filter, rows by a prefix of the key, and changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import and_
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from coordinator.ledger.read_views import ReadView
from coordinator.model.errors import InvalidRequestError
from statefleet.reads.projections import StatePart, key_array
from statefleet.reads.rows import PARTITION_FIELD, PortableScan, Rows
from statefleet.reads.shard_reads import ReadVersion

#: A filter: an expression over the columns of the view, or a list that :func:`pyarrow.parquet.filters_to_expression` takes.
Filter: TypeAlias = pc.Expression | list[Any]


def column_is(field: pa.Field, value: Any) -> pc.Expression:
    """Return a filter for rows in which a key column has a value; null equals null, and NaN equals NaN.

    Raises
    ------
    InvalidRequestError
        The value is of a wrong type, or the column has lists.
    """
    return _is_value((field.name,), key_array([value], field)[0])


def _is_value(path: tuple[str, ...], value: pa.Scalar) -> pc.Expression:
    column = pc.field(*path)
    if not value.is_valid:
        return column.is_null()
    if pa.types.is_struct(value.type):
        # Arrow compares no structs, such as windows; their fields it does.
        parts = [_is_value((*path, field.name), value[field.name]) for field in value.type]
        return reduce(and_, parts, column.is_valid())
    if pa.types.is_nested(value.type):
        raise InvalidRequestError(
            "rows are not scanned by lists, which Arrow does not compare; use get for all key columns, or scan for all rows",
            column=".".join(path),
        )
    is_nan = pa.types.is_floating(value.type) and math.isnan(value.as_py())
    return column.is_nan() if is_nan else column == value


def expression_of(chosen: Filter | None) -> tuple[pc.Expression | None, list[str] | None]:
    """Return a filter as an expression, and the columns that it uses if they are known."""
    if chosen is None or isinstance(chosen, pc.Expression):
        return chosen, None
    flat = [term for terms in chosen for term in (terms if isinstance(terms, list) else [terms])]
    return pq.filters_to_expression(chosen), [*dict.fromkeys(name for name, _, _ in flat)]


class StateScans(StatePart):
    """The scans of :class:`~statefleet.reads.state.LiveState`."""

    def scan(
        self,
        columns: Sequence[str] | None = None,
        filter: Filter | None = None,
        limit: int | None = None,
        *,
        partition_id: bool = False,
    ) -> Rows:
        """Return all rows of one version, or those of a filter, in no particular order; they are read when they are iterated.

        Parameters
        ----------
        columns
            Columns to return; all by default.
        filter
            Only rows for which it is true: a :class:`pyarrow.compute.Expression`, or a list such as ``[("n", ">", 5)]``, as
            :func:`pyarrow.parquet.read_table` takes it. Store actors evaluate it.
        limit
            Maximum number of rows.
        partition_id
            Whether the number of a row's shard comes last, as ``partition_id``.

        Raises
        ------
        InvalidRequestError
            A column does not exist.
        """
        return self._scan(columns, *expression_of(filter), limit, partition_id=partition_id)

    def _scan(
        self,
        columns: Sequence[str] | None,
        chosen: pc.Expression | None,
        filtered: Sequence[str] | None,
        limit: int | None,
        view: ReadView | None = None,
        since: int | None = None,
        read_version: ReadVersion | None = None,
        partition_id: bool = False,
        position: str = "",
    ) -> Rows:
        # The version is fixed now: however slowly the rows are read, they are of one version.
        view = view or self._view()
        projection = self._projection(view)
        encoded = projection.encoded(columns, chosen, filtered)
        if partition_id and PARTITION_FIELD.name in projection.view_columns.schema.names:
            raise InvalidRequestError(
                "the state has a column of this name itself; take the rows of each shard: rows.of_shard(number)",
                column=PARTITION_FIELD.name,
            )
        of_view = ReadVersion.to(view)
        scan = PortableScan(
            self._open_fleet,
            self.name,
            self.part,
            self._reads.is_committed,
            of_view,
            columns,
            chosen,
            since,
            partition_id,
        )
        return Rows(self._reads, view, read_version or self._read_version, projection, encoded, scan, limit, position)

    def changes(
        self,
        since: int | str,
        until: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        filter: Filter | None = None,
        limit: int | None = None,
        partition_id: bool = False,
    ) -> Rows:
        """Return the changes by each commit after one version, up to another.

        Parameters
        ----------
        since, until
            Versions; `until` is the one that is read, by default. `since` may be the ``position`` of rows that were read before, which
            has the version and its lineage: if the version was replaced since, that is an error.
        columns, filter
            As :meth:`scan`; a filter that is an expression may also use the columns of changes.
        limit, partition_id
            As :meth:`scan`.

        Returns
        -------
        Rows
            Rows as each commit left them, and the last values of rows that it removed; with ``_change_type`` (``upsert`` or
            ``delete``), ``_commit_version`` and ``_commit_timestamp``. They come shard by shard, each in the order of its commits.

        Raises
        ------
        InvalidRequestError
            A column does not exist, `until` is before `since`, or `since` is not a position.
        VersionReplacedError
            Another attempt has made the version of the position since; with consistency ``finished`` only if Spark's checkpoint was
            changed by hand.
        VersionNotFoundError
            The commits are not retained; raised when they are read.
        """
        after = _read_version_since(since)
        assert after.version is not None
        if until is not None and until < after.version:
            raise InvalidRequestError("changes are of later versions than the one given", since=since, until=until)
        view, chosen = self._view() if until is None else self._reads.view(ReadVersion(until)), expression_of(filter)
        position = ""
        if after.version > view.version:
            # A run has begun again with the version's batch, or a replaced coordinator answers: there is nothing new yet.
            limit, position = 0, f"{after.version}:{after.lineage}"
        elif after.lineage:
            self._reads.view(after)
        return self._scan(columns, *chosen, limit, view, after.version, partition_id=partition_id, position=position)

    def prefix_scan(
        self, prefix: Mapping[str, Any], columns: Sequence[str] | None = None, limit: int | None = None
    ) -> Rows:
        """Return the rows whose leading key columns have these values.

        Raises
        ------
        InvalidRequestError
            The columns are not the leading key columns, a value is of a wrong type, or a column has lists.
        """
        projection = self._cached_projection()
        leading = projection.view_columns.keys[: len(prefix)]
        if not prefix or set(leading) != set(prefix):
            raise InvalidRequestError(
                "a prefix is made of the leading key columns",
                keys=", ".join(projection.view_columns.keys),
                got=", ".join(prefix),
            )
        parts = [column_is(projection.view_columns.schema.field(name), prefix[name]) for name in leading]
        return self._scan(columns, reduce(and_, parts), leading, limit)


def _read_version_since(since: int | str) -> ReadVersion:
    """Return the read version of a version, or of a position in the changes of a state."""
    if isinstance(since, int):
        return ReadVersion(since)
    version, _, lineage = since.partition(":")
    if not version.isdecimal():
        raise InvalidRequestError("this is no position of rows that were read, and no version", since=since)
    return ReadVersion(int(version), lineage=lineage)

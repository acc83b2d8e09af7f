"""The state of one operator as a table: looked up by key, scanned, at the newest version or any retained one."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import and_
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from coordinator.errors import InvalidRequestError
from coordinator.model import DEFAULT_STORE
from coordinator.reading import ReadView
from coordinator.version_figures import VersionFigures
from store_actors.live.forms import Form, form_of, parts_of
from store_actors.live.portable import Opened, PortableScan
from store_actors.live.rows import Rows, difference
from store_actors.live.shard_reads import Pinned, ShardReads
from store_actors.messages import FoundRows, ReadForm
from store_actors.schema import StateSchema

__all__ = ["FOUND_COLUMN", "LiveState"]

#: Last column of :meth:`LiveState.multi_get` where a key has one row: whether it is there.
FOUND_COLUMN = "__found"

#: What is given as keys: a table, or rows.
Keys: TypeAlias = pa.Table | pa.RecordBatch | Sequence[Mapping[str, Any]]
#: What rows are chosen by: an expression over shown columns, or what :func:`pyarrow.parquet.filters_to_expression` takes.
Filter: TypeAlias = pc.Expression | list[Any]


class LiveState:
    """A state's rows. Made by ``fleet.state(name)``; making one costs nothing.

    Reads hold up no batch and change nothing. By default each sees the newest version that *all* shards of all operators of the query
    have committed: what one finished batch left.

    Parameters
    ----------
    reads
        The way to its shards.
    opened
        How other processes come to it.
    name, part
        The state, and which of its parts: ``left`` or ``right`` of a join, a state variable, a keyed store; empty for the only one.
    pinned
        Which version is read.
    """

    def __init__(
        self, reads: ShardReads, opened: Opened, name: str, part: str = "", pinned: Pinned | None = None
    ) -> None:
        self.name = name
        self._opened = opened
        self.part = part
        self._reads = reads
        self._pinned = pinned or Pinned()
        self._former: tuple[Mapping[str, Any], int, Form] | None = None

    def __repr__(self) -> str:
        return f"LiveState({', '.join(map(repr, filter(None, (self.name, self.part))))})"

    # -- what there is --------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version that a call reads now."""
        return self._view().version

    @property
    def schema(self) -> pa.Schema:
        """Columns of the rows, keys first."""
        return self._form(self._view()).shown.schema

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the key columns."""
        return self._form(self._view()).shown.keys

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that the state has, one of which is read; empty if there is only one."""
        return parts_of(self._view())

    def versions(self) -> range:
        """Versions that can be read, from the oldest to the newest."""
        view = self._reads.view()
        return range(view.oldest, view.version + 1)

    def history(self, count: int = 20) -> tuple[VersionFigures, ...]:
        """When versions were committed, and how many rows and bytes they have: of so many of the newest ones, newest first."""
        return self._reads.figures(count)

    def at(self, version: int) -> LiveState:
        """The same state at a retained version.

        Raises
        ------
        VersionNotFoundError
            There is no such version, or it is not retained any more.
        """
        self._reads.view(version)
        return LiveState(self._reads, self._opened, self.name, self.part, Pinned(version))

    def _view(self) -> ReadView:
        return self._reads.view(self._pinned.version)

    # -- by key ---------------------------------------------------------------------------------------------------

    def get(self, key: Mapping[str, Any], *, columns: Sequence[str] | None = None) -> dict[str, Any] | None:
        """The row of a key, by column; None if there is none.

        Parameters
        ----------
        key
            A value for each key column; ``{}`` of a state without keys, which has one row.
        columns
            Which to give; all by default.

        Raises
        ------
        InvalidRequestError
            The key lacks a column, has another one or a value of a wrong type; or a key may have several rows in this state.
        """
        rows, form = self._rows_of(key, columns)
        if not form.has_one:
            raise InvalidRequestError(
                "a key of this state may have several rows; use get_all or multi_get",
                state=self.name,
                keys=", ".join(form.shown.keys),
            )
        return rows[0] if rows else None

    def get_all(self, key: Mapping[str, Any], *, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """All rows of a key: of a side of a join, of sessions, of the first n of each partition.

        Raises
        ------
        InvalidRequestError
            As :meth:`get`.
        """
        return self._rows_of(key, columns)[0]

    def _rows_of(self, key: Mapping[str, Any], columns: Sequence[str] | None) -> tuple[list[dict[str, Any]], Form]:
        form = self._form(self._reads.believed(self._pinned))
        if not form.shown.keys:
            return self.scan(columns, limit=1).to_arrow().to_pylist(), form
        form, found = self._find([key], columns)
        return [row for _, one in found for row in one.rows.to_pylist()], form

    def multi_get(self, keys: Keys, *, columns: Sequence[str] | None = None) -> pa.Table:
        """Rows of many keys, all of one version, in the order of the keys.

        Parameters
        ----------
        keys
            A table with the key columns, or rows.
        columns
            Which to give besides the keys; all by default.

        Returns
        -------
        pyarrow.Table
            Where a key has one row: one for each key, with nulls where there is none, and ``__found``. Else all rows of the keys.

        Raises
        ------
        InvalidRequestError
            As :meth:`get`.
        """
        form = self._form(self._reads.believed(self._pinned))
        wanted = None if columns is None else [*dict.fromkeys((*form.shown.keys, *columns))]
        asked = _table(keys, form)
        form, found = self._find(asked, wanted)
        of_keys = pa.schema([form.shown.schema.field(name) for name in wanted or form.shown.schema.names])
        rows = pa.concat_tables([of_keys.empty_table(), *(one.rows for _, one in found)])
        places = np.concatenate([np.empty(0, np.int64), *(own[one.places] for own, one in found)])
        if not form.has_one:
            return rows.take(pa.array(np.argsort(places, kind="stable")))
        return _one_each(asked, rows, places, form)

    def _find(
        self, keys: Keys, columns: Sequence[str] | None
    ) -> tuple[Form, list[tuple[npt.NDArray[np.int64], FoundRows]]]:
        """What each shard found, with the places of the keys that were its own."""
        made: dict[int, tuple[npt.NDArray[np.int64], pa.Table]] = {}
        used: list[Form] = []

        def plan(view: ReadView) -> tuple[bytes, Mapping[int, pa.Table]]:
            form = self._form(view)
            made.clear()
            made.update(form.by_shard(view, form.shown.key_leaves(_table(keys, form))))
            used[:] = [form]
            return form.asking(columns), {shard: own for shard, (_, own) in made.items()}

        store_name = self._form(self._reads.believed(self._pinned)).store_name
        _, found = self._reads.find(self._pinned, store_name, plan)
        return used[0], [(made[shard][0], one) for shard, one in sorted(found.items())]

    # -- many rows ------------------------------------------------------------------------------------------------

    def scan(
        self, columns: Sequence[str] | None = None, filter: Filter | None = None, limit: int | None = None
    ) -> Rows:
        """All rows of one version, or those that are chosen, in no particular order; read when they are iterated.

        Parameters
        ----------
        columns
            Which to give; all by default.
        filter
            Rows for which it is true: a :class:`pyarrow.compute.Expression`, or a list such as ``[("n", ">", 5)]`` as
            :func:`pyarrow.parquet.read_table` takes it. It is evaluated where the rows are.
        limit
            Most rows to give.

        Raises
        ------
        InvalidRequestError
            There is no such column.
        """
        return self._scan(columns, *_expression(filter), limit)

    def _scan(
        self,
        columns: Sequence[str] | None,
        chosen: pc.Expression | None,
        filtered: Sequence[str] | None,
        limit: int | None,
        view: ReadView | None = None,
        since: int | None = None,
    ) -> Rows:
        # Pinned now: however slowly it is read, it is one version.
        view = view or self._view()
        form = self._form(view)
        asking = form.filtering(columns, chosen, filtered)
        scan = PortableScan(self._opened, self.name, self.part, view.version, columns, chosen, since)
        return Rows(self._reads, view, self._pinned, form, asking, scan, limit)

    def changes(
        self,
        since: int,
        until: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        filter: Filter | None = None,
    ) -> Rows:
        """What each commit after one version, up to another, did to the state's rows.

        Parameters
        ----------
        since, until
            Versions; the newest by default.
        columns, filter
            As :meth:`scan`; the filter may look at the columns of changes, too, if it is an expression.

        Returns
        -------
        Rows
            Rows as each commit left them, and those that it removed as they were last; with ``_change_type`` (``upsert`` or
            ``delete``), ``_commit_version`` and ``_commit_timestamp``. Shard by shard; of a shard in the order of its commits.

        Raises
        ------
        InvalidRequestError
            There is no such column, or `until` is before `since`.
        VersionNotFoundError
            The commits are not retained; told when they are read.
        """
        if until is not None and until < since:
            raise InvalidRequestError("changes are of later versions than the one given", since=since, until=until)
        return self._scan(columns, *_expression(filter), None, self._reads.view(until), since)

    def diff(self, before: int, after: int | None = None) -> pa.Table:
        """Rows in which two versions differ.

        Parameters
        ----------
        before, after
            Retained versions; the newest by default.

        Returns
        -------
        pyarrow.Table
            Rows that only one of the two has, with ``_change_type``: ``delete`` of those of the first, ``insert`` of those of the
            other. A row that changed is there twice.

        Raises
        ------
        VersionNotFoundError
            One of them is not retained.
        """
        newest = self.version if after is None else after
        return difference(self.at(before).scan(), self.at(newest).scan())

    def prefix_scan(
        self, prefix: Mapping[str, Any], columns: Sequence[str] | None = None, limit: int | None = None
    ) -> Rows:
        """Rows whose leading key columns have these values.

        Raises
        ------
        InvalidRequestError
            These are not the leading key columns, or a value is of a wrong type.
        """
        form = self._form(self._reads.believed(self._pinned))
        leading = form.shown.keys[: len(prefix)]
        if not prefix or set(leading) != set(prefix):
            raise InvalidRequestError(
                "a prefix is made of the leading key columns",
                keys=", ".join(form.shown.keys),
                got=", ".join(prefix),
            )
        parts = [_is(form.shown.schema.field(name), prefix[name]) for name in leading]
        return self._scan(columns, reduce(and_, parts), leading, limit)

    # -- how it is asked for --------------------------------------------------------------------------------------

    def _form(self, view: ReadView) -> Form:
        told, epoch = view.metadata.schema, view.id.epoch
        if self._former is not None and self._former[0] == told and (told or self._former[1] == epoch):
            return self._former[2]
        form = form_of(view, self.part, None)
        if form is None:
            form = form_of(view, self.part, self._described())
            assert form is not None
        self._former = told, epoch, form
        return form

    def _described(self) -> StateSchema:
        """Columns of a store that only its user knows."""
        form = pickle.dumps(ReadForm(None, is_keyed=True))
        found = self._reads.describe(self._pinned, self.part or DEFAULT_STORE, form)
        if found is None:
            raise InvalidRequestError(
                "nothing was ever written to the store, so nobody knows its columns", state=self.name, part=self.part
            )
        return found


def _table(keys: Keys, form: Form) -> pa.Table:
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
    return pa.table([_array([key[one.name] for key in keys], one) for one in fields], names=list(names))


def _array(values: list[Any], field: pa.Field) -> pa.Array:
    try:
        return pa.array(values, field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(
            "a value does not fit its key column", column=field.name, type=str(field.type), cause=error
        ) from error


def _is(field: pa.Field, value: Any) -> pc.Expression:
    column = pc.field(field.name)
    return column.is_null() if value is None else column == _array([value], field)[0]


def _expression(chosen: Filter | None) -> tuple[pc.Expression | None, list[str] | None]:
    """A filter, and the columns that it looks at if that is known."""
    if chosen is None or isinstance(chosen, pc.Expression):
        return chosen, None
    flat = [one for some in chosen for one in (some if isinstance(some, list) else [some])]
    return pq.filters_to_expression(chosen), [*dict.fromkeys(name for name, _, _ in flat)]


def _one_each(asked: pa.Table, rows: pa.Table, places: npt.NDArray[np.int64], form: Form) -> pa.Table:
    """A row for each key that was asked for, also for those that are not there."""
    where = np.full(asked.num_rows, -1, np.int64)
    where[places] = np.arange(len(places))
    is_found = where >= 0
    keys = form.shown.keys
    values = rows.drop_columns([name for name in rows.column_names if name in keys])
    chosen = values.take(pa.array(where, mask=~is_found))
    columns = {name: asked.column(name) for name in keys} | {name: chosen.column(name) for name in values.column_names}
    return pa.table(columns).append_column(pa.field(FOUND_COLUMN, pa.bool_(), nullable=False), pa.array(is_found))

"""The state of one operator as a table: looked up by key, scanned, at the newest version or any retained one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coordinator.ledger.read_views import ReadView
from coordinator.ledger.version_stats import VersionStats
from coordinator.model.errors import InvalidRequestError
from statefleet.reads.batching import Batcher
from statefleet.reads.keys import Answers, FoundKey, Keys, key_table, one_each
from statefleet.reads.projections import Projection, parts_of
from statefleet.reads.scans import StateScans
from statefleet.reads.shard_reads import ReadVersion
from statefleet.reads.version_diff import Side, differing
from store_actors.engine.hot_keys import SHARE_COLUMN

__all__ = ["LiveState"]

#: By what a key was met, and what part of all it had at least.
HEAT_FIELDS = (pa.field("_met_by", pa.string()), pa.field("_share", pa.float64()))


class LiveState(StateScans):
    """A state's rows. Made by ``fleet.state(name)``; making one costs nothing.

    Reads hold up no batch and change nothing. By default each sees the newest version whose batch Spark has finished, on *all* shards
    of all operators of the query. Threads may share one: keys that several of them look up at once travel together.
    """

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
        return self._known_form().shown.schema

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the key columns."""
        return self._known_form().shown.keys

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that the state has, one of which is read; empty if there is only one."""
        return parts_of(self._view())

    def versions(self) -> range:
        """Versions that can be read, from the oldest to the newest."""
        view = self._reads.view()
        return range(view.oldest, view.version + 1)

    def history(self, count: int = 20) -> tuple[VersionStats, ...]:
        """When versions were committed, and how many rows and bytes they have: of so many of the newest ones, newest first."""
        return self._reads.figures(count)

    def at(self, version: int) -> LiveState:
        """The same state at a retained version.

        Raises
        ------
        VersionNotFoundError
            There is no such version, or it is not retained any more; told by reads, too: of a version that was made anew meanwhile,
            as :class:`~coordinator.model.errors.VersionReplacedError`.
        """
        return self.pinned(ReadVersion(version, lineage=self._reads.view(ReadVersion(version)).lineage))

    def pinned(self, pinned: ReadVersion) -> LiveState:
        """The same state at what is pinned."""
        return LiveState(self._reads, self._opened, self.name, self.part, pinned)

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
            The key lacks a column, has another one or a value of a wrong type; there is no such column, or none is asked for; or a
            key may have several rows in this state.
        """
        form = self._known_form()
        if not form.has_one:
            raise InvalidRequestError(
                "a key of this state may have several rows; use get_all or multi_get",
                state=self.name,
                keys=", ".join(form.shown.keys),
            )
        rows = self._rows_of(key, columns, form)
        return rows[0] if rows else None

    def get_all(self, key: Mapping[str, Any], *, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """All rows of a key: of a side of a join, of sessions, of the first n of each partition.

        Raises
        ------
        InvalidRequestError
            As :meth:`get`.
        """
        return self._rows_of(key, columns, self._known_form())

    def _rows_of(self, key: Mapping[str, Any], columns: Sequence[str] | None, form: Projection) -> list[dict[str, Any]]:
        if not form.shown.keys:
            rows: list[dict[str, Any]] = self.scan(columns, limit=1).to_arrow().to_pylist()
            return rows
        return list(self._find_together(key, columns).rows)

    def find(self, key: Mapping[str, Any], *, columns: Sequence[str] | None = None) -> FoundKey:
        """All rows of a key, as :meth:`get_all`, with the query, the shard and the version that they are of.

        The row of a state without keys is always one of a committed version.

        Raises
        ------
        InvalidRequestError
            As :meth:`get`.
        """
        form = self._known_form()
        if not form.shown.keys:
            return self._only_row(columns)
        return self._find_together(key, columns)

    def _find_together(self, key: Mapping[str, Any], columns: Sequence[str] | None) -> FoundKey:
        """Look a key up with those that other threads look up meanwhile."""
        wanted = None if columns is None else tuple(columns)
        if wanted == ():
            raise InvalidRequestError("no column is asked for; leave columns out for all of them", state=self.name)
        look_ups = self._look_ups.get(wanted)
        if look_ups is None:
            made: Batcher[Mapping[str, Any], FoundKey] = Batcher(
                lambda keys: self._find_each(keys, wanted), self._reads.runtime.threads
            )
            look_ups = self._look_ups.setdefault(wanted, made)
        return look_ups.find(key)

    def _find_each(self, keys: Sequence[Mapping[str, Any]], columns: Sequence[str] | None) -> list[FoundKey]:
        """Rows of each key, found together; of one key they are waited for."""
        found = self._find(keys, columns, is_patient=len(keys) == 1)
        rows: list[list[dict[str, Any]]] = [[] for _ in keys]
        having: list[set[int]] = [set() for _ in keys]
        for shard, (own, one) in found.answers.items():
            for place, row in zip(own[one.places].tolist(), one.rows.to_pylist(), strict=True):
                rows[place].append(row)
                having[place].add(shard)
        return [found.of_key(place, of_key, having[place]) for place, of_key in enumerate(rows)]

    def _only_row(self, columns: Sequence[str] | None) -> FoundKey:
        """The row of a state without keys."""
        view = self._view()
        rows = self._scan(columns, None, None, 1, view, pinned=ReadVersion.to(view))
        having = ((shard, table) for shard in range(rows.num_shards) for table in rows.of_shard(shard, 1))
        shard, table = next(having, (None, rows.schema.empty_table()))
        return FoundKey(tuple(table.to_pylist()), self.name, view.metadata.query_id, shard, view.version)

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
        form = self._known_form()
        wanted = None if columns is None else [*dict.fromkeys((*form.shown.keys, *columns))]
        asked = key_table(keys, form)
        found = self._find(asked, wanted)
        form, answers = found.form, found.answers.values()
        of_keys = pa.schema([form.shown.schema.field(name) for name in wanted or form.shown.schema.names])
        rows = pa.concat_tables([of_keys.empty_table(), *(one.rows for _, one in answers)])
        places = np.concatenate([np.empty(0, np.int64), *(own[one.places] for own, one in answers)])
        if not form.has_one:
            return rows.take(pa.array(np.argsort(places, kind="stable")))
        return one_each(asked, rows, places, form)

    def _find(self, keys: Keys, columns: Sequence[str] | None, is_patient: bool = True) -> Answers:
        """What each shard that may have some of the keys found of them; see :meth:`ShardReads.find`."""
        used: list[tuple[Projection, npt.NDArray[Any] | None, dict[int, tuple[npt.NDArray[np.int64], pa.Table]]]] = []

        def plan(view: ReadView) -> tuple[str, bytes, Mapping[int, pa.Table]]:
            form = self._form(view)
            leaves = form.shown.key_leaves(key_table(keys, form))
            shards = form.shards_of(view, leaves)
            made = form.by_shard(view, leaves, shards)
            used[:] = [(form, shards, made)]
            return form.store_name, form.asking(columns), {shard: own for shard, (_, own) in made.items()}

        view, found = self._reads.find(self._pinned, plan, is_patient)
        ((form, shards, made),) = used
        return Answers(view, form, shards, {shard: (made[shard][0], one) for shard, one in sorted(found.items())})

    def hottest_keys(self, shard: int, most: int = 10) -> pa.Table:
        """Keys of a shard that batches and readers met most often lately, as a few of them are counted by the store actor that has it.

        Returns
        -------
        pyarrow.Table
            Key columns; ``_met_by``: ``batches`` (by their rows; not of functions, which keep state of their own) or ``look_ups``; and
            ``_share``, the part of all that the key had at least. Hottest first, `most` of each kind; none where nobody counted, as
            offline.

        Raises
        ------
        InvalidRequestError
            There is no such shard.
        """
        found, shown = self._reads.hottest_keys(shard, most), self._known_form().shown
        fields = [*(shown.schema.field(name) for name in shown.keys), *HEAT_FIELDS]
        tables = [pa.schema(fields).empty_table()]
        for kind, told in (("batches", found.written), ("look_ups", found.looked_up)):
            if told is not None:
                columns = [pa.repeat(kind, told.num_rows), told.column(SHARE_COLUMN)]
                keys = shown.keys_of(told.drop_columns([SHARE_COLUMN]))
                for field, column in zip(HEAT_FIELDS, columns, strict=True):
                    keys = keys.append_column(field, column)
                tables.append(keys)
        return pa.concat_tables(tables)

    # -- what differs ---------------------------------------------------------------------------------------------

    def diff(self, before: int, after: int | None = None, *, limit: int | None = None) -> pa.Table:
        """Rows in which two versions differ.

        Where the commits between them are retained, only keys that these touched are compared. Else it is all rows of both, shard by
        shard, or all of them at once if the state was rescaled in between.

        Parameters
        ----------
        before, after
            Retained versions; the newest by default.
        limit
            Most rows to give.

        Returns
        -------
        pyarrow.Table
            Rows that only one of the two has, with ``_change_type``: ``delete`` of those of the first, ``insert`` of those of the
            other. A row that changed is there twice.

        Raises
        ------
        VersionNotFoundError
            One of them is not retained.
        InvalidRequestError
            They have other columns.
        """
        newest = self.version if after is None else after
        former, later = (self.at(version)._side() for version in (before, newest))
        changed = None
        if later.form.shown.keys and former.rows.schema == later.rows.schema:
            changed = self.changes(*sorted((before, newest)), columns=later.form.shown.keys)
        return differing(former, later, changed, limit, self._reads.figures)

    def _side(self) -> Side:
        view = self._view()
        return Side(self._reads, view, self._form(view), self._scan(None, None, None, None, view))

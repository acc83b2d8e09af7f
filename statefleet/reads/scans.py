"""Rows of one part of a state as scans give them, and how they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import and_
from typing import Any

import pyarrow.compute as pc

from coordinator.ledger.compatibility import same_description
from coordinator.ledger.read_views import ReadView
from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import DEFAULT_STORE
from coordinator.model.schema import StateSchema
from statefleet.reads.batching import Batcher
from statefleet.reads.filters import Filter, column_is, expression_of
from statefleet.reads.keys import FoundKey
from statefleet.reads.portable import Opened, PortableScan
from statefleet.reads.projections import Projection, form_of, named_part
from statefleet.reads.rows import PARTITION_FIELD, Rows
from statefleet.reads.shard_reads import ReadVersion, ShardReads
from store_actors.messages import ReadProjection

__all__ = ["StateScans"]


class StateScans:
    """What :class:`~statefleet.reads.state.LiveState` is made of: its rows, many at a time.

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
        self, reads: ShardReads, opened: Opened, name: str, part: str = "", pinned: ReadVersion | None = None
    ) -> None:
        self.name = name
        self._opened = opened
        self.part = part
        self._reads = reads
        self._pinned = pinned or ReadVersion()
        self._former: tuple[StateSchema | None, int, Projection] | None = None
        #: By the columns that are wanted.
        self._look_ups: dict[tuple[str, ...] | None, Batcher[Mapping[str, Any], FoundKey]] = {}

    def scan(
        self,
        columns: Sequence[str] | None = None,
        filter: Filter | None = None,
        limit: int | None = None,
        *,
        partition_id: bool = False,
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
        partition_id
            Whether the number of a row's shard comes last, as ``partition_id``.

        Raises
        ------
        InvalidRequestError
            There is no such column.
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
        pinned: ReadVersion | None = None,
        partition_id: bool = False,
        position: str = "",
    ) -> Rows:
        # Pinned now: however slowly it is read, it is one version.
        view = view or self._view()
        form = self._form(view)
        asking = form.filtering(columns, chosen, filtered)
        if partition_id and PARTITION_FIELD.name in form.shown.schema.names:
            raise InvalidRequestError(
                "the state has a column of this name itself; take the rows of each shard: rows.of_shard(number)",
                column=PARTITION_FIELD.name,
            )
        at = ReadVersion.to(view)
        told = columns, chosen, since, partition_id
        scan = PortableScan(self._opened, self.name, self.part, self._reads.is_committed, at, *told)
        return Rows(self._reads, view, pinned or self._pinned, form, asking, scan, limit, position)

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
        """What each commit after one version, up to another, did to the state's rows.

        Parameters
        ----------
        since, until
            Versions; until the one that is read, by default. For `since`, the ``position`` of rows that were read before says which
            version it was, and which attempts had made it: what was replaced since is then told.
        columns, filter
            As :meth:`scan`; the filter may look at the columns of changes, too, if it is an expression.
        limit, partition_id
            As :meth:`scan`.

        Returns
        -------
        Rows
            Rows as each commit left them, and those that it removed as they were last; with ``_change_type`` (``upsert`` or
            ``delete``), ``_commit_version`` and ``_commit_timestamp``. Shard by shard; of a shard in the order of its commits.

        Raises
        ------
        InvalidRequestError
            There is no such column, `until` is before `since`, or `since` is no position.
        VersionReplacedError
            The version of the position was made anew since; of a version with consistency ``finished`` only if somebody changed
            Spark's checkpoint.
        VersionNotFoundError
            The commits are not retained; told when they are read.
        """
        after = _pinned_since(since)
        assert after.version is not None
        if until is not None and until < after.version:
            raise InvalidRequestError("changes are of later versions than the one given", since=since, until=until)
        view, chosen = self._view() if until is None else self._reads.view(ReadVersion(until)), expression_of(filter)
        if after.version > view.version:
            # A run has begun again with the version's batch, or a coordinator that was replaced answers: nothing new, as yet.
            position = f"{after.version}:{after.lineage}"
            return self._scan(columns, *chosen, 0, view, after.version, partition_id=partition_id, position=position)
        if after.lineage:
            self._reads.view(after)
        return self._scan(columns, *chosen, limit, view, after.version, partition_id=partition_id)

    def prefix_scan(
        self, prefix: Mapping[str, Any], columns: Sequence[str] | None = None, limit: int | None = None
    ) -> Rows:
        """Rows whose leading key columns have these values.

        Raises
        ------
        InvalidRequestError
            These are not the leading key columns, or a value is of a wrong type.
        """
        form = self._known_form()
        leading = form.shown.keys[: len(prefix)]
        if not prefix or set(leading) != set(prefix):
            raise InvalidRequestError(
                "a prefix is made of the leading key columns",
                keys=", ".join(form.shown.keys),
                got=", ".join(prefix),
            )
        parts = [column_is(form.shown.schema.field(name), prefix[name]) for name in leading]
        return self._scan(columns, reduce(and_, parts), leading, limit)

    # -- how they are asked for -------------------------------------------------------------------------------------

    def _view(self) -> ReadView:
        return self._reads.view(self._pinned)

    def _known_form(self) -> Projection:
        """As a look-up takes it: columns change with a query's program only, so what was known a moment ago will do."""
        return self._form(self._reads.believed(self._pinned))

    def _form(self, view: ReadView) -> Projection:
        schema, epoch = view.metadata.schema, view.id.epoch
        if self._former is not None:
            known, known_epoch, known_form = self._former
            if known == schema and same_description(known, schema) and (schema or known_epoch == epoch):
                return known_form
        form = form_of(view, self.part, None)
        if form is None:
            form = form_of(view, self.part, self._described(view))
            assert form is not None
        self._former = schema, epoch, form
        return form

    def _described(self, view: ReadView) -> StateSchema:
        """Columns of a store that only its user knows."""
        form = ReadProjection(None).encoded()
        found = self._reads.describe(self._pinned, named_part(view, self.part) or DEFAULT_STORE, form)
        if found is None:
            raise InvalidRequestError(
                "nothing was ever written to the store, so nobody knows its columns", state=self.name, part=self.part
            )
        return found


def _pinned_since(since: int | str) -> ReadVersion:
    """A version, or a position in the changes of a state: the version and its lineage."""
    if isinstance(since, int):
        return ReadVersion(since)
    version, _, lineage = since.partition(":")
    if not version.isdecimal():
        raise InvalidRequestError("this is no position of rows that were read, and no version", since=since)
    return ReadVersion(int(version), lineage=lineage)

"""Rows in which two versions of a state differ.

Where the commits between them are retained, only the keys that these touched are queried in both versions. Else whole shards are
compared, or whole versions if the state was rescaled in between. It goes a piece at a time: memory has the rows of one shard at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from coordinator.ledger.read_views import ReadView
from coordinator.model.errors import InvalidRequestError, VersionNotFoundError
from statefleet.reads.databases import isolated_database
from statefleet.reads.projections import Projection
from statefleet.reads.rows import Rows
from statefleet.reads.shard_reads import KeyPlan, ReadVersion, ShardReads
from store_actors.messages.requests import CHANGE_FIELDS

#: ``delete`` for a row that only the earlier version has, ``insert`` for one that only the later version has.
CHANGE_TYPE = pa.field("_change_type", pa.string())

#: Keys that are compared at once.
_KEYS = 1 << 16
#: Rows of commits that are read to know the keys that they touched: this number, and this many times the rows of the shards. Beyond
#: that, comparing the shards costs less.
_FEW_ROWS = 1 << 16
_TIMES_ROWS = 2

#: A row that one version has more often than the other is returned that many times, as by ``EXCEPT ALL`` both ways; each version is
#: read once.
_DIFFERENCE = """
with counted as (
    select * exclude (__more), sum(__more) as __more
    from (select *, -1 as __more from former union all select *, 1 as __more from later)
    group by all
    having sum(__more) <> 0
)
select counted.* exclude (__more), if(__more < 0, 'delete', 'insert') as _change_type
from counted, lateral (select unnest(range(abs(__more)::bigint)))
"""


@dataclass(frozen=True, slots=True)
class Side:
    """A version that is compared with another."""

    reads: ShardReads
    view: ReadView
    projection: Projection
    rows: Rows

    def of_keys(self, shards: Sequence[int], keys: pa.Table) -> pa.Table:
        """Return the rows of keys on some shards."""
        leaves = pa.Table.from_batches([self.projection.view_columns.key_leaves(keys)])

        def plan(view: ReadView) -> KeyPlan:
            by_shard = dict.fromkeys((shard for shard in shards if view.has_rows(shard)), leaves)
            return KeyPlan(self.projection.store_name, self.projection.encoded(None), by_shard)

        _, _, rows_by_shard = self.reads.find(ReadVersion.to(self.view), plan)
        return pa.concat_tables(
            [self.rows.schema.empty_table(), *(of_shard.rows for of_shard in rows_by_shard.values())]
        )

    def of_shards(self, shards: Sequence[int]) -> pa.RecordBatchReader:
        """Return a reader of all rows of some shards, a piece at a time; it can be read once."""
        batches = (batch for shard in shards for table in self.rows.of_shard(shard) for batch in table.to_batches())
        return pa.RecordBatchReader.from_batches(self.rows.schema, batches)


def differing(earlier: Side, later: Side, changed: Rows | None, limit: int | None) -> pa.Table:
    """Return the rows that only one of two versions has; see :meth:`LiveState.diff <statefleet.reads.state.LiveState.diff>`.

    `changed` are changes by the commits between them, with the key columns alone; None if these cannot be used.
    """
    if earlier.rows.schema.names != later.rows.schema.names:
        raise InvalidRequestError(
            "the two versions have other columns, as the query was changed in between; nothing was changed; compare scans of "
            "state.at(version)",
            former=", ".join(earlier.rows.schema.names),
            later=", ".join(later.rows.schema.names),
        )
    pieces = [pa.schema([*later.rows.schema, CHANGE_TYPE]).empty_table()]
    for piece in _differences(earlier, later, changed):
        pieces.append(piece.slice(0, limit))
        limit = None if limit is None else limit - pieces[-1].num_rows
        if limit == 0:
            break
    return pa.concat_tables(pieces)


def _differences(earlier: Side, later: Side, changed: Rows | None) -> Iterator[pa.Table]:
    num_rows = later.reads.version_stats(1)[0].state_rows
    is_same = earlier.view.id.first_partition == later.view.id.first_partition
    with isolated_database() as database:
        for before, after in _shard_groups(earlier, later, is_same):
            most = _FEW_ROWS + _TIMES_ROWS * num_rows * len(after) // later.rows.num_shards
            keys = _touched(database, changed, after, most) if changed is not None and is_same else None
            if keys is None:
                yield _difference(database, earlier.of_shards(before), later.of_shards(after), later.rows.schema)
                continue
            for begin in range(0, keys.num_rows, _KEYS):
                slice_of_keys = keys.slice(begin, _KEYS)
                sides = earlier.of_keys(before, slice_of_keys), later.of_keys(after, slice_of_keys)
                yield _difference(database, *sides, later.rows.schema)


def _shard_groups(former: Side, later: Side, is_same: bool) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yield shards of both sides that have the same keys: one by one, or all of them together."""
    before, after = (range(side.rows.num_shards) for side in (former, later))
    if is_same and (later.projection.routing or len(after) == 1):
        yield from (([shard], [shard]) for shard in after)
    else:
        yield before, after


def _touched(database: Any, changed: Rows, shards: Sequence[int], most: int) -> pa.Table | None:
    """Return the keys that commits touched, each once; None if they are not known, or finding them costs more than it saves."""
    keys: list[pa.Table] = []
    count = 0
    try:
        for shard in shards:
            for table in changed.of_shard(shard):
                count += table.num_rows
                if count > most:
                    return None
                keys.append(table.drop_columns([field.name for field in CHANGE_FIELDS]))
    except VersionNotFoundError:  # not all of the commits are retained
        return None
    if not keys:
        return pa.table({})
    database.register("touched", pa.concat_tables(keys))
    return database.sql("select distinct * from touched").to_arrow_table().cast(keys[0].schema)


def _difference(database: Any, former: Any, later: Any, schema: pa.Schema) -> pa.Table:
    """Return the rows that only one of two tables has, with the Arrow types that DuckDB was given."""
    database.register("former", former)
    database.register("later", later)
    return database.sql(_DIFFERENCE).to_arrow_table().cast(pa.schema([*schema, CHANGE_TYPE]))

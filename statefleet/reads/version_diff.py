"""Rows in which two versions of a state differ.

Where the commits between them are retained, only keys that these touched are looked up at both; else whole shards are compared, or
whole versions if the state was rescaled in between. A piece at a time: what is held is of one shard at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from coordinator.ledger.read_views import ReadView
from coordinator.ledger.version_stats import VersionStats
from coordinator.model.errors import InvalidRequestError, VersionNotFoundError
from statefleet.reads.databases import isolated_database
from statefleet.reads.projections import Projection
from statefleet.reads.rows import Rows
from statefleet.reads.shard_reads import ReadVersion, ShardReads
from store_actors.messages import CHANGE_FIELDS

__all__ = ["Side", "differing"]

#: What the log tells of so many of the newest versions, newest first.
Figures: TypeAlias = Callable[[int], tuple[VersionStats, ...]]

#: Of a row that only one of two versions has: ``delete`` if it is the former one, ``insert`` if it is the later one.
CHANGE_TYPE = pa.field("_change_type", pa.string())

#: Keys that are compared at once.
_KEYS = 1 << 16
#: Rows of commits that are read to know a shard's keys: so many, and so many times as many as it has. Beyond, comparing it costs less.
_FEW_ROWS = 1 << 16
_AS_LONG = 2

#: A row that one of the two has more often comes so often, as by ``EXCEPT ALL`` both ways; each is read once.
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
    """One of two versions.

    Attributes
    ----------
    rows
        All of its rows.
    """

    reads: ShardReads
    view: ReadView
    form: Projection
    rows: Rows

    def of_keys(self, shards: Sequence[int], keys: pa.Table) -> pa.Table:
        """Rows of some keys on some shards."""
        leaves = pa.Table.from_batches([self.form.shown.key_leaves(keys)])

        def plan(view: ReadView) -> tuple[str, bytes, dict[int, pa.Table]]:
            asked = dict.fromkeys((shard for shard in shards if view.has_rows(shard)), leaves)
            return self.form.store_name, self.form.asking(None), asked

        _, found = self.reads.find(ReadVersion.to(self.view), plan)
        return pa.concat_tables([self.rows.schema.empty_table(), *(one.rows for one in found.values())])

    def of_shards(self, shards: Sequence[int]) -> pa.RecordBatchReader:
        """All rows of some shards, a piece at a time, once."""
        batches = (batch for shard in shards for table in self.rows.of_shard(shard) for batch in table.to_batches())
        return pa.RecordBatchReader.from_batches(self.rows.schema, batches)


def differing(former: Side, later: Side, changed: Rows | None, limit: int | None, figures: Figures) -> pa.Table:
    """Rows that only one of two versions has; see :meth:`LiveState.diff <statefleet.reads.state.LiveState.diff>`.

    Parameters
    ----------
    changed
        What the commits between them did to the rows of each shard, with the key columns alone; None if that is no help.
    figures
        Tells of the newest version how many rows there are.
    """
    if former.rows.schema.names != later.rows.schema.names:
        raise InvalidRequestError(
            "the two versions have other columns, as the query was changed in between; nothing was changed; compare scans of "
            "state.at(version)",
            former=", ".join(former.rows.schema.names),
            later=", ".join(later.rows.schema.names),
        )
    found = [pa.schema([*later.rows.schema, CHANGE_TYPE]).empty_table()]
    for piece in _differences(former, later, changed, figures(1)[0].state_rows):
        found.append(piece.slice(0, limit))
        limit = None if limit is None else limit - found[-1].num_rows
        if limit == 0:
            break
    return pa.concat_tables(found)


def _differences(former: Side, later: Side, changed: Rows | None, num_rows: int) -> Iterator[pa.Table]:
    is_same = former.view.id.first_partition == later.view.id.first_partition
    with isolated_database() as database:
        for ours, theirs in _parts(former, later, is_same):
            most = _FEW_ROWS + _AS_LONG * num_rows * len(theirs) // later.rows.num_shards
            keys = _touched(database, changed, theirs, most) if changed is not None and is_same else None
            if keys is None:
                yield _difference(database, former.of_shards(ours), later.of_shards(theirs), later.rows.schema)
                continue
            for begin in range(0, keys.num_rows, _KEYS):
                some = keys.slice(begin, _KEYS)
                both = former.of_keys(ours, some), later.of_keys(theirs, some)
                yield _difference(database, *both, later.rows.schema)


def _parts(former: Side, later: Side, is_same: bool) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Shards of both sides that have the same keys: one by one, or all of them together."""
    before, after = (range(one.rows.num_shards) for one in (former, later))
    if is_same and (later.form.routing or len(after) == 1):
        yield from (([shard], [shard]) for shard in after)
    else:
        yield before, after


def _touched(database: Any, changed: Rows, shards: Sequence[int], most: int) -> pa.Table | None:
    """Keys that commits touched, each once; None if that is not known, or takes longer to find out than it saves."""
    found: list[pa.Table] = []
    count = 0
    try:
        for shard in shards:
            for table in changed.of_shard(shard):
                count += table.num_rows
                if count > most:
                    return None
                found.append(table.drop_columns([field.name for field in CHANGE_FIELDS]))
    except VersionNotFoundError:  # not all of the commits are retained
        return None
    if not found:
        return pa.table({})
    database.register("touched", pa.concat_tables(found))
    return database.sql("select distinct * from touched").to_arrow_table().cast(found[0].schema)


def _difference(database: Any, former: Any, later: Any, schema: pa.Schema) -> pa.Table:
    """Rows that only one of two tables has, in Spark's types, as DuckDB was given them."""
    database.register("former", former)
    database.register("later", later)
    return database.sql(_DIFFERENCE).to_arrow_table().cast(pa.schema([*schema, CHANGE_TYPE]))

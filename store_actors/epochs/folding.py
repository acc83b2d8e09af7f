"""How an operator's shard takes the rows of an epoch: piece by piece, or all of them when the epoch is sealed. Pure."""

from __future__ import annotations

from typing import Protocol, TypeAlias, cast

import pyarrow as pa

from coordinator.model.schema import OperatorKind
from store_actors.engine.versions import Change
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import ChangedGroups, UnsafeInput
from store_actors.operators.aggregate_results import results_of
from store_actors.operators.make_shard import OperatorShard

_IN_PIECES = (OperatorKind.AGGREGATE, OperatorKind.DEDUPLICATE)


#: Results of a shard.
Emitted: TypeAlias = pa.Table | ChangedGroups


class FoldingShard(Protocol):
    """A shard that takes the rows of a version in pieces; see :class:`~store_actors.operators.aggregate.AggregateShard`."""

    @property
    def emits_at_seal(self) -> bool:
        """Whether it emits when the version is sealed, and nothing before."""

    @property
    def held_bytes(self) -> int:
        """Bytes of rows of the open version that are held until the seal."""

    def open(self, version: int, late_ms: int | None = None) -> None:
        """Begin a version."""

    def fold(self, rows: ShardInput | UnsafeInput) -> Emitted | None:
        """Take a piece, and return what it emits, which can be read until the next one; None if that is emitted at the seal."""

    def seal(self, watermark_ms: int) -> Change:
        """Return the version's change."""

    def abort(self) -> None:
        """Drop the version."""


class HeldRows:
    """An operator whose shard takes the rows of a version all at once: they are held until it is sealed."""

    emits_at_seal = True

    def __init__(self, shard: OperatorShard) -> None:
        self._shard = shard
        self._version, self._late_ms = 0, cast("int | None", None)
        self._pieces: list[ShardInput] = []
        self.held_bytes = 0

    def open(self, version: int, late_ms: int | None = None) -> None:
        """Begin a version."""
        self.abort()
        self._version, self._late_ms = version, late_ms

    def fold(self, rows: ShardInput) -> None:
        """Hold the rows of a piece."""
        self._pieces.append(rows)
        self.held_bytes += sum(table.nbytes for table in rows.tables)

    def seal(self, watermark_ms: int) -> Change:
        """Apply all rows."""
        schemas = self._shard.schema.input_schemas()
        tables = tuple(
            pa.concat_tables([schema.empty_table(), *(piece.tables[number] for piece in self._pieces)])
            for number, schema in enumerate(schemas)
        )
        rows = ShardInput(tables, sum(piece.rows_read for piece in self._pieces))
        self.abort()
        return self._shard.apply(rows, watermark_ms, self._version, self._late_ms)

    def abort(self) -> None:
        """Drop the rows: the shard has none of them."""
        self._pieces, self.held_bytes = [], 0


def emitted_table(results: Emitted) -> pa.Table:
    """Return results as Arrow has them."""
    return results.table() if isinstance(results, ChangedGroups) else results


def folding_of(shard: OperatorShard) -> FoldingShard:
    """Return how a shard takes the rows of an epoch."""
    # Only an aggregation is given rows in Spark's own format.
    return cast("FoldingShard", shard if shard.schema.operator in _IN_PIECES else HeldRows(shard))


def emitted_at_seal(shard: OperatorShard, change: Change) -> pa.Table:
    """Return the rows that an epoch emits once it is sealed."""
    emitted = shard.output(change.delta) if change.emitted is None else change.emitted
    return results_of(emitted, shard.schema)

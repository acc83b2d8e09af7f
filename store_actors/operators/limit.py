"""First rows of all: ``limit(n)``. Pure logic.

One shard sees all rows, and its state is one row without a key: how many rows were let through so far. The rows are no state,
of any types; the delta carries those of its batch, each with the count that it made, so that a retry of a committed
batch emits the same rows. A batch that lets nothing through changes nothing.

Schema: no keys; ``inputs`` are the columns of a row; one ``VALUE``, int64: the count.
Option ``n``: how many rows are let through.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import StateSchema
from store_actors.engine.arrays import Slots
from store_actors.engine.index_kernels import LIVE
from store_actors.engine.memory import HEAP, Memory
from store_actors.engine.versions import CHANGE_COLUMN, UPDATED, Change, UndoPart, VersionedTable
from store_actors.messages import ShardInput

__all__ = ["LimitShard"]


class LimitShard(VersionedTable):
    """The count of rows that were let through.

    Parameters
    ----------
    schema
        As the module says.
    seed, memory
        As :class:`~store_actors.engine.table.GroupTable`.

    Raises
    ------
    InvalidRequestError
        The limit is negative.
    """

    def __init__(self, schema: StateSchema, seed: int = 0, memory: Memory = HEAP) -> None:
        super().__init__(schema, seed, memory)
        self._limit = int(schema.options["n"])
        if self._limit < 0:
            raise InvalidRequestError("a limit is at least 0; nothing was changed; give another one", n=self._limit)
        (self._count_column,) = (field.name for field in schema.state_fields)
        self._payload = [field.name for field in schema.inputs]

    def apply(self, rows: ShardInput, watermark_ms: int, version: int, late_ms: int | None = None) -> Change:
        """Let the first rows of a batch through, up to the limit; see :meth:`AggregateShard.apply`. No row is ever late."""
        step = self.begin(version)
        step.watermark_ms = watermark_ms
        before = self.table.taken(self.table.live())
        count = int(before[0, self.table.layout.state[0].word]) if len(before) else 0
        counts = np.arange(count, min(self._limit, count + rows.raw.num_rows)) + 1
        delta = self._delta(rows.raw.slice(0, len(counts)), counts)
        if len(counts):
            newest = delta.select([self._count_column]).slice(len(counts) - 1)
            made = self.table.rows_of(newest.combine_chunks().to_batches()[0])
            self.table.put(made)
            made[:, 0] |= LIVE
            step.parts.append(UndoPart(made[:0] if len(before) else made, before))
        return Change(
            version=version,
            base_version=self.version,
            delta=delta,
            rows_updated=int(len(counts) > 0),
            rows_removed=0,
            rows_in=rows.rows_read,
            rows_late=0,
            watermark_ms=watermark_ms,
        )

    def _delta(self, first: pa.Table, counts: Slots) -> pa.Table:
        payload = [first.column(name) for name in self._payload]
        changes = pa.array(np.full(len(counts), UPDATED, np.int8))
        names = [self._count_column, *self._payload, CHANGE_COLUMN]
        return pa.table([pa.array(counts, pa.int64()), *payload, changes], names=names)

    def load(self, delta: pa.Table, version: int, watermark_ms: int) -> None:
        """Replay a delta, of which only the last count matters; see :meth:`VersionedTable.load`."""
        counts = delta.select([self._count_column, CHANGE_COLUMN])
        super().load(counts.slice(max(0, counts.num_rows - 1)), version, watermark_ms)

    def output(self, delta: pa.Table) -> pa.Table:
        """Rows that the batch let through."""
        return delta.filter(pc.equal(delta.column(CHANGE_COLUMN), UPDATED)).select(self._payload)

"""The operator ``limit(n)``, which emits the first `n` rows of a query. Pure logic.

One shard gets all rows. Its state is one row without a key: the number of rows emitted so far. The emitted rows are not part of the
state and may have any types. A delta has the emitted rows of its batch, each with the number of rows up to it, so that a retry of a
committed batch emits the same rows. A batch that emits nothing changes nothing.

Schema: no keys; ``inputs`` are the columns of a row; one ``VALUE``, int64: the number of rows emitted.
Option ``n``: the largest number of rows to emit.
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
from store_actors.messages.requests import ShardInput


class LimitShard(VersionedTable):
    """The number of rows that were emitted.

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
        """Emit the first rows of a batch, up to the limit; see :meth:`AggregateShard.apply`. No row is ever late."""
        step = self.begin(version)
        step.watermark_ms = watermark_ms
        previous = self.table.taken(self.table.live())
        count = int(previous[0, self.table.layout.state[0].word]) if len(previous) else 0
        counts = np.arange(count, min(self._limit, count + rows.raw.num_rows)) + 1
        delta = self._delta(rows.raw.slice(0, len(counts)), counts)
        if len(counts):
            newest = delta.select([self._count_column]).slice(len(counts) - 1)
            count_row = self.table.rows_of(newest.combine_chunks().to_batches()[0])
            self.table.put(count_row)
            count_row[:, 0] |= LIVE
            step.parts.append(UndoPart(count_row[:0] if len(previous) else count_row, previous))
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

    def _delta(self, rows: pa.Table, counts: Slots) -> pa.Table:
        payload = [rows.column(name) for name in self._payload]
        changes = pa.array(np.full(len(counts), UPDATED, np.int8))
        names = [self._count_column, *self._payload, CHANGE_COLUMN]
        return pa.table([pa.array(counts, pa.int64()), *payload, changes], names=names)

    def load(self, delta: pa.Table, version: int, watermark_ms: int) -> None:
        """Replay a delta, whose last count is the state; see :meth:`VersionedTable.load`."""
        counts = delta.select([self._count_column, CHANGE_COLUMN])
        super().load(counts.slice(max(0, counts.num_rows - 1)), version, watermark_ms)

    def output(self, delta: pa.Table) -> pa.Table:
        """Return the rows that the batch emits."""
        return delta.filter(pc.equal(delta.column(CHANGE_COLUMN), UPDATED)).select(self._payload)

"""Rows of one version of a state, in whatever form they are wanted, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from coordinator.reading import ReadView
from store_actors.live.forms import Form
from store_actors.live.shard_reads import Pinned, ShardReads

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Rows"]


class Rows:
    """Rows of a scan: iterable, any number of times, always of the same version.

    Parameters
    ----------
    reads
        The way to the shards.
    view, pinned
        The version.
    form, columns, asking
        Columns, and what is sent for them.
    limit
        Most rows to give.
    """

    def __init__(
        self,
        reads: ShardReads,
        view: ReadView,
        pinned: Pinned,
        form: Form,
        columns: Sequence[str] | None,
        asking: bytes,
        limit: int | None,
    ) -> None:
        self._reads, self._view, self._pinned = reads, view, pinned
        self._form, self._asking, self._limit = form, asking, limit
        names = form.shown.schema.names if columns is None else columns
        self.schema = pa.schema([form.shown.schema.field(name) for name in names])

    @property
    def version(self) -> int:
        """The version that is read."""
        return self._view.version

    @property
    def num_shards(self) -> int:
        """Shards that the rows are on."""
        return len(self._view.versions)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        left = self._limit
        for shard in range(self.num_shards):
            for table in self.of_shard(shard, left):
                yield from table.to_batches()
                if left is not None:
                    left -= table.num_rows
            if left == 0:
                return

    def of_shard(self, shard: int, limit: int | None = None) -> Iterator[pa.Table]:
        """Rows of one shard, a piece at a time."""
        if self._view.attempts[shard]:
            yield from self._reads.scan(self._view, self._pinned, self._form.store_name, self._asking, shard, limit)

    def to_arrow(self) -> pa.Table:
        """All of them as an Arrow table."""
        return pa.Table.from_batches(self, self.schema)

    def to_pandas(self, **options: Any) -> pd.DataFrame:
        """All of them as a pandas DataFrame; options are those of :meth:`pyarrow.Table.to_pandas`."""
        return self.to_arrow().to_pandas(**options)

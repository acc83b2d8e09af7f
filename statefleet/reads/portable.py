"""A scan that other processes carry out, a shard each: in Ray's tasks and in Spark's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from statefleet.reads.shard_reads import ReadVersion

__all__ = ["Opened", "PortableScan", "ray_datasource"]


class RowsByShard(Protocol):
    """Rows of a version; see :class:`~statefleet.reads.rows.Rows`."""

    def of_shard(self, shard: int) -> Iterator[pa.Table]:
        """Rows of one shard, a piece at a time."""


@dataclass(frozen=True)
class Opened:
    """How a process came to a fleet's states, and how another one does.

    Attributes
    ----------
    opener, arguments
        A function that opens the fleet, which can be pickled, and what it is given.
    """

    opener: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def fleet(self) -> Any:
        """The fleet, in this process."""
        return self.opener(**self.arguments)


@dataclass(frozen=True)
class PortableScan:
    """Rows of a version, as :meth:`~statefleet.reads.scans.StateScans.scan` is asked for them, of the very shards and attempts."""

    opened: Opened
    name: str
    part: str
    is_committed: bool
    pinned: ReadVersion
    columns: Sequence[str] | None
    filter: pc.Expression | None
    since: int | None = None
    partition_id: bool = False

    def rows(self) -> RowsByShard:
        """The scan in this process."""
        consistency = "committed" if self.is_committed else "finished"
        # By the shards that were counted when the scan was made: there may be others by now.
        state = self.opened.fleet().state(self.name, self.part, consistency=consistency).pinned(self.pinned)
        told = {"columns": self.columns, "filter": self.filter, "partition_id": self.partition_id}
        rows: RowsByShard = state.scan(**told) if self.since is None else state.changes(self.since, **told)
        return rows

    def of_shard(self, shard: int) -> Iterator[pa.Table]:
        """Rows of one shard, a piece at a time."""
        return self.rows().of_shard(shard)

    def in_spark(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """A ``mapInArrow`` function over numbers of shards."""
        for batch in batches:
            for shard in batch.column(0).to_pylist():
                for table in self.of_shard(shard):
                    yield from table.to_batches()


def ray_datasource(scan: PortableScan, schema: pa.Schema, num_shards: int) -> Any:
    """A Ray Data source with a read task for each shard, whose pieces are blocks."""
    # Late: most readers have no need of Ray Data.
    from ray.data import Datasource, ReadTask
    from ray.data.block import BlockMetadata

    class StateDatasource(Datasource):
        def estimate_inmemory_data_size(self) -> int | None:
            return None

        def get_read_tasks(self, parallelism: int, *args: Any, **options: Any) -> list[ReadTask]:
            unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
            return [
                ReadTask(lambda shard=shard: scan.of_shard(shard), unknown, schema=schema)  # type: ignore[misc]
                for shard in range(num_shards)
            ]

    return StateDatasource()  # type: ignore[no-untyped-call]

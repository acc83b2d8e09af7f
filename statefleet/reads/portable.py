"""A scan that tasks of Ray or Spark carry out in other processes, a shard each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from statefleet.reads.shard_reads import ReadVersion


class RowsByShard(Protocol):
    """Rows of a version; see :class:`~statefleet.reads.rows.Rows`."""

    def of_shard(self, shard: int) -> Iterator[pa.Table]:
        """Yield the rows of one shard, a piece at a time."""


@dataclass(frozen=True)
class Opened:
    """The call by which this process opened a fleet's states, so that another process can make it.

    Attributes
    ----------
    opener, arguments
        A function that opens the fleet and can be pickled, and its arguments.
    """

    opener: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def fleet(self) -> Any:
        """Return the fleet, opened in this process."""
        return self.opener(**self.arguments)


@dataclass(frozen=True)
class PortableScan:
    """Arguments of :meth:`~statefleet.reads.scans.StateScans.scan`, with the shards and attempts of the version that is read."""

    opened: Opened
    name: str
    part: str
    is_committed: bool
    read_version: ReadVersion
    columns: Sequence[str] | None
    filter: pc.Expression | None
    since: int | None = None
    partition_id: bool = False

    def rows(self) -> RowsByShard:
        """Return the rows of the scan in this process."""
        consistency = "committed" if self.is_committed else "finished"
        # On the shards that the state had when the scan was made: it may have others by now.
        state = (
            self.opened.fleet()
            .state(self.name, self.part, consistency=consistency)
            .with_read_version(self.read_version)
        )
        arguments = {"columns": self.columns, "filter": self.filter, "partition_id": self.partition_id}
        rows: RowsByShard = state.scan(**arguments) if self.since is None else state.changes(self.since, **arguments)
        return rows

    def of_shard(self, shard: int) -> Iterator[pa.Table]:
        """Yield the rows of one shard, a piece at a time."""
        return self.rows().of_shard(shard)

    def in_spark(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of shards whose numbers are the first column: a function for ``mapInArrow``."""
        for batch in batches:
            for shard in batch.column(0).to_pylist():
                for table in self.of_shard(shard):
                    yield from table.to_batches()


def ray_datasource(scan: PortableScan, schema: pa.Schema, num_shards: int) -> Any:
    """Return a Ray Data source with a read task for each shard; a piece is a block."""
    # Imported here, since most readers do not need Ray Data.
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

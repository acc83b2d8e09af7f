"""Rows of one version of a state, a piece at a time: as Arrow, pandas, Polars, Ray Data or Spark."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from coordinator.ledger.read_views import ReadView
from coordinator.model.errors import InvalidRequestError
from coordinator.runtime.extras import import_extra
from coordinator.runtime.runtime import Pool
from spark_jobs.session.spark_connect import check_classic
from statefleet.reads.projections import Projection
from statefleet.reads.shard_reads import ReadVersion, ShardReads
from store_actors.messages.requests import CHANGE_FIELDS

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    from ray.data import Dataset


#: Number of the shard that a row is on, where a scan asks for it; named as by Spark's ``statestore`` reader.
PARTITION_FIELD = pa.field("partition_id", pa.int32(), nullable=False)
#: Number of shards whose first piece is fetched before it is used: enough to keep the cores of a small machine busy.
_SHARDS_AHEAD = 4
#: Age at which a scan that was begun ahead is begun again, in seconds: store actors drop a scan that no reader takes for a minute.
_STALE_S = 20.0


@dataclass(frozen=True)
class PortableScan:
    """A scan that tasks of Ray or Spark carry out in other processes, a shard each.

    It has the arguments of :meth:`~statefleet.reads.scans.StateScans.scan`, with the shards and attempts of the version that is read.
    """

    #: Opens the fleet in another process; it can be pickled.
    open_fleet: Callable[[], Any]
    name: str
    part: str
    is_committed: bool
    read_version: ReadVersion
    columns: Sequence[str] | None
    filter: pc.Expression | None
    since: int | None = None
    partition_id: bool = False

    def of_shard(self, shard: int) -> Iterator[pa.Table]:
        """Yield the rows of one shard, read in this process, a piece at a time."""
        consistency = "committed" if self.is_committed else "finished"
        # On the shards that the state had when the scan was made: it may have others by now.
        state = self.open_fleet().state(self.name, self.part, consistency=consistency)
        state = state.with_read_version(self.read_version)
        arguments = {"columns": self.columns, "filter": self.filter, "partition_id": self.partition_id}
        rows: Rows = state.scan(**arguments) if self.since is None else state.changes(self.since, **arguments)
        return rows.of_shard(shard)

    def in_spark(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of shards whose numbers are the first column: a function for ``mapInArrow``."""
        for batch in batches:
            for shard in batch.column(0).to_pylist():
                for table in self.of_shard(shard):
                    yield from table.to_batches()


class Rows:
    """Rows of a scan: iterable, any number of times, always of the same version."""

    def __init__(
        self,
        reads: ShardReads,
        view: ReadView,
        read_version: ReadVersion,
        projection: Projection,
        encoded: bytes,
        scan: PortableScan,
        limit: int | None,
        position: str = "",
    ) -> None:
        self._reads, self._view, self._read_version = reads, view, read_version
        self._projection, self._encoded, self._scan, self._limit = projection, encoded, scan, limit
        #: The version and its lineage. ``changes(since=)`` takes it, and raises an error if the version was replaced since.
        self.position = position or f"{view.version}:{view.lineage}"
        names = projection.view_columns.schema.names if scan.columns is None else scan.columns
        further = () if scan.since is None else CHANGE_FIELDS
        numbers = (PARTITION_FIELD,) if scan.partition_id else ()
        #: Columns of the rows.
        self.schema = pa.schema([*(projection.view_columns.schema.field(name) for name in names), *further, *numbers])

    @property
    def version(self) -> int:
        """The version that is read; for changes, the version after which later changes begin."""
        return int(self.position.partition(":")[0])

    @property
    def num_shards(self) -> int:
        """Number of shards that the rows are on."""
        return len(self._view.versions)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        if self._limit is None:
            shards = [partial(self.of_shard, shard) for shard in range(self.num_shards)]
            for table in _ahead(shards, self._reads.threads, self._reads.runtime.clock.elapsed_s):
                yield from table.to_batches()
            return
        remaining = self._limit
        for shard in range(self.num_shards if remaining else 0):
            for table in self.of_shard(shard, remaining):
                yield from table.to_batches()
                remaining -= table.num_rows
            if remaining == 0:
                return

    def of_shard(self, shard: int, limit: int | None = None, *, snapshot: int | None = None) -> Generator[pa.Table]:
        """Yield the rows of one shard, a piece at a time.

        Parameters
        ----------
        limit
            Maximum number of rows.
        snapshot
            Read the version from the files, beginning with the snapshot of this version (0: from the first delta, without a snapshot),
            even if memory has the version: to compare, or to find a damaged file.

        Raises
        ------
        InvalidRequestError
            The shard has no such snapshot, or changes are read, which no snapshot has. Raised when rows are read.
        CorruptStateError
            A file that is needed is missing or damaged.
        """
        if self._scan.since is not None and snapshot is not None:
            raise InvalidRequestError("changes are of commits, and not of a snapshot", snapshot=snapshot)
        if self._view.has_rows(shard):
            store, since, encoded = self._projection.store_name, self._scan.since, self._encoded
            for table in self._reads.scan(
                self._view, self._read_version, store, encoded, shard, limit, since, snapshot
            ):
                if self._scan.partition_id:
                    number = pa.repeat(pa.scalar(shard, PARTITION_FIELD.type), table.num_rows)
                    yield table.append_column(PARTITION_FIELD, number)
                else:
                    yield table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return a new Arrow stream, from which Polars, DuckDB and others read the rows without a copy, a piece at a time."""
        return pa.RecordBatchReader.from_batches(self.schema, iter(self)).__arrow_c_stream__(requested_schema)

    def to_arrow(self) -> pa.Table:
        """Return all rows as an Arrow table."""
        return pa.Table.from_batches(self, self.schema)

    def to_pandas(self, **options: Any) -> pd.DataFrame:
        """Return all rows as a pandas DataFrame; the options are those of :meth:`pyarrow.Table.to_pandas`."""
        return self.to_arrow().to_pandas(**options)

    def to_polars(self) -> pl.DataFrame:
        """Return all rows as a Polars DataFrame.

        Raises
        ------
        SetupError
            Polars is not installed.
        """
        frame: pl.DataFrame = import_extra("polars").from_arrow(self.to_arrow())
        return frame

    def to_ray_dataset(self) -> Dataset:
        """Return all rows as a Ray Dataset, which reads them when it is used: a task for each shard, a piece at a time."""
        import ray.data

        if self._limit is not None:
            return ray.data.from_arrow(self.to_arrow())
        dataset: Dataset = ray.data.read_datasource(_ray_datasource(self._scan, self.schema, self.num_shards))
        return dataset

    def to_spark(self, spark: Any) -> Any:
        """Return all rows as a Spark DataFrame, which reads them when it is used: a task for each shard, a piece at a time.

        Parameters
        ----------
        spark : pyspark.sql.SparkSession
            A session whose executors are on machines of the cluster.

        Returns
        -------
        pyspark.sql.DataFrame

        Raises
        ------
        SetupError
            It is a session of Spark Connect.
        """
        check_classic(spark)
        types: Any = import_module("pyspark.sql.pandas.types")
        kind = types.from_arrow_schema(self.schema)
        if self._limit is not None:
            return spark.createDataFrame(self.to_pandas(), kind)
        shards = spark.range(0, self.num_shards, 1, self.num_shards)
        return shards.mapInArrow(self._scan.in_spark, kind)


def _ahead(
    shards: Sequence[Callable[[], Generator[pa.Table]]], threads: Pool, elapsed_s: Callable[[], float]
) -> Generator[pa.Table]:
    """Yield all pieces of shards, in their order, while the first pieces of the next few shards are being fetched."""
    waiting: deque[_BegunScan] = deque()
    remaining = deque(shards)
    try:
        while remaining or waiting:
            while remaining and len(waiting) < _SHARDS_AHEAD:
                waiting.append(_BegunScan.now(remaining.popleft(), threads, elapsed_s()))
            if elapsed_s() - waiting[0].begun_s > _STALE_S:
                # None of its pieces was yielded yet, and its store actor may have taken the reader for dead.
                waiting[0].end()
                waiting[0] = _BegunScan.now(waiting[0].begin, threads, elapsed_s())
            scan = waiting[0]
            if (table := scan.first.result()) is not None:
                yield table
                yield from scan.pieces
            waiting.popleft()
    finally:
        # Store actors learn that the rest is not read.
        for scan in waiting:
            scan.end()


@dataclass(frozen=True, slots=True)
class _BegunScan:
    """A scan of a shard whose first piece is being fetched."""

    begin: Callable[[], Generator[pa.Table]]
    pieces: Generator[pa.Table]
    first: Any
    begun_s: float

    @classmethod
    def now(cls, begin: Callable[[], Generator[pa.Table]], threads: Pool, now_s: float) -> _BegunScan:
        pieces = begin()
        return cls(begin, pieces, threads.submit(next, pieces, None), now_s)

    def end(self) -> None:
        with suppress(Exception):  # the rows are not read any more
            self.first.result()
        self.pieces.close()


def _ray_datasource(scan: PortableScan, schema: pa.Schema, num_shards: int) -> Any:
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

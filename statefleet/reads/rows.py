"""Rows of one version of a state, in whatever form they are wanted, a piece at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from coordinator.ledger.read_views import ReadView
from coordinator.model.errors import InvalidRequestError, SetupError
from coordinator.runtime.runtime import Pool
from statefleet.reads.portable import PortableScan, ray_datasource
from statefleet.reads.projections import Projection
from statefleet.reads.shard_reads import ReadVersion, ShardReads
from store_actors.messages import CHANGE_FIELDS

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    from ray.data import Dataset

__all__ = ["PARTITION_FIELD", "Rows"]

#: Number of the shard that a row is on, where it is asked for; named as by Spark's ``statestore`` reader.
PARTITION_FIELD = pa.field("partition_id", pa.int32(), nullable=False)
#: Shards of which a piece is fetched before it is used: as many as keep the cores of a small machine busy.
_SHARDS_AHEAD = 4
#: After how long a scan that was begun ahead is begun anew, in seconds: store actors let go of what nobody takes for a minute.
_STALE_S = 20.0


class Rows:
    """Rows of a scan: iterable, any number of times, always of the same version.

    Parameters
    ----------
    reads
        The way to the shards.
    view, pinned
        The version.
    form, asking
        Columns, and what is sent for them.
    scan
        The same for other processes.
    limit
        Most rows to give.
    position
        See :attr:`position`; by default that of the view.
    """

    def __init__(
        self,
        reads: ShardReads,
        view: ReadView,
        pinned: ReadVersion,
        form: Projection,
        asking: bytes,
        scan: PortableScan,
        limit: int | None,
        position: str = "",
    ) -> None:
        self._reads, self._view, self._pinned = reads, view, pinned
        self._form, self._asking, self._scan, self._limit = form, asking, scan, limit
        #: The version and the attempts that made it: what ``changes(since=)`` takes, so that it tells if the version was replaced.
        self.position = position or f"{view.version}:{view.lineage}"
        names = form.shown.schema.names if scan.columns is None else scan.columns
        further = () if scan.since is None else CHANGE_FIELDS
        numbers = (PARTITION_FIELD,) if scan.partition_id else ()
        #: Columns of the rows.
        self.schema = pa.schema([*(form.shown.schema.field(name) for name in names), *further, *numbers])

    @property
    def version(self) -> int:
        """The version that is read; of changes, the one to ask for later ones by."""
        return int(self.position.partition(":")[0])

    @property
    def num_shards(self) -> int:
        """Shards that the rows are on."""
        return len(self._view.versions)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        if self._limit is None:
            shards = [partial(self.of_shard, shard) for shard in range(self.num_shards)]
            for table in _ahead(shards, self._reads.threads, self._reads.runtime.clock.elapsed_s):
                yield from table.to_batches()
            return
        left = self._limit
        for shard in range(self.num_shards if left else 0):
            for table in self.of_shard(shard, left):
                yield from table.to_batches()
                left -= table.num_rows
            if left == 0:
                return

    def of_shard(self, shard: int, limit: int | None = None, *, snapshot: int | None = None) -> Generator[pa.Table]:
        """Rows of one shard, a piece at a time.

        Parameters
        ----------
        limit
            Most rows to give.
        snapshot
            Read the version as files make it from the snapshot of this version on (0: from the start, without a snapshot), whatever
            memory has: to compare, or to find a damaged one.

        Raises
        ------
        InvalidRequestError
            The shard has no such snapshot, or changes are read, which are of no snapshot. Told when rows are taken.
        CorruptStateError
            A file on this way is missing or damaged.
        """
        if self._scan.since is not None and snapshot is not None:
            raise InvalidRequestError("changes are of commits, and not of a snapshot", snapshot=snapshot)
        if self._view.has_rows(shard):
            store, since, asking = self._form.store_name, self._scan.since, self._asking
            for table in self._reads.scan(self._view, self._pinned, store, asking, shard, limit, since, snapshot):
                if self._scan.partition_id:
                    number = pa.repeat(pa.scalar(shard, PARTITION_FIELD.type), table.num_rows)
                    yield table.append_column(PARTITION_FIELD, number)
                else:
                    yield table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Arrow's stream, a new one each time: Polars, DuckDB and others take the rows as they are, a piece at a time."""
        return pa.RecordBatchReader.from_batches(self.schema, iter(self)).__arrow_c_stream__(requested_schema)

    def to_arrow(self) -> pa.Table:
        """All of them as an Arrow table."""
        return pa.Table.from_batches(self, self.schema)

    def to_pandas(self, **options: Any) -> pd.DataFrame:
        """All of them as a pandas DataFrame; options are those of :meth:`pyarrow.Table.to_pandas`."""
        return self.to_arrow().to_pandas(**options)

    def to_polars(self) -> pl.DataFrame:
        """All of them as a Polars DataFrame.

        Raises
        ------
        SetupError
            Polars is not installed.
        """
        try:
            polars: Any = import_module("polars")
        except ImportError as error:
            raise SetupError("Polars is not installed here; pip install 'polars>=2.1,<3'", cause=error) from error
        frame: pl.DataFrame = polars.from_arrow(self.to_arrow())
        return frame

    def to_ray_dataset(self) -> Dataset:
        """All of them as a Ray Dataset, which is read when it is used: a task for each shard, a piece at a time."""
        import ray.data

        if self._limit is not None:
            return ray.data.from_arrow(self.to_arrow())
        dataset: Dataset = ray.data.read_datasource(ray_datasource(self._scan, self.schema, self.num_shards))
        return dataset

    def to_spark(self, spark: Any) -> Any:
        """All of them as a Spark DataFrame, which is read when it is used: a task for each shard, a piece at a time.

        Parameters
        ----------
        spark : pyspark.sql.SparkSession
            Its executors are on machines of the cluster.

        Returns
        -------
        pyspark.sql.DataFrame
        """
        types: Any = import_module("pyspark.sql.pandas.types")
        kind = types.from_arrow_schema(self.schema)
        if self._limit is not None:
            return spark.createDataFrame(self.to_pandas(), kind)
        shards = spark.range(0, self.num_shards, 1, self.num_shards)
        return shards.mapInArrow(self._scan.in_spark, kind)


def _ahead(
    shards: Sequence[Callable[[], Generator[pa.Table]]], threads: Pool, elapsed_s: Callable[[], float]
) -> Generator[pa.Table]:
    """All pieces of some shards, in their order. The first pieces of the next few are on their way while one is used."""
    waiting: deque[_Begun] = deque()
    left = deque(shards)
    try:
        while left or waiting:
            while left and len(waiting) < _SHARDS_AHEAD:
                waiting.append(_Begun.now(left.popleft(), threads, elapsed_s()))
            if elapsed_s() - waiting[0].begun_s > _STALE_S:
                # Nothing of it was given out yet, and its store actor may have taken the reader for dead.
                waiting[0].end()
                waiting[0] = _Begun.now(waiting[0].begin, threads, elapsed_s())
            one = waiting[0]
            if (table := one.first.result()) is not None:
                yield table
                yield from one.pieces
            waiting.popleft()
    finally:
        # Store actors are told that nobody takes the rest.
        for one in waiting:
            one.end()


@dataclass(frozen=True, slots=True)
class _Begun:
    """A shard whose first piece is on its way."""

    begin: Callable[[], Generator[pa.Table]]
    pieces: Generator[pa.Table]
    first: Any
    begun_s: float

    @classmethod
    def now(cls, begin: Callable[[], Generator[pa.Table]], threads: Pool, now_s: float) -> _Begun:
        pieces = begin()
        return cls(begin, pieces, threads.submit(next, pieces, None), now_s)

    def end(self) -> None:
        with suppress(Exception):  # of rows that nobody wants any more
            self.first.result()
        self.pieces.close()

"""Rows of one version of a state, in whatever form they are wanted, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from coordinator.errors import SetupError
from coordinator.reading import ReadView
from store_actors.live.forms import Form
from store_actors.live.portable import PortableScan, ray_datasource
from store_actors.live.shard_reads import Pinned, ShardReads
from store_actors.messages import CHANGE_FIELDS

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    from ray.data import Dataset

__all__ = ["Rows"]


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
    """

    def __init__(
        self,
        reads: ShardReads,
        view: ReadView,
        pinned: Pinned,
        form: Form,
        asking: bytes,
        scan: PortableScan,
        limit: int | None,
    ) -> None:
        self._reads, self._view, self._pinned = reads, view, pinned
        self._form, self._asking, self._scan, self._limit = form, asking, scan, limit
        names = form.shown.schema.names if scan.columns is None else scan.columns
        further = () if scan.since is None else CHANGE_FIELDS
        #: Columns of the rows.
        self.schema = pa.schema([*(form.shown.schema.field(name) for name in names), *further])

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
        if self._view.has_rows(shard):
            store, since = self._form.store_name, self._scan.since
            yield from self._reads.scan(self._view, self._pinned, store, self._asking, shard, limit, since)

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
            raise SetupError("Polars is not installed here; pip install 'statefleet[polars]'", cause=error) from error
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


def difference(before: Rows, after: Rows) -> pa.Table:
    """Rows that only one of two versions has, with ``_change_type``; see :meth:`LiveState.diff`."""
    # Late: most readers have no need of it.
    import duckdb

    with duckdb.connect() as database:
        database.register("former", before)
        database.register("later", after)
        one_way = "select *, '{kind}' as _change_type from (from {here} except all from {there})"
        gone, new = (
            one_way.format(kind="delete", here="former", there="later"),
            one_way.format(kind="insert", here="later", there="former"),
        )
        found = database.sql(f"{gone} union all {new}").to_arrow_table()
    # Spark's types, as DuckDB was given them.
    return found.cast(pa.schema([*after.schema, pa.field("_change_type", pa.string())]))

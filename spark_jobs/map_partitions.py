"""A user's function with an open state store in each partition of a streaming query: Spark's StateStoreRDD, for Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from coordinator.errors import InvalidRequestError
from coordinator.model import StateMetadata
from spark_jobs.fleet import Fleet
from spark_jobs.worker.fleet_client import FleetAddress, fleet_client
from spark_jobs.worker.state_store import StateStore, store_specs
from spark_jobs.worker.task import task_identity
from store_actors.messages import StoreSpec

__all__ = ["StoreFunction", "map_partitions_with_state_store"]

#: From the open store and the partition's batches to the batches to emit.
StoreFunction = Callable[[StateStore, Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]]

#: Column of the partition that a row was shuffled to.
_PARTITION = "__partition"


@dataclass(frozen=True, slots=True)
class _PartitionTask:
    """A ``mapInArrow`` function."""

    function: StoreFunction
    metadata: StateMetadata
    stores: tuple[StoreSpec, ...]
    address: FleetAddress

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = task_identity(self.metadata, None)
        rows = self._checked(batches, task.partition_id)
        # Whatever ends the function early, an error or Spark itself, aborts.
        with fleet_client(self.address).open_update(task, self.metadata, self.stores) as store:
            yield from self.function(store, rows)
            store.commit()

    def _checked(self, batches: Iterable[pa.RecordBatch], partition_id: int) -> Iterator[pa.RecordBatch]:
        """The rows, which are known to be this partition's."""
        for batch in batches:
            if batch.num_rows and batch.column(_PARTITION)[0].as_py() != partition_id:
                raise InvalidRequestError(
                    "the result of a function with a state store is a part of a union, where Spark numbers its partitions otherwise; "
                    "nothing was changed; put repartition after the function, or write its result in a query of its own",
                    state=self.metadata.state_name,
                )
            yield batch.drop_columns([_PARTITION])


def map_partitions_with_state_store(
    df: DataFrame,
    function: StoreFunction,
    schema: StructType | str,
    *,
    fleet: Fleet,
    name: str,
    partition_by: Sequence[str | Column],
    keys: pa.Schema | None = None,
    values: pa.Schema | None = None,
    stores: Mapping[str, tuple[pa.Schema, pa.Schema]] | None = None,
    shards: int | None = None,
) -> DataFrame:
    """Run a function over each partition of a streaming DataFrame, with the partition's state open.

    The function runs once a batch for every partition, also for those without rows. When it ends, the store is committed; when it
    raises, aborted, and Spark repeats the task on the same version. It may run more than once for a batch, and only one run counts.

    Parameters
    ----------
    df
        Streaming DataFrame.
    function
        Takes an open :class:`StateStore` and the partition's record batches; yields the batches to emit.
    schema
        Schema of what it yields, as for ``mapInArrow``.
    fleet, name
        Where the state lives; the name is unique in the fleet.
    partition_by
        Columns by which rows are put together; a key's rows must meet in one partition.
    keys, values
        Columns of the one store ``default``; or `stores`, by name.
    shards
        Number of partitions, fixed once the state exists.

    Raises
    ------
    InvalidRequestError
        The DataFrame is not streaming, or an argument is not valid.
    StateMismatchError
        The state exists and is of another kind or number of shards.
    """
    if not df.isStreaming:
        raise InvalidRequestError("state is kept for streaming queries; read with spark.readStream", state=name)
    specs = store_specs(keys, values, stores)

    def route(metadata: StateMetadata, address: FleetAddress) -> DataFrame:
        task = _PartitionTask(function, metadata, specs, address)
        columns: list[Any] = list(partition_by)
        parts = df.repartition(metadata.num_shards, *columns).withColumn(_PARTITION, F.spark_partition_id())
        return parts.mapInArrow(task, schema)

    return fleet.attach(df, name, "keyed", {}, shards, route)

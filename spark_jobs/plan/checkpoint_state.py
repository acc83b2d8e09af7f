"""State in Spark's own stores, read from a query's checkpoint by Spark's own classes.

Spark 3.5 has no reader of state, but every executor has its state store providers. A task opens the provider that wrote the
checkpoint, on one partition at one version (``StateRows.scala``), and passes its rows on to the plan. Nothing is written to the
checkpoint.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.errors import CorruptStateError
from spark_jobs.plan.aggregate_functions import AggregateFunction
from spark_jobs.plan.catalyst import java_class, java_type
from spark_jobs.plan.spark_version import SPARK
from spark_jobs.plan.stateful_exchange import jvm_classes

_STATE = "org.apache.spark.sql.execution.streaming.state"
SPARK_DEFAULT_STORE = "default"
_STRICT = "spark.sql.streaming.statefulOperator.useStrictDistribution"
#: Under which Spark tells its stores the id of a query's run.
_RUN_ID = "sql.streaming.runId"
#: Format of a checkpoint with stores.
_FORMAT = "spark.sql.streaming.stateStore.checkpointFormatVersion"
#: Without it, a store that is opened for a version would begin a file of the next one.
_READ_ONLY = {"spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "false"}


@dataclass(frozen=True)
class StoreSchema:
    """Columns of a state store, as its checkpoint records them."""

    keys: T.StructType
    values: T.StructType


@dataclass(frozen=True)
class SparkStore:
    """A state store of a checkpoint at a version."""

    #: The folder with the state of all operators.
    folder: str
    operator: int
    name: str
    version: int
    partitions: int
    #: Spark's settings that the files were written with.
    conf: Mapping[str, str]
    schema: StoreSchema
    #: For each partition the id in the names of its newest files; none in checkpoints of format 1, as Spark 3.5 writes them.
    snapshots: Sequence[str] = ()


def read_schema(spark: SparkSession, folder: str, operator: int, store: str) -> StoreSchema | None:
    """Return the columns of a store, which Spark writes beside its first partition; None if there is no such file.

    Raises
    ------
    CorruptStateError
        The file cannot be read.
    """
    session = spark._jsparkSession
    java, conf = java_class("org.apache.hadoop.fs.Path"), session.sessionState().newHadoopConf()
    store_id = java_class(f"{_STATE}.StateStoreId")(folder, operator, 0, store)
    path = java(java(store_id.storeCheckpointLocation(), "_metadata"), "schema")
    files = path.getFileSystem(conf)
    if not files.exists(path):
        return None
    run_id = java_class("java.util.UUID").randomUUID()
    try:
        provider_id = java_class(f"{_STATE}.StateStoreProviderId")(store_id, run_id)
        schemas = SPARK.store_schemas(java_class, provider_id, conf)
    except Py4JJavaError as error:
        raise CorruptStateError(
            "a file of the checkpoint that says what its state holds cannot be read; nothing was written; restore the checkpoint, or "
            "import it with the version of Spark that wrote it",
            file=str(path.toString()),
            cause=str(error.java_exception),
        ) from error
    keys, values = (T._parse_datatype_json_string(schema.json()) for schema in schemas)
    assert isinstance(keys, T.StructType)
    assert isinstance(values, T.StructType)
    return StoreSchema(keys, values)


def state_rows(
    spark: SparkSession,
    store: SparkStore,
    columns: T.StructType,
    *,
    prefix: int = 0,
    partitioned_by: int | None = None,
    functions: Sequence[AggregateFunction | None] = (),
) -> DataFrame:
    """Return the rows of a store, one partition in each task; a task fails at a row that belongs to another partition.

    `columns` are names and types of the key's columns, then the value's: types as in the store, except for nullability. By `prefix`
    leading columns of the key the operator looks up rows, 0 if it uses whole keys only; by `partitioned_by` Spark partitions them, None
    for the prefix, or the whole key. `functions` has, for each column of the value, the function whose buffer it is, if Spark stores
    that buffer as bytes. The column then has the function's result, or, for a function that counts values, an array of structs of each
    value and its count.
    """
    session = spark._jsparkSession
    settings = session.sessionState().newHadoopConf()
    # Spark 4's RocksDB store wants to know the run that opens it.
    settings.set(_RUN_ID, str(uuid.uuid4()))
    hadoop = java_class("org.apache.spark.util.SerializableConfiguration")(settings)
    # The store's own types: a provider checks its files by them.
    own_types = [java_type(spark, schema) for schema in (store.schema.keys, store.schema.values)]
    # The format is not among the settings that Spark logs.
    conf = _store_conf(spark, {**store.conf, _FORMAT: "2" if store.snapshots else "1"})
    sessions = jvm_classes(spark)
    rows = java_class("org.apache.spark.sql.statefleet.StateRows")(
        store.folder, store.operator, store.name, store.version, *own_types, prefix, conf, hadoop, java_type(spark, columns),
        [None if function is None else function._java for function in functions], list(store.snapshots),
    )  # fmt: skip
    frame = DataFrame(sessions.stateRows(session, store.partitions, rows), spark)
    # In checkpoints from before Spark 3.3 rows may be in other partitions: it used any partitioning that keeps equal keys together.
    if store.partitions == 1 or store.conf.get(_STRICT) != "true":
        return frame
    keys = [F.col(name) for name in frame.columns[: partitioned_by or prefix or len(store.schema.keys.fields)]]
    return checked_partitions(frame, f"{store.folder}/{store.operator}", store.partitions, keys, F.spark_partition_id())


def with_columns(rows: DataFrame, columns: T.StructType) -> DataFrame:
    """Return rows with other names of columns, and types that differ in nullability only."""
    session = rows.sparkSession._jsparkSession
    internal_rows = rows._jdf.queryExecution().toRdd()
    typed = session.internalCreateDataFrame(internal_rows, java_type(rows.sparkSession, columns), False)
    return DataFrame(typed, rows.sparkSession)


def checked_partitions(
    rows: DataFrame, folder: str, partitions: int, keys: Sequence[Column], present: Column
) -> DataFrame:
    """Return rows with a check that each is in the partition of its key: files of partitions can be swapped unnoticed.

    `present` is the partition in which a row was found.
    """
    expected = F.pmod(F.hash(*keys), F.lit(partitions))
    error = F.concat(
        F.lit(f"the files of the checkpoint's state {folder}/"),
        present.cast("string"),
        F.lit(" have rows of partition "),
        expected.cast("string"),
        F.lit(": they were swapped or copied; restore the checkpoint from a backup"),
    )
    return rows.where(F.when(expected == present, True).otherwise(F.raise_error(error).cast("boolean")))


def _empty_map() -> Any:
    return java_class("org.apache.spark.api.python.PythonUtils").toScalaMap(java_class("java.util.HashMap")())


def _store_conf(spark: SparkSession, conf: Mapping[str, str]) -> Any:
    """Return settings for a provider: the checkpoint's, then the session's."""
    settings = spark._jsparkSession.sessionState().conf().clone()
    for name, value in {**conf, **_READ_ONLY}.items():
        settings.setConfString(name, value)
    return java_class(f"{_STATE}.StateStoreConf")(settings, _empty_map())

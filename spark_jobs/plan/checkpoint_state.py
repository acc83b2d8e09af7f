"""State of a query that kept it in Spark's own stores, read from its checkpoint by Spark's own classes.

Spark 3.5 has no reader of state. Its providers are there on every executor: a task opens the one that the checkpoint was written with
on one partition at one version (``StateRows.java``) and gives its rows to the plan. Nothing is written to the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.errors import CorruptStateError
from spark_jobs.plan.aggregate_functions import AggregateFunction
from spark_jobs.plan.catalyst import java_class

__all__ = ["SPARK_DEFAULT_STORE", "SparkStore", "StoreSchema", "read_schema", "state_rows"]

_SOURCE = Path(__file__).with_name("StateRows.java")
_STATE = "org.apache.spark.sql.execution.streaming.state"
SPARK_DEFAULT_STORE = "default"
_STRICT = "spark.sql.streaming.statefulOperator.useStrictDistribution"
#: A store that is opened for a version would else begin a file of the next one.
_NEVER_BEGUN = {"spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "false"}


@dataclass(frozen=True)
class StoreSchema:
    """Columns of a state store, as its checkpoint says."""

    keys: T.StructType
    values: T.StructType


@dataclass(frozen=True)
class SparkStore:
    """A state store of a checkpoint at a version.

    Attributes
    ----------
    folder
        Of the state of all operators.
    partitions
        How many it has.
    conf
        Settings of Spark's that its files were written with.
    """

    folder: str
    operator: int
    name: str
    version: int
    partitions: int
    conf: Mapping[str, str]
    schema: StoreSchema


def read_schema(spark: SparkSession, folder: str, operator: int, store: str) -> StoreSchema | None:
    """Columns of a store, which Spark writes beside its first partition; None if it did not.

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
    nobody = java_class("java.util.UUID").randomUUID()
    checker = java_class(f"{_STATE}.StateSchemaCompatibilityChecker")
    try:
        found = checker(java_class(f"{_STATE}.StateStoreProviderId")(store_id, nobody), conf).readSchemaFile()
    except Py4JJavaError as error:
        raise CorruptStateError(
            "a file of the checkpoint that says what its state holds cannot be read; nothing was written; restore the checkpoint",
            file=str(path.toString()),
            cause=str(error.java_exception),
        ) from error
    keys, values = (T._parse_datatype_json_string(one.json()) for one in (found._1(), found._2()))
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
    opened: Sequence[AggregateFunction | None] = (),
) -> DataFrame:
    """Rows of a store, a partition to a task, which fails at a row that belongs to another partition.

    Parameters
    ----------
    columns
        Names and types of the key's columns, then the value's: types as in the store, but for what may be null.
    prefix
        How many leading columns of the key the operator looks rows up by; 0 if it does so by whole keys only.
    partitioned_by
        How many leading columns of the key Spark partitions rows by; by default the prefix, or the whole key.
    opened
        Of each column of the value the function whose buffer it is, if Spark keeps that as bytes: shown is then its result, or of one
        that counts values an array of structs of each value and its count.
    """
    session = spark._jsparkSession
    gateway = spark.sparkContext._gateway
    assert gateway is not None

    def array(items: Sequence[Any]) -> Any:
        made = gateway.new_array(gateway.jvm.java.lang.Object, len(items))
        for place, item in enumerate(items):
            made[place] = item
        return made

    functions = array([None if one is None else one._java for one in opened])
    hadoop = java_class("org.apache.spark.util.SerializableConfiguration")(session.sessionState().newHadoopConf())
    # Their own types: a provider checks what it reads by them.
    own = [session.parseDataType(one.json()) for one in (store.schema.keys, store.schema.values)]
    shown = session.parseDataType(columns.json())
    references = array(
        [
            store.folder, store.operator, store.name, store.version, *own, prefix, _store_conf(spark, store.conf), hadoop,
            shown, functions,
        ]
    )  # fmt: skip
    code = java_class("org.apache.spark.sql.catalyst.expressions.codegen.CodeAndComment")(_source(), _nothing())
    metrics = java_class("org.apache.spark.sql.execution.metric.SQLMetrics")
    time = metrics.createTimingMetric(session.sparkContext(), "state read", -1)
    made = java_class("org.apache.spark.sql.execution.WholeStageCodegenEvaluatorFactory")(code, time, references)
    partitions = session.range(0, store.partitions, 1, store.partitions).queryExecution().toRdd()
    rows = partitions.mapPartitionsWithEvaluator(made, partitions.elementClassTag())
    frame = DataFrame(session.internalCreateDataFrame(rows, shown, False), spark)
    return _in_place(frame, store, frame.columns[: partitioned_by or prefix or len(store.schema.keys.fields)])


def _in_place(rows: DataFrame, store: SparkStore, keys: Sequence[str]) -> DataFrame:
    """Rows of a store, each of which is in the partition where Spark puts its key: files of partitions can be swapped unseen."""
    # Checkpoints from before Spark 3.3 may have rows elsewhere: it took any partitioning that keeps equal keys together.
    if store.partitions == 1 or store.conf.get(_STRICT) != "true":
        return rows
    own = F.pmod(F.hash(*(F.col(name) for name in keys)), F.lit(store.partitions))
    error = F.concat(
        F.lit(f"the files of the checkpoint's state {store.folder}/{store.operator}/"),
        F.spark_partition_id().cast("string"),
        F.lit(" have rows of partition "),
        own.cast("string"),
        F.lit(": they were swapped or copied; restore the checkpoint from a backup"),
    )
    return rows.where(F.when(own == F.spark_partition_id(), True).otherwise(F.raise_error(error).cast("boolean")))


@cache
def _source() -> str:
    """The class's body without its comments, which Spark's code generation has elsewhere."""
    text = _SOURCE.read_text()
    return text[text.index("*/") + 2 :]


def _nothing() -> Any:
    return java_class("org.apache.spark.api.python.PythonUtils").toScalaMap(java_class("java.util.HashMap")())


def _store_conf(spark: SparkSession, conf: Mapping[str, str]) -> Any:
    """Settings for a provider: the session's, under those of the checkpoint."""
    own = spark._jsparkSession.sessionState().conf().clone()
    for name, value in {**conf, **_NEVER_BEGUN}.items():
        own.setConfString(name, value)
    return java_class(f"{_STATE}.StateStoreConf")(own, _nothing())

"""State in Spark's own stores, as Spark 4's own reader of state gives it: that of operators with several column families."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.errors import CorruptStateError, InvalidRequestError
from spark_jobs.plan.catalyst import JOB_FAILURES
from spark_jobs.plan.checkpoint_state import checked_partitions
from spark_jobs.plan.spark_version import SPARK
from statefleet.migration.checkpoint import SparkOperator

#: Columns of the reader with the key's columns, and with the value's, unless these are a collection.
KEY, VALUE = "key", "value"


def operator_properties(operator: SparkOperator) -> Mapping[str, Any]:
    """Return what Spark notes of an operator besides its stores; nothing for most operators.

    Raises
    ------
    InvalidRequestError, CorruptStateError
        As of :func:`read_state`.
    """
    with _reading(operator):
        of_all = operator.spark.read.format("state-metadata").load(operator.checkpoint.folder.uri)
        rows = of_all.where(F.col("operatorId") == operator.number).select("operatorProperties").collect()
    (properties,) = {row.operatorProperties for row in rows} or {""}
    return dict(json.loads(properties)) if properties else {}


def read_state(operator: SparkOperator, options: Mapping[str, str], partitioned_by: int | None = None) -> DataFrame:
    """Return rows of an operator's state, which fail in a task at a row that belongs to another partition.

    They have a struct ``key``, columns with its values, which depend on the options of the reader that choose a column family, and
    ``partition_id``. Spark partitions rows by the key's columns up to `partitioned_by`, None for all. Raises InvalidRequestError if the
    session's Spark has no such reader, CorruptStateError if partitions or descriptions of the state are missing or damaged.
    """
    checkpoint, partitions = operator.checkpoint, operator.partitions()
    with _reading(operator):
        reader = operator.spark.read.format("statestore").options(
            path=checkpoint.folder.uri, operatorId=operator.number, batchId=checkpoint.batch_id, **options
        )
        rows = reader.load()
    return checked_partitions(
        rows, operator.folder, partitions, key_parts(rows)[:partitioned_by], F.col("partition_id")
    )


def key_parts(rows: DataFrame) -> list[Column]:
    """Return the columns of the key."""
    return [F.col(KEY).getField(name) for name in struct_of(rows, KEY).names]


def struct_of(rows: DataFrame, column: str) -> T.StructType:
    """Return the type of a column that is a struct."""
    kind = rows.schema[column].dataType
    assert isinstance(kind, T.StructType), "a struct"
    return kind


@contextmanager
def _reading(operator: SparkOperator) -> Iterator[None]:
    """Raise an error of Spark's reader as one of the checkpoint."""
    if not SPARK.READS_STATE:
        raise InvalidRequestError(
            "Spark 4 wrote the state of this operator, which Spark 3.5 does not read; nothing was written; import it with Spark 4",
            checkpoint=operator.checkpoint.folder.uri,
            operator=operator.number,
        )
    try:
        yield
    except JOB_FAILURES as error:
        raise CorruptStateError(
            "Spark cannot read what the checkpoint says of the operator's state: it is damaged, or was written by a development "
            "version of Spark, or moved since (of a processor Spark notes full paths), or is that of another operator than the "
            "query's; nothing was written; put the checkpoint back to where it was, restore it from a backup, or build the query as "
            "the one was that made it",
            folder=operator.folder,
            cause=error,
        ) from error

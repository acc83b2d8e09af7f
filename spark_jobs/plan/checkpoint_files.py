"""Spark's checkpoint folders: one for a query that goes on from a version of a state, beside another query or without one.

A query is started by the newest of its logs ``offsets`` (what a batch was to read) and ``commits`` (that it was finished), and by the
offsets of the batch before (``MicroBatchExecution.populateStartOffsets`` of Spark 3.5). So these two batches, and what sources keep
of their own in ``sources``, are all that is needed to begin with the batch after.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql import SparkSession

from coordinator.model.errors import InvalidRequestError, StorageUnavailableError
from spark_jobs.plan.catalyst import java_class
from spark_jobs.plan.hadoop_files import HadoopFolder

__all__ = ["begin_checkpoint", "begin_logs", "copy_checkpoint", "copy_logs"]

_LOG_VERSION = "v1"
#: What the log has in place of the offset of a source that nothing was read of.
_NO_OFFSET = "-"
#: File of a checkpoint that was made for a branch: which branch, version and input.
_MADE_FOR = "statefleet-branch"


def copy_logs(folder: HadoopFolder, former: HadoopFolder, batch: int) -> None:
    """Have in a folder what another query's checkpoint says of a batch that it has finished."""
    before = f"offsets/{batch - 1}"
    if batch > 0:
        # If it is gone, the batch is as one without data, which was read already.
        folder.copy(former, before if former.exists(before) else f"offsets/{batch}", before)
    for path in (f"offsets/{batch}", f"commits/{batch}"):
        folder.copy(former, path)
    if former.exists("sources"):
        folder.copy(former, "sources")


def begin_logs(folder: HadoopFolder, batch: int, *, sources: int, batch_time_ms: int, watermark_ms: int) -> None:
    """Have in a folder a finished batch that read nothing of any source; see :func:`begin_checkpoint`."""
    # With the session's settings: those of the log count when the query is started.
    metadata = java_class("org.apache.spark.sql.execution.streaming.OffsetSeqMetadata")
    times = metadata.apply(watermark_ms, batch_time_ms, folder.spark._jsparkSession.conf()).json()
    offsets = "\n".join([_LOG_VERSION, str(times), *[_NO_OFFSET] * sources])
    for one in range(max(0, batch - 1), batch + 1):
        folder.write(f"offsets/{one}", offsets)
    folder.write(f"commits/{batch}", f"{_LOG_VERSION}\n{json.dumps({'nextBatchWatermarkMs': watermark_ms})}")


def copy_checkpoint(spark: SparkSession, source: str, target: str, version: int, branch: str) -> None:
    """A checkpoint whose query begins with the batch that reads a version, on the input that comes after it in another query's.

    Parameters
    ----------
    source, target
        Folders, as given to a query as ``checkpointLocation``. A `target` that was made so before is left as it is.
    version
        At least 1: the last batch that is taken over is the one before.
    branch
        Name of the state that it is for.

    Raises
    ------
    InvalidRequestError
        The source has not finished that batch, or does not tell of it any more; or the target is something else.
    StorageUnavailableError
        A folder cannot be read or written.
    """
    former, batch = HadoopFolder.of(spark, source), version - 1

    def fill(folder: HadoopFolder) -> None:
        if not (former.exists(f"offsets/{batch}") and former.exists(f"commits/{batch}")):
            raise InvalidRequestError(
                "the checkpoint does not tell of this batch: it is not finished, or Spark has let go of it "
                "(spark.sql.streaming.minBatchesToRetain); no checkpoint was written",
                checkpoint=source,
                batch_id=batch,
            )
        copy_logs(folder, former, batch)

    _make(spark, target, {"state": branch, "version": version, "from": former.uri}, fill)


def begin_checkpoint(
    spark: SparkSession, target: str, version: int, branch: str, *, sources: int, batch_time_ms: int, watermark_ms: int
) -> None:
    """A checkpoint whose query begins with the batch that reads a version, and each source where it would begin by itself.

    Parameters
    ----------
    target, branch
        As for :func:`copy_checkpoint`.
    sources
        How many sources the query has.
    batch_time_ms
        When the batch before was planned, in milliseconds since the epoch.
    watermark_ms
        Where event time stands.

    Raises
    ------
    InvalidRequestError, StorageUnavailableError
        As :func:`copy_checkpoint`.
    """
    batch = version - 1

    def fill(folder: HadoopFolder) -> None:
        begin_logs(folder, batch, sources=sources, batch_time_ms=batch_time_ms, watermark_ms=watermark_ms)

    _make(spark, target, {"state": branch, "version": version, "from": None}, fill)


def _make(spark: SparkSession, target: str, made_for: Mapping[str, Any], fill: Callable[[HadoopFolder], None]) -> None:
    """Fill a folder, which is there as a whole or not at all where the file system can rename folders."""
    folder, told = HadoopFolder.of(spark, target), json.dumps(made_for)
    if folder.exists():
        # Another query's own would have the branch's query go on as that one.
        if not folder.exists(_MADE_FOR) or folder.read(_MADE_FOR) != told:
            raise InvalidRequestError(
                "the folder of the new checkpoint has something else; nothing was changed; choose another one",
                checkpoint=target,
                **made_for,
            )
        return
    filling = HadoopFolder.of(spark, f"{target.rstrip('/')}.{uuid.uuid4().hex[:8]}")
    try:
        fill(filling)
        filling.write(_MADE_FOR, told)
        if not filling.rename(folder):
            raise StorageUnavailableError(
                "the folder of the new checkpoint cannot be given its name; it is not there; do it again",
                checkpoint=folder.uri,
            )
    finally:
        filling.delete()

"""Write a Spark checkpoint folder for a query that begins with a version of a state, with or without another query's checkpoint.

Spark starts a query from the newest entries of its logs ``offsets`` (the input of a batch) and ``commits`` (the batch is finished),
and from the offsets of the batch before (``MicroBatchExecution.populateStartOffsets`` of Spark 3.5). So the entries of these two
batches, the files of sources in ``sources``, and in Spark 4 the id of the query in ``metadata`` are all that a query needs to begin
with the batch after.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from coordinator.model.errors import CorruptStateError, InvalidRequestError, StorageUnavailableError
from spark_jobs.plan.catalyst import java_class

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_LOG_VERSION = "v1"
#: In the log, the offset of a source that was not read.
_NO_OFFSET = "-"
#: File of a checkpoint that was created for a branch, with the branch, the version and the input.
_BRANCH_FILE = "statefleet-branch"


def _storage_errors(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a method to raise StorageUnavailableError where it fails in the JVM, CorruptStateError if a file is damaged."""

    @wraps(method)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return method(*args, **kwargs)
        except Py4JJavaError as error:
            folder = args[0]
            if error.java_exception.getClass().getSimpleName() == "ChecksumException":
                raise CorruptStateError(
                    "a file of a checkpoint is not the one that the checksum beside it (.NAME.crc) is of: one of them is damaged, or "
                    "was replaced without the other; what is there of a new checkpoint is used by no query; restore both from a "
                    "backup, and repeat what you did",
                    folder=getattr(folder, "uri", folder),
                    cause=error.java_exception.toString(),
                ) from error
            raise StorageUnavailableError(
                "a checkpoint's folder cannot be read or written; what is there of a new one is used by no query; see that Spark can "
                "read and write it, and repeat what you did",
                folder=getattr(folder, "uri", folder),
                cause=error.java_exception.toString(),
            ) from error

    return wrapped


@dataclass(frozen=True, eq=False)
class HadoopFolder:
    """A folder; names are relative to it.

    All methods raise StorageUnavailableError if the file system fails, CorruptStateError if a file is not that of its checksum.
    """

    spark: SparkSession
    _path: Any

    @classmethod
    def of(cls, spark: SparkSession, location: str) -> HadoopFolder:
        """Return the folder of a URI or path, resolved as Spark resolves it."""
        return cls(spark, java_class("org.apache.hadoop.fs.Path")(location))._qualified()

    @_storage_errors
    def _qualified(self) -> HadoopFolder:
        return HadoopFolder(self.spark, self._files.makeQualified(self._path))

    @property
    def uri(self) -> str:
        return str(self._path.toString())

    def folder(self, name: str) -> HadoopFolder:
        return HadoopFolder(self.spark, self._at(name))

    @_storage_errors
    def exists(self, name: str = "") -> bool:
        """Return whether a file or folder exists; by default the folder itself."""
        return bool(self._files.exists(self._at(name)))

    @_storage_errors
    def names(self, name: str = "") -> list[str]:
        """Return the names in a subfolder, or in the folder itself; empty if it does not exist."""
        if not self.exists(name):
            return []
        return [str(status.getPath().getName()) for status in self._files.listStatus(self._at(name))]

    def numbers(self, name: str) -> list[int]:
        """Return the names in a subfolder that are numbers, ascending: batches of a log, partitions of a state."""
        return sorted(int(entry) for entry in self.names(name) if entry.isdecimal())

    @_storage_errors
    def read(self, name: str) -> str:
        stream = self._files.open(self._at(name))
        try:
            data: bytes = java_class("org.apache.commons.io.IOUtils").toByteArray(stream)
        finally:
            stream.close()
        return bytes(data).decode()

    @_storage_errors
    def write(self, name: str, text: str) -> None:
        stream = self._files.create(self._at(name), True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()

    @_storage_errors
    def copy(self, source: HadoopFolder, name: str, new_name: str | None = None) -> None:
        """Copy a file or folder, with its contents, from another folder, by default under the same name."""
        target = self._at(new_name or name)
        self._files.mkdirs(target.getParent())
        copy = java_class("org.apache.hadoop.fs.FileUtil").copy
        copy(source._files, source._at(name), self._files, target, False, True, self._conf)

    @_storage_errors
    def rename(self, target: HadoopFolder) -> bool:
        """Rename the folder to another; return False if that fails."""
        self._files.mkdirs(target._path.getParent())
        return bool(self._files.rename(self._path, target._path))

    @_storage_errors
    def delete(self, name: str = "") -> None:
        """Delete a file or folder if it exists; by default the folder itself."""
        self._files.delete(self._at(name), True)

    @property
    def _conf(self) -> Any:
        return self.spark._jsparkSession.sessionState().newHadoopConf()

    @property
    def _files(self) -> Any:
        return self._path.getFileSystem(self._conf)

    def _at(self, name: str) -> Any:
        return java_class("org.apache.hadoop.fs.Path")(self._path, name) if name else self._path


@_storage_errors
def write_query_id(checkpoint: HadoopFolder, query_id: str) -> None:
    """Write the id of the query into its checkpoint, atomically, as a query does when it starts."""
    metadata = java_class("org.apache.spark.sql.execution.streaming.StreamMetadata")
    metadata.write(metadata(query_id), checkpoint._at("metadata"), checkpoint._conf)


def copy_logs(folder: HadoopFolder, previous: HadoopFolder, batch: int) -> None:
    """Copy the log entries of a finished batch from another query's checkpoint into a folder."""
    before = f"offsets/{batch - 1}"
    if batch > 0:
        # If the entry is gone, the batch gets its own offsets as the ones before, and so has no data.
        folder.copy(previous, before if previous.exists(before) else f"offsets/{batch}", before)
    for path in (f"offsets/{batch}", f"commits/{batch}"):
        folder.copy(previous, path)
    if previous.exists("sources"):
        folder.copy(previous, "sources")


def begin_logs(folder: HadoopFolder, batch: int, *, sources: int, batch_time_ms: int, watermark_ms: int) -> None:
    """Write into a folder the log entries of a finished batch that read no source; see :func:`begin_checkpoint`."""
    # With the session's settings, as a query starts with those in its log.
    metadata = java_class("org.apache.spark.sql.execution.streaming.OffsetSeqMetadata")
    times = json.loads(metadata.apply(watermark_ms, batch_time_ms, folder.spark._jsparkSession.conf()).json())
    # Spark 4 has settings that only a query sets, without a value here, and reads no null.
    times["conf"] = {name: value for name, value in times["conf"].items() if value is not None}
    offsets = "\n".join([_LOG_VERSION, json.dumps(times), *[_NO_OFFSET] * sources])
    for number in range(max(0, batch - 1), batch + 1):
        folder.write(f"offsets/{number}", offsets)
    folder.write(f"commits/{batch}", f"{_LOG_VERSION}\n{json.dumps({'nextBatchWatermarkMs': watermark_ms})}")


def copy_checkpoint(spark: SparkSession, source: str, target: str, version: int, branch: str) -> None:
    """Create a checkpoint whose query begins with the batch that reads a version, on the next input of another query's checkpoint.

    Folders are as given to a query as ``checkpointLocation``. A `target` that an equal call created before stays as it is. The version
    is at least 1: the last batch that is copied is the one before. `branch` is the state that the checkpoint is for. Raises
    InvalidRequestError if the source has not finished that batch, or has deleted its entry, or the target has other files;
    StorageUnavailableError if a folder cannot be read or written.
    """
    previous, batch = HadoopFolder.of(spark, source), version - 1

    def fill(folder: HadoopFolder) -> None:
        if not (previous.exists(f"offsets/{batch}") and previous.exists(f"commits/{batch}")):
            raise InvalidRequestError(
                "the checkpoint does not tell of this batch: it is not finished, or Spark has let go of it "
                "(spark.sql.streaming.minBatchesToRetain); no checkpoint was written",
                checkpoint=source,
                batch_id=batch,
            )
        copy_logs(folder, previous, batch)

    _make(spark, target, {"state": branch, "version": version, "from": previous.uri}, fill)


def begin_checkpoint(
    spark: SparkSession, target: str, version: int, branch: str, *, sources: int, batch_time_ms: int, watermark_ms: int
) -> None:
    """Create a checkpoint whose query begins with the batch that reads a version, and each source where it begins without a checkpoint.

    The batch before was planned at `batch_time_ms` since the epoch. Other arguments, and the errors, are as of :func:`copy_checkpoint`.
    """
    batch = version - 1

    def fill(folder: HadoopFolder) -> None:
        begin_logs(folder, batch, sources=sources, batch_time_ms=batch_time_ms, watermark_ms=watermark_ms)

    _make(spark, target, {"state": branch, "version": version, "from": None}, fill)


def _make(spark: SparkSession, target: str, origin: Mapping[str, Any], fill: Callable[[HadoopFolder], None]) -> None:
    """Create a folder with all its files: atomically, where the file system can rename folders."""
    folder, description = HadoopFolder.of(spark, target), json.dumps(origin)
    if folder.exists():
        # With another query's checkpoint, the branch's query would continue as that query.
        if not folder.exists(_BRANCH_FILE) or folder.read(_BRANCH_FILE) != description:
            raise InvalidRequestError(
                "the folder of the new checkpoint has something else; nothing was changed; choose another one",
                checkpoint=target,
                **origin,
            )
        return
    filling = HadoopFolder.of(spark, f"{target.rstrip('/')}.{uuid.uuid4().hex[:8]}")
    try:
        fill(filling)
        # Spark 4 refuses logs without the id of their query.
        write_query_id(filling, str(uuid.uuid4()))
        filling.write(_BRANCH_FILE, description)
        if not filling.rename(folder):
            raise StorageUnavailableError(
                "the folder of the new checkpoint cannot be given its name; it is not there; do it again",
                checkpoint=folder.uri,
            )
    finally:
        filling.delete()

"""Folders of Spark's checkpoints, on any of Hadoop's file systems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from coordinator.model.errors import CorruptStateError, StorageUnavailableError
from spark_jobs.plan.catalyst import java_class

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


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
        """Return a subfolder."""
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
        """Return the text of a file."""
        stream = self._files.open(self._at(name))
        try:
            data: bytes = java_class("org.apache.commons.io.IOUtils").toByteArray(stream)
        finally:
            stream.close()
        return bytes(data).decode()

    @_storage_errors
    def write(self, name: str, text: str) -> None:
        """Create or replace a file."""
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

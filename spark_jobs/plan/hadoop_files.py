"""Folders where Spark keeps its checkpoints: whatever Hadoop's file systems reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from coordinator.model.errors import StorageUnavailableError
from spark_jobs.plan.catalyst import java_class

__all__ = ["HadoopFolder", "write_query_id"]

Given = ParamSpec("Given")
Result = TypeVar("Result")


def _told(method: Callable[Given, Result]) -> Callable[Given, Result]:
    """A method whose failures in the JVM are told as those of storage."""

    @wraps(method)
    def tell(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            return method(*args, **kwargs)
        except Py4JJavaError as error:
            folder = args[0]
            raise StorageUnavailableError(
                "a checkpoint's folder cannot be read or written; what is there of a new one is used by no query; see that Spark can "
                "read and write it, and repeat what you did",
                folder=getattr(folder, "uri", folder),
                cause=error.java_exception.toString(),
            ) from error

    return tell


@dataclass(frozen=True, eq=False)
class HadoopFolder:
    """A folder; names are relative to it. What fails raises StorageUnavailableError."""

    spark: SparkSession
    _path: Any

    @classmethod
    def of(cls, spark: SparkSession, location: str) -> HadoopFolder:
        """The folder of a URI or path, as Spark would find it."""
        return cls(spark, java_class("org.apache.hadoop.fs.Path")(location))._qualified()

    @_told
    def _qualified(self) -> HadoopFolder:
        return HadoopFolder(self.spark, self._files.makeQualified(self._path))

    @property
    def uri(self) -> str:
        return str(self._path.toString())

    def folder(self, name: str) -> HadoopFolder:
        """A folder below."""
        return HadoopFolder(self.spark, self._at(name))

    @_told
    def exists(self, name: str = "") -> bool:
        """Whether a file or folder is there; by default the folder itself."""
        return bool(self._files.exists(self._at(name)))

    @_told
    def names(self, name: str = "") -> list[str]:
        """Names in a folder below, or in the folder itself; none if it is not there."""
        if not self.exists(name):
            return []
        return [str(one.getPath().getName()) for one in self._files.listStatus(self._at(name))]

    def numbers(self, name: str) -> list[int]:
        """The names in a folder below that are numbers, ascending: batches of a log, partitions of a state."""
        return sorted(int(one) for one in self.names(name) if one.isdecimal())

    @_told
    def read(self, name: str) -> str:
        """Text of a file."""
        stream = self._files.open(self._at(name))
        try:
            data: bytes = java_class("org.apache.commons.io.IOUtils").toByteArray(stream)
        finally:
            stream.close()
        return bytes(data).decode()

    @_told
    def write(self, name: str, text: str) -> None:
        """Make a file, or another one in its place."""
        stream = self._files.create(self._at(name), True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()

    @_told
    def copy(self, other: HadoopFolder, name: str, own_name: str | None = None) -> None:
        """Have a file or folder that another folder has, with all that is in it, by default under the same name."""
        own = self._at(own_name or name)
        self._files.mkdirs(own.getParent())
        copy = java_class("org.apache.hadoop.fs.FileUtil").copy
        copy(other._files, other._at(name), self._files, own, False, True, self._conf)

    @_told
    def rename(self, other: HadoopFolder) -> bool:
        """Take the place of another folder; False if that cannot be done."""
        self._files.mkdirs(other._path.getParent())
        return bool(self._files.rename(self._path, other._path))

    @_told
    def delete(self, name: str = "") -> None:
        """Remove a file or folder, if it is there; by default the folder itself."""
        self._files.delete(self._at(name), True)

    @property
    def _conf(self) -> Any:
        return self.spark._jsparkSession.sessionState().newHadoopConf()

    @property
    def _files(self) -> Any:
        return self._path.getFileSystem(self._conf)

    def _at(self, name: str) -> Any:
        return java_class("org.apache.hadoop.fs.Path")(self._path, name) if name else self._path


@_told
def write_query_id(checkpoint: HadoopFolder, query_id: str) -> None:
    """Say whose checkpoint it is, as a query does when it starts: in a file that is there as a whole or not at all."""
    metadata = java_class("org.apache.spark.sql.execution.streaming.StreamMetadata")
    metadata.write(metadata(query_id), checkpoint._at("metadata"), checkpoint._conf)

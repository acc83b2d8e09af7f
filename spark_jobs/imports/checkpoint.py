"""The checkpoint of a query that kept its state in Spark's own stores, and the one with which its successor goes on.

Nothing is written to the old one. The new one has the logs of its newest batches, so that Spark goes on as after any restart: with the
next batch, from the same offsets and watermark, under the same number. (A sink that knows batches by their numbers, as Spark's file
sink, would take a batch that begins again at 1 for one that it has.) A batch that was begun and not committed is repeated, with the
offsets that it had.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession

from coordinator.errors import InvalidRequestError
from spark_jobs.plan.checkpoint_files import begin_logs, copy_logs
from spark_jobs.plan.checkpoint_state import SPARK_DEFAULT_STORE, SparkStore, read_schema
from spark_jobs.plan.hadoop_files import HadoopFolder, write_query_id

__all__ = ["NewCheckpoint", "SparkCheckpoint", "SparkOperator"]

#: File with the query's id that is in a new checkpoint until it is whole.
_BEGUN = "_importing"


@dataclass(frozen=True)
class SparkCheckpoint:
    """A checkpoint of Spark's at its newest committed batch.

    Attributes
    ----------
    batch_id
        The newest batch that is committed.
    batch_time_ms, watermark_ms
        When it was planned, and the watermark that it went by.
    conf
        Spark's settings that the state was written with.
    """

    folder: HadoopFolder
    query_id: str
    batch_id: int
    batch_time_ms: int
    watermark_ms: int
    conf: Mapping[str, str]

    @classmethod
    def open(cls, spark: SparkSession, location: str) -> SparkCheckpoint:
        """Look into a checkpoint.

        Raises
        ------
        InvalidRequestError
            There is none, no batch of it is committed, or its query runs in this session.
        """
        folder = HadoopFolder.of(spark, location)
        facts = {"checkpoint": folder.uri}
        if not folder.exists("metadata"):
            raise InvalidRequestError(
                "there is no checkpoint of a streaming query in this folder; nothing was written; give the checkpointLocation of "
                "the query that is to be moved",
                **facts,
            )
        query_id = str(json.loads(folder.read("metadata"))["id"])
        if any(str(one.id) == query_id for one in spark.streams.active):
            raise InvalidRequestError(
                "the query of this checkpoint is running; nothing was written; stop it first",
                query_id=query_id,
                **facts,
            )
        committed = [one for one in folder.numbers("commits") if folder.exists(f"offsets/{one}")]
        if not committed:
            raise InvalidRequestError(
                "no batch of this checkpoint is committed, so it has no state; nothing was written; start the query of the fleet "
                "with a new checkpoint",
                **facts,
            )
        batch_id = committed[-1]
        told: Mapping[str, Any] = json.loads(folder.read(f"offsets/{batch_id}").splitlines()[1])
        return cls(
            folder,
            query_id,
            batch_id,
            int(told["batchTimestampMs"]),
            int(told["batchWatermarkMs"]),
            {name: str(value) for name, value in told.get("conf", {}).items()},
        )

    @property
    def version(self) -> int:
        """Version of the state after the newest committed batch."""
        return self.batch_id + 1

    def operators(self) -> list[int]:
        """Numbers of the stateful operators."""
        return self.folder.numbers("state")

    def check_unchanged(self) -> None:
        """Refuse to go on if its query has committed another batch meanwhile.

        Raises
        ------
        InvalidRequestError
            It has.
        """
        newest = self.folder.numbers("commits")[-1]
        if newest != self.batch_id:
            raise InvalidRequestError(
                "the query of this checkpoint goes on: it committed another batch while its state was read; there is no new "
                "checkpoint; stop the query, and import its state under another name",
                checkpoint=self.folder.uri,
                batch_id=self.batch_id,
                newest=newest,
            )


@dataclass(frozen=True)
class SparkOperator:
    """The state of one stateful operator in a checkpoint."""

    spark: SparkSession
    checkpoint: SparkCheckpoint
    number: int

    def store(self, name: str = SPARK_DEFAULT_STORE) -> SparkStore | None:
        """One of its stores; None if it has none of that name."""
        folder = self.checkpoint.folder.folder("state")
        schema = read_schema(self.spark, folder.uri, self.number, name)
        if schema is None:
            return None
        partitions = len(folder.numbers(str(self.number)))
        return SparkStore(
            folder.uri, self.number, name, self.checkpoint.version, partitions, self.checkpoint.conf, schema
        )


@dataclass(frozen=True)
class NewCheckpoint:
    """A checkpoint for a query whose state is imported; it is one once all its files are there.

    Attributes
    ----------
    query_id
        Of the query that will go on with it: the same each time that the same state is imported for it.
    """

    folder: HadoopFolder
    query_id: str

    @classmethod
    def of(cls, spark: SparkSession, location: str, origin: str) -> NewCheckpoint:
        """The checkpoint of a folder, which need not be there.

        Parameters
        ----------
        origin
            What is imported: the checkpoint that it was, and its newest batch; or the name of a state.

        Raises
        ------
        InvalidRequestError
            Something else is there.
        """
        folder = HadoopFolder.of(spark, location)
        query_id = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{folder.uri} from {origin}"))
        made = cls(folder, query_id)
        if not made.is_whole and not made._was_begun and folder.names():
            raise InvalidRequestError(
                "the folder for the new checkpoint is not empty; nothing was written; give one of its own",
                checkpoint=folder.uri,
            )
        return made

    @property
    def is_whole(self) -> bool:
        """Whether it was written before."""
        if not self.folder.exists("metadata"):
            return False
        return bool(json.loads(self.folder.read("metadata"))["id"] == self.query_id)

    def write_after(self, old: SparkCheckpoint) -> None:
        """Go on where another checkpoint stands."""
        self._begin()
        copy_logs(self.folder, old.folder, old.batch_id)
        begun = f"offsets/{old.batch_id + 1}"
        if old.folder.exists(begun):
            self.folder.copy(old.folder, begun)
        self._end()

    def write_first(self, batch_time_ms: int, sources: int) -> None:
        """Have a first batch that read nothing of any source."""
        self._begin()
        begin_logs(self.folder, 0, sources=sources, batch_time_ms=batch_time_ms, watermark_ms=0)
        self._end()

    @property
    def _was_begun(self) -> bool:
        return self.folder.exists(_BEGUN) and self.folder.read(_BEGUN) == self.query_id

    def _begin(self) -> None:
        """Begin, or begin anew after an import that was killed."""
        # A query that was started in between was refused, and has left an id of its own.
        for name in ("commits", "offsets", "sources", "metadata") if self._was_begun else ():
            self.folder.delete(name)
        self.folder.write(_BEGUN, self.query_id)

    def _end(self) -> None:
        # Last: without it a query that is started here is another one, to which the state does not belong.
        write_query_id(self.folder, self.query_id)
        self.folder.delete(_BEGUN)

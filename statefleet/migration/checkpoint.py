"""The checkpoint of a query with state in Spark's own stores, and the new checkpoint of the query that continues it.

Nothing is written to the old checkpoint. The new one has the logs of its newest batches, so that Spark continues as after any restart:
with the next batch, from the same offsets and watermark, under the next number. (A sink that identifies batches by number, as Spark's
file sink, would skip batches that begin again at 1.) A batch that was begun and not committed is repeated with its offsets.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import types as T

from coordinator.model.errors import CorruptStateError, InvalidRequestError
from spark_jobs.plan.checkpoint_files import HadoopFolder, begin_logs, copy_logs, write_query_id
from spark_jobs.plan.checkpoint_state import SPARK_DEFAULT_STORE, SparkStore, read_schema
from spark_jobs.plan.spark_version import SPARK

#: File with the query's id, which a new checkpoint has until it is complete.
_BEGUN = "_importing"
_PARTITIONS = "spark.sql.shuffle.partitions"
#: Stores of a join, in the order in which the log of commits has their ids (``SymmetricHashJoinStateManager.allStateStoreNames``).
JOIN_STORES = tuple(
    f"{side}-{store}" for side in ("left", "right") for store in ("keyToNumValues", "keyWithIndexToValue")
)


@dataclass(frozen=True)
class SparkCheckpoint:
    """A Spark checkpoint at its newest committed batch."""

    folder: HadoopFolder
    query_id: str
    batch_id: int
    #: ``batch_time_ms``, ``watermark_ms``: When the batch was planned, and its watermark.
    batch_time_ms: int
    watermark_ms: int
    #: Spark's settings when the state was written.
    conf: Mapping[str, str]
    #: By operator, for each partition the ids in the names of the newest files of its stores; empty in checkpoints of format 1.
    snapshots: Mapping[int, Sequence[Sequence[str]]]

    @classmethod
    def open(cls, spark: SparkSession, location: str) -> SparkCheckpoint:
        """Read a checkpoint.

        Raises
        ------
        InvalidRequestError
            There is no checkpoint, no batch of it is committed, its query runs in this session, or only Spark 4 reads it.
        CorruptStateError
            A file of the newest batches is missing or damaged.
        """
        folder = HadoopFolder.of(spark, location)
        facts = {"checkpoint": folder.uri}
        if not folder.exists("metadata"):
            raise InvalidRequestError(
                "there is no checkpoint of a streaming query in this folder; nothing was written; give the checkpointLocation of "
                "the query that is to be moved",
                **facts,
            )
        try:
            query_id = str(json.loads(folder.read("metadata"))["id"])
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(folder, "metadata") from error
        if any(str(query.id) == query_id for query in spark.streams.active):
            raise InvalidRequestError(
                "the query of this checkpoint is running; nothing was written; stop it first",
                query_id=query_id,
                **facts,
            )
        committed = folder.numbers("commits")
        if not committed:
            planned = folder.numbers("offsets")
            # A batch is planned when the one before is committed.
            raise InvalidRequestError(
                "the checkpoint has no log of committed batches (commits), though batches were: Spark before 2.2 wrote none, or it "
                "was not copied; nothing was written; copy the checkpoint again, or let the old query run a batch on this version of "
                "Spark, which begins the log, and import again"
                if len(planned) > 1 or any(number > 0 for number in planned)
                else "no batch of this checkpoint is committed, so it has no state; nothing was written; start the query of the "
                "fleet with a new checkpoint",
                **facts,
            )
        batch_id = committed[-1]
        offsets = _logged(folder, f"offsets/{batch_id}")
        snapshots = _logged(folder, f"commits/{batch_id}").get("stateUniqueIds") or {}
        if snapshots and not SPARK.READS_STATE:
            raise InvalidRequestError(
                "Spark 4 wrote this checkpoint in format 2 (spark.sql.streaming.stateStore.checkpointFormatVersion), which Spark 3.5 "
                "does not read; nothing was written; import it with Spark 4",
                **facts,
            )
        # Further files that are copied to the new checkpoint, if they exist.
        for path in (f"offsets/{batch_id - 1}", f"offsets/{batch_id + 1}"):
            if folder.exists(path):
                _logged(folder, path)
        try:
            times = int(offsets["batchTimestampMs"]), int(offsets["batchWatermarkMs"])
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(folder, f"offsets/{batch_id}") from error
        conf = {name: str(value) for name, value in offsets.get("conf", {}).items()}
        return cls(folder, query_id, batch_id, *times, conf, {int(number): ids for number, ids in snapshots.items()})

    @property
    def version(self) -> int:
        """Version of the state after the newest committed batch."""
        return self.batch_id + 1

    def operators(self) -> list[int]:
        """Return the numbers of the stateful operators."""
        return self.folder.numbers("state")

    def check_unchanged(self) -> None:
        """Check that the query has not committed another batch meanwhile.

        Raises
        ------
        InvalidRequestError
            The query has committed another batch.
        """
        newest = max(self.folder.numbers("commits"), default=None)
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

    def store(self, name: str = SPARK_DEFAULT_STORE, *, has_keys: bool = True) -> SparkStore | None:
        """Return a store of the operator; None if it has none of that name. If it has no keys, all rows are in one partition.

        Raises CorruptStateError if the folders of the checkpoint are not those of the partitions.
        """
        folder = self.checkpoint.folder.folder("state")
        present = self._present
        schema = read_schema(self.spark, folder.uri, self.number, name) if 0 in present else None
        if schema is None and 0 in present:
            return None
        fields = [] if schema is None else schema.keys.fields
        # A limit has a key without a value.
        is_alone = schema is not None and (not fields or (not has_keys and fields[0].dataType == T.NullType()))
        partitions = self.partitions(is_alone=is_alone)
        assert schema is not None, "partition 0 was found"
        return SparkStore(
            folder.uri,
            self.number,
            name,
            self.checkpoint.version,
            partitions,
            self.checkpoint.conf,
            schema,
            self._snapshots(name, partitions),
        )

    def partitions(self, *, is_alone: bool = False) -> int:
        """Return the number of partitions.

        Raises
        ------
        CorruptStateError
            The folders of the checkpoint are not those of the partitions.
        """
        present = self._present
        # The number of the query's first batch, not that of the folders: an unfinished copy may lack the last ones.
        setting = self.checkpoint.conf.get(_PARTITIONS)
        partitions = 1 if is_alone else len(present) if setting is None else int(setting)
        if not present or present != list(range(partitions)):
            raise CorruptStateError(
                "the checkpoint's state has not the partitions that its query had: it was not copied as a whole, or is mixed with "
                "another; nothing was written; copy the checkpoint again, or restore it from a backup",
                folder=self.folder,
                expected=partitions,
                missing=sorted(set(range(partitions)) - set(present)),
                unexpected=sorted(set(present) - set(range(partitions))),
            )
        return partitions

    def is_undescribed(self, store: str) -> bool:
        """Return whether a store has files in the first partition, and nothing says what they hold."""
        # Where Spark describes the variables of a processor, all stores of which are in one.
        if "_stateSchema" in self.checkpoint.folder.names(f"state/{self.number}"):
            return False
        names = self.checkpoint.folder.names(f"state/{self.number}/0/{'' if store == SPARK_DEFAULT_STORE else store}")
        return any(name[0].isdecimal() for name in names)

    @property
    def folder(self) -> str:
        """The folder with the operator's partitions."""
        return f"{self.checkpoint.folder.folder('state').uri}/{self.number}"

    @cached_property
    def _present(self) -> list[int]:
        """Return the numbers of the partitions whose folders exist."""
        return self.checkpoint.folder.folder("state").numbers(str(self.number))

    def _snapshots(self, store: str, partitions: int) -> Sequence[str]:
        """Return for each partition the id in the names of a store's newest files; nothing for a checkpoint of format 1."""
        if not self.checkpoint.snapshots:
            return ()
        by_partition = self.checkpoint.snapshots.get(self.number, ())
        number = 0 if store == SPARK_DEFAULT_STORE else JOIN_STORES.index(store)
        if len(by_partition) != partitions or any(len(ids) <= number for ids in by_partition):
            raise _damaged(self.checkpoint.folder, f"commits/{self.checkpoint.batch_id}")
        return [ids[number] for ids in by_partition]


def _logged(folder: HadoopFolder, path: str) -> Mapping[str, Any]:
    """Return the JSON object in a file of Spark's logs, after the line with its version.

    Raises
    ------
    CorruptStateError
        The file is missing, empty or damaged.
    """
    try:
        if not folder.exists(path):
            raise FileNotFoundError(path)
        body = json.loads(folder.read(path).splitlines()[1])
        if not isinstance(body, dict):
            raise TypeError(body)
    except (FileNotFoundError, IndexError, TypeError, ValueError) as error:
        raise _damaged(folder, path) from error
    return body


def _damaged(folder: HadoopFolder, path: str) -> CorruptStateError:
    return CorruptStateError(
        "a file of the checkpoint's logs is missing, empty or damaged; nothing was written; copy the checkpoint again, or restore "
        "the file from a backup",
        file=f"{folder.uri}/{path}",
    )


@dataclass(frozen=True)
class NewCheckpoint:
    """A checkpoint for a query whose state is imported. It is valid once all its files exist."""

    folder: HadoopFolder
    #: Id of the query that will continue: the same each time that the same state is imported for it.
    query_id: str

    @classmethod
    def of(cls, spark: SparkSession, location: str, origin: str) -> NewCheckpoint:
        """Return the checkpoint of a folder, which need not exist; raises InvalidRequestError if the folder has other files.

        `origin` is the source of the import: the old checkpoint and its newest batch, or the name of a state.
        """
        folder = HadoopFolder.of(spark, location)
        query_id = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{folder.uri} from {origin}"))
        checkpoint = cls(folder, query_id)
        if not checkpoint.is_whole and not checkpoint._was_begun and folder.names():
            raise InvalidRequestError(
                "the folder for the new checkpoint is not empty; nothing was written; give one of its own",
                checkpoint=folder.uri,
            )
        return checkpoint

    @property
    def is_whole(self) -> bool:
        """Whether the checkpoint is complete."""
        if not self.folder.exists("metadata"):
            return False
        return bool(json.loads(self.folder.read("metadata"))["id"] == self.query_id)

    def write_after(self, old: SparkCheckpoint) -> None:
        """Write the checkpoint so that the query continues after another checkpoint."""
        self._begin()
        copy_logs(self.folder, old.folder, old.batch_id)
        begun = f"offsets/{old.batch_id + 1}"
        if old.folder.exists(begun):
            self.folder.copy(old.folder, begun)
        self._end()

    def write_first(self, batch_time_ms: int, sources: int) -> None:
        """Write the checkpoint with a first batch that read no rows of any source."""
        self._begin()
        begin_logs(self.folder, 0, sources=sources, batch_time_ms=batch_time_ms, watermark_ms=0)
        self._end()

    @property
    def _was_begun(self) -> bool:
        return self.folder.exists(_BEGUN) and self.folder.read(_BEGUN) == self.query_id

    def _begin(self) -> None:
        """Begin to write, also after an import that was killed."""
        # A query that was started in between was refused, and has left its own id.
        for name in ("commits", "offsets", "sources", "metadata") if self._was_begun else ():
            self.folder.delete(name)
        self.folder.write(_BEGUN, self.query_id)

    def _end(self) -> None:
        # Written last: without it, a query that is started here is another one, which does not own the state.
        write_query_id(self.folder, self.query_id)
        self.folder.delete(_BEGUN)

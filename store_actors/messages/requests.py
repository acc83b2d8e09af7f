"""Messages that callers send to a store actor. Light to import: Spark's workers have no need of the engine."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from coordinator.model.commits import CommitEntry
from coordinator.model.identities import StateStoreId, TaskIdentity
from coordinator.model.leases import Lease
from coordinator.model.schema import Field, OperatorKind, StateSchema
from coordinator.model.stored_json import from_json
from coordinator.model.watermarks import Watermarks

#: What changes are shown with, after a row's columns: what was done to it (`UPSERT`, or `DELETE`, which shows it as it was last), by
#: which version, and when that was committed. Named as in Delta Lake's change data feed.
CHANGE_FIELDS = (
    pa.field("_change_type", pa.string()),
    pa.field("_commit_version", pa.int64()),
    pa.field("_commit_timestamp", pa.timestamp("us", tz="UTC")),
)
UPSERT, DELETE = "upsert", "delete"

#: Operators whose state is in keyed stores.
_KEYED = (OperatorKind.GROUP_STATE, OperatorKind.TRANSFORM, OperatorKind.PARTITIONS)

#: A put or remove of a session: the store's name, the method and its arguments.
Write = tuple[str, str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class ApplyRequest:
    """A Spark task's request to fold its rows into its shard as the next version."""

    task: TaskIdentity
    lease: Lease
    base_version: int
    schema: StateSchema
    #: Where event time stands in the version that is made, the same for all shards of the operator.
    watermarks: Watermarks
    #: Watermark up to which rows are late, in milliseconds; that of the version before if None.
    late_ms: int | None = None
    node_id: str = ""


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Name and columns of one keyed store of an operator."""

    name: str
    keys: tuple[Field, ...]
    values: tuple[Field, ...]
    #: Value column (int64) by which rows fall due: those are then found without a look at the others.
    due: str | None = None


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """Facts of a micro-batch that an operator whose state is in keyed stores gives to its commit."""

    #: Where event time stands with the batch included, the same for all partitions.
    watermarks: Watermarks
    rows_in: int
    rows_late: int = 0
    #: Units of the first store's due column in a millisecond, if its rows fall due by processing time: the earliest is then reported.
    due_per_ms: int | None = None


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request for a handle on the keyed stores of one partition, at a version."""

    task: TaskIdentity
    lease: Lease
    base_version: int
    stores: tuple[StoreSpec, ...]

    @property
    def following(self) -> OpenRequest:
        """The request for the version after the one that this handle makes, of the same run."""
        version = self.task.batch_id + 1
        return replace(self, task=structs.replace(self.task, batch_id=version), base_version=version)


@dataclass(frozen=True, slots=True)
class TransferredStore:
    """A store of a partition that one store actor copies from another."""

    name: str
    #: What it is opened as: the schema of an operator's shard, or the columns of a keyed store.
    definition: StateSchema | StoreSpec
    #: What the rows need in memory (``VersionedStore.room``).
    room: Mapping[str, Any]
    watermark_ms: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A partition that one store actor copies from another; its rows are asked for piece by piece."""

    transfer_id: str
    #: ``version``, ``attempt_id``: Of the rows, and the attempt that made them; empty for the empty version.
    version: int
    attempt_id: str
    #: Commits since the last snapshot.
    deltas: int
    stores: tuple[TransferredStore, ...]


@dataclass(frozen=True, slots=True)
class ReplicatedCommit:
    """A committed version of a partition, as it is sent to a standby."""

    store_id: StateStoreId
    source: str
    #: Attempt that made the version which the commit builds on; empty for the empty one.
    base_attempt: str
    entries: tuple[CommitEntry, ...]
    files: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ReadProjection:
    """The rows and columns of a store that a reader asks for, the same for each of its partitions."""

    #: Of an operator's state; None of keyed stores that only their user knows, which are shown as they are.
    schema: StateSchema | None
    #: Which part of an operator's state is shown (``ViewColumns.of``).
    part: str = ""
    #: Names of columns as they are shown; all by default.
    columns: tuple[str, ...] | None = None
    #: Rows for which it is true, over columns as they are shown; all by default.
    filter: pc.Expression | None = None
    #: Names of the filter's columns; None if they are not known.
    filtered: tuple[str, ...] | None = None

    @property
    def shard_schema(self) -> StateSchema | None:
        """Schema of an operator's shard; None of keyed stores, whose columns their files say."""
        return None if self.schema is None or self.schema.operator in _KEYED else self.schema

    def encoded(self) -> bytes:
        """Return the projection as it is sent: JSON. A filter is an expression of Arrow's, which is pickled and sent by Ray only."""
        if self.filter is not None:
            return pickle.dumps(self)
        return msgspec.json.encode({"schema": self.schema, "part": self.part, "columns": self.columns})

    @classmethod
    def decoded(cls, encoded: bytes) -> ReadProjection:
        """Return the projection of :meth:`encoded`, from a caller that may call the store actor by Ray."""
        if not is_json(encoded):
            projection: ReadProjection = pickle.loads(encoded)
            return projection
        facts = msgspec.json.decode(encoded)
        schema = None if facts["schema"] is None else from_json(facts["schema"], StateSchema)
        columns = None if facts["columns"] is None else tuple(facts["columns"])
        return cls(schema, facts["part"], columns)


def is_json(encoded: bytes) -> bool:
    """Return whether an encoded projection is JSON, so that it may come from anywhere."""
    return encoded.startswith(b"{")


class ReadRequest(msgspec.Struct, frozen=True):
    """A request to read a version of one store."""

    store_id: StateStoreId
    #: ``version``, ``attempt_id``: The version, and the attempt that made it, as the coordinator reported them to the reader.
    version: int
    attempt_id: str
    #: An encoded :class:`ReadProjection`: the same bytes come often, so a store actor decodes them once.
    projection: bytes
    #: Whether a newer version may be read instead: the newest that the store actor has in memory.
    is_latest: bool = False
    #: Read only the changes of the commits after this version; None for all rows of `version`.
    since: int | None = None
    #: Read the rows from files, from the snapshot of this version on, and not from memory; None leaves the source open.
    snapshot: int | None = None


@dataclass(frozen=True, slots=True)
class ShardInput:
    """A shard's rows of one micro-batch."""

    #: One for each of ``StateSchema.input_schemas()``.
    tables: tuple[pa.Table, ...]
    #: Input rows that all of these stand for.
    rows_read: int

    @property
    def raw(self) -> pa.Table:
        """Rows in ``StateSchema.raw_schema()``."""
        return self.tables[0]

    @property
    def partial(self) -> pa.Table:
        """Rows of an aggregation in ``StateSchema.row_schema()``, partially aggregated by the map side."""
        return self.tables[1]

    @classmethod
    def of_raw(cls, schema: StateSchema, *batches: pa.RecordBatch) -> ShardInput:
        """Return the input of rows of the first kind, of which none were combined."""
        raw = pa.Table.from_batches(batches, schema=None if batches else schema.raw_schema())
        return cls((raw, *(kind.empty_table() for kind in schema.input_schemas()[1:])), raw.num_rows)

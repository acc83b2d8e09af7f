"""The records of a state's manifest log, one frozen class for each kind.

In the log a record is a JSON object: ``kind``, then the fields in their order here. Names and order are the format
(``docs/format.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, assert_never

from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.copy_result import CopyResult
from coordinator.model.identities import ActorLocation
from coordinator.model.schema import StateSchema

__all__ = [
    "BatchFinished",
    "BranchBorn",
    "BranchEnded",
    "BranchMade",
    "Branched",
    "Committed",
    "Discarded",
    "Dropped",
    "MoveFailed",
    "Record",
    "RecordKind",
    "RescaleAsked",
    "Rescaled",
    "RunStarted",
    "SchemaChanged",
    "ShardsAssigned",
    "SnapshotAdded",
    "StateBegun",
    "Truncated",
    "copy_result_from_json",
    "record_from_json",
    "record_to_json",
]


class RecordKind(StrEnum):
    """Kinds of record in a state's manifest log."""

    #: A run of the query took the state over; every older run is fenced from here on.
    RUN_STARTED = "run_started"
    #: The run's schema is not that of the run before it; in force from the run's epoch on.
    SCHEMA_CHANGED = "schema_changed"
    #: Spark recorded a batch of the run as finished: readers may see what it made.
    BATCH_FINISHED = "batch_finished"
    #: Shards were given to store actors under new epochs.
    SHARDS_ASSIGNED = "shards_assigned"
    #: A shard that was to go to another store actor stays where it is.
    MOVE_FAILED = "move_failed"
    #: Shards committed versions.
    COMMITTED = "committed"
    #: A snapshot of a counted version was written.
    SNAPSHOT = "snapshot"
    #: Files that no version needs are about to be deleted: commits and snapshots of them are refused from here on.
    DISCARDED = "discarded"
    #: A user asked for another number of shards while a run is active.
    RESCALE_ASKED = "rescale_asked"
    #: The state has another shard layout from a version on.
    RESCALED = "rescaled"
    #: Versions older than a snapshot are no longer retained; their files may be deleted.
    TRUNCATED = "truncated"
    #: The state is a branch: it begins with a version of another one, and with that one's files.
    BRANCHED = "branched"
    #: Another state is about to begin with files of this one.
    BRANCH_MADE = "branch_made"
    #: That state exists. Or: it never will, or not any more, so it needs no files of this one.
    BRANCH_BORN = "branch_born"
    BRANCH_ENDED = "branch_ended"
    #: The state was dropped: later records are of another state of its name.
    DROPPED = "dropped"
    #: Another state begins with the name of one that was dropped.
    STATE_BEGUN = "state_begun"


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A run of the query took the state over, with its batch `batch_id`; every older run is fenced from here on.

    `is_temporary` says that the query's checkpoint goes with the run, so that no run continues it.
    """

    run_id: str
    query_id: str
    batch_id: int
    epoch: int
    is_temporary: bool = False


@dataclass(frozen=True, slots=True)
class BatchFinished:
    """Spark's commit log has a batch of a run: the version that the batch made is never replaced by a replay of it."""

    run_id: str
    batch_id: int


@dataclass(frozen=True, slots=True)
class SchemaChanged:
    """The run's schema is not that of the run before it: commits from its epoch on are in it. Without such commits it has no effect."""

    run_id: str
    epoch: int
    schema: StateSchema


@dataclass(frozen=True, slots=True)
class ShardsAssigned:
    """A partition was given to a store actor under a new epoch; `reason` says in words why to that one."""

    partition_id: int
    epoch: int
    location: ActorLocation
    reason: str = ""
    preparation: CopyResult | None = None


@dataclass(frozen=True, slots=True)
class MoveFailed:
    """A partition was to go to a store actor, for a reason in words, and stays where it is because of an error."""

    partition_id: int
    location: ActorLocation
    reason: str
    error: str


@dataclass(frozen=True, slots=True)
class Committed:
    """A shard committed a version."""

    entry: CommitEntry

    @property
    def version(self) -> int:
        return self.entry.version


@dataclass(frozen=True, slots=True)
class SnapshotAdded:
    """A snapshot of a counted version was written."""

    snapshot: SnapshotEntry

    @property
    def version(self) -> int:
        return self.snapshot.version


@dataclass(frozen=True, slots=True)
class Truncated:
    """Versions of a shard older than `floor` are no longer retained; their files may be deleted."""

    partition_id: int
    store_name: str
    floor: int


@dataclass(frozen=True, slots=True)
class Discarded:
    """Files of attempts that were not counted are about to be deleted: none of them is counted from here on."""

    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RescaleAsked:
    """A run is to have another number of shards from one of its next batches on."""

    run_id: str
    num_shards: int


@dataclass(frozen=True, slots=True)
class Rescaled:
    """A run works on another shard layout from a version on. Without a commit of its shards the record has no effect."""

    layout: ShardLayout


@dataclass(frozen=True, slots=True)
class Branched:
    """The state begins with a version of another one: with that one's ledger up to there, as JSON data, without runs and places."""

    parent: str
    version: int
    ledger: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BranchMade:
    """A state of another name is about to begin with `version` of `parent`, which needs files of this one."""

    name: str
    parent: str
    version: int
    made_at_ms: int


@dataclass(frozen=True, slots=True)
class BranchBorn:
    """A state that was noted as :class:`BranchMade` exists: if it is missing later, it was deleted."""

    name: str


@dataclass(frozen=True, slots=True)
class BranchEnded:
    """A state that was noted as :class:`BranchMade` does not exist any more, or never did: it needs no files of this one."""

    name: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """The state was dropped: no file, run or version of it is valid from here on, and its name is free.

    `metadata` is the content of its metadata file, as JSON data; None if it had none.
    """

    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class StateBegun:
    """A state begins with the name of one that was dropped.

    `metadata` is the content of its metadata file, as JSON data. A process that dropped the previous state may sleep before it
    deletes that state's file, and then delete this one's: the log has the content all the same.
    """

    metadata: Mapping[str, Any]


Record = (
    RunStarted
    | BatchFinished
    | SchemaChanged
    | ShardsAssigned
    | MoveFailed
    | Committed
    | SnapshotAdded
    | Truncated
    | Discarded
    | RescaleAsked
    | Rescaled
    | Branched
    | BranchMade
    | BranchBorn
    | BranchEnded
    | Dropped
    | StateBegun
)


def record_to_json(record: Record) -> dict[str, Any]:
    """Return a record as JSON data."""
    match record:
        case RunStarted():
            kind = RecordKind.RUN_STARTED
        case BatchFinished():
            kind = RecordKind.BATCH_FINISHED
        case SchemaChanged(run_id, epoch, schema):
            return {"kind": RecordKind.SCHEMA_CHANGED, "run_id": run_id, "epoch": epoch, "schema": schema.to_json()}
        case ShardsAssigned():
            # Few shards were copied beforehand.
            facts = {name: value for name, value in asdict(record).items() if value not in ("", None)}
            return {"kind": RecordKind.SHARDS_ASSIGNED, **facts}
        case MoveFailed():
            kind = RecordKind.MOVE_FAILED
        case Committed(entry):
            return {"kind": RecordKind.COMMITTED, "entry": entry.to_json()}
        case SnapshotAdded():
            return {"kind": RecordKind.SNAPSHOT, "snapshot": record.snapshot.to_json()}
        case Truncated():
            kind = RecordKind.TRUNCATED
        case Discarded(files):
            return {"kind": RecordKind.DISCARDED, "files": list(files)}
        case RescaleAsked():
            kind = RecordKind.RESCALE_ASKED
        case Rescaled(layout):
            return {"kind": RecordKind.RESCALED, **layout.to_json()}
        case Branched(parent, version, ledger):
            # Not by asdict(), which would copy a whole ledger.
            return {"kind": RecordKind.BRANCHED, "parent": parent, "version": version, "ledger": ledger}
        case BranchMade():
            kind = RecordKind.BRANCH_MADE
        case BranchBorn():
            kind = RecordKind.BRANCH_BORN
        case BranchEnded():
            kind = RecordKind.BRANCH_ENDED
        case Dropped():
            kind = RecordKind.DROPPED
        case StateBegun():
            kind = RecordKind.STATE_BEGUN
        case _:
            assert_never(record)
    return {"kind": kind, **asdict(record)}


_READERS: dict[RecordKind, Callable[[dict[str, Any]], Record]] = {
    RecordKind.RUN_STARTED: lambda fields: RunStarted(**fields),
    RecordKind.BATCH_FINISHED: lambda fields: BatchFinished(**fields),
    RecordKind.SCHEMA_CHANGED: lambda fields: SchemaChanged(
        **{**fields, "schema": StateSchema.from_json(fields["schema"])}
    ),
    RecordKind.SHARDS_ASSIGNED: lambda fields: ShardsAssigned(
        **{**fields, "location": ActorLocation(**fields["location"]), "preparation": copy_result_from_json(fields)}
    ),
    RecordKind.MOVE_FAILED: lambda fields: MoveFailed(**{**fields, "location": ActorLocation(**fields["location"])}),
    RecordKind.COMMITTED: lambda fields: Committed(CommitEntry.from_json(fields["entry"])),
    RecordKind.SNAPSHOT: lambda fields: SnapshotAdded(SnapshotEntry.from_json(fields["snapshot"])),
    RecordKind.TRUNCATED: lambda fields: Truncated(**fields),
    RecordKind.DISCARDED: lambda fields: Discarded(**{**fields, "files": tuple(fields["files"])}),
    RecordKind.RESCALE_ASKED: lambda fields: RescaleAsked(**fields),
    RecordKind.RESCALED: lambda fields: Rescaled(ShardLayout.from_json(fields)),
    RecordKind.BRANCHED: lambda fields: Branched(**fields),
    RecordKind.BRANCH_MADE: lambda fields: BranchMade(**fields),
    RecordKind.BRANCH_BORN: lambda fields: BranchBorn(**fields),
    RecordKind.BRANCH_ENDED: lambda fields: BranchEnded(**fields),
    RecordKind.DROPPED: lambda fields: Dropped(**fields),
    RecordKind.STATE_BEGUN: lambda fields: StateBegun(**fields),
}


def copy_result_from_json(fields: Mapping[str, Any]) -> CopyResult | None:
    """Return the copy that a shard's new store actor took beforehand, if the JSON data have one."""
    data = fields.get("preparation")
    return None if data is None else CopyResult(**data)


def record_from_json(data: Mapping[str, Any]) -> Record:
    """Return the record of JSON data.

    Raises
    ------
    ValueError, KeyError, TypeError
        Its kind is not known here, or it lacks a field, or has one too many.
    """
    fields = dict(data)
    return _READERS[RecordKind(fields.pop("kind"))](fields)

"""The records of a state's manifest log, one class for each kind, which is its tag.

In the log a record is a JSON object: ``kind``, then the fields in their order here. Names and order are the format
(``docs/format.md``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, structs

from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.identities import ActorLocation
from coordinator.model.leases import CopyResult
from coordinator.model.schema import StateSchema


class _Record(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """A record of the log."""


class RunStarted(_Record, frozen=True, tag="run_started"):
    """A run of the query took the state over, with its batch `batch_id`; every older run is fenced from here on.

    `is_temporary` says that the query's checkpoint goes with the run, so that no run continues it.
    """

    run_id: str
    query_id: str
    batch_id: int
    epoch: int
    is_temporary: bool = False


class BatchFinished(_Record, frozen=True, tag="batch_finished", omit_defaults=True):
    """Spark's commit log has a batch of a run: the version that the batch made is never replaced by a replay of it.

    An epoch of a continuous query has an `end`, Spark's offset in JSON: Spark's logs have the epoch, with this end, or will have it.
    """

    run_id: str
    batch_id: int
    end: str = ""


class SchemaChanged(_Record, frozen=True, tag="schema_changed"):
    """The run's schema is not that of the run before it: commits from its epoch on are in it. Without such commits it has no effect."""

    run_id: str
    epoch: int
    schema: StateSchema


class ShardsAssigned(_Record, frozen=True, tag="shards_assigned", omit_defaults=True):
    """A partition was given to a store actor under a new epoch; `reason` says in words why to that one."""

    partition_id: int
    epoch: int
    location: ActorLocation
    reason: str = ""
    preparation: CopyResult | None = None


class MoveFailed(_Record, frozen=True, tag="move_failed"):
    """A partition was to go to a store actor, for a reason in words, and stays where it is because of an error."""

    partition_id: int
    location: ActorLocation
    reason: str
    error: str


class Committed(_Record, frozen=True, tag="committed"):
    """A shard committed a version."""

    entry: CommitEntry

    @property
    def version(self) -> int:
        return self.entry.version


class SnapshotAdded(_Record, frozen=True, tag="snapshot"):
    """A snapshot of a counted version was written."""

    snapshot: SnapshotEntry

    @property
    def version(self) -> int:
        return self.snapshot.version


class Truncated(_Record, frozen=True, tag="truncated"):
    """Versions of a shard older than `floor` are no longer retained; their files may be deleted."""

    partition_id: int
    store_name: str
    floor: int


class Discarded(_Record, frozen=True, tag="discarded"):
    """Files of attempts that were not counted are about to be deleted: none of them is counted from here on."""

    files: tuple[str, ...]


class RescaleAsked(_Record, frozen=True, tag="rescale_asked"):
    """A run is to have another number of shards from one of its next batches on."""

    run_id: str
    num_shards: int


class Rescaled(ShardLayout, frozen=True, tag_field="kind", tag="rescaled"):
    """A run works on another shard layout from a version on. Without a commit of its shards the record has no effect."""

    @property
    def layout(self) -> ShardLayout:
        return ShardLayout(*structs.astuple(self))


class Branched(_Record, frozen=True, tag="branched"):
    """The state begins with a version of another one: with that one's ledger up to there, as JSON data, without runs and places."""

    parent: str
    version: int
    ledger: Mapping[str, Any]


class BranchMade(_Record, frozen=True, tag="branch_made"):
    """A state of another name is about to begin with `version` of `parent`, which needs files of this one."""

    name: str
    parent: str
    version: int
    made_at_ms: int


class BranchBorn(_Record, frozen=True, tag="branch_born"):
    """A state that was noted as :class:`BranchMade` exists: if it is missing later, it was deleted."""

    name: str


class BranchEnded(_Record, frozen=True, tag="branch_ended"):
    """A state that was noted as :class:`BranchMade` does not exist any more, or never did: it needs no files of this one."""

    name: str


class Dropped(_Record, frozen=True, tag="dropped"):
    """The state was dropped: no file, run or version of it is valid from here on, and its name is free.

    `metadata` is the content of its metadata file, as JSON data; None if it had none.
    """

    metadata: Mapping[str, Any] | None = None


class StateBegun(_Record, frozen=True, tag="state_begun"):
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


def recorded(record: Record) -> Record:
    """Return a record as it is written: without the fields of a commit that are not."""
    return Committed(record.entry.recorded()) if isinstance(record, Committed) else record

"""Words every room shares: identities, commits, leases and what the manifest log records.

All are frozen values. They travel by pickle between actors and as JSON in the manifest log, where field names are
the format (``docs/format.md``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Any, NewType

from coordinator.errors import InvalidRequestError
from coordinator.watermarks import Watermarks

__all__ = [
    "DEFAULT_STORE",
    "PYTHON_QUERY_ID",
    "ActorLocation",
    "CommitEntry",
    "Lease",
    "InstancePlans",
    "LoadPlan",
    "LoadPlans",
    "Origin",
    "Parent",
    "PartitionCommit",
    "ShardKey",
    "ShardLocation",
    "SnapshotEntry",
    "StateMetadata",
    "StateStoreId",
    "StateStoreProviderId",
    "StoredFile",
    "TaskIdentity",
    "Travelling",
    "Version",
]

#: Name of an operator's store where it has only one.
DEFAULT_STORE = "default"

#: Query id of states that plain Python programs own. They have no batches over all partitions: each partition goes on by itself.
PYTHON_QUERY_ID = "python"

#: One named store of one partition.
ShardKey = tuple[int, str]

#: State after that many committed batches: batch ``b`` reads version ``b`` and commits ``b + 1``; version 0 is empty.
Version = NewType("Version", int)


class Travelling:
    """A frozen dataclass that is pickled by the values of its fields: what dataclasses do by themselves takes ten times as long."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        kind: Any = type(self)
        return kind, tuple([getattr(self, name) for name in _names_of(kind)])


@cache
def _names_of(kind: Any) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind))


@dataclass(frozen=True, slots=True)
class StateStoreId(Travelling):
    """Identity of one shard, as Spark's ``StateStoreId``.

    ``checkpoint_root_location`` is the folder of the state, ``<fleet uri>/<state name>``.
    """

    checkpoint_root_location: str
    operator_id: int
    partition_id: int
    store_name: str = DEFAULT_STORE

    @property
    def state_name(self) -> str:
        return self.checkpoint_root_location.rsplit("/", 1)[-1]

    def path(self) -> str:
        """Folder of the shard's files relative to the fleet's URI, laid out as Spark lays it out."""
        base = f"{self.state_name}/{self.operator_id}/{self.partition_id}"
        return base if self.store_name == DEFAULT_STORE else f"{base}/{self.store_name}"


@dataclass(frozen=True, slots=True)
class StateStoreProviderId(Travelling):
    """A shard as seen by one run of a query: a restarted query never reuses a former run's instance."""

    store_id: StateStoreId
    query_run_id: str


@dataclass(frozen=True, slots=True)
class TaskIdentity(Travelling):
    """Which Spark task asks: query, run, batch, shard and attempt.

    Attributes
    ----------
    attempt
        Spark's id of the task attempt (``TaskContext.taskAttemptId()``): of two attempts of one run the later one has the larger id,
        also if Spark repeats a stage, which counts ``attemptNumber()`` from 0 again. 0 where there is no Spark task.
    batch_time_ms, former_time_ms
        When Spark planned the batch, and the batch before it, as its offset log has them (milliseconds since the epoch): the same
        whoever repeats a batch, another one in another history of the query. None if that is not known.
    is_import
        Whether it makes a state's first version, whatever its batch's number is: of a query that kept its state elsewhere until then.
    is_temporary
        Whether the query's checkpoint is deleted when it ends, as that of one without a ``checkpointLocation``.
    """

    state_name: str
    query_id: str
    run_id: str
    batch_id: int
    partition_id: int
    attempt: int
    executor: str
    batch_time_ms: int | None = None
    former_time_ms: int | None = None
    is_import: bool = False
    is_temporary: bool = False

    @property
    def is_of_python(self) -> bool:
        """Whether a program opens the state by itself, a partition at a time, and no query's batches do."""
        return self.query_id == PYTHON_QUERY_ID


@dataclass(frozen=True, slots=True)
class ActorLocation(Travelling):
    """One life of one store actor. ``instance_id`` is new each time the process starts."""

    actor_name: str
    instance_id: str
    node_id: str
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class CommitEntry(Travelling):
    """One shard's line in the manifest: the one delta file that makes ``version`` of the shard."""

    partition_id: int
    version: int
    base_version: int
    epoch: int
    run_id: str
    #: Made once per logical commit; a retry repeats it, so a landed commit is recognised as one's own.
    attempt_id: str
    #: Path of the delta file relative to the fleet's URI.
    file: str
    file_bytes: int
    #: CRC-32 of the whole file.
    checksum: int
    #: Rows of the delta file; updated and removed are what it did to the shard.
    delta_rows: int
    rows_updated: int
    rows_removed: int
    #: Rows in the shard after this commit.
    state_rows: int
    state_bytes: int
    #: Rows that reached the shard in this batch, late ones included; late rows dropped.
    rows_in: int
    rows_late: int
    watermark_ms: int
    committed_at_ms: int
    executor: str = ""
    store_name: str = DEFAULT_STORE
    #: What operators that this one feeds go by, and each source's own watermark (:mod:`coordinator.watermarks`).
    output_watermark_ms: int = 0
    source_watermarks_ms: Mapping[str, int] = field(default_factory=dict)
    #: :attr:`TaskIdentity.batch_time_ms`: tells versions of one number from different histories of a query apart.
    batch_time_ms: int | None = None
    #: Earliest time at which a row falls due by processing time; None if none does.
    due_ms: int | None = None
    #: :attr:`TaskIdentity.is_import`.
    is_import: bool = False
    #: How long the shard worked on the rows, and on writing the delta, in milliseconds. Not recorded.
    apply_ms: int = 0
    write_ms: int = 0
    #: How long the shard took to come to its base version beforehand, bytes of the files that were read for it, and commits of it that
    #: failed since the last one that counted, by error. Not recorded.
    bring_ms: int = 0
    load_bytes: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)

    @property
    def shard(self) -> ShardKey:
        return self.partition_id, self.store_name

    @property
    def watermarks(self) -> Watermarks:
        return Watermarks(self.watermark_ms, self.output_watermark_ms, self.source_watermarks_ms)

    def to_json(self) -> dict[str, Any]:
        # Not by asdict(), which copies what it finds, and takes longer than all else that is done for a commit.
        told = {name: getattr(self, name) for name in _RECORDED}
        told["source_watermarks_ms"] = dict(self.source_watermarks_ms)
        for name, default in _OPTIONAL.items():
            # Records of states that have no such times are as they always were.
            if told[name] is default:
                del told[name]
        return told

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CommitEntry:
        return cls(**data).sharing()

    def sharing(self) -> CommitEntry:
        """The same, which has in common with others what many have alike: a coordinator keeps all that are retained."""
        return replace(
            self,
            run_id=sys.intern(self.run_id),
            executor=sys.intern(self.executor),
            store_name=sys.intern(self.store_name),
            source_watermarks_ms=self.source_watermarks_ms or _NOTHING,
            failures=self.failures or _NOTHING,
        )


@dataclass(frozen=True, slots=True)
class PartitionCommit(Travelling):
    """One attempt's commits of all stores of a partition.

    Attributes
    ----------
    is_carried
        Whether its lease came with the commit before, so that nobody was asked for it.
    """

    entries: tuple[CommitEntry, ...]
    is_carried: bool = False


#: What commits without sources of their own, or without failures, have in common; nobody changes it.
_NOTHING: Mapping[str, int] = {}
#: Fields of a commit's record, in their order; and those that only some have, with what the others have.
_NOT_RECORDED = ("apply_ms", "write_ms", "bring_ms", "load_bytes", "failures")
_RECORDED = tuple(one.name for one in fields(CommitEntry) if one.name not in _NOT_RECORDED)
_OPTIONAL = {"batch_time_ms": None, "due_ms": None, "is_import": False}


@dataclass(frozen=True, slots=True)
class StoredFile(Travelling):
    """A file of the object store: path relative to the fleet's URI, size in bytes, CRC-32 of all of it."""

    file: str
    file_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class SnapshotEntry(Travelling):
    """One snapshot: all rows of one counted version of a shard, in one file or, of a large shard, several."""

    partition_id: int
    version: int
    #: Attempt of the commit that made the version: a snapshot of a superseded commit never counts.
    attempt_id: str
    file: str
    file_bytes: int
    #: CRC-32 of the whole file.
    checksum: int
    rows: int
    watermark_ms: int
    created_at_ms: int
    store_name: str = DEFAULT_STORE
    #: Files after the first one.
    further: tuple[StoredFile, ...] = ()

    @property
    def shard(self) -> ShardKey:
        return self.partition_id, self.store_name

    @property
    def pieces(self) -> tuple[StoredFile, ...]:
        """All its files, in order."""
        return (StoredFile(self.file, self.file_bytes, self.checksum), *self.further)

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of all its files."""
        return tuple(piece.file for piece in self.pieces)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        if not self.further:
            # As it was written before there were any.
            del data["further"]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SnapshotEntry:
        return cls(**{**data, "further": tuple(StoredFile(**one) for one in data.get("further", ()))})


@dataclass(frozen=True, slots=True)
class LoadPlan(Travelling):
    """How to load one version of a shard: the newest snapshot that can be read, then every later delta in order.

    Attributes
    ----------
    snapshots
        Snapshots of the version and before, newest first: should one be damaged, the next will do.
    deltas
        Retained commits up to the version, oldest first.
    floor
        Oldest retained version; 0 if the deltas go back to the empty version.
    schemas
        Schemas after the first one that the deltas are in, oldest first, each with the epoch from which on commits are in it.
    origin
        What the deltas build on, of a shard of a state that was rescaled; None if that is the empty version, or not needed any more.
    """

    snapshots: tuple[SnapshotEntry, ...]
    deltas: tuple[CommitEntry, ...]
    floor: int
    schemas: tuple[tuple[int, dict[str, Any]], ...] = ()
    origin: Origin | None = None

    def parts(self) -> Iterator[LoadPlan]:
        """The plan itself, and those of the shards that it is made of, theirs, and so on."""
        yield self
        for parent in () if self.origin is None else self.origin.parents:
            yield from parent.plan.parts()

    def file_bytes(self) -> int:
        """Bytes of the files that loading reads, if none is damaged or in memory."""
        size = 0
        for plan in self.parts():
            begun = plan.snapshots[0].version if plan.snapshots else 0
            size += sum(piece.file_bytes for one in plan.snapshots[:1] for piece in one.pieces)
            size += sum(one.file_bytes for one in plan.deltas if one.version > begun)
        return size

    def beginning_with(self, snapshot: int) -> LoadPlan:
        """The same version by way of the snapshot of one version and what came after it, and nothing else; of no snapshot if 0.

        Raises
        ------
        InvalidRequestError
            There is no such snapshot.
        """
        if snapshot == 0 and self.floor == 0:
            return replace(self, snapshots=())
        found = tuple(one for one in self.snapshots if one.version == snapshot)
        if not found:
            there = sorted({one.version for one in self.snapshots} | ({0} if self.floor == 0 else set()))
            raise InvalidRequestError(
                "the version cannot be read from this snapshot on; 0 reads the deltas alone, where all are retained",
                snapshot=snapshot,
                snapshots=", ".join(map(str, there)),
            )
        # That of the snapshot's own version tells in which schema it is.
        deltas = tuple(one for one in self.deltas if one.version >= snapshot)
        return replace(self, snapshots=found, deltas=deltas, floor=snapshot, origin=None)

    def may_have_rows(self) -> bool:
        """Whether the version is not known to be empty."""
        if self.deltas:
            return self.deltas[-1].state_rows > 0
        return self.origin is not None and any(parent.plan.may_have_rows() for parent in self.origin.parents)

    def files(self) -> Iterator[str]:
        """Paths of all files that loading may read."""
        for plan in self.parts():
            yield from (file for one in plan.snapshots for file in one.files)
            yield from (one.file for one in plan.deltas)


@dataclass(frozen=True, slots=True)
class Parent:
    """A shard of the generation before, of which another one is made.

    Attributes
    ----------
    shard, num_shards
        Which of how many: all its rows are of keys with ``pmod(hash, num_shards) == shard``.
    attempt_id
        The attempt that made the version that is taken over; empty for the empty one, and for one that was itself made of others.
    """

    partition_id: int
    shard: int
    num_shards: int
    attempt_id: str
    plan: LoadPlan


@dataclass(frozen=True, slots=True)
class Origin:
    """What a shard of a rescaled state was at first: rows of other shards.

    Attributes
    ----------
    version
        The version that was taken over.
    shard, num_shards
        Which of how many it is: its rows are those with ``pmod(hash, num_shards) == shard``.
    keys
        Columns that are hashed.
    """

    version: int
    shard: int
    num_shards: int
    keys: tuple[str, ...]
    parents: tuple[Parent, ...]


@dataclass(frozen=True, slots=True)
class LoadPlans(Travelling):
    """How to load one version of some stores of a partition.

    Attributes
    ----------
    attempt_id
        The attempt that made the version (all stores of a partition commit together); empty for the empty version.
    plans
        By store name.
    """

    attempt_id: str
    plans: Mapping[str, LoadPlan]

    def state_bytes(self) -> int:
        """Bytes of memory that the version's rows take, about, as its commits tell."""
        newest = (part.deltas[-1].state_bytes for plan in self.plans.values() for part in plan.parts() if part.deltas)
        return sum(newest)

    def file_bytes(self) -> int:
        """See :meth:`LoadPlan.file_bytes`; of all the stores."""
        return sum(plan.file_bytes() for plan in self.plans.values())

    def newest_version(self) -> int:
        """Newest version that the plans' deltas make, or build on; 0 without any."""
        made = [plan.deltas[-1].version for plan in self.plans.values() if plan.deltas]
        taken_over = [plan.origin.version for plan in self.plans.values() if plan.origin is not None]
        return max([*made, *taken_over], default=0)

    def made(self) -> dict[int, str]:
        """Attempts that made versions from which deltas of the plans, all of one schema, lead to the version planned for."""
        found: dict[int, str] = {}
        for plan in self.plans.values():
            newest_schema = max((epoch for epoch, _ in plan.schemas), default=-1)
            found |= {entry.version: entry.attempt_id for entry in plan.deltas if entry.epoch >= newest_schema}
        return found


@dataclass(frozen=True, slots=True)
class InstancePlans:
    """What a store is told that reports a shard it is about to open.

    Attributes
    ----------
    stale
        Those of its other shards that it should unload.
    """

    stale: tuple[StateStoreProviderId, ...]
    loading: LoadPlans


@dataclass(frozen=True, slots=True)
class ShardLocation:
    """Where a partition is.

    Attributes
    ----------
    newest_version
        Newest counted version; 0 without any.
    location
        Store actor with its lease; None if nobody has it.
    """

    store_id: StateStoreId
    newest_version: int
    location: ActorLocation | None


@dataclass(frozen=True, slots=True)
class Lease(Travelling):
    """The right of one store actor to commit a shard for one run, until a higher epoch is given out.

    Attributes
    ----------
    standbys
        Names of the store actors that are told of each commit, so that they can take over.
    """

    store_id: StateStoreId
    run_id: str
    epoch: int
    location: ActorLocation
    standbys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """What is fixed for the life of a state; ``<state>/metadata.json``, written once with put-if-absent.

    ``schema`` is the JSON form of ``store_actors.schema.StateSchema``; the coordinator only compares it. That of the file is the first
    one, as is ``num_shards``: later ones are in the log (``SCHEMA_CHANGED``, ``RESCALED``).
    """

    state_name: str
    query_id: str
    num_shards: int
    output_mode: str
    schema: dict[str, Any] = field(default_factory=dict)
    #: Of the file (:mod:`coordinator.file_format`), and what no other state has, whatever its name. States of format 1 have no id.
    format_version: int = field(default=1, compare=False)
    state_id: str = field(default="", compare=False)
    #: Ids of the states of this name that are no more, whose records the log may still have.
    former_ids: tuple[str, ...] = field(default=(), compare=False)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        if not self.state_id:
            del data["state_id"]
        if not self.former_ids:
            del data["former_ids"]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StateMetadata:
        return cls(**{**data, "former_ids": tuple(data.get("former_ids", ()))})

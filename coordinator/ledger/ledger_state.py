"""Everything that the records of a state add up to: runs, leases, branches and drops, beside the history of its versions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self, assert_never

from msgspec import Struct, structs, to_builtins

from coordinator.ledger.cleaning_rules import DATA_FILE
from coordinator.ledger.history_changes import ChangingHistory
from coordinator.ledger.records import (
    BatchFinished,
    BranchBorn,
    Branched,
    BranchEnded,
    BranchMade,
    Committed,
    Discarded,
    Dropped,
    MoveFailed,
    Record,
    RescaleAsked,
    Rescaled,
    RunStarted,
    SchemaChanged,
    ShardsAssigned,
    SnapshotAdded,
    StateBegun,
    Truncated,
)
from coordinator.model.errors import CommitUnknownError
from coordinator.model.identities import PYTHON_QUERY_ID, ActorLocation
from coordinator.model.leases import ShardMove
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.stored_json import from_json

#: Newest moves of a shard that are kept.
_MOVES = 8


class Assignment(Struct, frozen=True, forbid_unknown_fields=True):
    """A shard's present lease."""

    epoch: int
    location: ActorLocation


class LedgerState(ChangingHistory):
    """The fold of the records of one state; :class:`~coordinator.ledger.state_ledger.StateLedger` adds the rules for new ones."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.epoch = 0
        self.run_id = ""
        self.query_id = ""
        #: Whether the query's checkpoint ends with its run.
        self.is_temporary = False
        #: Newest version whose batch Spark is known to have finished.
        self.finished = 0
        #: The newest epoch of a continuous query that counts, with the end that Spark's logs are to have for it.
        self.epoch_end: tuple[int, str] | None = None
        #: Newest version that any shard ever had, those of layouts that never counted included.
        self._newest_seen = 0
        #: Runs that a newer run has replaced; they may not lease or commit any more.
        self.retired: set[str] = set()
        #: Leases by partition, and the newest moves of each, oldest first.
        self._assignments: dict[int, Assignment] = {}
        self._moves: dict[int, tuple[ShardMove, ...]] = {}
        #: Run, batch and layout (its first partition) whose base was found on every shard.
        self._checked_base: tuple[str, int, int] | None = None
        #: Run and metadata of its query that were found to fit the state and its newest schema.
        self._checked_query: tuple[str, StateMetadata] | None = None
        #: The number of shards that the present run was asked to go on with.
        self.requested_rescale: RescaleAsked | None = None
        #: State and version that this one began with, of a branch.
        self.origin: tuple[str, int] | None = None
        #: States that began with files of this one, by name; and the names of those that were seen to be there.
        self.branches: dict[str, BranchMade] = {}
        self.born: set[str] = set()
        #: Files that may be deleted, and never count again, each with the newest epoch at the time that it was discarded.
        self.discarded: dict[str, int] = {}
        #: How many states of this name were dropped, and the metadata of the newest of them.
        self.drops = 0
        self.dropped_metadata: Mapping[str, Any] | None = None
        #: Metadata of the state, if it has the name of a state that was dropped.
        self.begun_metadata: Mapping[str, Any] | None = None

    # -- leases ---------------------------------------------------------------------------------------------------

    def assignment(self, partition_id: int) -> Assignment | None:
        """Return a shard's present lease; None if it was never leased."""
        return self._assignments.get(partition_id)

    def holder(self, partition_id: int) -> ActorLocation | None:
        """Return the store actor of a shard's present lease; None if it was never leased."""
        assignment = self._assignments.get(partition_id)
        return None if assignment is None else assignment.location

    def assigned(self) -> dict[int, ActorLocation]:
        """Return the store actor of each partition's present lease."""
        return {partition: assignment.location for partition, assignment in self._assignments.items()}

    def moves(self, partition_id: int) -> tuple[ShardMove, ...]:
        """Return the newest moves of a shard, oldest first."""
        return self._moves.get(partition_id, ())

    def inherited(self, partitions: Iterable[int]) -> dict[int, ActorLocation]:
        """Return, by partition, the store actor of a shard that the partition is made of, where one of these is leased."""
        inherited = {}
        for partition in partitions:
            layout = self.layouts.of(partition)
            holders = map(self.holder, () if layout is None else layout.parents(partition))
            holder = next((location for location in holders if location is not None), None)
            if holder is not None:
                inherited[partition] = holder
        return inherited

    # -- runs -----------------------------------------------------------------------------------------------------

    @property
    def is_of_python(self) -> bool:
        """Whether Python programs own the state, which have no batches."""
        return self.query_id == PYTHON_QUERY_ID

    @property
    def ends_with_its_run(self) -> bool:
        """Whether no run will ever go on from the state once its present run is over."""
        return self.is_temporary and not self.branches

    @property
    def is_dropped(self) -> bool:
        """Whether the state was dropped, and no other state of its name has begun."""
        return self.drops > 0 and not self.run_id and self.origin is None

    def _newest_of_run(self, partition_id: int) -> int:
        """Return the newest version of a partition that the present run committed; 0 without any."""
        newest = (chain[-1] for chain in self._partition_chains(partition_id) if chain)
        return max((entry.version for entry in newest if entry.run_id == self.run_id), default=0)

    def _may_count(self, path: str, epoch: int) -> bool:
        """Return whether a file that was written at an epoch, or before, could still be committed."""
        file = DATA_FILE.match(path)
        if file is None:
            return False
        partition_id, version = int(file["partition"]), int(file["version"])
        if file["kind"] == "snapshot":
            return any(entry.version == version for chain in self._partition_chains(partition_id) for entry in chain)
        assignment = self._assignments.get(partition_id)
        return assignment is not None and assignment.epoch <= epoch and version > self._newest_of_run(partition_id)

    def refuse_discarded(self, files: Iterable[str]) -> None:
        """Refuse to accept an attempt one of whose files was discarded.

        Raises
        ------
        CommitUnknownError
            A file was discarded. Its writer deletes nothing: cleaning deletes all files that are not needed.
        """
        for file in files:
            if file in self.discarded:
                raise CommitUnknownError(
                    "the commit took too long: its file was cleaned away meanwhile, as no commit needed it, so it is not counted and "
                    "never will be; nothing is lost; repeat the task, which writes a new one; raise grace_s if this comes again",
                    file=file,
                )

    # -- folding --------------------------------------------------------------------------------------------------

    def fold(self, record: Record) -> None:
        """Take in one record of the log."""
        match record:
            case RunStarted():
                self._start_run(record)
            case BatchFinished():
                if record.run_id == self.run_id:
                    self.finished = max(self.finished, record.batch_id + 1)
                    if record.end:
                        self.epoch_end = record.batch_id, record.end
            case ShardsAssigned():
                self._assign(record)
            case MoveFailed():
                present = self._assignments.get(record.partition_id)
                epoch, holder = (0, None) if present is None else (present.epoch, present.location)
                self._add_move(record, epoch, holder, error=record.error)
            case SchemaChanged():
                self._checked_query = None
                self.take(record)
            case Committed(entry):
                # A batch is planned once the one before it is in Spark's commit log; what was imported was finished elsewhere.
                self.finished = max(self.finished, entry.version if entry.is_import else entry.version - 1)
                self._newest_seen = max(self._newest_seen, entry.version)
                self.take(record)
            case SnapshotAdded() | Truncated():
                self.take(record)
            case Discarded(files):
                # Others are refused by another rule by now.
                self.discarded = {file: at for file, at in self.discarded.items() if self._may_count(file, at)}
                self.discarded |= dict.fromkeys(files, self.epoch)
            case RescaleAsked():
                self.requested_rescale = record
            case Rescaled():
                self.requested_rescale = None
                self.take(record)
            case Branched():
                self.origin, self.finished = (record.parent, record.version), record.version
                self.epoch, self.query_id = max(self.epoch, record.ledger["epoch"]), record.ledger["query_id"]
                self.load_history(record.ledger)
            case BranchMade():
                self.branches[record.name] = record
                self.born.discard(record.name)
            case BranchBorn():
                self.born.add(record.name)
            case BranchEnded():
                self.branches.pop(record.name, None)
                self.born.discard(record.name)
            case Dropped():
                self._drop(record)
            case StateBegun():
                self.begun_metadata = record.metadata
            case _:
                assert_never(record)

    def _start_run(self, record: RunStarted) -> None:
        if self.run_id:
            self.retired.add(self.run_id)
        self.run_id, self.query_id, self.epoch = record.run_id, record.query_id, record.epoch
        self.is_temporary = record.is_temporary
        # The run begins with this batch because the commit log ends before it, also if earlier runs reported more.
        self.finished = record.batch_id
        self._assignments = {
            partition: structs.replace(lease, epoch=self.epoch) for partition, lease in self._assignments.items()
        }
        self.requested_rescale = None
        for layout in self.layouts.start_run(record.run_id):
            self.forget(layout.partitions)

    def _assign(self, record: ShardsAssigned) -> None:
        self.epoch, former = record.epoch, self.holder(record.partition_id)
        self._assignments[record.partition_id] = Assignment(record.epoch, record.location)
        if record.reason:
            self._add_move(record, record.epoch, former, preparation=record.preparation)

    def _add_move(
        self, record: ShardsAssigned | MoveFailed, epoch: int, former: ActorLocation | None, **more: Any
    ) -> None:
        partition_id = record.partition_id
        version = self.newest_version(partition_id)
        move = ShardMove(epoch, version, former, record.location, record.reason, **more)
        self._moves[partition_id] = (*self.moves(partition_id), move)[-_MOVES:]

    def _drop(self, record: Dropped) -> None:
        """Begin again as an empty state. Requests of runs and owners of the dropped state are refused."""
        retired, epoch, drops = {*self.retired, *filter(None, [self.run_id])}, self.epoch, self.drops
        ended = self.begun_metadata or record.metadata or self.dropped_metadata
        self.__init__(self.root)  # type: ignore[misc]
        self.retired, self.epoch, self.drops = retired, epoch + 1, drops + 1
        self.dropped_metadata = ended

    def forget(self, partitions: Iterable[int]) -> None:
        """Drop partitions as if they had never been, with their leases."""
        super().forget(partitions)
        for partition_id in partitions:
            self.leave(partition_id)

    def leave(self, partition_id: int) -> None:
        """End the lease of a partition of which no version is retained any more."""
        self._assignments.pop(partition_id, None)
        self._moves.pop(partition_id, None)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the ledger as JSON data."""
        data: dict[str, Any] = to_builtins(self.folded(self.retained()), str_keys=True)
        return data

    def folded(self, records: Iterable[Committed | SnapshotAdded]) -> dict[str, Any]:
        """Return the ledger for a checkpoint of the log, with these of its commits and snapshots only.

        Its values are for msgspec to encode, also in another thread: none of them is ever changed.
        """
        return {
            "epoch": self.epoch,
            "run_id": self.run_id,
            "query_id": self.query_id,
            "finished": self.finished,
            "newest_seen": self._newest_seen,
            **({"is_temporary": True} if self.is_temporary else {}),
            **({} if self.epoch_end is None else {"epoch_end": self.epoch_end}),
            "retired": sorted(self.retired),
            "assignments": dict(self._assignments),
            **({"moves": dict(self._moves)} if self._moves else {}),
            **self.folded_history(records),
            **({} if self.requested_rescale is None else {"rescale_asked": structs.asdict(self.requested_rescale)}),
            **({} if self.origin is None else {"origin": self.origin}),
            **({"discarded": dict(self.discarded)} if self.discarded else {}),
            **({"drops": self.drops, "dropped_metadata": self.dropped_metadata} if self.drops else {}),
            **({"begun_metadata": self.begun_metadata} if self.begun_metadata else {}),
            **({"born": sorted(self.born)} if self.born else {}),
            **({"branches": [structs.asdict(branch) for branch in self.branches.values()]} if self.branches else {}),
        }

    @classmethod
    def from_json(
        cls, root: str, data: Mapping[str, Any], earlier: Iterable[Committed | SnapshotAdded] | None = None
    ) -> Self:
        """Return the ledger of a checkpoint; `earlier` as for :meth:`load_history`."""
        ledger = cls(root)
        ledger.epoch, ledger.run_id, ledger.query_id = data["epoch"], data["run_id"], data["query_id"]
        ledger.finished, ledger._newest_seen = data["finished"], data["newest_seen"]
        ledger.is_temporary = data.get("is_temporary", False)
        if "epoch_end" in data:
            epoch, end = data["epoch_end"]
            ledger.epoch_end = epoch, end
        ledger.retired = set(data["retired"])
        ledger._assignments = from_json(data["assignments"], dict[int, Assignment])
        ledger._moves = from_json(data.get("moves", {}), dict[int, tuple[ShardMove, ...]])
        ledger.load_history(data, earlier)
        if "rescale_asked" in data:
            ledger.requested_rescale = from_json(data["rescale_asked"], RescaleAsked)
        if "origin" in data:
            parent, version = data["origin"]
            ledger.origin = parent, version
        ledger.discarded = dict(data.get("discarded", {}))
        ledger.born = set(data.get("born", ()))
        ledger.drops, ledger.dropped_metadata = data.get("drops", 0), data.get("dropped_metadata")
        ledger.begun_metadata = data.get("begun_metadata")
        ledger.branches = {branch.name: branch for branch in from_json(data.get("branches", ()), list[BranchMade])}
        return ledger

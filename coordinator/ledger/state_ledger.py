"""The coordinator's rules, pure: records in, decisions out. No I/O, no clock, no randomness, no Ray.

Theory of operation
-------------------
A state's truth is its manifest log (``manifest_log.py``), a sequence of records that only grows. :class:`StateLedger` is the
fold of that sequence. A ``decide_*`` method reads the ledger and returns the records that would make its answer true,
changing nothing; the answer is given only once those records are in the log. So whoever replays the log (a restarted
coordinator) answers the same, and whoever has an old ledger (a zombie) cannot append, because its place in the log is taken.

Epochs are one counter a state. A run that starts takes the next epoch, and every lease moves to it: from then on commits of
older runs are refused. A shard given to another store actor takes the next epoch: from then on commits of its former owner
are refused.

A new coordinator and an old one may both believe themselves in office; ``manifest_log.LedgerWriter`` tells them apart.

Versions: batch ``b`` reads version ``b`` of its shard and commits ``b + 1``. It is refused unless every shard has version ``b``, made
by the batch before it in the query's own history (:meth:`StateLedger.check_whole`): no batch counts by halves. A later run that
commits a version supersedes what earlier runs counted from that version on: the batch had failed or is being replayed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, assert_never

from coordinator.ledger.assignments import Assignments
from coordinator.ledger.compatibility import check_metadata, same_description, same_state
from coordinator.ledger.discards import DataFile, Discards
from coordinator.ledger.history import StateHistory
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
from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.errors import FencedError, InvalidRequestError, StateMismatchError
from coordinator.model.identities import (
    PYTHON_QUERY_ID,
    ActorLocation,
    FastPickle,
    ShardKey,
    StateStoreId,
    TaskIdentity,
)
from coordinator.model.leases import Lease
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.watermarks import Watermarks
from coordinator.placement.lease_placer import FleetView, LeasePlacer, LeaseRequest

__all__ = ["AcceptedCommits", "LeaseGrant", "StateLedger"]


@dataclass(frozen=True, slots=True)
class LeaseGrant(FastPickle):
    """A lease and the version that the task's batch reads.

    Attributes
    ----------
    watermarks
        Where event time stood after that version.
    upstream
        Where it stands, this batch included, for each operator that feeds this one.
    """

    lease: Lease
    base_version: int
    watermarks: Watermarks = field(default_factory=Watermarks)
    upstream: tuple[Watermarks, ...] = ()


@dataclass(frozen=True, slots=True)
class AcceptedCommits(FastPickle):
    """What became of a partition's commits.

    Attributes
    ----------
    entries
        Those that count: the own, or another attempt's of the same run.
    next_lease
        The lease of the next batch, for a task of the same run; None if the coordinator is to be asked for it.
    """

    entries: tuple[CommitEntry, ...]
    next_lease: LeaseGrant | None = None


class StateLedger(StateHistory):
    """Everything decided about one state so far.

    Parameters
    ----------
    root
        Folder of the state, ``<fleet uri>/<state name>``.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.epoch = 0
        self.run_id = ""
        self.query_id = ""
        #: Whether the query's checkpoint goes with its run.
        self.is_temporary = False
        #: Newest version whose batch Spark is known to have finished; None of a run of an earlier release, which did not report it.
        self.finished: int | None = None
        #: Newest version that any shard ever had, also of shards that came to nothing.
        self._newest_seen = 0
        #: Runs that a newer run has replaced; they may not lease or commit any more.
        self.retired: set[str] = set()
        self.assignments = Assignments()
        #: Run, batch and generation (its first partition) whose base was found on every shard; run and query that were found to fit the
        #: state and its newest schema.
        self._whole: tuple[str, int, int] | None = None
        self._fitting: tuple[str, StateMetadata] | None = None
        #: Run that was asked, while it goes on, to go on with so many shards.
        self.asked: RescaleAsked | None = None
        #: State and version that this one began with, of a branch; and states that began with files of this one, by name.
        self.origin: tuple[str, int] | None = None
        self.branches: dict[str, BranchMade] = {}
        #: Files that may be deleted, and are never counted.
        self.discards = Discards()
        #: Of those branches, the ones that were there.
        self.born: set[str] = set()
        #: How many states of this name are no more, and the metadata of the newest of them.
        self.drops = 0
        self.dropped_metadata: Mapping[str, Any] | None = None
        #: Metadata of the state, if it has the name of one that was dropped.
        self.begun_metadata: Mapping[str, Any] | None = None

    # -- reading --------------------------------------------------------------------------------------------------

    def location(self, partition_id: int) -> tuple[int, ActorLocation] | None:
        """(epoch, store actor) of a shard's present lease."""
        assignment = self.assignments.get(partition_id)
        return None if assignment is None else (assignment.epoch, assignment.location)

    def holder(self, partition_id: int) -> ActorLocation | None:
        """Store actor of a shard's present lease."""
        assignment = self.assignments.get(partition_id)
        return None if assignment is None else assignment.location

    @property
    def is_of_python(self) -> bool:
        """Whether Python programs own the state, which have no batches."""
        return self.query_id == PYTHON_QUERY_ID

    def assigned(self) -> dict[int, ActorLocation]:
        """Store actor of each partition's present lease."""
        return self.assignments.locations()

    def inherited(self, partitions: Iterable[int]) -> dict[int, ActorLocation]:
        """Store actor of a shard that each of some partitions is made of, of those that somebody holds."""
        found = {}
        for partition in partitions:
            own = self.layouts.of(partition)
            holders = map(self.holder, () if own is None else own.parents(partition))
            holder = next((one for one in holders if one is not None), None)
            if holder is not None:
                found[partition] = holder
        return found

    # -- deciding -------------------------------------------------------------------------------------------------

    def check_query(self, task: TaskIdentity) -> None:
        """Refuse a task whose query does not own the state.

        Raises
        ------
        StateMismatchError
            Another query wrote the state, or the checkpoint is ahead of a state that has nothing.
        FencedError
            A newer run of the query has started.
        """
        if task.run_id in self.retired:
            raise FencedError(
                "a newer run of this query has taken the state over, or the state's folder was put back or replaced under this one; "
                "this run may not touch it any more; nothing of this batch was committed by it; restart the query",
                state=self.state_name,
                run_id=task.run_id,
                newer_run_id=self.run_id,
            )
        self.check_owner(task.query_id)
        if not self.has_versions() and task.batch_id > 0 and not task.is_import:
            raise StateMismatchError(
                "the checkpoint has finished batches but the state has no version; refusing to count from nothing; restore the "
                "state's folder, or start with a new checkpoint",
                state=self.state_name,
                root=self.root,
                batch_id=task.batch_id,
            )

    @property
    def ends_with_its_run(self) -> bool:
        """Whether nothing will ever go on from the state once its run is over."""
        return self.is_temporary and not self.branches

    def check_owner(self, query_id: str) -> None:
        """Refuse a query that does not own the state; an empty id is a new query's.

        Raises
        ------
        StateMismatchError
            Another query wrote the state.
        """
        # A branch belongs to the first query that goes on from it.
        if self.has_versions() and self.query_id not in (query_id, ""):
            raise StateMismatchError(
                "the state belongs to another query (each checkpoint is a query of its own); start with the checkpoint "
                "that the state was made with, or use another name",
                state=self.state_name,
                owner_query_id=self.query_id,
                query_id=query_id,
            )

    def check_whole(self, task: TaskIdentity, layout: ShardLayout) -> None:
        """Refuse a batch unless the one before it is counted on every shard, and is the one that the checkpoint tells of.

        Spark's rule: a store is opened at exactly the batch's number, and a version that was never made is an error.

        Raises
        ------
        StateMismatchError
            The batch before ran on some shards only, or the state is older than the checkpoint, or of another history of the query.
        """
        looked_at = task.run_id, task.batch_id, layout.first_partition
        if task.batch_id == 0 or task.is_of_python or task.is_import or self._whole == looked_at:
            return
        missing, strange = [], []
        for shard, partition_id in enumerate(layout.partitions):
            if self.base_version(partition_id, task.batch_id) != task.batch_id:
                missing.append(shard)
                continue
            made_ms = self._batch_time_ms(partition_id, task.batch_id)
            if None not in (made_ms, task.former_time_ms) and made_ms != task.former_time_ms:
                strange.append(shard)
        facts = {
            "state": self.state_name,
            "query_id": task.query_id,
            "batch_id": task.batch_id,
            "shards": layout.num_shards,
        }
        former = task.batch_id - 1
        if missing:
            raise StateMismatchError(
                f"Spark's checkpoint says that batch {former} is finished, and these shards do not have it: it ran on some shards "
                "only, or the state's folder was put back from an older copy; nothing was changed. If a copy was put back, put back "
                f"the checkpoint of the same time. Else stop the query, delete commits/{former} and offsets/{task.batch_id} in its "
                f"checkpoint, and start it again: Spark then repeats batch {former} on all shards, and nothing is lost",
                missing=missing,
                **facts,
            )
        if strange:
            raise StateMismatchError(
                f"the state's version {task.batch_id} was not made by the batch {former} that Spark's checkpoint tells of: state and "
                "checkpoint are copies of different times, and went on since; nothing was changed; put back both of the same time, or "
                "start with a new checkpoint and another name",
                strange=strange,
                **facts,
            )
        self._whole = looked_at

    def check_layout(self, task: TaskIdentity, layout: ShardLayout) -> None:
        """Refuse a task of a shard that its batch does not have.

        Raises
        ------
        FencedError
            The state was rescaled: the batch was planned for other shards.
        """
        if task.partition_id not in layout.partitions:
            raise FencedError(
                "the batch was planned for other shards than the state has in it: another run rescaled the state meanwhile; nothing of "
                "this batch was committed by this task; restart the query",
                state=self.state_name,
                batch_id=task.batch_id,
                partition=task.partition_id,
                shards=layout.num_shards,
            )

    def decide_lease(
        self, task: TaskIdentity, asking: ActorLocation, fleet: FleetView, placer: LeasePlacer
    ) -> tuple[list[Record], LeaseGrant]:
        """Give a task the lease of its shard, on the store actor that `placer` chooses.

        Parameters
        ----------
        asking
            Store actor of the task's own node.
        """
        self.check_query(task)
        records: list[Record] = []
        epoch = self.epoch
        if task.run_id != self.run_id:
            self.check_not_of_the_past(task)
            epoch += 1
            records.append(
                RunStarted(
                    task.run_id,
                    task.query_id,
                    task.batch_id,
                    epoch,
                    reports_finished=True,
                    is_temporary=task.is_temporary,
                )
            )
        assignment = self.assignments.get(task.partition_id)
        present = self.holder(task.partition_id)
        choice = placer.place(LeaseRequest(self.state_name, task.partition_id, asking, present), fleet)
        location = choice.location
        if assignment is not None and location == present and fleet.is_alive(location):
            lease_epoch = epoch if records else assignment.epoch
        else:
            lease_epoch = epoch + 1
            records.append(ShardsAssigned(task.partition_id, lease_epoch, location, choice.reason, choice.copy_result))
        store_id = StateStoreId(self.root, 0, task.partition_id)
        lease = Lease(store_id=store_id, run_id=task.run_id, epoch=lease_epoch, location=location)
        base = self.base_version(task.partition_id, task.batch_id)
        read = self.made_by(base, task.partition_id)
        return records, LeaseGrant(lease, base, Watermarks() if read is None else read.watermarks)

    def decide_schema(self, task: TaskIdentity, created: StateMetadata, asked: StateMetadata) -> list[Record]:
        """Take note of the schema of a task's run, if commits would be taken to be in another one; to be decided with the task's lease.

        So it is with what readers are shown, where that alone is another one. The schema becomes the state's with the first commit that
        is in it (:meth:`committed_schema`).

        Raises
        ------
        StateMismatchError
            The query does not fit the state.
        """
        if self._fitting == (task.run_id, asked) and same_description(self._fitting[1].schema, asked.schema):
            return []
        asked_for = self._schemas[-1][1] if self._schemas else created.schema
        is_new = task.run_id != self.run_id
        # A new run goes on from what its first batch reads: it supersedes what is later, which does not bind it.
        bound = self.committed_schema(created, task.batch_id) if is_new else asked_for
        check_metadata(replace(created, schema=asked.schema if bound is None else bound), asked)
        if same_state(asked_for, asked.schema) and same_description(asked_for, asked.schema):
            if not is_new:
                self._fitting = task.run_id, asked
            return []
        assert asked.schema is not None  # two states without a schema are the same
        # As it will be read from the log: lists for tuples.
        schema = StateSchema.from_json(json.loads(json.dumps(asked.schema.to_json())))
        return [SchemaChanged(task.run_id, self.epoch + is_new, schema)]

    def check_not_of_the_past(self, task: TaskIdentity) -> None:
        """Refuse a new run whose first batch the state has left behind.

        A batch starts only after the one before it is in Spark's commit log, so a shard with version ``v`` proves that batch ``v - 2``
        is finished. A run that starts earlier read that log long ago (a driver that slept while another went on); what it
        replays would supersede finished batches, which nobody would ever replay again. Partitions that have no batches in common say
        nothing of each other.
        """
        alone = task.is_of_python
        chains = self._partition_chains(task.partition_id) if alone else self._chains.values()
        newest = max((chain[-1].version for chain in chains if chain), default=0)
        if not alone:
            newest = max(newest, self._newest_seen)
        if newest > task.batch_id + 1 and self.origin is not None and not self.run_id:
            raise StateMismatchError(
                "the state is a branch, and this checkpoint does not begin with the batch that reads the version it begins with; "
                "nothing was changed; make one by fleet.branch(.., checkpoint=), or copy that of the query that was branched",
                state=self.state_name,
                branch_of=self.origin[0],
                version=self.origin[1],
                batch_id=task.batch_id,
            )
        if newest > task.batch_id + 1:
            raise StateMismatchError(
                "the state is ahead of the checkpoint that this run started from: another driver has finished later batches; "
                "nothing was changed; restart the query, so that it reads its checkpoint anew; if the checkpoint was put back on "
                "purpose, start with another state",
                state=self.state_name,
                batch_id=task.batch_id,
                newest_version=newest,
            )

    def decide_commits(self, entries: Sequence[CommitEntry]) -> tuple[list[Record], tuple[CommitEntry, ...]]:
        """Count one attempt's commits of all the stores of a partition, together, or say which attempt's count.

        Raises
        ------
        FencedError
            The run or the lease is no longer the newest; nothing was counted.
        InvalidRequestError
            The entries build on a version that is not the one below them.
        """
        entry = entries[0]
        known = self._made(entry.partition_id, entry.version)
        mine = tuple(one for one in known if one.attempt_id == entry.attempt_id)
        if mine:
            return [], mine
        assignment = self.assignments.get(entry.partition_id)
        is_of_run = entry.run_id == self.run_id and entry.run_id not in self.retired
        if not is_of_run or assignment is None or entry.epoch != assignment.epoch:
            raise FencedError(
                "a newer owner holds this shard; the commit was not counted and no version changed",
                state=self.state_name,
                partition=entry.partition_id,
                version=entry.version,
                epoch=entry.epoch,
                newest_epoch=None if assignment is None else assignment.epoch,
            )
        in_force = self.layouts.later_in_force(entry.run_id, entry.version - 1)
        if self.layouts.of(entry.partition_id) is not in_force:
            raise FencedError(
                "the state was rescaled, and the version is one of other shards; the commit was not counted and no version changed",
                state=self.state_name,
                partition=entry.partition_id,
                version=entry.version,
            )
        others = tuple(one for one in known if one.run_id == entry.run_id)
        if others:
            return [], others
        if self._newest_of_run(entry.partition_id) > entry.version:
            raise FencedError(
                "the shard has gone beyond this version in the same run, and does not retain it any more; the commit was not counted "
                "and no version changed",
                state=self.state_name,
                partition=entry.partition_id,
                version=entry.version,
            )
        self.discards.refuse(one.file for one in entries)
        base = self.base_version(entry.partition_id, entry.version - 1)
        if entry.base_version != base:
            raise InvalidRequestError(
                "the commit builds on a version that is not the newest below it; nothing was counted",
                state=self.state_name,
                partition=entry.partition_id,
                version=entry.version,
                base_version=entry.base_version,
                expected=base,
            )
        return [Committed(one.sharing()) for one in entries], tuple(entries)

    def _newest_of_run(self, partition_id: int) -> int:
        """Newest version of a partition that the present run counted; 0 without any."""
        newest = (chain[-1] for chain in self._partition_chains(partition_id) if chain)
        return max((entry.version for entry in newest if entry.run_id == self.run_id), default=0)

    def decide_discard(self, files: Iterable[str]) -> list[Record]:
        """Have files refused that are about to be deleted, as far as they could still be counted."""
        needed = self.referenced_files()
        could = tuple(file for file in files if file not in needed and self._may_count(file, self.epoch))
        return [Discarded(could)] if could else []

    def _may_count(self, path: str, epoch: int) -> bool:
        """Whether a file that was written at an epoch, or before, could still be counted."""
        file = DataFile.of(path)
        if file is None:
            return False
        if file.is_snapshot:
            return any(
                entry.version == file.version for chain in self._partition_chains(file.partition_id) for entry in chain
            )
        assignment = self.assignments.get(file.partition_id)
        return (
            assignment is not None
            and assignment.epoch <= epoch
            and file.version > self._newest_of_run(file.partition_id)
        )

    def decide_finished(self, run_id: str, batch_id: int) -> list[Record]:
        """Note that Spark's commit log has a batch of a run; nothing if the run was replaced, or the log says so by now."""
        if run_id != self.run_id or (self.finished or 0) > batch_id:
            return []
        return [BatchFinished(run_id, batch_id)]

    def decide_snapshot(self, snapshot: SnapshotEntry) -> tuple[list[Record], bool]:
        """Count a snapshot, if the commit that it shows still counts and it is new; returns whether it is counted."""
        known = self._snapshots.get(snapshot.shard, ())
        if any(one.file == snapshot.file for one in known):
            return [], True
        shown = any(
            (entry.version, entry.attempt_id) == (snapshot.version, snapshot.attempt_id)
            for entry in self._chains.get(snapshot.shard, ())
        )
        if not shown or any(one.version >= snapshot.version for one in known):
            return [], False
        self.discards.refuse(snapshot.files)
        return [SnapshotAdded(snapshot)], True

    def decide_truncation(self, min_versions_to_retain: int) -> tuple[list[Record], dict[ShardKey, int]]:
        """Let go of versions that need not be retained; returns the new floor of each shard that has one.

        Spark's rule: keep the newest snapshot that is at or below ``newest - min_versions_to_retain + 1``, and everything after it.
        """
        floors: dict[ShardKey, int] = {}
        for shard, chain in self._chains.items():
            wanted = (chain[-1].version if chain else 0) - min_versions_to_retain + 1
            covering = [one.version for one in self._snapshots.get(shard, ()) if one.version <= wanted]
            if covering and covering[-1] > self._floors.get(shard, 0):
                floors[shard] = covering[-1]
        records: list[Record] = [
            Truncated(partition_id, store_name, floor) for (partition_id, store_name), floor in floors.items()
        ]
        return records, floors

    # -- folding --------------------------------------------------------------------------------------------------

    def fold(self, record: Record) -> None:
        """Take one record of the log in."""
        match record:
            case RunStarted():
                if self.run_id:
                    self.retired.add(self.run_id)
                self.run_id, self.query_id, self.epoch = record.run_id, record.query_id, record.epoch
                self.is_temporary = record.is_temporary
                # The run begins with this batch because the commit log ends before it, whatever earlier runs reported.
                self.finished = record.batch_id if record.reports_finished else None
                self.assignments.renew(self.epoch)
                self.asked = None
                for layout in self.layouts.start_run(record.run_id):
                    self.forget(layout.partitions)
            case BatchFinished():
                if record.run_id == self.run_id:
                    self._raise_finished(record.batch_id + 1)
            case ShardsAssigned():
                self.epoch = record.epoch
                self.assignments.assign(record, self.newest_version(record.partition_id))
            case MoveFailed():
                self.assignments.stay(record, self.newest_version(record.partition_id))
            case SchemaChanged():
                self._fitting = None
                self.take(record)
            case Committed(entry):
                # A batch is planned once the one before it is in Spark's commit log; what was imported was finished elsewhere.
                self._raise_finished(entry.version if entry.is_import else entry.version - 1)
                self._newest_seen = max(self._newest_seen, entry.version)
                self.take(record)
            case SnapshotAdded() | Truncated():
                self.take(record)
            case Discarded(files):
                self.discards.keep(self._may_count)
                self.discards.add(files, self.epoch)
            case RescaleAsked():
                self.asked = record
            case Rescaled():
                self.asked = None
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

    def _raise_finished(self, version: int) -> None:
        if self.finished is not None:
            self.finished = max(self.finished, version)

    @property
    def is_dropped(self) -> bool:
        """Whether the state is no more, and no other one of its name has begun."""
        return self.drops > 0 and not self.run_id and self.origin is None

    def _drop(self, record: Dropped) -> None:
        """Begin anew as a state without anything. What runs and owners of the former one still ask for is refused."""
        retired, epoch, drops = {*self.retired, *filter(None, [self.run_id])}, self.epoch, self.drops
        ended = self.begun_metadata or record.metadata or self.dropped_metadata
        self.__init__(self.root)  # type: ignore[misc]
        self.retired, self.epoch, self.drops = retired, epoch + 1, drops + 1
        self.dropped_metadata = ended

    def copy(self, records: Iterable[Committed | SnapshotAdded]) -> StateLedger:
        """The same, for good: this one may go on; but of its commits and snapshots these only."""
        other = StateLedger(self.root)
        other.epoch, other.run_id, other.query_id = self.epoch, self.run_id, self.query_id
        other.finished, other._newest_seen = self.finished, self._newest_seen
        other.is_temporary = self.is_temporary
        other.retired = set(self.retired)
        other.assignments = self.assignments.copy()
        other.asked = self.asked
        other.origin, other.branches = self.origin, dict(self.branches)
        other.discards = self.discards.copy()
        other.born = set(self.born)
        other.drops, other.dropped_metadata = self.drops, self.dropped_metadata
        other.begun_metadata = self.begun_metadata
        other.copy_history(self, records)
        return other

    def forget(self, partitions: Iterable[int]) -> None:
        """See :meth:`StateHistory.forget`; nobody has them any more."""
        super().forget(partitions)
        self.assignments.forget(partitions)

    def leave(self, partition_id: int) -> None:
        """See :meth:`StateHistory.leave`."""
        self.assignments.forget([partition_id])

    def to_json(self) -> dict[str, Any]:
        """The ledger as data, for a checkpoint of the log."""
        return {
            "epoch": self.epoch,
            "run_id": self.run_id,
            "query_id": self.query_id,
            **({} if self.finished is None else {"finished": self.finished, "newest_seen": self._newest_seen}),
            **({"is_temporary": True} if self.is_temporary else {}),
            "retired": sorted(self.retired),
            **self.assignments.to_json(),
            **self.history_to_json(),
            **({} if self.asked is None else {"rescale_asked": asdict(self.asked)}),
            **({} if self.origin is None else {"origin": list(self.origin)}),
            **({"discarded": discarded} if (discarded := self.discards.to_json()) else {}),
            **({"drops": self.drops, "dropped_metadata": self.dropped_metadata} if self.drops else {}),
            **({"begun_metadata": self.begun_metadata} if self.begun_metadata else {}),
            **({"born": sorted(self.born)} if self.born else {}),
            **({"branches": [asdict(one) for one in self.branches.values()]} if self.branches else {}),
        }

    @classmethod
    def from_json(
        cls, root: str, data: Mapping[str, Any], earlier: Iterable[Committed | SnapshotAdded] | None = None
    ) -> StateLedger:
        """Ledger of a checkpoint; `earlier` as for :meth:`load_history`."""
        ledger = cls(root)
        ledger.epoch, ledger.run_id, ledger.query_id = data["epoch"], data["run_id"], data["query_id"]
        ledger.finished, ledger._newest_seen = data.get("finished"), data.get("newest_seen", 0)
        ledger.is_temporary = data.get("is_temporary", False)
        ledger.retired = set(data["retired"])
        ledger.assignments = Assignments.from_json(data)
        ledger.load_history(data, earlier)
        if "rescale_asked" in data:
            ledger.asked = RescaleAsked(**data["rescale_asked"])
        if "origin" in data:
            parent, version = data["origin"]
            ledger.origin = parent, version
        ledger.discards = Discards(data.get("discarded"))
        ledger.born = set(data.get("born", ()))
        ledger.drops, ledger.dropped_metadata = data.get("drops", 0), data.get("dropped_metadata")
        ledger.begun_metadata = data.get("begun_metadata")
        ledger.branches = {one["name"]: BranchMade(**one) for one in data.get("branches", ())}
        return ledger

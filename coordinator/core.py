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

A new coordinator and an old one may both believe themselves in office; ``manifest_log.LedgerKeeper`` tells them apart.

Versions: batch ``b`` reads version ``b`` of its shard and commits ``b + 1``. It is refused unless every shard has version ``b``, made
by the batch before it in the query's own history (:meth:`StateLedger.check_whole`): no batch counts by halves. A later run that
commits a version supersedes what earlier runs counted from that version on: the batch had failed or is being replayed.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from typing import Any, assert_never

from coordinator.compatibility import check_metadata, same_state
from coordinator.errors import FencedError, InvalidRequestError, StateMismatchError
from coordinator.model import (
    DEFAULT_STORE,
    ActorLocation,
    BatchResult,
    CommitEntry,
    Lease,
    LoadPlan,
    LoadPlans,
    ShardKey,
    SnapshotEntry,
    StateMetadata,
    StateStoreId,
    TaskIdentity,
)
from coordinator.placement import FleetView, PlacementPolicy, PlacementRequest
from coordinator.records import (
    Committed,
    Record,
    RunStarted,
    SchemaChanged,
    ShardsAssigned,
    SnapshotAdded,
    Truncated,
)
from coordinator.watermarks import Watermarks

__all__ = ["LeaseGrant", "StateLedger"]


@dataclass(frozen=True, slots=True)
class LeaseGrant:
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
class _Assignment:
    epoch: int
    location: ActorLocation


class StateLedger:
    """Everything decided about one state so far.

    Parameters
    ----------
    root
        Folder of the state, ``<fleet uri>/<state name>``.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.epoch = 0
        self.run_id = ""
        self.query_id = ""
        #: Runs that a newer run has replaced; they may not lease or commit any more.
        self.retired: set[str] = set()
        self._assignments: dict[int, _Assignment] = {}
        #: Counted entries of each shard, versions ascending, from the oldest retained one.
        self._chains: dict[ShardKey, list[CommitEntry]] = {}
        #: Stores of each partition that have a version.
        self._stores: dict[int, list[str]] = {}
        #: Counted snapshots of each shard, versions ascending.
        self._snapshots: dict[ShardKey, list[SnapshotEntry]] = {}
        #: What is left of truncated history: oldest retained version, and late rows before it.
        self._floors: dict[ShardKey, int] = {}
        self._late_before: dict[ShardKey, int] = {}
        #: Run and batch whose base was found on every shard.
        self._whole: tuple[str, int] | None = None
        #: Schemas that runs asked for after that of ``metadata.json``, each with the epoch from which on commits are in it.
        self._schemas: list[tuple[int, dict[str, Any]]] = []

    @property
    def state_name(self) -> str:
        return self.root.rsplit("/", 1)[-1]

    # -- reading --------------------------------------------------------------------------------------------------

    def newest(self, partition_id: int, store_name: str = DEFAULT_STORE) -> CommitEntry | None:
        """Newest counted entry of a shard."""
        chain = self._chains.get((partition_id, store_name))
        return chain[-1] if chain else None

    def entries(self, partition_id: int, store_name: str = DEFAULT_STORE) -> tuple[CommitEntry, ...]:
        """Retained entries of a shard, oldest first."""
        return tuple(self._chains.get((partition_id, store_name), ()))

    def held(self, partition_id: int) -> tuple[int, int]:
        """Rows and bytes of a partition's newest version, all its stores together."""
        newest = [chain[-1] for chain in self._partition_chains(partition_id) if chain]
        return sum(entry.state_rows for entry in newest), sum(entry.state_bytes for entry in newest)

    def _partition_chains(self, partition_id: int) -> list[list[CommitEntry]]:
        return [self._chains[partition_id, store_name] for store_name in self._stores.get(partition_id, ())]

    def rows_late(self, partition_id: int) -> int:
        """Late rows of a shard since the state began."""
        before = self._late_before.get((partition_id, DEFAULT_STORE), 0)
        return before + sum(entry.rows_late for entry in self.entries(partition_id))

    def load_plans(self, partition_id: int, version: int, store_names: Sequence[str] = (DEFAULT_STORE,)) -> LoadPlans:
        """How to load a version of some of a partition's stores.

        Raises
        ------
        InvalidRequestError
            The version is not retained any more.
        """
        made = [entry for chain in self._partition_chains(partition_id) for entry in chain if entry.version <= version]
        newest = max(made, key=lambda entry: entry.version, default=None)
        return LoadPlans(
            "" if newest is None else newest.attempt_id,
            {name: self._load_plan((partition_id, name), version) for name in store_names},
        )

    def _load_plan(self, shard: ShardKey, version: int) -> LoadPlan:
        floor = self._floors.get(shard, 0)
        if version < floor:
            raise InvalidRequestError(
                "this version is older than the oldest one that is retained; nothing was changed; ask for a newer one, and "
                "raise min_versions_to_retain to keep more",
                state=self.state_name,
                partition=shard[0],
                store=shard[1],
                version=version,
                oldest=floor,
            )
        snapshots = [one for one in self._snapshots.get(shard, ()) if one.version <= version]
        deltas = tuple(entry for entry in self._chains.get(shard, ()) if entry.version <= version)
        schemas = sorted({place for entry in deltas if (place := self._schema_at(entry.epoch)) >= 0})
        return LoadPlan(tuple(reversed(snapshots)), deltas, floor, tuple(self._schemas[place] for place in schemas))

    def _schema_at(self, epoch: int) -> int:
        """Place of the schema that commits of an epoch are in; -1 for the one that the state was made with."""
        return bisect_right(self._schemas, epoch, key=itemgetter(0)) - 1

    def committed_schema(self, created: StateMetadata, version: int | None = None) -> Mapping[str, Any] | None:
        """Schema of the newest commit, or of the newest up to a version; None without any, so that there is nothing to go on from.

        A schema that a run asked for is the state's once something was committed in it, and as long as that counts: a run
        that came to nothing leaves none behind.
        """
        found = (_newest(chain, version) for chain in self._chains.values())
        epoch = max((entry.epoch for entry in found if entry is not None), default=None)
        if epoch is None:
            return None
        place = self._schema_at(epoch)
        return created.schema if place < 0 else self._schemas[place][1]

    def described(self, created: StateMetadata) -> StateMetadata:
        """The state's metadata (as `created`) with the schema of its newest commit."""
        return replace(created, schema=dict(self.committed_schema(created) or created.schema))

    def finished_version(self, num_shards: int) -> int:
        """Newest version that every shard has, or is behind of; 0 where one has none."""
        newest: dict[int, int] = {}
        for (partition, _), chain in self._chains.items():
            newest[partition] = max(newest.get(partition, 0), chain[-1].version)
        return min(newest.values()) if len(newest) >= num_shards else 0

    def referenced_files(self) -> set[str]:
        """Every delta and snapshot file that a retained version needs."""
        files = {entry.file for chain in self._chains.values() for entry in chain}
        return files | {file for snapshots in self._snapshots.values() for one in snapshots for file in one.files}

    def base_version(self, partition_id: int, batch_id: int) -> int:
        """Version that a batch reads: the newest counted one up to the batch's number, 0 without any.

        Raises
        ------
        StateMismatchError
            That version is no longer retained: the checkpoint is older than the state.
        """
        # The stores of a partition commit together; one that was added later has no early versions.
        found = [
            next((entry.version for entry in reversed(chain) if entry.version <= batch_id), 0)
            for chain in self._partition_chains(partition_id)
        ]
        if any(found):
            return max(found)
        floor = max((floor for (partition, _), floor in self._floors.items() if partition == partition_id), default=0)
        if floor:
            raise StateMismatchError(
                "the checkpoint is older than the oldest retained version of the state; nothing was changed; restore the "
                "checkpoint that belongs to the state, or start a new state under another name",
                state=self.state_name,
                partition=partition_id,
                batch_id=batch_id,
                oldest=floor,
            )
        return 0

    def location(self, partition_id: int) -> tuple[int, ActorLocation] | None:
        """(epoch, store actor) of a shard's present lease."""
        assignment = self._assignments.get(partition_id)
        return None if assignment is None else (assignment.epoch, assignment.location)

    def assigned(self) -> dict[int, ActorLocation]:
        """Store actor of each partition's present lease."""
        return {partition: assignment.location for partition, assignment in self._assignments.items()}

    def has_versions(self) -> bool:
        return any(self._chains.values())

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
                "a newer run of this query has taken the state over; this run may not touch it any more; nothing of "
                "this batch was committed by it",
                state=self.state_name,
                run_id=task.run_id,
                newer_run_id=self.run_id,
            )
        if self.has_versions():
            if self.query_id != task.query_id:
                raise StateMismatchError(
                    "the state belongs to another query (each checkpoint is a query of its own); start with the checkpoint "
                    "that the state was made with, or use another name",
                    state=self.state_name,
                    owner_query_id=self.query_id,
                    query_id=task.query_id,
                )
        elif task.batch_id > 0:
            raise StateMismatchError(
                "the checkpoint has finished batches but the state has no version; refusing to count from nothing; restore the "
                "state's folder, or start with a new checkpoint",
                state=self.state_name,
                root=self.root,
                batch_id=task.batch_id,
            )

    def check_whole(self, task: TaskIdentity, num_shards: int) -> None:
        """Refuse a batch unless the one before it is counted on every shard, and is the one that the checkpoint tells of.

        Spark's rule: a store is opened at exactly the batch's number, and a version that was never made is an error.

        Raises
        ------
        StateMismatchError
            The batch before ran on some shards only, or the state is older than the checkpoint, or of another history of the query.
        """
        if task.batch_id == 0 or task.is_of_python or self._whole == (task.run_id, task.batch_id):
            return
        missing, strange = [], []
        for partition_id in range(num_shards):
            if self.base_version(partition_id, task.batch_id) != task.batch_id:
                missing.append(partition_id)
            elif (
                task.former_time_ms not in (None, made_ms := self._batch_time_ms(partition_id, task.batch_id))
                and made_ms
            ):
                strange.append(partition_id)
        facts = {"state": self.state_name, "query_id": task.query_id, "batch_id": task.batch_id, "shards": num_shards}
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
        self._whole = (task.run_id, task.batch_id)

    def _batch_time_ms(self, partition_id: int, version: int) -> int | None:
        """When Spark planned the batch that made a version; None if nobody said."""
        made = (entry for chain in self._partition_chains(partition_id) for entry in chain if entry.version == version)
        return next((entry.batch_time_ms for entry in made if entry.batch_time_ms is not None), None)

    def batch_result(self, run_id: str, batch_id: int, num_shards: int) -> BatchResult:
        """What a batch of a run did to the state, and which shards have not counted it."""
        made: list[CommitEntry] = []
        missing: list[int] = []
        for partition_id in range(num_shards):
            found = [
                chain[-1]
                for chain in self._partition_chains(partition_id)
                if chain and chain[-1].version == batch_id + 1 and chain[-1].run_id == run_id
            ]
            made += found
            if not found:
                missing.append(partition_id)
        return BatchResult.of(tuple(missing), made)

    def decide_lease(
        self, task: TaskIdentity, asking: ActorLocation, fleet: FleetView, policy: PlacementPolicy
    ) -> tuple[list[Record], LeaseGrant]:
        """Give a task the store actor of its shard, as the policy chooses it.

        Parameters
        ----------
        asking
            Store actor of the task's own node.
        """
        self.check_query(task)
        records: list[Record] = []
        epoch = self.epoch
        if task.run_id != self.run_id:
            self._check_not_of_the_past(task)
            epoch += 1
            records.append(RunStarted(task.run_id, task.query_id, task.batch_id, epoch))
        assignment = self._assignments.get(task.partition_id)
        present = None if assignment is None else assignment.location
        location = policy.place(PlacementRequest(self.state_name, task.partition_id, asking, present), fleet)
        if assignment is not None and location == present and fleet.is_alive(location):
            lease_epoch = epoch if records else assignment.epoch
        else:
            lease_epoch = epoch + 1
            records.append(ShardsAssigned(task.partition_id, lease_epoch, location))
        store_id = StateStoreId(self.root, 0, task.partition_id)
        lease = Lease(store_id=store_id, run_id=task.run_id, epoch=lease_epoch, location=location)
        base = self.base_version(task.partition_id, task.batch_id)
        read = next((entry for entry in self.entries(task.partition_id) if entry.version == base), None)
        return records, LeaseGrant(lease, base, Watermarks() if read is None else read.watermarks)

    def batch_watermarks(self, run_id: str, batch_id: int) -> Watermarks:
        """Watermarks of this operator with a batch included, for those that it feeds; each shard has the same.

        Raises
        ------
        InvalidRequestError
            The run has not committed the batch here.
        """
        for chain in self._chains.values():
            for entry in reversed(chain):
                if entry.run_id == run_id and entry.version == batch_id + 1:
                    return entry.watermarks
        raise InvalidRequestError(
            "an operator is fed by a state that has not committed this batch; nothing was changed; both must be in one query",
            state=self.state_name,
            run_id=run_id,
            batch_id=batch_id,
        )

    def decide_schema(self, task: TaskIdentity, created: StateMetadata, asked: StateMetadata) -> list[Record]:
        """Take note of the schema of a task's run, if commits would be taken to be in another one; to be decided with the task's lease.

        It becomes the state's with the first commit that is in it (:meth:`committed_schema`).

        Raises
        ------
        StateMismatchError
            The query does not fit the state.
        """
        asked_for = self._schemas[-1][1] if self._schemas else created.schema
        is_new = task.run_id != self.run_id
        # A new run goes on from what its first batch reads: it supersedes what is later, which does not bind it.
        bound = self.committed_schema(created, task.batch_id) if is_new else asked_for
        check_metadata(replace(created, schema=asked.schema if bound is None else dict(bound)), asked)
        if same_state(asked_for, asked.schema):
            return []
        # As it will be read from the log: lists for tuples.
        return [SchemaChanged(task.run_id, self.epoch + is_new, json.loads(json.dumps(asked.schema)))]

    def _check_not_of_the_past(self, task: TaskIdentity) -> None:
        """Refuse a new run whose first batch the state has left behind.

        A batch starts only after the one before it is in Spark's commit log, so a shard with version ``v`` proves that batch ``v - 2``
        is finished. A run that starts earlier read that log long ago (a driver that slept while another went on); what it
        replays would supersede finished batches, which nobody would ever replay again. Partitions that have no batches in common say
        nothing of each other.
        """
        alone = task.is_of_python
        chains = self._partition_chains(task.partition_id) if alone else self._chains.values()
        newest = max((chain[-1].version for chain in chains if chain), default=0)
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
        known = [one for chain in self._partition_chains(entry.partition_id) for one in chain]
        mine = tuple(one for one in known if one.attempt_id == entry.attempt_id)
        if mine:
            return [], mine
        assignment = self._assignments.get(entry.partition_id)
        if entry.run_id != self.run_id or assignment is None or entry.epoch != assignment.epoch:
            raise FencedError(
                "a newer owner holds this shard; the commit was not counted and no version changed",
                state=self.state_name,
                partition=entry.partition_id,
                version=entry.version,
                epoch=entry.epoch,
                newest_epoch=None if assignment is None else assignment.epoch,
            )
        others = tuple(one for one in known if (one.version, one.run_id) == (entry.version, entry.run_id))
        if others:
            return [], others
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
        return [Committed(one) for one in entries], tuple(entries)

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
                self._assignments = {
                    partition: replace(assignment, epoch=self.epoch)
                    for partition, assignment in self._assignments.items()
                }
            case SchemaChanged():
                self._schemas.append((record.epoch, dict(record.schema)))
            case ShardsAssigned():
                self.epoch = record.epoch
                self._assignments[record.partition_id] = _Assignment(self.epoch, record.location)
            case Committed():
                self._count(record.entry)
            case SnapshotAdded():
                self._snapshots.setdefault(record.snapshot.shard, []).append(record.snapshot)
            case Truncated():
                self._truncate((record.partition_id, record.store_name), record.floor)
            case _:
                assert_never(record)

    def _count(self, entry: CommitEntry) -> None:
        own = self._chain(entry.shard)
        while own and own[-1].version >= entry.version:
            own.pop()
        self._supersede_siblings(entry)
        self._drop_snapshots_ahead(entry.partition_id)
        own.append(entry)

    def _chain(self, shard: ShardKey) -> list[CommitEntry]:
        """Entries of a shard, to be changed."""
        chain = self._chains.get(shard)
        if chain is None:
            chain = self._chains[shard] = []
            self._stores.setdefault(shard[0], []).append(shard[1])
        return chain

    def _supersede_siblings(self, entry: CommitEntry) -> None:
        """Let go of what a run before counted of the partition's other stores from the entry's version on.

        The run that replays a version may ask for fewer stores: one that it left out comes back as it was below that version.
        """
        for name in [one for one in self._stores[entry.partition_id] if one != entry.store_name]:
            shard = entry.partition_id, name
            chain = self._chains[shard]
            while chain and chain[-1].version >= entry.version and chain[-1].epoch < entry.epoch:
                chain.pop()
            if not chain:
                # As if it had never been.
                del self._chains[shard]
                self._snapshots.pop(shard, None)
                self._stores[entry.partition_id].remove(name)

    def _drop_snapshots_ahead(self, partition_id: int) -> None:
        """Let go of snapshots whose versions do not count any more."""
        for name in self._stores[partition_id]:
            snapshots, chain = self._snapshots.get((partition_id, name), []), self._chains[partition_id, name]
            while snapshots and (not chain or snapshots[-1].version > chain[-1].version):
                snapshots.pop()

    def _truncate(self, shard: ShardKey, floor: int) -> None:
        chain = self._chains[shard]
        self._late_before[shard] = self._late_before.get(shard, 0) + sum(
            entry.rows_late for entry in chain if entry.version < floor
        )
        # The floor's own commit stays: it says which lineage the floor's snapshot belongs to.
        self._chains[shard] = [entry for entry in chain if entry.version >= floor]
        self._snapshots[shard] = [one for one in self._snapshots[shard] if one.version >= floor]
        self._floors[shard] = floor

    def copy(self) -> StateLedger:
        """The same, for good: this one may go on."""
        other = StateLedger(self.root)
        other.epoch, other.run_id, other.query_id = self.epoch, self.run_id, self.query_id
        other.retired = set(self.retired)
        other._assignments = dict(self._assignments)
        other._chains = {shard: list(chain) for shard, chain in self._chains.items()}
        other._stores = {partition: list(names) for partition, names in self._stores.items()}
        other._snapshots = {shard: list(snapshots) for shard, snapshots in self._snapshots.items()}
        other._floors = dict(self._floors)
        other._late_before = dict(self._late_before)
        other._schemas = list(self._schemas)
        return other

    def to_json(self) -> dict[str, Any]:
        """The ledger as data, for a checkpoint of the log."""
        return {
            "epoch": self.epoch,
            "run_id": self.run_id,
            "query_id": self.query_id,
            "retired": sorted(self.retired),
            "assignments": {str(key): asdict(value) for key, value in self._assignments.items()},
            "entries": [entry.to_json() for chain in self._chains.values() for entry in chain],
            "snapshots": [one.to_json() for items in self._snapshots.values() for one in items],
            "floors": [[*shard, floor] for shard, floor in self._floors.items()],
            "late_before": [[*shard, late] for shard, late in self._late_before.items()],
            "schemas": [list(one) for one in self._schemas],
        }

    @classmethod
    def from_json(cls, root: str, data: Mapping[str, Any]) -> StateLedger:
        """Ledger of a checkpoint."""
        ledger = cls(root)
        ledger.epoch, ledger.run_id, ledger.query_id = data["epoch"], data["run_id"], data["query_id"]
        ledger.retired = set(data["retired"])
        ledger._assignments = {
            int(key): _Assignment(value["epoch"], ActorLocation(**value["location"]))
            for key, value in data["assignments"].items()
        }
        for entry in map(CommitEntry.from_json, data["entries"]):
            ledger._chain(entry.shard).append(entry)
        for one in map(SnapshotEntry.from_json, data["snapshots"]):
            ledger._snapshots.setdefault(one.shard, []).append(one)
        ledger._settle_siblings()
        ledger._floors = {(partition, store): floor for partition, store, floor in data["floors"]}
        ledger._late_before = {(partition, store): late for partition, store, late in data["late_before"]}
        ledger._schemas = [(epoch, schema) for epoch, schema in data.get("schemas", ())]
        return ledger

    def _settle_siblings(self) -> None:
        """What early versions left in their checkpoints: entries of stores that the run which superseded them did not ask for."""
        for partition_id in self._stores:
            chains = self._partition_chains(partition_id)
            if len({(chain[-1].version, chain[-1].epoch) for chain in chains}) > 1:
                for entry in sorted((one for chain in chains for one in chain), key=lambda one: one.epoch):
                    self._supersede_siblings(entry)
                self._drop_snapshots_ahead(partition_id)


def _newest(chain: Sequence[CommitEntry], version: int | None) -> CommitEntry | None:
    """Newest entry of a chain, or up to a version."""
    return next((entry for entry in reversed(chain) if version is None or entry.version <= version), None)

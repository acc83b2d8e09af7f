"""The coordinator's rules for one state: they read its ledger, and answer with the records that make the answer true. Pure.

Theory of operation
-------------------
A state's truth is its manifest log (``manifest_log.py``), a sequence of records that only grows. :class:`StateLedger` is the
fold of that sequence. A ``decide_*`` method reads the ledger and returns the records that would make its answer true,
changing nothing; the answer is given only once those records are in the log. So a coordinator that is restarted and replays the log
answers the same, and a coordinator with an old ledger cannot append, because its place in the log is taken.

Epochs are one counter a state. A run that starts takes the next epoch, and every lease moves to it: from then on commits of
older runs are refused. A shard given to another store actor takes the next epoch: from then on commits of its previous owner
are refused.

A new coordinator and an old one may run at the same time; ``ledger_writer.LedgerWriter`` finds out which one is replaced.

Versions: batch ``b`` reads version ``b`` of its shard and commits ``b + 1``. It is refused unless every shard has version ``b``, made
by the batch before it in the query's own history (:meth:`StateLedger.check_whole`): a batch counts on all shards or none. A run that
commits a version supersedes what earlier runs committed from that version on: the batch had failed or is being replayed.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct, structs

from coordinator.ledger.compatibility import check_metadata, same_description, same_state
from coordinator.ledger.ledger_state import LedgerState
from coordinator.ledger.records import (
    BatchFinished,
    Committed,
    Discarded,
    Record,
    RunStarted,
    SchemaChanged,
    ShardsAssigned,
    SnapshotAdded,
    Truncated,
)
from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.errors import FencedError, InvalidRequestError, StateMismatchError
from coordinator.model.identities import ActorLocation, ShardKey, StateStoreId, TaskIdentity
from coordinator.model.leases import Lease
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.stored_json import from_json
from coordinator.model.watermarks import Watermarks
from coordinator.placement.lease_plans import FleetView, LeasePlacer, LeaseRequest


class LeaseGrant(Struct, frozen=True):
    """A lease and the version that the task's batch reads."""

    lease: Lease
    base_version: int
    #: Where event time stood after that version.
    watermarks: Watermarks = Watermarks()


class AcceptedCommits(Struct, frozen=True):
    """The answer to a partition's commits that were accepted."""

    #: The commits that count: those of the caller, or those of another attempt of the same run.
    entries: tuple[CommitEntry, ...]
    #: The lease of the next batch, for a task of the same run; None if the task has to ask the coordinator for it.
    next_lease: LeaseGrant | None = None


class StateLedger(LedgerState):
    """Everything decided about one state so far, and the rules for what is decided next."""

    # -- tasks ----------------------------------------------------------------------------------------------------

    def check_query(self, task: TaskIdentity) -> None:
        """Refuse a task whose query does not own the state.

        Raises
        ------
        StateMismatchError
            Another query wrote the state, or the checkpoint is ahead of a state that has no version.
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
                "that the state was made with, or use another name; if that query is gone for good, `statefleet drop` frees the name",
                state=self.state_name,
                owner_query_id=self.query_id,
                query_id=query_id,
            )

    def check_whole(self, task: TaskIdentity, layout: ShardLayout) -> None:
        """Refuse a batch unless the one before it is committed on every shard, and is the one that the checkpoint has.

        Spark's rule: a store is opened at exactly the batch's number, and a version that was never made is an error.

        Raises
        ------
        StateMismatchError
            The batch before ran on some shards only, or the state is older than the checkpoint, or of another history of the query.
        """
        base = task.run_id, task.batch_id, layout.first_partition
        if task.batch_id == 0 or task.is_of_python or task.is_import or self._checked_base == base:
            return
        missing, unknown = [], []
        for shard, partition_id in enumerate(layout.partitions):
            if self.base_version(partition_id, task.batch_id) != task.batch_id:
                missing.append(shard)
                continue
            time_ms = self._batch_time_ms(partition_id, task.batch_id)
            if None not in (time_ms, task.former_time_ms) and time_ms != task.former_time_ms:
                unknown.append(shard)
        facts = {
            "state": self.state_name,
            "query_id": task.query_id,
            "batch_id": task.batch_id,
            "shards": layout.num_shards,
        }
        previous = task.batch_id - 1
        if missing:
            raise StateMismatchError(
                f"Spark's checkpoint says that batch {previous} is finished, and these shards do not have it: it ran on some shards "
                "only, or the state's folder was put back from an older copy; nothing was changed. If a copy was put back, put back "
                f"the checkpoint of the same time. Else stop the query, delete commits/{previous} and offsets/{task.batch_id} in its "
                f"checkpoint, and start it again: Spark then repeats batch {previous} on all shards, and nothing is lost",
                missing=missing,
                **facts,
            )
        if unknown:
            raise StateMismatchError(
                f"the state's version {task.batch_id} was not made by the batch {previous} that Spark's checkpoint tells of: state and "
                "checkpoint are copies of different times, and went on since; nothing was changed; put back both of the same time, or "
                "start with a new checkpoint and another name",
                strange=unknown,
                **facts,
            )
        self._checked_base = base

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
            records.append(RunStarted(task.run_id, task.query_id, task.batch_id, epoch, task.is_temporary))
        assignment = self.assignment(task.partition_id)
        present = self.holder(task.partition_id)
        choice = placer(LeaseRequest(self.state_name, task.partition_id, asking, present), fleet)
        location = choice.location
        if assignment is not None and location == present and fleet.is_alive(location):
            lease_epoch = epoch if records else assignment.epoch
        else:
            lease_epoch = epoch + 1
            records.append(ShardsAssigned(task.partition_id, lease_epoch, location, choice.reason, choice.copy_result))
        store_id = StateStoreId(self.root, 0, task.partition_id)
        lease = Lease(store_id=store_id, run_id=task.run_id, epoch=lease_epoch, location=location)
        base = self.base_version(task.partition_id, task.batch_id)
        entry = self.commit_of(base, task.partition_id)
        return records, LeaseGrant(lease, base, Watermarks() if entry is None else entry.watermarks)

    def decide_schema(self, task: TaskIdentity, created: StateMetadata, requested: StateMetadata) -> list[Record]:
        """Write down the schema of a task's run if it is not the newest one of the log; to be decided with the task's lease.

        A schema that only shows readers other names is written down, too. The schema becomes the state's with the first commit that is
        in it (:meth:`committed_schema`).

        Raises
        ------
        StateMismatchError
            The query does not fit the state.
        """
        checked = self._checked_query
        if checked == (task.run_id, requested) and same_description(checked[1].schema, requested.schema):
            return []
        newest = self._schemas[-1][1] if self._schemas else created.schema
        is_new = task.run_id != self.run_id
        # A new run goes on from the version that its first batch reads: what is later is superseded, and does not bind it.
        bound = self.committed_schema(created, task.batch_id) if is_new else newest
        check_metadata(structs.replace(created, schema=requested.schema if bound is None else bound), requested)
        if same_state(newest, requested.schema) and same_description(newest, requested.schema):
            if not is_new:
                self._checked_query = task.run_id, requested
            return []
        assert requested.schema is not None  # two states without a schema are the same
        # As it will be read from the log: lists for tuples.
        schema = from_json(msgspec.json.decode(msgspec.json.encode(requested.schema)), StateSchema)
        return [SchemaChanged(task.run_id, self.epoch + is_new, schema)]

    def check_not_of_the_past(self, task: TaskIdentity) -> None:
        """Refuse a new run that begins with a batch which is known to be finished.

        A batch starts only after the one before it is in Spark's commit log, so a shard with version ``v`` proves that batch ``v - 2``
        is finished. A run that starts earlier read that log long ago (a driver that slept while another went on); what it
        replays would supersede finished batches, which no run would ever replay again. Partitions of programs have no common
        batches, so that a version of one says nothing of another.
        """
        is_alone = task.is_of_python
        chains = self._partition_chains(task.partition_id) if is_alone else self._chains.values()
        newest = max((chain[-1].version for chain in chains if chain), default=0)
        if not is_alone:
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
        self.check_not_counted(task)
        if newest > task.batch_id + 1:
            raise StateMismatchError(
                "the state is ahead of the checkpoint that this run started from: another driver has finished later batches; "
                "nothing was changed; restart the query, so that it reads its checkpoint again; if the checkpoint was put back on "
                "purpose, start with another state",
                state=self.state_name,
                batch_id=task.batch_id,
                newest_version=newest,
            )

    # -- commits and files ----------------------------------------------------------------------------------------

    def decide_commits(self, entries: Sequence[CommitEntry]) -> tuple[list[Record], tuple[CommitEntry, ...]]:
        """Accept one attempt's commits of all the stores of a partition, together, or return the commits of the attempt that count.

        Raises
        ------
        FencedError
            The run or the lease is no longer the newest; nothing was committed.
        InvalidRequestError
            The entries build on a version that is not the one below them.
        """
        entry = entries[0]
        accepted = self.commits_of_version(entry.partition_id, entry.version)
        repeated = tuple(commit for commit in accepted if commit.attempt_id == entry.attempt_id)
        if repeated:
            return [], repeated
        assignment = self.assignment(entry.partition_id)
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
        in_force = self.layouts.in_force(entry.run_id, entry.version - 1)
        if self.layouts.of(entry.partition_id) is not in_force:
            raise FencedError(
                "the state was rescaled, and the version is one of other shards; the commit was not counted and no version changed",
                state=self.state_name,
                partition=entry.partition_id,
                version=entry.version,
            )
        of_run = tuple(commit for commit in accepted if commit.run_id == entry.run_id)
        if of_run:
            return [], of_run
        if self._newest_of_run(entry.partition_id) > entry.version:
            raise FencedError(
                "the shard has gone beyond this version in the same run, and does not retain it any more; the commit was not counted "
                "and no version changed",
                state=self.state_name,
                partition=entry.partition_id,
                version=entry.version,
            )
        self.refuse_discarded(commit.file for commit in entries)
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
        return [Committed(commit) for commit in entries], tuple(entries)

    def decide_discard(self, files: Iterable[str]) -> list[Record]:
        """Refuse, from now on, commits of files that are about to be deleted and could still be committed."""
        needed = self.referenced_files()
        refused = tuple(file for file in files if file not in needed and self._may_count(file, self.epoch))
        return [Discarded(refused)] if refused else []

    def decide_finished(self, run_id: str, batch_id: int) -> list[Record]:
        """Write down that Spark's commit log has a batch of a run, unless the run was replaced or the log says so already."""
        if run_id != self.run_id or self.finished > batch_id:
            return []
        return [BatchFinished(run_id, batch_id)]

    def check_not_counted(self, task: TaskIdentity) -> None:
        """Refuse a new run of a continuous query that begins with an epoch which counts: it may have other rows.

        Raises
        ------
        StateMismatchError
            Another driver has ended the epoch, and its rows are those of that driver.
        """
        if task.is_epoch and self.epoch_end is not None and self.epoch_end[0] >= task.batch_id:
            raise StateMismatchError(
                "an epoch counts that this run was to begin with: another driver ended it meanwhile; nothing was changed; the run "
                "begins again, after that epoch",
                state=self.state_name,
                epoch=task.batch_id,
                newest_epoch=self.epoch_end[0],
            )

    def decide_epoch(self, task: TaskIdentity, layout: ShardLayout, end: str) -> list[Record]:
        """Have an epoch count, with its end: Spark's logs are made to have it, by this run's driver or by a later one.

        Raises
        ------
        FencedError
            A newer run has begun, or not all shards have committed the epoch: it does not count.
        """
        if task.run_id != self.run_id or self.batch_result(task.run_id, task.batch_id, layout).missing:
            raise FencedError(
                "a newer run of the query has begun, and this one's epoch does not count; committed versions are safe; stop this "
                "driver if another one has the query, or start the query again",
                state=self.state_name,
                epoch=task.batch_id,
                run_id=task.run_id,
                newer_run_id=self.run_id,
            )
        if self.epoch_end is not None and self.epoch_end[0] >= task.batch_id:
            return []
        return [BatchFinished(task.run_id, task.batch_id, end)]

    def decide_snapshot(self, snapshot: SnapshotEntry) -> tuple[list[Record], bool]:
        """Accept a snapshot if the commit that it shows still counts and it is new; returns whether it counts."""
        snapshots = self._snapshots.get(snapshot.shard, ())
        if any(existing.file == snapshot.file for existing in snapshots):
            return [], True
        is_of_commit = any(
            (entry.version, entry.attempt_id) == (snapshot.version, snapshot.attempt_id)
            for entry in self._chains.get(snapshot.shard, ())
        )
        if not is_of_commit or any(existing.version >= snapshot.version for existing in snapshots):
            return [], False
        self.refuse_discarded(snapshot.files)
        return [SnapshotAdded(snapshot)], True

    def decide_truncation(
        self, min_versions_to_retain: int, since_ms: float | None = None
    ) -> tuple[list[Record], dict[ShardKey, int]]:
        """Truncate versions that need not be retained; returns the new oldest version of each shard that loses some.

        Spark's rule: keep the newest snapshot that is at or below ``newest - min_versions_to_retain + 1``, and everything after it. At
        or below the version that was the newest one at `since_ms`, too, by the clocks of those who committed.
        """
        truncated_at: dict[ShardKey, int] = {}
        for shard, chain in self._chains.items():
            needed = (chain[-1].version if chain else 0) - min_versions_to_retain + 1
            if since_ms is not None and chain:
                first = bisect.bisect_left(chain, since_ms, hi=len(chain) - 1, key=lambda entry: entry.committed_at_ms)
                needed = min(needed, chain[first].base_version)
            covering = [snapshot.version for snapshot in self._snapshots.get(shard, ()) if snapshot.version <= needed]
            if covering and covering[-1] > self._oldest_retained.get(shard, 0):
                truncated_at[shard] = covering[-1]
        records: list[Record] = [
            Truncated(partition_id, store_name, oldest) for (partition_id, store_name), oldest in truncated_at.items()
        ]
        return records, truncated_at

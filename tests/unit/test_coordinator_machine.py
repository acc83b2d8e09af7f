"""Two coordinators over one manifest log against plain dicts: runs, leases, commits, snapshots, truncation, restarts, zombies."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from coordinator.ledger.records import Committed, Record
from coordinator.ledger.state_ledger import LeaseGrant, StateLedger
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.log.log_end import unseal
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.errors import (
    FencedError,
    InvalidRequestError,
    StateMismatchError,
    StateStoreError,
    VersionNotFoundError,
)
from coordinator.model.identities import DEFAULT_STORE, ActorLocation, ShardKey
from coordinator.model.load_plans import LoadPlan
from coordinator.model.stored_json import from_json
from coordinator.placement.lease_plans import stay_else_local
from tests.memory_store import MemoryObjectStore
from tests.unit.ledger_harness import ROOT, FakeFleetView, actor, data_of, entry, snapshot_of, task

STORES = (DEFAULT_STORE, "names")
PARTITIONS = (0, 1)
#: Rows of a store: few keys; in a change, None removes.
Rows = dict[str, int | None]
CHANGE = st.dictionaries(st.sampled_from("abc"), st.one_of(st.none(), st.integers(0, 9)), max_size=2)
WHO = st.sampled_from((0, 1))
PARTITION = st.sampled_from(PARTITIONS)
PICK = st.integers(0, 1000)


def applied(rows: Rows, change: Rows) -> Rows:
    return {key: value for key, value in {**rows, **change}.items() if value is not None}


@dataclass
class Model:
    """The state that the coordinators should know. ``rows_of`` has the rows after each commit, by its delta's file."""

    run: str = ""
    retired: set[str] = field(default_factory=set)
    epoch: int = 0
    leases: dict[int, tuple[int, ActorLocation]] = field(default_factory=dict)
    chains: dict[ShardKey, list[CommitEntry]] = field(default_factory=dict)
    snapshots: dict[ShardKey, list[SnapshotEntry]] = field(default_factory=dict)
    floors: dict[ShardKey, int] = field(default_factory=dict)
    rows_of: dict[str, Rows] = field(default_factory=dict)

    def newest(self) -> int:
        return max((chain[-1].version for chain in self.chains.values() if chain), default=0)

    def of_partition(self, partition: int) -> list[CommitEntry]:
        return [entry for shard, chain in self.chains.items() if shard[0] == partition for entry in chain]

    def versions(self, partition: int) -> set[int]:
        """Return the versions of a partition, the empty one included."""
        return {0, *(entry.version for entry in self.of_partition(partition))}

    def has(self, partition: int, version: int, run: str) -> bool:
        """Return whether a run's commit of a version is accepted."""
        return any((entry.version, entry.run_id) == (version, run) for entry in self.of_partition(partition))

    def base(self, partition: int, batch: int) -> int | type[StateStoreError]:
        versions = [entry.version for entry in self.of_partition(partition) if entry.version <= batch]
        floors = {shard: floor for shard, floor in self.floors.items() if shard[0] == partition}
        if any(not versions or (self.chains.get(shard) and batch < floor) for shard, floor in floors.items() if floor):
            return StateMismatchError
        return max(versions, default=0)

    def rows(self, shard: ShardKey, version: int) -> Rows:
        return next(
            (self.rows_of[entry.file] for entry in reversed(self.chains.get(shard, [])) if entry.version <= version), {}
        )

    def lease(
        self, run: str, partition: int, batch: int, local: ActorLocation, lost: set[str]
    ) -> tuple[int, ActorLocation, int] | type[StateStoreError]:
        """Return the (epoch, store actor, base version) that a task should get."""
        if run in self.retired:
            return FencedError
        base = self.base(partition, batch)
        is_new = run != self.run
        if (
            (not any(self.chains.values()) and batch > 0)
            or (is_new and self.newest() > batch + 1)
            or not isinstance(base, int)
        ):
            return StateMismatchError
        if is_new:
            self.retired |= {self.run} - {""}
            self.run, self.epoch = run, self.epoch + 1
            self.leases = {leased: (self.epoch, location) for leased, (_, location) in self.leases.items()}
        if partition not in self.leases or self.leases[partition][1].instance_id in lost:
            self.epoch += 1
            self.leases[partition] = (self.epoch, local)
        return *self.leases[partition], base

    def commit(self, entries: list[CommitEntry], changes: list[Rows]) -> list[CommitEntry] | type[StateStoreError]:
        """Return the entries that should be accepted afterwards."""
        first = entries[0]
        accepted = self.of_partition(first.partition_id)
        if of_attempt := [commit for commit in accepted if commit.attempt_id == first.attempt_id]:
            return of_attempt
        if first.run_id != self.run or first.epoch != self.leases[first.partition_id][0]:
            return FencedError
        if of_version := [
            commit for commit in accepted if (commit.version, commit.run_id) == (first.version, first.run_id)
        ]:
            return of_version
        if any(commit.version > first.version and commit.run_id == first.run_id for commit in accepted):
            return FencedError
        base = self.base(first.partition_id, first.version - 1)
        if base != first.base_version:
            return InvalidRequestError if isinstance(base, int) else base
        for commit, change in zip(entries, changes, strict=True):
            self.rows_of[commit.file] = applied(self.rows(commit.shard, base), change)
            chain = [earlier for earlier in self.chains.get(commit.shard, []) if earlier.version < commit.version]
            self.chains[commit.shard] = [*chain, commit]
        for shard, chain in self.chains.items():
            if shard[0] == first.partition_id:
                # Also in stores that this run does not use.
                late = (
                    late_entry
                    for late_entry in chain
                    if late_entry.version >= first.version and late_entry.epoch < first.epoch
                )
                superseded = {late_entry.version for late_entry in late}
                self.chains[shard] = [later for later in chain if later.version not in superseded]
                written = {first.version} if shard[1] in {commit.store_name for commit in entries} else set()
                snapshots = self.snapshots.get(shard, [])
                self.snapshots[shard] = [
                    snapshot for snapshot in snapshots if snapshot.version not in superseded | written
                ]
        return entries

    def snapshot(self, new: SnapshotEntry) -> bool:
        snapshots = self.snapshots.setdefault(new.shard, [])
        if new in snapshots:
            return True
        commits = [(commit.version, commit.attempt_id) for commit in self.chains[new.shard]]
        if (new.version, new.attempt_id) not in commits or any(
            snapshot.version >= new.version for snapshot in snapshots
        ):
            return False
        snapshots.append(new)
        return True

    def truncate(self, keep: int) -> dict[ShardKey, int]:
        moved: dict[ShardKey, int] = {}
        for shard, chain in self.chains.items():
            limit = (chain[-1].version if chain else 0) - keep + 1
            floor = max(
                (snapshot.version for snapshot in self.snapshots.get(shard, []) if snapshot.version <= limit), default=0
            )
            if floor > self.floors.get(shard, 0):
                moved[shard] = self.floors[shard] = floor
                self.chains[shard] = [entry for entry in chain if entry.version >= floor]
                self.snapshots[shard] = [snapshot for snapshot in self.snapshots[shard] if snapshot.version >= floor]
        return moved


@dataclass
class Granted:
    """A lease that a task got, and may use long after another task took it over; its batch."""

    grant: LeaseGrant
    batch: int


class CoordinatorMachine(RuleBasedStateMachine):
    #: Records of a part of a checkpoint: few, so that checkpoints have several parts or none.
    part_records = 3

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.store = MemoryObjectStore()
        self.writers = [self.opened(), self.opened()]
        self.model = Model()
        self.incarnations = {"a": 1, "b": 1}
        self.lost: set[str] = set()
        #: Stores of each run; a later run may have more, or fewer.
        self.runs: dict[str, tuple[str, ...]] = {}
        #: The current batch of each run.
        self.batches: dict[str, int] = {}
        self.granted: list[Granted] = []
        self.tried: list[tuple[list[CommitEntry], list[Rows]]] = []
        self.snapshots: list[SnapshotEntry] = []
        #: What each delta and snapshot file holds.
        self.files: dict[str, Rows] = {}
        self.floors: dict[ShardKey, int] = {}
        self.serial = 0

    def teardown(self) -> None:
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        entries = [record.entry for record in self.records() if isinstance(record, Committed)]
        commits = [(*entry.shard, entry.version, entry.run_id) for entry in entries]
        assert len(set(commits)) == len(commits), "two attempts of a run were counted for one version"

    def opened(self) -> LedgerWriter:
        self.serial = getattr(self, "serial", 0) + 1
        manifest_log = ManifestLog(
            self.store, "clicks", f"writer-{self.serial}", checkpoint_interval=3, part_records=self.part_records
        )
        writer = LedgerWriter(manifest_log)
        self.loop.run_until_complete(writer.open())
        return writer

    def records(self) -> list[Record]:
        return [
            from_json(record, Record)
            for info in self.store.list("clicks/manifest")
            for record in unseal(self.store.get(info.path))["records"]
        ]

    async def ask(self, who: int, decide: Callable[[StateLedger], Any]) -> Any:
        """Return a coordinator's answer, or the type of the error that it raises."""
        try:
            return await self.writers[who].decide(decide)
        except StateStoreError as error:
            return type(error)

    def answer(self, who: int, decide: Callable[[StateLedger], Any]) -> Any:
        return self.loop.run_until_complete(self.ask(who, decide))

    # -- runs and leases ----------------------------------------------------------------------------------------------

    def lease(self, who: int, run: str, partition: int, batch: int, local: str) -> None:
        location = actor(local, str(self.incarnations[local]))
        identity, lost = task(run, batch, partition), set(self.lost)
        answer = self.answer(
            who, lambda ledger: ledger.decide_lease(identity, location, FakeFleetView(lost), stay_else_local)
        )
        expected = self.model.lease(run, partition, batch, location, lost)
        if isinstance(answer, LeaseGrant):
            assert (answer.lease.epoch, answer.lease.location, answer.base_version) == expected
            assert (answer.lease.run_id, answer.lease.store_id.partition_id) == (run, partition)
            self.granted.append(Granted(answer, batch))
        else:
            assert answer is expected

    @rule(
        who=WHO,
        partition=PARTITION,
        back=st.sampled_from((-1, 0, 0, 0, 1, 1, 2, 3)),
        local=st.sampled_from("ab"),
        stores=st.sampled_from((STORES, STORES, STORES[:1], STORES[1:])),
    )
    def start_run(self, who: int, partition: int, back: int, local: str, stores: tuple[str, ...]) -> None:
        """Start at the batch after the newest version (0), before it (a replay), long before it (refused), after it (-1, a gap)."""
        run = f"run-{len(self.runs)}"
        self.runs[run] = stores
        self.batches[run] = max(0, self.model.newest() - back)
        self.lease(who, run, partition, self.batches[run], local)

    @precondition(lambda self: self.model.run)
    @rule(who=WHO, partition=PARTITION, back=st.sampled_from((0, 0, 0, 1)), local=st.sampled_from("ab"))
    def lease_in_run(self, who: int, partition: int, back: int, local: str) -> None:
        """Lease for the run's batch, or for a task that is repeated although its batch is committed."""
        run, batch = self.model.run, self.batches[self.model.run] - back
        if not back or self.model.has(partition, batch + 1, run):
            self.lease(who, run, partition, batch, local)

    @precondition(lambda self: self.model.run)
    @rule(by=st.sampled_from((1, 1, 1, 2)))
    def next_batch(self, by: int) -> None:
        self.next_batch_by(by)

    def next_batch_by(self, by: int) -> None:
        """A partition without a commit of the batch had no task in it (Spark left it out): no task commits it any more."""
        run, model = self.model.run, self.model
        self.batches[run] += by
        self.granted = [
            granted
            for granted in self.granted
            if granted.grant.lease.run_id != run
            or model.has(granted.grant.lease.store_id.partition_id, granted.batch + 1, run)
        ]
        self.tried = [
            attempt
            for attempt in self.tried
            if attempt[0][0].run_id != run or model.has(attempt[0][0].partition_id, attempt[0][0].version, run)
        ]

    @precondition(lambda self: self.runs)
    @rule(who=WHO, partition=PARTITION, pick=PICK, local=st.sampled_from("ab"))
    def lease_in_a_zombie_run(self, who: int, partition: int, pick: int, local: str) -> None:
        run = sorted(self.model.retired)[pick % len(self.model.retired)] if self.model.retired else ""
        if run:
            self.lease(who, run, partition, self.model.newest(), local)

    @rule(name=st.sampled_from("ab"))
    def lose_actor(self, name: str) -> None:
        self.lost.add(actor(name, str(self.incarnations[name])).instance_id)
        self.incarnations[name] += 1

    # -- commits ------------------------------------------------------------------------------------------------------

    def entries(self, granted: Granted, stores: tuple[str, ...]) -> list[CommitEntry]:
        """Return the commits of one attempt in several stores."""
        self.serial += 1
        name, version = f"attempt-{self.serial}", granted.batch + 1
        plain = entry(granted.grant, version)
        return [
            structs.replace(plain, attempt_id=name, file=f"{store}/{version}-{name}.delta", store_name=store)
            for store in stores
        ]

    def check_commit(self, answer: Any, entries: list[CommitEntry], changes: list[Rows]) -> None:
        for commit, change in zip(entries, changes, strict=True):
            self.files[commit.file] = change
        expected = self.model.commit(entries, changes)
        if isinstance(expected, type):
            assert answer is expected
        else:
            assert isinstance(answer, tuple), answer
            assert sorted(answer, key=str) == sorted(expected, key=str)

    def pick_granted(self, pick: int) -> Granted:
        """Return mostly one of the last leases: the earlier leases belong to zombies."""
        return self.granted[-1 - min(pick % 6, pick % len(self.granted))]

    @precondition(lambda self: self.granted)
    @rule(who=WHO, pick=PICK, change=CHANGE, second_change=CHANGE, wrong=st.sampled_from((0,) * 8 + (-1, 1)))
    def commit(self, who: int, pick: int, change: Rows, second_change: Rows, wrong: int) -> None:
        granted = self.pick_granted(pick)
        entries = self.entries(granted, self.runs[granted.grant.lease.run_id])
        entries = [structs.replace(entry, base_version=entry.base_version + wrong) for entry in entries]
        changes = [change, second_change][: len(entries)]
        self.tried.append((entries, changes))
        self.check_commit(self.answer(who, lambda ledger: ledger.decide_commits(entries)), entries, changes)

    @precondition(lambda self: self.tried)
    @rule(who=WHO, pick=PICK)
    def commit_again(self, who: int, pick: int) -> None:
        entries, changes = self.tried[-1 - pick % min(len(self.tried), 6)]
        self.check_commit(self.answer(who, lambda ledger: ledger.decide_commits(entries)), entries, changes)

    @precondition(lambda self: self.granted)
    @rule(pick=PICK, change=CHANGE, second_change=CHANGE)
    def commit_at_both_at_once(self, pick: int, change: Rows, second_change: Rows) -> None:
        """Two attempts, each at another coordinator: the attempt that writes its log record first wins."""
        granted = self.pick_granted(pick)
        stores = self.runs[granted.grant.lease.run_id]
        attempts = [(self.entries(granted, stores), [rows] * len(stores)) for rows in (change, second_change)]

        async def race() -> list[Any]:
            left, right = (entries for entries, _ in attempts)
            return await asyncio.gather(
                self.ask(0, lambda ledger: ledger.decide_commits(left)),
                self.ask(1, lambda ledger: ledger.decide_commits(right)),
            )

        answers = self.loop.run_until_complete(race())
        # The attempt whose own entries were returned came first.
        first = 0 if isinstance(answers[0], type) or answers[0][0].attempt_id == attempts[0][0][0].attempt_id else 1
        for who in (first, 1 - first):
            self.check_commit(answers[who], *attempts[who])

    @precondition(lambda self: self.model.run)
    @rule(who=WHO, changes=st.tuples(CHANGE, CHANGE), local=st.sampled_from("ab"), then=st.integers(0, 1))
    def run_a_batch(self, who: int, changes: tuple[Rows, Rows], local: str, then: int) -> None:
        """The usual batch: every partition is leased and committed."""
        run, num_leases = self.model.run, len(self.granted)
        for partition in PARTITIONS:
            self.lease(who, run, partition, self.batches[run], local)
        for granted in self.granted[num_leases:]:
            entries = self.entries(granted, self.runs[run])
            entry_changes = list(changes)[: len(entries)]
            self.tried.append((entries, entry_changes))
            self.check_commit(
                self.answer(who, lambda ledger, entries=entries: ledger.decide_commits(entries)), entries, entry_changes
            )
        self.next_batch_by(then)

    # -- snapshots, truncation, restarts ------------------------------------------------------------------------------

    @precondition(lambda self: self.tried)
    @rule(who=WHO, pick=PICK)
    def snapshot(self, who: int, pick: int) -> None:
        """Snapshot any commit that was tried: also a commit that was refused or superseded."""
        entries = self.tried[-1 - pick % min(len(self.tried), 8)][0]
        commit = entries[pick % len(entries)]
        if commit.shard not in self.model.chains:
            return
        self.serial += 1
        snapshot = snapshot_of(commit, f"{self.serial}.snapshot")
        self.files[snapshot.file] = self.model.rows_of.get(commit.file, {})
        self.snapshots.append(snapshot)
        assert self.answer(who, lambda ledger: ledger.decide_snapshot(snapshot)) is self.model.snapshot(snapshot)

    @precondition(lambda self: self.snapshots)
    @rule(who=WHO, pick=PICK)
    def snapshot_again(self, who: int, pick: int) -> None:
        snapshot = self.snapshots[pick % len(self.snapshots)]
        assert self.answer(who, lambda ledger: ledger.decide_snapshot(snapshot)) is self.model.snapshot(snapshot)

    @rule(who=WHO, keep=st.integers(1, 3))
    def truncate(self, who: int, keep: int) -> None:
        floors = self.answer(who, lambda ledger: ledger.decide_truncation(keep))
        assert floors == self.model.truncate(keep)

    @rule(who=WHO)
    def restart(self, who: int) -> None:
        self.writers[who] = self.opened()

    # -- what holds ---------------------------------------------------------------------------------------------------

    @invariant()
    def both_coordinators_and_the_log_agree(self) -> None:
        folded = StateLedger(ROOT)
        for record in self.records():
            folded.fold(record)
        expected = data_of(folded)
        assert data_of(StateLedger.from_json(ROOT, expected)) == expected
        for who in (0, 1):
            assert self.answer(who, lambda ledger: ([], data_of(ledger))) == expected
        self.ledger = folded

    @invariant()
    def versions_are_the_models(self) -> None:
        ledger, model = self.ledger, self.model
        assert (ledger.run_id, ledger.epoch, ledger.retired) == (model.run, model.epoch, model.retired)
        assert {
            partition: structs.astuple(assignment)
            for partition in PARTITIONS
            if (assignment := ledger.assignment(partition))
        } == model.leases
        for shard in ((partition, store) for partition in PARTITIONS for store in STORES):
            chain = model.chains.get(shard, [])
            assert list(ledger.entries(*shard)) == chain
            assert ledger.newest(*shard) == (chain[-1] if chain else None)
            for version in range(model.floors.get(shard, 0), model.newest() + 2):
                if version in self.model.versions(shard[0]):
                    self.check_load(shard, version)
                else:
                    with pytest.raises(VersionNotFoundError):
                        self.plan(shard, version)
        for partition in PARTITIONS:
            for batch in range(model.newest() + 2):
                base: Any = None
                with suppress(StateMismatchError):
                    base = ledger.base_version(partition, batch)
                expected = model.base(partition, batch)
                assert base == (expected if isinstance(expected, int) else None)

    def plan(self, shard: ShardKey, version: int) -> LoadPlan:
        partition, store = shard
        return self.ledger.load_plans(partition, version, (store,)).plans[store]

    def check_load(self, shard: ShardKey, version: int) -> None:
        """From every readable snapshot the deltas lead to the model's rows, and none of these files is deleted."""
        plan = self.plan(shard, version)
        starts: list[tuple[int, Rows]] = [(snapshot.version, self.files[snapshot.file]) for snapshot in plan.snapshots]
        for start, rows in starts if plan.oldest_retained else [*starts, (0, {})]:
            for delta in plan.deltas:
                rows = applied(rows, self.files[delta.file]) if delta.version > start else rows
            assert rows == self.model.rows(shard, version)
        assert starts or not plan.oldest_retained
        needed = {snapshot.file for snapshot in plan.snapshots} | {snapshot.file for snapshot in plan.deltas}
        assert needed <= self.ledger.referenced_files()

    @invariant()
    def floors_never_go_back(self) -> None:
        for shard in self.model.chains:
            floor = self.plan(shard, sys.maxsize).oldest_retained
            assert floor >= self.floors.get(shard, 0)
            self.floors[shard] = floor
            if floor:
                older_plan: Any = None
                with suppress(InvalidRequestError):
                    older_plan = self.plan(shard, floor - 1)
                assert older_plan is None


CoordinatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCoordinator = CoordinatorMachine.TestCase


def test_a_store_that_a_run_left_out_is_read_after_the_other_stores_meanwhile_were_truncated() -> None:
    state = CoordinatorMachine()
    state.start_run(who=0, partition=0, back=0, local="a", stores=STORES)
    state.run_a_batch(who=0, changes=({}, {"a": 1}), local="a", then=0)
    state.start_run(who=0, partition=0, back=-1, local="a", stores=STORES[:1])
    state.commit(who=0, pick=0, change={}, second_change={}, wrong=0)
    state.start_run(who=0, partition=0, back=-1, local="a", stores=STORES)
    state.commit(who=0, pick=0, change={}, second_change={"b": 2}, wrong=0)
    state.snapshot(who=0, pick=0)
    state.truncate(who=0, keep=1)
    state.both_coordinators_and_the_log_agree()
    state.versions_are_the_models()
    assert [len(state.ledger.entries(0, store)) for store in STORES] == [1, 2], (
        "the version that one was made on is gone"
    )
    state.teardown()


def test_a_version_is_gone_once_one_of_its_stores_is_truncated() -> None:
    state = CoordinatorMachine()
    state.start_run(who=0, partition=0, back=0, local="a", stores=STORES)
    for _ in range(2):
        state.run_a_batch(who=0, changes=({}, {}), local="a", then=1)
    # A snapshot of the second store only.
    state.snapshot(who=0, pick=1)
    state.truncate(who=0, keep=1)
    num_leases = len(state.granted)
    state.start_run(who=0, partition=0, back=1, local="a", stores=STORES)
    assert len(state.granted) == num_leases
    state.both_coordinators_and_the_log_agree()
    state.versions_are_the_models()
    state.teardown()

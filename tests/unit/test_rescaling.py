"""Rescales of a state in the ledger alone: accepted commits of each layout, load plans of versions, and the files that they need."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from coordinator.ledger.branches import first_record
from coordinator.ledger.read_views import WantedView, committed, read_view
from coordinator.ledger.records import Committed, Record, Rescaled, RunStarted, SnapshotAdded
from coordinator.ledger.rescaling import decide_rescale_request, decide_shards, first_layout
from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.errors import InvalidRequestError, VersionNotFoundError
from coordinator.model.identities import DEFAULT_STORE
from coordinator.model.load_plans import LoadPlan
from coordinator.model.schema import Field, StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.placement.lease_plans import stay_else_local
from tests.unit.ledger_harness import ROOT, FakeFleetView, actor, entry, task, through_json

SCHEMA = StateSchema((Field("k0", "int32"), Field("__row", "int64")), (), (), None, None, "update")
CREATED = StateMetadata("clicks", "query", 4, "update", SCHEMA)
FIRST = first_layout(CREATED)
#: The hash of a key is the key.
KEYS = range(-12, 24)
Rows = dict[int, int]


@pytest.mark.parametrize("new", range(1, 13))
@pytest.mark.parametrize("old", range(1, 13))
def test_each_shard_is_made_of_those_that_may_have_its_rows(old: int, new: int) -> None:
    layout = ShardLayout(new, 100, 3, "run", 50, old)
    for shard in range(new):
        sources = {50 + key % old for key in range(old * new) if key % new == shard}
        assert set(layout.parents(100 + shard)) == sources
        for source in sources:
            assert 100 + shard in layout.children(source)
    assert sum(len(layout.children(50 + shard)) for shard in range(old)) == sum(
        len(layout.parents(100 + shard)) for shard in range(new)
    )


def loaded(plan: LoadPlan, files: dict[str, Rows]) -> Rows:
    """Return the rows of a load plan, read as a store actor reads them."""
    start, rows = 0, Rows()
    if plan.snapshots:
        start, rows = plan.snapshots[0].version, dict(files[plan.snapshots[0].file])
    elif plan.origin is not None:
        for parent in plan.origin.parents:
            parent_rows = loaded(parent.plan, files)
            assert all(key % parent.num_shards == parent.shard for key in parent_rows)
            rows |= {
                key: value for key, value in parent_rows.items() if key % plan.origin.num_shards == plan.origin.shard
            }
    else:
        assert plan.oldest_retained == 0
    for delta in plan.deltas:
        if delta.version > start:
            rows |= files[delta.file]
    return rows


class RescaleMachine(RuleBasedStateMachine):
    """Runs of one query over a state that is rescaled again and again, against a dict of each version."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = StateLedger(ROOT)
        self.files: dict[str, Rows] = {}
        #: Rows of each version in the accepted history.
        self.truth: list[Rows] = [{}]
        self.logged: list[Committed | SnapshotAdded] = []
        self.serial = 0
        self.run = ""
        self.layout = FIRST
        self.requested: int | None = None
        self.start(None)

    # -- calls of a driver -------------------------------------------------------------------------------------------

    def fold(self, records: list[Record]) -> None:
        for record in records:
            self.ledger.fold(through_json(record))
            if isinstance(record, Committed | SnapshotAdded):
                self.logged.append(record)

    def start(self, requested: int | None) -> None:
        self.serial += 1
        self.run = f"run-{self.serial}"
        self.requested = requested
        self.begin()

    def begin(self) -> None:
        """Begin the batch after the newest finished version."""
        batch = len(self.truth) - 1
        records, self.layout = decide_shards(self.ledger, CREATED, task(self.run, batch), self.requested)
        self.fold(records)
        repeated = decide_shards(self.ledger, CREATED, task(self.run, batch), self.requested)
        assert repeated == ([], self.layout)

    def commit(self, partition: int, rows: Rows) -> None:
        batch = len(self.truth) - 1
        identity = task(self.run, batch, partition)
        self.ledger.check_query(identity)
        self.ledger.check_layout(identity, self.ledger.layouts.in_force(self.run, batch) or FIRST)
        self.ledger.check_whole(identity, self.layout)
        records, grant = self.ledger.decide_lease(identity, actor("a"), FakeFleetView(), stay_else_local)
        self.fold(records)
        assert grant.base_version == batch
        assert grant.watermarks.input_ms == batch
        self.serial += 1
        commit = structs.replace(
            entry(grant, batch + 1),
            attempt_id=str(self.serial),
            file=f"{self.serial}.delta",
            watermark_ms=batch + 1,
            rows_late=1,
        )
        self.files[commit.file] = rows
        records, accepted = self.ledger.decide_commits([commit])
        self.fold(records)
        assert self.ledger.newest(partition) == accepted[0]

    @rule(rows=st.dictionaries(st.sampled_from(KEYS), st.integers(0, 9), max_size=8), part=st.integers(0, 16))
    def batch(self, rows: Rows, part: int) -> None:
        """Run a batch on all shards, or on the first `part` shards only, after which another run repeats it."""
        partitions = list(self.layout.partitions)
        for shard, partition in enumerate(partitions[:part] if part < len(partitions) else partitions):
            self.commit(partition, {key: value for key, value in rows.items() if key % self.layout.num_shards == shard})
        if part < len(partitions):
            self.start(None)
            return
        self.truth.append({**self.truth[-1], **rows})
        assert self.ledger.committed_version(self.layout) == len(self.truth) - 1
        self.begin()

    @rule(requested=st.sampled_from((None, 1, 2, 3, 4, 5, 6, 8, 12)))
    def restart(self, requested: int | None) -> None:
        self.start(requested)
        if requested is not None and self.ledger.has_versions():
            assert self.layout.num_shards == requested

    @precondition(lambda self: self.ledger.run_id == self.run)
    @rule(factor=st.sampled_from((2, 3)), up=st.booleans())
    def rescale_online(self, factor: int, up: bool) -> None:
        present = self.layout.num_shards
        num_shards = present * factor if up else present // factor
        if num_shards < 1 or num_shards > 24 or (not up and present % factor):
            return
        records, plan = decide_rescale_request(self.ledger, CREATED, num_shards, is_active=True, dry_run=False)
        self.fold(records)
        assert (plan.num_shards, plan.new_shards) == (present, num_shards)
        batch = len(self.truth) - 1
        if self.ledger.committed_version(self.layout) == batch and not any(
            entry.version > batch for partition in self.layout.partitions for entry in self.ledger.entries(partition)
        ):
            # As at the end of the batch before.
            self.begin()
            assert self.layout.num_shards == num_shards

    # -- calls of store actors and maintenance ------------------------------------------------------------------------

    @rule(pick=st.integers(0, 100))
    def snapshot(self, pick: int) -> None:
        partitions = sorted(partition for partition, _ in self.ledger._chains)
        if not partitions:
            return
        partition = partitions[pick % len(partitions)]
        entries = self.ledger.entries(partition)
        if not entries:
            return
        commit = entries[pick % len(entries)]
        rows = loaded(self.ledger.load_plans(partition, commit.version).plans[DEFAULT_STORE], self.files)
        self.serial += 1
        snapshot = SnapshotEntry(partition, commit.version, commit.attempt_id, f"{self.serial}.snapshot", 1, 2, 3, 0, 5)
        self.files[snapshot.file] = rows
        self.fold(self.ledger.decide_snapshot(snapshot)[0])

    @rule(keep=st.integers(2, 4))
    def truncate(self, keep: int) -> None:
        self.fold(self.ledger.decide_truncation(keep)[0])

    @rule()
    def reload(self) -> None:
        self.ledger = StateLedger.from_json(ROOT, json.loads(json.dumps(self.ledger.to_json())))

    @rule(pick=st.integers(0, 100))
    def continue_from_a_branch(self, pick: int) -> None:
        """Let another query take over the history at a retained version."""
        newest = len(self.truth) - 1
        version = newest - pick % 4
        self.fold(self.ledger.decide_finished(self.ledger.run_id, newest - 1))
        try:
            branched = first_record(self.ledger, CREATED, self.ledger.state_name, version)
        except VersionNotFoundError:
            assert version < newest or version == 0, "the newest version can always be branched"
            return
        branch = StateLedger(ROOT)
        branch.fold(through_json(branched))
        assert branch.referenced_files() <= self.ledger.referenced_files()
        assert not any(
            entry.version > version for partition, _ in branch._chains for entry in branch.entries(partition)
        )
        self.ledger, self.logged = branch, list(branch.retained())
        self.truth = self.truth[: version + 1]
        self.start(None)

    # -- invariants ---------------------------------------------------------------------------------------------------

    @invariant()
    def every_retained_version_is_there(self) -> None:
        newest = len(self.truth) - 1
        # As from a checkpoint in parts, with all records of the log that accept commits or snapshots, also superseded ones.
        parts = json.loads(msgspec.json.encode(self.ledger.folded(())))
        reloaded = StateLedger.from_json(ROOT, parts, self.logged)
        assert sorted(map(repr, reloaded.retained())) == sorted(map(repr, self.ledger.retained()))
        assert reloaded.layouts.to_json() == self.ledger.layouts.to_json()
        for version in range(newest + 1):
            layout = self.ledger.layouts.with_version(FIRST, version)
            rows: Rows | None = {}
            for partition in layout.partitions:
                try:
                    plan = self.ledger.load_plans(partition, version).plans[DEFAULT_STORE]
                except InvalidRequestError:
                    assert version < newest, "the newest version is always retained"
                    rows = None
                    break
                assert set(plan.files()) <= self.ledger.referenced_files()
                rows |= loaded(plan, self.files)
            assert rows is None or rows == self.truth[version]

    @invariant()
    def what_the_next_batch_reads_is_there(self) -> None:
        rows: Rows = {}
        for partition in self.layout.partitions:
            rows |= loaded(self.ledger.load_plans(partition, len(self.truth) - 1).plans[DEFAULT_STORE], self.files)
        assert rows == self.truth[-1]


RescaleMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestRescale = RescaleMachine.TestCase


@pytest.mark.parametrize("reloaded", [False, True])
@pytest.mark.parametrize("partitions", [(2, 4), (2, 3, 4, 5)], ids=["half", "all"])
def test_versions_of_truncated_shards_are_neither_read_nor_branched(
    partitions: tuple[int, ...], reloaded: bool
) -> None:
    created = StateMetadata("clicks", "query", 2, "update", CREATED.schema)
    ledger = StateLedger(ROOT)

    def commit(partition: int, version: int, epoch: int, run: str) -> None:
        attempt = f"{run}-{partition}-{version}"
        ledger.fold(
            Committed(CommitEntry(partition, version, version - 1, epoch, run, attempt, f"{attempt}.delta", *[1] * 11))
        )

    ledger.fold(RunStarted("run-1", "query", 0, 1))
    for version in range(1, 6):
        for partition in (0, 1):
            commit(partition, version, 1, "run-1")
    ledger.fold(RunStarted("run-2", "query", 5, 2))
    ledger.fold(Rescaled(4, 2, 5, "run-2", 0, 2, ("k0",)))
    for version in range(6, 10):
        for partition in range(2, 6):
            commit(partition, version, 2, "run-2")
    for partition in partitions:
        snapshot = SnapshotEntry(partition, 8, f"run-2-{partition}-8", f"{partition}.snapshot", 1, 2, 3, 0, 5)
        ledger.fold(SnapshotAdded(snapshot))
    for record in ledger.decide_truncation(1)[0]:
        ledger.fold(record)
    if reloaded:
        ledger = StateLedger.from_json(ROOT, json.loads(json.dumps(ledger.to_json())))
    newest = committed(ledger, created)
    assert newest == 9
    for version in range(1, 6):
        with pytest.raises(VersionNotFoundError):
            read_view(ledger, created, newest, WantedView(version))
        with pytest.raises(VersionNotFoundError):
            first_record(ledger, created, "what_if", version)


def test_a_version_that_is_being_made_again_is_not_branched() -> None:
    created = StateMetadata("clicks", "query", 2, "update", CREATED.schema)
    ledger = StateLedger(ROOT)
    for run, epoch, partitions, planned_ms in (("run-1", 1, (0, 1), 7), ("run-2", 2, (0,), 8)):
        ledger.fold(RunStarted(run, "query", 0, epoch))
        for partition in partitions:
            commit = CommitEntry(
                partition, 1, 0, epoch, run, f"{run}-{partition}", "file", *[1] * 11, batch_time_ms=planned_ms
            )
            ledger.fold(Committed(commit))
    with pytest.raises(VersionNotFoundError):
        first_record(ledger, created, "what_if", 1)

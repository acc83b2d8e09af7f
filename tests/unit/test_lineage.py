"""The lineage of operators and keyed stores: a state machine of its own, tested against a model of the accepted commits."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from coordinator.model.commits import CommitEntry
from store_actors.serving.partition import Lineage, SyncAction
from tests.unit.ledger_harness import ENTRY


def commit(version: int, attempt: str, run: str = "run") -> CommitEntry:
    return structs.replace(ENTRY, version=version, attempt_id=attempt, run_id=run)


def loaded_lineage(versions: int) -> Lineage:
    """Return the lineage of memory that came to a version commit by commit, under epoch 1."""
    lineage = Lineage()
    lineage.loaded(0, "", 0)
    lineage.leased(1, "run")
    for version in range(1, versions + 1):
        lineage.committed([commit(version, f"a{version}")])
    return lineage


def test_under_its_own_epoch_memory_at_the_base_is_beyond_doubt() -> None:
    lineage = loaded_lineage(3)
    assert lineage.is_hot(1, "run", 3)
    assert not lineage.is_hot(1, "run", 2)
    assert not lineage.is_hot(2, "run", 3)
    assert not lineage.is_hot(1, "another run", 3)
    lineage.forget()
    assert not lineage.is_hot(1, "run", 3)
    assert not lineage.is_hot(-1, "run", 3)


def test_a_commit_is_recorded_for_a_retry_of_its_run_only() -> None:
    lineage = loaded_lineage(2)
    assert lineage.recorded("run", 2)
    assert not lineage.recorded("run", 1)
    assert not lineage.recorded("run-2", 2)
    lineage.rolled_back(1)
    assert not lineage.recorded("run", 2)
    assert lineage.newest == ()


def test_deltas_that_a_snapshot_covers_are_not_counted_any_more() -> None:
    lineage = loaded_lineage(5)
    lineage.snapshot_written(4)
    assert lineage.deltas == 1
    lineage.snapshot_written(4)
    assert lineage.deltas == 0


class LineageMachine(RuleBasedStateMachine):
    """A partition whose commits are accepted from several runs and store actors, and the memory of one of these store actors."""

    def __init__(self) -> None:
        super().__init__()
        #: version -> (attempt, content) as accepted; the content is the list of attempts that it was built on.
        self.accepted: dict[int, tuple[str, tuple[str, ...]]] = {0: ("", ())}
        self.epoch = 1
        self.memory: dict[int, tuple[str, ...]] = {}
        self.lineage = Lineage()
        self.attempts = 0

    def newest(self) -> int:
        return max(self.accepted)

    def new_attempt(self) -> str:
        self.attempts += 1
        return f"a{self.attempts}"

    def accept(self, base: int, attempt: str) -> None:
        self.accepted = {version: commit for version, commit in self.accepted.items() if version <= base}
        self.accepted[base + 1] = (attempt, (*self.accepted[base][1], attempt))

    @rule(back=st.integers(0, 2), kind=st.sampled_from(["own", "other", "lost", "aborted"]))
    def batch(self, back: int, kind: str) -> None:
        """Run a task of the present lease: its commit is accepted, another attempt's is, the outcome is lost, or the task aborts."""
        base = max(0, self.newest() - back)
        if back:
            # Only a new run makes a version again.
            self.epoch += 1
        if not self.lineage.is_hot(self.epoch, "run", base):
            self.position(base)
            self.lineage.leased(self.epoch, "run")
        assert self.memory[base] == self.accepted[base][1], (
            "a batch continues from a version that is not the accepted one"
        )
        assert self.lineage.version == base
        if kind == "aborted":
            return
        attempt = self.new_attempt()
        self.accept(base, attempt)
        if kind == "lost":
            self.lineage.forget()
            self.memory = {}
            return
        if kind == "other":
            attempt = self.new_attempt()
            self.accept(base, attempt)
        # Memory has the last few versions, as tables do.
        self.memory = {version: content for version, content in self.memory.items() if base - 2 < version <= base}
        self.memory[base + 1] = self.accepted[base + 1][1]
        self.lineage.committed([commit(base + 1, attempt)])

    def position(self, base: int) -> None:
        sync_action = self.lineage.sync_action(base, self.accepted[base][0])
        if sync_action is SyncAction.ROLLBACK and base in self.memory:
            self.memory = {version: content for version, content in self.memory.items() if version <= base}
            self.lineage.rolled_back(base)
        elif sync_action is not SyncAction.KEEP:
            self.lineage.forget()
            self.memory = {base: self.accepted[base][1]}
            self.lineage.loaded(base, self.accepted[base][0], base)

    @rule(back=st.integers(0, 2))
    def elsewhere(self, back: int) -> None:
        """Let another store actor have the partition for a batch, of which this memory learns nothing."""
        self.epoch += 1
        self.accept(max(0, self.newest() - back), self.new_attempt())
        self.epoch += 1

    @precondition(lambda self: self.lineage.is_loaded and self.lineage.newest)
    @rule()
    def snapshot(self) -> None:
        (entry,) = self.lineage.newest
        assert entry.version == self.lineage.version
        assert self.memory[entry.version][-1] == entry.attempt_id, "a snapshot would show another commit's rows"
        self.lineage.snapshot_written(self.lineage.deltas)

    @rule()
    def unload(self) -> None:
        self.lineage.forget()
        self.memory = {}

    @invariant()
    def memory_is_at_its_version(self) -> None:
        if self.lineage.is_loaded:
            assert max(self.memory) == self.lineage.version
            assert len(self.lineage.attempts) <= 5


TestLineage = LineageMachine.TestCase

"""A shard in a continuous query against a model: pieces, markers, seals, commits that end late or badly, and runs that begin again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.errors import FencedError, OperationOutOfOrderError, StateStoreError
from coordinator.model.identities import DEFAULT_STORE, TaskIdentity
from coordinator.model.schema import Accumulator, Field, OperatorKind, StateSchema
from store_actors.epochs import shard as shard_module
from store_actors.epochs.barrier import Barrier, Marker
from store_actors.epochs.shard import EpochShard, Piece
from store_actors.messages.requests import ShardInput
from store_actors.serving.partitions import Partitions
from tests.unit.aggregation_fleet import SCHEMA, AggregationFleet, Link, counts, rows

TASKS = 2
_runs = count()


class LateThreads:
    """Runs functions when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.submit = self.waiting.append

    def run_all(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


class EpochMachine(RuleBasedStateMachine):
    """Tasks that send and mark as Spark's driver lets them: no epoch ends before the one before it is in Spark's log."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = AggregationFleet()
        self.partitions = Partitions(self.fleet.objects, self.fleet.coordinator)
        self.threads = LateThreads()
        #: What happens once the coordinator has accepted a commit, before its answer comes.
        self.before_the_answer: Callable[[], None] | None = None
        commit_all = self.fleet.coordinator.commit_all

        def answered_late(*arguments: Any) -> Any:
            answer = commit_all(*arguments)
            act, self.before_the_answer = self.before_the_answer, None
            if act is not None:
                act()
            return answer

        self.fleet.coordinator.commit_all = answered_late  # type: ignore[method-assign]
        #: Counts of each version that Spark's log has.
        self.logged: list[Counter[str]] = [Counter()]
        self.begin()

    def begin(self) -> None:
        """Begin a run with the epoch after the last one in Spark's log."""
        first = len(self.logged) - 1
        task = TaskIdentity("s", "query", f"run-{next(_runs)}", first, 0, 0, "executor")
        grant = self.fleet.coordinator.lease(task, "a")
        #: Results leave by the first task, which has not joined yet.
        self.links = [Link() for _ in range(TASKS)]
        self.shard = EpochShard(
            self.partitions, task, grant, SCHEMA, TASKS, self.threads.submit, self.links[0].errors.append
        )
        self.shard.join(1, self.links[1])
        self.is_joined = False
        self.first = self.epoch = first
        #: Counts of the open version; pieces that wait for the first task, and those of the next epoch, each with its task.
        self.open = Counter(self.logged[-1])
        self.unfolded, self.held = list[tuple[int, str]](), list[tuple[int, str]]()
        self.sealed: Counter[str] | None = None
        self.epochs, self.sent, self.ended = [first] * TASKS, [0] * TASKS, 0

    @rule(task=st.integers(0, TASKS - 1), values=st.text("abc", min_size=1, max_size=4))
    def send(self, task: int, values: str) -> None:
        if task == 0:
            self.join()
        self.sent[task] += len(values)
        answered = self.links[task].answered
        self.shard.take(task, self.epochs[task], Piece(rows(values), self.links[task]))
        if self.epochs[task] > self.epoch:
            self.held.append((task, values))
        elif not self.is_joined:
            self.unfolded.append((task, values))
        else:
            assert self.links[task].answered == answered + len(values)
            self.check_folded([(task, values)])
        if self.epochs[task] > self.epoch or not self.is_joined:
            assert self.links[task].answered == answered, "what waits is not answered"

    def check_folded(self, pieces: list[tuple[int, str]]) -> None:
        """Check that pieces are counted, in their order, and that the first task got all that each changed, as it was then."""
        results = self.links[0].results[-len(pieces) :] if pieces else []
        for (_, values), emitted in zip(pieces, results, strict=True):
            self.open.update(values)
            assert emitted == {value: self.open[value] for value in values}
        assert not self.links[1].results

    @rule()
    def join(self) -> None:
        if not self.is_joined:
            self.shard.join(0, self.links[0])
            self.is_joined = True
            self.check_folded(self.unfolded)
            self.unfolded = []

    def may_mark(self, task: int) -> bool:
        return self.epochs[task] <= self.epoch and self.sealed is None

    @rule(task=st.integers(0, TASKS - 1))
    def mark(self, task: int, commits: bool = True) -> None:
        if not self.may_mark(task):
            return
        if task == 0:
            self.join()
        self.shard.mark(Marker(task, self.epochs[task], self.sent[task]), self.links[task])
        self.shard.seal()
        if commits:
            self.shard.commit()
        self.epochs[task] += 1
        self.sent[task] = 0
        assert self.links[1].ended == list(range(self.first, self.epochs[1]))
        is_whole = all(epoch > self.epoch for epoch in self.epochs)
        assert (self.epoch in self.links[0].ended) is is_whole, "it has results of all tasks"
        if is_whole:
            self.epoch += 1
            self.sealed = Counter(self.open)
            self.check_folded(self.held)
            self.held = []

    @rule(is_committed=st.booleans())
    def end_the_epoch(self, is_committed: bool) -> None:
        for task in range(TASKS):
            self.mark(task)
        if is_committed and self.sealed is not None:
            self.commit()

    @precondition(lambda self: self.sealed is not None)
    @rule()
    def commit(self) -> None:
        self.threads.run_all()
        assert self.sealed is not None
        self.logged.append(self.sealed)
        self.sealed = None

    @precondition(lambda self: self.sealed is not None)
    @rule()
    def lose_the_answer_to_a_commit(self) -> None:
        """The version may count, and the run is over: Spark's log does not have the epoch."""
        self.fleet.coordinator.lose_answers = 1
        self.threads.run_all()
        with pytest.raises(StateStoreError):
            self.shard.take(0, self.epochs[0], Piece(rows("a"), Link()))
        self.begin()

    @precondition(lambda self: self.sealed is not None)
    @rule()
    def begin_again_before_the_answer_to_a_commit(self) -> None:
        self.before_the_answer = self.begin
        self.threads.run_all()

    @precondition(lambda self: self.sealed is not None)
    @rule()
    def end_another_epoch_before_the_answer_to_a_commit(self) -> None:
        """Spark's log has the epoch as soon as the coordinator does."""

        def go_on() -> None:
            assert self.sealed is not None
            self.logged.append(self.sealed)
            self.sealed = None
            for task in range(TASKS):
                if self.epochs[task] == self.epoch:
                    self.shard.mark(Marker(task, self.epoch, self.sent[task]), self.links[task])
                    self.shard.seal()
                    self.shard.commit()
                    self.epochs[task] += 1
                    self.sent[task] = 0

        self.before_the_answer = go_on
        self.threads.waiting.pop(0)()
        self.epoch += 1
        self.sealed = Counter(self.open)

    @precondition(lambda self: self.sealed is None)
    @rule()
    def end_between_the_seal_and_the_commit(self) -> None:
        """Another shard of the process could not be sealed: nothing of this one's version is written."""
        for task in range(TASKS):
            self.mark(task, commits=False)
        assert not self.threads.waiting
        self.restart()

    @rule(is_committed=st.booleans())
    def restart(self, is_committed: bool = False) -> None:
        """A task is lost; a commit that is under way ends before the next run begins, or after it."""
        if is_committed:
            self.threads.run_all()
        self.shard.end("a task was lost")
        with pytest.raises(FencedError):
            self.shard.mark(Marker(0, self.epochs[0], self.sent[0]), self.links[0])
        self.begin()
        self.threads.run_all()

    @rule()
    def take_over(self) -> None:
        """A newer run begins while the former one is at work, which finds that out."""
        former, epochs = self.shard, self.epochs
        self.begin()
        with pytest.raises(FencedError):
            former.take(0, epochs[0], Piece(rows("a"), Link()))
        self.threads.run_all()

    @rule()
    def write_a_snapshot(self) -> None:
        self.partitions.maintain(1)

    @invariant()
    def versions_in_memory_are_those_of_the_log(self) -> None:
        store = self.partitions.cache.of(self.shard.lease.store_id)
        version = len(self.logged) - 1
        view = store.view(DEFAULT_STORE, version)
        if view is not None:
            rows_of_view = [
                row for pieces in view.frozen(["v", "n"]) for table in pieces() for row in table.to_pylist()
            ]
            assert {row["v"]: row["n"] for row in rows_of_view} == self.logged[version]

    @rule()
    def load_what_is_stored(self) -> None:
        """Another process reads the newest version of Spark's log from its files."""
        version = len(self.logged) - 1
        if self.threads.waiting or not version:
            return
        plan = self.fleet.coordinator.plan(version)
        format_ = self.partitions.restorer.format_of(self.shard.lease.store_id, SCHEMA)
        store, _ = self.partitions.restorer.load(self.shard.lease.store_id, version, format_, plan)
        tables = [table for piece in store.frozen() for table in piece()]
        assert counts(pa.concat_tables([SCHEMA.row_schema().empty_table(), *tables])) == self.logged[version]

    def teardown(self) -> None:
        self.threads.run_all()
        version = len(self.logged) - 1
        loaded = self.fleet.new_store()
        request = self.fleet.request(version, "another run")
        assert counts(loaded.apply(request, rows("z" * 2))[0]) == {"z": 2}
        (entry,) = loaded.partitions.cache.of(request.lease.store_id).stores.values()
        snapshot: pa.Table = entry.snapshot()  # type: ignore[attr-defined]
        assert counts(snapshot) == {**self.logged[version], "z": 2}


def test_a_shard_of_a_continuous_query_is_as_its_model() -> None:
    run_state_machine_as_test(EpochMachine, settings=settings(max_examples=75, stateful_step_count=40))


def test_pieces_of_a_task_that_is_ahead_are_held_back() -> None:
    barrier = Barrier[str](2, 5)
    assert barrier.take(0, 5, 1, "a")
    assert not barrier.mark(Marker(0, 5, 1))
    assert not barrier.take(0, 6, 2, "b")
    assert not barrier.mark(Marker(0, 6, 2))
    assert barrier.take(1, 5, 1, "c")
    assert barrier.held == 1
    assert barrier.mark(Marker(1, 5, 1))
    assert barrier.next_epoch() == (["b"], False)
    assert barrier.mark(Marker(1, 6, 0))
    assert barrier.next_epoch() == ([], False)
    assert barrier.epoch == 7


@pytest.mark.parametrize(
    ("task", "epoch"),
    [(0, 4), (0, 5), (0, 7), (1, 7), (2, 5), (-1, 5)],
    ids=["past", "ended", "far", "other far", "no task", "below"],
)
def test_what_comes_in_an_epoch_that_is_over_or_far_is_refused(task: int, epoch: int) -> None:
    barrier = Barrier[str](2, 5)
    barrier.mark(Marker(0, 5, 0))
    with pytest.raises(OperationOutOfOrderError):
        barrier.take(task, epoch, 1, "a")
    with pytest.raises(OperationOutOfOrderError):
        barrier.mark(Marker(task, epoch, 0))


@pytest.mark.parametrize("sent", [0, 1, 3, 4])
def test_rows_that_a_marker_counts_otherwise_are_refused(sent: int) -> None:
    barrier = Barrier[str](1, 0)
    barrier.take(0, 0, 2, "a")
    with pytest.raises(OperationOutOfOrderError, match="another number of rows"):
        barrier.mark(Marker(0, 0, sent))
    assert barrier.mark(Marker(0, 0, 2))


def test_held_rows_are_counted_in_their_epoch() -> None:
    barrier = Barrier[str](2, 0)
    barrier.mark(Marker(0, 0, 0))
    barrier.take(0, 1, 3, "a")
    barrier.mark(Marker(0, 1, 2))
    barrier.mark(Marker(1, 0, 0))
    with pytest.raises(OperationOutOfOrderError, match="another number of rows"):
        barrier.next_epoch()


def test_the_watermark_is_the_latest_of_all_tasks_and_never_goes_back() -> None:
    barrier = Barrier[Any](2, 0, 10)
    for first, second, expected in [(5, 7, 10), (30, 20, 30), (25, -(2**63), 30)]:
        barrier.mark(Marker(0, barrier.epoch, 0, first))
        barrier.mark(Marker(1, barrier.epoch, 0, second))
        barrier.next_epoch()
        assert barrier.watermark_ms == expected


def test_the_longest_wait_of_an_epoch_is_that_of_all_tasks_in_it() -> None:
    barrier = Barrier[Any](2, 0)
    for first, second in [(5, 7), (3, 2)]:
        barrier.mark(Marker(0, barrier.epoch, 0, waited_ms=first))
        barrier.mark(Marker(1, barrier.epoch, 0, waited_ms=second))
        barrier.next_epoch()
        assert barrier.waited_ms == max(first, second)


@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_a_shard_answers_no_more_rows_than_it_may_hold_before_the_seal(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = StateSchema(
        (), (Field("v", "string"), Field("n", "int64")), (Accumulator(AccumulatorKind.VALUE, (), (Field("seen", "int64", False),)),),
        None, None, "update", OperatorKind.LIMIT, {"n": 100},
    )  # fmt: skip
    row = pa.table({"v": ["x"], "n": pa.array([1], pa.int64())})
    monkeypatch.setattr(shard_module, "MOST_HELD_BYTES", room * row.nbytes)
    fleet, link = AggregationFleet(), Link()
    task = TaskIdentity("s", "query", "run", 0, 0, 0, "executor")
    grant = fleet.coordinator.lease(task, "a")
    threads = LateThreads()
    shard = EpochShard(
        Partitions(fleet.objects, fleet.coordinator), task, grant, schema, 1, threads.submit, link.errors.append
    )
    shard.join(0, link)
    for epoch in (0, 1):
        answered = link.answered
        for number in range(3):
            shard.take(0, epoch, Piece(ShardInput((row,), 1), link))
            assert link.answered - answered == min(number + 1, room)
        shard.mark(Marker(0, epoch, 3), link)
        shard.seal()
        shard.commit()
        # The second epoch is sealed once the first one is committed; until then its rows are held.
        assert link.answered - answered == (3 if epoch == 0 else min(3, room))
    threads.run_all()
    assert (link.answered, link.ended, link.errors) == (6, [0, 1], [])

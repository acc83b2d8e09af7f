"""Batches are whole: the ledger refuses a batch whose base is not on every shard, or not the one of the checkpoint."""

from __future__ import annotations

import pytest
from msgspec import structs, to_builtins

from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.model.commits import CommitEntry
from coordinator.model.errors import StateMismatchError
from coordinator.model.stored_json import from_json
from tests.unit.ledger_harness import SHARDS, LedgerQuery, actor, entry, task


def test_a_batch_that_ran_on_some_shards_is_refused_by_the_first_task_of_the_next_and_after_every_restart() -> None:
    query = LedgerQuery()
    query.run(0, [0, 1, 2])
    query.run(1, [0])
    for run, shard in (("run-1", 0), ("run-1", 2), ("run-2", 0), ("run-3", 1)):
        with pytest.raises(
            StateMismatchError, match=r"batch 1 is finished.*delete commits/1 and offsets/2.*missing=.*1, 2"
        ) as refused:
            query.begin(query.task(2, shard, run))
        assert "nothing was changed" in str(refused.value)


def test_a_state_of_another_history_of_the_query_is_refused() -> None:
    query = LedgerQuery()
    for batch in range(3):
        query.run(batch, [0, 1, 2])
    with pytest.raises(StateMismatchError, match="copies of different times"):
        query.begin(query.task(3, 0, "run-2", begins_ms=5000))
    query.begin(query.task(3, 0, "run-2"))


def test_a_state_whose_commits_have_no_time_is_accepted() -> None:
    """The batch is not refused: nothing is raised."""
    query = LedgerQuery()
    for shard in range(SHARDS):
        query.commit(entry(query.lease(query.task(0, shard), actor("a")), 1))
    query.begin(query.task(1, 0))


def test_a_program_that_opens_partitions_by_itself_has_no_batches() -> None:
    """The commit is not refused: nothing is raised."""
    query = LedgerQuery()
    query.run(0, [0])
    query.begin(structs.replace(query.task(1, 0), query_id="python"))


def test_the_result_of_a_batch_names_missing_shards_and_adds_up_the_others() -> None:
    query = LedgerQuery()
    query.run(0, [0, 1, 2])
    query.run(1, [0, 2])
    whole, half = (query.ledger.batch_result("run-1", batch, ShardLayout(SHARDS)) for batch in (0, 1))
    # Shards 0 and 2 are at the next version: the result only counts the newest version of a shard.
    assert (whole.missing, half.missing) == ((0, 2), (1,))
    sums = half.progress
    assert [sums["rows_total"], sums["rows_updated"], sums["custom"]["rowsRead"], sums["memory_bytes"]] == [6, 6, 10, 8]
    assert query.ledger.batch_result("run-2", 1, ShardLayout(SHARDS)).missing == (0, 1, 2)


def test_shards_that_committed_other_rows_than_were_sent_are_told() -> None:
    query = LedgerQuery()
    query.run(0, [0, 1, 2])
    result = query.ledger.batch_result("run-1", 0, ShardLayout(SHARDS))
    rows = result.rows_of[0]
    assert set(result.rows_of) == {0, 1, 2}
    assert result.progress["custom"]["rowsRead"] == sum(result.rows_of.values())
    # Attempts at a task may have counted different rows, if the rows are not the same each time; one of them committed.
    assert result.unlike({0: [rows], 1: [0, rows], 2: [rows, rows]}) == {}
    # Nobody counted those of shard 1: it is not known to be wrong.
    assert result.unlike({0: [rows - 1], 2: [0, rows + 1]}) == {0: ([rows - 1], rows), 2: ([0, rows + 1], rows)}


def test_rows_that_each_store_of_a_partition_reports_are_counted_once() -> None:
    """A function with several stores reports all rows of its batch with each of them; rows of state are each store's own."""
    query = LedgerQuery()
    commit = entry(query.lease(query.task(0, 0), actor("a")), 1)
    stores = [
        structs.replace(commit, store_name=name, rows_in=10, rows_late=late) for name, late in (("a", 2), ("b", 2))
    ]
    for record in query.ledger.decide_commits(stores)[0]:
        query.ledger.fold(record)
    sums = query.ledger.batch_result("run-1", 0, ShardLayout(1)).progress
    assert (sums["custom"]["rowsRead"], sums["rows_late"]) == (10, 2)
    assert (sums["rows_updated"], sums["rows_total"]) == (2 * commit.rows_updated, 2 * commit.state_rows)


def test_times_of_a_commit_are_recorded_only_where_there_are_some() -> None:
    commit = entry(LedgerQuery().lease(task(), actor("a")), 1)
    times = {"apply_ms": 3, "write_ms": 4, "restore_ms": 5, "load_bytes": 6, "failures": {"FencedError": 1}}
    timed = structs.replace(commit, batch_time_ms=7, due_ms=9)
    assert from_json(to_builtins(structs.replace(timed, **times).recorded()), CommitEntry) == timed
    assert {"batch_time_ms", "due_ms", *times}.isdisjoint(to_builtins(commit.recorded()))

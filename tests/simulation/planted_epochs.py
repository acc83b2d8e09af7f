"""Bugs of continuous queries to plant, as those of :mod:`tests.simulation.planted`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.ledger.history import StateHistory
from coordinator.ledger.records import BatchFinished
from coordinator.ledger.state_ledger import StateLedger
from store_actors.engine.versions import VersionedTable
from store_actors.epochs.barrier import Barrier, Marker
from store_actors.epochs.shard import EpochShard, Piece, RunTask
from tests.simulation.continuous import EpochRun
from tests.simulation.epoch_connections import Connection, SentPiece
from tests.simulation.epoch_tasks import EpochTask
from tests.simulation.planted import Bug, Original, owners_not_fenced
from tests.simulation.streaming import Checkpoint

#: Kinds of schedules (arguments of :class:`tests.simulation.continuous_world.ContinuousWorld`).
HARSH = {"harsh": True}
CALM: Mapping[str, bool] = {"harsh": False}
DRIVERS = {"drivers": True}

#: What a task that is ahead sent, once it is used.
_NOTHING: list[Any] = []


def _rows_not_compared(mark: Original, barrier: Barrier[Any], marker: Marker) -> Any:
    if marker.epoch == barrier.epoch:
        barrier._rows[marker.task] = marker.rows
    return mark(barrier, marker)


def _nothing_held_back(take: Original, barrier: Barrier[Any], task: int, epoch: int, rows: int, piece: Any) -> bool:
    if not take(barrier, task, epoch, rows, piece):
        barrier._held.pop()
    return True


def _one_marker_not_waited_for(mark: Original, barrier: Barrier[Any], marker: Marker) -> bool:
    is_whole = mark(barrier, marker)
    if marker.epoch == barrier.epoch and len(barrier._markers) == barrier.tasks - 1:
        for task in range(barrier.tasks):
            barrier._markers.setdefault(task, Marker(task, barrier.epoch, 0))
        return True
    return bool(is_whole)


def _older_runs_go_on(end: Original, shard: EpochShard, reason: str, *, fenced: bool = False) -> None:
    if not fenced:
        end(shard, reason)
        return
    tell, shard._tell_ended = shard._tell_ended, lambda _: None
    end(shard, reason, fenced=True)
    shard._failure, shard._tell_ended = None, tell


def _open_version_kept(_: Original, table: VersionedTable) -> None:
    table._pending = None


def _pieces_lost(send: Original, connection: Connection, frame: Any, *, to_task: bool) -> None:
    if not (isinstance(frame, SentPiece) and connection.scheduler.rng.random() < 0.03):
        send(connection, frame, to_task=to_task)


def _any_run(batch_result: Original, history: StateHistory, run_id: str, batch_id: int, layout: Any) -> Any:
    newest = history.newest(layout.first_partition)
    return batch_result(history, run_id if newest is None else newest.run_id, batch_id, layout)


def _decided_by_anybody(_: Original, ledger: StateLedger, task: Any, layout: Any, end: str) -> Any:
    return [BatchFinished(ledger.run_id, task.batch_id, end)]


def _results_by_any_task(fold: Original, shard: EpochShard, piece: Piece) -> None:
    task, shard._sink_task = shard._sink_task, piece.task
    try:
        fold(shard, piece)
    finally:
        shard._sink_task = task


def _results_of_others_not_waited_for(mark: Original, shard: EpochShard, marker: Marker, task: RunTask) -> None:
    if shard._leaves_by(marker.task):
        task.end_epoch(marker.epoch)
    mark(shard, marker, task)


def _waiting_pieces_lost(join: Original, shard: EpochShard, number: int, task: RunTask) -> None:
    if shard._leaves_by(number):
        shard._unfolded.clear()
    join(shard, number, task)


EPOCH_BUGS: dict[str, Bug] = {
    "a task that is ahead is not held back": Bug(Barrier, "take", _nothing_held_back, CALM),
    "an epoch is sealed before its last task has ended it": Bug(Barrier, "mark", _one_marker_not_waited_for, CALM),
    "the rows of an epoch are not counted": Bug(Barrier, "mark", _rows_not_compared, CALM),
    "an older run goes on in memory": Bug(EpochShard, "end", _older_runs_go_on, HARSH, first=350),
    "what an open version did is kept": Bug(VersionedTable, "abort", _open_version_kept, HARSH),
    "results leave by the task that sent the rows": Bug(EpochShard, "_fold", _results_by_any_task, CALM),
    "the results of other tasks' rows are not waited for": Bug(
        EpochShard, "mark", _results_of_others_not_waited_for, CALM
    ),
    "what was sent before the sink's task has joined is lost": Bug(EpochShard, "join", _waiting_pieces_lost, CALM),
    "a task ends an epoch before it is answered": Bug(EpochTask, "_is_answered", lambda _, task: True, CALM),
    "an epoch is recorded before all shards have committed it": Bug(
        EpochRun, "_settle", lambda _, run, epoch: None, HARSH
    ),
    "the end of an epoch that does not count stays": Bug(
        Checkpoint, "ends_with", lambda _, checkpoint, epoch, end: epoch in checkpoint.ends, HARSH
    ),
    "a run begins where an epoch ended that does not count": Bug(
        EpochRun, "_begins_elsewhere", lambda _, run, end: False, DRIVERS
    ),
    "epochs begin two ahead of Spark's log": Bug(
        EpochRun, "_may_begin", lambda _, run: run._newest >= run._open - 2, CALM, first=10
    ),
    "an epoch begins though its run is over": Bug(EpochRun, "_check_begin", lambda _, run: None, CALM, first=218),
    "an epoch counts though another driver has the query": Bug(
        StateLedger, "decide_epoch", _decided_by_anybody, DRIVERS
    ),
    "a run begins with an epoch that counts": Bug(
        StateLedger, "check_not_counted", lambda _, ledger, task: None, DRIVERS
    ),
    "another run's commits are taken for this one's": Bug(StateHistory, "batch_result", _any_run, HARSH, first=210),
    "replaced runs may commit": Bug(StateLedger, "decide_commits", owners_not_fenced, HARSH),
}
#: Bugs that are only one together with another.
EPOCH_WITH = {
    "a task that is ahead is not held back": "rows are not compared",
    "the rows of an epoch are not counted": "pieces are lost",
    # The ledger looks, too.
    "an epoch is recorded before all shards have committed it": "an epoch counts though another driver has the query",
}
EPOCH_HARMLESS = {
    "rows are not compared": Bug(Barrier, "mark", _rows_not_compared, HARSH),
    "pieces are lost": Bug(Connection, "send", _pieces_lost, HARSH),
}

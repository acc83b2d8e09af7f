"""Bugs of continuous queries to plant, as those of :mod:`tests.simulation.planted`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import pyarrow as pa
from msgspec import structs

from coordinator.ledger.history import StateHistory
from coordinator.ledger.records import BatchFinished
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.leases import Lease
from coordinator.model.watermarks import Watermarks
from spark_jobs.functions.user_program import UserTask
from store_actors.client.state_store import StateStore
from store_actors.engine.versions import VersionedTable
from store_actors.epochs import shard as epoch_shard
from store_actors.epochs.barrier import Barrier, Marker
from store_actors.epochs.folding import HeldRows
from store_actors.epochs.functions import FunctionShard, FunctionWorker
from store_actors.epochs.result_epochs import ResultEpochs
from store_actors.epochs.shard import EpochShard, Piece, RunTask
from store_actors.operators.deduplicate import DeduplicateShard
from store_actors.serving.operator_shards import write_of
from tests.simulation.continuous import EpochRun
from tests.simulation.epoch_connections import Connection, SentPiece
from tests.simulation.epoch_tasks import EpochTask
from tests.simulation.planted import Bug, Original, owners_not_fenced
from tests.simulation.streaming import Checkpoint

#: Kinds of schedules (arguments of :class:`tests.simulation.continuous_world.ContinuousWorld`).
HARSH = {"harsh": True}
CALM: Mapping[str, bool] = {"harsh": False}
DRIVERS = {"drivers": True}
WINDOWS = {"windows": True}
HELD = {"held": True}
DUPLICATES = {"duplicates": True}
SESSIONS = {"sessions": True}
FUNCTIONS = {"functions": True}

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


def _watermark_of_one_task(next_epoch: Original, barrier: Barrier[Any]) -> Any:
    return _with_watermark(next_epoch, barrier, barrier._markers[0].watermark_ms)


def _watermark_of_the_last_task(next_epoch: Original, barrier: Barrier[Any]) -> Any:
    return _with_watermark(next_epoch, barrier, min(marker.watermark_ms for marker in barrier._markers.values()))


def _with_watermark(next_epoch: Original, barrier: Barrier[Any], watermark_ms: int) -> Any:
    barrier._markers = {task: replace(marker, watermark_ms=watermark_ms) for task, marker in barrier._markers.items()}
    return next_epoch(barrier)


def _late_by_an_older_watermark(open_version: Original, shard: EpochShard) -> None:
    newest, older = shard._watermarks, vars(shard).get("older", shard._watermarks)
    shard._watermarks = older
    open_version(shard)
    shard._watermarks = newest
    vars(shard)["older"] = newest


def _late_by_their_own_watermark(seal: Original, held: HeldRows, watermark_ms: int) -> Any:
    held._late_ms = watermark_ms
    return seal(held, watermark_ms)


def _closed_by_an_older_watermark(_: Original, shard: EpochShard, watermarks: Watermarks) -> Any:
    return write_of(shard._shard, shard._folding.seal(shard._watermarks.input_ms), watermarks)


def _watermark_begun_anew(begin: Original, shard: EpochShard, *args: Any) -> None:
    partitions, task, grant, *others = args
    begin(shard, partitions, task, structs.replace(grant, watermarks=Watermarks()), *others)


def _begun_a_version_before(
    restored: Original, partitions: Any, partition: Any, lease: Lease, run_id: str, base: int, schema: Any
) -> Any:
    """Every other lease: a run that begins so commits nothing."""
    return restored(partitions, partition, lease, run_id, max(base - lease.epoch % 2, 0), schema)


class _Withheld:
    """A task to which the ends of epochs come before their results."""

    def __init__(self, task: RunTask | None) -> None:
        self._task, self._emitted = task, cast("list[Any]", [])

    def emit(self, *results: Any) -> None:
        self._emitted.append(results)

    def end_epoch(self, epoch: int) -> None:
        assert self._task is not None
        self._task.end_epoch(epoch)

    def leave(self) -> None:
        for results in self._emitted:
            assert self._task is not None
            self._task.emit(*results)


def _results_after_the_commit(seal: Original, shard: EpochShard) -> None:
    task, submit = shard._sink_task, shard._submit
    withheld = _Withheld(task)

    def finish_and_leave(finish: Callable[[], None]) -> object:
        return submit(lambda: (finish(), withheld.leave()))  # type: ignore[arg-type, func-returns-value]

    shard._sink_task, shard._submit = withheld, finish_and_leave  # type: ignore[assignment]
    try:
        seal(shard)
    finally:
        shard._sink_task, shard._submit = task, submit


def _rows_beyond_the_bound_forgotten(fold: Original, shard: EpochShard, piece: Piece) -> None:
    fold(shard, piece)
    if piece in shard._unanswered:
        shard._folding._pieces.pop()  # type: ignore[attr-defined]


def _first_rows_not_undone(fold: Original, shard: DeduplicateShard, rows: Any) -> Any:
    first = fold(shard, rows)
    shard.pending().parts.pop()
    return first


def _rows_held_before_forgotten(fold: Original, held: HeldRows, rows: Any) -> None:
    held._pieces.clear()
    fold(held, rows)


def _before_the_end(relay: Original, shard: FunctionShard, *more: Any) -> None:
    relay(shard, *sorted(more, key=lambda one: isinstance(one, tuple)))


def _what_came_before_the_worker_lost(attach: Original, shard: FunctionShard, worker: FunctionWorker) -> None:
    shard._waiting.clear()
    attach(shard, worker)


def _timed_out_an_epoch_late(end_epoch: Original, shard: FunctionShard, epoch: int, results: Any) -> None:
    late, vars(shard)["late"] = vars(shard).get("late", pa.table({})), results
    end_epoch(shard, epoch, late)


def _results_of_the_next_epoch_not_held(_: Original, order: ResultEpochs, epoch: int, send: Callable[[], None]) -> None:
    send()


def _last_writes_not_sealed(seal: Original, store: StateStore, facts: Any) -> None:
    store._session._writes.clear()
    seal(store, facts)


EPOCH_BUGS: dict[str, Bug] = {
    "a task that is ahead is not held back": Bug(Barrier, "take", _nothing_held_back, CALM),
    "an epoch is sealed before its last task has ended it": Bug(Barrier, "mark", _one_marker_not_waited_for, CALM),
    "the rows of an epoch are not counted": Bug(Barrier, "mark", _rows_not_compared, CALM),
    "an older run goes on in memory": Bug(EpochShard, "end", _older_runs_go_on, HARSH, first=2),
    "what an open version did is kept": Bug(VersionedTable, "abort", _open_version_kept, HARSH),
    "results leave by the task that sent the rows": Bug(EpochShard, "_fold", _results_by_any_task, CALM),
    "the results of other tasks' rows are not waited for": Bug(
        EpochShard, "mark", _results_of_others_not_waited_for, CALM, first=63
    ),
    "results leave before another shard has ended the epoch before": Bug(
        ResultEpochs, "emit", _results_of_the_next_epoch_not_held, FUNCTIONS, first=14
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
        EpochRun, "_begins_elsewhere", lambda _, run, end: False, DRIVERS, first=35
    ),
    "epochs begin two ahead of Spark's log": Bug(
        EpochRun, "_may_begin", lambda _, run: run._newest >= run._open - 2, CALM, first=10
    ),
    "an epoch begins though its run is over": Bug(EpochRun, "_check_begin", lambda _, run: None, WINDOWS, first=53),
    "an epoch counts though another driver has the query": Bug(
        StateLedger, "decide_epoch", _decided_by_anybody, DRIVERS
    ),
    "a run begins with an epoch that counts": Bug(
        StateLedger, "check_not_counted", lambda _, ledger, task: None, DRIVERS
    ),
    "another run's commits are taken for this one's": Bug(StateHistory, "batch_result", _any_run, HARSH, first=2),
    "replaced runs may commit": Bug(StateLedger, "decide_commits", owners_not_fenced, HARSH, first=59),
    "the watermark is that of one task": Bug(Barrier, "next_epoch", _watermark_of_one_task, WINDOWS),
    "the watermark waits for tasks without rows": Bug(Barrier, "next_epoch", _watermark_of_the_last_task, WINDOWS),
    "rows are late by the watermark of the version before the last": Bug(
        EpochShard, "_open", _late_by_an_older_watermark, WINDOWS
    ),
    "held rows are late by the watermark of their own epoch": Bug(HeldRows, "seal", _late_by_their_own_watermark, HELD),
    "groups are closed by the watermark of the version before": Bug(
        EpochShard, "_sealed", _closed_by_an_older_watermark, WINDOWS
    ),
    "a run begins without the watermark of its version": Bug(EpochShard, "__init__", _watermark_begun_anew, WINDOWS),
    "a run begins with a version before, and closes its groups again": Bug(
        epoch_shard, "restored", _begun_a_version_before, WINDOWS, first=9
    ),
    "what is emitted at the seal comes after the end of its epoch": Bug(
        EpochShard, "_seal", _results_after_the_commit, WINDOWS
    ),
    "held rows that are answered at the seal are forgotten": Bug(
        EpochShard, "_fold", _rows_beyond_the_bound_forgotten, HELD
    ),
    "held rows are taken in the next epoch, too": Bug(HeldRows, "abort", lambda _, held: None, HELD),
    "keys stay known of an epoch that does not count": Bug(
        DeduplicateShard, "_fold", _first_rows_not_undone, DUPLICATES
    ),
    "a session is merged without the rows that were held": Bug(HeldRows, "fold", _rows_held_before_forgotten, SESSIONS),
    "a function gets rows of the next epoch before the end of its own": Bug(
        FunctionShard, "_relay", _before_the_end, FUNCTIONS
    ),
    "what was sent before a function's worker was there is lost": Bug(
        FunctionShard, "attach", _what_came_before_the_worker_lost, FUNCTIONS
    ),
    "the results of groups that timed out leave in the next epoch": Bug(
        FunctionShard, "end_epoch", _timed_out_an_epoch_late, FUNCTIONS
    ),
    "a version is sealed without the last writes of its worker": Bug(
        StateStore, "seal", _last_writes_not_sealed, FUNCTIONS
    ),
    "a function gets rows that are late": Bug(UserTask, "on_time", lambda _, task, rows, late_ms: rows, FUNCTIONS),
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

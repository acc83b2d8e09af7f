"""Shards of a user's function in a continuous query: the function is called in a Python worker of Spark's. No Ray.

The worker has a connection for each shard (``spark_jobs/functions/epoch_worker.py``). Pieces of all tasks are relayed to it in their
order. At the end of an epoch it is told so, calls the function for keys that timed out, and commits the version as a batch does,
through a session on the keyed store. What it emits leaves as the results of other shards do (:mod:`store_actors.epochs.shard`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Protocol

import pyarrow as pa

from coordinator.model.errors import FencedError
from coordinator.runtime.runtime import Threads
from store_actors.epochs.barrier import Barrier, Marker
from store_actors.epochs.shard import Piece, RunTask
from store_actors.messages.requests import ShardInput


class FunctionWorker(Protocol):
    """The worker of a shard, at the other end of its connection. Nothing here waits, or raises anything."""

    def take(self, rows: pa.Table) -> None:
        """Have the function called for a piece's rows; :meth:`FunctionShard.emit` follows."""

    def seal(self, epoch: int, watermark_ms: int) -> None:
        """Have an epoch committed; :meth:`FunctionShard.end_epoch` follows."""

    def fail(self, error: BaseException) -> None:
        """Tell the worker why the run cannot go on."""


class FunctionShard:
    """A shard of a user's function during a run, as :class:`~store_actors.epochs.shard.EpochShard` for its tasks. Thread-safe.

    Parameters
    ----------
    first_epoch, tasks
        First epoch of the run, and the number of its tasks.
    sink_task
        The task by which results leave.
    """

    def __init__(self, first_epoch: int, tasks: int, sink_task: int, threads: Threads) -> None:
        self._guard = threads.lock()
        self._barrier = Barrier[Piece](tasks, first_epoch)
        #: The epoch whose results come from the worker.
        self._epoch = first_epoch
        self._sink_number = sink_task
        self._sink_task: RunTask | None = None
        self._worker: FunctionWorker | None = None
        #: Pieces, and ends of epochs with their watermarks, until both are there.
        self._waiting: list[Piece | tuple[int, int]] = []
        #: Pieces that the worker has, the oldest first.
        self._called: deque[Piece] = deque()
        self._failure: BaseException | None = None

    def join(self, number: int, task: RunTask) -> None:
        """Have results leave by a task, if it is the one for that; raises why the run cannot go on."""
        with self._guard:
            self._check()
            if number == self._sink_number:
                self._sink_task = task
                self._relay()

    def attach(self, worker: FunctionWorker) -> None:
        """Have the function called in a worker; raises why the run cannot go on."""
        with self._guard:
            self._check()
            self._worker = worker
            self._relay()

    def take(self, task: int, epoch: int, piece: Piece) -> None:
        """Relay a task's piece; errors as of :meth:`~store_actors.epochs.shard.EpochShard.take`."""
        with self._guard:
            self._check()
            if self._barrier.take(task, epoch, piece.rows.rows_read, piece):
                self._relay(piece)

    def mark(self, marker: Marker, task: RunTask) -> None:
        """Take the end of a task's epoch; errors as of :meth:`take`."""
        with self._guard:
            self._check()
            is_whole = self._barrier.mark(marker)
            if marker.task != self._sink_number:
                task.end_epoch(marker.epoch)
            while is_whole:
                epoch = self._barrier.epoch
                pieces, is_whole = self._barrier.next_epoch()
                self._relay((epoch, self._barrier.watermark_ms), *pieces)

    def seal(self) -> None:
        """Nothing: the worker seals an epoch that is whole."""

    def commit(self) -> None:
        """Nothing: the worker commits it."""

    def emit(self, results: pa.Table) -> None:
        """Have the results of the worker's oldest piece leave."""
        with self._guard:
            assert self._sink_task is not None, "the worker gets nothing before"
            self._sink_task.emit(self._epoch, results, self._called.popleft())

    def end_epoch(self, epoch: int, results: pa.Table) -> None:
        """Have the last results of an epoch leave."""
        with self._guard:
            assert self._sink_task is not None, "the worker gets nothing before"
            self._sink_task.emit(epoch, results, None)
            self._sink_task.end_epoch(epoch)
            self._epoch = epoch + 1

    def end(self, error: BaseException) -> None:
        """End the run here; the worker drops the open epoch."""
        with self._guard:
            if self._failure is None:
                self._failure = error
                if self._worker is not None:
                    self._worker.fail(error)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _relay(self, *more: Piece | tuple[int, int]) -> None:
        self._waiting += more
        if self._worker is None or self._sink_task is None:
            return
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if isinstance(one, Piece):
                assert isinstance(one.rows, ShardInput), "a function takes Arrow data"
                self._called.append(one)
                self._worker.take(one.rows.raw)
            else:
                self._worker.seal(*one)


class FunctionRuns:
    """The runs of this process that call users' functions. Thread-safe."""

    def __init__(self, threads: Threads) -> None:
        self._threads, self._guard = threads, threads.lock()
        #: By state and run: the shards, and the tasks that have joined.
        self._runs: dict[tuple[str, str], tuple[dict[int, FunctionShard], list[RunTask]]] = {}

    def shards(
        self, state: str, run_id: str, first_epoch: int, tasks: int, shards: Iterable[int], task: RunTask | None
    ) -> Mapping[int, FunctionShard]:
        """Return shards of a run, for a task that joins it, or for a worker (None)."""
        with self._guard:
            of_run, joined = self._runs.setdefault((state, run_id), ({}, []))
            joined += [] if task is None else [task]
            for shard in shards:
                if shard not in of_run:
                    of_run[shard] = FunctionShard(first_epoch, tasks, shard % tasks, self._threads)
            return {shard: of_run[shard] for shard in shards}

    def end(self, state: str, run_id: str, reason: str) -> None:
        """End a run, which a task or a worker has left: no further epoch can get all of its markers, or be committed."""
        with self._guard:
            shards, tasks = self._runs.pop((state, run_id), ({}, []))
        error = FencedError(
            f"the run of the query has ended: {reason}; the open epoch does not count; committed versions are safe, and the query "
            "goes on from them when it is started again",
            state=state,
            run_id=run_id,
        )
        for task in tasks:
            task.fail(error)
        for shard in shards.values():
            shard.end(error)

"""A shard in a continuous query: pieces of rows come at any time, and each epoch makes a version. No Ray.

Between two seals the next version is open in memory: each piece is folded into it, and what it changed is answered at once. At the end
of an epoch (:mod:`store_actors.epochs.barrier`) the open version is sealed: groups that the watermark has passed are closed, and the
change becomes a delta, as that of a batch. It is written and committed beside the next epoch, whose pieces are taken meanwhile.

All results of a shard leave by one of the tasks, as those of a batch do: so the sink gets the results of a key in their order. That
task ends an epoch once it has all of them, after the markers of all tasks. Where results are final only at the seal (append mode), or
the operator takes all rows of a version at once, it waits for the seal.

Spark's driver lets no epoch end before the one before it is in its commit log, and none is there before all shards have committed it.
So there is at most one commit under way, and a run that begins again finds each shard at the version that its first epoch reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from msgspec import structs

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.errors import FencedError
from coordinator.model.identities import DEFAULT_STORE, TaskIdentity
from coordinator.model.schema import StateSchema
from coordinator.model.watermarks import Watermarks
from coordinator.runtime.logs import about
from store_actors.epochs.barrier import Barrier, Marker
from store_actors.epochs.folding import Emitted, emitted_at_seal, folding_of
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import UnsafeInput
from store_actors.serving.commits import Prepared, PreparedWrite, Transaction
from store_actors.serving.operator_shards import restored, write_of
from store_actors.serving.partitions import Partitions
from store_actors.serving.sealed_version import SealedVersion

log = logging.getLogger(__name__)

#: Bytes of rows that a shard holds until the seal, after which no further piece is answered before: its sources stop.
MOST_HELD_BYTES = 1 << 26


class RunTask(Protocol):
    """A task of a run, at the other end of its connection. Nothing here waits, or raises anything."""

    def answer(self, rows: int) -> None:
        """Tell the task that a piece of some rows is in the open version, and that its results are on their way."""

    def emit(self, epoch: int, results: Emitted, piece: Piece | None) -> None:
        """Send the task an epoch's results for the sink; once its connection has taken them, the task of the piece is answered."""

    def end_epoch(self, epoch: int) -> None:
        """Answer the task's marker of a shard: nothing of the epoch follows from it."""

    def fail(self, error: BaseException) -> None:
        """Tell the task why the run cannot go on; on any thread, and more than once."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a task."""

    rows: ShardInput | UnsafeInput
    task: RunTask


class EpochShard:
    """A shard during a run of a continuous query, as the writer of its partition. Thread-safe.

    Parameters
    ----------
    task
        The shard's task of the first epoch of the run.
    grant
        The lease of that epoch; it is valid for the run.
    tasks
        Number of tasks of the run, each of which sends rows and markers once it has joined.
    submit
        Runs a function on another thread.
    ended
        Is told once why the run cannot go on here: no task learns it by itself that has nothing to send.

    Raises
    ------
    FencedError
        A newer run has the shard.
    StateStoreError
        The version that the run begins with cannot be read.
    """

    def __init__(
        self,
        partitions: Partitions,
        task: TaskIdentity,
        grant: LeaseGrant,
        schema: StateSchema,
        tasks: int,
        submit: Callable[[Callable[[], None]], object],
        ended: Callable[[BaseException], None],
    ) -> None:
        self._partitions = partitions
        self._task, self.lease, self._schema = task, grant.lease, schema
        self._submit, self._tell_ended = submit, ended
        self._watermarks = grant.watermarks
        self._barrier = Barrier[Piece](tasks, task.batch_id, grant.watermarks.input_ms)
        #: The task by which results leave; None until it has joined, and the pieces that wait for it.
        self._sink_task: RunTask | None = None
        self._unfolded: list[Piece] = []
        #: Pieces that are answered when the epoch is sealed: their tasks send no more of it before.
        self._unanswered: list[Piece] = []
        self._failure: BaseException | None = None
        #: Whether the present epoch has all markers, and whether the version before is being committed.
        self._is_whole = self._is_committing = False
        #: Commits the sealed version, until that has begun.
        self._uncommitted: Callable[[], None] | None = None
        self.used_s = 0.0
        self._partition = partitions.cache.of(self.lease.store_id)
        with self._partition.lock:
            if self._partition.writer is not None:
                self._partition.writer.end("a newer run of the query has begun", fenced=True)
            self._shard = restored(partitions, self._partition, self.lease, task.run_id, grant.base_version, schema)
            self._folding = folding_of(self._shard)
            self._open()
            self._partition.writer = self

    @property
    def task(self) -> TaskIdentity:
        """The shard's task of the present epoch."""
        return self._task

    def join(self, number: int, task: RunTask) -> None:
        """Have results leave by a task, if it is the one for that.

        Raises errors as :meth:`take`, also if the run cannot go on here.
        """
        with self._partition.lock:
            self._check()
            if self._leaves_by(number):
                self._sink_task = task
                with self._failing():
                    for piece in self._unfolded:
                        self._fold(piece)
                self._unfolded = []

    def take(self, task: int, epoch: int, piece: Piece) -> None:
        """Fold a task's piece into its epoch, before or after this returns.

        Raises
        ------
        StateStoreError
            The shard was taken over, or a commit failed: the run has to end.
        """
        with self._partition.lock:
            self._check()
            with self._failing():
                if self._barrier.take(task, epoch, piece.rows.rows_read, piece):
                    self._fold(piece)

    def mark(self, marker: Marker, task: RunTask) -> None:
        """Take the end of a task's epoch; :meth:`seal` and :meth:`commit` follow.

        Raises errors as :meth:`take`, also if other rows came than the task sent.
        """
        with self._partition.lock:
            self._check()
            with self._failing():
                is_whole = self._barrier.mark(marker)
                if not self._leaves_by(marker.task):
                    task.end_epoch(marker.epoch)
                if is_whole:
                    self._end_taking()

    def seal(self) -> None:
        """Seal the epoch if it has the markers of all tasks; errors as of :meth:`take`."""
        with self._partition.lock:
            self._check()
            with self._failing():
                self._seal_if_due()

    def commit(self) -> None:
        """Have the sealed version committed on another thread, unless that has begun."""
        with self._partition.lock:
            commit, self._uncommitted = self._uncommitted, None
        if commit is not None:
            self._submit(commit)

    def end(self, reason: str, *, fenced: bool = False) -> None:
        """Drop the open version; the partition has no writer afterwards. A commit that is under way goes on."""
        with self._partition.lock:
            if self._partition.writer is not self:
                return
            self._partition.writer = None
            self._failure = self._failure or self._ended(reason)
            self._tell_ended(self._failure)
            try:
                with self._partition.changing:
                    self._folding.abort()
            except BaseException:
                self._partition.forget()
                raise
            if self._is_committing:
                # Memory is at a version of which it is not known whether it counts.
                self._partition.forget()

    # -- with the lock ------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _leaves_by(self, task: int) -> bool:
        return task == self._task.partition_id % self._barrier.tasks

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """After an error the run cannot go on here: nothing of the open version counts."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            self.end(f"an epoch failed: {type(error).__name__}")
            raise

    def _open(self) -> None:
        """Open the version of the present epoch; rows are late by the watermark of the version before."""
        with self._partition.changing:
            self._folding.open(self._task.batch_id + 1, self._watermarks.input_ms)

    def _fold(self, piece: Piece) -> None:
        if self._sink_task is None:
            self._unfolded.append(piece)
            return
        with self._partition.changing:
            emitted = self._folding.fold(piece.rows)
        if emitted is None and self._folding.held_bytes > MOST_HELD_BYTES:
            self._unanswered.append(piece)
        elif emitted is None:
            piece.task.answer(piece.rows.rows_read)
        else:
            self._sink_task.emit(self._task.batch_id, emitted, piece)

    def _end_taking(self) -> None:
        self._is_whole = True
        if not self._folding.emits_at_seal:
            self._end_epoch()

    def _end_epoch(self) -> None:
        assert self._sink_task is not None, "an epoch has the marker of the task by which results leave"
        self._sink_task.end_epoch(self._task.batch_id)

    def _seal_if_due(self) -> None:
        """Seal the epoch if it has all markers, and go on with the next one.

        The log may have the commit before, so that Spark has ended this epoch, though its answer is not here yet: the epoch is sealed
        when it is.
        """
        while self._is_whole and not self._is_committing:
            # The watermark is that of all rows of the epoch: what it closes is not kept for one more.
            pieces, is_whole = self._barrier.next_epoch()
            self._is_whole = False
            self._seal()
            unanswered, self._unanswered = self._unanswered, []
            for piece in unanswered:
                piece.task.answer(piece.rows.rows_read)
            self._open()
            for piece in pieces:
                self._fold(piece)
            if is_whole:
                self._end_taking()

    def _seal(self) -> None:
        """Make the open version's delta; what waits for :meth:`commit` writes and commits it."""
        watermarks = self._watermarks.reached(self._barrier.watermark_ms)
        writes = {DEFAULT_STORE: partial(self._sealed, watermarks)}
        transaction = SealedVersion(self._partition, self._task, self.lease, writes)
        transaction.writer = self
        transaction.waited_ms, transaction.pieces = self._barrier.waited_ms, self._barrier.pieces
        prepared = self._partitions.commits.prepare(transaction)
        if self._folding.emits_at_seal and self._sink_task is not None:
            self._sink_task.emit(self._task.batch_id, emitted_at_seal(self._shard, transaction.change), None)
            self._end_epoch()
        self._watermarks = watermarks
        self._task = structs.replace(self._task, batch_id=self._task.batch_id + 1)
        self._is_committing = True
        self._uncommitted = partial(self._finish, transaction, prepared)

    def _sealed(self, watermarks: Watermarks) -> PreparedWrite:
        return write_of(self._shard, self._folding.seal(watermarks.input_ms), watermarks)

    # -- without the lock ---------------------------------------------------------------------------------------------

    def _finish(self, transaction: Transaction, prepared: Prepared) -> None:
        try:
            self._partitions.commits.finish(transaction, prepared)
        except BaseException as error:
            with self._partition.lock:
                self._failure = error
                self.end(f"a commit failed: {type(error).__name__}")
            log.exception("a version of an epoch was not committed", extra=about(self.lease.store_id))
        else:
            with self._partition.lock:
                self._is_committing = False
                if self._failure is None:
                    with self._failing():
                        self._seal_if_due()
            self.commit()

    def _ended(self, reason: str) -> FencedError:
        return FencedError(
            f"the run of the query has ended at this shard: {reason}; the open epoch does not count; committed versions are safe, and "
            "the query goes on from them when it is started again",
            state=self._task.state_name,
            partition=self._task.partition_id,
            run_id=self._task.run_id,
        )

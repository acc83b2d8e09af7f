"""The order of what several tasks send one shard: pieces of rows, and at the end of each epoch a marker. Pure.

Each task of a continuous query is in an epoch, and goes to the next one by itself. An epoch of a shard has all rows that its tasks sent
in it, and no others. So a shard's epoch ends when the markers of all tasks have come, and what a task sends in the next one until then
is held back: aligned barriers, as of Flink (Carbone et al., Lightweight Asynchronous Snapshots for Distributed Dataflows, 2015).

Spark's driver begins an epoch only when the one before the last is in its commit log (``EpochGate`` in ``Epochs.scala``). So no task is
ahead of a shard by more than one epoch, and what is held back is of one epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from coordinator.model.errors import OperationOutOfOrderError

Piece = TypeVar("Piece")

#: The watermark that a task without rows sends.
NEVER_MS = -(2**63)


@dataclass(frozen=True, slots=True)
class Marker:
    """The end of an epoch of a task."""

    task: int
    epoch: int
    #: Rows that the task sent the shard in the epoch.
    rows: int
    #: The watermark by the rows that the task has read in the run, in milliseconds since the epoch; :data:`NEVER_MS` without any.
    watermark_ms: int = NEVER_MS
    #: The longest that a row of the task waited for its answer in the epoch.
    waited_ms: int = 0


@dataclass(slots=True)
class Barrier(Generic[Piece]):
    """The epoch of a shard, and what its tasks sent in it."""

    #: Number of tasks of the run.
    tasks: int
    #: The epoch whose pieces are taken.
    epoch: int
    #: The watermark by the rows of all tasks, up to the epoch before.
    watermark_ms: int = NEVER_MS
    #: ``waited_ms``, ``pieces``: The longest that a row waited for its answer in the epoch before, and the number of its pieces.
    waited_ms: int = 0
    pieces: int = 0
    _taken: int = 0
    _markers: dict[int, Marker] = field(default_factory=dict)
    _rows: dict[int, int] = field(default_factory=dict)
    _held: list[tuple[int, int, Piece]] = field(default_factory=list)
    _early: dict[int, Marker] = field(default_factory=dict)

    @property
    def held(self) -> int:
        """Number of pieces that are held back."""
        return len(self._held)

    def take(self, task: int, epoch: int, rows: int, piece: Piece) -> bool:
        """Return whether a piece is of the present epoch, and is to be used now; otherwise it is held back.

        Raises
        ------
        OperationOutOfOrderError
            The task has sent its marker of that epoch, or is ahead by more than one epoch.
        """
        self._check(task, epoch)
        if epoch > self.epoch:
            self._held.append((task, rows, piece))
            return False
        self._count(task, rows)
        return True

    def mark(self, marker: Marker) -> bool:
        """Keep a marker; return whether the present epoch has those of all tasks.

        Raises errors as :meth:`take`, also if another number of rows came than the task sent.
        """
        self._check(marker.task, marker.epoch)
        if marker.epoch > self.epoch:
            self._early[marker.task] = marker
            return False
        came = self._rows.get(marker.task, 0)
        if came != marker.rows:
            raise OperationOutOfOrderError(
                "another number of rows came to a shard than its task sent in an epoch, and the epoch does not count; committed "
                "versions are safe, and the query repeats the epoch when it is started again",
                task=marker.task,
                epoch=marker.epoch,
                sent=marker.rows,
                came=came,
            )
        self._markers[marker.task] = marker
        return len(self._markers) == self.tasks

    def next_epoch(self) -> tuple[Sequence[Piece], bool]:
        """Go to the next epoch, once the present one has all markers.

        Returns
        -------
        tuple
            The pieces that were held back, in the order in which they came; and whether that epoch has all of its markers.
        """
        assert len(self._markers) == self.tasks, "an epoch ends with the markers of all tasks"
        self.watermark_ms = max([self.watermark_ms, *(marker.watermark_ms for marker in self._markers.values())])
        self.waited_ms = max(marker.waited_ms for marker in self._markers.values())
        self.epoch += 1
        self._markers, self._rows = {}, {}
        held, self._held = self._held, []
        early, self._early = self._early, {}
        self.pieces, self._taken = self._taken, 0
        for task, rows, _ in held:
            self._count(task, rows)
        is_whole = False
        for marker in early.values():
            is_whole = self.mark(marker)
        return [piece for _, _, piece in held], is_whole

    def _count(self, task: int, rows: int) -> None:
        self._rows[task] = self._rows.get(task, 0) + rows
        self._taken += 1

    def _check(self, task: int, epoch: int) -> None:
        if (
            task in (self._markers if epoch == self.epoch else self._early)
            or not 0 <= epoch - self.epoch <= 1
            or not 0 <= task < self.tasks
        ):
            raise OperationOutOfOrderError(
                "a task sent something in an epoch that it had ended, or that has not begun; the epoch does not count; committed "
                "versions are safe, and the query repeats the epoch when it is started again",
                task=task,
                epoch=epoch,
                shard_epoch=self.epoch,
            )

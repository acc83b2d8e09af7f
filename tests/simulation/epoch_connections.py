"""The connections between tasks of a continuous query and store actors, and the end of them in a store actor.

A connection is a stream each way: what was sent comes in its order, late, or not at all after the connection was lost, of which
each side learns by itself. ``store_actors/connections/epoch_stream.py`` has the bytes that frames are in; here they are values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from coordinator.model.errors import StateStoreError
from store_actors.epochs.barrier import Marker
from store_actors.epochs.folding import Emitted as Results
from store_actors.epochs.folding import emitted_table
from store_actors.epochs.result_epochs import ResultEpochs
from store_actors.epochs.runs import EpochRuns, RunRequest
from store_actors.epochs.shard import Piece
from store_actors.messages.requests import ShardInput
from tests.simulation.cluster import Life
from tests.simulation.scheduler import Party, Scheduler

if TYPE_CHECKING:
    from tests.simulation.callers import FunctionHost

#: Steps after which a side that waits learns that its connection is lost, at most.
_NOTICED_WITHIN = 60


class LostError(Exception):
    """The connection was lost."""


@dataclass(frozen=True, slots=True)
class SentPiece:
    """Rows of a shard."""

    shard: int
    epoch: int
    rows: ShardInput


@dataclass(frozen=True, slots=True)
class SentMarker:
    """The end of an epoch, with the number of rows that each shard was sent in it, and the watermark by all that the task has read."""

    epoch: int
    rows: Mapping[int, int]
    watermark_ms: int


@dataclass(frozen=True, slots=True)
class Answered:
    """So many rows of the task are in the open version."""

    rows: int


@dataclass(frozen=True, slots=True)
class Emitted:
    """Results of a shard in an epoch, which leave by this task."""

    epoch: int
    results: pa.Table


@dataclass(frozen=True, slots=True)
class Marked:
    """The answer of a shard to a marker: nothing of the epoch follows from it."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The run cannot go on; nothing follows."""

    error: BaseException


class Connection:
    """Two streams of frames, between a task and a store actor's process."""

    def __init__(self, scheduler: Scheduler, task: Party, actor: Party) -> None:
        self.scheduler = scheduler
        self._parties = {True: task, False: actor}
        #: Frames on their way, by whether they are for the task.
        self._frames: dict[bool, deque[Any]] = {True: deque(), False: deque()}
        self._is_lost = False
        self._noticed: dict[bool, bool] = {True: False, False: False}

    def send(self, frame: Any, *, to_task: bool) -> None:
        """Send a frame; where the connection is lost, it is lost, too."""
        if not self._is_lost:
            self._frames[to_task].append(frame)

    def has_news(self, *, of_task: bool) -> bool:
        """Return whether a side has a frame to take, or learns that there will be no more."""
        return bool(self._frames[of_task]) or self._noticed[of_task] or self._parties[not of_task].dead

    def take(self, *, of_task: bool) -> Any:
        """Take the next frame; None if there is none yet.

        Raises
        ------
        LostError
            No more will come.
        """
        if self._frames[of_task]:
            return self._frames[of_task].popleft()
        if self.has_news(of_task=of_task):
            raise LostError
        return None

    def close(self) -> None:
        """Lose the connection: of what is on its way, each side gets the first frames, or all."""
        if self._is_lost:
            return
        self._is_lost = True
        rng = self.scheduler.rng
        for side, frames in self._frames.items():
            for _ in range(rng.randint(0, len(frames)) if rng.random() < 0.5 else 0):
                frames.pop()
            self.scheduler.later(lambda side=side: self._notice(side), delay=rng.randrange(_NOTICED_WITHIN))  # type: ignore[misc]

    def _notice(self, side: bool) -> None:
        self._noticed[side] = True


def connect(
    scheduler: Scheduler, task: Party, life: Life, runs: EpochRuns | FunctionHost, request: RunRequest
) -> Connection:
    """Open a connection of a task, and send its request to what has the runs of a store actor."""
    connection = Connection(scheduler, task, life)
    scheduler.spawn(life, lambda: _serve(scheduler, life, connection, runs, request))
    return connection


class Link:
    """A store actor's end of a connection, as :class:`~store_actors.epochs.shard.RunTask`."""

    def __init__(self, connection: Connection, order: ResultEpochs) -> None:
        self._connection, self._order = connection, order

    def answer(self, rows: int) -> None:
        self._connection.send(Answered(rows), to_task=True)

    def emit(self, epoch: int, results: Results, piece: Piece | None) -> None:
        """Send results; the task's own piece is answered with them, that of another task later, as if they waited to be sent."""
        emitted = Emitted(epoch, emitted_table(results))
        self._order.emit(epoch, lambda: self._send(emitted, piece))

    def _send(self, emitted: Emitted, piece: Piece | None) -> None:
        self._connection.send(emitted, to_task=True)
        if piece is None:
            return
        scheduler = self._connection.scheduler
        if piece.task is self:
            self.answer(piece.rows.rows_read)
        else:
            scheduler.later(lambda: piece.task.answer(piece.rows.rows_read), delay=scheduler.rng.choice((0, 0, 0, 20)))

    def end_epoch(self, epoch: int) -> None:
        self._order.end_epoch(lambda: self._connection.send(Marked(epoch), to_task=True))

    def fail(self, error: BaseException) -> None:
        self._connection.send(Failed(error), to_task=True)


def _serve(
    scheduler: Scheduler, life: Life, connection: Connection, runs: EpochRuns | FunctionHost, request: RunRequest
) -> None:
    """Take a task's frames until the connection ends, as :class:`~store_actors.connections.epoch_stream.EpochServer`."""
    first_epoch = next(iter(request.tasks.values())).batch_id
    link = Link(connection, ResultEpochs(first_epoch, len(request.tasks), life.actor._partitions.runtime.threads))
    try:
        shards: Mapping[int, Any] = runs.join(request, link)
        try:
            while True:
                scheduler.pause(wake=lambda: connection.has_news(of_task=False))
                _take(connection, link, shards, request.task[0])
        except StateStoreError as error:
            link.fail(error)
            raise
        finally:
            runs.leave(request, shards, "a task of the run has ended")
    except LostError:
        pass
    except Exception as error:  # noqa: BLE001 - the task is told
        scheduler.log(life.name, f"ends task {request.task[0]} of run {request.run_id[:4]}: {error}")
        link.fail(error)
    finally:
        connection.close()


def _take(connection: Connection, link: Link, shards: Mapping[int, Any], task: int) -> None:
    match connection.take(of_task=False):
        case SentPiece(shard, epoch, rows):
            shards[shard].take(task, epoch, Piece(rows, link))
        case SentMarker(epoch, rows_by_shard, watermark_ms):
            for shard, rows in rows_by_shard.items():
                shards[shard].mark(Marker(task, epoch, rows, watermark_ms), link)
            for shard in rows_by_shard:
                shards[shard].seal()
            for shard in rows_by_shard:
                shards[shard].commit()

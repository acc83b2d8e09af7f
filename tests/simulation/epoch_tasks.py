"""A task of a continuous query: what ``EpochTask.scala`` does, and Spark around it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from coordinator.model.errors import OperationOutOfOrderError, StateMismatchError
from store_actors.epochs.barrier import NEVER_MS
from store_actors.epochs.runs import RunRequest
from tests.simulation.callers import Caller
from tests.simulation.epoch_connections import (
    Answered,
    Connection,
    Emitted,
    Failed,
    LostError,
    Marked,
    SentMarker,
    SentPiece,
    connect,
)
from tests.simulation.scheduler import Violation
from tests.simulation.spark import Executor
from tests.simulation.streaming import Record, by_shard
from tests.simulation.workload import Groups

if TYPE_CHECKING:
    from tests.simulation.continuous import EpochRun

#: Rows that a task reads before others may go on.
_MOST_ROWS = 4
#: Steps after which a task looks again, at most, if it is one of the slow ones.
_SLOW_STEPS = 80


class EndedError(Exception):
    """The task is to end."""


class EpochTask:
    """A task that reads a partition of the source, for as long as its run goes on.

    Parameters
    ----------
    requests
        By store actor, what the task asks it for.
    """

    def __init__(
        self, run: EpochRun, number: int, attempt: int, executor: Executor, requests: Mapping[str, RunRequest]
    ) -> None:
        self.run, self.number, self.attempt, self.executor = run, number, attempt, executor
        #: As of an attempt of a batch; see :class:`tests.simulation.spark.Attempt`.
        self.succeeded: bool | None = None
        self.given_up = False
        self._requests = requests
        self._world, self._scheduler = run.world, run.world.scheduler
        self._rng = self._scheduler.rng
        self._epoch, self._offset = run.first_epoch, run.start[number]
        #: The epoch of the rows that are read next.
        self._read_epoch = run.first_epoch
        self._connections: dict[str, Connection] = {}
        #: Of the shards whose results leave by this task, who calls a user's function.
        self._callers: list[Caller] = []
        self._actor_of = {shard: name for name, request in requests.items() for shard in request.tasks}
        self._waiting: list[Record] = []
        self._unanswered = 0
        #: Rows that each shard was sent in the epoch of the rows that are sent.
        self._sent: Counter[int] = Counter()
        #: Whether the present epoch's markers are sent, so that rows are of the next one; and how many shards of
        #: each store actor have answered them.
        self._has_marked = False
        self._marked: Counter[str] = Counter()
        #: The watermark by the rows that were read in the run.
        self._watermark_ms = NEVER_MS
        #: Results that the sink has not been given, with the epoch in which they came.
        self._results: list[tuple[int, Groups]] = []
        self._is_slow = self._rng.random() < self._world.slow_tasks
        self._looks_at = 0
        self._scheduler.spawn(executor, self._work)

    @property
    def name(self) -> str:
        return f"task {self.number} of run {self.run.id[:4]}"

    def is_over(self) -> bool:
        return self.succeeded is not None or self.executor.dead or self.given_up

    def _log(self, text: str) -> None:
        self._scheduler.log(self.executor.name, f"{self.name} {text}")

    def _work(self) -> None:
        try:
            self._connect()
            while True:
                self._check_end()
                self._scheduler.pause(wake=self._has_work)
                self._look()
        except EndedError:
            self._log("is ended")
            self.succeeded = True
        except LostError:
            self._log("loses a connection")
            self.succeeded = False
        finally:
            # Spark's reader of a task that is over ends an epoch where it is.
            if self.succeeded is not None:
                self._report()
            for connection in self._connections.values():
                connection.close()

    def _report(self) -> None:
        self.run.post(partial(self.run.offset_reported, self.number, self._read_epoch, self._offset))
        self._read_epoch += 1

    def _check_end(self) -> None:
        """End if the driver says so; where that is gone, or has given the executor up, once the executor learns it by itself. So does a
        task that has lost who calls the function.
        """
        is_unreachable = self.run.driver.dead or self.given_up
        if self._is_unwanted() and (not is_unreachable or self._rng.random() < 0.1):
            raise EndedError
        if self._has_lost_caller():
            raise LostError

    def _has_lost_caller(self) -> bool:
        return any(caller.is_lost for caller in self._callers)

    def _is_unwanted(self) -> bool:
        return self.run.is_cancelled or self.run.driver.dead

    def _connect(self) -> None:
        for name, request in self._requests.items():
            life = self._world.cluster.current[name]
            self._scheduler.pause(wake=lambda life=life: life.can_receive() or self.run.is_cancelled)  # type: ignore[misc]
            if life.dead or life.actor is None:
                raise LostError
            self._connections[name] = connect(self._scheduler, self.executor, life, self._world.runs_of(life), request)
        if self._world.stream.is_called:
            for name, request in self._requests.items():
                own = [shard for shard in request.tasks if shard % request.task[1] == self.number]
                self._callers += [Caller(self, name, request, shard) for shard in own]
            self._world.attempts += self._callers

    def open_connections(self) -> list[Connection]:
        """Return the connections of a task that goes on, and those of its workers."""
        of_callers = [caller.connection for caller in self._callers if not caller.is_over()]
        return [connection for connection in (*self._connections.values(), *of_callers) if connection is not None]

    def _has_work(self) -> bool:
        if self._has_answers():
            return True
        return self._scheduler.now >= self._looks_at and (self._available() > 0 or self.run.current_epoch > self._epoch)

    def _available(self) -> int:
        return self._world.stream.available(self.number, self._offset, self._scheduler.now)

    def _look(self) -> None:
        """Do what there is to do: take answers, read rows, send them, end the epoch if the driver has begun the next one."""
        self._receive()
        if self._scheduler.now < self._looks_at:
            return
        self._looks_at = self._scheduler.now + (self._rng.randrange(_SLOW_STEPS) if self._is_slow else 0)
        if self.run.current_epoch > self._epoch and self._rng.random() < 0.5:
            self._end_epoch()
        else:
            self._read()

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        count = min(self._available(), self._rng.randint(1, _MOST_ROWS))
        records = self._world.stream.source[self.number][self._offset : self._offset + count]
        self._waiting += records
        self._offset += count
        self._watermark_ms = max(self._watermark_ms, self._world.stream.watermark_of(records))
        if not self._unanswered:
            self._cut()

    def _cut(self) -> None:
        """Send the rows that wait, in a piece for each shard; others go on between them."""
        waiting, self._waiting = self._waiting, []
        self._unanswered += len(waiting)
        for shard, records in by_shard(self._world.stream, waiting, len(self.run.partitions)).items():
            self._sent[shard] += len(records)
            piece = SentPiece(shard, self._epoch + self._has_marked, self._world.stream.rows(records))
            self._connections[self._actor_of[shard]].send(piece, to_task=False)
            if self._rng.random() < 0.3:
                self._scheduler.pause()

    def _receive(self) -> None:
        for name, connection in self._connections.items():
            while not self._is_marked(name) and (frame := connection.take(of_task=True)) is not None:
                match frame:
                    case Answered(rows):
                        self._unanswered -= rows
                    case Emitted(epoch, results):
                        if epoch != self._epoch:
                            raise Violation(f"{self.name} is in epoch {self._epoch} and gets results of epoch {epoch}")
                        self._results.append((self._epoch, self._world.stream.results_of(results)))
                    case Marked(epoch):
                        self._marked[name] += epoch == self._epoch
                    case Failed(error):
                        self._check_failure(error)
                        raise LostError
                    case other:
                        raise Violation(f"{self.name} is in epoch {self._epoch} and is answered {other}")
        if not self._unanswered and self._waiting:
            self._cut()
        if self._rng.random() < 0.5:
            self._flush()

    def _check_failure(self, error: BaseException) -> None:
        """Tasks keep the order, a connection loses no frame before its end, and a run begins after the last epoch of Spark's log."""
        # What a driver asked before it was killed may be done late, and its epoch counts then: the next run begins again.
        is_late = self._world.has_more_drivers or "newest_epoch" in str(error)
        is_ahead = isinstance(error, StateMismatchError) and not is_late
        if isinstance(error, OperationOutOfOrderError) or is_ahead:
            raise Violation(f"{self.name}: nothing came in another order, yet: {error}") from error
        self._log(f"is refused: {type(error).__name__}")

    def _flush(self) -> None:
        """Give results to the sink."""
        results, self._results = self._results, []
        for epoch, groups in results:
            self._world.sink.write(self.run.id, self.run.first_epoch, epoch, groups)

    # -- epochs -------------------------------------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        """End the epoch in Spark: its offset first, and what was written once all is answered."""
        self._report()
        self._scheduler.pause(f"{self.name} ends epoch {self._epoch} at {self._offset}")
        self._cut()
        for connection, request in ((self._connections[name], self._requests[name]) for name in self._connections):
            rows = {shard: self._sent[shard] for shard in request.tasks}
            connection.send(SentMarker(self._epoch, rows, self._watermark_ms), to_task=False)
            self._scheduler.pause()
        self._sent.clear()
        self._has_marked = True
        while not self._is_answered():
            self._check_end()
            self._scheduler.pause(wake=self._has_answers)
            self._receive()
            if self._rng.random() < 0.5:
                self._read()
        self._flush()
        self._has_marked = False
        self._marked.clear()
        self.run.post(partial(self.run.committed, self.number, self._epoch))
        self._epoch += 1

    def _is_answered(self) -> bool:
        return all(map(self._is_marked, self._connections))

    def _is_marked(self, name: str) -> bool:
        """Return whether all shards of a store actor have ended the epoch: what it sends then is of the next one."""
        return self._marked[name] == len(self._requests[name].tasks)

    def _has_answers(self) -> bool:
        if self._is_unwanted() or self._has_lost_caller():
            return True
        connections = [connection for name, connection in self._connections.items() if not self._is_marked(name)]
        return any(connection.has_news(of_task=True) for connection in connections)

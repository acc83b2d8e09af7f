"""Python workers that call a user's function for shards of a continuous query, and the other end of their connections.

A worker is a process of its own beside its executor. The bytes that it sends, and what makes and reads them on both sides, are the
project's own; ``spark_jobs/functions/epoch_worker.py`` has what it does, and :mod:`tests.simulation.called` the function.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.errors import CorruptStateError, StateStoreError, StoreUnavailableError
from spark_jobs.functions.epoch_worker import _EpochProgram
from spark_jobs.functions.user_program import UserTask
from store_actors.client.fleet_client import FleetClient
from store_actors.client.leased_calls import _LocalHandle, local_calls
from store_actors.client.worker_client import WorkerClient
from store_actors.connections.epoch_stream import Beats, EpochServer
from store_actors.connections.function_stream import FunctionConnection
from store_actors.connections.sender import FrameSender
from store_actors.connections.worker_calls import WorkerCalls
from store_actors.epochs.functions import FunctionRuns, FunctionShard
from store_actors.epochs.runs import RunRequest
from store_actors.epochs.shard import RunTask
from store_actors.serving.metrics import StoreMetrics
from store_actors.serving.sessions import Session
from tests.simulation.called import SPECS, CountingProgram
from tests.simulation.cluster import Cluster, Handle, Life, Ref, SimulatedActors
from tests.simulation.epoch_connections import Connection, LostError
from tests.simulation.scheduler import Party, Violation

if TYPE_CHECKING:
    from tests.simulation.epoch_tasks import EpochTask

#: Steps for which a worker goes on, at most, whose task is over, or whose executor is gone.
_ENDED_WITHIN = 100


class _Bytes:
    """What comes of a connection, as a file."""

    def __init__(self, connection: Connection, *, of_task: bool) -> None:
        self._connection, self._of_task, self._waiting = connection, of_task, b""

    def read(self, size: int) -> bytes:
        """Return so many bytes, or fewer at the end."""
        has_news = partial(self._connection.has_news, of_task=self._of_task)
        try:
            while len(self._waiting) < size:
                self._connection.scheduler.pause(wake=has_news)
                self._waiting += self._connection.take(of_task=self._of_task)
        except LostError:
            pass
        read, self._waiting = self._waiting[:size], self._waiting[size:]
        return read

    def close(self) -> None:
        """Nothing: the connection is closed."""


class _Sender:
    """Sends to a worker, as :class:`~store_actors.connections.sender.FrameSender`."""

    def __init__(self, connection: Connection, life: Life) -> None:
        self._connection, self._life, self._is_over = connection, life, False

    def send(self, frame: bytes, sent: Callable[[], None] = lambda: None, *, is_last: bool = False) -> None:
        if not self._is_over and not self._life.dead:
            self._is_over = is_last
            self._connection.send(frame, to_task=True)
            sent()

    def finish(self) -> None:
        self._is_over = True


class _WorkerConnection(FunctionConnection):
    """The worker's end, of a connection that is there."""

    def __init__(self, connection: Connection, worker: Party) -> None:
        def send(frame: bytes) -> None:
            # A process that dies sends nothing on the way out.
            if not worker.dead:
                connection.send(frame, to_task=False)

        self._source, self._send, self._close = (
            cast("BinaryIO", _Bytes(connection, of_task=True)),
            send,
            connection.close,
        )
        self._early, self._is_over = deque(), False


class _ActorsAtHome(SimulatedActors):
    """The actors for a store actor's process, which calls itself, as :class:`~store_actors.client.leased_calls.LocalActors`."""

    def __init__(self, cluster: Cluster, name: str, process: Any, threads: Any) -> None:
        super().__init__(cluster)
        self._name, self._local = name, _LocalHandle(process, local_calls(threads))

    def find(self, name: str) -> Handle:
        return cast("Handle", self._local) if name == self._name else super().find(name)

    def wait(self, references: Any, timeout_s: float) -> bool:
        return not isinstance(references[0], Ref) or super().wait(references, timeout_s)

    def get(self, reference: Any, timeout_s: float | None = None) -> Any:
        return super().get(reference, timeout_s) if isinstance(reference, Ref) else reference.result()


class FunctionHost:
    """What a store actor's process has for users' functions, as :class:`~store_actors.actor.store_actor.StoreActor` makes it."""

    def __init__(self, cluster: Cluster, life: Life) -> None:
        process, self._life = life.actor, life
        runtime = process._partitions.runtime
        actors = _ActorsAtHome(cluster, life.actor_name, process, runtime.threads)
        client = FleetClient(process._coordinator, actors, runtime.clock, partial(actors.find, life.actor_name))
        self._runs = FunctionRuns(runtime.threads)
        make_calls = partial(WorkerCalls, client, process._lease, process._has)
        self._server = EpochServer(
            process.runs, self._runs, StoreMetrics(), runtime, lambda: None, make_calls, Beats(runtime)
        )

    def join(self, request: RunRequest, task: RunTask) -> Mapping[int, FunctionShard]:
        """Return the shards of a task's run, as ``EpochServer`` does for a task whose rows a function gets; errors as there."""
        (number, tasks), first = request.task, next(iter(request.tasks.values())).batch_id
        try:
            shards = self._runs.shards(request.metadata.state_name, request.run_id, first, tasks, request.tasks, task)
            for shard in shards.values():
                shard.join(number, task)
        except StateStoreError as error:
            self.leave(request, {}, f"{type(error).__name__}: {error}")
            raise
        return shards

    def leave(self, request: RunRequest, shards: Mapping[int, FunctionShard], reason: str) -> None:
        """End a run, which one of its tasks has left."""
        self._runs.end(request.metadata.state_name, request.run_id, reason)

    def serve(self, connection: Connection, asked: Mapping[str, Any]) -> None:
        """Serve a worker until its connection ends."""
        source, sender = _Bytes(connection, of_task=False), _Sender(connection, self._life)
        try:
            self._server.serve(asked, b"", cast("BinaryIO", source), cast("FrameSender", sender))
        except StateStoreError as error:
            connection.scheduler.log(self._life.name, f"ends a worker: {type(error).__name__}: {error}")
        finally:
            connection.close()


class Caller(Party):
    """A worker that calls the function for a shard, whose results leave by one of the executor's tasks.

    Attributes
    ----------
    succeeded, given_up, executor
        As of an attempt of a task.
    """

    def __init__(self, task: EpochTask, actor_name: str, request: RunRequest, shard: int) -> None:
        super().__init__(f"{task.executor.name}.worker{shard}", task.executor.node)
        self.executor, self.given_up = self, False
        self.succeeded: bool | None = None
        self.connection: Connection | None = None
        self._world, self._scheduler = task.run.world, task.run.scheduler
        self._actor_name, self._request, self._shard = actor_name, request, shard
        self._scheduler.spawn(self, self._work)
        # Spark ends it then.
        self._scheduler.later(self._end_soon, when=lambda: task.succeeded is not None or task.executor.dead)

    def is_over(self) -> bool:
        return self.succeeded is not None or self.dead

    @property
    def is_lost(self) -> bool:
        """Whether it has failed: one whose run has ended in the store actor has not."""
        return self.succeeded is False or (self.succeeded is None and self.dead)

    def _end_soon(self) -> None:
        self._scheduler.later(lambda: self._scheduler.kill(self), delay=self._scheduler.rng.randrange(_ENDED_WITHIN))

    def _work(self) -> None:
        try:
            self._serve()
            self.succeeded = True
        except CorruptStateError as error:
            raise Violation(f"{self.name}: nothing is damaged, yet: {error}") from error
        except StateStoreError as error:
            self._scheduler.log(self.name, f"fails: {type(error).__name__}: {error}")
            self.succeeded = False

    def _serve(self) -> None:
        """Do what a worker does, as ``serve`` of ``spark_jobs/functions/epoch_worker.py``."""
        life: Life = self._world.cluster.current[self._actor_name]
        self._scheduler.pause(wake=life.can_receive)
        if life.dead or life.actor is None:
            raise StoreUnavailableError("the store actor of a shard is not there")
        task, request = self._request.tasks[self._shard], self._request
        asked = {"is_worker": True, "state": task.state_name, "tasks": request.task[1], "shards": [self._shard]}
        asked["batch"] = {"run_id": task.run_id, "batch_id": task.batch_id}
        self.connection = connection = Connection(self._scheduler, self, life)
        self._scheduler.spawn(life, lambda: self._world.runs_of(life).serve(connection, asked))
        with closing(_WorkerConnection(connection, self)) as end:
            try:
                store, grant = WorkerClient(end.call).open_granted(task, request.metadata, SPECS)
                program = CountingProgram(lambda: self._note(life, grant))
                user_task = UserTask(
                    program=cast("Any", program),
                    drops_late_rows=True,
                    due_per_ms=None,
                    schema=request.schema,
                    metadata=request.metadata,
                )
                _EpochProgram(user_task, self._shard, program, store, grant).serve(end)
            except Exception as error:
                end.fail(error)
                raise

    def _note(self, life: Life, grant: LeaseGrant) -> None:
        """Note whether rows are taken while the version before is committed."""
        writer = life.actor._partitions.cache.of(grant.lease.store_id).writer
        is_committing = isinstance(writer, Session) and writer.sealed is not None and not writer.sealed.done()
        self._scheduler.fault(self.name, "called_beside_commit" if is_committing else "called")

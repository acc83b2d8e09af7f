"""A simulated Spark: drivers that run batch after batch, executors, task attempts, and the commit log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from coordinator.model.errors import CorruptStateError, StateMismatchError, StateStoreError
from coordinator.model.identities import TaskIdentity
from coordinator.placement.policies import ActorSlot
from coordinator.service.calls import unwrapped
from coordinator.service.client import CoordinatorClient
from store_actors.client.fleet_client import FleetClient
from tests.simulation.keyed import Workload
from tests.simulation.scheduler import Party, Scheduler, Violation

STATE, QUERY = "s", "query"
#: ``spark.task.maxFailures``.
_ATTEMPTS = 4
#: How often a driver's scheduler restarts its query.
_RUNS = 3


class CommitLog:
    """Spark's log of finished batches: a file a batch, written once.

    Parameters
    ----------
    query_id
        Of the checkpoint that it is in.
    """

    def __init__(self, query_id: str = QUERY) -> None:
        self.query_id = query_id
        self.finished: list[int] = []

    def newest(self) -> int:
        return self.finished[-1] if self.finished else -1

    def add(self, batch: int) -> bool:
        """Record a batch; False if another driver did already (Spark then stops the query)."""
        if batch in self.finished:
            return False
        self.finished.append(batch)
        return True


class Executor(Party):
    """A Python worker of a driver: a process with the project's client of the fleet in it."""

    def __init__(self, name: str, node: str, new_client: Callable[[], FleetClient]) -> None:
        super().__init__(name, node)
        self._new_client = new_client
        self._client: FleetClient | None = None

    def client(self) -> FleetClient:
        if self._client is None:
            self._client = self._new_client()
        return self._client


@dataclass(slots=True)
class Attempt:
    """An attempt of a task: of one shard, or of several."""

    shards: tuple[int, ...]
    number: int
    executor: Executor
    #: None while it runs.
    succeeded: bool | None = None
    #: The driver has given it up; it may go on all the same.
    given_up: bool = False

    def is_over(self) -> bool:
        return self.succeeded is not None or self.executor.dead or self.given_up


class Driver(Party):
    """A Spark driver with its query, restarted a few times when it fails.

    Parameters
    ----------
    world
        Has the cluster's address, the checkpoint (`commit_log`) and what to do when a batch is finished.
    """

    def __init__(self, world: Any, name: str) -> None:
        super().__init__(name, "node-0")
        self._world = world
        self._scheduler: Scheduler = world.scheduler
        self._workload: Workload = world.workload
        self.commit_log: CommitLog = world.commit_log
        self._lives = 0
        self.executors = [self._new_executor(node) for node in world.nodes]
        self.stopped = False
        self._shards = range(self._workload.shards)
        self._next: range | None = None
        self._coordinator: CoordinatorClient | None = None
        self._scheduler.spawn(self, self._run)

    def _new_executor(self, node: str) -> Executor:
        self._lives += 1
        return Executor(f"{self.name}.exec{self._lives}", node, self._world.new_client)

    def replace_executor(self, executor: Executor) -> None:
        """Start another process where one was lost."""
        if executor in self.executors:
            self.executors[self.executors.index(executor)] = self._new_executor(executor.node)

    def _run(self) -> None:
        for _ in range(_RUNS):
            # A user who drops a state has stopped its query.
            if self._is_replaced() or self._run_query():
                break
        self.stopped = True

    def _is_replaced(self) -> bool:
        """Return whether the state was dropped, and another query has its name."""
        return self.commit_log is not self._world.commit_log

    def _run_query(self) -> bool:
        """Run the query once; return True if there is no point in another run."""
        run_id = self._world.begin_run()
        self._scheduler.pause(f"starts run {run_id[:4]}")
        requested_shards = self._world.asked_shards()
        batch = self.commit_log.newest() + 1
        self._shards = range(self._workload.shards)
        self._next = None
        if self._world.moves_shards:
            self._place(self._shards)
        while batch < self._workload.batches:
            self._scheduler.pause(f"runs batch {batch}")
            if not self._begin(run_id, batch, requested_shards):
                return False
            if not self._run_batch(run_id, batch):
                return False
            if self._world.sink_fails():
                self._scheduler.fault(self.name, "sink_failed", f"of batch {batch}")
                return False
            self._scheduler.pause(f"records batch {batch}")
            if not self.commit_log.add(batch):
                self._scheduler.log(self.name, "stops: another driver has recorded the batch")
                return True
            self._world.batch_finished(self.commit_log, batch)
            self._report(run_id, batch)
            batch += 1
        return True

    def _begin(self, run_id: str, batch: int, requested_shards: int | None) -> bool:
        """Learn how many shards a batch has, as the driver does where it is planned; False if there is no answer."""
        if not self._world.rescales:
            return True
        if self._next is None:
            task = TaskIdentity(STATE, self.commit_log.query_id, run_id, batch, 0, 0, self.name)
            try:
                self._next = self._to_coordinator().begin_batch(task, self._workload.shards, requested_shards)
            except StateStoreError as error:
                self._scheduler.log(self.name, f"batch {batch} is not planned: {type(error).__name__}")
                return False
        if self._next != self._shards:
            self._scheduler.fault(self.name, "rescaled", f"from {self._shards} to {self._next} for batch {batch}")
        self._shards, self._next = self._next, None
        self._world.shards_of_batch(self._shards)
        return True

    def _run_batch(self, run_id: str, batch: int) -> bool:
        """Run what the user's function has Spark run of the batch, and then what it left out; return False if the query fails."""
        rng, shards = self._scheduler.rng, range(len(self._shards))
        if rng.random() >= self._world.fault_profile.partial_batches:
            return self._run_shards(run_id, batch, set(shards)) and self._settle(run_id, batch)
        # It shows some rows, writes, or fails at its sink and goes on: any number of actions, each on some of the shards.
        done: set[int] = set()
        for _ in range(rng.randint(0, 2)):
            chosen = {shard for shard in shards if rng.random() < 0.5}
            self._scheduler.log(self.name, f"acts on shards {sorted(chosen)} of batch {batch}")
            if not self._run_shards(run_id, batch, chosen):
                return False
            done |= chosen
        return self._complete(run_id, batch, set(shards) - done) and self._settle(run_id, batch)

    def _place(self, shards: range) -> None:
        """Tell the coordinator which nodes have executors, and how many standbys there shall be."""
        actors, places = self._world.actors, []
        try:
            for name in self._world.store_actor_names():
                handle = actors.find(name)
                places.append(ActorSlot(unwrapped(actors, handle, handle.location.remote()), 2))
            self._to_coordinator().place_shards(STATE, self.commit_log.query_id, shards, places, self._world.standbys)
        except (StateStoreError, RayError) as error:
            self._scheduler.log(self.name, f"shards are not placed: {type(error).__name__}")

    def _report(self, run_id: str, batch: int) -> None:
        """Tell the fleet that Spark's commit log has a batch: at once, or else beside the next one."""
        within_s = self._world.report_within_s()
        if within_s is None:
            return

        def report() -> None:
            try:
                self._to_coordinator().batch_finished([STATE], run_id, batch, within_s)
                self._world.batch_reported(run_id, batch)
            except StateStoreError as error:
                self._scheduler.log(self.name, f"batch {batch} is not reported: {type(error).__name__}")

        if within_s:
            self._scheduler.spawn(self, report)
        else:
            report()

    def _to_coordinator(self) -> CoordinatorClient:
        if self._coordinator is None:
            self._coordinator = self._world.new_coordinator_client()
        return self._coordinator

    def _settle(self, run_id: str, batch: int) -> bool:
        """Ask what the batch did, as the driver does where it is asked to: shards that are being moved may go then."""
        if not self._world.moves_shards and not self._world.rescales:
            return True
        try:
            task = TaskIdentity(STATE, self.commit_log.query_id, run_id, batch, 0, 0, self.name)
            result, _, following = self._to_coordinator().batch_result(task, self._shards)
            if self._world.rescales:
                # Another driver may have gone on from an earlier batch.
                self._next = None if result.missing else following
        except StateStoreError as error:
            self._scheduler.log(self.name, f"the end of batch {batch} fails: {type(error).__name__}")
            return False
        return True

    def _complete(self, run_id: str, batch: int, left_out: set[int]) -> bool:
        """Have the shards run that no action of the batch asked for, before the batch is recorded."""
        return self._run_shards(run_id, batch, left_out)

    def _run_shards(self, run_id: str, batch: int, shards: set[int]) -> bool:
        running = [self._launch(run_id, batch, of_task, 0) for of_task in self._tasks(sorted(shards))]
        while running:
            self._scheduler.pause(wake=lambda: any(attempt.is_over() for attempt in running))
            for attempt in [attempt for attempt in running if attempt.is_over()]:
                running.remove(attempt)
                if attempt.succeeded:
                    continue
                if attempt.number + 1 == _ATTEMPTS:
                    return False
                self.replace_executor(attempt.executor) if attempt.executor.dead else None
                running.append(self._launch(run_id, batch, attempt.shards, attempt.number + 1))
        return True

    def _tasks(self, shards: list[int]) -> list[tuple[int, ...]]:
        """Return the shards of each task: one, or several where there are more of them than cores."""
        rng = self._scheduler.rng
        if not self._workload.together or rng.random() < 0.5:
            return [(shard,) for shard in shards]
        cores = rng.randint(1, 3)
        return [tuple(shards[first::cores]) for first in range(min(cores, len(shards)))]

    def _launch(self, run_id: str, batch: int, shards: tuple[int, ...], number: int) -> Attempt:
        executor = self._scheduler.rng.choice(self.executors)
        if executor.dead:
            self.replace_executor(executor)
            executor = self._scheduler.rng.choice(self.executors)
        attempt = Attempt(shards, number, executor)
        self._world.attempts.append(attempt)
        first, attempts = self._shards.start, len(self._world.attempts)
        query_id = self.commit_log.query_id
        tasks = [
            TaskIdentity(STATE, query_id, run_id, batch, first + shard, attempts, executor.name) for shard in shards
        ]
        self._scheduler.spawn(executor, lambda: self._attempt(attempt, tasks))
        return attempt

    def _attempt(self, attempt: Attempt, tasks: Sequence[TaskIdentity]) -> None:
        batch, run_id, stamp = tasks[0].batch_id, tasks[0].run_id, len(self._world.attempts) * 1009
        form, client = self._world.forms[run_id], attempt.executor.client
        name = f"task {run_id[:4]} batch {batch} shards {attempt.shards} attempt {attempt.number}"
        try:
            metadata = self._workload.metadata(STATE, self.commit_log.query_id, form)
            self._workload.run_task(client(), tasks, metadata, stamp, form)
        except StateMismatchError as error:
            # A driver that slept while another went on gets an error: its checkpoint is of the past.
            if batch > self.commit_log.newest() and not self._world.is_other_querys_state(self.commit_log):
                raise Violation(f"{name}: no query here is strange, yet: {error}") from error
            attempt.succeeded = False
        except CorruptStateError as error:
            if self._world.is_other_querys_state(self.commit_log):
                attempt.succeeded = False
                return
            raise Violation(f"{name}: nothing is damaged, yet: {error}") from error
        except StateStoreError as error:
            self._scheduler.log(attempt.executor.name, f"{name} fails: {type(error).__name__}")
            attempt.succeeded = False
        except RayError as error:
            raise Violation(f"{name}: an error that no caller can tell from others escaped: {error!r}") from error
        else:
            self._scheduler.log(attempt.executor.name, f"{name} succeeds")
            attempt.succeeded = True

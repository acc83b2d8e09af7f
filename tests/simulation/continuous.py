"""A simulated driver of a continuous query: Spark's ``ContinuousExecution`` and its coordinator of epochs, and ``Epochs.scala``."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from msgspec import structs
from ray.exceptions import RayError

from coordinator.model.errors import StateStoreError
from coordinator.model.identities import ActorLocation, TaskIdentity
from coordinator.placement.policies import ActorSlot
from coordinator.service.calls import unwrapped
from coordinator.service.client import CoordinatorClient
from store_actors.actor.deploy import carry_out
from store_actors.epochs.runs import RunRequest
from tests.simulation.epoch_tasks import EpochTask
from tests.simulation.scheduler import Party, Scheduler
from tests.simulation.spark import STATE, Executor
from tests.simulation.streaming import Checkpoint, OffsetLog, Offsets

#: ``spark.task.maxFailures``: of runs without an epoch between them.
_FAILURES = 4
_WAIT_S = 1.0
#: Steps after which tasks learn that they are to end, at most.
_CANCELLED_WITHIN = 150


class EndedError(Exception):
    """The run has ended, and its epoch is not committed."""


class ContinuousDriver(Party):
    """A Spark driver with its query, which runs its tasks again where one fails, and where shards have moved."""

    def __init__(self, world: Any, name: str) -> None:
        super().__init__(name, "node-0")
        self.world = world
        self.scheduler: Scheduler = world.scheduler
        self.checkpoint: Checkpoint = world.commit_log
        self.commit_log = self.checkpoint
        self.offset_log = OffsetLog(self.checkpoint)
        self.stopped = False
        #: Runs, one after the other, that failed without an epoch in Spark's commit log.
        self.failures = 0
        self.wanted_shards: int | None = world.asked_shards()
        self.is_active = True
        self._lives = 0
        self.executors = [self._new_executor(node) for node in world.nodes]
        self._coordinator: CoordinatorClient | None = None
        self.scheduler.spawn(self, self._query)

    def _new_executor(self, node: str) -> Executor:
        self._lives += 1
        return Executor(f"{self.name}.exec{self._lives}", node, self.world.new_client)

    def executor(self) -> Executor:
        """Return a process for a task; one that was lost is replaced."""
        self.executors = [
            self._new_executor(executor.node) if executor.dead else executor for executor in self.executors
        ]
        return self.scheduler.rng.choice(self.executors)

    @property
    def coordinator(self) -> CoordinatorClient:
        if self._coordinator is None:
            self._coordinator = self.world.new_coordinator_client()
        return self._coordinator

    def log(self, text: str) -> None:
        self.scheduler.log(self.name, text)

    def _query(self) -> None:
        try:
            while self.is_active and not self.world.is_finished():
                first = self.checkpoint.newest() + 1
                start = self.offset_log.get(first - 1) if first else (0,) * len(self.world.stream.source)
                if start is None:
                    # Another driver is writing it. Spark refuses to start.
                    break
                run = EpochRun(self, first, start)
                self.scheduler.pause(f"begins run {run.id[:4]} with epoch {first} at {start}")
                run.run()
        except (StateStoreError, RayError) as error:
            self.log(f"the query fails: {type(error).__name__}")
        self.is_active, self.stopped = False, True


class EpochRun:
    """A run of the query's tasks: of Spark the coordinator of its epochs, of this project's JVM code ``EpochRun`` and ``EpochGate``."""

    def __init__(self, driver: ContinuousDriver, first_epoch: int, start: Offsets) -> None:
        self.driver, self.world, self.scheduler = driver, driver.world, driver.scheduler
        self.id: str = self.world.begin_run()
        self.first_epoch, self.start = first_epoch, start
        self.partitions = range(0)
        self.tasks: list[EpochTask] = []
        #: Of Spark: whether the tasks are to end, and the epoch that they are in.
        self.is_cancelled = self.is_interrupted = self._are_writes_stopped = False
        self.current_epoch = first_epoch
        self._last_committed = first_epoch - 1
        self._ends: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._commits: defaultdict[int, set[int]] = defaultdict(set)
        self._posted: deque[Callable[[], None]] = deque()
        #: Of the gate.
        self._open, self._newest = first_epoch, first_epoch - 1
        self._is_over = self._are_shards_elsewhere = False
        self._settled_places: tuple[ActorLocation | None, ...] | None = None

    @property
    def goes_on(self) -> bool:
        return not self._is_over and self.driver.is_active

    def run(self) -> None:
        """Run tasks until one fails, shards have moved, or all is done."""
        if self._complete_log():
            return
        requests = self._begin()
        for number in range(len(self.start)):
            self.tasks.append(EpochTask(self, number, number, self.driver.executor(), requests[number]))
        self.world.attempts += self.tasks
        for body in (self._answer, self._count_epochs, self._watch):
            self.scheduler.spawn(self.driver, body)
        self.scheduler.pause(wake=lambda: self.is_interrupted or not self.driver.is_active or self.world.is_finished())
        self.post(self._stop_writes)
        self.scheduler.pause(wake=lambda: self._are_writes_stopped)
        # Tasks learn it later, beside those of the next run.
        self.scheduler.later(self._cancel, delay=self.scheduler.rng.randrange(_CANCELLED_WITHIN))

    def _cancel(self) -> None:
        self.is_cancelled = True

    # -- before the first epoch ---------------------------------------------------------------------------------------

    def _task(self, epoch: int) -> TaskIdentity:
        return TaskIdentity(STATE, self.world.commit_log.query_id, self.id, epoch, 0, 0, self.driver.name)

    def _begin(self) -> list[Mapping[str, RunRequest]]:
        """Learn shards and their places; return what each task asks each store actor for."""
        planned = self.world.stream.shards
        self.partitions = self.driver.coordinator.begin_batch(
            self._task(self.first_epoch), planned, self.driver.wanted_shards
        )
        self.world.shards_of_batch(self.partitions)
        holders = self._place()
        return [self._requests(number, holders) for number in range(len(self.start))]

    def _complete_log(self) -> bool:
        """Have Spark's logs have the newest epoch that counts, with its end; return whether they were others."""
        newest = self.driver.coordinator.newest_epoch(STATE)
        if newest is None:
            return False
        epoch, end = newest[0], tuple(json.loads(newest[1]))
        if epoch != self.first_epoch and not (epoch == self.first_epoch - 1 and self._begins_elsewhere(end)):
            return False
        self.scheduler.fault(self.driver.name, "log_completed", f"with epoch {epoch}, which ends at {end}")
        self._record(epoch, end)
        return True

    def _begins_elsewhere(self, end: Offsets) -> bool:
        """Return whether Spark's log of this query has another end than the one that counts."""
        return self.start != end

    def _record(self, epoch: int, end: Offsets) -> None:
        """Have Spark's logs have an epoch that counts. Another run, which does not count, may have written another end."""
        checkpoint = self.driver.checkpoint
        self.driver.offset_log.forget(epoch)
        while not checkpoint.ends_with(epoch, end):
            self.scheduler.pause(f"replaces the end of epoch {epoch}")
            checkpoint.ends.pop(epoch, None)
            self.scheduler.pause()
            checkpoint.add_end(epoch, end)
        self.scheduler.pause(f"records epoch {epoch}")
        if checkpoint.add(epoch):
            self.world.epoch_finished(epoch)

    def _place(self) -> list[str]:
        """Return the name of each shard's store actor; all of them are on one machine."""
        actors, slots = self.world.actors, []
        for name in self.world.store_actor_names():
            handle = actors.find(name)
            slots.append(ActorSlot(unwrapped(actors, handle, handle.location.remote()), 2))
        coordinator, query = self.driver.coordinator, self.world.commit_log.query_id
        placement = coordinator.place_shards(STATE, query, self.partitions, slots, self.world.standbys)
        self._migrate(placement.moves)
        return [slots[0].location.actor_name if holder is None else holder.actor_name for holder in placement.holders]

    def _migrate(self, moves: Any) -> None:
        if moves:
            actors, coordinator = self.world.actors, self.world.new_coordinator_client()

            def carry() -> None:
                try:
                    for _ in carry_out(actors, coordinator, moves):
                        pass
                except StateStoreError as error:
                    self.driver.log(f"moves fail: {type(error).__name__}")

            self.scheduler.spawn(self.driver, carry)

    def _requests(self, number: int, holders: list[str]) -> Mapping[str, RunRequest]:
        task, stream = structs.replace(self._task(self.first_epoch), is_epoch=True), self.world.stream
        by_actor: defaultdict[str, dict[int, TaskIdentity]] = defaultdict(dict)
        for shard, (partition, name) in enumerate(zip(self.partitions, holders, strict=True)):
            by_actor[name][shard] = structs.replace(task, partition_id=partition, attempt=number)
        metadata = stream.metadata(STATE, task.query_id)
        which = number, len(self.start)
        return {name: RunRequest(metadata, stream.schema, tasks, which) for name, tasks in by_actor.items()}

    # -- Spark's coordinator of epochs: a message at a time --------------------------------------------------------------

    def post(self, message: Callable[[], None]) -> None:
        """Send a message to the coordinator of epochs."""
        self._posted.append(message)

    def _answer(self) -> None:
        while not self._are_writes_stopped:
            self.scheduler.pause(wake=lambda: bool(self._posted))
            try:
                self._posted.popleft()()
            except (EndedError, StateStoreError) as error:
                # Spark only logs what is raised here.
                self.driver.log(f"an epoch of run {self.id[:4]} is not committed: {type(error).__name__}")

    def _stop_writes(self) -> None:
        self._are_writes_stopped = True

    def _increment(self) -> None:
        self.current_epoch += 1
        self.driver.log(f"begins epoch {self.current_epoch} of run {self.id[:4]}")

    def offset_reported(self, task: int, epoch: int, offset: int) -> None:
        """A task has ended an epoch at an offset."""
        ends = self._ends[epoch]
        ends[task] = offset
        if len(ends) == len(self.start):
            self.scheduler.pause(f"writes the end of epoch {epoch}")
            self.driver.offset_log.add(epoch, tuple(ends[number] for number in range(len(self.start))))
            self._resolve(epoch)

    def committed(self, task: int, epoch: int) -> None:
        """A task has written all that it emits in an epoch."""
        self._commits[epoch].add(task)
        self._resolve(epoch)

    def _resolve(self, epoch: int) -> None:
        while (
            len(self._commits[epoch]) == len(self._ends[epoch]) == len(self.start) and self._last_committed == epoch - 1
        ):
            self._commit(epoch)
            self._last_committed = epoch
            epoch += 1

    def _commit(self, epoch: int) -> None:
        end = tuple(self._ends[epoch][number] for number in range(len(self.start)))
        self._settle(epoch)
        self._decide(epoch, end)
        self._record(epoch, end)
        self._newest = epoch
        self._report(epoch)

    def _decide(self, epoch: int, end: Offsets) -> None:
        """Have an epoch count, from here on, whatever becomes of this driver."""
        try:
            self.driver.coordinator.end_epoch(self._task(epoch), self.partitions, json.dumps(end))
        except StateStoreError:
            if self.goes_on:
                self.driver.is_active = False
            raise

    def _report(self, epoch: int) -> None:
        within_s = self.world.report_within_s()
        if within_s is None:
            return

        def report() -> None:
            try:
                self.driver.coordinator.batch_finished([STATE], self.id, epoch, within_s)
                self.world.batch_reported(self.id, epoch)
            except StateStoreError as error:
                self.driver.log(f"epoch {epoch} is not reported: {type(error).__name__}")

        self.scheduler.spawn(self.driver, report)

    # -- the gate -----------------------------------------------------------------------------------------------------

    def _may_begin(self) -> bool:
        """Return whether the next epoch may begin."""
        return self._newest >= self._open - 1

    def _is_to_reconfigure(self) -> bool:
        """Wait until the next epoch may begin; return whether shards have moved, or are others, so that the tasks have to run again.

        Raises
        ------
        EndedError
            The run is over, and the epoch never begins.
        """
        self.scheduler.pause(wake=lambda: self._may_begin() or not self.goes_on)
        self._check_begin()
        self._open += 1
        return self._are_shards_elsewhere

    def _check_begin(self) -> None:
        if not self._may_begin():
            raise EndedError

    def _count_epochs(self) -> None:
        """Spark's thread that begins epochs, and asks the gate before each."""
        with suppress(EndedError):
            while self.driver.is_active and not self.is_interrupted:
                until = self.scheduler.now + self.scheduler.rng.randrange(self.world.epoch_steps)
                self.scheduler.pause(wake=lambda until=until: self.scheduler.now >= until)  # type: ignore[misc]
                if self._is_to_reconfigure():
                    self.scheduler.fault(self.driver.name, "tasks_run_again", "as shards are elsewhere")
                    self.is_interrupted = True
                elif self.driver.is_active:
                    self._begin_epoch()

    def _begin_epoch(self) -> None:
        counted = self.current_epoch
        self.post(self._increment)
        self.scheduler.pause(wake=lambda: self.current_epoch > counted or self._are_writes_stopped)

    def _watch(self) -> None:
        """Notice a task that failed."""

        def lost() -> list[EpochTask]:
            return [task for task in self.tasks if task.is_over() and not task.succeeded]

        self.scheduler.pause(wake=lambda: bool(lost()) or self.is_cancelled)
        driver = self.driver
        if not self.goes_on or self.is_interrupted or self.is_cancelled:
            return
        self._is_over = True
        driver.failures = 1 if self._newest >= self.first_epoch else driver.failures + 1
        self.scheduler.fault(driver.name, "task_lost", lost()[0].name)
        if driver.failures < _FAILURES:
            self.is_interrupted = True
        else:
            driver.is_active = False

    def _settle(self, epoch: int) -> None:
        """Wait until all shards have committed an epoch. Once the run ends, what is under way still has a moment."""
        try:
            was_active = True
            while not self._is_settled(epoch):
                if not was_active:
                    raise EndedError
                was_active = self.goes_on
        except StateStoreError:
            if self.goes_on:
                self.driver.is_active = False
            raise

    def _is_settled(self, epoch: int) -> bool:
        result, placement, following = self.driver.coordinator.batch_result(self._task(epoch), self.partitions, _WAIT_S)
        if result.missing:
            return False
        self._migrate(placement.moves)
        if len(following) != len(self.partitions):
            self.driver.wanted_shards = len(following)
        moved = self._settled_places not in (None, placement.holders)
        self._are_shards_elsewhere = following != self.partitions or moved
        self._settled_places = placement.holders
        return True

"""The runs of continuous queries that have shards in this process. No Ray.

The tasks of a run each have a connection here. The first one opens the run's shards, under leases for all of the run. Where a task's
connection ends, the run is over: no further epoch can get all of its markers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.errors import FencedError
from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.runtime.runtime import Runtime
from store_actors.epochs.shard import EpochShard, RunTask
from store_actors.serving.partitions import Partitions
from store_actors.serving.sealed_version import COMMITS_AT_ONCE

#: Gives the leases of some shards of a run.
Lease = Callable[[Sequence[TaskIdentity], StateMetadata], Sequence[LeaseGrant]]


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What each task of a run says first."""

    metadata: StateMetadata
    schema: StateSchema
    #: The shards' tasks of the run's first epoch, by shard: those whose shards are in this process.
    tasks: Mapping[int, TaskIdentity]
    #: The number of the task that asks, and how many the run has.
    task: tuple[int, int]

    @property
    def run_id(self) -> str:
        return next(iter(self.tasks.values())).run_id


@dataclass(slots=True)
class _Run:
    #: A future of its shards by number.
    opened: Any
    #: The tasks that have joined.
    tasks: list[RunTask] = field(default_factory=list)

    def tell_ended(self, why: BaseException) -> None:
        for task in self.tasks:
            task.fail(why)


class EpochRuns:
    """The runs of this process. Thread-safe.

    Parameters
    ----------
    is_here
        Whether a lease is of this process.
    """

    def __init__(
        self, partitions: Partitions, lease: Lease, is_here: Callable[[LeaseGrant], bool], runtime: Runtime
    ) -> None:
        self._partitions, self._lease, self._is_here = partitions, lease, is_here
        self._commits = runtime.threads.pool(COMMITS_AT_ONCE, "statefleet-epoch")
        self._new_future = runtime.threads.future
        self._guard = runtime.threads.lock()
        #: By state and run.
        self._runs: dict[tuple[str, str], _Run] = {}

    def join(self, request: RunRequest, task: RunTask) -> Mapping[int, EpochShard]:
        """Return the open shards of a task's run; the first task opens them, and the others wait for that.

        Raises
        ------
        FencedError
            A newer run has the shards, or one of them is in another process.
        StateStoreError
            A shard cannot be leased or read.
        """
        key = request.metadata.state_name, request.run_id
        with self._guard:
            is_first = key not in self._runs
            if is_first:
                self._runs[key] = _Run(self._new_future())
            run = self._runs[key]
            run.tasks.append(task)
        if is_first:
            try:
                run.opened.set_result(self._opened(request, run))
            except BaseException as error:  # noqa: BLE001 - raised in the thread of each task
                run.opened.set_exception(error)
        shards: Mapping[int, EpochShard] = run.opened.result()
        for shard in shards.values():
            # It may have ended before this task was to be told: that is raised.
            shard.join(request.task[0], task)
        return shards

    def _opened(self, request: RunRequest, run: _Run) -> Mapping[int, EpochShard]:
        shards: dict[int, EpochShard] = {}
        grants = self._lease(list(request.tasks.values()), request.metadata)
        try:
            for (shard, task), grant in zip(request.tasks.items(), grants, strict=True):
                check_is_here(task, grant, self._is_here)
                shards[shard] = EpochShard(
                    self._partitions, task, grant, request.schema, request.task[1], self._commits.submit, run.tell_ended
                )
        except BaseException:
            for opened in shards.values():
                opened.end("another shard of the run could not be opened")
            raise
        return shards

    def leave(self, request: RunRequest, shards: Mapping[int, EpochShard], reason: str) -> None:
        """End a run, which one of its tasks has left: the open epoch does not count.

        Parameters
        ----------
        shards
            What the task got as it joined. A task that comes late may have opened others since.
        """
        key = request.metadata.state_name, request.run_id
        with self._guard:
            run = self._runs.get(key)
            if (
                run is not None
                and run.opened.done()
                and run.opened.exception() is None
                and run.opened.result() is shards
            ):
                del self._runs[key]
        for shard in shards.values():
            shard.end(reason)


def check_is_here(task: TaskIdentity, grant: LeaseGrant, is_here: Callable[[LeaseGrant], bool]) -> None:
    """Raise FencedError unless the lease of a run's shard is of this process."""
    if not is_here(grant):
        raise FencedError(
            "a shard of the query is at another store actor than was planned; nothing was changed; the run begins again",
            state=task.state_name,
            partition=task.partition_id,
            store_actor=grant.lease.location.actor_name,
        )

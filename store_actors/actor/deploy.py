"""Deployment of store actors on Ray: names, placement and every option with its reason; and what people ask of all of them.

Among that is live migration of shards: the target takes a copy, then the coordinator gives it the lease.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from msgspec import structs
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coordinator.model.errors import StateStoreError
from coordinator.model.leases import CopyResult
from coordinator.model.maintenance import Maintenance
from coordinator.model.memory_options import MemoryOptions
from coordinator.model.names import dashboard_name, store_actor_name
from coordinator.placement.lease_plans import PlannedMove
from coordinator.runtime.runtime import Threads
from coordinator.service.calls import NAMESPACE, RayActors, unwrapped
from coordinator.service.client import CoordinatorClient
from coordinator.storage.options import Secrets, StorageOptions

log = logging.getLogger(__name__)

#: Shards of one node that are worked on at once; more requests queue. Kernels and Arrow release the GIL, so threads
#: use all cores of a node.
_THREADS = 16

#: Cores of a node that share one store actor, unless the user says how many it shall have. Python's lock lets a process that has many
#: small batches keep one core busy, and one that has large batches many (docs/performance.md); the task of a small batch
#: costs Spark's own processes several times what it costs the store actor.
CORES_EACH = 8

#: Moves that are under way at once: each needs room for a copy of a shard.
_AT_ONCE = 4


def actors_for(cores: int) -> int:
    """Return the number of store actors that keep a node of `cores` cores busy."""
    return max(1, -(-cores // CORES_EACH))


def ensure_store_actor(
    actors: RayActors,
    uri: str,
    storage_options: StorageOptions,
    maintenance: Maintenance,
    node_id: str,
    memory: MemoryOptions,
    number: int = 0,
) -> Any:
    """Return the handle of a store actor of the node. It is started with these options if it is not there."""
    name = store_actor_name(uri, node_id, number)
    handle = actors.find(name)
    return handle or deploy_store_actor(name, uri, storage_options, maintenance, node_id, memory)


def deploy_store_actor(
    name: str,
    uri: str,
    storage_options: StorageOptions,
    maintenance: Maintenance,
    node_id: str,
    memory: MemoryOptions,
) -> Any:
    """Return the handle of a store actor on a node. It is started if there is none of this name.

    Ray keeps the arguments of actors, so these have no credentials.
    """
    # Late: the engine takes seconds to import, and most callers only look the actor up.
    from store_actors.actor.store_actor import StoreActor

    # A ping must be answered while all threads work; so must a store actor that takes partitions, or two that take from each other
    # would wait for ever. Readers wait for each other only.
    remote = ray.remote(concurrency_groups={"control": 1, "transfers": 4, "reading": 8})(StoreActor)  # type: ignore[call-overload]
    actor = remote.options(
        name=name,
        namespace=NAMESPACE,
        # State must outlive the Spark driver that caused it to be loaded.
        lifetime="detached",
        get_if_exists=True,
        # A restarted actor starts empty and reads its shards from storage when they are asked for.
        max_restarts=-1,
        # A repeated call is ours to decide: the shard may have moved meanwhile.
        max_task_retries=0,
        # Executors have reserved the node's cores; the fleet shares them instead of waiting for free ones.
        num_cpus=0,
        max_concurrency=_THREADS,
        # Hard: Ray puts an actor that asks for a node softly, and for no resource, anywhere. With its node it is gone for good, and its
        # shards go to others.
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
    )
    return actor.remote(name, uri, storage_options, maintenance, memory)


def store_metrics(actors: RayActors, status: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the counters of the store actors that a status lists as alive, by actor name."""
    names = sorted({actor["actor_name"] for actor in status["store_actors"] if actor["alive"]})
    handles = {name: actors.find(name) for name in names}
    return {name: actors.get(handle.metrics.remote()) for name, handle in handles.items() if handle is not None}


def forward_credentials(actors: RayActors, status: Mapping[str, Any], secrets: Secrets) -> None:
    """Forward credentials that the coordinator has accepted to the store actors that a status lists as alive.

    A store actor that starts later asks the coordinator. So does one that cannot be reached now, once Ray has restarted it.
    """
    for name in sorted({actor["actor_name"] for actor in status["store_actors"] if actor["alive"]}):
        handle = actors.find(name)
        if handle is None:
            continue
        try:
            unwrapped(actors, handle, handle.use_credentials.remote(secrets))
        except RayActorError as error:
            log.warning("store actor %s is lost; its next life asks for the credentials: %s", name, error)


def end_store_actors(actors: RayActors, coordinator: CoordinatorClient, node_id: str) -> None:
    """Kill the store actors of a node for good, if there are any. Their shards go to other store actors with the next lease."""
    for actor in coordinator.status()["store_actors"]:
        if actor["node_id"] == node_id and actor["alive"]:
            handle = actors.find(actor["actor_name"])
            if handle is not None:
                actors.kill(handle, restart=False)
            coordinator.report_store_actor_lost(actor["instance_id"])


def end_fleet(actors: RayActors, coordinator: CoordinatorClient) -> None:
    """Kill a fleet's dashboard and store actors, then its coordinator, for good."""
    status = coordinator.status()
    dashboard = actors.find(dashboard_name(status["uri"]))
    if dashboard is not None:
        actors.kill(dashboard, restart=False)
    for actor in status["store_actors"]:
        handle = actors.find(actor["actor_name"])
        if handle is None:
            log.info("store actor %s is gone already", actor["actor_name"])
        else:
            actors.kill(handle, restart=False)
    coordinator.shut_down()


@dataclass(frozen=True, slots=True)
class MoveOutcome:
    """The outcome of a move."""

    move: PlannedMove
    #: What the target copied; None if it copied nothing.
    copy_result: CopyResult | None
    #: Why the shard stays where it is; empty if it goes, with the next batch.
    error: str = ""


def carry_out(actors: RayActors, coordinator: CoordinatorClient, moves: Sequence[PlannedMove]) -> Iterator[MoveOutcome]:
    """Move shards, some at a time, and yield each outcome; batches go on meanwhile.

    A move that fails leaves its shard where it is, and the other moves go on. The state's log has the reason.
    """
    for begin in range(0, len(moves), _AT_ONCE):
        group = moves[begin : begin + _AT_ONCE]
        for move, started in [(move, _begun(actors, coordinator, move)) for move in group]:
            outcome = _ended(actors, coordinator, move, started)
            if outcome.error:
                _log_failure(coordinator, outcome)
            yield outcome


def _begun(actors: RayActors, coordinator: CoordinatorClient, move: PlannedMove) -> tuple[Any, Any] | str:
    """Begin a move; return the handle of its target and the pending answer, or the reason why nothing was begun."""
    try:
        handle = actors.find(move.target.actor_name)
        if handle is None:
            return "the store actor that was to have the shard is gone"
        # Its own partition, also where the state was rescaled since the move was planned.
        store_id = structs.replace(
            coordinator.locate(move.state_name, move.shard).store_id, partition_id=move.partition_id
        )
        return handle, handle.take_copy.remote(store_id, move.source.actor_name)
    except (StateStoreError, RayError) as failure:
        return f"{type(failure).__name__}: {failure}"


def _ended(
    actors: RayActors, coordinator: CoordinatorClient, move: PlannedMove, started: tuple[Any, Any] | str
) -> MoveOutcome:
    if isinstance(started, str):
        return MoveOutcome(move, None, started)
    copy_result: CopyResult | None = None
    try:
        copy_result = unwrapped(actors, *started)
        if coordinator.move_prepared(move, copy_result):
            return MoveOutcome(move, copy_result)
        error = "the shard is given to another store actor by now, or the one that was to have it was lost or its node drained"
    except (StateStoreError, RayError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return MoveOutcome(move, copy_result, error)


def _log_failure(coordinator: CoordinatorClient, outcome: MoveOutcome) -> None:
    move = outcome.move
    log.warning(
        "shard %d of %s stays where it is, and its batches go on: %s",
        move.shard,
        move.state_name,
        outcome.error,
        extra={"state": move.state_name, "shard": move.shard, "actor": move.source.actor_name},
    )
    try:
        coordinator.move_failed(move, outcome.error)
    except (StateStoreError, RayError) as failure:  # the caller gets the outcome all the same
        log.warning("the log of %s does not say so: %s: %s", move.state_name, type(failure).__name__, failure)


class LiveMigration:
    """Carries out the moves of one fleet, in a thread that ends with them."""

    def __init__(self, coordinator: CoordinatorClient) -> None:
        self._coordinator = coordinator
        self._threads = Threads()
        self._guard = self._threads.lock()
        #: Shards whose move is running: until it ends, the same move is planned repeatedly.
        self._moving: set[tuple[str, int]] = set()

    def begin(self, moves: Sequence[PlannedMove]) -> None:
        """Begin to move the shards that are not being moved."""
        with self._guard:
            new = [move for move in moves if _shard(move) not in self._moving]
            self._moving.update(map(_shard, new))
        if new:
            # It ends with the process: the driver can stop without waiting for moves, which only make batches faster.
            self._threads.start(partial(self._carry_out, new), "statefleet-moves")

    def _carry_out(self, moves: Sequence[PlannedMove]) -> None:
        try:
            for outcome in carry_out(RayActors(), self._coordinator, moves):
                with self._guard:
                    self._moving.discard(_shard(outcome.move))
        except Exception:  # no caller gets the error of a thread
            log.exception("shards could not be moved; they stay where they are, and their batches go on")
        finally:
            with self._guard:
                self._moving.difference_update(map(_shard, moves))


def _shard(move: PlannedMove) -> tuple[str, int]:
    return move.state_name, move.partition_id

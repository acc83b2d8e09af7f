"""What Spark's JVM asks on the driver (where shards shall be, what a batch did, which shards it left out), and what it tells."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray
from pyspark.sql import SparkSession
from ray.exceptions import RayError

from coordinator.ledger.batch_stats import BatchResult
from coordinator.ledger.rescaling import BatchShards
from coordinator.model.errors import StateMismatchError, StateStoreError
from coordinator.model.identities import TaskIdentity
from coordinator.service.calls import RayActors
from coordinator.service.client import CoordinatorClient
from coordinator.service.deploy import coordinator_name
from spark_jobs.finished_batches import FinishedBatches
from spark_jobs.nodes.executor_nodes import ExecutorNodes
from spark_jobs.nodes.live_migration import ShadowMoves
from spark_jobs.nodes.node_watch import NodeWatch, WatchedFleet
from spark_jobs.plan.executors import Executors
from spark_jobs.worker.fleet_client import FleetAddress

__all__ = ["DriverCalls", "PlacementOptions"]

log = logging.getLogger(__name__)


class PlacementOptions(NamedTuple):
    """How a driver wants its shards placed; see :func:`spark_jobs.fleet.connect`.

    `policy` is the name of one, or a pickled one.
    """

    standbys: int = 0
    store_actors_per_node: int | None = None
    policy: str | bytes = "balance"


class _Fleet(NamedTuple):
    coordinator: CoordinatorClient
    nodes: ExecutorNodes
    moves: ShadowMoves
    finished: FinishedBatches
    options: PlacementOptions


class DriverCalls:
    """Answers the calls of ``spark_jobs/plan/java/Driver.java`` for the fleets of this driver."""

    def __init__(self) -> None:
        self._fleets: dict[str, _Fleet] = {}
        self._watches: dict[str, NodeWatch] = {}
        #: By run its query's id, and the states that it has begun to write.
        self._writers: dict[str, tuple[str, set[tuple[str, str]]]] = {}

    def watch(self, spark: SparkSession) -> None:
        """Look after the nodes of a session's application, once."""
        application = spark.sparkContext.applicationId
        if application not in self._watches:
            # Of an earlier one nothing is left.
            self._watches = {application: NodeWatch(Executors(spark), self._living)}
            self._watches[application].start()

    def _living(self) -> list[WatchedFleet]:
        return [WatchedFleet(one.coordinator, one.moves) for one in self._running()]

    def _running(self) -> list[_Fleet]:
        # Whoever asked a fleet that was shut down would start it anew.
        return [one for uri, one in list(self._fleets.items()) if RayActors().find(coordinator_name(uri)) is not None]

    def add(self, address: FleetAddress, coordinator: CoordinatorClient, options: PlacementOptions) -> None:
        """Know a fleet."""
        known = self._fleets.get(address.uri)
        if known is None or (known.coordinator, known.options) != (coordinator, options):
            nodes, moves = ExecutorNodes(address, options.store_actors_per_node), ShadowMoves(coordinator)
            self._fleets[address.uri] = _Fleet(coordinator, nodes, moves, FinishedBatches(coordinator), options)

    def answer(self, told: str) -> str:
        """What the exchange of an operator is told, and who hears of finished batches and ended runs.

        Parameters
        ----------
        told
            JSON: ``asked`` (``start``, ``begin``, ``place``, ``settle``, ``finished`` or ``ended``), ``operator`` (what the route
            column says), ``query_id``, ``run_id``, ``batch_id``, ``time_ms`` and ``former_time_ms`` of the batch; to begin it, with how
            many ``shards`` its query was built; else, how many it has, and the ``first_partition`` of these; to place, ``executors``:
            ``cores`` by host, how many are ``present`` and were ``asked`` for. Of a batch that is ``finished`` its ``run_id`` and
            ``batch_id``, the ``states`` of the query by fleet, and whether their logs must have it ``at_once``; of a run that has ended
            only its ``run_id``. Of a query that is to start its ``query_id``, null for a new one, whether it ``has_checkpoint`` that a
            later start finds, and its ``operators``: ``uri``, ``state`` and, where it is the query's, output ``mode``. To start and to
            begin also the ids of queries that are ``active``.

        Returns
        -------
        str
            JSON: of a query that is to start or to begin why it is ``refused``, if it is. Of a batch that begins its ``shards`` and
            ``first_partition``. Else ``hosts``, one a shard, null for one that may be anywhere. Of a batch that is settled also
            ``missing``, shards that have not committed it, the ``next`` batch's shards, and figures, by the names of
            ``StatefulExchangeExec.java``.
        """
        try:
            batch = json.loads(told)
            if batch["asked"] == "begin":
                return json.dumps(self._begun(batch))
            if batch["asked"] == "start":
                return json.dumps({"refused": self._refusal(batch)})
            if batch["asked"] == "finished":
                self._finished(batch)
                return json.dumps({})
            if batch["asked"] == "ended":
                self._ended(batch["run_id"])
                return json.dumps({})
            if batch["asked"] == "place":
                return json.dumps({"hosts": self._placed(batch)})
            return json.dumps(self._settled(batch))
        except BaseException:
            # Py4J shows the other side of an error of Python's badly.
            log.exception("the exchange of an operator could not be answered: %s", told)
            raise

    def _begun(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        operator = batch["operator"]
        if refused := self._taken(operator, batch["query_id"], batch["active"]):
            return {"refused": refused}
        _, states = self._writers.setdefault(batch["run_id"], (batch["query_id"], set()))
        states.add((operator["uri"], operator["state"]))
        shards = self._fleets[operator["uri"]].coordinator.begin_batch(
            _task(batch), batch["shards"], operator["shards"]
        )
        return {"shards": shards.num_shards, "first_partition": shards.first_partition}

    def _refusal(self, query: Mapping[str, Any]) -> str | None:
        """Why a query may not start on the states of its operators."""
        for run_id, (owner, _) in list(self._writers.items()):
            # Spark's listeners may not have heard of it yet.
            if owner not in query["active"]:
                self._ended(run_id)
        for operator in query["operators"]:
            if taken := self._taken(operator, query["query_id"], query["active"]):
                return taken
            coordinator = self._fleets[operator["uri"]].coordinator
            try:
                coordinator.check_start(operator["state"], query["query_id"] or "", operator["mode"])
            except StateMismatchError as error:
                if query["has_checkpoint"]:
                    return str(error)
                return (
                    "the query has no checkpointLocation, so each start of it is a new query, and the state belongs to an earlier "
                    "one; nothing was started; give it a checkpointLocation, with which it goes on when it is started again, and a "
                    f"name that no state has yet ({error})"
                )
        return None

    def _taken(self, operator: Mapping[str, Any], query_id: str | None, active: Sequence[str]) -> str | None:
        """Why a query may not have the state of an operator, if another one that runs in this program writes it."""
        state = operator["uri"], operator["state"]
        for owner, states in list(self._writers.values()):
            if state in states and owner != query_id and owner in active:
                return (
                    "another query that is running has this state, and a state is one query's; nothing was changed; stop the other "
                    "one, or give each a name of its own; for two sinks of one result, write both in one foreachBatch "
                    f"[state=`{operator['state']}` running_query_id=`{owner}`]"
                )
        return None

    def _finished(self, batch: Mapping[str, Any]) -> None:
        for uri, names in batch["states"].items():
            finished = self._fleets[uri].finished
            report = finished.report_now if batch["at_once"] else finished.report
            report(batch["run_id"], batch["batch_id"], names)

    def _ended(self, run_id: str) -> None:
        """Nobody writes by the run any more; its shards stay in memory for the next one."""
        self._writers.pop(run_id, None)
        if ray.is_initialized():
            for fleet in self._running():
                fleet.finished.end(run_id)
                fleet.coordinator.deactivate_instances(run_id)

    def _placed(self, batch: Mapping[str, Any]) -> Sequence[str | None]:
        operator = batch["operator"]
        fleet, executors = self._fleets[operator["uri"]], batch["executors"]
        if executors["present"] < executors["asked"]:
            # RayDP does not start every lost one anew: nobody should wait for it in silence.
            log.warning(
                "Spark has %d of the %d executors that it was started with: %s; others are asked for once nodes have room for them",
                executors["present"],
                executors["asked"],
                "batches go on, and their nodes have all shards" if executors["present"] else "batches wait for one",
            )
        try:
            slots = fleet.nodes.slots(executors["cores"])
            found = fleet.coordinator.place_shards(
                operator["state"],
                batch["query_id"],
                _shards(batch),
                slots,
                fleet.options.standbys,
                fleet.options.policy,
            )
            fleet.moves.begin(found.moves)
            return fleet.nodes.hosts(found.nodes)
        except (StateStoreError, RayError) as error:  # without places a batch is slower, and no less right
            log.warning(
                "the shards of %s are not placed, and its tasks run anywhere until executors change: %s: %s",
                operator["state"],
                type(error).__name__,
                error,
            )
            return []

    def _settled(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        operator = batch["operator"]
        fleet = self._fleets[operator["uri"]]
        result, following, shards = fleet.coordinator.batch_result(_task(batch), _shards(batch))
        fleet.moves.begin(following.moves)
        for watch in self._watches.values():
            watch.batch_ended()
        return {
            **_figures(result, batch["shards"]),
            "hosts": fleet.nodes.hosts(following.nodes),
            "next": {"shards": shards.num_shards, "first_partition": shards.first_partition},
        }


def _shards(batch: Mapping[str, Any]) -> BatchShards:
    return BatchShards(batch["first_partition"], batch["shards"])


def _task(batch: Mapping[str, Any]) -> TaskIdentity:
    """Whoever asks for a batch as a whole."""
    return TaskIdentity(
        state_name=batch["operator"]["state"],
        query_id=batch["query_id"],
        run_id=batch["run_id"],
        batch_id=batch["batch_id"],
        partition_id=0,
        attempt=0,
        executor="driver",
        batch_time_ms=batch["time_ms"],
        former_time_ms=batch.get("former_time_ms"),
    )


def _figures(result: BatchResult, shards: int) -> dict[str, Any]:
    return {
        "missing": list(result.missing),
        "rows_total": result.rows_total,
        "rows_updated": result.rows_updated,
        "rows_removed": result.rows_removed,
        "rows_late": result.rows_late,
        "memory_bytes": result.memory_bytes,
        "updates_ms": result.updates_ms,
        "removals_ms": 0,  # what expires is removed with the updates
        "commit_ms": result.commit_ms,
        "instances": shards,
        "due_ms": result.due_ms,
        "custom": {"rowsRead": result.rows_in, "deltaBytes": result.delta_bytes},
    }

"""Answers to calls from Spark's JVM on the driver: hosts of shards, results of batches, finished batches, ended runs."""

from __future__ import annotations

import base64
import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from pyspark.sql import SparkSession
from ray.exceptions import RayError

from coordinator.model.errors import StateMismatchError, StateStoreError
from coordinator.model.identities import ActorLocation, TaskIdentity
from coordinator.model.names import store_actor_number
from coordinator.service.calls import RayActors
from coordinator.service.client import CoordinatorClient
from coordinator.service.deploy import coordinator_name
from spark_jobs.driver.lineage import open_lineage
from spark_jobs.nodes.executor_nodes import ExecutorNodes
from spark_jobs.nodes.node_watch import NodeWatch, WatchedFleet
from spark_jobs.plan.executors import Executors
from spark_jobs.plan.operator_plan import requested_state
from store_actors.actor.deploy import LiveMigration
from store_actors.client.fleet_client import FleetAddress
from store_actors.connections.direct_calls import DirectAddress

if TYPE_CHECKING:
    from spark_jobs.driver.lineage_events import QueryLineage

log = logging.getLogger(__name__)

#: Seconds for which a report may wait to be written with the records of the next batch.
_WITHIN_S = 1.0


class PlacementOptions(NamedTuple):
    """Options of the placement of a driver's shards; see :func:`statefleet.fleet.connect`.

    `policy` is the name of a placement policy.
    """

    standbys: int = 0
    store_actors_per_node: int | None = None
    policy: str = "balance"


class _Report(NamedTuple):
    run_id: str
    batch_id: int
    state_names: Sequence[str]


class _FinishedBatches:
    """Reports of a fleet: one at a time for each run, repeated while the coordinator restarts, until the states' logs have it."""

    def __init__(self, coordinator: CoordinatorClient) -> None:
        self._coordinator = coordinator
        self._guard = threading.Lock()
        #: By run, the newest report that a thread sends or will send.
        self._newest: dict[str, _Report] = {}

    def report(self, report: _Report, *, at_once: bool) -> None:
        """Report a finished batch: from a thread, or `at_once`, which returns once the logs have it."""
        if at_once:
            self._send(report, 0.0)
            return
        run_id = report.run_id
        with self._guard:
            is_busy = run_id in self._newest
            self._newest[run_id] = report
        if not is_busy:
            # A daemon: a batch that it could not report is proven finished by the next batch or run.
            threading.Thread(target=self._run, args=(report,), name="statefleet-finished", daemon=True).start()

    def end(self, run_id: str) -> None:
        """Send the open report of a run, and return once the logs have it."""
        with self._guard:
            report = self._newest.get(run_id)
        if report is not None:
            self._send(report, 0.0)

    def _run(self, report: _Report) -> None:
        while True:
            self._send(report, _WITHIN_S)
            with self._guard:
                newest = self._newest[report.run_id]
                if newest is report:
                    del self._newest[report.run_id]
                    return
            report = newest

    def _send(self, report: _Report, within_s: float) -> None:
        try:
            self._coordinator.batch_finished(report.state_names, report.run_id, report.batch_id, within_s)
        except (StateStoreError, RayError) as error:
            # The batch is finished even if readers do not see it.
            log.warning(
                "batch %d of %s is finished, and the fleet could not be told; readers see it once the next one has begun: %s: %s",
                report.batch_id,
                ", ".join(report.state_names),
                type(error).__name__,
                error,
            )


class _Fleet(NamedTuple):
    coordinator: CoordinatorClient
    nodes: ExecutorNodes
    migration: LiveMigration
    finished: _FinishedBatches
    options: PlacementOptions


class DriverCalls:
    """Answers the calls of ``Run.scala`` for the fleets of this driver."""

    def __init__(self) -> None:
        self._fleets: dict[str, _Fleet] = {}
        self._watches: dict[str, NodeWatch] = {}
        #: By run, the id of its query and the states (fleet and name) that it has begun to write.
        self._writers: dict[str, tuple[str, set[tuple[str, str]]]] = {}
        self._lineage: QueryLineage | None = None

    def follow(self) -> bool:
        """Begin to send the lineage of queries if that is configured; return whether it is sent."""
        if self._lineage is None:
            self._lineage = open_lineage()
        return self._lineage is not None

    def watch(self, spark: SparkSession) -> None:
        """Begin to watch the nodes of a session's application; a second call has no effect."""
        application = spark.sparkContext.applicationId
        if application not in self._watches:
            # An earlier application has ended.
            self._watches = {application: NodeWatch(Executors(spark), self._watched_fleets)}
            self._watches[application].start()

    def _watched_fleets(self) -> list[WatchedFleet]:
        written = {uri for _, states in list(self._writers.values()) for uri, _ in list(states)}
        return [
            WatchedFleet(fleet.coordinator, fleet.migration, fleet.nodes if uri in written else None)
            for uri, fleet in self._running().items()
        ]

    def _running(self) -> dict[str, _Fleet]:
        """Return the fleets that have not been shut down, by URI: a call to one that was would start it again."""
        return {
            uri: fleet
            for uri, fleet in list(self._fleets.items())
            if RayActors().find(coordinator_name(uri)) is not None
        }

    def add(self, address: FleetAddress, coordinator: CoordinatorClient, options: PlacementOptions) -> None:
        """Register a fleet, so that calls about its operators can be answered."""
        registered = self._fleets.get(address.uri)
        if registered is None or (registered.coordinator, registered.options) != (coordinator, options):
            nodes, migration = ExecutorNodes(address, options.store_actors_per_node), LiveMigration(coordinator)
            self._fleets[address.uri] = _Fleet(coordinator, nodes, migration, _FinishedBatches(coordinator), options)

    def answer(self, message: str) -> str:
        """Answer a call from the exchange of an operator.

        Parameters
        ----------
        message
            JSON: ``asked`` (``start``, ``begin``, ``place``, ``settle``, ``finished`` or ``ended``), ``operator`` (the facts of its
            route column), and ``query_id``, ``run_id``, ``batch_id``, ``time_ms`` and ``former_time_ms`` of the batch. ``begin`` has
            the number of ``shards`` that the query was built with; ``place`` and ``settle`` have the batch's number, and the
            ``first_partition``. ``place`` has the ``cores`` of executors by host, as ``reach`` has with the ``uri`` of a fleet, and
            whether they ``connect_directly``; ``again`` has that, and the ``place`` that a task has lost; ``settle`` has the numbers of
            rows that tasks ``sent`` to each shard, if they handed them over. ``finished`` has the ``run_id`` and ``batch_id``, the
            ``states`` of the query by fleet, and whether their logs must have it ``at_once``; ``ended`` has only the ``run_id``.
            ``begin`` also has the options of its query's sources and sink of ``kafka``. While queries are followed, ``query_started``,
            ``query_progress`` (Spark's JSON) and ``query_ended`` (with its ``error``, or null) have what Spark tells listeners.
            ``start`` has the ``query_id``, null for a new query, whether the query ``has_checkpoint`` that a later start finds, its
            ``first_batch`` by the checkpoint, and its ``operators``: ``uri``, ``state``, ``route`` column and, where it is the query's,
            output ``mode``. ``start`` and ``begin`` also have the ids of queries that are ``active``.

        Returns
        -------
        str
            JSON. ``start`` and ``begin``: why the query is ``refused``, or null. ``begin``: the batch's ``shards`` and
            ``first_partition``, and the number of the ``run``. ``place``, and the ``places`` of ``settle``: for each shard the
            ``host`` and the number of its store ``actor``, the host of executors ``near`` it, and its ``direct`` address if tasks need
            that; null for a shard that may run anywhere. ``reach``: the same of each store actor. ``settle``: also ``missing``, the
            shards that have not committed the batch, or whose rows no task counted; the ``next`` batch's shards; and stats, by the
            names of ``StatefulExchangeExec.scala``. Or only why the batch is ``refused``: shards committed other numbers of rows than
            tasks sent them. ``newest_epoch``: the ``epoch`` that counts, -1 without any, and its ``end``; ``end_epoch`` has one count.
            The answers to what is only told are empty.
        """
        try:
            batch = json.loads(message)
            answers: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
                "start": lambda query: {"refused": self._refusal(query)},
                "begin": self._begin,
                "place": self._place,
                "reach": self._reach,
                "again": self._place_again,
                "settle": self._settle,
                "end_epoch": self._end_epoch,
                "newest_epoch": self._newest_epoch,
                "finished": self._report_finished,
                "ended": lambda run: self._end_run(run["run_id"]),
                "query_started": self._tell_lineage,
                "query_progress": self._tell_lineage,
                "query_ended": self._tell_lineage,
            }
            return json.dumps(answers[batch["asked"]](batch))
        except BaseException:
            # Logged here, as Py4J shows a Python error badly on the JVM's side.
            log.exception("the exchange of an operator could not be answered: %s", message)
            raise

    def _tell_lineage(self, message: Mapping[str, Any]) -> None:
        if self._lineage is not None:
            self._lineage.take(message)

    def _begin(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        operator = batch["operator"]
        if refused := self._taken(operator, batch["query_id"], batch["active"]):
            return {"refused": refused}
        _, states = self._writers.setdefault(batch["run_id"], (batch["query_id"], set()))
        states.add((operator["uri"], operator["state"]))
        self._tell_lineage(batch)
        coordinator = self._fleets[operator["uri"]].coordinator
        partitions = coordinator.begin_batch(_task(batch), batch["shards"], operator["shards"])
        newest = coordinator.newest_run(operator["state"])
        return {"shards": len(partitions), "first_partition": partitions.start, "run": newest + 1}

    def _refusal(self, query: Mapping[str, Any]) -> str | None:
        """Return why a query may not start on the states of its operators; None if it may."""
        for run_id, (owner, _) in list(self._writers.items()):
            # The run has ended, and Spark's listeners may not have been called yet.
            if owner not in query["active"]:
                self._end_run(run_id)
        for operator in query["operators"]:
            if refusal := self._taken(operator, query["query_id"], query["active"]):
                return refusal
            coordinator = self._fleets[operator["uri"]].coordinator
            try:
                coordinator.check_start(operator["state"], query["query_id"] or "", operator["mode"])
                # When it was built, its first batch was not known, which may be one before the state took its present types.
                coordinator.check_state(requested_state(operator["route"], operator["mode"]), query["first_batch"])
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
        """Return why a query may not use the state of an operator: another running query of this program writes it. None if it may."""
        state = operator["uri"], operator["state"]
        for owner, states in list(self._writers.values()):
            if state in states and owner != query_id and owner in active:
                return (
                    "another query that is running has this state, and a state is one query's; nothing was changed; stop the other "
                    "one, or give each a name of its own; for two sinks of one result, write both in one foreachBatch "
                    f"[state=`{operator['state']}` running_query_id=`{owner}`]"
                )
        return None

    def _report_finished(self, batch: Mapping[str, Any]) -> None:
        for uri, names in batch["states"].items():
            report = _Report(batch["run_id"], batch["batch_id"], names)
            self._fleets[uri].finished.report(report, at_once=batch["at_once"])

    def _end_run(self, run_id: str) -> None:
        """Record that a run has ended; its shards stay in memory for the next run."""
        self._writers.pop(run_id, None)
        if ray.is_initialized():
            for fleet in self._running().values():
                fleet.finished.end(run_id)
                fleet.coordinator.deactivate_instances(run_id)

    def _place(self, batch: Mapping[str, Any]) -> list[dict[str, Any] | None]:
        operator = batch["operator"]
        fleet = self._fleets[operator["uri"]]
        for watch in self._watches.values():
            watch.warn_of_lost()
        try:
            slots = fleet.nodes.slots(batch["cores"])
            placements = fleet.coordinator.place_shards(
                operator["state"],
                batch["query_id"],
                _partitions(batch),
                slots,
                fleet.options.standbys,
                fleet.options.policy,
            )
            fleet.migration.begin(placements.moves)
            return _places(placements.holders, fleet.nodes, connect_directly=batch.get("connect_directly", False))
        except (StateStoreError, RayError) as error:  # without preferred hosts a batch is slower, and still correct
            log.warning(
                "the shards of %s are not placed, and its tasks run anywhere until executors change: %s: %s",
                operator["state"],
                type(error).__name__,
                error,
            )
            return []

    def _reach(self, session: Mapping[str, Any]) -> list[dict[str, Any] | None]:
        nodes = self._fleets[session["uri"]].nodes
        return _places([slot.location for slot in nodes.slots(session["cores"])], nodes)

    def _place_again(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return where a store actor is that a task has lost, or any other one: each takes rows of all shards."""
        place, executors = asked["place"], self._fleets[asked["uri"]].nodes.executors
        living = self._reach({"uri": asked["uri"], "cores": executors})
        alike = [one for one in living if one and (one["host"], one["actor"]) == (place["host"], place["actor"])]
        return next(iter(alike or filter(None, living)))

    def _settle(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        operator = batch["operator"]
        fleet = self._fleets[operator["uri"]]
        result, placements, following = fleet.coordinator.batch_result(
            _task(batch), _partitions(batch), batch.get("wait_s", 0.0)
        )
        sent = {int(shard): counts for shard, counts in batch["sent"].items()} if "sent" in batch else None
        if sent and (unlike := result.unlike(sent)):
            return {"refused": _unlike_text(batch, unlike)}
        fleet.migration.begin(placements.moves)
        for watch in self._watches.values():
            watch.batch_ended()
        uncounted = [] if sent is None else [shard for shard in result.rows_of if shard not in sent]
        return {
            **result.progress,
            "missing": [*result.missing, *uncounted],
            "places": _places(placements.holders, fleet.nodes),
            "next": {"shards": len(following), "first_partition": following.start},
        }

    def _end_epoch(self, epoch: Mapping[str, Any]) -> dict[str, Any]:
        coordinator = self._fleets[epoch["operator"]["uri"]].coordinator
        coordinator.end_epoch(_task(epoch), _partitions(epoch), epoch["end"])
        return {}

    def _newest_epoch(self, run: Mapping[str, Any]) -> dict[str, Any]:
        operator = run["operator"]
        epoch, end = self._fleets[operator["uri"]].coordinator.newest_epoch(operator["state"]) or (-1, "")
        return {"epoch": epoch, "end": end}


def _places(
    holders: Sequence[ActorLocation | None], nodes: ExecutorNodes, *, connect_directly: bool = False
) -> list[dict[str, Any] | None]:
    """Return where each shard is, and how its tasks find it (``Place`` in ``Run.scala``); None for one that may run anywhere."""
    are_direct = connect_directly or nodes.are_strange
    direct = nodes.direct_addresses(filter(None, holders)) if are_direct else {}
    return [
        None
        if holder is None or (are_direct and holder.instance_id not in direct)
        else {
            "host": holder.host,
            "actor": store_actor_number(holder.actor_name),
            "near": nodes.near.get(holder.host),
            "direct": _as_json(direct.get(holder.instance_id)),
        }
        for holder in holders
    ]


def _as_json(address: DirectAddress | None) -> dict[str, Any] | None:
    if address is None:
        return None
    return {"host": address.host, "port": address.port, "key": base64.b64encode(address.key).decode()}


def _partitions(batch: Mapping[str, Any]) -> range:
    return range(batch["first_partition"], batch["first_partition"] + batch["shards"])


def _task(batch: Mapping[str, Any]) -> TaskIdentity:
    """Return the identity by which the driver asks about a batch as a whole."""
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


def _unlike_text(batch: Mapping[str, Any], unlike: Mapping[int, tuple[Collection[int], int]]) -> str:
    shards = ", ".join(
        f"{shard}: {' or '.join(map(str, sorted(set(counts))))} sent, {rows} committed"
        for shard, (counts, rows) in unlike.items()
    )
    return (
        "shards of a stateful operator committed other numbers of rows than Spark's tasks sent them; Spark's commit log does not "
        "count the batch, and the state is as the batch before left it; restart the query, which runs the batch again. If the rows "
        "before the operator are others each time they are computed (rand, a nondeterministic function) and an executor was lost, "
        "that is the reason, and Spark's results are not defined: write such rows to a table first. If not, please report "
        f"this with the logs of the store actors [state=`{batch['operator']['state']}`, batch_id=`{batch['batch_id']}`, "
        f"shards=`{shards}`]"
    )

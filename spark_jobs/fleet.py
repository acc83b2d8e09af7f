"""The front door's substance: connect to a fleet, make a streaming DataFrame's state live in it."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import ray
from pyspark.sql import DataFrame, SparkSession

from coordinator.ledger.branches import Branch
from coordinator.ledger.rescaling import RescalePlan
from coordinator.model.errors import InvalidRequestError, MemoryLimitError, SetupError
from coordinator.model.identities import PYTHON_QUERY_ID, TaskIdentity
from coordinator.model.maintenance import Maintenance
from coordinator.model.memory_options import MemoryOptions
from coordinator.model.names import check_state_name
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.placement.move_planner import PlacementExplanation
from coordinator.placement.policy import PlacementPolicy
from coordinator.runtime.runtime import Runtime
from coordinator.service.calls import RayActors, unwrapped
from coordinator.service.client import CoordinatorClient
from coordinator.service.dropping import DroppedState
from coordinator.storage.options import split_options
from coordinator.storage.uris import normalize_uri
from spark_jobs.driver_calls import DriverCalls, PlacementOptions
from spark_jobs.plan.catalyst import JOB_FAILURES
from spark_jobs.plan.checkpoint_files import begin_checkpoint, copy_checkpoint
from spark_jobs.plan.operator_plan import Collector, OperatorPlan, QueryModes, RoutedOperator
from spark_jobs.plan.route import route_plan
from spark_jobs.plan.stateful_exchange import install
from spark_jobs.plan.timing import OUTPUT_MODES
from spark_jobs.portable_policy import portable_policy
from spark_jobs.session.spark_session import check_on_ray, ensure_ray, started_ray
from spark_jobs.stateful import StatefulDataFrame
from spark_jobs.target import Target
from spark_jobs.worker.fleet_client import ConnectTask, FleetAddress, fleet_client
from spark_jobs.worker.state_store import ReadStateStore, StateStore, store_specs
from spark_jobs.worker.task import in_output_mode
from statefleet.dashboard.deploy import dashboard_url
from statefleet.dashboard.options import DashboardOptions
from statefleet.migration.importing import Imported, Importer, PlannedState
from statefleet.reads.fleet import LiveFleet, opened_live
from statefleet.reads.sources import FleetSource
from statefleet.reads.state import LiveState
from store_actors.compiled_code import warm_with_progress
from store_actors.deploy import end_fleet, ensure_store_actor, hand_over, store_metrics

__all__ = ["Fleet", "connect"]

log = logging.getLogger(__name__)

#: Of all fleets of this driver, as its JVM has one place to ask.
_DRIVER = DriverCalls()
#: Fewest shards of a new state: room to use a few more cores later, and cheap on one.
_MIN_SHARDS = 4
#: How long a store actor may take to start before that is told, in seconds.
_START_S = 60.0


def connect(
    uri: str,
    *,
    storage_options: Mapping[str, str] | None = None,
    maintenance: Maintenance | None = None,
    standbys: int = 0,
    store_actors_per_node: int | None = None,
    placement: str | PlacementPolicy = "balance",
    memory_limit: int | str | None = None,
    spill_dir: str | None = None,
) -> Fleet:
    """Start the fleet of an object-store URI on this Ray cluster, or attach to it.

    Parameters
    ----------
    uri
        ``file:///folder``, ``s3://bucket/prefix`` (``s3a://`` too), ``gs://..`` or ``az://..``: where state is persisted. One
        URI is one fleet: it has one coordinator actor and store actors on each node that runs its tasks.
    storage_options
        Options of the object store (endpoint, region, ..) in obstore's names. Credentials are better left to the usual
        environment variables of every node. Those that are given here are handed to the fleet's running processes and kept in their
        memory only; once all of them have ended, somebody has to connect with them again. Another call with other credentials
        replaces them.
    maintenance
        When snapshots are made and how many versions are kept, for a fleet that is started by this call.
    standbys
        How many store actors on other nodes keep a warm copy of each shard of this driver's queries, and take over without reading
        the object store when a node is lost. Each needs the memory of a copy.
    store_actors_per_node
        Store actors on each node that has executors of this driver. By default one for each eight cores, or part of eight.
    placement
        Which store actor each shard of this driver's queries goes to: ``"balance"`` spreads them by cores and moves as few as that
        takes when nodes come and go; ``"stay"`` spreads new shards and moves none by itself; or a policy of your own
        (:class:`~coordinator.placement.policy.PlacementPolicy`), which is pickled and runs in the coordinator.
    memory_limit
        Bytes of memory that each store actor's process may have, or text such as ``"2GiB"``, for store actors that are started by this
        call or by its queries; by default as much as its state takes. State that does not fit is on the node's disk, and what neither
        has room for is refused. Ray's shared object store is not part of it, and needs memory of its own.
    spill_dir
        Folder for that on a local disk of every node; by default in Ray's session folder of the node.

    Returns
    -------
    Fleet
        A handle; making a second one costs nothing.

    Raises
    ------
    InvalidRequestError
        The URI's scheme is not supported, or an option is not valid.
    StorageUnavailableError
        The store cannot be reached or written, or cannot put if absent.
    SetupError
        There is no Ray cluster to attach to and none can be started here; or this node does not see the storage that the
        coordinator's node sees under the same URI.
    MemoryLimitError
        The memory limit is too small for a process, or the spill folder is not on a disk that can be written.

    Examples
    --------
    >>> import statefleet as sf
    >>> fleet = sf.connect("file:///var/lib/statefleet")  # doctest: +SKIP
    """
    normalized = normalize_uri(uri)
    ensure_ray()
    if standbys < 0:
        raise InvalidRequestError("a number of standbys is 0 or more", standbys=standbys)
    if store_actors_per_node is not None and store_actors_per_node < 1:
        raise InvalidRequestError("a node has one store actor or more", store_actors_per_node=store_actors_per_node)
    options = PlacementOptions(standbys, store_actors_per_node, portable_policy(placement))
    memory = MemoryOptions.of(memory_limit, spill_dir)
    if started_ray():
        # Its store actors are on this machine: without this the first of them would compile for a minute, and nobody would know why.
        warm_with_progress()
    return Fleet(normalized, storage_options, maintenance or Maintenance(), options, memory)


class Fleet:
    """A connected fleet. Made by :func:`connect`."""

    def __init__(
        self,
        uri: str,
        storage_options: Mapping[str, str] | None,
        maintenance: Maintenance,
        placement: PlacementOptions,
        memory: MemoryOptions,
    ) -> None:
        self.uri = uri
        self._placement = placement
        self._actors = RayActors()
        options, secrets = split_options(uri, storage_options)
        given = secrets if options.withheld else None
        self._coordinator = CoordinatorClient.connect(uri, options, maintenance, secrets=given)
        if given is not None:
            hand_over(self._actors, self._coordinator.status(), given)
        # Those of whoever started the fleet: all its processes use the same.
        options = self._coordinator.storage_options()
        self._address = FleetAddress(uri, ray.get_runtime_context().gcs_address, options, maintenance, memory)
        # Start-up (imports, compiled code) happens here, not in a batch.
        local = ensure_store_actor(self._actors, uri, options, maintenance, self._actors.node_id(), memory)
        started = local.location.remote()
        while not self._actors.wait([started], _START_S):
            # However long it takes: one that starts answers no ping, and is not hung.
            log.warning("the store actor of this node is still starting: %s", uri)
        try:
            unwrapped(self._actors, local, started)
        except MemoryLimitError:
            # It holds nothing, and refuses all work: one with other options is to take its place.
            self._actors.kill(local, restart=False)
            raise
        self._readied: set[str] = set()
        runtime = Runtime()
        source = FleetSource.connected(self._coordinator, self._actors, runtime)
        self._live = LiveFleet(source, opened_live(uri), runtime, self._coordinator)
        #: Of the operators that were built, by name.
        self._planned: dict[str, PlannedState] = {}
        self._run_id = f"python-{uuid.uuid4().hex}"

    def __repr__(self) -> str:
        return f"Fleet({self.uri!r})"

    def stateful(
        self,
        df: DataFrame,
        *,
        name: str,
        outputMode: str | None = None,
        shards: int | None = None,
        closing: str = "spark",
    ) -> StatefulDataFrame:
        """A streaming DataFrame whose next stateful operator keeps its state in the fleet.

        Parameters
        ----------
        df
            Streaming DataFrame, with its watermark if it has one.
        name
            Name of the state, unique in the fleet; its folder below the fleet's URI. Use a query's checkpoint and a state's
            name together, always the same pair.
        outputMode
            ``update``, ``append`` or ``complete``, as in Spark, in any case. By default an aggregation has the mode of its query
            (``writeStream.outputMode``), and every other operator the one that it has. One that is given has to be the query's.
        shards
            Number of shards. By default that of the existing state, else the cluster's parallelism, and at least four. A state that
            exists with another number is rescaled with the first batch of the query; see :meth:`rescale`.
        closing
            By which watermark groups are closed and state is let go. ``spark``: that of the batches before, as in Spark, which runs a
            batch without data for what it closes. ``early``: that which includes the batch, so results come one batch earlier; rows
            that Spark would still take are then late (docs/operators.md).

        Returns
        -------
        StatefulDataFrame
            Has PySpark's stateful operators, and passes what looks at each row by itself through (``select``, ``where``, ..).

        Raises
        ------
        InvalidRequestError
            `df` is not streaming, or an argument is not valid.
        SetupError
            Its session does not run on Ray.
        """
        _check_frame(df, name)
        check_on_ray(df.sparkSession)

        def run_plan(plan: OperatorPlan, modes: QueryModes) -> DataFrame:
            existing = self._coordinator.describe_state(name)
            operator = RoutedOperator.of(plan, name, self.uri, existing, modes=modes, closes_early=closing == "early")
            asked = shards if operator.schema.keys else 1  # one global group has one place
            described = operator.schema
            # What readers are shown goes with the state's metadata: no task needs it.
            operator = replace(
                operator, schema=operator.schema.undescribed(), upstream=replace(operator.upstream, shards=asked)
            )

            def route(metadata: StateMetadata, address: FleetAddress) -> DataFrame:
                self._planned[name] = PlannedState(operator, metadata)
                return route_plan(self._collected(operator, metadata, existing), metadata, address)

            following = operator.schema if modes.mode is None else None
            return self.attach(df, name, operator.schema.output_mode, described, asked, route, following)

        return StatefulDataFrame(df, Target(name, outputMode, shards, closing, run_plan))

    def _collected(
        self, operator: RoutedOperator, metadata: StateMetadata, existing: StateMetadata | None
    ) -> RoutedOperator:
        """The operator with what its tasks need besides the stream."""
        if not isinstance(operator.plan, Collector):
            return operator
        shards = 0 if existing is None else existing.num_shards
        newest = (self._coordinator.locate(metadata.state_name, shard).newest_version for shard in range(shards))
        return replace(operator, plan=operator.plan.collected(min(newest, default=0), metadata.num_shards))

    def attach(
        self,
        df: DataFrame,
        name: str,
        output_mode: str,
        schema: StateSchema | None,
        shards: int | None,
        route: Callable[[StateMetadata, FleetAddress], DataFrame],
        following: StateSchema | None = None,
    ) -> DataFrame:
        """The DataFrame of an operator whose state is `name`, once it is known to fit the state that exists.

        Parameters
        ----------
        schema
            The operator's, as readers see it; None if the stores are a program's own.
        following
            The schema of an operator that has its query's output mode, which is looked at when the query starts.

        Raises
        ------
        InvalidRequestError
            The name cannot be a state's.
        SetupError
            The session of `df` does not run on Ray.
        StateMismatchError
            It does not fit.
        """
        check_state_name(name)
        check_on_ray(df.sparkSession)
        install(df.sparkSession, _DRIVER.answer)
        _DRIVER.add(self._address, self._coordinator, self._placement)
        _DRIVER.watch(df.sparkSession)
        self._ready(df.sparkSession)
        existing = self._coordinator.describe_state(name)
        if shards is None:
            parallelism = max(_MIN_SHARDS, df.sparkSession.sparkContext.defaultParallelism)
            shards = existing.num_shards if existing is not None else parallelism
        # The query's id is known to its tasks only.
        metadata = StateMetadata(name, "", shards, output_mode, schema)
        asked = metadata
        if following is not None and existing is not None and existing.output_mode in OUTPUT_MODES:
            asked = in_output_mode(metadata, following.in_output_mode(existing.output_mode))
        # Refused now, when the query is built, rather than in its first batch.
        self._coordinator.check_state(asked)
        if existing is not None and existing.num_shards != shards:
            log.warning(
                "%s has %d shards and is asked for with %d: it is rescaled with the first batch of the query",
                name,
                existing.num_shards,
                shards,
            )
        return route(metadata, self._address)

    def import_checkpoint(
        self,
        source: str,
        frame: DataFrame,
        *,
        checkpoint: str,
        operators: Mapping[str, int] | None = None,
        from_nothing: Sequence[str] = (),
    ) -> Imported:
        """Move a query that kept its state in Spark's own stores to the fleet, without its history.

        The state of its newest committed batch becomes the first version of the state of a query of the fleet, and that query goes on
        with the next batch: same offsets, same watermark, same number. Nothing is written to the old checkpoint. An import that was
        killed is repeated by the same call; until it is finished no query can use what there is of it.

        Parameters
        ----------
        source
            The old query's ``checkpointLocation``. The query is stopped.
        frame
            The new query: the old one's sources and operators, with ``fleet.stateful`` before each stateful operator.
        checkpoint
            Folder for the new query's checkpoint; it is empty, or not there yet.
        operators
            Of each state by name the number of Spark's operator (a folder below ``state``), if they are in another order.
        from_nothing
            Columns of the results whose aggregates are not imported and tell only of what comes from there on: those of which Spark's
            state cannot be made the fleet's.

        Returns
        -------
        Imported
            What was imported. Then start `frame` with the new checkpoint.

        Raises
        ------
        StateMismatchError
            The checkpoint's state is not one of such a query, or there is a state of this name.
        InvalidRequestError
            There is no such checkpoint, its query runs, or something in it cannot be imported; names it.
        StoreUnavailableError
            It was not finished.

        Examples
        --------
        >>> counts = fleet.stateful(clicks, name="clicks").groupBy("user").count()  # doctest: +SKIP
        >>> fleet.import_checkpoint("/data/old-ck", counts, checkpoint="/data/ck").rows  # doctest: +SKIP
        {'clicks': 1204}
        >>> counts.writeStream.outputMode("update").option("checkpointLocation", "/data/ck").start()  # doctest: +SKIP
        """
        return Importer(self._coordinator, self._address, self._planned).import_checkpoint(
            source, frame, checkpoint, operators, from_nothing
        )

    def import_table(self, frame: DataFrame, rows: DataFrame, *, checkpoint: str) -> Imported:
        """Begin the state of a new query with a table of its keys and values.

        The query then reads its sources from their beginning, as any new one does.

        Parameters
        ----------
        frame
            The query, with one stateful operator: an aggregation, ``dropDuplicates``, or a function with state.
        rows
            A batch DataFrame with a row for each key: the key's columns, and of an aggregation those of its results, by their names
            and types, as ``statefleet export`` writes them; of ``dropDuplicatesWithinWatermark`` also ``expires``; of a function the
            columns of its state.
        checkpoint
            Folder for the query's checkpoint; it is empty, or not there yet.

        Returns
        -------
        Imported
            What was imported. Then start `frame` with the new checkpoint: its first batch is batch 1.

        Raises
        ------
        InvalidRequestError
            Something does not fit, or the state of an aggregate (an average, say) does not follow from its result; names it.
        StateMismatchError
            There is a state of this name.
        StoreUnavailableError
            It was not finished; the same call repeats it.
        """
        return Importer(self._coordinator, self._address, self._planned).import_table(frame, rows, checkpoint)

    def state(self, name: str, part: str = "", *, consistency: str = "finished") -> LiveState:
        """The state of one operator as a table, also while its query runs; see
        :meth:`LiveFleet.state <statefleet.reads.fleet.LiveFleet.state>`.

        Raises
        ------
        InvalidRequestError
            The name cannot be a state's, or the consistency is none.
        """
        return self._live.state(name, part, consistency=consistency)

    def states(self) -> list[str]:
        """Names of all states."""
        return self._live.states()

    def state_metadata(self, name: str | None = None, version: int | None = None) -> pa.Table:
        """What stores there are, how many shards, and which batches can be read; see
        :meth:`LiveFleet.state_metadata <statefleet.reads.fleet.LiveFleet.state_metadata>`.

        Raises
        ------
        InvalidRequestError
            There is no such state, or a version is given without a name.
        VersionNotFoundError
            There is no such version (any more).
        """
        return self._live.state_metadata(name, version)

    def sql(self, query: str, *, consistency: str = "finished") -> pa.Table:
        """Answer of a query of SQL over states; see :meth:`LiveFleet.sql <statefleet.reads.fleet.LiveFleet.sql>`.

        Raises
        ------
        InvalidRequestError
            The query is not valid, or names no state's table; says what DuckDB says. Or the consistency is none.
        """
        return self._live.sql(query, consistency=consistency)

    # -- keyed state from plain Python ----------------------------------------------------------------------------

    def state_store(
        self,
        name: str,
        partition_id: int = 0,
        *,
        keys: pa.Schema | None = None,
        values: pa.Schema | None = None,
        stores: Mapping[str, tuple[pa.Schema, pa.Schema]] | None = None,
        shards: int = 1,
    ) -> StateStore:
        """A handle that makes the next version of a partition of keyed state, from plain Python.

        The state belongs to Python programs: that of a streaming query is refused here. The program that opens it last is its
        writer; commits of earlier ones are refused.

        Parameters
        ----------
        name, partition_id
            The state, and which of its `shards` partitions.
        keys, values
            Columns of the one store ``default``; or `stores`, by name. New nullable, fewer and wider value columns than those
            of the existing state are accepted.

        Raises
        ------
        InvalidRequestError
            The name of the state, or of a store, cannot be one.
        WriterBusyError
            A handle of this program is open already.
        StateMismatchError
            The state belongs to a query, or its schema does not fit; shows both schemas.
        """
        check_state_name(name)
        specs = store_specs(keys, values, stores)
        newest = self._coordinator.locate(name, partition_id).newest_version
        task = TaskIdentity(name, PYTHON_QUERY_ID, self._run_id, newest, partition_id, 0, f"python:{os.getpid()}")
        metadata = StateMetadata(name, PYTHON_QUERY_ID, shards, "keyed")
        return fleet_client(self._address).open_update(task, metadata, specs)

    def read_state_store(
        self,
        name: str,
        partition_id: int = 0,
        *,
        keys: pa.Schema | None = None,
        values: pa.Schema | None = None,
        stores: Mapping[str, tuple[pa.Schema, pa.Schema]] | None = None,
        version: int | None = None,
    ) -> ReadStateStore:
        """A handle that reads any retained version of a partition of keyed state, also while it is being written.

        Raises
        ------
        VersionNotFoundError, InvalidRequestError
            The version does not exist, or is not retained; or the name cannot be a state's.
        """
        check_state_name(name)
        specs = store_specs(keys, values, stores)
        return fleet_client(self._address).open_read(name, partition_id, specs, version)

    def _ready(self, spark: SparkSession) -> None:
        """Do once for a Spark application what would otherwise fall into its first batch."""
        application = spark.sparkContext.applicationId
        if application in self._readied:
            return
        slots = spark.sparkContext.defaultParallelism
        tasks = spark.range(0, slots, 1, slots).mapInArrow(ConnectTask(self._address), "id BIGINT")
        try:
            tasks.write.format("noop").mode("overwrite").save()
        except JOB_FAILURES as error:
            raise SetupError(
                "Spark's Python workers cannot reach the fleet; every node needs this package and its dependencies, and object "
                "store credentials in its environment",
                uri=self.uri,
                cause=error,
            ) from error
        self._readied.add(application)

    def explain_placement(self, name: str, shard: int) -> PlacementExplanation:
        """Why a shard of a state is where it is.

        Parameters
        ----------
        name
            The state.
        shard
            Number of its shard.

        Returns
        -------
        PlacementExplanation
            Store actor that has it (``location``), its newest moves with their reasons (``moves``, from the state's log), and how many
            state operations ran on its node, or why not, since the coordinator started (``operations``).

        Raises
        ------
        InvalidRequestError
            There is no such state, or it has no such shard.
        """
        check_state_name(name)
        self._coordinator.check_shard(name, shard)
        return self._coordinator.explain_placement(name, shard)

    def rescale(self, name: str, shards: int, *, dry_run: bool = False) -> RescalePlan:
        """Give a state another number of shards while its query runs, from one of its next batches on.

        No file is rewritten: new shards begin as the rows of the old ones whose keys are theirs. The query's program keeps its own
        number for the next start, unless it leaves `shards` out.

        Parameters
        ----------
        name
            The state.
        shards
            A multiple or a divisor of the present number. Any number can be given to :meth:`stateful` when a query is started.
        dry_run
            Only say what would be done.

        Returns
        -------
        RescalePlan
            For each new shard the old ones that it is made of.

        Raises
        ------
        InvalidRequestError
            There is no such state, no run of its query goes on, its partitions are the user's own, it has one shard by nature, or the
            number is none.
        """
        check_state_name(name)
        return self._coordinator.rescale(name, shards, dry_run=dry_run)

    def branch(
        self,
        name: str,
        as_: str,
        *,
        version: int | None = None,
        checkpoint: str | None = None,
        from_checkpoint: str | None = None,
        sources: int = 1,
    ) -> Branch:
        """A state that begins with a version of another one, for another query to go on from; that one is left as it is.

        No row is copied: the branch needs the files of the other one, which are kept for it, until it has a snapshot of its own. A
        second call finds the branch that is there. The first query that goes on from it owns it.

        Parameters
        ----------
        name
            The state that is branched; each of a query's operators that is to be has its own branch, of the same version.
        as_
            Name of the branch: ``fleet.stateful(..., name=as_)`` of the other query.
        version
            One that is retained; by default the newest that all shards of all operators of the query have.
        checkpoint
            Folder of a new checkpoint for the other query, which begins with the batch that reads the version. Without one, copy a
            checkpoint of that batch yourself.
        from_checkpoint
            Checkpoint of the query that is branched: the other one reads its input from where that one stood at the version. Without
            it, each source begins where it would with no checkpoint.
        sources
            How many sources the other query has, if there is no `from_checkpoint`.

        Raises
        ------
        VersionNotFoundError
            Not every shard has the version, or it is not retained any more.
        InvalidRequestError
            There is no such state; something else has the branch's name, or is in the new checkpoint's folder; or the checkpoint
            of the other query does not tell of the version.
        StorageUnavailableError
            The checkpoint cannot be written; the branch is there.
        """
        check_state_name(name)
        check_state_name(as_)
        if from_checkpoint is not None and checkpoint is None:
            raise InvalidRequestError(
                "from_checkpoint is copied to a new checkpoint; nothing was changed; give one", state=name
            )
        branch = self._coordinator.branch(name, as_, version)
        if checkpoint is None:
            return branch
        spark = SparkSession.getActiveSession()
        if spark is None:
            raise SetupError(
                "a checkpoint is written by Spark, and there is no session; the branch is there", state=as_
            )
        if from_checkpoint is not None:
            copy_checkpoint(spark, from_checkpoint, checkpoint, branch.version, as_)
        else:
            times = {"batch_time_ms": branch.batch_time_ms or 0, "watermark_ms": branch.watermark_ms}
            begin_checkpoint(spark, checkpoint, branch.version, as_, sources=sources, **times)
        return branch

    def drop(self, name: str, *, dry_run: bool = False, is_over: bool = False) -> DroppedState:
        """End a state for good while the fleet goes on; see :meth:`LiveFleet.drop <statefleet.reads.fleet.LiveFleet.drop>`.

        Raises
        ------
        InvalidRequestError
            There is no such state, it has branches, or a query that uses it runs.
        """
        return self._live.drop(name, dry_run=dry_run, is_over=is_over)

    def status(self) -> dict[str, Any]:
        """Where everything is: store actors, queries, shards, versions, watermarks; what the dashboard shows."""
        return self._coordinator.status()

    def dashboard_url(self, *, host: str | None = None, port: int | None = None) -> str:
        """Address of the location dashboard, which is started if it isn't there.

        Parameters
        ----------
        host
            Address of the head that it is served on; by default where it is, or else the loopback. On any other one a token is needed,
            which is part of the address that is returned: ``STATEFLEET_DASHBOARD_TOKEN`` in the environment of the head's Ray, or a
            new one each time the dashboard starts.
        port
            By default one that follows from the fleet's URI.

        Raises
        ------
        SetupError, InvalidRequestError
            It cannot be served there.
        """
        return dashboard_url(self._actors, self.uri, DashboardOptions.of(host, port))

    def clean(self, name: str, *, dry_run: bool = False) -> dict[str, Any]:
        """Do at once for a state what the coordinator does at every round: let old versions go, delete files nobody needs.

        Parameters
        ----------
        name
            The state.
        dry_run
            Only say what would go.

        Returns
        -------
        dict
            ``floors`` (partition, store and new oldest retained version) and ``files`` (path, bytes, age in seconds).
        """
        return self._coordinator.clean(name, dry_run=dry_run)

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Counters of each living store actor, by actor name: bytes loaded and written, commits, shards in memory."""
        return store_metrics(self._actors, self.status())

    def shutdown(self) -> None:
        """End the fleet's actors on this cluster. Every committed version stays in the object store."""
        end_fleet(self._actors, self._coordinator)


def _check_frame(given: object, name: str) -> None:
    """Refuse what is no DataFrame, or a stateful one that no operator was called of yet."""
    if isinstance(given, StatefulDataFrame):
        raise InvalidRequestError(
            "the DataFrame is stateful already; call one of its operators, and fleet.stateful on the result for another one",
            state=name,
        )
    if not isinstance(given, DataFrame):
        raise InvalidRequestError(
            "fleet.stateful takes a streaming DataFrame, as spark.readStream gives it",
            state=name,
            given=type(given).__name__,
        )

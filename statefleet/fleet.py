"""Connect to a fleet, and keep the state of streaming DataFrames in it."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import pyarrow as pa
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
from coordinator.placement.lease_plans import PlacementExplanation
from coordinator.placement.policies import POLICIES
from coordinator.runtime.runtime import Runtime
from coordinator.service.calls import RayActors, session_folder, unwrapped
from coordinator.service.client import CoordinatorClient
from coordinator.storage.options import split_options
from coordinator.storage.uris import normalize_uri
from spark_jobs.api.stateful import StatefulDataFrame
from spark_jobs.api.target import Target
from spark_jobs.driver.driver_calls import DriverCalls, PlacementOptions
from spark_jobs.plan.catalyst import JOB_FAILURES
from spark_jobs.plan.checkpoint_files import begin_checkpoint, copy_checkpoint
from spark_jobs.plan.event_time import interval_ms
from spark_jobs.plan.operator_plan import Collector, OperatorPlan, QueryModes, RoutedOperator, route_plan
from spark_jobs.plan.operator_rules import OUTPUT_MODES
from spark_jobs.plan.stateful_exchange import check_reach, install
from spark_jobs.session.settings import is_on_ray
from spark_jobs.session.spark_connect import check_classic
from spark_jobs.session.spark_session import ensure_ray, started_ray
from spark_jobs.worker.process import warmed
from statefleet.dashboard.deploy import dashboard_url
from statefleet.dashboard.options import DashboardOptions
from statefleet.migration.importing import Imported, Importer, PlannedState
from statefleet.reads.fleet import LiveFleet, opened_live
from statefleet.reads.sources import FleetSource
from store_actors.actor.deploy import end_fleet, ensure_store_actor, forward_credentials, store_metrics
from store_actors.actor.fleet_clients import fleet_client_of
from store_actors.client.fleet_client import FleetAddress, FleetClient
from store_actors.client.state_store import ReadStateStore, StateStore, store_specs
from store_actors.connections.hand_over import sockets_of
from store_actors.engine.compiled_code import warm_with_progress

log = logging.getLogger(__name__)

#: Shared by all fleets of this driver, as its JVM has a single callback.
_DRIVER = DriverCalls()
#: Minimum shards of a new state: cheap on one core, and enough to use a few more cores later.
_MIN_SHARDS = 4
#: Seconds that a store actor may take to start before that is logged.
_START_S = 60.0


def connect(
    uri: str,
    *,
    storage_options: Mapping[str, str] | None = None,
    maintenance: Maintenance | None = None,
    standbys: int = 0,
    store_actors_per_node: int | None = None,
    placement: str = "balance",
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
        environment variables of every node. Credentials that are given here are sent to the fleet's running processes and kept in their
        memory only; once all of these have ended, a program has to connect with credentials again. A later call with other credentials
        replaces them.
    maintenance
        When snapshots are written and how many versions are kept, for a fleet that this call starts.
    standbys
        How many store actors on other nodes keep a copy of each shard of this driver's queries in memory, and take over without reading
        the object store when a node is lost. Each needs the memory of a copy.
    store_actors_per_node
        Store actors on each node that has executors of this driver. By default one for each eight cores, rounded up.
    placement
        Which store actor each shard of this driver's queries goes to: ``"balance"`` spreads them by cores, and moves as few as
        possible when nodes come and go; ``"stay"`` spreads new shards and moves none by itself.
    memory_limit
        Bytes of memory that each store actor's process may have, or text such as ``"2GiB"``, for store actors that this call or its
        queries start; by default as much as its state needs. State that does not fit is on the node's disk, and what fits in neither is
        refused. Ray's shared object store is not included, and needs memory of its own.
    spill_dir
        Folder for such state on a local disk of every node; by default in Ray's session folder of the node.

    Returns
    -------
    Fleet
        A handle; a second one costs nothing.

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
    if standbys < 0:
        raise InvalidRequestError("a number of standbys is 0 or more", standbys=standbys)
    if store_actors_per_node is not None and store_actors_per_node < 1:
        raise InvalidRequestError("a node has one store actor or more", store_actors_per_node=store_actors_per_node)
    if placement not in POLICIES:
        raise InvalidRequestError(f"a placement is {' or '.join(map(repr, POLICIES))}", placement=placement)
    options = PlacementOptions(standbys, store_actors_per_node, placement)
    memory = MemoryOptions.of(memory_limit, spill_dir)
    ensure_ray()
    if started_ray():
        # Its store actors are on this machine: without this the first of them would compile for a minute without a message.
        warm_with_progress()
    return Fleet(normalized, storage_options, maintenance or Maintenance(), options, memory)


class Fleet(LiveFleet):
    """A connected fleet. Created by :func:`connect`."""

    _coordinator: CoordinatorClient

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
        credentials = secrets if options.withheld else None
        coordinator = CoordinatorClient.connect(uri, options, maintenance, secrets=credentials)
        if credentials is not None:
            forward_credentials(self._actors, coordinator.status(), credentials)
        # The options with which the fleet was started: all its processes use the same.
        options = coordinator.storage_options()
        self._address = FleetAddress(uri, options, maintenance, memory)
        # The store actor starts here (imports, compiled code), and not in a batch.
        local = ensure_store_actor(self._actors, uri, options, maintenance, self._actors.node_id(), memory)
        started = local.location.remote()
        while not self._actors.wait([started], _START_S):
            # Without a limit: a store actor that is starting answers no ping, and does not hang.
            log.warning("the store actor of this node is still starting: %s", uri)
        try:
            unwrapped(self._actors, local, started)
        except MemoryLimitError:
            # It has no state and refuses all work: a store actor with other options has to replace it.
            self._actors.kill(local, restart=False)
            raise
        #: What was done once for an application of Spark's.
        self._prepared: set[tuple[str, str]] = set()
        runtime = Runtime()
        source = FleetSource.connected(coordinator, self._actors, runtime)
        super().__init__(source, opened_live(uri), runtime, coordinator)
        #: States of the operators that were built, by name.
        self._planned: dict[str, PlannedState] = {}
        self._run_id = f"python-{uuid.uuid4().hex}"

    def __repr__(self) -> str:
        return f"Fleet({self.uri!r})"

    @cached_property
    def _client(self) -> FleetClient:
        return fleet_client_of(self._address, self._actors)

    @property
    def sockets(self) -> str:
        """How the paths of the store actors' sockets begin, on each node."""
        folder = session_folder()
        # Tasks and store actors run as the user who started Ray, which may be another one.
        return sockets_of(folder, self.uri, os.stat(folder).st_uid)

    def stateful(
        self,
        df: DataFrame,
        *,
        name: str,
        outputMode: str | None = None,
        shards: int | None = None,
        idle_after: str | None = None,
    ) -> StatefulDataFrame:
        """Return a streaming DataFrame whose next stateful operator keeps its state in the fleet.

        Parameters
        ----------
        df
            Streaming DataFrame, with its watermark if it has one.
        name
            Name of the state, unique in the fleet; its folder below the fleet's URI. Always use a query's checkpoint
            with the same state's name.
        outputMode
            ``update``, ``append`` or ``complete``, as in Spark, in any case. By default an aggregation has the mode of its query
            (``writeStream.outputMode``), and every other operator its only one. A mode that is set here has to be the query's.
        shards
            Number of shards. By default that of the existing state, else the cluster's parallelism, and at least four. A state that
            exists with another number is rescaled with the first batch of the query; see :meth:`rescale`.
        idle_after
            An interval as of ``withWatermark``, such as ``1 minute``. In a query with several watermarks, one whose rows have not come
            for that long holds the others back no longer; rows that come after all may be late. By default it does, as in Spark.

        Returns
        -------
        StatefulDataFrame
            It has PySpark's stateful operators, and passes operations on each row by itself through (``select``, ``where``, ..).

        Raises
        ------
        InvalidRequestError
            `df` is not streaming, or an argument is not valid.
        SetupError
            Executors of its session cannot reach a store actor, or it is one of Spark Connect.
        """
        _check_frame(df, name)

        idle_ms = None if idle_after is None else interval_ms(df.sparkSession, idle_after)

        def run_plan(name: str, plan: OperatorPlan, modes: QueryModes) -> DataFrame:
            existing = self._coordinator.describe_state(name)
            operator = RoutedOperator.of(plan, name, self.uri, modes=modes)
            num_shards = shards if operator.schema.keys else 1  # a single global group has a single shard
            viewed = operator.schema
            # The view for readers is stored with the state's metadata; no task needs it.
            operator = replace(
                operator,
                schema=operator.schema.undescribed(),
                upstream=replace(operator.upstream, shards=num_shards, sockets=self.sockets, idle_ms=idle_ms),
            )

            def route(metadata: StateMetadata) -> DataFrame:
                self._planned[name] = PlannedState(operator, metadata)
                return route_plan(self._collected(operator, metadata, existing), metadata)

            query_mode_schema = operator.schema if modes.mode is None else None
            mode, by_python = operator.schema.output_mode, operator.upstream.by_python is not None
            return self.attach(df, name, mode, viewed, num_shards, route, query_mode_schema, by_python=by_python)

        return StatefulDataFrame(df, Target(name, outputMode, shards, run_plan))

    def _collected(
        self, operator: RoutedOperator, metadata: StateMetadata, existing: StateMetadata | None
    ) -> RoutedOperator:
        """Return the operator with the rows that its tasks need besides the stream."""
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
        route: Callable[[StateMetadata], DataFrame],
        query_mode_schema: StateSchema | None = None,
        *,
        by_python: bool,
    ) -> DataFrame:
        """Return the DataFrame of an operator whose state is `name`, after a check that it fits the state that exists.

        Parameters
        ----------
        schema
            The operator's schema with its view for readers; None if the stores are a program's own.
        query_mode_schema
            The schema of an operator that has its query's output mode, which is checked when the query starts.
        by_python
            Whether a function of the user's gets the rows, in Spark's Python workers.

        Raises
        ------
        InvalidRequestError
            The name is not valid for a state.
        SetupError
            Executors of the session of `df` cannot reach a store actor.
        StateMismatchError
            The operator does not fit the state.
        """
        check_state_name(name)
        install(df.sparkSession, _DRIVER.answer, is_followed=_DRIVER.follow())
        _DRIVER.add(self._address, self._coordinator, self._placement)
        _DRIVER.watch(df.sparkSession)
        self._prepare(df.sparkSession, by_python=by_python)
        existing = self._coordinator.describe_state(name)
        if shards is None:
            parallelism = max(_MIN_SHARDS, df.sparkSession.sparkContext.defaultParallelism)
            shards = existing.num_shards if existing is not None else parallelism
        # Only the query's tasks know its id.
        metadata = StateMetadata(name, "", shards, output_mode, schema)
        requested = metadata
        if query_mode_schema is not None and existing is not None and existing.output_mode in OUTPUT_MODES:
            requested = metadata.in_output_mode(query_mode_schema.in_output_mode(existing.output_mode))
        # Refused now, when the query is built, rather than in its first batch.
        self._coordinator.check_state(requested)
        if existing is not None and existing.num_shards != shards:
            log.warning(
                "%s has %d shards and is asked for with %d: it is rescaled with the first batch of the query",
                name,
                existing.num_shards,
                shards,
            )
        return route(metadata)

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

        The state of its newest committed batch becomes the first version of the state of a query of the fleet, and that query continues
        with the next batch: same offsets, same watermark, same number. Nothing is written to the old checkpoint. After an import was
        killed, the same call repeats it; until it is finished no query can use the new state.

        Parameters
        ----------
        source
            The old query's ``checkpointLocation``. The query is stopped.
        frame
            The new query: the old one's sources and operators, with ``fleet.stateful`` before each stateful operator.
        checkpoint
            Folder for the new query's checkpoint; it is empty, or does not exist.
        operators
            By name of a state, the number of Spark's operator (a folder below ``state``), if they are in another order.
        from_nothing
            Columns of the results whose aggregates are not imported, as Spark's state cannot be converted to the fleet's. They only
            include rows from the first batch in the fleet on.

        Returns
        -------
        Imported
            What was imported. Then start `frame` with the new checkpoint.

        Raises
        ------
        StateMismatchError
            The checkpoint's state is not that of such a query, or there is a state of this name.
        InvalidRequestError
            There is no such checkpoint, its query runs, or a part of it cannot be imported; the error names the part.
        StoreUnavailableError
            The import was not finished.

        Examples
        --------
        >>> counts = fleet.stateful(clicks, name="clicks").groupBy("user").count()  # doctest: +SKIP
        >>> fleet.import_checkpoint("/data/old-ck", counts, checkpoint="/data/ck").rows  # doctest: +SKIP
        {'clicks': 1204}
        >>> counts.writeStream.outputMode("update").option("checkpointLocation", "/data/ck").start()  # doctest: +SKIP
        """
        check_classic(frame)
        return Importer(self._coordinator, self.uri, self.sockets, self._planned).import_checkpoint(
            source, frame, checkpoint, operators, from_nothing
        )

    def import_table(self, frame: DataFrame, rows: DataFrame, *, checkpoint: str) -> Imported:
        """Begin the state of a new query with a table of its keys and values.

        The query then reads its sources from their beginning, as any new query does.

        Parameters
        ----------
        frame
            The query, with one stateful operator: an aggregation, ``dropDuplicates``, or a function with state.
        rows
            A batch DataFrame with a row for each key: the key's columns, and of an aggregation those of its results, by their names
            and types, as ``statefleet export`` writes them; of ``dropDuplicatesWithinWatermark`` also ``expires``; of a function the
            columns of its state.
        checkpoint
            Folder for the query's checkpoint; it is empty, or does not exist.

        Returns
        -------
        Imported
            What was imported. Then start `frame` with the new checkpoint: its first batch is batch 1.

        Raises
        ------
        InvalidRequestError
            A column does not fit, or the state of an aggregate, such as an average, does not follow from its result; the error
            names it.
        StateMismatchError
            There is a state of this name.
        StoreUnavailableError
            The import was not finished; the same call repeats it.
        """
        check_classic(frame, rows)
        return Importer(self._coordinator, self.uri, self.sockets, self._planned).import_table(frame, rows, checkpoint)

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
        """Open a handle that writes the next version of a partition of keyed state, from plain Python.

        The state belongs to Python programs: the state of a streaming query is refused here. The last program to open it is its
        writer; commits of earlier programs are refused.

        Parameters
        ----------
        name, partition_id
            The state, and the number of one of its `shards` partitions.
        keys, values
            Columns of the store ``default``; or `stores`, by name. New nullable, fewer and wider value columns than those
            of the existing state are accepted.

        Raises
        ------
        InvalidRequestError
            The name of the state or of a store is not valid.
        WriterBusyError
            A handle of this program is open already.
        StateMismatchError
            The state belongs to a query, or its schema does not fit; the error shows both schemas.
        """
        check_state_name(name)
        specs = store_specs(keys, values, stores)
        newest = self._coordinator.locate(name, partition_id).newest_version
        task = TaskIdentity(name, PYTHON_QUERY_ID, self._run_id, newest, partition_id, 0, f"python:{os.getpid()}")
        metadata = StateMetadata(name, PYTHON_QUERY_ID, shards, "keyed")
        return self._client.open_update(task, metadata, specs)

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
        """Open a handle that reads a retained version of a partition of keyed state, also while it is being written.

        Raises
        ------
        VersionNotFoundError, InvalidRequestError
            The version does not exist, or is not retained; or the name is not valid for a state.
        """
        check_state_name(name)
        specs = store_specs(keys, values, stores)
        return self._client.open_read(name, partition_id, specs, version)

    def _prepare(self, spark: SparkSession, *, by_python: bool) -> None:
        """Check once for an application that its executors reach the fleet, and have Spark's workers import what they need.

        Else that would be a part of the first batch.
        """
        application = spark.sparkContext.applicationId
        reached, imported = (application, "reached"), (application, "imported")
        if not is_on_ray(spark.sparkContext.master or "") and reached not in self._prepared:
            check_reach(spark, self.uri, self.sockets)
        if by_python and imported not in self._prepared:
            slots = spark.sparkContext.defaultParallelism
            try:
                tasks = spark.range(0, slots, 1, slots).mapInArrow(warmed, "id BIGINT")
                tasks.write.format("noop").mode("overwrite").save()
            except JOB_FAILURES as error:
                raise SetupError(
                    "Spark's Python workers cannot import this package; every node needs it, and its dependencies, in the Python that "
                    "the variable PYSPARK_PYTHON names",
                    uri=self.uri,
                    cause=error,
                ) from error
            self._prepared.add(imported)
        self._prepared.add(reached)

    def explain_placement(self, name: str, shard: int) -> PlacementExplanation:
        """Explain why a shard of a state is on its store actor.

        Parameters
        ----------
        name
            The state.
        shard
            Number of its shard.

        Returns
        -------
        PlacementExplanation
            The store actor that has it (``location``), its newest moves with their reasons (``moves``, from the state's log), and
            how many state operations ran on its node or not, with the reason, since the coordinator started (``operations``).

        Raises
        ------
        InvalidRequestError
            There is no such state, or it has no such shard.
        """
        check_state_name(name)
        self._coordinator.check_shard(name, shard)
        return self._coordinator.explain_placement(name, shard)

    def rescale(self, name: str, shards: int, *, dry_run: bool = False) -> RescalePlan:
        """Change the number of shards of a state while its query runs, from one of its next batches on.

        No file is rewritten: a new shard begins with the rows of the old shards whose keys belong to it. At its next start the query
        uses its program's number again, unless the program leaves `shards` out.

        Parameters
        ----------
        name
            The state.
        shards
            A multiple or a divisor of the present number. Any number can be given to :meth:`stateful` when a query is started.
        dry_run
            Only return what would be done.

        Returns
        -------
        RescalePlan
            For each new shard, the old shards that it is made of.

        Raises
        ------
        InvalidRequestError
            There is no such state, its query does not run, its partitions are the user's own, its operator always has one shard, or the
            number is not valid.
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
        """Create a state that begins with a version of another state, for another query to continue; the other state is not changed.

        No row is copied: the branch needs the files of the other state, which are kept for it until it has a snapshot of its own. A
        second call returns the existing branch. The first query that continues the branch owns it.

        Parameters
        ----------
        name
            The state to branch; each operator of a query has its own branch, of the same version.
        as_
            Name of the branch: ``fleet.stateful(..., name=as_)`` of the other query.
        version
            A retained version; by default the newest that all shards of all operators of the query have.
        checkpoint
            Folder of a new checkpoint for the other query, which begins with the batch that reads the version. Without it, copy a
            checkpoint of that batch yourself.
        from_checkpoint
            Checkpoint of the branched query: the other query reads its input from the position of that query at the version.
            Without it, each source begins where it does without a checkpoint.
        sources
            Number of sources of the other query, if there is no `from_checkpoint`.

        Raises
        ------
        VersionNotFoundError
            Not every shard has the version, or it is not retained any more.
        InvalidRequestError
            There is no such state; another state has the branch's name; the new checkpoint's folder has other files; or the checkpoint
            of the branched query lacks the version.
        StorageUnavailableError
            The checkpoint cannot be written; the branch exists.
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

    def status(self) -> dict[str, Any]:
        """Return the status of store actors, queries, shards, versions and watermarks, as the dashboard shows it."""
        return self._coordinator.status()

    def dashboard_url(self, *, host: str | None = None, port: int | None = None) -> str:
        """Return the address of the location dashboard; start it if it does not run.

        Parameters
        ----------
        host
            Address of the head that it is served on; by default its present address, or else the loopback. Any other address needs
            a token, which is part of the returned address: ``STATEFLEET_DASHBOARD_TOKEN`` in the environment of the head's Ray, or
            a new token each time the dashboard starts.
        port
            By default a port that is computed from the fleet's URI.

        Raises
        ------
        SetupError, InvalidRequestError
            The dashboard cannot be served there.
        """
        return dashboard_url(self._actors, self.uri, DashboardOptions.of(host, port))

    def clean(self, name: str, *, dry_run: bool = False) -> dict[str, Any]:
        """Clean a state at once, as the coordinator does in every round: remove old versions, and delete files that no version needs.

        Parameters
        ----------
        name
            The state.
        dry_run
            Only return what would be deleted.

        Returns
        -------
        dict
            ``floors`` (partition, store and new oldest retained version) and ``files`` (path, bytes, age in seconds).
        """
        return self._coordinator.clean(name, dry_run=dry_run)

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Return counters of each living store actor, by actor name: bytes loaded and written, commits, shards in memory."""
        return store_metrics(self._actors, self.status())

    def shutdown(self) -> None:
        """End the fleet's actors on this cluster. Every committed version stays in the object store."""
        end_fleet(self._actors, self._coordinator)


def _check_frame(frame: object, name: str) -> None:
    """Refuse anything but a DataFrame of this process's JVM, and a stateful frame before its operator."""
    check_classic(frame)
    if isinstance(frame, StatefulDataFrame):
        raise InvalidRequestError(
            "the DataFrame is stateful already; call one of its operators, and fleet.stateful on the result for another one",
            state=name,
        )
    if not isinstance(frame, DataFrame):
        raise InvalidRequestError(
            "fleet.stateful takes a streaming DataFrame, as spark.readStream gives it",
            state=name,
            given=type(frame).__name__,
        )

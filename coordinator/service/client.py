"""The coordinator as other processes call it: one typed method for each of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.ledger.batch_result import BatchResult
from coordinator.ledger.branches import Branch
from coordinator.ledger.read_views import ReadView, ViewId, WantedView
from coordinator.ledger.rescaling import BatchShards, RescalePlan
from coordinator.ledger.state_ledger import Counted, LeaseGrant
from coordinator.ledger.version_stats import VersionStats
from coordinator.model.commits import PartitionCommit, SnapshotEntry
from coordinator.model.copy_result import CopyResult
from coordinator.model.errors import CredentialsNeededError, InvalidRequestError, StateStoreError
from coordinator.model.identities import ActorLocation, StateStoreProviderId, TaskIdentity
from coordinator.model.leases import ShardLocation
from coordinator.model.load_plans import InstancePlans, LoadPlans
from coordinator.model.maintenance import Maintenance
from coordinator.model.memory_options import MemoryUse
from coordinator.model.state_metadata import StateMetadata
from coordinator.placement.move_planner import PlacementExplanation, PlannedMove
from coordinator.placement.spreading import ActorSlot
from coordinator.runtime.runtime import Runtime
from coordinator.service.calls import Actors, RayActors, call_until
from coordinator.service.deploy import coordinator_name, deploy_coordinator
from coordinator.service.dropping import DroppedState
from coordinator.service.placement_service import Placement
from coordinator.storage.options import Secrets, StorageOptions
from coordinator.storage.probe import ProbeResult
from coordinator.telemetry.drivers import DriverReport

__all__ = ["CoordinatorClient"]

#: How long a call waits for a coordinator that is restarting, in seconds.
_DEADLINE_S = 60.0


class CoordinatorClient:
    """The coordinator of a fleet, also after it restarted, and that of a fleet which was shut down and connected to again.

    Every method raises what the coordinator raises, and StoreUnavailableError if it does not come back in time.
    Made by :meth:`connect` or :meth:`find`.
    """

    def __init__(self, uri: str, handle: Any, actors: Actors, runtime: Runtime) -> None:
        self._uri = uri
        self._handle = handle
        self._actors = actors
        self._surroundings = runtime
        self._secrets: Secrets | None = None

    @classmethod
    def find(
        cls, uri: str, *, actors: Actors | None = None, runtime: Runtime | None = None
    ) -> CoordinatorClient | None:
        """Client of the coordinator of a normalised URI that runs on this Ray cluster; None if the fleet isn't up."""
        actors = actors or RayActors()
        handle = actors.find(coordinator_name(uri))
        return None if handle is None else cls(uri, handle, actors, runtime or Runtime())

    @classmethod
    def connect(
        cls,
        uri: str,
        storage_options: StorageOptions,
        maintenance: Maintenance,
        *,
        secrets: Secrets | None = None,
        actors: Actors | None = None,
        runtime: Runtime | None = None,
    ) -> CoordinatorClient:
        """Client of the fleet's coordinator, which is started (with these options) and proven to work if it isn't there.

        Parameters
        ----------
        secrets
            Values of the options that are withheld, where they are known: handed over to the coordinator, and again if it has
            forgotten them.

        Raises
        ------
        StorageUnavailableError
            The object store can't be used.
        CredentialsNeededError
            The coordinator isn't there, and this process cannot hand it the credentials that it needs.
        """
        client = cls.find(uri, actors=actors, runtime=runtime)
        if client is not None:
            client._hand_over(secrets)
            return client
        if storage_options.withheld and secrets is None:
            raise CredentialsNeededError(
                "the fleet's coordinator is not there, and only a driver can start it, with the object store's credentials; what "
                "was committed is untouched; call statefleet.connect with the same storage_options again, then restart the query",
                uri=uri,
                options=", ".join(storage_options.withheld),
            )
        handle = deploy_coordinator(uri, storage_options, maintenance)
        client = cls(uri, handle, actors or RayActors(), runtime or Runtime())
        try:
            client._hand_over(secrets)
            client._call("open")
        except StateStoreError:
            # A coordinator that can't reach its store would be found, and trusted, by the next caller.
            client.shut_down()
            raise
        return client

    def _hand_over(self, secrets: Secrets | None) -> None:
        if secrets is not None:
            self._call("hand_over", secrets)
            self._secrets = secrets

    def shut_down(self) -> None:
        """End the coordinator for good."""
        self._actors.kill(self._handle, restart=False)

    def _call(self, method: str, *args: Any) -> Any:
        try:
            return self._call_once(method, args)
        except CredentialsNeededError:
            if self._secrets is None:
                raise
            # It started anew when nobody was left whom it could ask.
            self._call_once("hand_over", (self._secrets,))
            return self._call_once(method, args)

    def _call_once(self, method: str, args: tuple[Any, ...]) -> Any:
        clock = self._surroundings.clock
        return call_until(self._actors, clock, self._handle, method, args, deadline_s=_DEADLINE_S, renew=self._renewed)

    def _renewed(self) -> Any:
        # Who shut it down wants no other one before somebody connects.
        self._handle = self._actors.find(coordinator_name(self._uri)) or self._handle
        return self._handle

    # -- the object store -----------------------------------------------------------------------------------------

    def storage_options(self) -> StorageOptions:
        """See :meth:`CoordinatorActor.storage_options <coordinator.service.actor.CoordinatorActor.storage_options>`."""
        options: StorageOptions = self._call("storage_options")
        return options

    def handed_over(self) -> Secrets | None:
        """See :meth:`CoordinatorActor.handed_over <coordinator.service.actor.CoordinatorActor.handed_over>`."""
        secrets: Secrets | None = self._call("handed_over")
        return secrets

    def look_into(self, folder: str) -> ProbeResult:
        """See :meth:`Coordinator.look_into <coordinator.service.coordinator.Coordinator.look_into>`."""
        sighting: ProbeResult = self._call("look_into", folder)
        return sighting

    # -- states and leases ----------------------------------------------------------------------------------------

    def describe_state(self, state_name: str) -> StateMetadata | None:
        """See :meth:`Coordinator.describe_state <coordinator.service.coordinator.Coordinator.describe_state>`."""
        described: StateMetadata | None = self._call("describe_state", state_name)
        return described

    def check_state(self, metadata: StateMetadata) -> None:
        """See :meth:`Coordinator.check_state <coordinator.service.coordinator.Coordinator.check_state>`."""
        self._call("check_state", metadata)

    def check_start(self, state_name: str, query_id: str, output_mode: str | None) -> None:
        """See :meth:`Coordinator.check_start <coordinator.service.coordinator.Coordinator.check_start>`."""
        self._call("check_start", state_name, query_id, output_mode)

    def attach_and_lease_all(
        self, tasks: Sequence[TaskIdentity], metadata: StateMetadata, local: ActorLocation
    ) -> list[LeaseGrant]:
        """See :meth:`Coordinator.attach_and_lease_all <coordinator.service.coordinator.Coordinator.attach_and_lease_all>`."""
        grants: list[LeaseGrant] = self._call("attach_and_lease_all", list(tasks), metadata, local)
        return grants

    def commit_partitions(self, state_name: str, commits: Sequence[PartitionCommit]) -> list[Counted | StateStoreError]:
        """See :meth:`Coordinator.commit_partitions <coordinator.service.coordinator.Coordinator.commit_partitions>`."""
        outcomes: list[Counted | StateStoreError] = self._call("commit_partitions", state_name, list(commits))
        return outcomes

    def begin_batch(self, task: TaskIdentity, planned: int, asked: int | None) -> BatchShards:
        """See :meth:`Coordinator.begin_batch <coordinator.service.coordinator.Coordinator.begin_batch>`."""
        shards: BatchShards = self._call("begin_batch", task, planned, asked)
        return shards

    def batch_result(self, task: TaskIdentity, shards: BatchShards) -> tuple[BatchResult, Placement, BatchShards]:
        """See :meth:`Coordinator.batch_result <coordinator.service.coordinator.Coordinator.batch_result>`."""
        found: tuple[BatchResult, Placement, BatchShards] = self._call("batch_result", task, shards)
        return found

    def rescale(self, state_name: str, num_shards: int, *, dry_run: bool) -> RescalePlan:
        """See :meth:`Coordinator.rescale <coordinator.service.coordinator.Coordinator.rescale>`."""
        plan: RescalePlan = self._call("rescale", state_name, num_shards, dry_run)
        return plan

    def branch(self, state_name: str, name: str, version: int | None) -> Branch:
        """See :meth:`Coordinator.branch <coordinator.service.coordinator.Coordinator.branch>`."""
        branch: Branch = self._call("branch", state_name, name, version)
        return branch

    def drop(self, state_name: str, *, dry_run: bool, is_over: bool) -> DroppedState:
        """See :meth:`Coordinator.drop <coordinator.service.coordinator.Coordinator.drop>`."""
        dropped: DroppedState = self._call("drop", state_name, dry_run, is_over)
        return dropped

    def place_shards(
        self, state_name: str, query_id: str, shards: BatchShards, places: Sequence[ActorSlot], standbys: int = 0
    ) -> Placement:
        """See :meth:`Coordinator.place_shards <coordinator.service.coordinator.Coordinator.place_shards>`."""
        placement: Placement = self._call("place_shards", state_name, query_id, shards, list(places), standbys)
        return placement

    def check_shard(self, state_name: str, shard: int) -> None:
        """Refuse the number of a shard that no state has.

        Raises
        ------
        InvalidRequestError
            There is no such state, or it has no such shard.
        """
        described = self.describe_state(state_name)
        num_shards = 0 if described is None else described.num_shards
        if not 0 <= shard < num_shards:
            raise InvalidRequestError(
                "there is no such shard; fleet.status() and `statefleet shards` list states and their shards",
                state=state_name,
                shard=shard,
                shards=num_shards,
            )

    def explain_placement(self, state_name: str, shard: int) -> PlacementExplanation:
        """See :meth:`Coordinator.explain_placement <coordinator.service.coordinator.Coordinator.explain_placement>`."""
        explained: PlacementExplanation = self._call("explain_placement", state_name, shard)
        return explained

    def plan_move(self, state_name: str, shard: int, node_id: str) -> tuple[PlannedMove, ...]:
        """See :meth:`Coordinator.plan_move <coordinator.service.coordinator.Coordinator.plan_move>`."""
        moves: tuple[PlannedMove, ...] = self._call("plan_move", state_name, shard, node_id)
        return moves

    def plan_rebalance(self, state_names: Sequence[str]) -> tuple[PlannedMove, ...]:
        """See :meth:`Coordinator.plan_rebalance <coordinator.service.coordinator.Coordinator.plan_rebalance>`."""
        moves: tuple[PlannedMove, ...] = self._call("plan_rebalance", list(state_names))
        return moves

    def drain(self, node_id: str, *, dry_run: bool) -> tuple[PlannedMove, ...]:
        """See :meth:`Coordinator.drain <coordinator.service.coordinator.Coordinator.drain>`."""
        moves: tuple[PlannedMove, ...] = self._call("drain", node_id, dry_run)
        return moves

    def undrain(self, node_id: str) -> None:
        """See :meth:`Coordinator.undrain <coordinator.service.coordinator.Coordinator.undrain>`."""
        self._call("undrain", node_id)

    def move_prepared(self, move: PlannedMove, preparation: CopyResult | None) -> bool:
        """See :meth:`Coordinator.move_prepared <coordinator.service.coordinator.Coordinator.move_prepared>`."""
        return bool(self._call("move_prepared", move, preparation))

    def move_failed(self, move: PlannedMove, error: str) -> None:
        """See :meth:`Coordinator.move_failed <coordinator.service.coordinator.Coordinator.move_failed>`."""
        self._call("move_failed", move, error)

    def load_plans(self, state_name: str, partition_id: int, version: int, store_names: Sequence[str]) -> LoadPlans:
        """See :meth:`Coordinator.load_plans <coordinator.service.coordinator.Coordinator.load_plans>`."""
        loading: LoadPlans = self._call("load_plans", state_name, partition_id, version, list(store_names))
        return loading

    def locate(self, state_name: str, shard: int, version: int | None = None) -> ShardLocation:
        """See :meth:`Coordinator.locate <coordinator.service.coordinator.Coordinator.locate>`."""
        located: ShardLocation = self._call("locate", state_name, shard, version)
        return located

    def batch_finished(self, state_names: Sequence[str], run_id: str, batch_id: int, within_s: float) -> None:
        """See :meth:`Coordinator.batch_finished <coordinator.service.coordinator.Coordinator.batch_finished>`."""
        self._call("batch_finished", list(state_names), run_id, batch_id, within_s)

    def read_view(self, state_name: str, asked: WantedView, known: ViewId | None) -> ReadView | None:
        """See :meth:`Coordinator.read_view <coordinator.service.coordinator.Coordinator.read_view>`."""
        view: ReadView | None = self._call("read_view", state_name, asked, known)
        return view

    def list_versions(self, state_name: str, count: int, *, is_committed: bool = False) -> tuple[VersionStats, ...]:
        """See :meth:`Coordinator.list_versions <coordinator.service.coordinator.Coordinator.list_versions>`."""
        figures: tuple[VersionStats, ...] = self._call("list_versions", state_name, count, is_committed)
        return figures

    def elsewhere(self, state_name: str, actor_name: str, partition_ids: Sequence[int]) -> list[int]:
        """See :meth:`Coordinator.elsewhere <coordinator.service.coordinator.Coordinator.elsewhere>`."""
        partitions: list[int] = self._call("elsewhere", state_name, actor_name, list(partition_ids))
        return partitions

    # -- store actors ---------------------------------------------------------------------------------------------

    def add_snapshot(self, state_name: str, snapshot: SnapshotEntry) -> bool:
        """See :meth:`Coordinator.add_snapshot <coordinator.service.coordinator.Coordinator.add_snapshot>`."""
        return bool(self._call("add_snapshot", state_name, snapshot))

    def report_store_actor(self, location: ActorLocation, *, is_new: bool = True) -> None:
        """See :meth:`Coordinator.report_store_actor <coordinator.service.coordinator.Coordinator.report_store_actor>`."""
        self._call("report_store_actor", location, is_new)

    def report_memory(self, instance_id: str, use: MemoryUse) -> None:
        """See :meth:`Coordinator.report_memory <coordinator.service.coordinator.Coordinator.report_memory>`."""
        self._call("report_memory", instance_id, use)

    def report_driver(self, report: DriverReport) -> None:
        """See :meth:`Coordinator.report_driver <coordinator.service.coordinator.Coordinator.report_driver>`; not waited for."""
        self._handle.report_driver.remote(report)

    def report_store_actor_lost(self, instance_id: str) -> None:
        """See :meth:`Coordinator.report_store_actor_lost <coordinator.service.coordinator.Coordinator.report_store_actor_lost>`."""
        self._call("report_store_actor_lost", instance_id)

    def open_instance(
        self,
        provider_id: StateStoreProviderId,
        location: ActorLocation,
        ids_to_check: Sequence[StateStoreProviderId],
        version: int,
        store_names: Sequence[str],
    ) -> InstancePlans:
        """See :meth:`Coordinator.open_instance <coordinator.service.coordinator.Coordinator.open_instance>`."""
        opened: InstancePlans = self._call(
            "open_instance", provider_id, location, list(ids_to_check), version, list(store_names)
        )
        return opened

    def deactivate_instances(self, run_id: str) -> None:
        """See :meth:`Coordinator.deactivate_instances <coordinator.service.coordinator.Coordinator.deactivate_instances>`.

        The answer is not waited for.
        """
        self._handle.deactivate_instances.remote(run_id)

    # -- people ---------------------------------------------------------------------------------------------------

    def load_all_states(self) -> list[str]:
        """See :meth:`Coordinator.load_all_states <coordinator.service.coordinator.Coordinator.load_all_states>`."""
        names: list[str] = self._call("load_all_states")
        return names

    def status(self) -> dict[str, Any]:
        """See :meth:`Coordinator.status <coordinator.service.coordinator.Coordinator.status>`."""
        status: dict[str, Any] = self._call("status")
        return status

    def watch(self, known: Mapping[str, str]) -> dict[str, Any]:
        """See :meth:`Coordinator.watch <coordinator.service.coordinator.Coordinator.watch>`."""
        told: dict[str, Any] = self._call("watch", dict(known))
        return told

    def clean(self, state_name: str, *, dry_run: bool) -> dict[str, Any]:
        """See :meth:`Coordinator.clean <coordinator.service.coordinator.Coordinator.clean>`."""
        cleaned: dict[str, Any] = self._call("clean", state_name, dry_run)
        return cleaned

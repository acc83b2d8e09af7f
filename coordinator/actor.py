"""The coordinator actor: a thin asynchronous shell around the ledgers, one for each state of the fleet."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
import ray.util
from ray.exceptions import RayError

from coordinator.cleaner import Cleaner
from coordinator.cleaning_rules import check_age
from coordinator.compatibility import changes, check_metadata
from coordinator.core import LeaseGrant, StateLedger
from coordinator.dashboard import Dashboard
from coordinator.errors import InvalidRequestError, StateMismatchError
from coordinator.fleet_view import KnownFleet
from coordinator.ledger_keeper import LedgerKeeper
from coordinator.lives import StoreActorLives
from coordinator.manifest_log import CHECKPOINT_INTERVAL, ManifestLog
from coordinator.model import (
    ActorLocation,
    BatchResult,
    CommitEntry,
    InstancePlans,
    LoadPlans,
    Maintenance,
    ShardLocation,
    SnapshotEntry,
    StateMetadata,
    StateStoreId,
    StateStoreProviderId,
    TaskIdentity,
)
from coordinator.names import check_state_name, fleet_id_of, is_state_name, store_actors_prefix
from coordinator.placement import PlacementPolicy, StayElseLocal
from coordinator.records import Record
from coordinator.registry import InstanceRegistry
from coordinator.status import query_status
from coordinator.storage.handed_over import HandedOverObjectStore
from coordinator.storage.options import Secrets, StorageOptions
from coordinator.storage.probe import Sighting, look_into, probe, remove_left_over
from coordinator.storage.protocol import ObjectStore
from coordinator.storage.uris import open_travelled_store
from coordinator.surroundings import Surroundings, now_ms

__all__ = ["Coordinator", "CoordinatorActor"]

log = logging.getLogger(__name__)

#: How long a store actor may take to say what it was handed, in seconds.
_PEER_S = 5.0


class Coordinator:
    """Who holds what, and what counts.

    - Deployed by :mod:`coordinator.deploy` as a named, detached actor that restarts by itself.
    - Its memory is a cache: ledgers are loaded from the manifest logs when first asked for, so a restarted coordinator
      answers as the former one did.
    - Every method may be called again after a lost answer.
    - :class:`coordinator.client.CoordinatorClient` has a method for each that others call.

    Parameters
    ----------
    uri, store
        The fleet, and its object store.
    node_id
        Ray node that it runs on.
    placement
        Where shards go.
    checkpoint_interval
        Of the manifest logs, in appends.
    """

    def __init__(
        self,
        uri: str,
        store: ObjectStore,
        maintenance: Maintenance,
        node_id: str,
        *,
        placement: PlacementPolicy | None = None,
        surroundings: Surroundings | None = None,
        checkpoint_interval: int = CHECKPOINT_INTERVAL,
    ) -> None:
        self._uri = uri
        self._store = store
        self._surroundings = surroundings or Surroundings()
        self._clock = self._surroundings.clock
        self._checkpoint_interval = checkpoint_interval
        self._writer_id = self._surroundings.new_id()
        self._started_at_ms = now_ms(self._clock)
        self._node_id = node_id
        self._keepers: dict[str, LedgerKeeper] = {}
        #: One a state: a state that is slow to read, or broken, is waited for by nobody else's tasks.
        self._opening: dict[str, asyncio.Lock] = {}
        self._registry = InstanceRegistry()
        self._lives = StoreActorLives()
        self._placement = placement or StayElseLocal()
        self._fleet = KnownFleet(self._lives, self._ledgers)
        self._ended_runs: set[str] = set()
        self._maintenance = maintenance
        self._cleaner = Cleaner(self._store, maintenance, self._clock)
        self._rounds: asyncio.Task[None] | None = None
        self._dashboard = Dashboard()
        self._dashboard_url: str | None = None

    async def open(self) -> None:
        """Prove that the store works; raises StorageUnavailableError if it doesn't."""
        await asyncio.to_thread(probe, self._store)
        await asyncio.to_thread(remove_left_over, self._store, self._clock.now_s(), self._maintenance.grace_s)
        await self.dashboard_url()

    async def _keeper(self, state_name: str) -> LedgerKeeper:
        # Whatever the caller checked: the folder of a name such as "" is everybody's, and cleaning it would be the end of them.
        check_state_name(state_name)
        keeper = self._keepers.get(state_name)
        if keeper is None:
            async with self._opening.setdefault(state_name, asyncio.Lock()):
                keeper = self._keepers.get(state_name)
                if keeper is None:
                    keeper = self._keepers[state_name] = await self._opened(state_name)
            # Who still waits has the lock itself; who comes now finds the keeper.
            self._opening.pop(state_name, None)
        return keeper

    async def _opened(self, state_name: str) -> LedgerKeeper:
        manifest_log = ManifestLog(
            self._store,
            state_name,
            self._writer_id,
            new_id=self._surroundings.new_id,
            checkpoint_interval=self._checkpoint_interval,
        )
        keeper = LedgerKeeper(manifest_log, max_age_s=self._maintenance.grace_s / 2, clock=self._clock)
        await keeper.open()
        if self._rounds is None:
            self._rounds = asyncio.create_task(self._maintain())
        return keeper

    def _ledgers(self) -> Iterator[StateLedger]:
        return (keeper.ledger for keeper in self._keepers.values() if keeper.ledger is not None)

    # -- states and leases ----------------------------------------------------------------------------------------

    async def describe_state(self, state_name: str) -> StateMetadata | None:
        """What is fixed about a state, with its newest schema; None if there is no such state."""
        keeper = await self._keeper(state_name)
        created = keeper.metadata
        return None if created is None else await keeper.submit(lambda ledger: ([], ledger.described(created)))

    async def check_state(self, metadata: StateMetadata) -> None:
        """Refuse a query that does not fit an existing state (StateMismatchError), before it starts.

        Its first batch is known to its tasks only: the one after the newest that every shard has, or that one again. It may fit either.
        """
        keeper = await self._keeper(metadata.state_name)
        created = keeper.metadata
        if created is None:
            return
        existing = await keeper.submit(lambda ledger: ([], _fitting(ledger, created, metadata)))
        if existing is not None:
            begun, gone = changes(existing, metadata.schema)
            if begun or gone:
                # A renamed column is another column: whoever did not mean it should see it.
                log.warning(
                    "%s: starting from nothing: %s; left out: %s", metadata.state_name, begun or "-", gone or "-"
                )

    async def attach_and_lease(self, task: TaskIdentity, metadata: StateMetadata, local: ActorLocation) -> LeaseGrant:
        """The store actor that may commit the task's shard, and the version its batch reads."""
        keeper = await self._keeper(task.state_name)
        local = self._lives.newest(local)

        def check(ledger: StateLedger) -> tuple[list[Record], None]:
            ledger.check_query(task)
            return [], None

        if keeper.metadata is None:
            # Before anything is written: a checkpoint ahead of a missing state must not make an empty one.
            await keeper.submit(check)
            await keeper.create_metadata(metadata)
        created = keeper.metadata
        assert created is not None

        def decide(ledger: StateLedger) -> tuple[list[Record], tuple[LeaseGrant, bool]]:
            # First whose the state is: a run that was replaced is told so, whatever became of the state since.
            ledger.check_query(task)
            ledger.check_whole(task, created.num_shards)
            is_new = task.run_id != ledger.run_id
            records, grant = ledger.decide_lease(task, local, self._fleet, self._placement)
            return [*records, *ledger.decide_schema(task, created, metadata)], (grant, is_new)

        upstream = [
            await (await self._keeper(name)).submit(
                lambda ledger: ([], ledger.batch_watermarks(task.run_id, task.batch_id))
            )
            for name in metadata.schema.get("options", {}).get("upstream", ())
        ]
        grant, is_new = await keeper.submit(decide)
        if is_new:
            # Of a driver that was killed, nobody says that its run has ended.
            self._registry.forget_former_runs(grant.lease.store_id.checkpoint_root_location, task.run_id)
        return replace(grant, upstream=tuple(upstream))

    async def commit_all(self, state_name: str, entries: Sequence[CommitEntry]) -> tuple[CommitEntry, ...]:
        """Count one attempt's commits of all stores of a partition, durably and together.

        Returns
        -------
        tuple of CommitEntry
            Those that count: the own, or another attempt's of the same run.
        """

        def decide(ledger: StateLedger) -> tuple[list[Record], tuple[CommitEntry, ...]]:
            records, counted = ledger.decide_commits(entries)
            if records:
                # Here, not when the call came in: the wait for the log's turn is part of the commit's age.
                for entry in entries:
                    check_age(entry.file, entry.committed_at_ms, now_ms(self._clock), self._maintenance.grace_s)
            return records, counted

        return await (await self._keeper(state_name)).submit(decide)

    async def batch_result(self, state_name: str, run_id: str, batch_id: int, num_shards: int) -> BatchResult:
        """What a batch of a run did to a state, and which of its shards have not counted it."""
        keeper = await self._keeper(state_name)
        return await keeper.submit(lambda ledger: ([], ledger.batch_result(run_id, batch_id, num_shards)))

    async def load_plans(
        self, state_name: str, partition_id: int, version: int, store_names: Sequence[str]
    ) -> LoadPlans:
        """How to load a version of some of a partition's stores; the files are left alone for the grace period."""
        keeper = await self._keeper(state_name)
        # Through the queue: an answer must not show commits whose records are still on their way.
        loading = await keeper.submit(lambda ledger: ([], ledger.load_plans(partition_id, version, store_names)))
        self._cleaner.pin(loading)
        return loading

    async def locate(self, state_name: str, partition_id: int) -> ShardLocation:
        """Where a partition is, and its newest counted version."""
        keeper = await self._keeper(state_name)

        def look(ledger: StateLedger) -> tuple[list[Record], ShardLocation]:
            assigned = ledger.location(partition_id)
            store_id = StateStoreId(ledger.root, 0, partition_id)
            newest = ledger.base_version(partition_id, sys.maxsize)
            return [], ShardLocation(store_id, newest, None if assigned is None else assigned[1])

        return await keeper.submit(look)

    async def elsewhere(self, state_name: str, actor_name: str, partition_ids: Sequence[int]) -> list[int]:
        """Those of some partitions that are leased to another store actor: one look at the log, however many they are."""
        keeper = await self._keeper(state_name)
        assigned = await keeper.submit(lambda ledger: ([], ledger.assigned()))
        # By name: a shard that a former life was given is this one's.
        return [one for one in partition_ids if one in assigned and assigned[one].actor_name != actor_name]

    # -- maintenance ----------------------------------------------------------------------------------------------

    async def add_snapshot(self, state_name: str, snapshot: SnapshotEntry) -> bool:
        """Count a snapshot; False if its version was superseded meanwhile, or a newer one is there."""

        def decide(ledger: StateLedger) -> tuple[list[Record], bool]:
            records, counted = ledger.decide_snapshot(snapshot)
            if records:
                check_age(snapshot.file, snapshot.created_at_ms, now_ms(self._clock), self._maintenance.grace_s)
            return records, counted

        return await (await self._keeper(state_name)).submit(decide)

    async def _maintain(self) -> None:
        """Truncate and clean every state, again and again. A failure of one round is told and the next one tries again."""
        while True:
            await asyncio.sleep(self._maintenance.interval_s)
            for state_name, keeper in list(self._keepers.items()):
                try:
                    await self._cleaner.round(keeper, state_name)
                except Exception:  # whatever it is, the other states and the next round have their turn
                    log.exception("maintenance of a state failed; it is tried again at the next round: %s", state_name)

    async def clean(self, state_name: str, dry_run: bool) -> dict[str, Any]:
        """Let go of versions that need not be retained, and delete the files that nothing needs, or only say what would go.

        Nothing is deleted before the coordinator has been there for the grace period.

        Returns
        -------
        dict
            ``floors`` (partition, store and oldest retained version, where that moves) and ``files`` (path, bytes and age in seconds).
        """
        return await self._cleaner.clean(await self._keeper(state_name), state_name, dry_run=dry_run)

    async def look_into(self, folder: str) -> Sighting:
        """Read what a store actor wrote in a folder, and answer there: see :func:`coordinator.storage.probe.prove_shared`."""
        place = f"pid {os.getpid()} on {socket.gethostname()}, node {self._node_id}"
        return await asyncio.to_thread(look_into, self._store, folder, place)

    # -- store actors ---------------------------------------------------------------------------------------------

    async def report_store_actor(self, location: ActorLocation) -> None:
        """A store actor has started; a former life of the same name is over."""
        self._lives.begun(location)

    async def report_store_actor_lost(self, instance_id: str) -> None:
        """A store actor died under a call; its shards go elsewhere at their next lease."""
        self._lives.ended(instance_id)

    # -- Spark's StateStoreCoordinator ----------------------------------------------------------------------------

    async def report_active_instance(
        self,
        provider_id: StateStoreProviderId,
        location: ActorLocation,
        ids_to_check: Sequence[StateStoreProviderId] = (),
    ) -> list[StateStoreProviderId]:
        """See :meth:`InstanceRegistry.report_active_instance`; what this coordinator has forgotten in a restart, leases tell."""
        self._lives.begun(location)
        stale = self._registry.report_active_instance(provider_id, location, ids_to_check)
        remembered = await self._remembered(stale, location)
        for other in remembered:
            self._registry.report_active_instance(other, location, ())
        return [other for other in stale if other not in remembered]

    async def _remembered(
        self, stale: Sequence[StateStoreProviderId], location: ActorLocation
    ) -> set[StateStoreProviderId]:
        """Those that nobody has reported to this life of the coordinator, though they are leased to the store actor."""
        unknown = [
            one
            for one in stale
            if self._registry.get_location(one) is None and one.query_run_id not in self._ended_runs
        ]
        # One look at the log a state, however many shards it has.
        told = {
            name: await (await self._keeper(name)).submit(lambda ledger: ([], (ledger.run_id, ledger.assigned())))
            for name in {one.store_id.state_name for one in unknown}
        }
        leased = {}
        for one in unknown:
            run_id, assigned = told[one.store_id.state_name]
            leased[one] = assigned.get(one.store_id.partition_id) if one.query_run_id == run_id else None
        return {one for one, where in leased.items() if where is not None and where.instance_id == location.instance_id}

    async def open_instance(
        self,
        provider_id: StateStoreProviderId,
        location: ActorLocation,
        ids_to_check: Sequence[StateStoreProviderId],
        version: int,
        store_names: Sequence[str],
    ) -> InstancePlans:
        """:meth:`report_active_instance` and :meth:`load_plans` in one: what a store asks before it opens a partition at a version."""
        store_id = provider_id.store_id
        loading = await self.load_plans(store_id.state_name, store_id.partition_id, version, store_names)
        return InstancePlans(tuple(await self.report_active_instance(provider_id, location, ids_to_check)), loading)

    async def verify_if_instance_active(self, provider_id: StateStoreProviderId, location: ActorLocation) -> bool:
        """See :meth:`InstanceRegistry.verify_if_instance_active`."""
        return self._registry.verify_if_instance_active(provider_id, location)

    async def get_location(self, provider_id: StateStoreProviderId) -> ActorLocation | None:
        """See :meth:`InstanceRegistry.get_location`."""
        return self._registry.get_location(provider_id)

    async def deactivate_instances(self, run_id: str) -> int:
        """See :meth:`InstanceRegistry.deactivate_instances`; called when a query stops."""
        self._ended_runs.add(run_id)
        return self._registry.deactivate_instances(run_id)

    # -- showing --------------------------------------------------------------------------------------------------

    async def load_all_states(self) -> list[str]:
        """Open every state below the fleet's URI; returns their names."""
        names = filter(is_state_name, await asyncio.to_thread(self._store.folders))
        # A state is known by its metadata; what else its folder has is not listed.
        found = await asyncio.gather(*(asyncio.to_thread(self._has_metadata, name) for name in names))
        states = [name for name in found if name is not None]
        await asyncio.gather(*(self._keeper(name) for name in states))
        return states

    def _has_metadata(self, name: str) -> str | None:
        """The name of a folder that is a state's."""
        try:
            self._store.get(f"{name}/metadata.json")
        except FileNotFoundError:
            return None
        return name

    def _status(self) -> dict[str, Any]:
        return {
            "fleet_id": fleet_id_of(self._uri),
            "uri": self._uri,
            "coordinator": {"node_id": self._node_id, "pid": os.getpid(), "started_at_ms": self._started_at_ms},
            "store_actors": [
                {
                    "actor_name": actor.actor_name,
                    "instance_id": actor.instance_id,
                    "node_id": actor.node_id,
                    "host": actor.host,
                    "pid": actor.pid,
                    "alive": not self._lives.is_over(actor),
                }
                for actor in self._lives.all()
            ],
            "queries": [
                query_status(
                    keeper.ledger,
                    keeper.metadata,
                    active=bool(keeper.ledger.run_id) and keeper.ledger.run_id not in self._ended_runs,
                )
                for keeper in self._keepers.values()
                if keeper.ledger is not None and keeper.metadata is not None
            ],
        }

    async def status(self) -> dict[str, Any]:
        """Store actors, queries and shards as JSON data."""
        return self._status()

    async def dashboard_url(self) -> str:
        """Address of the dashboard, started at the first call after each start of the actor."""
        if self._dashboard_url is None:
            self._dashboard_url = await self._dashboard.start(self._status)
        return self._dashboard_url

    async def ping(self) -> str:
        """Writer id of this life of the coordinator."""
        return self._writer_id


def _fitting(ledger: StateLedger, created: StateMetadata, asked: StateMetadata) -> Mapping[str, Any] | None:
    """The schema that a query would go on from, None if from nothing; StateMismatchError if it fits neither batch it may begin at."""
    newest = ledger.finished_version(created.num_shards)
    refusal: StateMismatchError | None = None
    for version in (newest, max(0, newest - 1)):
        schema = ledger.committed_schema(created, version)
        try:
            check_metadata(replace(created, schema=asked.schema if schema is None else dict(schema)), asked)
        except StateMismatchError as error:
            refusal = refusal or error
        else:
            return schema
    assert refusal is not None
    raise refusal


class CoordinatorActor(Coordinator):
    """The coordinator as Ray makes it, anew after each death.

    Parameters
    ----------
    uri, storage_options
        The fleet, and how its object store is opened.
    namespace
        Ray's, of the fleet's actors.
    """

    def __init__(self, uri: str, storage_options: StorageOptions, maintenance: Maintenance, namespace: str) -> None:
        self._storage_options = storage_options
        self._namespace = namespace
        self._handed = open_travelled_store(uri, storage_options, self._ask_store_actors)
        super().__init__(uri, self._handed, maintenance, ray.get_runtime_context().get_node_id())

    async def storage_options(self) -> StorageOptions:
        """Options that the fleet was started with, as they travel."""
        return self._storage_options

    async def hand_over(self, secrets: Secrets) -> None:
        """Take credentials of the object store, which are kept in memory only.

        Raises
        ------
        StorageUnavailableError
            The store does not accept them; those that were in use stay.
        InvalidRequestError
            The fleet was started without any, so its processes use those of their environment.
        """
        if not isinstance(self._handed, HandedOverObjectStore):
            raise InvalidRequestError(
                "this fleet was started without credentials in storage_options and uses those in the environment of its processes; "
                "nothing was changed; connect without them, or call shutdown() of the fleet first",
                uri=self._uri,
            )
        await asyncio.to_thread(self._handed.hand_over, secrets)

    async def handed_over(self) -> Secrets | None:
        """The credentials that this process, or else a store actor, was handed; None if nobody knows them any more."""
        if not isinstance(self._handed, HandedOverObjectStore):
            return None
        return self._handed.secrets or await asyncio.to_thread(self._ask_store_actors)

    def _ask_store_actors(self) -> Secrets | None:
        prefix = store_actors_prefix(self._uri)
        named: Any = ray.util.list_named_actors(all_namespaces=True)
        for actor in named:
            if actor["namespace"] != self._namespace or not actor["name"].startswith(prefix):
                continue
            try:
                handle: Any = ray.get_actor(actor["name"], namespace=self._namespace)
                secrets: Secrets | None = ray.get(handle.handed_over.remote(), timeout=_PEER_S)
            except (RayError, ValueError) as error:  # ValueError is how Ray says that it is gone by now
                log.info("a store actor cannot say whether it has the credentials: %s: %s", actor["name"], error)
                continue
            if secrets is not None:
                return secrets
        return None

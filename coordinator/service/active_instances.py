"""Spark's StateStoreCoordinator in a coordinator that may restart: leases say what a restart has forgotten. No Ray."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.model.identities import ActorLocation, StateStoreId, StateStoreProviderId
from coordinator.placement.actor_registry import ActorRegistry


class InstanceRegistry:
    """Records the store actor that has each shard loaded, per query run: Spark's StateStoreCoordinator, message by message.

    Volatile on purpose, as in Spark: it is a hint for placement and unloading. The ledger decides which store actor may commit.
    """

    def __init__(self) -> None:
        self._instances: dict[StateStoreProviderId, ActorLocation] = {}

    def report_active_instance(
        self, provider_id: StateStoreProviderId, location: ActorLocation, ids_to_check: Iterable[StateStoreProviderId]
    ) -> list[StateStoreProviderId]:
        """Record that a store actor has loaded a shard (the last reporter wins).

        Returns
        -------
        list of StateStoreProviderId
            The ids of `ids_to_check` that are recorded at another store actor or at none: the reporter should unload them.
        """
        self._instances[provider_id] = location
        return [other_id for other_id in ids_to_check if not self.verify_if_instance_active(other_id, location)]

    def verify_if_instance_active(self, provider_id: StateStoreProviderId, location: ActorLocation) -> bool:
        """Return whether the shard is recorded at exactly this store actor."""
        recorded = self._instances.get(provider_id)
        return recorded is not None and recorded.instance_id == location.instance_id

    def get_location(self, provider_id: StateStoreProviderId) -> ActorLocation | None:
        """Return the store actor that has the shard loaded, None if none reported it."""
        return self._instances.get(provider_id)

    def deactivate_instances(self, run_id: str) -> int:
        """Forget all shards of one query run; returns how many there were."""
        ended = [provider_id for provider_id in self._instances if provider_id.query_run_id == run_id]
        for provider_id in ended:
            del self._instances[provider_id]
        return len(ended)

    def forget_previous_runs(self, root: str, run_id: str) -> None:
        """Forget the shards that other runs had of a state (its folder) that a run has taken over."""
        previous = [
            provider_id
            for provider_id in self._instances
            if provider_id.store_id.checkpoint_root_location == root and provider_id.query_run_id != run_id
        ]
        for provider_id in previous:
            del self._instances[provider_id]


class ActiveInstances:
    """Answers the messages of Spark's StateStoreCoordinator."""

    def __init__(self, store_actors: ActorRegistry, writer_of: Callable[[str], Awaitable[LedgerWriter]]) -> None:
        self.registry = InstanceRegistry()
        self.ended_runs: set[str] = set()
        self._store_actors = store_actors
        self._writer_of = writer_of

    async def report(
        self, provider_id: StateStoreProviderId, location: ActorLocation, ids_to_check: Sequence[StateStoreProviderId]
    ) -> list[StateStoreProviderId]:
        """Record that a store actor has loaded a shard, and return the other shards that it should unload.

        See :meth:`InstanceRegistry.report_active_instance`. Leases say what this coordinator has forgotten in a restart.
        """
        self._store_actors.started(location)
        stale = self.registry.report_active_instance(provider_id, location, ids_to_check)
        remembered = await self._remembered(stale, location)
        for remembered_id in remembered:
            self.registry.report_active_instance(remembered_id, location, ())
        return [remembered_id for remembered_id in stale if remembered_id not in remembered]

    def has(self, ledger: StateLedger) -> bool:
        """Return whether store actors have reported shards of a state for its newest run, and that run is not known to be over."""
        if ledger.run_id in self.ended_runs:
            return False
        stores = (StateStoreId(ledger.root, 0, partition) for partition in ledger.assigned())
        return any(
            self.registry.get_location(StateStoreProviderId(store, ledger.run_id)) is not None for store in stores
        )

    def end(self, run_id: str) -> int:
        """Forget all shards of a run, which has ended; returns how many there were."""
        self.ended_runs.add(run_id)
        return self.registry.deactivate_instances(run_id)

    async def _remembered(
        self, stale: Sequence[StateStoreProviderId], location: ActorLocation
    ) -> set[StateStoreProviderId]:
        """Return the shards that are leased to the store actor, though they were not reported to this incarnation of the
        coordinator.
        """
        unknown = [
            stale_id
            for stale_id in stale
            if self.registry.get_location(stale_id) is None and stale_id.query_run_id not in self.ended_runs
        ]
        # One look at the log for each state, not for each shard.
        assignments = {
            name: await (await self._writer_of(name)).read(lambda ledger: (ledger.run_id, ledger.assigned()))
            for name in {stale_id.store_id.state_name for stale_id in unknown}
        }
        leased = {}
        for stale_id in unknown:
            run_id, assigned = assignments[stale_id.store_id.state_name]
            leased[stale_id] = assigned.get(stale_id.store_id.partition_id) if stale_id.query_run_id == run_id else None
        return {
            stale_id
            for stale_id, where in leased.items()
            if where is not None and where.instance_id == location.instance_id
        }

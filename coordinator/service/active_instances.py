"""Spark's StateStoreCoordinator in a coordinator that may restart: leases say what a restart has forgotten. No Ray."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.model.identities import ActorLocation, StateStoreId, StateStoreProviderId
from coordinator.placement.actor_registry import ActorRegistry


class ActiveInstances:
    """Records the store actor that has each shard loaded, per query run: answers the messages of Spark's StateStoreCoordinator.

    Volatile on purpose, as in Spark: it is a hint for placement and unloading. The ledger decides which store actor may commit.
    """

    def __init__(self, store_actors: ActorRegistry, writer_of: Callable[[str], Awaitable[LedgerWriter]]) -> None:
        self._instances: dict[StateStoreProviderId, ActorLocation] = {}
        self.ended_runs: set[str] = set()
        self._store_actors = store_actors
        self._writer_of = writer_of

    async def report(
        self, provider_id: StateStoreProviderId, location: ActorLocation, ids_to_check: Sequence[StateStoreProviderId]
    ) -> list[StateStoreProviderId]:
        """Record that a store actor has loaded a shard (the last reporter wins).

        Leases say what this coordinator has forgotten in a restart.

        Returns
        -------
        list of StateStoreProviderId
            The ids of `ids_to_check` that are recorded at another store actor or at none: the reporter should unload them.
        """
        self._store_actors.started(location)
        self._instances[provider_id] = location
        stale = [other_id for other_id in ids_to_check if not _is_at(self.location(other_id), location)]
        remembered = await self._remembered(stale, location)
        self._instances |= dict.fromkeys(remembered, location)
        return [other_id for other_id in stale if other_id not in remembered]

    def location(self, provider_id: StateStoreProviderId) -> ActorLocation | None:
        """Return the store actor that has the shard loaded, None if none reported it."""
        return self._instances.get(provider_id)

    def has(self, ledger: StateLedger) -> bool:
        """Return whether store actors have reported shards of a state for its newest run, and that run is not known to be over."""
        if ledger.run_id in self.ended_runs:
            return False
        stores = (StateStoreId(ledger.root, 0, partition) for partition in ledger.assigned())
        return any(StateStoreProviderId(store, ledger.run_id) in self._instances for store in stores)

    def end(self, run_id: str) -> int:
        """Forget all shards of a run, which has ended; returns how many there were."""
        self.ended_runs.add(run_id)
        return self.forget(run_id)

    def forget(self, run_id: str) -> int:
        """Forget all shards of a run; returns how many there were."""
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

    async def _remembered(
        self, stale: Sequence[StateStoreProviderId], location: ActorLocation
    ) -> set[StateStoreProviderId]:
        """Return the shards that are leased to the store actor, and were not reported to this incarnation of the coordinator."""
        unknown = [
            stale_id
            for stale_id in stale
            if stale_id not in self._instances and stale_id.query_run_id not in self.ended_runs
        ]
        # One look at the log for each state, not for each shard.
        leases = {
            name: await (await self._writer_of(name)).read(lambda ledger: (ledger.run_id, ledger.assigned()))
            for name in {stale_id.store_id.state_name for stale_id in unknown}
        }
        remembered = set()
        for stale_id in unknown:
            run_id, assigned = leases[stale_id.store_id.state_name]
            if stale_id.query_run_id == run_id and _is_at(assigned.get(stale_id.store_id.partition_id), location):
                remembered.add(stale_id)
        return remembered


def _is_at(where: ActorLocation | None, location: ActorLocation) -> bool:
    return where is not None and where.instance_id == location.instance_id

"""A registry of the shards that each store actor has loaded, by Spark's own protocol."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.model.identities import ActorLocation, StateStoreProviderId


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

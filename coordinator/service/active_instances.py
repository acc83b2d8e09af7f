"""Spark's StateStoreCoordinator in a coordinator that may restart: what its memory has forgotten, leases tell. No Ray."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.model.identities import ActorLocation, StateStoreId, StateStoreProviderId
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.placement.instance_registry import InstanceRegistry

__all__ = ["ActiveInstances"]


class ActiveInstances:
    """Which store actor has which shard loaded.

    Parameters
    ----------
    lives
        Told of each reporter.
    keeper
        Gives the keeper of a state's ledger.

    Attributes
    ----------
    registry
        What was reported to this life of the coordinator.
    ended_runs
        Runs of which it is known that they are over.
    """

    def __init__(self, lives: ActorRegistry, writer: Callable[[str], Awaitable[LedgerWriter]]) -> None:
        self.registry = InstanceRegistry()
        self.ended_runs: set[str] = set()
        self._lives = lives
        self._writer_of = writer

    async def report(
        self, provider_id: StateStoreProviderId, location: ActorLocation, ids_to_check: Sequence[StateStoreProviderId]
    ) -> list[StateStoreProviderId]:
        """See :meth:`InstanceRegistry.report_active_instance`; what this coordinator has forgotten in a restart, leases tell."""
        self._lives.started(location)
        stale = self.registry.report_active_instance(provider_id, location, ids_to_check)
        remembered = await self._remembered(stale, location)
        for other in remembered:
            self.registry.report_active_instance(other, location, ())
        return [other for other in stale if other not in remembered]

    def has(self, ledger: StateLedger) -> bool:
        """Whether store actors have reported shards of a state for its newest run, which nobody has said is over."""
        if ledger.run_id in self.ended_runs:
            return False
        stores = (StateStoreId(ledger.root, 0, partition) for partition in ledger.assigned())
        return any(
            self.registry.get_location(StateStoreProviderId(store, ledger.run_id)) is not None for store in stores
        )

    def end(self, run_id: str) -> int:
        """See :meth:`InstanceRegistry.deactivate_instances`; called when a query stops."""
        self.ended_runs.add(run_id)
        return self.registry.deactivate_instances(run_id)

    async def _remembered(
        self, stale: Sequence[StateStoreProviderId], location: ActorLocation
    ) -> set[StateStoreProviderId]:
        """Those that nobody has reported to this life of the coordinator, though they are leased to the store actor."""
        unknown = [
            one for one in stale if self.registry.get_location(one) is None and one.query_run_id not in self.ended_runs
        ]
        # One look at the log a state, however many shards it has.
        told = {
            name: await (await self._writer_of(name)).read(lambda ledger: (ledger.run_id, ledger.assigned()))
            for name in {one.store_id.state_name for one in unknown}
        }
        leased = {}
        for one in unknown:
            run_id, assigned = told[one.store_id.state_name]
            leased[one] = assigned.get(one.store_id.partition_id) if one.query_run_id == run_id else None
        return {one for one, where in leased.items() if where is not None and where.instance_id == location.instance_id}

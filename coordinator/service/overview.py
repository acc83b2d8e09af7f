"""The states of a fleet as users and the dashboard see them, as JSON data. No Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.open_states import OpenStates
from coordinator.model.metric_table import Sample
from coordinator.model.state_metadata import StateMetadata
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.placement.lease_plans import PlannedLeases
from coordinator.runtime.runtime import Clock
from coordinator.service.state_metrics import StateMetrics
from coordinator.telemetry.state_stats import TaskLocality
from coordinator.telemetry.status import fleet_status, query_status


@dataclass(eq=False)
class Overview:
    """Projects ledgers, plans and records to status, details and samples.

    Parameters
    ----------
    states
        The states; only open ones are shown from their ledgers.
    """

    _uri: str
    _node_id: str
    _clock: Clock
    _states: OpenStates
    _actors: ActorRegistry
    _leases: PlannedLeases
    _locality: TaskLocality
    _metrics: StateMetrics
    _is_active: Callable[[StateLedger], bool]

    def status(self) -> dict[str, Any]:
        """Return store actors, queries and shards."""
        queries = [
            {
                **query_status(ledger, metadata, self._locality, active=self._is_active(ledger)),
                "slow_batches": [asdict(batch) for batch in self._metrics.record(metadata.state_name).slow_batches],
                "running_batch": self._running_batch(ledger, metadata),
                "behind_records": self._metrics.behind(ledger),
            }
            for ledger, metadata in self._states.described()
        ]
        queries += [
            {**state.details(), "running_batch": None, "behind_records": None}
            for state in self._states.resting.values()
        ]
        unreadable = [{"name": name, "error": error} for name, error in self._states.unreadable.items()]
        return {**self._fleet(queries), "unreadable": unreadable}

    async def status_details(self) -> dict[str, Any]:
        """Return :meth:`status` as the dashboard shows it, with batches, refusals, and files and moves of each shard.

        Returns
        -------
        dict
            ``queries``, as of :func:`~coordinator.telemetry.status.query_status`; ``took_ms``, for how long no other request was
            answered meanwhile; ``executors`` of all drivers; ``running``, the batches that take long, by state.
        """
        queries = [state.details() for state in self._states.resting.values()]
        took_s = 0.0
        for ledger, created in self._states.described():
            began_s = self._clock.elapsed_s()
            queries.append(self.details(ledger, created, is_active=self._is_active(ledger)))
            took_s += self._clock.elapsed_s() - began_s
            # Tasks have their turn between one query and the next.
            await asyncio.sleep(0)
        return {
            **self._fleet(queries),
            "running": self._where_known(self._running_batch),
            "behind_records": self._where_known(lambda ledger, _: self._metrics.behind(ledger)),
            "drained": sorted(self._leases.drained),
            "took_ms": int(1000 * took_s),
        }

    def details(self, ledger: StateLedger, created: StateMetadata, *, is_active: bool) -> dict[str, Any]:
        """Return all that is shown of a query."""
        record = self._metrics.record(ledger.state_name)
        return query_status(ledger, created, self._locality, active=is_active, record=record)

    async def samples(self) -> list[Sample]:
        """Return the metrics of the states that are open; see :meth:`StateMetrics.samples`."""
        states = []
        for name, writer in self._states.writers():
            ledger, created = writer.ledger, writer.metadata
            if ledger is not None and created is not None:
                is_active, opening = self._is_active(ledger), self._states.openings[name]
                stamp = f"{opening}-{writer.changes}-{self._metrics.record(name).changes}-{is_active}"
                states.append((stamp, ledger, created, is_active))
        return await self._metrics.samples(states)

    def _running_batch(self, ledger: StateLedger, metadata: StateMetadata) -> dict[str, Any] | None:
        running = self._metrics.running(ledger, metadata) if self._is_active(ledger) else None
        return None if running is None else asdict(running)

    def _where_known(self, of: Callable[[StateLedger, StateMetadata], Any]) -> dict[str, Any]:
        """Return something of each state, by its name, without the states of which it is None."""
        found = {metadata.state_name: of(ledger, metadata) for ledger, metadata in self._states.described()}
        return {name: value for name, value in found.items() if value is not None}

    def _fleet(self, queries: list[dict[str, Any]]) -> dict[str, Any]:
        coordinator = {"node_id": self._node_id, "pid": os.getpid(), "started_at_ms": self._metrics.started_at_ms}
        queries.sort(key=lambda query: str(query["name"]))
        fleet = fleet_status(self._uri, coordinator, self._actors, queries)
        return {**fleet, "executors": self._metrics.executors()}

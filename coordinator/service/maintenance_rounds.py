"""Regular maintenance of the states of a fleet: clean, finish drops, unload ledgers of ended queries. No Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.cleaner import Cleaner
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.log.open_states import OpenStates
from coordinator.model.identities import PYTHON_QUERY_ID
from coordinator.model.maintenance import Maintenance
from coordinator.placement.lease_plans import PlannedLeases
from coordinator.runtime.runtime import Clock
from coordinator.service.active_instances import ActiveInstances
from coordinator.service.dropping import Dropping
from coordinator.service.overview import Overview
from coordinator.service.state_metrics import StateMetrics
from coordinator.telemetry.state_stats import TaskLocality

log = logging.getLogger(__name__)


@dataclass(eq=False)
class MaintenanceRounds:
    """Visits every state again and again, and knows which queries ended a while ago.

    A query has ended if its driver said so, or if no driver that reports has its run: a driver that was killed says nothing. When it
    ended is not in the log, so the time counts from when that was first seen. What memory has of a state besides its ledger (overview,
    metrics, leases, locality, instances) is dropped with the ledger.
    """

    _maintenance: Maintenance
    _clock: Clock
    _is_running: Callable[[StateLedger], bool]
    _states: OpenStates
    _cleaner: Cleaner
    _dropping: Dropping
    _overview: Overview
    _metrics: StateMetrics
    _leases: PlannedLeases
    _locality: TaskLocality
    _instances: ActiveInstances
    #: When the queries of states were first seen to have ended, in seconds of the clock.
    _seen_ended_s: dict[str, float] = field(default_factory=dict)

    async def run(self) -> None:
        """Maintain all states, until it is cancelled. The failure of a state is logged, and the next round tries again."""
        while True:
            await asyncio.sleep(self._maintenance.interval_s)
            for state_name, writer in self._states.writers():
                try:
                    await self._maintain(state_name, writer)
                except Exception:  # any failure: the other states and the next round have their turn
                    self._metrics.count(state_name, "cleaning_failures")
                    log.exception(
                        "maintenance of a state failed; it is tried again at the next round: %s",
                        state_name,
                        extra={"state": state_name},
                    )

    async def _maintain(self, state_name: str, writer: LedgerWriter) -> None:
        await self._states.notice_deleted(state_name)
        if state_name not in dict(self._states.writers()):
            return
        self._count_deleted(state_name, [info.size for info in await self._cleaner.round(writer, state_name)])
        await self._dropping.finish(state_name, writer)
        self._unload(state_name, writer)

    async def clean(self, state_name: str, writer: LedgerWriter, *, dry_run: bool) -> dict[str, Any]:
        """Clean a state at once; see :meth:`~coordinator.service.coordinator.Coordinator.clean`."""
        cleaned = await self._cleaner.clean(writer, state_name, dry_run=dry_run)
        if not dry_run:
            self._count_deleted(state_name, [file["bytes"] for file in cleaned["files"]])
        return cleaned

    def used(self, state_name: str) -> None:
        """Note that a task of a state's query was answered: the query runs, also if its driver reports that it ended."""
        self._seen_ended_s.pop(state_name, None)

    def is_unused(self, ledger: StateLedger) -> bool:
        """Return whether a state's query ended so long ago that no process should have its shards in memory.

        States that Python programs own have no query that could end.
        """
        name = ledger.state_name
        if self._is_running(ledger) or ledger.query_id in ("", PYTHON_QUERY_ID):
            self._seen_ended_s.pop(name, None)
            return False
        now_s = self._clock.elapsed_s()
        return now_s - self._seen_ended_s.setdefault(name, now_s) >= self._maintenance.unload_after_s

    def _count_deleted(self, state_name: str, sizes: list[int]) -> None:
        self._metrics.count(state_name, "deleted_files", len(sizes))
        self._metrics.count(state_name, "deleted_bytes", sum(sizes))

    def _unload(self, state_name: str, writer: LedgerWriter) -> None:
        """Unload the ledger of a state whose query ended long ago, or that does not exist, once there is nothing more to clean."""
        ledger, created = writer.ledger, writer.metadata
        if ledger is None or writer.left_over is not None or not self._cleaner.is_at_rest(state_name):
            return
        if created is not None and not self.is_unused(ledger):
            return
        details = None if created is None else self._overview.details(ledger, created, is_active=False)
        if self._states.rest(state_name, details):
            self._metrics.forget(state_name)
            self._leases.forget(state_name)
            self._locality.forget(state_name)
            self._instances.forget(ledger.run_id)

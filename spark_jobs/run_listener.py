"""Tells the coordinator of runs that have ended."""

from __future__ import annotations

import ray
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from coordinator.client import CoordinatorClient

__all__ = ["RunListener"]


class RunListener(StreamingQueryListener):
    """Reports ended runs to the coordinator."""

    def __init__(self, coordinator: CoordinatorClient) -> None:
        self._coordinator = coordinator

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Nothing: a run is known from its first task."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Nothing: progress is read off the commits."""

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Nothing."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Deactivate the run's instances; the shards stay in memory for the next run."""
        if ray.is_initialized():
            self._coordinator.deactivate_instances(str(event.runId))

"""The end of a batch on the driver: what it did to each state, and which shards it left out."""

from __future__ import annotations

import json
import logging
from typing import Any

from coordinator.client import CoordinatorClient
from coordinator.model import BatchResult

__all__ = ["BatchEnds"]

log = logging.getLogger(__name__)


class BatchEnds:
    """Answers Spark, once the sink is done with a batch and before the commit log says so, for the fleets of this driver."""

    def __init__(self) -> None:
        self._coordinators: dict[str, CoordinatorClient] = {}

    def add(self, uri: str, coordinator: CoordinatorClient) -> None:
        """Know a fleet."""
        self._coordinators[uri] = coordinator

    def settle(self, told: str) -> str:
        """The result of an operator's batch.

        Parameters
        ----------
        told
            JSON: ``operator`` (what the route column says), ``run_id``, ``batch_id``, ``shards``.

        Returns
        -------
        str
            JSON: ``missing``, shards that have not committed it; and figures, by the names of ``StatefulExchange.java``.
        """
        try:
            batch = json.loads(told)
            operator = batch["operator"]
            coordinator = self._coordinators[operator["uri"]]
            result = coordinator.batch_result(operator["state"], batch["run_id"], batch["batch_id"], batch["shards"])
        except BaseException:
            # Py4J shows the other side of an error of Python's badly.
            log.exception("the end of a batch could not be settled: %s", told)
            raise
        return json.dumps(_figures(result, batch["shards"]))


def _figures(result: BatchResult, shards: int) -> dict[str, Any]:
    return {
        "missing": list(result.missing),
        "rows_total": result.rows_total,
        "rows_updated": result.rows_updated,
        "rows_removed": result.rows_removed,
        "rows_late": result.rows_late,
        "memory_bytes": result.memory_bytes,
        "updates_ms": result.updates_ms,
        "removals_ms": 0,  # what expires is removed with the updates
        "commit_ms": result.commit_ms,
        "instances": shards,
        "due_ms": result.due_ms,
        "custom": {"rowsRead": result.rows_in, "deltaBytes": result.delta_bytes},
    }

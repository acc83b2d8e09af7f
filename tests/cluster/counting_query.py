"""A query that counts by key on a cluster of several nodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from coordinator.service.calls import RayActors
from statefleet.cli import main
from statefleet.fleet import Fleet
from store_actors.actor.deploy import store_metrics
from tests.clocks import until
from tests.integration.counting_query import CountingQuery


def address_of(node_id: str) -> str:
    return str(next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id))


class ClusterQuery(CountingQuery):
    """Six shards, and where they are."""

    def __init__(self, fleet: Fleet, folder: Path, name: str) -> None:
        super().__init__(fleet, folder, name, shards=6, keys=300)

    def nodes(self) -> list[str]:
        return [address_of(shard["node_id"]) for shard in self.shards()]

    def run_until(self, is_there: Callable[[], bool], failure: str) -> float:
        """Run batches until something is so; return how long it took."""

        def is_there_after_a_batch() -> bool:
            if not is_there():
                self.batch()
                return False
            return True

        return until(
            is_there_after_a_batch, 240, failure=lambda: f"{failure}: shards are at {self.nodes()}", every_s=0.3
        )

    def deltas_read(self) -> int:
        return sum(metrics["deltas_loaded"] for metrics in store_metrics(RayActors(), self.fleet.status()).values())

    def statefleet(self, capsys: pytest.CaptureFixture[str], command: str, *arguments: str) -> Any:
        """Return what a command prints as JSON."""
        capsys.readouterr()
        assert main([command, self.fleet.uri, *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

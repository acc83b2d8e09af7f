"""Looking at where things are on a cluster of several nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import ray

from statefleet.fleet import Fleet


def query_of(fleet: Fleet, name: str) -> dict[str, Any]:
    (query,) = [entry for entry in fleet.status()["queries"] if entry["name"] == name]
    return query


def address_of(node_id: str) -> str:
    return str(next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id))


class RunsBatches(Protocol):
    """A query that is fed by hand."""

    def batch(self) -> None: ...

    def nodes(self) -> list[str]: ...


def run_until(query: RunsBatches, is_there: Callable[[], bool], failure: str, *, within_s: float = 90) -> float:
    """Run batches until something is so; return how long it took."""
    begun = time.monotonic()
    while not is_there():
        assert time.monotonic() - begun < within_s, f"{failure}: shards are at {query.nodes()}"
        query.batch()
        time.sleep(0.3)
    return time.monotonic() - begun

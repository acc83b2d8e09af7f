"""Looking at where things are on a cluster of several nodes."""

from __future__ import annotations

from typing import Any

import ray

from statefleet.fleet import Fleet


def query_of(fleet: Fleet, name: str) -> dict[str, Any]:
    (query,) = [entry for entry in fleet.status()["queries"] if entry["name"] == name]
    return query


def address_of(node_id: str) -> str:
    return str(next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id))

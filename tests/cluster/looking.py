"""Looking at where things are on a cluster of several nodes."""

from __future__ import annotations

from typing import Any

import ray

from spark_jobs.fleet import Fleet

__all__ = ["address_of", "query_of"]


def query_of(fleet: Fleet, name: str) -> dict[str, Any]:
    (found,) = [one for one in fleet.status()["queries"] if one["name"] == name]
    return found


def address_of(node_id: str) -> str:
    return str(next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id))

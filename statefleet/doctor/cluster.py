"""Checks of the Ray cluster: whether it answers, its nodes and their packages, this machine's ports, and the fleet."""

from __future__ import annotations

import json
import socket
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import ray
from ray._private import services
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coordinator.model.errors import SetupError, StateStoreError
from coordinator.service.client import CoordinatorClient
from coordinator.service.deploy import join_cluster, owner_of
from coordinator.storage.uris import normalize_uri
from statefleet.doctor.findings import Finding, emit, ok, warning, wrong

_KNOCK_S = 1.0
#: How long nodes may take to return their packages, in seconds: each starts a worker for it.
_NODES_S = 30.0
#: Packages whose versions have to be the same on all nodes.
_PACKAGES = ("statefleet", "ray", "pyspark", "raydp", "pyarrow", "numba")


def findings(address: str, uri: str) -> Iterator[Finding]:
    """Yield the findings of all checks; without a URI no fleet is checked."""
    yield from ports()
    try:
        join_cluster(address)
    except SetupError as error:
        yield _not_joined(address, error)
        return
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    alive = [node for node in nodes if node["Alive"]]
    cores = sum(node["Resources"].get("CPU", 0) for node in alive)
    where = ray.get_runtime_context().gcs_address
    owner = owner_of(where)
    of_owner = "" if owner is None else f", {owner}"
    yield ok("Ray cluster", f"Ray {ray.__version__} at {where}{of_owner}: {len(alive)} nodes, {cores:.0f} CPUs")
    yield from _nodes(alive)
    if uri:
        yield _fleet(uri)


def _not_joined(address: str, error: SetupError) -> Finding:
    """Return the finding for a cluster that cannot be joined: an error if it exists, or if it was named and does not answer."""
    if isinstance(error.__cause__, RuntimeError) or error.__cause__ is None:
        return wrong("Ray cluster", f"the one at {address} cannot be joined", str(error))
    if address == "auto":
        advice = "ray start --head starts one; a job without one starts its own, for itself"
        return warning("Ray cluster", "none answers on this machine", advice)
    return wrong("Ray cluster", f"none answers at {address}", str(error))


def ports(gcs_port: int = 6379, dashboard_port: int = 8265) -> Iterator[Finding]:
    """Yield whether the ports that Ray uses by default are free, or used by Ray."""
    of_ray = {address.rpartition(":")[2] for address in services.find_gcs_addresses()}  # type: ignore[no-untyped-call]
    if not _is_taken(gcs_port) or str(gcs_port) in of_ray:
        text = "taken by Ray itself" if str(gcs_port) in of_ray else "free"
        yield ok(f"port {gcs_port} (GCS)", text)
    else:
        yield warning(
            f"port {gcs_port} (GCS)",
            "taken by another program, so `ray start --head` fails",
            "give it another one: ray start --head --port=6380",
        )
    if not _is_taken(dashboard_port):
        yield ok(f"port {dashboard_port} (Ray's dashboard)", "free")
    elif _is_dashboard(dashboard_port):
        yield ok(f"port {dashboard_port} (Ray's dashboard)", "taken by Ray itself")
    else:
        yield warning(
            f"port {dashboard_port} (Ray's dashboard)",
            "taken by another program, so Ray's dashboard takes the next free port, and `ray job submit` does not find it",
            "ray start --head --dashboard-port=8266, and RAY_API_SERVER_ADDRESS for `ray job submit`",
        )


def _is_taken(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=_KNOCK_S).close()
    except OSError:
        return False
    return True


def _is_dashboard(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/version", timeout=_KNOCK_S) as answer:
            return "ray_version" in json.load(answer)
    except (OSError, ValueError):
        return False


def _nodes(alive: list[dict[str, Any]]) -> Iterator[Finding]:
    """Yield whether each node runs tasks and has the packages of this machine."""

    def look(names: tuple[str, ...]) -> dict[str, str]:
        # Sent as it is: the node may not have this package.
        import platform
        from importlib import metadata

        versions = {"python": platform.python_version()}
        for name in names:
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                versions[name] = "not installed"
        return versions

    references = {
        node["NodeID"]: ray.remote(num_cpus=0, max_retries=0)(look)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        .remote(_PACKAGES)
        for node in alive
    }
    ray.wait(list(references.values()), num_returns=len(references), timeout=_NODES_S)
    local = look(_PACKAGES)
    for node in alive:
        name = f"node {node['NodeManagerAddress']}"
        try:
            versions = ray.get(references[node["NodeID"]], timeout=0)
        except RayError as error:
            yield wrong(
                name,
                f"runs no task: {type(error).__name__}",
                "look at its log (ray logs), its memory and its disk; restart Ray there",
            )
            continue
        yield compared(name, node["NodeID"][:12], local, versions)


def compared(name: str, node_id: str, local: dict[str, str], of_node: dict[str, str]) -> Finding:
    """Return whether a node has the same versions of packages as this machine."""
    differing = [
        f"{package} {version} (here {local[package]})"
        for package, version in of_node.items()
        if version != local[package]
    ]
    if differing:
        return wrong(
            name,
            f"{node_id} has another {', another '.join(differing)}",
            "install the same versions on every node, from requirements.lock",
        )
    return ok(name, f"{node_id}, Python {of_node['python']}, the same packages as here")


def _fleet(uri: str) -> Finding:
    try:
        coordinator = CoordinatorClient.find(normalize_uri(uri))
        if coordinator is None:
            return ok("fleet", "none of this URI runs on this cluster; statefleet.connect(uri) in a job starts it")
        status = coordinator.status()
    except StateStoreError as error:
        return wrong("fleet", "it runs, and does not answer", str(error))
    lost = [actor for actor in status["store_actors"] if not actor["alive"]]
    if status["store_actors"] and len(lost) == len(status["store_actors"]):
        return warning("fleet", "its store actors are all lost", "start a query; state is in the object store")
    return ok("fleet", f"{len(status['store_actors']) - len(lost)} store actors, {len(status['queries'])} states open")


if __name__ == "__main__":
    emit(findings(sys.argv[1], sys.argv[2]))

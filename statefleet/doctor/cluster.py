"""Checks of the Ray cluster: it answers, its nodes and what is installed there, this machine's ports, the fleet that runs there."""

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
from statefleet.doctor.findings import Finding, Outcome, emit

__all__ = ["compared", "findings", "ports"]

_GCS_PORT, _DASHBOARD_PORT = 6379, 8265
_KNOCK_S = 1.0
#: How long nodes may take to tell what they have, in seconds: each starts a worker for it.
_NODES_S = 30.0
#: Packages that have to be the same everywhere.
_PACKAGES = ("statefleet", "ray", "pyspark", "raydp", "pyarrow", "numba")


def findings(address: str, uri: str) -> Iterator[Finding]:
    """All of them, one after the other; without a URI no fleet is looked for."""
    yield from ports()
    try:
        join_cluster(address)
    except SetupError as error:
        yield _not_joined(address, error)
        return
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    living = [node for node in nodes if node["Alive"]]
    cores = sum(node["Resources"].get("CPU", 0) for node in living)
    where = ray.get_runtime_context().gcs_address
    owner = owner_of(where)
    whose = "" if owner is None else f", {owner}"
    yield Finding(
        "Ray cluster", Outcome.OK, f"Ray {ray.__version__} at {where}{whose}: {len(living)} nodes, {cores:.0f} CPUs"
    )
    yield from _nodes(living)
    if uri:
        yield _fleet(uri)


def _not_joined(address: str, error: SetupError) -> Finding:
    """A cluster that is there and is another one, or another user's, is wrong; that there is none, only where one was named."""
    if isinstance(error.__cause__, RuntimeError) or error.__cause__ is None:
        return Finding("Ray cluster", Outcome.WRONG, f"the one at {address} cannot be joined", str(error))
    if address == "auto":
        advice = "ray start --head starts one; a job without one starts its own, for itself"
        return Finding("Ray cluster", Outcome.WARNING, "none answers on this machine", advice)
    return Finding("Ray cluster", Outcome.WRONG, f"none answers at {address}", str(error))


def ports() -> Iterator[Finding]:
    """Whether the ports that Ray takes by default are free, or its own."""
    own = {address.rpartition(":")[2] for address in services.find_gcs_addresses()}  # type: ignore[no-untyped-call]
    if not _is_taken(_GCS_PORT) or str(_GCS_PORT) in own:
        told = "taken by Ray itself" if str(_GCS_PORT) in own else "free"
        yield Finding(f"port {_GCS_PORT} (GCS)", Outcome.OK, told)
    else:
        yield Finding(
            f"port {_GCS_PORT} (GCS)",
            Outcome.WARNING,
            "taken by another program, so `ray start --head` fails",
            "give it another one: ray start --head --port=6380",
        )
    if not _is_taken(_DASHBOARD_PORT):
        yield Finding(f"port {_DASHBOARD_PORT} (Ray's dashboard)", Outcome.OK, "free")
    elif _is_dashboard(_DASHBOARD_PORT):
        yield Finding(f"port {_DASHBOARD_PORT} (Ray's dashboard)", Outcome.OK, "taken by Ray itself")
    else:
        yield Finding(
            f"port {_DASHBOARD_PORT} (Ray's dashboard)",
            Outcome.WARNING,
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


def _nodes(living: list[dict[str, Any]]) -> Iterator[Finding]:
    """What each node has."""

    def look(names: tuple[str, ...]) -> dict[str, str]:
        # Sent as it is: the node may not have this package.
        import platform
        from importlib import metadata

        found = {"python": platform.python_version()}
        for name in names:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = "not installed"
        return found

    asked = {
        node["NodeID"]: ray.remote(num_cpus=0, max_retries=0)(look)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        .remote(_PACKAGES)
        for node in living
    }
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=_NODES_S)
    here = look(_PACKAGES)
    for node in living:
        name = f"node {node['NodeManagerAddress']}"
        try:
            found = ray.get(asked[node["NodeID"]], timeout=0)
        except RayError as error:
            yield Finding(
                name,
                Outcome.WRONG,
                f"runs no task: {type(error).__name__}",
                "look at its log (ray logs), its memory and its disk; restart Ray there",
            )
            continue
        yield compared(name, node["NodeID"][:12], here, found)


def compared(name: str, node_id: str, here: dict[str, str], found: dict[str, str]) -> Finding:
    """What a node has, beside what this machine has."""
    differing = [
        f"{package} {version} (here {here[package]})" for package, version in found.items() if version != here[package]
    ]
    if differing:
        return Finding(
            name,
            Outcome.WRONG,
            f"{node_id} has another {', another '.join(differing)}",
            "install the same versions on every node, from requirements.lock",
        )
    return Finding(name, Outcome.OK, f"{node_id}, Python {found['python']}, the same packages as here")


def _fleet(uri: str) -> Finding:
    try:
        coordinator = CoordinatorClient.find(normalize_uri(uri))
        if coordinator is None:
            return Finding(
                "fleet", Outcome.OK, "none of this URI runs on this cluster; statefleet.connect(uri) in a job starts it"
            )
        told = coordinator.status()
    except StateStoreError as error:
        return Finding("fleet", Outcome.WRONG, "it runs, and does not answer", str(error))
    lost = [actor for actor in told["store_actors"] if not actor["alive"]]
    if told["store_actors"] and len(lost) == len(told["store_actors"]):
        return Finding(
            "fleet", Outcome.WARNING, "its store actors are all lost", "start a query; state is in the object store"
        )
    return Finding(
        "fleet", Outcome.OK, f"{len(told['store_actors']) - len(lost)} store actors, {len(told['queries'])} states open"
    )


if __name__ == "__main__":
    emit(findings(sys.argv[1], sys.argv[2]))

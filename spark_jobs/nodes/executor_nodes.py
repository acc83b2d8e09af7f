"""The Ray nodes of Spark's executors, and their store actors.

RayDP starts an executor under the address of its Ray node, so Spark's scheduler knows the executor by that host. Other executors have
the name or an address of their machine, or are on machines without a Ray node.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import psutil
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from coordinator.model.errors import StateStoreError
from coordinator.model.identities import ActorLocation
from coordinator.placement.policies import ActorSlot
from coordinator.runtime.runtime import Clock, Retry
from coordinator.service.calls import START_S, RayActors, unwrapped
from store_actors.actor.deploy import actors_for, ensure_store_actor
from store_actors.client.fleet_client import FleetAddress
from store_actors.connections.direct_calls import DirectAddress

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Watched:
    handle: Any
    ping: Any = None
    #: How long that has been waited for.
    waited_s: float = 0.0
    #: Whether it has answered since it was started: one that is starting answers no ping, and does not hang.
    has_answered: bool = False

    def is_hung(self, actors: RayActors, passed_s: float) -> bool:
        """Return whether it has not answered for long; ping it unless it owes an answer."""
        if self.ping is not None and actors.wait([self.ping], 0.0):
            try:
                actors.get(self.ping)
                self.has_answered = True
            except RayError:  # Ray starts it again
                self.has_answered = False
            self.ping = None
        if self.ping is None:
            self.ping, self.waited_s = self.handle.ping.remote(), 0.0
            return False
        self.waited_s += passed_s
        return self.waited_s >= (actors.hung_after_s if self.has_answered else START_S)


class ExecutorNodes:
    """The nodes of a fleet, each with `per_node` store actors; None for a number by the cores of its executors."""

    def __init__(self, address: FleetAddress, per_node: int | None) -> None:
        self._address = address
        self._per_node = per_node
        self._actors = RayActors()
        #: The store actors that were started or found, by node and number.
        self._watched: dict[tuple[str, int], _Watched] = {}
        #: As of the last slots: cores of executors by host; by the address of a Ray node, the host of executors there; and whether
        #: others are on no Ray node.
        self.executors: Mapping[str, int] = {}
        self.near: dict[str, str] = {}
        self.are_strange = False
        #: By incarnation of a store actor.
        self._direct: dict[str, DirectAddress | None] = {}

    def slots(self, executors: Mapping[str, int]) -> list[ActorSlot]:
        """Return the store actors for executors, which are given by host with their cores; start them where there are none.

        They are on the executors' nodes. For executors on machines without a Ray node they are on all of Ray's nodes.
        """
        nodes, lost = ray_nodes()
        by_address = _by_address(nodes)
        cores, near, strange = dict.fromkeys(nodes, 0), dict[str, str](), 0
        for host, of_host in executors.items():
            node = self._node_of(host, by_address)
            if node is not None:
                cores[node] += of_host
                near[nodes[node]] = host
            elif addresses_of(host) & lost:
                log.warning("an executor's node is lost; shards are not placed there: %s", host)
            else:
                strange += of_host
        self.executors, self.near, self.are_strange = executors, near, strange > 0
        for number, node in enumerate(nodes):
            cores[node] += strange // len(nodes) + (number < strange % len(nodes))
        starting = []
        for node, of_node in cores.items():
            for number, share in enumerate(self._shares(of_node) if of_node else ()):
                handle = self._ensure(node, number)
                starting.append((handle, handle.location.remote(), share))
        slots = []
        for handle, location, share in starting:
            # A store actor that is starting answers no ping, and does not hang: it is checked for a hang only after this wait.
            self._actors.wait([location], START_S)
            try:
                slots.append(ActorSlot(self._answer(handle, location, handle.location.remote), share))
            except (RayActorError, StateStoreError) as error:
                log.warning("a node's store actor does not start; shards are not placed there: %s", error)
        return slots

    def _node_of(self, host: str, by_address: Mapping[str, str]) -> str | None:
        """Return the Ray node on an executor's machine; None if there is none."""
        addresses = addresses_of(host)
        found = next((by_address[address] for address in addresses if address in by_address), None)
        return self._actors.node_id() if found is None and addresses & addresses_of_machine() else found

    def direct_addresses(self, holders: Iterable[ActorLocation]) -> dict[str, DirectAddress | None]:
        """Return where tasks of other nodes connect to store actors, by the incarnation; None for one that takes no such connections.

        Those that are lost are left out.
        """
        unknown = {holder.actor_name: holder for holder in holders if holder.instance_id not in self._direct}
        handles = {name: handle for name in unknown if (handle := self._actors.find(name)) is not None}
        asked = {name: handle.direct_address.remote() for name, handle in handles.items()}
        for name, answer in asked.items():
            with suppress(RayActorError, StateStoreError):
                address = self._answer(handles[name], answer, handles[name].direct_address.remote)
                self._direct[unknown[name].instance_id] = address
        return self._direct

    def _answer(self, handle: Any, answer: Any, ask_again: Callable[[], Any]) -> Any:
        retry = Retry(Clock(), START_S, first_pause_s=0.1, longest_pause_s=1.0)
        while True:
            try:
                return unwrapped(self._actors, handle, answer)
            except ActorUnavailableError:  # Ray restarts it
                if retry.is_over:
                    raise
            retry.pause()
            answer = ask_again()

    def start(self, hosts: Iterable[str]) -> None:
        """Have the first store actor of some hosts started where there is none, without waiting for it."""
        by_address = _by_address(ray_nodes()[0])
        for host in hosts:
            if (node := self._node_of(host, by_address)) is not None:
                self._ensure(node, 0)

    def end_hung(self, nodes: Collection[str], passed_s: float) -> None:
        """End store actors that have not answered a ping for long, and ping the others. Ray restarts those that were ended.

        Tasks wait for as long as they are connected, and have no way to Ray. This waits for nothing. `passed_s` are the seconds of
        waiting since the last call, and not of a clock, which goes on while this process or the machine is halted.
        """
        for key, watched in list(self._watched.items()):
            if key[0] not in nodes:
                del self._watched[key]
            elif watched.is_hung(self._actors, passed_s):
                log.warning(
                    "the store actor of a node has not answered a ping for %.0f s; it is ended, and Ray starts it again; what it "
                    "committed is safe, and tasks wait for it: %r",
                    watched.waited_s,
                    watched.handle,
                )
                self._actors.kill(watched.handle, restart=True)
                self._watched[key] = _Watched(watched.handle)

    def _ensure(self, node: str, number: int) -> Any:
        fleet = self._address
        handle = ensure_store_actor(
            self._actors, fleet.uri, fleet.storage_options, fleet.maintenance, node, fleet.memory, number
        )
        self._watched.setdefault((node, number), _Watched(handle))
        return handle

    def _shares(self, cores: int) -> list[int]:
        """Return how many of a node's cores each of its store actors counts for; they get shards accordingly."""
        actors = min(self._per_node or actors_for(cores), max(1, cores))
        return [cores // actors + (number < cores % actors) for number in range(actors)]


def ray_nodes() -> tuple[dict[str, str], set[str]]:
    """Return the address of each living Ray node by its id, and the addresses of those that are lost."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    living = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}
    return living, {node["NodeManagerAddress"] for node in nodes} - {*living.values()}


def _by_address(nodes: Mapping[str, str]) -> dict[str, str]:
    # Spark cannot distinguish Ray nodes of the same address; the first is used for all.
    return {address: node for node, address in sorted(nodes.items(), reverse=True)}


@lru_cache(maxsize=4096)
def addresses_of(host: str) -> frozenset[str]:
    """Return a host's name or address, and the addresses that the name has."""
    try:
        return frozenset({host, *(str(info[4][0]) for info in socket.getaddrinfo(host, None))})
    except OSError:
        return frozenset({host})


@cache
def addresses_of_machine() -> frozenset[str]:
    """Return the addresses of this machine."""
    return frozenset(address.address for of_one in psutil.net_if_addrs().values() for address in of_one)

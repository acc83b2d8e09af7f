"""The Ray nodes of Spark's executors, and their store actors.

RayDP starts an executor under the address of its Ray node, so Spark's scheduler knows the executor by that host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from coordinator.model.errors import StateStoreError, StoreUnavailableError
from coordinator.placement.policies import ActorSlot
from coordinator.runtime.runtime import MachineClock, Retry
from coordinator.service.calls import START_S, Actors, RayActors, unwrapped
from store_actors.actor.deploy import actors_for, ensure_store_actor
from store_actors.client.fleet_client import FleetAddress
from store_actors.connections.direct_calls import DirectAddress

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Watched:
    """A store actor that is pinged.

    Attributes
    ----------
    waited_s
        How long that has been waited for.
    has_answered
        Whether it has answered since it was started: one that is starting answers no ping, and does not hang.
    """

    handle: Any
    ping: Any = None
    waited_s: float = 0.0
    has_answered: bool = False

    def is_hung(self, actors: Actors, passed_s: float) -> bool:
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
    """The nodes of a fleet.

    Parameters
    ----------
    per_node
        Store actors on each node; None for a number by the cores of its executors.
    """

    def __init__(self, address: FleetAddress, per_node: int | None) -> None:
        self._address = address
        self._per_node = per_node
        self._actors = RayActors()
        #: The store actors that were started or found, by node and number.
        self._watched: dict[tuple[str, int], _Watched] = {}

    def slots(self, executors: Mapping[str, int]) -> list[ActorSlot]:
        """Return the store actors of the nodes that have executors; start them where there are none."""
        by_host = self._nodes_by_host()
        starting = []
        for host, cores in executors.items():
            node = by_host.get(host)
            if node is None:
                log.warning("an executor's host is no address of a Ray node; shards are not placed there: %s", host)
                continue
            for number, share in enumerate(self._shares(cores)):
                handle = self._ensure(node, number)
                starting.append((handle, handle.location.remote(), share))
        slots = []
        for handle, location, cores in starting:
            # A store actor that is starting answers no ping, and does not hang: it is checked for a hang only after this wait.
            self._actors.wait([location], START_S)
            try:
                slots.append(ActorSlot(self._answer(handle, location, handle.location.remote), cores))
            except (RayActorError, StateStoreError) as error:
                log.warning("a node's store actor does not start; shards are not placed there: %s", error)
        return slots

    def direct_addresses(self, actor_names: Collection[str]) -> dict[str, DirectAddress | None]:
        """Return where tasks of other nodes connect to store actors; None for one that takes no such connections.

        Raises
        ------
        RayActorError, StateStoreError
            One of them is not there.
        """
        handles = {name: self._actors.find(name) for name in actor_names}
        if lost := [name for name, handle in handles.items() if handle is None]:
            raise StoreUnavailableError("a store actor is not there any more", store_actor=", ".join(lost))
        methods = {name: handle.direct_address.remote for name, handle in handles.items() if handle is not None}
        asked = {name: method() for name, method in methods.items()}
        return {name: self._answer(handles[name], answer, methods[name]) for name, answer in asked.items()}

    def _answer(self, handle: Any, answer: Any, ask_again: Callable[[], Any]) -> Any:
        retry = Retry(MachineClock(), START_S, first_pause_s=0.1, longest_pause_s=1.0)
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
        by_host = self._nodes_by_host()
        for host in hosts:
            if host in by_host:
                self._ensure(by_host[host], 0)

    def end_hung(self, nodes: Collection[str], passed_s: float) -> None:
        """End store actors that have not answered a ping for long, and ping the others. Ray restarts those that were ended.

        Tasks wait for as long as they are connected, and have no way to Ray. This waits for nothing.

        Parameters
        ----------
        passed_s
            Seconds of waiting since the last call, and not of a clock, which goes on while this process or the machine is halted.
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

    def _nodes_by_host(self) -> dict[str, str]:
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
        # Spark cannot distinguish Ray nodes of the same address; the first is used for all.
        return {host: node for node, host in sorted(hosts.items(), reverse=True)}

    def _shares(self, cores: int) -> list[int]:
        """Return how many of a node's cores each of its store actors counts for; they get shards accordingly."""
        actors = min(self._per_node or actors_for(cores), max(1, cores))
        return [cores // actors + (number < cores % actors) for number in range(actors)]

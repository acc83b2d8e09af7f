"""The status of a fleet on Ray, with which store actors answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import RayError

from coordinator.model.errors import SetupError
from coordinator.service.calls import RayActors
from coordinator.service.client import CoordinatorClient

#: How long all store actors together may take to answer, in seconds, and how many are pinged at once.
_PING_S = 0.5
_PINGS = 100
#: Number of calls without an answer to a ping after which a store actor counts as lost.
_UNANSWERED = 3


class RayProbe:
    """A fleet on this Ray cluster."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._actors = RayActors()
        self._coordinator: CoordinatorClient | None = None
        #: By name: the pending ping, and the number of calls without its answer.
        self._pings: dict[str, tuple[Any, int]] = {}
        self._lost: set[str] = set()
        self._next = 0

    def status(self) -> dict[str, Any]:
        """Return :meth:`Coordinator.status_details <coordinator.service.coordinator.Coordinator.status_details>`.

        A store actor that answers no ping is not ``alive`` there: the coordinator learns of a loss only once it needs the actor.
        """
        if self._coordinator is None:
            coordinator = CoordinatorClient.find(self._uri)
            if coordinator is None:
                raise SetupError("the fleet does not run (any more); state is safe in the object store", uri=self._uri)
            # States that no query uses now are shown, too.
            coordinator.load_all_states()
            self._coordinator = coordinator
        report = self._coordinator.status_details()
        self._ping(sorted(actor["actor_name"] for actor in report["store_actors"]))
        for actor in report["store_actors"]:
            actor["alive"] = actor["alive"] and actor["actor_name"] not in self._lost
        return report

    def _ping(self, names: list[str]) -> None:
        """Ping store actors, in turn if there are many, and note which of them are lost."""
        self._lost &= set(names)
        self._pings = {name: ping for name, ping in self._pings.items() if name in names}
        begin = self._next if self._next < len(names) else 0
        self._next = begin + _PINGS
        for name in names[begin : self._next]:
            if name not in self._pings:
                handle = self._actors.find(name)
                if handle is None:
                    self._lost.add(name)
                else:
                    self._pings[name] = handle.ping.remote(), 0
        waiting = [reference for reference, _ in self._pings.values()]
        if waiting:
            ray.wait(waiting, num_returns=len(waiting), timeout=_PING_S)
        self._take_answers(list(self._pings))

    def _take_answers(self, names: Iterable[str]) -> None:
        for name in names:
            reference, calls = self._pings.pop(name)
            if not ray.wait([reference], timeout=0)[0]:
                self._pings[name] = reference, calls + 1
                if calls + 1 >= _UNANSWERED:
                    self._lost.add(name)
                continue
            try:
                ray.get(reference)
                self._lost.discard(name)
            except RayError:
                self._lost.add(name)

"""A registry of the store actors, and of their incarnations that are dead."""

from __future__ import annotations

from collections.abc import Collection

from coordinator.model.identities import ActorLocation
from coordinator.model.memory_options import MemoryUse


class ActorRegistry:
    """The newest known incarnation of each store actor.

    - A name belongs to one node and to one live process. Only the process itself says that a new incarnation has started.
    - A worker may remember a dead incarnation. If its report counted as a start, it would end the incarnation that took over.
    """

    def __init__(self) -> None:
        self._newest: dict[str, ActorLocation] = {}
        self._dead: set[str] = set()
        self._memory: dict[str, MemoryUse] = {}

    def started(self, location: ActorLocation) -> None:
        """Register a store actor that reported itself: the previous incarnation of its name is dead."""
        previous = self._newest.get(location.actor_name)
        if previous is not None and previous.instance_id != location.instance_id:
            self._dead.add(previous.instance_id)
            self._memory.pop(previous.instance_id, None)
        self._newest[location.actor_name] = location

    def lost(self, instance_id: str) -> bool:
        """Register an incarnation that died under a call; returns False if that was known."""
        is_new = instance_id not in self._dead
        self._dead.add(instance_id)
        return is_new

    def memory_reported(self, instance_id: str, memory: MemoryUse) -> None:
        """Register the memory that an incarnation takes now."""
        self._memory[instance_id] = memory

    def memory(self, location: ActorLocation) -> MemoryUse | None:
        """Return the memory that an incarnation reported last; None if it reported none, as without a limit."""
        return self._memory.get(location.instance_id)

    def is_dead(self, location: ActorLocation) -> bool:
        """Return whether an incarnation is known to be dead; one that was never reported may be alive."""
        newest = self._newest.get(location.actor_name)
        replaced = newest is not None and newest.instance_id != location.instance_id
        return replaced or location.instance_id in self._dead

    def newest(self, remembered: ActorLocation) -> ActorLocation:
        """Return the newest known incarnation of the store actor that a worker remembers; the remembered one if that one is dead."""
        newest = self._newest.get(remembered.actor_name)
        if newest is None or (newest.instance_id in self._dead and remembered.instance_id not in self._dead):
            self._newest[remembered.actor_name] = newest = remembered
        return newest

    def all(self) -> Collection[ActorLocation]:
        """Return the newest incarnation of every store actor, dead or alive."""
        return self._newest.values()

"""Which store actors there are, and which of their lives are over."""

from __future__ import annotations

from collections.abc import Collection

from coordinator.model.identities import ActorLocation
from coordinator.model.memory_options import MemoryUse

__all__ = ["ActorRegistry"]


class ActorRegistry:
    """The newest known life of each store actor.

    - A name belongs to one node and to one living process; only the process itself says that a new life has begun.
    - A worker may remember a life that is over: had its word counted, it would end the life that took over.
    """

    def __init__(self) -> None:
        self._newest: dict[str, ActorLocation] = {}
        self._over: set[str] = set()
        self._memory: dict[str, MemoryUse] = {}

    def begun(self, location: ActorLocation) -> None:
        """A store actor reported itself: the former life of its name is over."""
        former = self._newest.get(location.actor_name)
        if former is not None and former.instance_id != location.instance_id:
            self._over.add(former.instance_id)
            self._memory.pop(former.instance_id, None)
        self._newest[location.actor_name] = location

    def ended(self, instance_id: str) -> bool:
        """A life was lost under a call; False if that was known."""
        is_new = instance_id not in self._over
        self._over.add(instance_id)
        return is_new

    def takes(self, instance_id: str, memory: MemoryUse) -> None:
        """A store actor told what memory it takes now."""
        self._memory[instance_id] = memory

    def memory(self, location: ActorLocation) -> MemoryUse | None:
        """What a life told last of its memory; None if it told nothing, as it does without a limit."""
        return self._memory.get(location.instance_id)

    def is_over(self, location: ActorLocation) -> bool:
        """Whether a life is known to be over; a life that nobody spoke of may go on."""
        newest = self._newest.get(location.actor_name)
        replaced = newest is not None and newest.instance_id != location.instance_id
        return replaced or location.instance_id in self._over

    def newest(self, remembered: ActorLocation) -> ActorLocation:
        """The newest known life of the store actor that a worker remembers; what it remembers where that one is gone."""
        known = self._newest.get(remembered.actor_name)
        if known is None or (known.instance_id in self._over and remembered.instance_id not in self._over):
            self._newest[remembered.actor_name] = known = remembered
        return known

    def all(self) -> Collection[ActorLocation]:
        """Newest life of every store actor, living or not."""
        return self._newest.values()

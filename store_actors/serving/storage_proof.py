"""Proof that a store actor sees the same storage as the coordinator, made before it takes any work. No Ray."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.model.identities import ActorLocation
from coordinator.runtime.runtime import Lock
from coordinator.storage.probe import ProbeResult, prove_shared
from coordinator.storage.protocol import ObjectStore


class StorageProof:
    """A proof that each incarnation of an actor makes once, as Ray may restart an actor on another node. Thread-safe.

    Parameters
    ----------
    objects
        The storage that this process sees.
    look_into
        Asks the coordinator to read and answer in a folder of its storage; see :func:`~coordinator.storage.probe.look_into`.
    location
        This incarnation of the actor.
    lock
        Lock that nothing else uses.
    """

    def __init__(
        self, objects: ObjectStore, look_into: Callable[[str], ProbeResult], location: ActorLocation, lock: Lock
    ) -> None:
        self._objects = objects
        self._look_into = look_into
        self._location = location
        self._lock = lock
        self._is_proven = False

    def check(self) -> None:
        """Make the proof, unless it was made before.

        Raises
        ------
        SetupError
            The coordinator sees other storage.
        StorageUnavailableError
            The storage cannot be used.
        """
        with self._lock:
            if not self._is_proven:
                actor = self._location
                prove_shared(self._objects, self._look_into, f"pid {actor.pid} on {actor.host}, node {actor.node_id}")
                self._is_proven = True

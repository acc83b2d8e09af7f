"""The proof, before a store actor takes any work, that it sees the coordinator's storage. No Ray."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.model.identities import ActorLocation
from coordinator.runtime.runtime import Lock
from coordinator.storage.probe import ProbeResult, prove_shared
from coordinator.storage.protocol import ObjectStore

__all__ = ["StorageProof"]


class StorageProof:
    """A proof that is made once. Ray may start an actor again on another node, so each incarnation proves it. Thread-safe.

    Parameters
    ----------
    objects
        The storage that this process sees.
    look_into
        Has the coordinator look into a folder of its own storage.
    location
        This incarnation of the actor.
    lock
        A lock of its own.
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
        """Prove it, unless it is proven.

        Raises
        ------
        SetupError
            The coordinator sees other storage.
        StorageUnavailableError
            The storage cannot be used.
        """
        with self._lock:
            if not self._is_proven:
                where = self._location
                prove_shared(self._objects, self._look_into, f"pid {where.pid} on {where.host}, node {where.node_id}")
                self._is_proven = True

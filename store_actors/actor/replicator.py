"""Sending commits to standbys.

A standby has a copy of a partition that is leased to another store actor, and applies each delta that the other one has committed. The
copy is not trusted: once the standby has the lease itself, its copy is checked as any memory is
(:class:`~store_actors.serving.partition.Lineage`).
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError

from coordinator.model.commits import CommitEntry
from coordinator.model.errors import StateStoreError
from coordinator.model.leases import Lease
from coordinator.runtime.runtime import Lock
from coordinator.service.calls import RayActors
from store_actors.messages.requests import ReplicatedCommit
from store_actors.serving.metrics import StoreMetrics

log = logging.getLogger(__name__)

#: Commits on their way to one standby, at most. A standby that falls further behind gets no more until it has caught up. It then takes
#: a new copy, so neither side's memory grows.
_ON_THEIR_WAY = 32
#: Bytes of these commits, at most, unless it is a single commit. They are in Ray's object store until the standby has applied them.
_BYTES_ON_THEIR_WAY = 1 << 28


class Replicator:
    """The standbys of one process's partitions. Thread-safe."""

    def __init__(self, actors: RayActors, own_name: str, metrics: StoreMetrics, guard: Lock) -> None:
        self._guard = guard
        self._actors = actors
        self._own_name = own_name
        self._metrics = metrics
        self._handles: dict[str, Any] = {}
        self._on_their_way: defaultdict[str, deque[tuple[Any, int]]] = defaultdict(deque)

    def send(
        self,
        lease: Lease,
        base_attempt: str,
        entries: Sequence[CommitEntry],
        files: Sequence[bytes],
    ) -> None:
        """Send a committed version of a partition to its standbys, without waiting for them."""
        size = sum(len(file) for file in files)
        with self._guard:
            ready = [name for name in lease.standbys if self._has_room(name, size)]
            self._metrics.standbys_left_behind += len(lease.standbys) - len(ready)
            if not ready:
                return
            commit = ReplicatedCommit(lease.store_id, self._own_name, base_attempt, tuple(entries), tuple(files))
            reference = self._actors.put(commit)
            for name in ready:
                self._on_their_way[name].append((self._handles[name].replicate.remote(reference), size))

    def behind(self) -> tuple[int, int]:
        """Return the number of commits that are on their way to standbys, and their bytes."""
        with self._guard:
            under_way = [size for commits in self._on_their_way.values() for _, size in commits]
        return len(under_way), sum(under_way)

    def _has_room(self, name: str, size: int) -> bool:
        """Return whether a standby is there, and can be sent `size` bytes more."""
        under_way = self._on_their_way[name]
        while under_way and self._actors.wait([under_way[0][0]], 0.0):
            try:
                self._actors.get(under_way.popleft()[0])
            except (RayError, StateStoreError) as error:
                log.warning(
                    "a standby did not take a commit, and takes a new copy with one of the next: %s",
                    error,
                    extra={"actor": name},
                )
                self._handles.pop(name, None)
        if name not in self._handles:
            handle = self._actors.find(name)
            if handle is None:
                return False
            self._handles[name] = handle
        behind = sum(sent_bytes for _, sent_bytes in under_way)
        return not under_way or (len(under_way) < _ON_THEIR_WAY and behind + size <= _BYTES_ON_THEIR_WAY)

"""All that is done with the partitions of one process, put together. No Ray."""

from __future__ import annotations

from coordinator.runtime.runtime import Runtime
from coordinator.storage.protocol import ObjectStore
from store_actors.serving.commits import CommitReplicator, Commits
from store_actors.serving.coordinator_ref import CoordinatorRef
from store_actors.serving.files import PIECE_BYTES
from store_actors.serving.loading import Loader
from store_actors.serving.maintenance import PartitionMaintenance
from store_actors.serving.metrics import StoreMetrics
from store_actors.serving.partition_cache import PartitionCache
from store_actors.serving.restoring import Restorer
from store_actors.serving.stored_rows import StoredRows
from store_actors.serving.transfers import Transfers
from store_actors.spilling.store_memory import StoreMemory, UnlimitedMemory


class Partitions:
    """The partitions of one process, of operators and keyed stores alike. Thread-safe: one lock a partition.

    Parameters
    ----------
    objects
        Where files are written.
    coordinator
        Who counts commits.
    metrics
        Counters of the process.
    piece_bytes
        Bytes of rows from which on a file of a snapshot is closed, and another one begun.
    standbys
        Where committed versions are sent.
    memory
        The process's memory; as much as the state takes by default.

    Attributes
    ----------
    cache
        The partitions in memory.
    restorer, commits, transfers
        What brings a partition to a version; makes its next one; copies it from and to other store actors.
    stored
        Versions that are read from files.
    """

    def __init__(
        self,
        objects: ObjectStore,
        coordinator: CoordinatorRef,
        metrics: StoreMetrics | None = None,
        runtime: Runtime | None = None,
        piece_bytes: int = PIECE_BYTES,
        standbys: CommitReplicator | None = None,
        memory: StoreMemory | None = None,
    ) -> None:
        self.metrics = metrics = metrics or StoreMetrics()
        self.runtime = runtime = runtime or Runtime()
        self.memory = memory = memory or UnlimitedMemory()
        self.coordinator = coordinator
        loader = Loader(objects, metrics, runtime, memory.ahead_bytes)
        piece_bytes = min(piece_bytes, memory.file_bytes)
        self.commits = Commits(objects, coordinator, loader, metrics, runtime, piece_bytes, standbys)
        self.cache = PartitionCache(runtime)
        self.restorer = Restorer(self.cache, coordinator, loader, runtime, memory, metrics)
        self.transfers = Transfers(self.cache, self.restorer, coordinator, runtime, memory, metrics)
        self.stored = StoredRows(loader, runtime, memory)
        self._maintenance = PartitionMaintenance(self.cache, coordinator, self.commits, memory, metrics)

    def maintain(self, min_deltas_for_snapshot: int) -> None:
        """Do a round of maintenance; see :meth:`PartitionMaintenance.run_round`."""
        self.transfers.close_idle()
        self._maintenance.run_round(min_deltas_for_snapshot)

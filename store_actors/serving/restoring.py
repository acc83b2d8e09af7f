"""Restores partitions to the version that a task reads: in memory if memory has committed versions, else from storage. No Ray."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial

import pyarrow as pa
from msgspec import structs

from coordinator.model.errors import CorruptStateError
from coordinator.model.identities import StateStoreId, StateStoreProviderId
from coordinator.model.leases import Lease
from coordinator.model.load_plans import LoadPlan, LoadPlans, Parent
from coordinator.model.schema import StateSchema
from coordinator.runtime.logs import about
from coordinator.runtime.runtime import Lock, Runtime
from store_actors.engine.versioned_store import VersionedStore
from store_actors.engine.versions import Frozen
from store_actors.serving.coordinator_ref import CoordinatorRef
from store_actors.serving.files import as_snapshot
from store_actors.serving.lineage import SyncAction
from store_actors.serving.loading import InMemory, Loader, MemoryRows, nothing_in_memory
from store_actors.serving.metrics import StoreMetrics
from store_actors.serving.partition import Partition, PartitionCache, catch_up_empty
from store_actors.serving.readable_rows import tables_of
from store_actors.serving.store_formats import StoreDefinition, StoreFormat, store_format
from store_actors.spilling.store_memory import StoreMemory

log = logging.getLogger(__name__)


class Restorer:
    """Restores partitions to versions. The caller holds the lock of the partition."""

    def __init__(
        self,
        cache: PartitionCache,
        coordinator: CoordinatorRef,
        loader: Loader,
        runtime: Runtime,
        memory: StoreMemory,
        metrics: StoreMetrics,
    ) -> None:
        self._cache = cache
        self._coordinator = coordinator
        self._loader = loader
        self._hash_seed = runtime.hash_seed
        self._clock = runtime.clock
        self._memory = memory
        self._metrics = metrics

    def format_of(self, store_id: StateStoreId, definition: StoreDefinition) -> StoreFormat:
        """Return the format of a partition's store, whose rows are in the partition's region of memory."""
        return store_format(definition, self._hash_seed, self._memory.region(store_id))

    def restore(
        self, partition: Partition, lease: Lease, run_id: str, base: int, definitions: Mapping[str, StoreDefinition]
    ) -> None:
        """Restore a partition's stores to a lease's base version.

        The coordinator is called only if memory is not certainly at that version. It records where the partition is, and returns
        partitions of this process that it has reassigned; these are dropped from memory.

        Raises
        ------
        StateMismatchError, CorruptStateError, StorageUnavailableError
            The version cannot be read into the requested stores.
        """
        lineage = partition.lineage
        if lineage.is_hot(lease.epoch, run_id, base) and partition.has(definitions):
            return
        started_s = self._clock.elapsed_s()
        store_id = lease.store_id
        self._cache.unpin(store_id)
        provider_id = StateStoreProviderId(store_id, run_id)
        further = self._cache.further_of_run(store_id, run_id)
        opened = self._coordinator.open_instance(provider_id, further, base, tuple(definitions))
        self._cache.evict_reassigned(opened.stale)
        self.sync(partition, store_id, base, opened.loading)
        load_bytes = 0 if lineage.is_loaded else opened.loading.file_bytes()
        self._load_missing(partition, store_id, base, definitions, opened.loading)
        lineage.leased(lease.epoch, run_id, round(1000 * (self._clock.elapsed_s() - started_s)), load_bytes)

    def _load_missing(
        self,
        partition: Partition,
        store_id: StateStoreId,
        base: int,
        definitions: Mapping[str, StoreDefinition],
        loading: LoadPlans,
    ) -> None:
        """Load the stores that are not in memory, or have another definition there."""
        deltas = 0
        for name, definition in definitions.items():
            if partition.is_loaded_as(name, definition):
                continue
            row_format = self.format_of(store_id, definition)
            in_memory = partial(self.rows_in_memory, store_id, name, definition)
            store, replayed = self.load(store_id, base, row_format, loading.plans[name], in_memory)
            catch_up_empty(store, base)
            partition.put(name, row_format, store)
            deltas = max(deltas, replayed)
        if not partition.lineage.is_loaded:
            partition.lineage.loaded(base, loading.attempt_id, deltas)

    def load(
        self,
        store_id: StateStoreId,
        version: int,
        row_format: StoreFormat,
        plan: LoadPlan,
        in_memory: InMemory = nothing_in_memory,
    ) -> tuple[VersionedStore, int]:
        """Return a store at a plan's version, and how many deltas were replayed; the partition in memory is not changed."""
        with self._memory.loading(store_id, version):
            return row_format.load(self._loader, plan, in_memory)

    # -- in memory ----------------------------------------------------------------------------------------------------

    def sync(self, partition: Partition, store_id: StateStoreId, base: int, loading: LoadPlans) -> None:
        """Bring a partition in memory to a version if memory is part of the committed history; otherwise forget the partition."""
        with self._memory.using(store_id):
            match partition.lineage.sync_action(base, loading.attempt_id, loading.made()):
                case SyncAction.RELOAD:
                    partition.forget()
                case SyncAction.CATCH_UP:
                    self._catch_up(partition, store_id, base, loading)
                case action:
                    self._rollback(partition, base, action)

    def _rollback(self, partition: Partition, base: int, action: SyncAction) -> None:
        try:
            is_retained = partition.rollback(base)
        except BaseException:
            # A partial rollback is not a version.
            partition.forget()
            raise
        if not is_retained:
            partition.forget()
        elif action is SyncAction.ROLLBACK:
            partition.lineage.rolled_back(base)
            self._metrics.rollbacks += 1

    def _catch_up(self, partition: Partition, store_id: StateStoreId, base: int, loading: LoadPlans) -> None:
        try:
            deltas = partition.catch_up(loading, base, self._loader)
        except CorruptStateError as error:
            # A snapshot may replace the damaged file.
            fields = partition_fields(store_id, partition)
            log.warning("falling back to loading a shard from its start: %s", error, extra=fields)
            deltas = None
        except BaseException:
            partition.forget()
            raise
        if deltas is None:
            partition.forget()
        else:
            partition.lineage.caught_up(base, loading.attempt_id, deltas)
            self._metrics.caught_up += 1

    def rows_in_memory(
        self, store_id: StateStoreId, store_name: str, definition: StoreDefinition, parent: Parent, version: int
    ) -> MemoryRows | None:
        """Return the rows of another partition's store of a state; None if memory does not have exactly this committed version.

        Parameters
        ----------
        definition
            Definition that the store must have, so that its rows have the requested columns.
        """
        partition = self._cache.find(structs.replace(store_id, partition_id=parent.partition_id))
        if partition is None:
            return None
        with partition.lock:
            lineage = partition.lineage
            if lineage.version != version or not lineage.knows(version, parent.attempt_id):
                return None
            if partition.writer is not None:
                return None
            stores = partition.frozen_stores()
        rows_of_store = None
        for store, rows in stores:
            if store.name == store_name and store.definition == definition:
                schema = self.format_of(store_id, definition).schema
                rows_of_store = MemoryRows(store.watermark_ms, _as_snapshot(partition.lock, schema, rows))
            else:
                rows.close()
        return rows_of_store


def partition_fields(store_id: StateStoreId, partition: Partition) -> dict[str, object]:
    """Return the fields of a log line about a partition."""
    lineage = partition.lineage
    return about(store_id, run=lineage.run_id or None, version=lineage.version, epoch=lineage.epoch)


def _as_snapshot(lock: Lock, schema: StateSchema, rows: Frozen) -> Iterator[pa.Table]:
    # A store without rows has one table, too: it exists at the version.
    yield as_snapshot(schema.row_schema().empty_table(), schema)
    for table in tables_of(lock, rows):
        yield as_snapshot(table, schema)

"""Calls of the coordinator that a store makes: Spark's StateStoreCoordinatorRef, for the store actor that has it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.identities import StateStoreId, StateStoreProviderId
from coordinator.model.load_plans import InstancePlans, LoadPlans


class CoordinatorRef(Protocol):
    """The coordinator; each call may be repeated without harm."""

    def commit_all(self, state_name: str, entries: Sequence[CommitEntry]) -> Sequence[CommitEntry]:
        """Count the commits of all stores of a partition together; returns the entries that count."""

    def load_plans(self, state_name: str, partition_id: int, version: int, store_names: Sequence[str]) -> LoadPlans:
        """Return the files that make a version of a partition's stores."""

    def open_instance(
        self,
        provider_id: StateStoreProviderId,
        ids_to_check: Sequence[StateStoreProviderId],
        version: int,
        store_names: Sequence[str],
    ) -> InstancePlans:
        """Say that this store is about to hold a partition; returns which others to unload, and the files that make the version."""

    def add_snapshot(self, state_name: str, snapshot: SnapshotEntry) -> bool:
        """Count a snapshot; False if its version was superseded meanwhile."""

    def reassigned(self, state_name: str, store_ids: Sequence[StateStoreId]) -> Collection[StateStoreId]:
        """Return those of a state's partitions whose lease another store actor has."""

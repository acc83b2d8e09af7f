"""A small state whose log has several checkpoints."""

from __future__ import annotations

from pathlib import Path

from coordinator.model.state_metadata import StateMetadata
from coordinator.storage.memory import MemoryObjectStore
from tests.unit.aggregation_fleet import SCHEMA, AggregationFleet, LocalCoordinator

BATCHES = 14


def checkpointing(objects: MemoryObjectStore) -> LocalCoordinator:
    """Return a coordinator of the state that writes checkpoints often, in small parts."""
    created = StateMetadata("s", "query", 1, "update", SCHEMA)
    return LocalCoordinator(objects, created, checkpoint_interval=6, part_records=3)


def state_files(letter: str) -> MemoryObjectStore:
    """Files of a state ``s`` that counts a letter."""
    fleet = AggregationFleet()
    fleet.coordinator = checkpointing(fleet.objects)
    fleet.store = fleet.new_store()
    for batch in range(BATCHES):
        fleet.apply(batch, letter + "xy"[batch % 2])
        if batch + 1 in (4, 9):
            fleet.store.partitions.maintain(1)
    return fleet.objects


def write_files(objects: MemoryObjectStore, folder: Path) -> None:
    """Write files to a folder."""
    for info in objects.list(""):
        file = folder / info.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(objects.get(info.path))


def write_state(folder: Path, letter: str) -> None:
    """Write the state to a folder."""
    write_files(state_files(letter), folder)

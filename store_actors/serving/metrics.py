"""Counters of a store actor's work since its process started."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StoreMetrics"]


@dataclass(slots=True)
class StoreMetrics:
    """What was read, written and decided."""

    bytes_loaded: int = 0
    deltas_loaded: int = 0
    snapshots_loaded: int = 0
    snapshots_skipped: int = 0
    bytes_written: int = 0
    commits: int = 0
    replayed_answers: int = 0
    adopted_commits: int = 0
    rollbacks: int = 0
    snapshots_written: int = 0
    shards_unloaded: int = 0
    maintenance_failures: int = 0

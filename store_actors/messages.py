"""What callers send to a store actor. Light to import: Spark's workers have no need of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.model import Lease, TaskIdentity
from store_actors.schema import StateSchema

__all__ = ["ApplyRequest"]


@dataclass(frozen=True, slots=True)
class ApplyRequest:
    """One Spark task's wish: fold its rows into its shard as the next version."""

    task: TaskIdentity
    lease: Lease
    base_version: int
    schema: StateSchema
    max_event_ms: int | None

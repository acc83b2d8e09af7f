"""A user's program with state, as its tasks run it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import Field, StateSchema
from coordinator.model.state_metadata import StateMetadata
from store_actors.client.operator_task import EventTimes
from store_actors.client.state_store import StateStore
from store_actors.client.worker_client import WorkerClient
from store_actors.messages.requests import StoreSpec

#: Column of a row's event time, in microseconds, by which it is late; there if timeouts are of event time.
EVENT_TIME_FIELD = Field("event_us", "int64")


@dataclass(frozen=True, slots=True)
class UserBatch:
    """A batch of one partition, as a user's program gets it."""

    #: In ``StateSchema.raw_schema()``, without those that are late.
    rows: pa.Table
    times: EventTimes
    #: When Spark planned the batch, in milliseconds since the epoch.
    time_ms: int
    base_version: int
    shard: int


class OpenProgram(Protocol):
    """A program that is ready for one batch."""

    @property
    def stores(self) -> tuple[StoreSpec, ...]:
        """The keyed stores of its state."""

    def run(self, store: StateStore, batch: UserBatch) -> list[pa.Table]:
        """Do a batch on the open stores; return the rows to emit. Nothing is committed yet."""


class UserProgram(Protocol):
    """A function or processor of the user, as an operator runs it."""

    def opened(
        self, client: WorkerClient, task: TaskIdentity, schema: StateSchema
    ) -> AbstractContextManager[OpenProgram]:
        """Return the program for one batch, until the context ends."""


@dataclass(frozen=True, kw_only=True)
class UserTask:
    """A user's program, with what its tasks need."""

    program: UserProgram
    #: Whether rows that are late by :data:`EVENT_TIME_FIELD` are left out.
    drops_late_rows: bool
    #: Units of the first store's due column in a millisecond, if its rows fall due by processing time.
    due_per_ms: int | None
    schema: StateSchema
    metadata: StateMetadata

    def on_time(self, rows: pa.Table, watermark_ms: int) -> pa.Table:
        """Return the rows that are not late, where the program drops late ones."""
        if not self.drops_late_rows:
            return rows
        is_newer = pc.greater(rows.column(EVENT_TIME_FIELD.name), watermark_ms * 1000)
        return rows.filter(pc.fill_null(is_newer, True))

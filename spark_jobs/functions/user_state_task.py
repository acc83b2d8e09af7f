"""The reduce side of operators that run a user's program with state: one partition's batch, from its rows to its commit.

State comes and goes in a few calls for any number of keys: the program's stores are open for the batch, and committed with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.errors import StoreUnavailableError
from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import Field, StateSchema
from coordinator.model.state_metadata import StateMetadata
from spark_jobs.worker.exchange import Received, unpack
from spark_jobs.worker.process import fleet_client, task_identity
from store_actors.client.fleet_client import FleetAddress, FleetClient
from store_actors.client.operator_task import BatchHeader, EventTimes, event_times
from store_actors.client.state_store import StateStore
from store_actors.messages.requests import BatchFacts, StoreSpec

#: Column of a row's event time, in microseconds, by which it is late; there if timeouts are of event time.
EVENT_TIME_FIELD = Field("event_us", "int64")
#: How often a batch is done again, within the task, whose store actor was lost.
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class UserBatch:
    """A batch of one partition, as a user's program gets it.

    Attributes
    ----------
    rows
        In ``StateSchema.raw_schema()``, without those that are late.
    time_ms
        When Spark planned the batch, in milliseconds since the epoch.
    """

    rows: pa.Table
    times: EventTimes
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
        self, client: FleetClient, task: TaskIdentity, schema: StateSchema
    ) -> AbstractContextManager[OpenProgram]:
        """Return the program for one batch, until the context ends."""


@dataclass(frozen=True, kw_only=True)
class UserStateTask:
    """A ``mapInArrow`` function from a partition's rows to the rows that the user's program emits.

    Attributes
    ----------
    drops_late_rows
        Whether rows that are late by :data:`EVENT_TIME_FIELD` are left out.
    due_per_ms
        Units of the first store's due column in a millisecond, if its rows fall due by processing time.
    """

    program: UserProgram
    drops_late_rows: bool
    due_per_ms: int | None
    schema: StateSchema
    metadata: StateMetadata
    address: FleetAddress

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Do a partition's batch and commit it, then yield: a reader of only a part of its results does not stop it.

        Raises
        ------
        StoreUnavailableError
            The store actor was lost in each attempt.
        """
        received = unpack(batches, self.schema.raw_schema(), self.metadata.state_name)
        for table in self._repeated(received):
            yield from table.to_batches(max_chunksize=1 << 16)

    def _repeated(self, received: Received) -> list[pa.Table]:
        """Do a batch; again, from the start, if its store actor was lost meanwhile."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._run(received)
            except StoreUnavailableError:
                # Nothing was counted, or what was is found and adopted: the same batch again, on another store actor.
                pass
        return self._run(received)

    def _run(self, received: Received) -> list[pa.Table]:
        """Do a partition's batch and commit it; return the rows that the program emits.

        Raises
        ------
        StoreUnavailableError
            The store actor was lost.
        """
        task, client = task_identity(self.metadata, received.header), fleet_client(self.address)
        rows = received.rows.raw
        with self.program.opened(client, task, self.schema) as program:
            store, grant = client.open_granted(task, self.metadata, program.stores)
            with store:
                times = _times(grant, received.header)
                on_time = _rows_on_time(rows, times.late_ms) if self.drops_late_rows else rows
                batch = UserBatch(on_time, times, task.batch_time_ms or 0, grant.base_version, received.header.shard)
                emitted = program.run(store, batch)
                late = rows.num_rows - on_time.num_rows
                store.commit(BatchFacts(times.after, received.rows.rows_read, late, self.due_per_ms))
        return emitted


def _times(grant: LeaseGrant, header: BatchHeader) -> EventTimes:
    """Return the watermarks of a batch; rows that a program emits later are newer than the operator's own watermark."""
    times = event_times(grant, header.late_ms, header.evict_ms)
    after = times.after
    return replace(times, after=structs.replace(after, output_ms=max(after.output_ms, after.input_ms)))


def _rows_on_time(rows: pa.Table, watermark_ms: int) -> pa.Table:
    is_newer = pc.greater(rows.column(EVENT_TIME_FIELD.name), watermark_ms * 1000)
    return rows.filter(pc.fill_null(is_newer, True))

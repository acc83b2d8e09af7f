"""The micro-batch of a task: its number, its query and its watermarks."""

from __future__ import annotations

import json
from dataclasses import dataclass

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.identities import TaskIdentity
from coordinator.model.watermarks import Watermarks


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """The batch as Spark's driver sends it to each task of a stateful operator (``StatefulExchangeExec.scala``).

    Attributes
    ----------
    shard
        Number of the task's shard; its partition in Spark may have another number, in a stage with a union.
    first_partition
        Partition id of the state's shard 0 in this batch (:mod:`coordinator.ledger.shard_layouts`).
    late_ms, evict_ms
        Spark's own watermarks of this operator and batch: rows up to the first are late, state up to the second is closed.
    time_ms
        When Spark planned the batch: its processing time. In the offset log, so a repeated batch has the same.
    former_time_ms
        `time_ms` of the batch before; None in the first batch.
    """

    query_id: str
    run_id: str
    batch_id: int
    shard: int
    late_ms: int
    evict_ms: int
    time_ms: int
    former_time_ms: int | None = None
    first_partition: int = 0
    output_mode: str = ""
    is_temporary: bool = False

    @classmethod
    def of_json(cls, text: bytes) -> BatchHeader:
        return cls(**json.loads(text))

    def task(self, state_name: str, attempt: int, executor: str) -> TaskIdentity:
        """Return the identity of the shard's task, of which an attempt runs on an executor."""
        return TaskIdentity(
            state_name=state_name,
            query_id=self.query_id,
            run_id=self.run_id,
            batch_id=self.batch_id,
            partition_id=self.first_partition + self.shard,
            attempt=attempt,
            executor=executor,
            batch_time_ms=self.time_ms,
            former_time_ms=self.former_time_ms,
            is_temporary=self.is_temporary,
        )


@dataclass(frozen=True, slots=True)
class EventTimes:
    """The watermarks of an operator in a batch.

    Attributes
    ----------
    late_ms
        Watermark up to which rows are late.
    after
        The watermarks of the version that the batch makes: state up to ``after.input_ms`` is closed.
    """

    late_ms: int
    after: Watermarks

    @property
    def seen_ms(self) -> int:
        """Watermark that a user's function sees while it gets rows."""
        return self.after.input_ms


def event_times(grant: LeaseGrant, late_ms: int, evict_ms: int) -> EventTimes:
    """Return the event times of a batch, of which Spark gives the watermarks (:class:`BatchHeader`); they never go back."""
    before = grant.watermarks
    return EventTimes(max(late_ms, before.input_ms), before.reached(evict_ms))

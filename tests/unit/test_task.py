"""The identity of a Spark task, on PySpark's own TaskContext."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark import TaskContext

from coordinator.model.identities import TaskIdentity
from coordinator.model.state_metadata import StateMetadata
from spark_jobs.worker.process import task_identity
from store_actors.client.operator_task import BatchHeader

METADATA = StateMetadata("clicks", "", 4, "update")
HEADER = BatchHeader("query", "run", 7, 2, late_ms=0, evict_ms=0, time_ms=11, former_time_ms=10)


@pytest.fixture
def context() -> Iterator[TaskContext]:
    """The context of this process, as a Python worker sets it for each task."""
    task_context = TaskContext._getOrCreate()
    # Properties that user code may set in the middle of a batch.
    task_context._localProperties = {"streaming.sql.batchId": "1", "spark.jobGroup.id": "a group of the user's own"}
    yield task_context
    TaskContext._setTaskContext(None)


def identity_of(context: TaskContext, stage_attempt: tuple[int, int], task_attempt_id: int) -> TaskIdentity:
    """Return the identity of a task, given its partition and attempt number in its stage, and its id."""
    context._partitionId, context._attemptNumber = stage_attempt
    context._taskAttemptId = task_attempt_id
    return task_identity(METADATA, HEADER)


def test_a_later_attempt_is_larger_also_in_a_stage_that_spark_repeats(context: TaskContext) -> None:
    first = identity_of(context, (2, 0), 40)
    retried = identity_of(context, (2, 1), 44)
    of_the_repeated_stage = identity_of(context, (2, 0), 51)
    assert first.attempt < retried.attempt < of_the_repeated_stage.attempt
    assert {(identity.batch_id, identity.partition_id) for identity in (first, retried, of_the_repeated_stage)} == {
        (7, 2)
    }


def test_a_job_group_of_the_users_own_changes_neither_run_nor_batch(context: TaskContext) -> None:
    task = identity_of(context, (0, 0), 1)
    assert (task.query_id, task.run_id, task.batch_id) == ("query", "run", 7)
    assert (task.batch_time_ms, task.former_time_ms) == (11, 10)

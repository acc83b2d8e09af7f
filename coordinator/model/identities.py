"""Identities of states, stores, tasks and store actors.

All are frozen values that are pickled between actors.
"""

from __future__ import annotations

from msgspec import Struct

#: Name of an operator's store where it has only one.
DEFAULT_STORE = "default"


#: Query id of states that plain Python programs own. They have no batches over all partitions: each partition has versions of its own.
PYTHON_QUERY_ID = "python"


#: One named store of one partition.
ShardKey = tuple[int, str]


class StateStoreId(Struct, frozen=True):
    """Identity of one shard, as Spark's ``StateStoreId``.

    ``checkpoint_root_location`` is the folder of the state, ``<fleet uri>/<state name>``.
    """

    checkpoint_root_location: str
    operator_id: int
    partition_id: int
    store_name: str = DEFAULT_STORE

    @property
    def state_name(self) -> str:
        return self.checkpoint_root_location.rsplit("/", 1)[-1]

    def path(self) -> str:
        """Return the folder of the shard's files relative to the fleet's URI, laid out as in Spark's checkpoints."""
        base = f"{self.state_name}/{self.operator_id}/{self.partition_id}"
        return base if self.store_name == DEFAULT_STORE else f"{base}/{self.store_name}"


class StateStoreProviderId(Struct, frozen=True):
    """A shard as seen by one run of a query: a restarted query never reuses a previous run's instance."""

    store_id: StateStoreId
    query_run_id: str


class TaskIdentity(Struct, frozen=True):
    """The Spark task of a request: query, run, batch, shard and attempt."""

    state_name: str
    query_id: str
    run_id: str
    batch_id: int
    partition_id: int
    #: Spark's id of the task attempt (``TaskContext.taskAttemptId()``): of two attempts of one run the later one has the larger id,
    #: also if Spark repeats a stage, which counts ``attemptNumber()`` from 0 again. 0 where there is no Spark task.
    attempt: int
    executor: str
    #: ``batch_time_ms``, ``former_time_ms``: When Spark planned the batch, and the batch before it, as its offset log has them
    #: (milliseconds since the epoch): the same for every repetition of a batch, another one in another history of the query.
    #: None if that is not known.
    batch_time_ms: int | None = None
    former_time_ms: int | None = None
    #: Whether it makes a state's first version, at any batch number: the query kept its state in other stores
    #: until then.
    is_import: bool = False
    #: Whether the query's checkpoint is deleted when it ends, as that of one without a ``checkpointLocation``.
    is_temporary: bool = False
    #: Whether the batch is an epoch of a continuous query: a repetition of it may have other rows.
    is_epoch: bool = False

    @property
    def is_of_python(self) -> bool:
        """Whether a Python program opens the state, one partition at a time, and not a query's batches."""
        return self.query_id == PYTHON_QUERY_ID


class ActorLocation(Struct, frozen=True, forbid_unknown_fields=True):
    """An incarnation of a store actor. ``instance_id`` is new each time the process starts."""

    actor_name: str
    instance_id: str
    node_id: str
    host: str
    pid: int

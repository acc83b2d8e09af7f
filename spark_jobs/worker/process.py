"""The fleet as one of Spark's Python workers reaches it: by a connection to a store actor."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from pyspark import TaskContext

from coordinator.model.errors import StoreUnavailableError
from coordinator.model.identities import TaskIdentity
from coordinator.model.state_metadata import StateMetadata
from coordinator.runtime.runtime import Clock, Retry, freeze_imports
from store_actors.client.leased_call import DEADLINE_S, PAUSE_S
from store_actors.client.operator_task import BatchHeader
from store_actors.client.worker_client import WorkerClient
from store_actors.connections.function_stream import FunctionConnection
from store_actors.connections.hand_over import address_of


@contextmanager
def worker_client(store_actor: Mapping[str, Any] | None) -> Iterator[WorkerClient]:
    """Connect to a store actor; within the context stores can be opened. Raises StoreUnavailableError if it did not come back in time.

    `store_actor` is where it is, as Spark's task says it: arguments of a
    :class:`~store_actors.connections.function_stream.FunctionConnection`.
    """
    assert store_actor is not None, "Spark's task says where it is"
    settle_process()
    retry = Retry(Clock(), DEADLINE_S, first_pause_s=PAUSE_S, longest_pause_s=1.0)
    while True:
        try:
            connection = FunctionConnection(**store_actor, request={"is_worker": True})
            break
        except StoreUnavailableError:  # it may be starting
            if retry.is_over:
                raise
        retry.pause()
    with closing(connection):
        yield WorkerClient(connection.call)


def nearest(store_actors: Sequence[Mapping[str, Any]], shard: int) -> Mapping[str, Any]:
    """Return a store actor of this machine, or else any other one, as :func:`worker_client` is given it; shards have different ones."""
    here = [
        {**one, "direct": None}
        for one in store_actors
        if Path(address_of(one["sockets"], one["host"], one["actor"])).exists()
    ]
    return (here or store_actors)[shard % len(here or store_actors)]


@cache
def settle_process() -> None:
    """Spare a worker two costs that PySpark pays again for every task and that grow with what is imported.

    - It invalidates the import caches, and Spark puts a jar of its own on the workers' path, whose directory of thousands of
      entries Python's zip importer then reads again: 0.05 to 0.2 s a task. No Python module is in it.
    - It runs a full garbage collection, which need not look at what was imported.
    """
    sys.path[:] = [path for path in sys.path if not path.endswith(".jar")]
    # The cache has entries for folders inside the jar, too.
    for path in [path for path in sys.path_importer_cache if ".jar" in path]:
        del sys.path_importer_cache[path]
    freeze_imports()


def _executors_node_ip() -> str | None:
    """Return the address of the Ray node that this worker's executor is an actor of; None for the machine's own.

    A machine may have several nodes, and Ray's workers inherit the id of the raylet that started them.
    """
    try:
        arguments = psutil.Process(int(os.environ["RAY_RAYLET_PID"])).cmdline()
    except (KeyError, ValueError, psutil.Error):
        return None
    option = "--node_ip_address="
    return next((argument.removeprefix(option) for argument in arguments if argument.startswith(option)), None)


def warmed(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return the rows of a ``mapInArrow`` task unchanged, in a worker that has imported what tasks need."""
    settle_process()
    yield from batches


@cache
def executor_name() -> str:
    """Return ``host:pid`` of the Spark executor: the process above this worker's daemon."""
    pid = psutil.Process(os.getppid()).ppid()
    return f"{_executors_node_ip() or socket.gethostname()}:{pid}"


def task_identity(metadata: StateMetadata, header: BatchHeader) -> TaskIdentity:
    context = TaskContext.get()
    assert context is not None, "a task of Spark's calls it"
    return header.task(metadata.state_name, context.taskAttemptId(), executor_name())

"""The fleet as one of Spark's Python workers reaches it: one Ray connection a process, and the store actor of its executor's node."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import psutil
import pyarrow as pa
from pyspark import TaskContext

from coordinator.model.identities import TaskIdentity
from coordinator.model.state_metadata import StateMetadata
from coordinator.runtime.runtime import freeze_imports
from coordinator.service.deploy import join_cluster
from store_actors.actor.fleet_clients import fleet_client_of
from store_actors.client.fleet_client import FleetAddress, FleetClient
from store_actors.client.operator_task import BatchHeader


@cache
def fleet_client(address: FleetAddress) -> FleetClient:
    """Return this process's client of a fleet, which connects to Ray at first use (Spark reuses its Python workers)."""
    join_cluster(address.ray_address, node_ip=_executors_node_ip())
    client = fleet_client_of(address)
    settle_process()
    return client


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


@dataclass(frozen=True, slots=True)
class ConnectTask:
    """A ``mapInArrow`` function that connects its worker to the fleet, and returns the rows unchanged."""

    address: FleetAddress

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        fleet_client(self.address).connect()
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

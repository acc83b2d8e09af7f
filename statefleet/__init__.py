"""Statefleet: PySpark Structured Streaming state in a fleet of Ray actors.

>>> import statefleet as sf
>>> fleet = sf.connect("file:///var/lib/statefleet")                    # doctest: +SKIP
>>> events = fleet.stateful(stream.withWatermark("ts", "10 minutes"), name="clicks")   # doctest: +SKIP
>>> counts = events.groupBy("user").agg(F.count("*").alias("n"))        # doctest: +SKIP
"""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING, Any

from statefleet.import_names import check_import_names

if TYPE_CHECKING:
    from coordinator.ledger.branches import Branch
    from coordinator.model.errors import (
        CommitUnknownError,
        CorruptStateError,
        CredentialsNeededError,
        FencedError,
        InvalidRequestError,
        MemoryLimitError,
        OperationOutOfOrderError,
        SetupError,
        StateMismatchError,
        StateStoreError,
        StorageUnavailableError,
        StoreUnavailableError,
        SumOverflowError,
        VersionNotFoundError,
        VersionReplacedError,
        WriterBusyError,
    )
    from coordinator.model.maintenance import Maintenance
    from spark_jobs.api.grouped import StatefulGroupedData
    from spark_jobs.api.stateful import StatefulDataFrame
    from spark_jobs.functions.state_batch import StateBatch
    from spark_jobs.plan.bounds import UnboundedStateWarning
    from spark_jobs.session.spark_session import start_session, stop_session
    from spark_jobs.transform.handle import StatefulProcessorHandle
    from spark_jobs.transform.processor import ExpiredTimerInfo, StatefulProcessor, TimerValues
    from spark_jobs.transform.states import ListState, MapState, ValueState
    from statefleet.fleet import Fleet, connect
    from statefleet.map_partitions import map_partitions_with_state_store
    from statefleet.migration.importing import Imported
    from statefleet.reads.fleet import LiveFleet, attach
    from statefleet.reads.keys import FoundKey
    from statefleet.reads.rows import Rows
    from statefleet.reads.state import LiveState
    from store_actors.client.state_store import ReadStateStore, StateStore

__all__ = [
    "Branch",
    "CommitUnknownError",
    "CorruptStateError",
    "CredentialsNeededError",
    "ExpiredTimerInfo",
    "FencedError",
    "Fleet",
    "FoundKey",
    "Imported",
    "InvalidRequestError",
    "ListState",
    "LiveFleet",
    "LiveState",
    "Maintenance",
    "MapState",
    "MemoryLimitError",
    "OperationOutOfOrderError",
    "ReadStateStore",
    "Rows",
    "SetupError",
    "StateBatch",
    "StateMismatchError",
    "StateStore",
    "StateStoreError",
    "StatefulDataFrame",
    "StatefulGroupedData",
    "StatefulProcessor",
    "StatefulProcessorHandle",
    "StorageUnavailableError",
    "StoreUnavailableError",
    "SumOverflowError",
    "TimerValues",
    "UnboundedStateWarning",
    "ValueState",
    "VersionNotFoundError",
    "VersionReplacedError",
    "WriterBusyError",
    "attach",
    "connect",
    "map_partitions_with_state_store",
    "start_session",
    "stop_session",
]

#: Module of each public name. It is imported at the first access to the name, since the command line does not need Spark.
_MODULES = {
    "Branch": "coordinator.ledger.branches",
    "CommitUnknownError": "coordinator.model.errors",
    "CorruptStateError": "coordinator.model.errors",
    "CredentialsNeededError": "coordinator.model.errors",
    "FencedError": "coordinator.model.errors",
    "InvalidRequestError": "coordinator.model.errors",
    "MemoryLimitError": "coordinator.model.errors",
    "OperationOutOfOrderError": "coordinator.model.errors",
    "SetupError": "coordinator.model.errors",
    "StateMismatchError": "coordinator.model.errors",
    "StateStoreError": "coordinator.model.errors",
    "StorageUnavailableError": "coordinator.model.errors",
    "StoreUnavailableError": "coordinator.model.errors",
    "SumOverflowError": "coordinator.model.errors",
    "VersionNotFoundError": "coordinator.model.errors",
    "VersionReplacedError": "coordinator.model.errors",
    "WriterBusyError": "coordinator.model.errors",
    "Maintenance": "coordinator.model.maintenance",
    "Fleet": "statefleet.fleet",
    "connect": "statefleet.fleet",
    "StateBatch": "spark_jobs.functions.state_batch",
    "Imported": "statefleet.migration.importing",
    "map_partitions_with_state_store": "statefleet.map_partitions",
    "UnboundedStateWarning": "spark_jobs.plan.bounds",
    "start_session": "spark_jobs.session.spark_session",
    "stop_session": "spark_jobs.session.spark_session",
    "StatefulDataFrame": "spark_jobs.api.stateful",
    "StatefulGroupedData": "spark_jobs.api.grouped",
    "StatefulProcessorHandle": "spark_jobs.transform.handle",
    "ExpiredTimerInfo": "spark_jobs.transform.processor",
    "StatefulProcessor": "spark_jobs.transform.processor",
    "TimerValues": "spark_jobs.transform.processor",
    "ListState": "spark_jobs.transform.states",
    "MapState": "spark_jobs.transform.states",
    "ValueState": "spark_jobs.transform.states",
    "ReadStateStore": "store_actors.client.state_store",
    "StateStore": "store_actors.client.state_store",
    "LiveFleet": "statefleet.reads.fleet",
    "FoundKey": "statefleet.reads.keys",
    "attach": "statefleet.reads.fleet",
    "Rows": "statefleet.reads.rows",
    "LiveState": "statefleet.reads.state",
}

_IMPORTING = RLock()

# Before any of the packages is imported.
check_import_names()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("statefleet")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from coordinator.runtime.extras import import_extra

    # Neither PySpark nor Ray can be imported by several threads at once.
    with _IMPORTING:
        value = globals()[name] = getattr(import_extra(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

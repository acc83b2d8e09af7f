"""Statefleet: PySpark Structured Streaming state that lives in a fleet of Ray actors.

>>> import statefleet as sf
>>> fleet = sf.connect("file:///var/lib/statefleet")                    # doctest: +SKIP
>>> events = fleet.stateful(stream.withWatermark("ts", "10 minutes"), name="clicks")   # doctest: +SKIP
>>> counts = events.groupBy("user").agg(F.count("*").alias("n"))        # doctest: +SKIP
"""

from __future__ import annotations

from coordinator.errors import (
    CommitUnknownError,
    CorruptStateError,
    FencedError,
    InvalidRequestError,
    OperationOutOfOrderError,
    SetupError,
    StateMismatchError,
    StateStoreError,
    StorageUnavailableError,
    StoreUnavailableError,
    VersionNotFoundError,
    WriterBusyError,
)
from coordinator.model import Maintenance
from spark_jobs.fleet import Fleet, connect
from spark_jobs.functions.state_batch import StateBatch
from spark_jobs.map_partitions import map_partitions_with_state_store
from spark_jobs.plan.bounds import UnboundedStateWarning
from spark_jobs.session.spark_session import start_session, stop_session
from spark_jobs.stateful import StatefulDataFrame, StatefulGroupedData
from spark_jobs.transform.handle import StatefulProcessorHandle
from spark_jobs.transform.processor import ExpiredTimerInfo, StatefulProcessor, TimerValues
from spark_jobs.transform.states import ListState, MapState, ValueState
from spark_jobs.worker.state_store import ReadStateStore, StateStore

__all__ = [
    "CommitUnknownError",
    "CorruptStateError",
    "ExpiredTimerInfo",
    "FencedError",
    "Fleet",
    "InvalidRequestError",
    "ListState",
    "Maintenance",
    "MapState",
    "OperationOutOfOrderError",
    "ReadStateStore",
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
    "TimerValues",
    "UnboundedStateWarning",
    "ValueState",
    "VersionNotFoundError",
    "WriterBusyError",
    "connect",
    "map_partitions_with_state_store",
    "start_session",
    "stop_session",
]

__version__ = "0.1.0"

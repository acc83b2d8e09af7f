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
    SetupError,
    StateMismatchError,
    StateStoreError,
    StorageUnavailableError,
    StoreUnavailableError,
)
from spark_jobs.fleet import Fleet, connect
from spark_jobs.session import start_session, stop_session
from spark_jobs.stateful import StatefulDataFrame, StatefulGroupedData

__all__ = [
    "CommitUnknownError",
    "CorruptStateError",
    "Fleet",
    "FencedError",
    "InvalidRequestError",
    "SetupError",
    "StateMismatchError",
    "StateStoreError",
    "StatefulDataFrame",
    "StatefulGroupedData",
    "StorageUnavailableError",
    "StoreUnavailableError",
    "connect",
    "start_session",
    "stop_session",
]

__version__ = "0.1.0"

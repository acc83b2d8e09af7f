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
    from coordinator.ledger.branches import Branch as Branch
    from coordinator.model.errors import CommitUnknownError as CommitUnknownError
    from coordinator.model.errors import CorruptStateError as CorruptStateError
    from coordinator.model.errors import CredentialsNeededError as CredentialsNeededError
    from coordinator.model.errors import FencedError as FencedError
    from coordinator.model.errors import InvalidRequestError as InvalidRequestError
    from coordinator.model.errors import MemoryLimitError as MemoryLimitError
    from coordinator.model.errors import OperationOutOfOrderError as OperationOutOfOrderError
    from coordinator.model.errors import SetupError as SetupError
    from coordinator.model.errors import StateMismatchError as StateMismatchError
    from coordinator.model.errors import StateStoreError as StateStoreError
    from coordinator.model.errors import StorageUnavailableError as StorageUnavailableError
    from coordinator.model.errors import StoreUnavailableError as StoreUnavailableError
    from coordinator.model.errors import SumOverflowError as SumOverflowError
    from coordinator.model.errors import VersionNotFoundError as VersionNotFoundError
    from coordinator.model.errors import VersionReplacedError as VersionReplacedError
    from coordinator.model.errors import WriterBusyError as WriterBusyError
    from coordinator.model.maintenance import Maintenance as Maintenance
    from spark_jobs.api.stateful import StatefulDataFrame as StatefulDataFrame
    from spark_jobs.api.stateful import StatefulGroupedData as StatefulGroupedData
    from spark_jobs.functions.state_batch import StateBatch as StateBatch
    from spark_jobs.plan.operator_rules import UnboundedStateWarning as UnboundedStateWarning
    from spark_jobs.plan.result_order import with_result_order as with_result_order
    from spark_jobs.session.spark_session import start_session as start_session
    from spark_jobs.session.spark_session import stop_session as stop_session
    from spark_jobs.transform.processor import ExpiredTimerInfo as ExpiredTimerInfo
    from spark_jobs.transform.processor import StatefulProcessor as StatefulProcessor
    from spark_jobs.transform.processor import StatefulProcessorHandle as StatefulProcessorHandle
    from spark_jobs.transform.processor import TimerValues as TimerValues
    from spark_jobs.transform.states import ListState as ListState
    from spark_jobs.transform.states import MapState as MapState
    from spark_jobs.transform.states import ValueState as ValueState
    from statefleet.fleet import Fleet as Fleet
    from statefleet.fleet import connect as connect
    from statefleet.map_partitions import map_partitions_with_state_store as map_partitions_with_state_store
    from statefleet.migration.importing import Imported as Imported
    from statefleet.reads.fleet import LiveFleet as LiveFleet
    from statefleet.reads.fleet import attach as attach
    from statefleet.reads.projections import FoundKey as FoundKey
    from statefleet.reads.rows import Rows as Rows
    from statefleet.reads.state import LiveState as LiveState
    from store_actors.client.state_store import ReadStateStore as ReadStateStore
    from store_actors.client.state_store import StateStore as StateStore

#: Public names by module, which is imported at the first access to one of them, since the command line does not need Spark.
_NAMES = {
    "coordinator.ledger.branches": "Branch",
    "coordinator.model.errors": (
        "CommitUnknownError CorruptStateError CredentialsNeededError FencedError InvalidRequestError "
        "MemoryLimitError OperationOutOfOrderError SetupError StateMismatchError StateStoreError "
        "StorageUnavailableError StoreUnavailableError SumOverflowError VersionNotFoundError "
        "VersionReplacedError WriterBusyError"
    ),
    "coordinator.model.maintenance": "Maintenance",
    "statefleet.fleet": "Fleet connect",
    "spark_jobs.functions.state_batch": "StateBatch",
    "statefleet.map_partitions": "map_partitions_with_state_store",
    "spark_jobs.plan.operator_rules": "UnboundedStateWarning",
    "spark_jobs.session.spark_session": "start_session stop_session",
    "spark_jobs.plan.result_order": "with_result_order",
    "spark_jobs.api.stateful": "StatefulDataFrame StatefulGroupedData",
    "spark_jobs.transform.processor": "ExpiredTimerInfo StatefulProcessor StatefulProcessorHandle TimerValues",
    "spark_jobs.transform.states": "ListState MapState ValueState",
    "statefleet.migration.importing": "Imported",
    "statefleet.reads.fleet": "LiveFleet attach",
    "statefleet.reads.projections": "FoundKey",
    "statefleet.reads.rows": "Rows",
    "statefleet.reads.state": "LiveState",
    "store_actors.client.state_store": "ReadStateStore StateStore",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)

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

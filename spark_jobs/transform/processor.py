"""Processors of ``transformWithState``: the user's classes, as in PySpark 4, and the handle that they get in ``init``, for state
variables and timers. A timer is registered for a key and a time, and fires once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.errors import ParseException
from pyspark.sql import types as T
from pyspark.sql.types import _parse_datatype_string

from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import DEFAULT_STORE
from spark_jobs.functions.grouped_input import struct_type
from spark_jobs.functions.groups import key_codes
from spark_jobs.plan.spark_errors import StateCallError
from spark_jobs.plan.spark_version import SPARK
from spark_jobs.transform.block import Block
from spark_jobs.transform.states import ListState, MapState, ValueState
from spark_jobs.transform.variables import DUE, TIMER, TimeMode, Variable, VariableKind

#: Times are milliseconds in 64 bits, as in Spark; the largest one is never reached.
_FURTHEST_MS = (1 << 63) - 1


class Timers:
    """Timers of the keys of the block, and the due timers of all keys."""

    def __init__(self, block: Block) -> None:
        self._block = block
        #: By index of the key, times with whether there is to be a timer.
        self._changed: dict[int, dict[int, bool]] = {}
        #: Timers of the block's keys as read; None before that.
        self._stored: list[set[int]] | None = None
        block.join(self)

    def register(self, time_ms: int) -> None:
        """Register a timer for a time, which may be in the past."""
        self._change(time_ms, exists=True)

    def delete(self, time_ms: int) -> None:
        """Delete the timer for a time, if there is one."""
        self._change(time_ms, exists=False)

    def _change(self, time_ms: int, *, exists: bool) -> None:
        index = self._block.here()
        if not -_FURTHEST_MS <= time_ms <= _FURTHEST_MS:
            raise StateCallError("a timer's time is in milliseconds since the epoch", expiryTimestampMs=time_ms)
        self._changed.setdefault(index, {})[int(time_ms)] = exists

    def times(self) -> list[int]:
        """Return the times of the current key's timers, including the one that fires now, in order."""
        index = self._block.here()
        if self._stored is None:
            self._stored = self._read()
        times = set(self._stored[index])
        for time_ms, exists in self._changed.get(index, {}).items():
            (times.add if exists else times.discard)(time_ms)
        return sorted(times)

    def _read(self) -> list[set[int]]:
        keys = self._block.keys
        leaves = keys.column_names
        batches = list(self._block.store(DEFAULT_STORE).prefix_scan(keys))
        timers: list[set[int]] = [set() for _ in range(keys.num_rows)]
        all_keys = pa.concat_tables(
            [keys, *(pa.Table.from_batches([batch]).select(leaves).cast(keys.schema) for batch in batches)]
        )
        codes = key_codes(all_keys, leaves).tolist()
        indices = {code: index for index, code in enumerate(codes[: len(timers)])}
        times = [time_ms for batch in batches for time_ms in batch.column(TIMER.name).to_pylist()]
        for code, time_ms in zip(codes[len(timers) :], times, strict=True):
            timers[indices[code]].add(time_ms)
        return timers

    def due(self, now_ms: int) -> pa.Table:
        """Return the timers of all keys that are due at a time, the earliest first; the block's changes have to be written before."""
        return self._block.store(DEFAULT_STORE).due(now_ms).sort_by(TIMER.name)

    def write(self) -> None:
        """Write the changes for the block's keys, and drop what was read."""
        for exists in (True, False):
            changes = [
                (index, time_ms)
                for index, times in self._changed.items()
                for time_ms, is_registered in times.items()
                if is_registered is exists
            ]
            if not changes:
                continue
            indices, times_ms = (pa.array(column, pa.int64()) for column in zip(*changes, strict=True))
            rows = self._block.keys.take(indices).append_column(TIMER.name, times_ms)
            store = self._block.store(DEFAULT_STORE)
            if exists:
                store.later("put", rows.append_column(DUE.name, times_ms))
            else:
                store.later("remove", rows)
        self._changed, self._stored = {}, None


State = ValueState | ListState | MapState
AnyState = TypeVar("AnyState", ValueState, ListState, MapState)


class ParsedSchemas(dict[str, T.DataType]):
    """Spark's types by their DDL, parsed on the driver and kept for the workers, which cannot parse DDL."""

    def __missing__(self, ddl: str) -> T.DataType:
        parsed = self[ddl] = _parse_datatype_string(ddl)
        return parsed


class StatefulProcessorHandle:
    """A processor's access to its state variables and timers.

    Variables are requested in ``init`` only; timers are registered and deleted in the other methods only.
    """

    def __init__(self, block: Block, time_mode: TimeMode, schemas: Mapping[str, T.DataType]) -> None:
        self._block, self._time_mode, self._schemas = block, time_mode, schemas
        self._timers = Timers(block)
        self._states: dict[str, State] = {}
        self._deleted: set[str] = set()
        self._is_open = True

    # -- variables ------------------------------------------------------------------------------------------------

    def getValueState(self, stateName: str, schema: T.StructType | str, ttlDurationMs: int | None = None) -> ValueState:
        """Request a variable with a value for each key.

        Parameters
        ----------
        stateName
            Name of the variable, unique in the processor.
        schema
            Its columns, as Spark's type or in DDL.
        ttlDurationMs
            Time after its last write at which a value expires, in milliseconds of processing time; by default never.

        Raises
        ------
        InvalidRequestError
            An argument is not valid, the name is taken, or ``init`` is over.
        """
        variable = self._declared(VariableKind.VALUE, stateName, schema, ttlDurationMs)
        return self._add(ValueState(self._block, variable))

    def getListState(self, stateName: str, schema: T.StructType | str, ttlDurationMs: int | None = None) -> ListState:
        """Request a list for each key; parameters and errors as :meth:`getValueState`. Each element has its own time to live."""
        variable = self._declared(VariableKind.LIST, stateName, schema, ttlDurationMs)
        return self._add(ListState(self._block, variable))

    def getMapState(
        self,
        stateName: str,
        userKeySchema: T.StructType | str,
        valueSchema: T.StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        """Request a map for each key; parameters and errors as :meth:`getValueState`. Each entry has its own time to live."""
        variable = self._declared(VariableKind.MAP, stateName, valueSchema, ttlDurationMs, userKeySchema)
        return self._add(MapState(self._block, variable))

    def deleteIfExists(self, stateName: str) -> None:
        """Remove a variable of an earlier run, or one that this ``init`` has requested, with the values of all keys.

        Raises
        ------
        InvalidRequestError
            ``init`` is over.
        """
        self._require_init("deleteIfExists")
        self._deleted.add(stateName)
        deleted = self._states.pop(stateName, None)
        if deleted is not None:
            deleted.drop()

    def _declared(
        self,
        kind: VariableKind,
        name: str,
        schema: T.StructType | str,
        ttl_ms: int | None,
        user_key: T.StructType | str | None = None,
    ) -> Variable:
        self._require_init(f"get{kind.value.capitalize()}State")
        if name in self._states:
            raise StateCallError("two state variables of a processor have this name; rename one", variable=name)
        if name in self._deleted:
            raise StateCallError(
                "init deletes this state variable, and it is run for each batch; delete it in one run of the query, and ask for it in "
                "the next one",
                variable=name,
            )
        try:
            return Variable.declared(
                name,
                kind,
                self._struct(schema, f"schema of {name}"),
                ttl_ms,
                self._time_mode,
                None if user_key is None else self._struct(user_key, f"userKeySchema of {name}"),
            )
        except StateCallError:
            raise
        except (InvalidRequestError, ParseException) as error:
            raise StateCallError(f"a state variable cannot be as it was asked for: {error}", variable=name) from error

    def _struct(self, schema: T.StructType | str, subject: str) -> T.StructType:
        try:
            return struct_type(self._schemas[schema] if isinstance(schema, str) else schema, subject)
        except KeyError:
            raise StateCallError(
                "init asks for a schema that it did not ask for when the query was built; it must ask for the same ones each time",
                schema=schema,
            ) from None

    def _add(self, state: AnyState) -> AnyState:
        self._states[state.variable.name] = state
        return state

    def _require_init(self, operation: str) -> None:
        if not self._is_open:
            raise StateCallError("state variables are asked for and deleted in init only", operation=operation)

    # -- timers ---------------------------------------------------------------------------------------------------

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Have ``handleExpiredTimer`` called for the current key once the time mode's clock has reached a time, in milliseconds.

        A time in the past fires in the same batch, after its rows. A key has at most one timer for each time.

        Raises
        ------
        InvalidRequestError
            The time mode is None, or this is ``init``.
        """
        self._checked_timers("registerTimer").register(expiryTimestampMs)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """Delete a timer of the current key, if there is one.

        Raises
        ------
        InvalidRequestError
            As :meth:`registerTimer`.
        """
        self._checked_timers("deleteTimer").delete(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        """Return the times of the current key's timers, in order, including the timer for which ``handleExpiredTimer`` runs.

        Raises
        ------
        InvalidRequestError
            As :meth:`registerTimer`.
        """
        return iter(self._checked_timers("listTimers").times())

    def _checked_timers(self, operation: str) -> Timers:
        if self._time_mode is TimeMode.NONE:
            raise StateCallError(
                "there are no timers with timeMode None; use ProcessingTime or EventTime", operation=operation
            )
        return self._timers

    # -- for the task ---------------------------------------------------------------------------------------------

    def end_of_init(self) -> None:
        """End ``init``: no more variables can be requested."""
        self._is_open = False

    @property
    def timers(self) -> Timers:
        """The timers of all keys."""
        return self._timers

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The processor's variables, in the order of its requests."""
        return tuple(state.variable for state in self._states.values())

    @property
    def states(self) -> list[State]:
        """The states of the variables."""
        return list(self._states.values())

    @property
    def deleted(self) -> frozenset[str]:
        """Names of variables whose values are to be removed."""
        return frozenset(self._deleted)


@dataclass(frozen=True, slots=True)
class TimerValues:
    """The times of a batch, in milliseconds since the epoch; -1 where there is none.

    Attributes
    ----------
    processing_time_ms
        Processing time of the batch, the same on every retry; -1 in time mode None.
    watermark_ms
        The watermark; -1 in time mode None, and without a watermark.
    """

    processing_time_ms: int = -1
    watermark_ms: int = -1

    def getCurrentProcessingTimeInMs(self) -> int:
        """Return the processing time of the batch."""
        return self.processing_time_ms

    def getCurrentWatermarkInMs(self) -> int:
        """Return the watermark: for rows, that of the batches before; for timers, that which includes this batch."""
        return self.watermark_ms


@dataclass(frozen=True, slots=True)
class ExpiredTimerInfo:
    """The timer that has expired."""

    expiry_time_ms: int

    def getExpiryTimeInMs(self) -> int:
        """Return the time for which the timer was registered, in milliseconds."""
        return self.expiry_time_ms


class StatefulProcessor(ABC):
    """A user's processor of the rows, timers and state of each key, as PySpark's ``StatefulProcessor``.

    With Spark 4, processors that extend PySpark's own class are of this class, too.

    An object of the class is pickled to the workers. Each task of each batch has a copy of its own, so data for later batches
    belongs in state variables. With ``transformWithStateInPandas`` rows are pandas DataFrames, with ``transformWithState`` they are
    Rows. Keys are tuples.
    """

    @abstractmethod
    def init(self, handle: StatefulProcessorHandle) -> None:
        """Request the state variables, and keep the handle for timers. It is also called when the query is built."""

    @abstractmethod
    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Any], timerValues: TimerValues) -> Iterable[Any]:
        """Process a key's rows of a batch.

        Parameters
        ----------
        key
            The grouping columns' values.
        rows
            DataFrames, or Rows.
        timerValues
            The times of the batch.

        Returns
        -------
        iterable
            The rows to emit: DataFrames, or Rows (tuples) in the order of the output's columns.
        """

    def handleExpiredTimer(
        self, key: tuple[Any, ...], timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterable[Any]:
        """Process an expired timer of a key, after the rows of the batch; return the rows to emit, by default none."""
        return iter(())

    def handleInitialState(  # noqa: B027 - a processor need not have it
        self, key: tuple[Any, ...], initialState: Any, timerValues: TimerValues
    ) -> None:
        """Process the initial state of a key: a DataFrame (in chunks, if it is large), or a Row.

        It is called in the first batch, before the rows of any key; by default it does nothing.
        """

    def close(self) -> None:  # noqa: B027 - nor this
        """End the processor's work in a task; by default this does nothing."""


for processor_class in SPARK.PROCESSOR_CLASSES:
    # They have the same methods, which get the fleet's handle, states and times in place of PySpark's.
    StatefulProcessor.register(processor_class)

"""What a processor is given in ``init``: it asks for its state variables, and has its timers here. Names are PySpark's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from pyspark.sql import types as T
from pyspark.sql.types import _parse_datatype_string

from coordinator.model.errors import InvalidRequestError
from spark_jobs.functions.grouped_input import struct_type
from spark_jobs.transform.block import Block
from spark_jobs.transform.states import ListState, MapState, ValueState
from spark_jobs.transform.timers import Timers
from spark_jobs.transform.variables import TimeMode, Variable, VariableKind

__all__ = ["ParsedSchemas", "StatefulProcessorHandle"]

State = ValueState | ListState | MapState
Kept = TypeVar("Kept", ValueState, ListState, MapState)


class ParsedSchemas(dict[str, T.DataType]):
    """Schemas in DDL with what Spark makes of them, kept for the workers, where nothing can parse them."""

    def __missing__(self, ddl: str) -> T.DataType:
        parsed = self[ddl] = _parse_datatype_string(ddl)
        return parsed


class StatefulProcessorHandle:
    """A processor's way to its state variables and timers.

    Variables are asked for in ``init`` only, timers registered and deleted in the other methods only.
    """

    def __init__(self, block: Block, time_mode: TimeMode, schemas: Mapping[str, T.DataType]) -> None:
        self._block, self._time_mode, self._schemas = block, time_mode, schemas
        self._timers = Timers(block)
        self._states: dict[str, tuple[Variable, State]] = {}
        self._deleted: set[str] = set()
        self._is_open = True

    # -- variables ------------------------------------------------------------------------------------------------

    def getValueState(self, stateName: str, schema: T.StructType | str, ttlDurationMs: int | None = None) -> ValueState:
        """One value a key.

        Parameters
        ----------
        stateName
            Name of the variable, unique in the processor.
        schema
            Its columns, as Spark's type or in DDL.
        ttlDurationMs
            How long a value lives after it was written, in milliseconds of processing time; for ever, by default.

        Raises
        ------
        InvalidRequestError
            An argument is not valid, the name is taken, or ``init`` is over.
        """
        variable = self._declared(VariableKind.VALUE, stateName, schema, ttlDurationMs)
        return self._kept(variable, ValueState(self._block, variable))

    def getListState(self, stateName: str, schema: T.StructType | str, ttlDurationMs: int | None = None) -> ListState:
        """A list a key; parameters and errors as :meth:`getValueState`. The time to live is that of each element."""
        variable = self._declared(VariableKind.LIST, stateName, schema, ttlDurationMs)
        return self._kept(variable, ListState(self._block, variable))

    def getMapState(
        self,
        stateName: str,
        userKeySchema: T.StructType | str,
        valueSchema: T.StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        """A map a key; parameters and errors as :meth:`getValueState`. The time to live is that of each entry."""
        variable = self._declared(VariableKind.MAP, stateName, valueSchema, ttlDurationMs, userKeySchema)
        return self._kept(variable, MapState(self._block, variable))

    def deleteIfExists(self, stateName: str) -> None:
        """Remove a variable that was there in an earlier run, or that this ``init`` asked for, with all its values of all keys.

        Raises
        ------
        InvalidRequestError
            ``init`` is over.
        """
        self._require_init("deleteIfExists")
        self._deleted.add(stateName)
        found = self._states.pop(stateName, None)
        if found is not None:
            found[1].drop()

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
            raise InvalidRequestError("two state variables of a processor have this name; rename one", variable=name)
        if name in self._deleted:
            raise InvalidRequestError(
                "init deletes this state variable, and it is run for each batch; delete it in one run of the query, and ask for it in "
                "the next one",
                variable=name,
            )
        return Variable.declared(
            name,
            kind,
            self._struct(schema, f"schema of {name}"),
            ttl_ms,
            self._time_mode,
            None if user_key is None else self._struct(user_key, f"userKeySchema of {name}"),
        )

    def _struct(self, given: T.StructType | str, what: str) -> T.StructType:
        if not isinstance(given, str):
            return struct_type(given, what)
        try:
            return struct_type(self._schemas[given], what)
        except KeyError:
            raise InvalidRequestError(
                "init asks for a schema that it did not ask for when the query was built; it must ask for the same ones each time",
                schema=given,
            ) from None

    def _kept(self, variable: Variable, state: Kept) -> Kept:
        self._states[variable.name] = (variable, state)
        return state

    def _require_init(self, operation: str) -> None:
        if not self._is_open:
            raise InvalidRequestError("state variables are asked for and deleted in init only", operation=operation)

    # -- timers ---------------------------------------------------------------------------------------------------

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Have ``handleExpiredTimer`` called for the current key once time (of the time mode) has reached this one, in milliseconds.

        A time that has been reached already fires in the same batch, after its rows. There is one timer for a key and a time.

        Raises
        ------
        InvalidRequestError
            The time mode is None, or this is ``init``.
        """
        self._checked_timers("registerTimer").register(expiryTimestampMs)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """Take a timer of the current key back; if there is none, nothing happens.

        Raises
        ------
        InvalidRequestError
            As :meth:`registerTimer`.
        """
        self._checked_timers("deleteTimer").delete(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        """Times of the current key's timers, in order; the one for which ``handleExpiredTimer`` runs is among them.

        Raises
        ------
        InvalidRequestError
            As :meth:`registerTimer`.
        """
        return iter(self._checked_timers("listTimers").times())

    def _checked_timers(self, operation: str) -> Timers:
        if self._time_mode is TimeMode.NONE:
            raise InvalidRequestError(
                "there are no timers with timeMode None; use ProcessingTime or EventTime", operation=operation
            )
        return self._timers

    # -- for the task ---------------------------------------------------------------------------------------------

    def end_of_init(self) -> None:
        """No more variables can be asked for."""
        self._is_open = False

    @property
    def timers(self) -> Timers:
        """All timers."""
        return self._timers

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The processor's variables, in the order in which it asked for them."""
        return tuple(variable for variable, _ in self._states.values())

    @property
    def states(self) -> list[State]:
        """Their states."""
        return [state for _, state in self._states.values()]

    @property
    def deleted(self) -> frozenset[str]:
        """Names of variables whose values are to be removed."""
        return frozenset(self._deleted)

"""State variables of a processor, and their keyed stores.

========  ==========================  =====================================================================
store     keys                        values
========  ==========================  =====================================================================
default   key, ``timer_ms``           ``due_ms``: the timers, by which time they fire
value.x   key                         the value's columns, ``expiry_ms``
list.x    key, ``place``              the element's columns, ``begin``, ``end``, ``expiry_ms``
map.x     key, ``place``              columns of the user's key and of its value, ``begin``, ``end``, ``expiry_ms``
========  ==========================  =====================================================================

``key`` is the operator's key leaves. The elements of a list or map of a key are numbered, in column ``place``. Its *head*, at place
-1, says that they are at places from ``begin`` to before ``end``; some of these may be empty. So elements are found by their keys,
without reading other rows. A head expires with its last element. ``expiry_ms`` exists only with a time to live; null means never.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.identities import DEFAULT_STORE
from coordinator.model.names import check_store_name
from coordinator.model.schema import Accumulator, Field
from spark_jobs.functions.groups import StateColumns
from spark_jobs.functions.user_state_task import GroupView
from spark_jobs.functions.values import RowValues
from spark_jobs.plan.spark_errors import InvalidArgumentError, StateCallError
from spark_jobs.plan.spark_version import SPARK
from spark_jobs.plan.storable import check_compared
from spark_jobs.plan.view_components import Node, ViewComponent, column
from store_actors.messages.requests import StoreSpec

#: When a timer fires, in milliseconds: as a key, and as the column by which rows are due.
TIMER, DUE = Field("timer_ms", "int64", nullable=False), Field("due_ms", "int64")
#: Number of an element of a list or map; HEAD for the head.
PLACE = Field("place", "int64", nullable=False)
HEAD = -1
#: In a head, the range of its elements' numbers, without END.
BEGIN, END = Field("begin", "int64"), Field("end", "int64")
#: When a row expires, in milliseconds of processing time.
EXPIRY = Field("expiry_ms", "int64")
#: More than ten thousand years; its sum with a present time still fits into 64 bits.
_LARGEST_TTL_MS = 1 << 50


class TimeMode(StrEnum):
    """The clock of the timers."""

    NONE = "none"
    PROCESSING_TIME = "processingtime"
    EVENT_TIME = "eventtime"

    @classmethod
    def of(cls, name: str) -> TimeMode:
        """Return a mode by the user's name for it, in any case.

        Raises
        ------
        InvalidRequestError
            There is no such mode.
        """
        try:
            return cls(name.lower())
        except (AttributeError, ValueError):
            raise InvalidArgumentError("timeMode is one of None, ProcessingTime, EventTime", timeMode=name) from None


class VariableKind(StrEnum):
    """The structure of a variable's values for a key."""

    VALUE = "value"
    LIST = "list"
    MAP = "map"


@dataclass(frozen=True)
class Variable:
    """A state variable."""

    name: str
    kind: VariableKind
    #: Columns of a value or element.
    values: T.StructType
    #: For a map, the columns of its keys.
    user_key: T.StructType | None = None
    #: Time after its last write at which a value expires; None for never.
    ttl_ms: int | None = None

    @classmethod
    def declared(
        cls,
        name: str,
        kind: VariableKind,
        values: T.StructType,
        ttl_ms: int | None,
        time_mode: TimeMode,
        user_key: T.StructType | None = None,
    ) -> Variable:
        """Return a variable as the user requests it.

        Raises
        ------
        InvalidRequestError
            The name is not valid for a folder, a map's key has types that are not atomic, or the time mode does not allow a time to
            live.
        """
        check_store_name(store_name(kind, name))
        # 0 also means no time to live, as in Spark.
        ttl = ttl_ms or None
        if ttl is not None and not 0 < ttl < _LARGEST_TTL_MS:
            raise StateCallError("a time to live is a positive number of ms", variable=name, ttlDurationMs=ttl_ms)
        if ttl is not None and time_mode is not TimeMode.PROCESSING_TIME:
            raise StateCallError(
                "a time to live is one of processing time; use timeMode ProcessingTime, or leave ttlDurationMs out",
                variable=name,
                timeMode=time_mode.value,
            )
        for item in () if user_key is None else user_key.fields:
            check_compared(item.dataType, f"{name}.{item.name}")
            if isinstance(item.dataType, T.ArrayType | T.MapType | T.StructType):
                raise StateCallError(
                    "keys of a map are of atomic types; take the fields that you need out of it",
                    variable=name,
                    column=item.name,
                    type=item.dataType.simpleString(),
                )
        return cls(name, kind, values, user_key, ttl)

    @cached_property
    def columns(self) -> StateColumns:
        return StateColumns(SPARK.arrow_schema(self.values))

    @cached_property
    def key_columns(self) -> StateColumns:
        """The store's columns for a map's key; empty for other variables."""
        return StateColumns(SPARK.arrow_schema(self.user_key) if self.user_key is not None else pa.schema([]), "u")

    @cached_property
    def rows(self) -> RowValues:
        return RowValues(self.values, f"state {self.name}")

    @cached_property
    def key_rows(self) -> RowValues:
        """Conversion of a map's keys to tuples."""
        return RowValues(self.user_key or T.StructType(), f"state {self.name}, as a key,")

    @property
    def store_name(self) -> str:
        return store_name(self.kind, self.name)

    def spec(self, keys: tuple[Field, ...]) -> StoreSpec:
        """Return the spec of its store, for an operator's keys."""
        has_elements = self.kind is not VariableKind.VALUE
        return StoreSpec(
            self.store_name,
            (*keys, PLACE) if has_elements else keys,
            (
                *self.key_columns.fields,
                *self.columns.fields,
                *((BEGIN, END) if has_elements else ()),
                *((EXPIRY,) if self.ttl_ms is not None else ()),
            ),
            EXPIRY.name if self.ttl_ms is not None else None,
        )

    def accumulators(self) -> tuple[Accumulator, ...]:
        """Return its accumulators in the operator's schema: the variable with a map's keys, then each column.

        :mod:`coordinator.ledger.compatibility` compares them by fingerprint: variables and columns may be added and removed, and
        columns may become wider; the kind of a variable cannot change.
        """
        kind = AccumulatorKind(self.kind.value)
        variable = Accumulator(kind, (), self.key_columns.fields, meaning=self.name)
        columns = (
            Accumulator(AccumulatorKind.VALUE, (), (field,), meaning=f"{self.name}: {field.name}")
            for field in self.columns.fields
        )
        return variable, *columns

    def view(self, keys: tuple[Field, ...], group_view: GroupView) -> ViewComponent:
        """Return the view of its store for readers, with an operator's keys."""
        component = ViewComponent(store=self.spec(keys))
        group_view.show_keys(component)
        if self.kind is not VariableKind.VALUE:
            # Without the heads, which are not elements.
            zero = {"op": "literal", "type": PLACE.type, "value": 0}
            component.where = {"op": ">=", "args": [column(PLACE.name), zero]}
        for name, tree in (*self.key_columns.shown_trees(), *self.columns.shown_trees()):
            component.value(name, tree, of=self.name)
        if self.kind is VariableKind.LIST:
            component.extra(PLACE.name, column(PLACE.name))
        if self.ttl_ms is not None:
            component.extra("expiry", _time(EXPIRY.name))
        return component


def store_name(kind: VariableKind, name: str) -> str:
    return f"{kind.value}.{name}"


def processor_stores(variables: Iterable[Variable], keys: tuple[Field, ...]) -> tuple[StoreSpec, ...]:
    """Return the stores of a processor: of its timers, and of each variable."""
    return _timer_spec(keys), *(variable.spec(keys) for variable in variables)


def _timer_spec(keys: tuple[Field, ...]) -> StoreSpec:
    """Return the spec of the timers' store, which every processor has; the coordinator tracks the operator's batches by it."""
    return StoreSpec(DEFAULT_STORE, (*keys, TIMER), (DUE,), DUE.name)


def view_of(variables: tuple[Variable, ...], keys: tuple[Field, ...], view: GroupView) -> dict[str, Mapping[str, Any]]:
    """Return the view of an operator's state for readers: its timers, and each variable, by the names of their stores."""
    timers = ViewComponent(store=_timer_spec(keys))
    view.show_keys(timers)
    timers.extra("timer", _time(TIMER.name))
    return {
        DEFAULT_STORE: timers.to_json(),
        **{variable.store_name: variable.view(keys, view).to_json() for variable in variables},
    }


def _time(name: str) -> Node:
    return {"op": "timestamp", "unit": "ms", "args": [column(name)]}


def accumulators_of(variables: tuple[Variable, ...]) -> tuple[Accumulator, ...]:
    """Return the accumulators of an operator's state: its timers, then those of each variable."""
    timers = Accumulator(AccumulatorKind.VALUE, (), (DUE,), meaning="(timers)")
    return timers, *(accumulator for variable in variables for accumulator in variable.accumulators())

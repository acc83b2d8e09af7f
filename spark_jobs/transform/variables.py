"""State variables of a processor: what they hold, and the keyed stores that hold it.

========  ==========================  =====================================================================
store     keys                        values
========  ==========================  =====================================================================
default   key, ``timer_ms``           ``due_ms``: the timers, by which time they fire
value.x   key                         the value's columns, ``expiry_ms``
list.x    key, ``place``              the element's columns, ``begin``, ``end``, ``expiry_ms``
map.x     key, ``place``              columns of the user's key and of its value, ``begin``, ``end``, ``expiry_ms``
========  ==========================  =====================================================================

``key`` is the operator's key leaves. The elements of a list or map of one key are numbered; its *head*, at place -1, says that they are
at places from ``begin`` to before ``end``, some of which may be empty. So they are found by their keys, without a look at other
rows. A head expires when its last element does. ``expiry_ms`` is there with a time to live only; null is never.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import DEFAULT_STORE
from coordinator.model.names import check_store_name
from coordinator.model.schema import Accumulator, AccumulatorKind, Field
from spark_jobs.functions.group_task import GroupView
from spark_jobs.functions.groups import StateColumns
from spark_jobs.functions.values import RowValues
from spark_jobs.plan.expression_trees import Node
from spark_jobs.plan.view_components import ViewComponent, column
from store_actors.messages import StoreSpec

__all__ = [
    "BEGIN",
    "DUE",
    "END",
    "EXPIRY",
    "HEAD",
    "PLACE",
    "TIMER",
    "TimeMode",
    "Variable",
    "VariableKind",
    "accumulators_of",
    "shown_of",
    "store_name",
    "timer_spec",
]

#: When a timer fires, in milliseconds; as key and as the column that rows fall due by.
TIMER, DUE = Field("timer_ms", "int64", nullable=False), Field("due_ms", "int64")
#: Number of an element of a list or map; of the head it is HEAD.
PLACE = Field("place", "int64", nullable=False)
HEAD = -1
#: Of a head: its elements are at these places, the second not included.
BEGIN, END = Field("begin", "int64"), Field("end", "int64")
#: When a row is no longer there, in milliseconds of processing time.
EXPIRY = Field("expiry_ms", "int64")
#: Ten thousand years and more: a sum with a time of today is still a number of 64 bits.
_LARGEST_TTL_MS = 1 << 50


class TimeMode(StrEnum):
    """What timers go by."""

    NONE = "none"
    PROCESSING_TIME = "processingtime"
    EVENT_TIME = "eventtime"

    @classmethod
    def of(cls, given: str) -> TimeMode:
        """A mode as the user names it, in any case.

        Raises
        ------
        InvalidRequestError
            There is no such mode.
        """
        try:
            return cls(given.lower())
        except (AttributeError, ValueError):
            raise InvalidRequestError("timeMode is one of None, ProcessingTime, EventTime", timeMode=given) from None


class VariableKind(StrEnum):
    """How many values a variable has for a key."""

    VALUE = "value"
    LIST = "list"
    MAP = "map"


@dataclass(frozen=True)
class Variable:
    """A state variable.

    Attributes
    ----------
    values
        Columns of a value or element.
    user_key
        Of a map, the columns of its keys.
    ttl_ms
        How long a value lives after it was written; None is for ever.
    """

    name: str
    kind: VariableKind
    values: T.StructType
    user_key: T.StructType | None = None
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
        """A variable as the user asks for it.

        Raises
        ------
        InvalidRequestError
            The name is no folder's, a map's key is not of atomic types, or the time to live does not go with the time mode.
        """
        check_store_name(store_name(kind, name))
        # No time to live may also be told by 0, as in Spark.
        ttl = ttl_ms or None
        if ttl is not None and not 0 < ttl < _LARGEST_TTL_MS:
            raise InvalidRequestError("a time to live is a positive number of ms", variable=name, ttlDurationMs=ttl_ms)
        if ttl is not None and time_mode is not TimeMode.PROCESSING_TIME:
            raise InvalidRequestError(
                "a time to live is one of processing time; use timeMode ProcessingTime, or leave ttlDurationMs out",
                variable=name,
                timeMode=time_mode.value,
            )
        for item in () if user_key is None else user_key.fields:
            if isinstance(item.dataType, T.ArrayType | T.MapType | T.StructType):
                raise InvalidRequestError(
                    "keys of a map are of atomic types; take the fields that you need out of it",
                    variable=name,
                    column=item.name,
                    type=item.dataType.simpleString(),
                )
        return cls(name, kind, values, user_key, ttl)

    @cached_property
    def columns(self) -> StateColumns:
        """Columns of the store for those of a value."""
        return StateColumns(to_arrow_schema(self.values))

    @cached_property
    def key_columns(self) -> StateColumns:
        """Columns of the store for those of a map's key; none of other variables."""
        return StateColumns(to_arrow_schema(self.user_key) if self.user_key is not None else pa.schema([]), "u")

    @cached_property
    def rows(self) -> RowValues:
        """Values as tuples."""
        return RowValues(self.values, f"state {self.name}")

    @cached_property
    def key_rows(self) -> RowValues:
        """Keys of a map as tuples."""
        return RowValues(self.user_key or T.StructType(), f"state {self.name}, as a key,")

    @property
    def store_name(self) -> str:
        """Name of its store."""
        return store_name(self.kind, self.name)

    def spec(self, keys: tuple[Field, ...]) -> StoreSpec:
        """Its store, under an operator's keys."""
        is_many = self.kind is not VariableKind.VALUE
        return StoreSpec(
            self.store_name,
            (*keys, PLACE) if is_many else keys,
            (
                *self.key_columns.fields,
                *self.columns.fields,
                *((BEGIN, END) if is_many else ()),
                *((EXPIRY,) if self.ttl_ms is not None else ()),
            ),
            EXPIRY.name if self.ttl_ms is not None else None,
        )

    def accumulators(self) -> tuple[Accumulator, ...]:
        """What an operator's schema says of it: the variable, with a map's keys, then each column.

        :mod:`coordinator.ledger.compatibility` compares them by meaning: a variable may come and go, and so may its columns, which
        may also become wider; it cannot become one of another kind.
        """
        kind = AccumulatorKind(self.kind.value)
        named = Accumulator(kind, (), self.key_columns.fields, meaning=self.name)
        columns = (
            Accumulator(AccumulatorKind.VALUE, (), (field,), meaning=f"{self.name}: {field.name}")
            for field in self.columns.fields
        )
        return named, *columns

    def shown(self, keys: tuple[Field, ...], view: GroupView) -> ViewComponent:
        """What readers are shown of its store, under an operator's keys."""
        part = ViewComponent(store=self.spec(keys))
        view.show_keys(part)
        if self.kind is not VariableKind.VALUE:
            # Heads are no elements.
            zero = {"op": "literal", "type": PLACE.type, "value": 0}
            part.where = {"op": ">=", "args": [column(PLACE.name), zero]}
        for name, tree in (*self.key_columns.shown_trees(), *self.columns.shown_trees()):
            part.value(name, tree, of=self.name)
        if self.kind is VariableKind.LIST:
            part.extra(PLACE.name, column(PLACE.name))
        if self.ttl_ms is not None:
            part.extra("expiry", _time(EXPIRY.name))
        return part


def store_name(kind: VariableKind, name: str) -> str:
    """Name of a variable's store."""
    return f"{kind.value}.{name}"


def timer_spec(keys: tuple[Field, ...]) -> StoreSpec:
    """The timers' store, which every processor has: what the coordinator knows of the operator's batches goes with it."""
    return StoreSpec(DEFAULT_STORE, (*keys, TIMER), (DUE,), DUE.name)


def shown_of(variables: tuple[Variable, ...], keys: tuple[Field, ...], view: GroupView) -> dict[str, Mapping[str, Any]]:
    """What readers are shown of an operator's state: its timers, and each variable, by the names of their stores."""
    timers = ViewComponent(store=timer_spec(keys))
    view.show_keys(timers)
    timers.extra("timer", _time(TIMER.name))
    return {
        DEFAULT_STORE: timers.to_json(),
        **{variable.store_name: variable.shown(keys, view).to_json() for variable in variables},
    }


def _time(name: str) -> Node:
    return {"op": "timestamp", "unit": "ms", "args": [column(name)]}


def accumulators_of(variables: tuple[Variable, ...]) -> tuple[Accumulator, ...]:
    """What an operator's schema says of its state."""
    timers = Accumulator(AccumulatorKind.VALUE, (), (DUE,), meaning="(timers)")
    return timers, *(one for variable in variables for one in variable.accumulators())

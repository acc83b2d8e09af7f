"""What a shard holds: key fields, accumulators and how each input column moves them.

A :class:`StateSchema` is built once per query (``spark_jobs.plan``), travels to the store actors and into every state's
``metadata.json``, and is all a shard needs to know of the query. Field types are Arrow types written as strings
(:func:`type_to_string`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import pyarrow as pa

__all__ = ["Accumulator", "AccumulatorKind", "Field", "StateSchema", "string_to_type", "type_to_string"]


class AccumulatorKind(StrEnum):
    """The primitives that every supported aggregate is made of. Nulls are ignored unless stated."""

    #: Rows; no input. State: one int64, never null.
    COUNT_ROWS = "count_rows"
    #: Rows in which every input is non-null. State: one int64, never null.
    COUNT_VALID = "count_valid"
    #: Wrapping int64 sum, as Spark without ANSI mode. State: one int64, null until a value came.
    SUM_INT = "sum_int"
    #: Float64 sum. State: one float64, null until a value came.
    SUM_FLOAT = "sum_float"
    #: Decimal sum. State: decimal (null once it overflowed its precision, and then for good) and ``is_empty`` boolean.
    SUM_DECIMAL = "sum_decimal"
    #: State: one value of the input's type, null until a value came. Float NaN is the largest value, as in Spark.
    MIN = "min"
    MAX = "max"
    #: State: the value and ``value_set`` boolean. A null is a value.
    FIRST = "first"
    LAST = "last"
    #: The same, skipping nulls (``ignorenulls=True``).
    FIRST_VALID = "first_valid"
    LAST_VALID = "last_valid"
    #: Central moments of order two (Welford, merged as Chan et al.). Input float64; state: n, avg, m2, all float64.
    MOMENTS = "moments"
    #: A value column of a keyed store: written whole, folded by nothing. No input; state: one value, null if it is null.
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Field:
    """A named column with its Arrow type in string form."""

    name: str
    type: str
    nullable: bool = True

    def arrow(self) -> pa.Field:
        return pa.field(self.name, string_to_type(self.type), self.nullable)


@dataclass(frozen=True, slots=True)
class Accumulator:
    """One accumulator: its inputs (columns of the incoming batch) and the state fields it moves."""

    kind: AccumulatorKind
    inputs: tuple[str, ...]
    state: tuple[Field, ...]


@dataclass(frozen=True, slots=True)
class StateSchema:
    """Keys, accumulators and the event-time rule of one stateful operator.

    Attributes
    ----------
    keys
        Grouping columns, flattened to leaves (a window is two timestamps). May be empty: one global group.
    inputs
        Columns that reach the shard besides the keys.
    accumulators
        In the order of the state columns.
    expiry_key
        Key leaf (timestamp) that a group's life ends by: a group is closed, and its rows are late, once
        ``expiry <= watermark``. None: groups live for ever.
    delay_ms
        Watermark delay; None without a watermark.
    output_mode
        ``update``, ``append`` or ``complete``.
    """

    keys: tuple[Field, ...]
    inputs: tuple[Field, ...]
    accumulators: tuple[Accumulator, ...]
    expiry_key: str | None
    delay_ms: int | None
    output_mode: str

    @property
    def state_fields(self) -> tuple[Field, ...]:
        return tuple(field for accumulator in self.accumulators for field in accumulator.state)

    def key_schema(self) -> pa.Schema:
        return pa.schema([field.arrow() for field in self.keys])

    def raw_schema(self) -> pa.Schema:
        """Keys and raw inputs: what the map side reads, and what reaches the shard where nothing was combined."""
        return pa.schema([field.arrow() for field in (*self.keys, *self.inputs)])

    def row_schema(self) -> pa.Schema:
        """Keys and accumulators: a partially aggregated row, a row of state, a row of output."""
        return pa.schema([field.arrow() for field in (*self.keys, *self.state_fields)])

    @classmethod
    def keyed(cls, keys: tuple[Field, ...], values: tuple[Field, ...]) -> StateSchema:
        """Schema of a keyed store: rows of value columns that are put and removed by key, in any order of time."""
        accumulators = tuple(Accumulator(AccumulatorKind.VALUE, (), (field,)) for field in values)
        return cls(keys, (), accumulators, None, None, "update")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StateSchema:
        def fields(items: list[dict[str, Any]]) -> tuple[Field, ...]:
            return tuple(Field(**item) for item in items)

        return cls(
            keys=fields(data["keys"]),
            inputs=fields(data["inputs"]),
            accumulators=tuple(
                Accumulator(AccumulatorKind(item["kind"]), tuple(item["inputs"]), fields(item["state"]))
                for item in data["accumulators"]
            ),
            expiry_key=data["expiry_key"],
            delay_ms=data["delay_ms"],
            output_mode=data["output_mode"],
        )


_SIMPLE: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date32": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "duration": pa.duration("us"),
}


def type_to_string(data_type: pa.DataType) -> str:
    """Name of an Arrow type in a state's schema; the time zone of a timestamp is dropped, its instant is UTC."""
    if pa.types.is_decimal128(data_type):
        return f"decimal({data_type.precision},{data_type.scale})"
    if pa.types.is_timestamp(data_type):
        return "timestamp" if data_type.tz is not None else "timestamp_ntz"
    for name, simple in _SIMPLE.items():
        if data_type == simple:
            return name
    raise ValueError(f"no state can hold the Arrow type {data_type}")


def string_to_type(name: str) -> pa.DataType:
    """Arrow type of a name made by :func:`type_to_string`."""
    if name.startswith("decimal("):
        precision, scale = name[len("decimal(") : -1].split(",")
        return pa.decimal128(int(precision), int(scale))
    return _SIMPLE[name]

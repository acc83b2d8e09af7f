"""The schema of a shard: key fields, accumulators and how each input column moves them.

A :class:`StateSchema` is built once per query (``spark_jobs.operators.aggregate``), travels to the store actors and into every state's
``metadata.json``, and is all a shard needs to know of the query. Field types are Arrow types written as strings
(:mod:`coordinator.model.type_names`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any

import pyarrow as pa
from msgspec import Struct, field, structs

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.stored_json import always_written
from coordinator.model.type_names import spark_type, string_to_type

#: Last key column of operators that hold many rows of a key: numbers them within the shard.
ROW_COLUMN = "__row"


class OperatorKind(StrEnum):
    """The kinds of stateful operators, by what they do with their state."""

    #: Groups with accumulators.
    AGGREGATE = "aggregate"
    #: Groups in sessions: windows that end when nothing comes for a while.
    SESSION = "session"
    #: First row of each key.
    DEDUPLICATE = "deduplicate"
    #: Rows of two streams that belong together.
    JOIN = "join"
    #: First, by some order, rows of each key.
    TOP = "top"
    #: First rows of all.
    LIMIT = "limit"
    #: A function of the user, called for each key with rows or a timeout; state is a keyed store.
    GROUP_STATE = "group_state"
    #: A processor of the user (transformWithState); state variables and timers are keyed stores.
    TRANSFORM = "transform"
    #: A function of the user over whole partitions, with keyed stores of its own.
    PARTITIONS = "partitions"


@lru_cache(maxsize=4096)
def _arrow_field(name: str, kind: str, nullable: bool) -> pa.Field:
    return pa.field(name, string_to_type(kind), nullable)


class Field(Struct, frozen=True, forbid_unknown_fields=True):
    """A named column with its Arrow type in string form."""

    name: str
    type: str
    nullable: bool = True
    #: ``type`` and ``metadata`` of Spark's column, as Spark writes them in a schema's JSON, where they are not what
    #: :func:`~coordinator.model.type_names.spark_type` makes of `type`: the fields of an interval, the declared type of a char or
    #: varchar.
    spark: str | None = None

    def arrow(self) -> pa.Field:
        return _arrow_field(self.name, self.type, self.nullable)

    def spark_json(self) -> dict[str, Any]:
        """Return the column as Spark writes it in the JSON of a schema (``StructField.json()``)."""
        described = {"type": spark_type(self.type), "metadata": {}} if self.spark is None else json.loads(self.spark)
        return {"name": self.name, "nullable": self.nullable, **described}


class Accumulator(Struct, frozen=True, omit_defaults=True):
    """An accumulator: its inputs (columns of the incoming batch) and the state fields that they change."""

    kind: AccumulatorKind
    inputs: tuple[str, ...]
    state: tuple[Field, ...]
    #: ``meaning``, ``cast``: What it accumulates, and what the query casts that to: how a changed query finds its state
    #: (:mod:`coordinator.ledger.compatibility`). Empty for columns of a keyed store.
    meaning: str = always_written("")
    cast: str = always_written("")
    #: What is emitted of it, where that is not its state (``operators/aggregate_results.py``).
    result: tuple[Field, ...] = ()
    #: What else that depends on (JSON values).
    options: Mapping[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.kind, self.inputs, self.state, self.meaning, self.cast, self.result))

    @property
    def emitted(self) -> tuple[Field, ...]:
        return self.result or self.state


class StateSchema(Struct, frozen=True, omit_defaults=True):
    """Keys, accumulators and the event-time rule of one stateful operator."""

    #: Grouping columns, flattened to leaves (a window is two timestamps). May be empty: one global group.
    keys: tuple[Field, ...]
    #: Columns that reach the shard besides the keys.
    inputs: tuple[Field, ...]
    #: In the order of the state columns.
    accumulators: tuple[Accumulator, ...]
    #: Key leaf (timestamp) that a group's life ends by: a group is closed, and its rows are late, once
    #: ``expiry <= watermark``. None: groups live for ever.
    expiry_key: str | None
    #: Watermark delay; None without a watermark.
    delay_ms: int | None
    #: ``update``, ``append`` or ``complete``.
    output_mode: str
    operator: OperatorKind = always_written(OperatorKind.AGGREGATE)
    #: What else the operator needs to know (JSON values); see the operator's module.
    options: Mapping[str, Any] = always_written({})
    #: What a reader is shown of the rows, as JSON (:mod:`store_actors.operators.view_columns`); empty where a state has
    #: none. It makes no two schemas differ: a result that is renamed leaves the state as it is.
    shown: Mapping[str, Any] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateSchema) and self._compared() == other._compared()

    def __hash__(self) -> int:
        # Without the options, which have no hash.
        return hash(self._compared()[:-1])

    def _compared(self) -> tuple[Any, ...]:
        """Return all fields but the last one, `shown`."""
        return structs.astuple(self)[:-1]

    @property
    def state_fields(self) -> tuple[Field, ...]:
        return tuple(item for accumulator in self.accumulators for item in accumulator.state)

    @property
    def emitted_fields(self) -> tuple[Field, ...]:
        """Return the fields that the accumulators emit."""
        return tuple(item for accumulator in self.accumulators for item in accumulator.emitted)

    def key_schema(self) -> pa.Schema:
        return pa.schema([item.arrow() for item in self.keys])

    @property
    def input_keys(self) -> tuple[Field, ...]:
        """Return the keys that rows come with; the operator adds the others (``__row``)."""
        return tuple(item for item in self.keys if not item.name.startswith("__"))

    def raw_schema(self) -> pa.Schema:
        """Return keys and raw inputs: the rows that the map side reads, and that reach the shard if they were not combined."""
        return pa.schema([item.arrow() for item in (*self.input_keys, *self.inputs)])

    def input_schemas(self) -> tuple[pa.Schema, ...]:
        """Return the schemas of the chunks that reach the shard: raw and partially aggregated rows; of a join, left and right ones."""
        if self.operator is OperatorKind.AGGREGATE:
            return self.raw_schema(), self.row_schema()
        if self.operator is OperatorKind.JOIN:
            named = {item.name: item for item in self.inputs}
            sides = [[*self.input_keys, *(named[name] for name in names)] for names in self.options["sides"]]
            return tuple(pa.schema([item.arrow() for item in side]) for side in sides)
        return (self.raw_schema(),)

    def row_schema(self) -> pa.Schema:
        """Return keys and accumulators: a partially aggregated row, a row of state, a row of output."""
        return pa.schema([item.arrow() for item in (*self.keys, *self.state_fields)])

    def spark_schema(self) -> dict[str, Any]:
        """Return :meth:`row_schema` as Spark writes it (``StructType.json()``)."""
        return {"type": "struct", "fields": [item.spark_json() for item in (*self.keys, *self.state_fields)]}

    @classmethod
    def keyed(cls, keys: tuple[Field, ...], values: tuple[Field, ...]) -> StateSchema:
        """Return the schema of a keyed store: rows of value columns that are put and removed by key, in any order of time."""
        accumulators = tuple(Accumulator(AccumulatorKind.VALUE, (), (value,)) for value in values)
        return cls(keys, (), accumulators, None, None, "update")

    def in_output_mode(self, mode: str) -> StateSchema:
        """Return the schema of an aggregation whose query runs in a mode; for any other operator this schema.

        In complete mode everything is kept: no group ends, and none of its rows are late but those of sessions of event time.
        """
        if mode == self.output_mode or self.operator not in (OperatorKind.AGGREGATE, OperatorKind.SESSION):
            return self
        if mode != "complete":
            return structs.replace(self, output_mode=mode)
        is_other_time = self.operator is OperatorKind.SESSION and self.expiry_key is None
        delay_ms = None if is_other_time else self.delay_ms
        return structs.replace(self, output_mode=mode, expiry_key=None, delay_ms=delay_ms)

    def undescribed(self) -> StateSchema:
        """Return the schema without the view for readers: as tasks and files have it."""
        return structs.replace(self, shown={})

"""The schema of a shard: key fields, accumulators and how each input column moves them.

A :class:`StateSchema` is built once per query (``spark_jobs.operators.aggregate``), travels to the store actors and into every state's
``metadata.json``, and is all a shard needs to know of the query. Field types are Arrow types written as strings
(:mod:`coordinator.model.type_names`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeVar

import pyarrow as pa

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.errors import NewerFormatError
from coordinator.model.identities import FastPickle
from coordinator.model.type_names import spark_type, string_to_type

__all__ = [
    "ROW_COLUMN",
    "Accumulator",
    "AccumulatorKind",
    "Field",
    "OperatorKind",
    "StateSchema",
]


_Kind = TypeVar("_Kind", bound=StrEnum)
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


@dataclass(frozen=True, slots=True)
class Field(FastPickle):
    """A named column with its Arrow type in string form.

    Attributes
    ----------
    spark
        ``type`` and ``metadata`` of Spark's column, as Spark writes them in a schema's JSON, where they are not what
        :func:`~coordinator.model.type_names.spark_type` makes of `type`: the fields of an interval, the declared type of a char or
        varchar.
    """

    name: str
    type: str
    nullable: bool = True
    spark: str | None = None

    def arrow(self) -> pa.Field:
        return _arrow_field(self.name, self.type, self.nullable)

    def spark_json(self) -> dict[str, Any]:
        """Return the column as Spark writes it in the JSON of a schema (``StructField.json()``)."""
        described = {"type": spark_type(self.type), "metadata": {}} if self.spark is None else json.loads(self.spark)
        return {"name": self.name, "nullable": self.nullable, **described}


@dataclass(frozen=True, slots=True)
class Accumulator(FastPickle):
    """An accumulator: its inputs (columns of the incoming batch) and the state fields that they change.

    Attributes
    ----------
    result
        What is emitted of it, where that is not its state (``engine/results.py``).
    options
        What else that depends on (JSON values).
    meaning, cast
        What it accumulates, and what the query casts that to: how a changed query finds its state
        (:mod:`coordinator.ledger.compatibility`). Empty for columns of a keyed store.
    """

    kind: AccumulatorKind
    inputs: tuple[str, ...]
    state: tuple[Field, ...]
    meaning: str = ""
    cast: str = ""
    result: tuple[Field, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def emitted(self) -> tuple[Field, ...]:
        return self.result or self.state


@dataclass(frozen=True, slots=True)
class StateSchema(FastPickle):
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
    operator
        What is done with the state.
    options
        What else the operator needs to know (JSON values); see the operator's module.
    shown
        What a reader is shown of the rows, as JSON (:mod:`store_actors.operators.view_columns`); empty where a state has
        none. It makes no two schemas differ: a result that is renamed leaves the state as it is.
    source
        The JSON that the schema was read from, in this process; None if it was not read from any. Releases differ in which fields they
        write, and a schema that is read and written again keeps its bytes.
    """

    keys: tuple[Field, ...]
    inputs: tuple[Field, ...]
    accumulators: tuple[Accumulator, ...]
    expiry_key: str | None
    delay_ms: int | None
    output_mode: str
    operator: OperatorKind = OperatorKind.AGGREGATE
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    shown: Mapping[str, Any] = field(default_factory=dict, compare=False)
    source: Mapping[str, Any] | None = field(default=None, init=False, compare=False, repr=False)

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
            return replace(self, output_mode=mode)
        is_other_time = self.operator is OperatorKind.SESSION and self.expiry_key is None
        delay_ms = None if is_other_time else self.delay_ms
        return replace(self, output_mode=mode, expiry_key=None, delay_ms=delay_ms)

    def undescribed(self) -> StateSchema:
        """Return the schema without the view for readers: as tasks and files have it."""
        return replace(self, shown={})

    def to_json(self) -> dict[str, Any]:
        """Return the schema as JSON data: what it was read from, or else the fields in their order."""
        if self.source is not None:
            return dict(self.source)
        # Every file carries it: not asdict(), which copies value by value.
        data = _shallow(self)
        data["keys"] = tuple(map(_shallow, self.keys))
        data["inputs"] = tuple(map(_shallow, self.inputs))
        data["accumulators"] = tuple(map(_described, self.accumulators))
        del data["source"]
        if not self.shown:
            del data["shown"]
        data["options"] = copy.deepcopy(dict(self.options))
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StateSchema:
        """Return the schema that JSON data describes.

        Raises
        ------
        NewerFormatError
            A later release wrote it: it has a kind of operator or of accumulator that this one does not know.
        KeyError, TypeError, ValueError
            The data describe no schema.
        """

        def fields(items: Sequence[dict[str, Any]]) -> tuple[Field, ...]:
            return tuple(Field(**item) for item in items)

        schema = cls(
            keys=fields(data["keys"]),
            inputs=fields(data["inputs"]),
            accumulators=tuple(
                Accumulator(
                    _kind(AccumulatorKind, item["kind"]),
                    tuple(item["inputs"]),
                    fields(item["state"]),
                    item.get("meaning", ""),
                    item.get("cast", ""),
                    fields(item.get("result", ())),
                    dict(item.get("options", {})),
                )
                for item in data["accumulators"]
            ),
            expiry_key=data["expiry_key"],
            delay_ms=data["delay_ms"],
            output_mode=data["output_mode"],
            operator=_kind(OperatorKind, data.get("operator", OperatorKind.AGGREGATE)),
            options=data.get("options", {}),
            shown=data.get("shown", {}),
        )
        object.__setattr__(schema, "source", data)
        return schema


def _kind(kinds: type[_Kind], name: str) -> _Kind:
    try:
        return kinds(name)
    except ValueError as error:
        raise NewerFormatError(
            "a state was written by a later release of Statefleet: its schema has a kind that this one does not know; nothing was read "
            "of it and nothing was changed; use that release, or a newer one, for this state",
            kind=name,
        ) from error


def _described(accumulator: Accumulator) -> dict[str, Any]:
    """Return an accumulator as JSON data. Empty fields that few accumulators have are left out."""
    data = _shallow(accumulator)
    for part in ("state", "result"):
        data[part] = tuple(map(_shallow, data[part]))
    data["options"] = copy.deepcopy(dict(accumulator.options))
    return {name: value for name, value in data.items() if value or name not in ("result", "options")}


def _shallow(described: Field | Accumulator | StateSchema) -> dict[str, Any]:
    return {name: getattr(described, name) for name in described.__dataclass_fields__}

"""Session windows among the grouping columns of an aggregation: no key, but a span of time that grows."""

from __future__ import annotations

from dataclasses import replace

from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.keys import Key, KeyTree
from store_actors.schema import ROW_COLUMN, Accumulator, AccumulatorKind, Field, OperatorKind, StateSchema

__all__ = ["SESSION_FIELDS", "session_key", "session_schema"]

#: Start and end of a session, as an input and in the state.
SESSION_FIELDS = (Field("session_start", "timestamp"), Field("session_end", "timestamp"))


def session_schema(schema: StateSchema) -> StateSchema:
    """Schema of an aggregation by sessions, of that by its other keys."""
    span = tuple(Accumulator(AccumulatorKind.VALUE, (), (one,), meaning=one.name) for one in SESSION_FIELDS)
    return replace(
        schema,
        keys=(*schema.keys, Field(ROW_COLUMN, "int64", nullable=False)),
        accumulators=(*span, *schema.accumulators),
        operator=OperatorKind.SESSION,
    )


def session_key(expression: Expression) -> Key:
    """The session as the results show it."""
    start, end = (KeyTree(leaf=one.name) for one in SESSION_FIELDS)
    return Key(expression, (), (), KeyTree(fields=(("start", start), ("end", end))), SESSION_FIELDS[1].name)

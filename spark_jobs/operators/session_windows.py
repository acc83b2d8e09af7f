"""Session windows among the grouping columns of an aggregation: not a key, but a span of time that grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs
from pyspark.sql import Column

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import ROW_COLUMN, Accumulator, Field, OperatorKind, StateSchema
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.keys import Key, KeyTree
from spark_jobs.plan.spark_errors import RefusedQueryError

#: Start and end of a session, as an input and in the state.
_START, _END = Field("session_start", "timestamp"), Field("session_end", "timestamp")


@dataclass(frozen=True)
class Session:
    """The session window that an aggregation groups by, besides its keys."""

    window: Expression

    @classmethod
    def among(cls, grouping: Sequence[Expression]) -> Session | None:
        """Return the session window among the grouping expressions; None if there is none.

        Raises
        ------
        InvalidRequestError
            Spark does not run such a session window in streaming queries.
        """
        window = next((expression for expression in grouping if expression.is_session), None)
        if window is None:
            return None
        if len(grouping) < 2:
            raise RefusedQueryError(
                "a session window needs at least one more grouping column, as in Spark; group by what the sessions are of"
            )
        return cls(window)

    @property
    def expiry(self) -> str | None:
        """Field by which the watermark closes sessions; None if they are not of event time."""
        return None if self.window.watermark_delay_ms is None else _END.name

    def inputs(self) -> list[tuple[str, Column]]:
        """Return a row's own span, as it reaches the shard."""
        window = self.window.column()
        return [(_START.name, window.getField("start")), (_END.name, window.getField("end"))]

    def key(self) -> Key:
        """Return the session as a key of the results."""
        tree = KeyTree(fields=(("start", KeyTree(leaf=_START.name)), ("end", KeyTree(leaf=_END.name))))
        return Key(self.window, (), (), tree, _END.name)

    def schema(self, by_keys: StateSchema) -> StateSchema:
        """Return the schema of the aggregation, given that of an aggregation by its keys alone."""
        span = tuple(Accumulator(AccumulatorKind.VALUE, (), (field,), meaning=field.name) for field in (_START, _END))
        return structs.replace(
            by_keys,
            keys=(*by_keys.keys, Field(ROW_COLUMN, "int64", nullable=False)),
            accumulators=(*span, *by_keys.accumulators),
            operator=OperatorKind.SESSION,
        )

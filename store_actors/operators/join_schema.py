"""The options of a stream-stream join, and the schema of its state. Light to import: the driver has no need of the engine.

Schema: ``keys`` are the join key's leaves and ``__row``, which numbers the rows of both sides; ``inputs`` the
columns of both sides. State, and so a delta's row, is ``__side`` (0 left, 1 right), ``__matched`` (of an outer side) and those columns
of either side that are needed again, null in rows of the other. A removed row has its keys and side only.

Options, as JSON; pairs are [left, right], and null or missing is none:

=================  ============================================================================================
``join_type``      ``inner``, ``left_outer``, ``right_outer``, ``full_outer`` or ``left_semi``
``sides``          names of each side's columns (all of ``inputs``)
``output``         names of each side's columns that are emitted; missing: all. A semi join emits left ones
``null_safe``      keys compared by ``<=>``; a row with a null in another one (``=``) matches nothing
``event_time``     timestamp column of each side by which its rows are late: up to the watermark of the version before
``expiry``         timestamp column of each side, or a key: a row is removed once the watermark is there; null never
``pre``            boolean column of each side; a row of which it is not true cannot match: it is not kept, and on an
                   outer side emitted with nulls at once
``condition``      tree over columns of both sides and keys (:mod:`store_actors.operators.expressions`)
``output_lag_us``  how far behind the watermark the event times of each side's kept rows may be, in microseconds
                   (Spark: watermark less state watermark, 0 if the key has the event time); null if they may not be kept
                   by event time
``as_of``          of an as-of join: ``times``, a timestamp column of each side, ``within_us``, how many microseconds a match may
                   be older, null for any number, and ``is_strict``, whether a row of the same time, or as old as that, is no
                   match. The left side expires by its time, the right one by a column that has it at first
=================  ============================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import ROW_COLUMN, Accumulator, Field, OperatorKind, StateSchema
from store_actors.operators.expressions import columns_of

#: Which side a row of state is of: 0 left, 1 right.
SIDE_COLUMN = "__side"
#: Whether a row of an outer side was ever matched; null on other sides.
MATCHED_COLUMN = "__matched"


class JoinType(StrEnum):
    """The joins that Spark has for two streams."""

    INNER = "inner"
    LEFT_OUTER = "left_outer"
    RIGHT_OUTER = "right_outer"
    FULL_OUTER = "full_outer"
    LEFT_SEMI = "left_semi"

    def is_outer(self, side: int) -> bool:
        """Return whether rows of a side that match nothing are emitted with nulls."""
        return _OUTER.get(self, (False, False))[side]


_OUTER = {
    JoinType.LEFT_OUTER: (True, False),
    JoinType.RIGHT_OUTER: (False, True),
    JoinType.FULL_OUTER: (True, True),
}

Names = tuple[str | None, str | None]


@dataclass(frozen=True, slots=True)
class AsOf:
    """Which row of the right side an as-of join takes: the newest before, or not after, the left row's time."""

    times: tuple[str, str]
    within_us: int | None
    is_strict: bool


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """``StateSchema.options`` of a join; the module says what each is. Pairs are (left, right)."""

    join_type: JoinType
    sides: tuple[tuple[str, ...], tuple[str, ...]]
    output: tuple[tuple[str, ...], tuple[str, ...]]
    null_safe: frozenset[str]
    event_time: Names
    expiry: Names
    pre: Names
    condition: Mapping[str, Any] | None
    output_lag_us: tuple[int | None, int | None]
    as_of: AsOf | None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> JoinOptions:
        """Read the options of a schema; a missing option is off."""
        join_type = JoinType(options["join_type"])
        sides = tuple(options["sides"][0]), tuple(options["sides"][1])
        output = options.get("output") or sides
        nothing: tuple[None, None] = (None, None)
        as_of = options.get("as_of")
        return cls(
            join_type=join_type,
            sides=sides,
            output=(tuple(output[0]), () if join_type is JoinType.LEFT_SEMI else tuple(output[1])),
            null_safe=frozenset(options.get("null_safe", ())),
            event_time=tuple(options.get("event_time") or nothing),
            expiry=tuple(options.get("expiry") or nothing),
            pre=tuple(options.get("pre") or nothing),
            condition=options.get("condition"),
            output_lag_us=tuple(options.get("output_lag_us") or nothing),
            as_of=as_of and AsOf(tuple(as_of["times"]), as_of["within_us"], as_of["is_strict"]),
        )

    def is_marked(self, side: int) -> bool:
        """Return whether rows of a side note that they were matched: an as-of join's leave the state with their match."""
        return self.join_type.is_outer(side) and self.as_of is None

    def stored(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the columns of either side that are needed after their batch: of the output, the condition, and the expiry."""
        read = columns_of(self.condition) if self.condition is not None else set()
        times = (None, None) if self.as_of is None else self.as_of.times
        needed = [{*self.output[side], *read, self.expiry[side], times[side]} for side in (0, 1)]
        left, right = (tuple(name for name in self.sides[side] if name in needed[side]) for side in (0, 1))
        return left, right


def join_schema(
    keys: tuple[Field, ...],
    left: tuple[Field, ...],
    right: tuple[Field, ...],
    options: Mapping[str, Any],
    delay_ms: int | None = None,
) -> StateSchema:
    """Return the schema of a join.

    Parameters
    ----------
    keys
        Leaves of the join key, without ``__row``.
    delay_ms
        Watermark delay; None without a watermark.
    """
    all_options = {**options, "sides": [[field.name for field in left], [field.name for field in right]]}
    named = {field.name: field for field in (*left, *right)}
    values = [Field(SIDE_COLUMN, "int8", False), Field(MATCHED_COLUMN, "bool")]
    values += [Field(name, named[name].type) for names in JoinOptions.of(all_options).stored() for name in names]
    return StateSchema(
        keys=(*keys, Field(ROW_COLUMN, "int64", False)),
        inputs=(*left, *right),
        accumulators=tuple(Accumulator(AccumulatorKind.VALUE, (), (field,)) for field in values),
        expiry_key=None,
        delay_ms=delay_ms,
        output_mode="append",
        operator=OperatorKind.JOIN,
        options=all_options,
    )

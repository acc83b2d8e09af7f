"""What follows from an operator's schema: when Spark has to run it again, its output modes and the lag of its output, as of Spark's own
operators; and whether its state grows for ever, of which users are warned before a store actor runs out of memory."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from pyspark.sql.streaming.state import GroupStateTimeout

from coordinator.model.names import PACKAGES
from coordinator.model.schema import OperatorKind, StateSchema

OUTPUT_MODES = ("update", "append", "complete")
#: Timeouts of a function, and time modes of a processor (``spark_jobs.transform.variables.TimeMode``).
_BY_CLOCK = (GroupStateTimeout.ProcessingTimeTimeout, "processingtime")
#: A processor without timers runs as one with timers of event time.
_BY_EVENT_TIME = (GroupStateTimeout.EventTimeTimeout, "eventtime", "none")
#: Folders of the project's packages, whose functions are between a user's call and this module.
_OWN_FOLDERS = tuple(f"{Path(__file__).parents[2] / package}{os.sep}" for package in PACKAGES)


def runs_again(schema: StateSchema) -> str:
    """Return when Spark runs a batch without data for an operator (``StateStoreWriter.shouldRunAnotherBatch``).

    ``watermark``: when the operator's watermark has moved. ``due``: when the earliest of its timeouts of processing time is over.
    ``never``.
    """
    if schema.operator in (OperatorKind.GROUP_STATE, OperatorKind.TRANSFORM):
        by = schema.options.get("timeout_conf", schema.options.get("time_mode"))
        if by in _BY_CLOCK:
            return "due"
        is_timed = by in _BY_EVENT_TIME
    elif schema.operator is OperatorKind.JOIN:
        is_timed = any(schema.options.get("expiry") or ())
    elif schema.operator is OperatorKind.TOP:
        is_timed = schema.expiry_key is not None
    elif schema.operator in (OperatorKind.AGGREGATE, OperatorKind.SESSION):
        # Spark does so even without an event time among the keys.
        is_timed = schema.output_mode != "complete"
    else:
        is_timed = schema.operator is OperatorKind.DEDUPLICATE
    return "watermark" if is_timed else "never"


def query_modes(schema: StateSchema) -> tuple[str, ...]:
    """Return the output modes of a query whose last operator this is: append and update are equal if emitted rows are final.

    Of a processor's rows only the processor knows whether they are: as in Spark, its own mode does not bind the query.
    """
    either = (
        OperatorKind.DEDUPLICATE,
        OperatorKind.JOIN,
        OperatorKind.LIMIT,
        OperatorKind.PARTITIONS,
        OperatorKind.TRANSFORM,
    )
    return ("append", "update") if schema.operator in either else (schema.output_mode,)


def output_lag_ms(schema: StateSchema) -> int:
    """Return how far emitted rows may be behind the operator's watermark, in milliseconds (``produceOutputWatermark``)."""
    lags = [lag for lag in schema.options.get("output_lag_us") or () if lag is not None]
    return max([0, *(-(-int(lag) // 1000) for lag in lags)])


class UnboundedStateWarning(UserWarning):
    """A query's state grows with every new key and never shrinks, because no watermark ends it."""


def unbounded_reason(schema: StateSchema) -> str | None:
    """Return why an operator's state grows for ever, and the remedy; None if the state is bounded.

    Not reported are complete mode, which asks for everything; a single group; state of the user's own functions, which end it by
    removing it or by timeouts; and ``limit``, whose state is a number.
    """
    if schema.output_mode == "complete" or not schema.input_keys:
        return None
    reason_of = _REASONS.get(schema.operator)
    return None if reason_of is None else reason_of(schema)


def warn_if_unbounded(schema: StateSchema, state: str) -> None:
    """Warn, at the line of the user's own code, if an operator's state grows for ever."""
    reason = unbounded_reason(schema)
    if reason is not None:
        remedy = f"Where it stays small all the same, ignore this category of warnings (UnboundedStateWarning) [state=`{state}`]"
        warnings.warn(f"{reason}. {remedy}", UnboundedStateWarning, stacklevel=_depth())


def _depth() -> int:
    """Return the ``stacklevel``, seen from the caller of this function, of the nearest caller outside these packages."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_FOLDERS):
        frame, depth = frame.f_back, depth + 1
    return depth


def _aggregation(schema: StateSchema) -> str | None:
    if schema.expiry_key is not None:
        return None
    growth = "this aggregation keeps every group for ever, and its state grows with each new one: "
    if schema.delay_ms is None:
        return (
            growth
            + "no watermark ends them; call withWatermark on the stream, and group by a window of that time as well"
        )
    return (
        growth
        + "the watermark ends none that is not of a time; add its column, or a window of it, to the grouping columns"
    )


def _deduplication(schema: StateSchema) -> str | None:
    if schema.expiry_key is not None:
        return None
    remedy = "call withWatermark, and" if schema.delay_ms is None else "as there is a watermark,"
    return (
        "dropDuplicates keeps every key for ever, and its state grows with each new one; "
        f"{remedy} use dropDuplicatesWithinWatermark, or have the event time among the columns"
    )


def _join(schema: StateSchema) -> str | None:
    as_of = schema.options.get("as_of")
    if as_of is not None:
        endless = "an as-of join without a tolerance keeps a row of its right side for each key for ever; give one, where keys end"
        return endless if as_of["within_us"] is None else None
    expiry = schema.options.get("expiry") or (None, None)
    sides = [side for side, name in zip(("left", "right"), expiry, strict=True) if name is None]
    if not sides:
        return None
    return (
        f"this join keeps every row of its {' and its '.join(sides)} side for ever, as a row that matches may always come; call "
        "withWatermark on both streams, and say in the condition how far apart their event times may be, in both directions (or "
        "have them among the equal columns)"
    )


def _top(schema: StateSchema) -> str | None:
    if schema.expiry_key is not None:
        return None
    name, keys = ("keepLast", "keys") if schema.options["ties"] == "last" else ("topN", "partitioning columns")
    return (
        f"{name} keeps rows of every key for ever, and its state grows with each new one; for keys that end, call withWatermark and "
        f"add the event time, or a window of it, to the {keys}"
    )


_REASONS = {
    OperatorKind.AGGREGATE: _aggregation,
    OperatorKind.DEDUPLICATE: _deduplication,
    OperatorKind.JOIN: _join,
    OperatorKind.TOP: _top,
}

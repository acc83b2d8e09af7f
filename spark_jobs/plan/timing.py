"""When Spark has to run an operator again, its output modes, and the lag of its output: the answers of Spark's own operators."""

from __future__ import annotations

from pyspark.sql.streaming.state import GroupStateTimeout

from coordinator.model.schema import OperatorKind, StateSchema

OUTPUT_MODES = ("update", "append", "complete")
#: Timeouts of a function, and time modes of a processor (``spark_jobs.transform.variables.TimeMode``).
_BY_CLOCK = (GroupStateTimeout.ProcessingTimeTimeout, "processingtime")
#: A processor without timers runs as one with timers of event time.
_BY_EVENT_TIME = (GroupStateTimeout.EventTimeTimeout, "eventtime", "none")


def runs_again(schema: StateSchema) -> str:
    """Return when Spark runs a batch without data for an operator (``StateStoreWriter.shouldRunAnotherBatch``).

    Returns
    -------
    str
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

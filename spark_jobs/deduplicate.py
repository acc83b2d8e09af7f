"""``dropDuplicates`` and ``dropDuplicatesWithinWatermark``, analysed by Spark, as the fleet runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from coordinator.errors import InvalidRequestError
from spark_jobs.catalyst import column_of, data_type, frame_of, scala_list
from spark_jobs.exchange import EVENT_TIME_COLUMN, HASH_COLUMN
from spark_jobs.keys import key_of, leaf_field, metadata_of
from spark_jobs.watermark import event_time
from store_actors.schema import Accumulator, AccumulatorKind, Field, OperatorKind, StateSchema, payload_type

__all__ = ["DeduplicatePlan", "build_deduplicate"]

_EXPIRES = "expires"


@dataclass(frozen=True)
class DeduplicatePlan:
    """What the fleet needs of one deduplication; see :class:`~spark_jobs.operator.OperatorPlan`."""

    prepared: DataFrame
    schema: StateSchema
    _emitted: T.StructType
    #: (column over the emitted rows, name, metadata)
    _columns: tuple[tuple[Column, str, dict[str, Any]], ...]
    appends: bool = True

    @property
    def inputs(self) -> tuple[DataFrame, ...]:
        return (self.prepared,)

    def row_type(self) -> T.StructType:
        return self._emitted

    def finish(self, emitted: DataFrame) -> DataFrame:
        return emitted.select(*(column.alias(name, metadata=metadata) for column, name, metadata in self._columns))


def build_deduplicate(df: DataFrame, subset: Sequence[str] | None, *, within_watermark: bool) -> DeduplicatePlan:
    """Plan of ``df.dropDuplicates(subset)``, or of ``df.dropDuplicatesWithinWatermark(subset)``.

    Raises
    ------
    InvalidRequestError
        There is no watermark to be within, or a key's type is not held by state.
    pyspark.errors.AnalysisException
        Spark itself refuses it: an unknown column.
    """
    spark = df.sparkSession
    names = None if subset is None else list(subset)
    marked = df.dropDuplicatesWithinWatermark(names) if within_watermark else df.dropDuplicates(names)
    node = marked._jdf.queryExecution().analyzed()
    attributes = scala_list(node.child().output())
    delay_ms, time = event_time(spark, attributes)
    if within_watermark and (delay_ms is None or time is None):
        raise InvalidRequestError(
            "dropDuplicatesWithinWatermark needs a watermark; call withWatermark on the event-time column first"
        )
    # Spark compares the bits of these keys: 0.0 and -0.0 are two.
    keys = [key_of(spark, expression, f"k{place}", normalised=False) for place, expression in enumerate(scala_list(node.keys()))]
    selected = [column.alias(leaf.name) for key in keys for leaf, column in zip(key.leaves, key.columns, strict=True)]
    columns: list[tuple[Column, str, dict[str, Any]]] = []
    payload: list[tuple[str, T.DataType, bool]] = []
    for place, attribute in enumerate(attributes):
        held = next((key for key in keys if key.expression.semanticEquals(attribute)), None)
        if held is None:
            payload.append((f"c{place}", data_type(attribute), attribute.nullable()))
            selected.append(column_of(spark, attribute).alias(f"c{place}"))
        result = F.col(f"c{place}") if held is None else held.tree.column()
        columns.append((result, attribute.name(), metadata_of(attribute)))
    expiry = next((key.expiry for key in keys if key.expiry is not None), None)
    accumulators: tuple[Accumulator, ...] = ()
    inputs = [Field(name, payload_type(to_arrow_type(kind)), nullable) for name, kind, nullable in payload]
    if within_watermark:
        assert time is not None
        assert delay_ms is not None
        expiry = _EXPIRES
        field = Field(_EXPIRES, "timestamp")
        accumulators = (Accumulator(AccumulatorKind.VALUE, (), (field,)),)
        inputs.append(field)
        event = next(one for one in attributes if metadata_of(one).get("spark.watermarkDelayMs") is not None)
        micros = F.unix_micros(column_of(spark, event).cast("timestamp")) + delay_ms * 1000
        selected.append(F.timestamp_micros(micros).alias(_EXPIRES))
    if time is not None:
        selected.append(time.alias(EVENT_TIME_COLUMN))
    hashed = [column for key in keys for column in key.columns]
    prepared = frame_of(spark, node.child()).select(
        *selected, (F.hash(*hashed) if hashed else F.lit(0)).alias(HASH_COLUMN)
    )
    types = {item.name: item for item in prepared.schema.fields}
    leaves = [leaf.name for key in keys for leaf in key.leaves]
    schema = StateSchema(
        keys=tuple(leaf_field(types[name]) for name in leaves),
        inputs=tuple(inputs),
        accumulators=accumulators,
        expiry_key=expiry,
        delay_ms=delay_ms,
        output_mode="append",
        operator=OperatorKind.DEDUPLICATE,
        options={"late_us": delay_ms * 1000} if within_watermark and delay_ms is not None else {},
    )
    emitted = T.StructType([types[name] for name in leaves] + [types[name] for name, _, _ in payload])
    return DeduplicatePlan(prepared, schema, emitted, tuple(columns))

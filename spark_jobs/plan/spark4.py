"""What is particular to Spark 4.2 of the internals that this package uses, by the names of ``SparkVersion``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.conversion import ArrowArrayToPandasConversion, PandasToArrowConversion
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema, to_arrow_type
from pyspark.sql.streaming import StatefulProcessor

_SQL = "org.apache.spark.sql"
_STREAMING = f"{_SQL}.execution.streaming"

WRONG_COLUMN_COUNT = "RESULT_COLUMN_SCHEMA_MISMATCH"
NORMALISES_DUPLICATES = True
PROCESSOR_CLASSES: tuple[type, ...] = (StatefulProcessor,)
READS_STATE = True
#: Kinds of expressions that have a mode of evaluation, and no context with one.
_WITH_EVAL_MODE = ("Average", "Cast")
MOVED_CLASSES: Mapping[str, str] = {
    f"{_SQL}.Dataset": f"{_SQL}.classic.Dataset",
    f"{_STREAMING}.OffsetSeqMetadata": f"{_STREAMING}.checkpointing.OffsetSeqMetadata",
    f"{_STREAMING}.StreamMetadata": f"{_STREAMING}.runtime.StreamMetadata",
    f"{_STREAMING}.StreamingSymmetricHashJoinHelper": f"{_STREAMING}.operators.stateful.join.StreamingSymmetricHashJoinHelper",
}


def expression_of(java_class: Callable[[str], Any], column: Any) -> Any:
    # ``ExpressionUtils.expression`` would wrap it in a node that only the analyser takes out.
    converter = java_class("org.apache.spark.sql.classic.ColumnNodeToExpressionConverter$")
    return getattr(converter, "MODULE$").apply(column.node())


def column_of(java_class: Callable[[str], Any], expression: Any) -> Any:
    return java_class("org.apache.spark.sql.classic.ExpressionUtils").column(expression)


def eval_mode(expression: Any, kind: str) -> Any:
    return (expression if kind in _WITH_EVAL_MODE else expression.evalContext()).evalMode()


def added_option(function: Any, kind: str) -> str:
    if kind == "Mode" and function.reverseOpt().isDefined():
        return "the choice among values that are equally frequent"
    if kind in ("CollectList", "CollectSet") and not function.ignoreNulls():
        return "RESPECT NULLS"
    return ""


def store_schemas(java_class: Callable[[str], Any], provider_id: Any, hadoop: Any) -> tuple[Any, Any]:
    checker = java_class("org.apache.spark.sql.execution.streaming.state.StateSchemaCompatibilityChecker")
    no_files = java_class("org.apache.spark.api.python.PythonUtils").toSeq([]).toList()
    families = checker(provider_id, hadoop, no_files, java_class("scala.Option").empty(), False).readSchemaFile()
    return families.head().keySchema(), families.head().valueSchema()


def current_batch(query: Any) -> tuple[int, int]:
    batch = query.getLatestExecutionContext()
    return int(batch.batchId()), int(batch.offsetSeqMetadata().batchTimestampMs())


def pretty_sql(java_class: Callable[[str], Any], expression: Any) -> str:
    return str(java_class("org.apache.spark.sql.catalyst.util.package").toPrettySQL(expression, True))


def aggregate_of_nothing(java_class: Callable[[str], Any], columns: Any, plan: Any) -> Any:
    aggregate = java_class("org.apache.spark.sql.catalyst.plans.logical.Aggregate")
    return aggregate(columns, columns, plan, java_class("scala.Option").empty())


def arrow_type(kind: T.DataType) -> pa.DataType:
    return to_arrow_type(kind, timezone="UTC")


def arrow_schema(kind: T.StructType) -> pa.Schema:
    return to_arrow_schema(kind, timezone="UTC")


def error_arguments(condition: str, parameters: Mapping[str, str]) -> dict[str, Any]:
    return {"errorClass": condition, "messageParameters": dict(parameters)}


class pandas_conversions:
    """PySpark's conversions between Arrow and pandas."""

    def __init__(self, timezone: str, *, safe: bool, by_name: bool) -> None:
        self._timezone, self._safe, self._by_name = timezone, safe, by_name

    def to_pandas(self, column: pa.Array) -> pd.Series:
        kind = from_arrow_type(column.type, prefer_timestamp_ntz=True)
        return ArrowArrayToPandasConversion.convert(column, kind, ser_name="", timezone=self._timezone)

    def to_arrow(self, frame: pd.DataFrame, kind: T.StructType) -> pa.Table:
        rows = PandasToArrowConversion.convert(
            frame,
            kind,
            timezone=self._timezone,
            safecheck=self._safe,
            arrow_cast=True,
            assign_cols_by_name=self._by_name,
        )
        # Its times have the session's time zone.
        return pa.Table.from_batches([rows]).cast(arrow_schema(kind))

"""What is particular to Spark 3.5 of the internals that this package uses, by the names of ``SparkVersion``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.serializers import ArrowStreamPandasUDFSerializer
from pyspark.sql.pandas.types import to_arrow_schema, to_arrow_type

WRONG_COLUMN_COUNT = "RESULT_LENGTH_MISMATCH_FOR_PANDAS_UDF"
NORMALISES_DUPLICATES = False
PROCESSOR_CLASSES: tuple[type, ...] = ()
READS_STATE = False
MOVED_CLASSES: Mapping[str, str] = {}


def expression_of(java_class: Callable[[str], Any], column: Any) -> Any:
    return column.expr()


def column_of(java_class: Callable[[str], Any], expression: Any) -> Any:
    return java_class("org.apache.spark.sql.Column")(expression)


def eval_mode(expression: Any, kind: str) -> Any:
    return expression.evalMode()


def added_option(function: Any, kind: str) -> str:
    return ""


def store_schemas(java_class: Callable[[str], Any], provider_id: Any, hadoop: Any) -> tuple[Any, Any]:
    checker = java_class("org.apache.spark.sql.execution.streaming.state.StateSchemaCompatibilityChecker")
    schemas = checker(provider_id, hadoop).readSchemaFile()
    return schemas._1(), schemas._2()


def current_batch(query: Any) -> tuple[int, int]:
    return int(query.currentBatchId()), int(query.offsetSeqMetadata().batchTimestampMs())


def pretty_sql(java_class: Callable[[str], Any], expression: Any) -> str:
    return str(java_class("org.apache.spark.sql.catalyst.util.package").toPrettySQL(expression))


def aggregate_of_nothing(java_class: Callable[[str], Any], columns: Any, plan: Any) -> Any:
    return java_class("org.apache.spark.sql.catalyst.plans.logical.Aggregate")(columns, columns, plan)


def arrow_type(kind: T.DataType) -> pa.DataType:
    return to_arrow_type(kind)


def arrow_schema(kind: T.StructType) -> pa.Schema:
    return to_arrow_schema(kind)


def error_arguments(condition: str, parameters: Mapping[str, str]) -> dict[str, Any]:
    return {"error_class": condition, "message_parameters": dict(parameters)}


class pandas_conversions:
    """PySpark's conversions between Arrow and pandas."""

    def __init__(self, timezone: str, *, safe: bool, by_name: bool) -> None:
        serializer: Any = ArrowStreamPandasUDFSerializer
        self._serializer = serializer(timezone, safe, by_name)

    def to_pandas(self, column: pa.Array) -> pd.Series:
        return self._serializer.arrow_to_pandas(column)

    def to_arrow(self, frame: pd.DataFrame, kind: T.StructType) -> pa.Table:
        arrow = arrow_type(kind)
        struct = self._serializer._create_struct_array(frame, arrow)
        return pa.Table.from_arrays(struct.flatten(), schema=pa.schema(list(arrow)))

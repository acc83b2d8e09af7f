"""What is particular to Spark 3.5 of the internals that this package uses; :mod:`spark_jobs.plan.spark4` has the same names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.serializers import ArrowStreamPandasUDFSerializer
from pyspark.sql.pandas.types import to_arrow_schema, to_arrow_type

#: PySpark's condition of an error about a DataFrame with too many or too few columns.
WRONG_COLUMN_COUNT = "RESULT_LENGTH_MISMATCH_FOR_PANDAS_UDF"
#: Whether ``dropDuplicates`` takes 0.0 and -0.0 for the same, and every NaN. Otherwise it compares bits.
NORMALISES_DUPLICATES = False
#: PySpark's own classes of processors of ``transformWithState``.
PROCESSOR_CLASSES: tuple[type, ...] = ()
#: Whether Spark has a reader of state (``statestore``), and reads checkpoints of format 2.
READS_STATE = False
#: Where classes are that Spark 3.5 has elsewhere: none, as the code has their names of 3.5.
MOVED_CLASSES: Mapping[str, str] = MappingProxyType({})


def expression_of(java_class: Callable[[str], Any], column: Any) -> Any:
    """Return the expression of a column of the JVM."""
    return column.expr()


def column_of(java_class: Callable[[str], Any], expression: Any) -> Any:
    """Return an expression as a column of the JVM."""
    return java_class("org.apache.spark.sql.Column")(expression)


def eval_mode(expression: Any, kind: str) -> Any:
    """Return how an expression of a kind handles values that cannot be computed."""
    return expression.evalMode()


def added_option(function: Any, kind: str) -> str:
    """Return the option of an aggregate function that Spark 3.5's function of the kind does not have; "" for none."""
    return ""


def store_schemas(java_class: Callable[[str], Any], provider_id: Any, hadoop: Any) -> tuple[Any, Any]:
    """Return the types of the keys and the values of a state store, as its checkpoint has them."""
    checker = java_class("org.apache.spark.sql.execution.streaming.state.StateSchemaCompatibilityChecker")
    schemas = checker(provider_id, hadoop).readSchemaFile()
    return schemas._1(), schemas._2()


def current_batch(query: Any) -> tuple[int, int]:
    """Return the number of the batch that a query is at, and when it was planned, in milliseconds since the epoch."""
    return int(query.currentBatchId()), int(query.offsetSeqMetadata().batchTimestampMs())


def pretty_sql(java_class: Callable[[str], Any], expression: Any) -> str:
    """Return the name that Spark gives a column of an expression."""
    return str(java_class("org.apache.spark.sql.catalyst.util.package").toPrettySQL(expression))


def aggregate_of_nothing(java_class: Callable[[str], Any], columns: Any, plan: Any) -> Any:
    """Return an aggregation of a plan that groups by columns and selects them."""
    return java_class("org.apache.spark.sql.catalyst.plans.logical.Aggregate")(columns, columns, plan)


def arrow_type(kind: T.DataType) -> pa.DataType:
    """Return the Arrow type of a type of Spark; times are in UTC."""
    return to_arrow_type(kind)


def arrow_schema(kind: T.StructType) -> pa.Schema:
    """Return the Arrow schema of rows of Spark; times are in UTC."""
    return to_arrow_schema(kind)


def error_arguments(condition: str, parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of an error of PySpark's with a condition of its list."""
    return {"error_class": condition, "message_parameters": dict(parameters)}


class pandas_conversions:
    """PySpark's conversions between Arrow and pandas."""

    def __init__(self, timezone: str, *, safe: bool, by_name: bool) -> None:
        serializer: Any = ArrowStreamPandasUDFSerializer
        self._serializer = serializer(timezone, safe, by_name)

    def to_pandas(self, column: pa.Array) -> pd.Series:
        """Return an Arrow column as the series that a function gets."""
        return self._serializer.arrow_to_pandas(column)

    def to_arrow(self, frame: pd.DataFrame, kind: T.StructType) -> pa.Table:
        """Return a DataFrame that a function emitted as Arrow columns of a type."""
        arrow = arrow_type(kind)
        struct = self._serializer._create_struct_array(frame, arrow)
        return pa.Table.from_arrays(struct.flatten(), schema=pa.schema(list(arrow)))

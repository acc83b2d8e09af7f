"""What differs between the versions of Spark, and the module that has it for the installed one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import pandas as pd
import pyarrow as pa
import pyspark
from pyspark.sql import types as T


class PandasConversions(Protocol):
    """PySpark's conversions between Arrow and pandas, as its functions with state use them."""

    def to_pandas(self, column: pa.Array) -> pd.Series:
        """Return an Arrow column as the series that a function gets."""

    def to_arrow(self, frame: pd.DataFrame, kind: T.StructType) -> pa.Table:
        """Return a DataFrame that a function emitted as Arrow columns of a type."""


class SparkVersion(Protocol):
    """The names of :mod:`spark_jobs.plan.spark35` and :mod:`spark_jobs.plan.spark4`; `java_class` is that of ``catalyst``."""

    #: Full names of classes, by their names in Spark 3.5.
    MOVED_CLASSES: Mapping[str, str]
    #: PySpark's condition of an error about a DataFrame with too many or too few columns.
    WRONG_COLUMN_COUNT: str
    #: Whether ``dropDuplicates`` takes 0.0 and -0.0 for the same, and every NaN. Otherwise it compares bits.
    NORMALISES_DUPLICATES: bool
    #: PySpark's own classes of processors of ``transformWithState``.
    PROCESSOR_CLASSES: tuple[type, ...]
    #: Whether Spark has a reader of state (``statestore``), and reads checkpoints of format 2.
    READS_STATE: bool

    def expression_of(self, java_class: Callable[[str], Any], column: Any) -> Any:
        """Return the expression of a column of the JVM."""

    def column_of(self, java_class: Callable[[str], Any], expression: Any) -> Any:
        """Return an expression as a column of the JVM."""

    def eval_mode(self, expression: Any, kind: str) -> Any:
        """Return how an expression of a kind handles values that cannot be computed."""

    def added_option(self, function: Any, kind: str) -> str:
        """Return the option of an aggregate function that Spark 3.5's function of the kind does not have; "" for none."""

    def store_schemas(self, java_class: Callable[[str], Any], provider_id: Any, hadoop: Any) -> tuple[Any, Any]:
        """Return the types of the keys and the values of a state store, as its checkpoint has them."""

    def current_batch(self, query: Any) -> tuple[int, int]:
        """Return the number of the batch that a query is at, and when it was planned, in milliseconds since the epoch."""

    def pretty_sql(self, java_class: Callable[[str], Any], expression: Any) -> str:
        """Return the name that Spark gives a column of an expression."""

    def aggregate_of_nothing(self, java_class: Callable[[str], Any], columns: Any, plan: Any) -> Any:
        """Return an aggregation of a plan that groups by columns and selects them."""

    def arrow_type(self, kind: T.DataType) -> pa.DataType:
        """Return the Arrow type of a type of Spark; times are in UTC."""

    def arrow_schema(self, kind: T.StructType) -> pa.Schema:
        """Return the Arrow schema of rows of Spark; times are in UTC."""

    def error_arguments(self, condition: str, parameters: Mapping[str, str]) -> dict[str, Any]:
        """Return the arguments of an error of PySpark's with a condition of its list."""

    def pandas_conversions(self, timezone: str, *, safe: bool, by_name: bool) -> PandasConversions:
        """Return the conversions between Arrow and pandas under settings of a session."""


#: For the installed version.
SPARK: SparkVersion
if pyspark.__version__.startswith("3."):
    from spark_jobs.plan import spark35

    SPARK = spark35
else:
    from spark_jobs.plan import spark4

    SPARK = spark4

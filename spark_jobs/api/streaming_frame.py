"""The methods that a stateful frame passes through to its DataFrame: columns, and operations on each row by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import wraps
from typing import Any, Self

from pyspark.sql import DataFrame

from spark_jobs.plan.spark_errors import MissingAttributeError
from spark_jobs.session.spark_connect import check_classic

#: Methods of DataFrames that keep nothing from row to row: the result is stateful again.
_ROW_BY_ROW = frozenset({
    "alias", "coalesce", "drop", "dropna", "fillna", "filter", "hint", "mapInArrow", "mapInPandas", "melt", "observe",
    "repartition", "repartitionById", "repartitionByRange", "replace", "sample", "sampleBy", "select", "selectExpr", "to", "toDF",
    "union", "unionAll", "unionByName", "unpivot", "where", "withColumn", "withColumnRenamed", "withColumns", "withColumnsRenamed",
    "withMetadata", "withWatermark",
})  # fmt: skip
#: Properties of a DataFrame, and its writer.
_PASSED_THROUGH = frozenset({
    "colRegex", "columns", "dtypes", "explain", "isLocal", "isStreaming", "metadataColumn", "printSchema", "schema", "sparkSession",
    "writeStream",
})  # fmt: skip
#: Methods that Spark itself refuses for a stream, with its own errors.
_REFUSED_BY_SPARK = frozenset({
    "approxQuantile", "cache", "checkpoint", "collect", "corr", "count", "cov", "first", "foreach", "foreachPartition", "head",
    "inputFiles", "isEmpty", "localCheckpoint", "mergeInto", "persist", "rdd", "show", "tail", "take", "toArrow", "toJSON",
    "toLocalIterator", "toPandas", "transpose", "write", "writeTo",
})  # fmt: skip

_NO_SORTING = (
    "sorting is not supported on streaming DataFrames, unless it is on an aggregated one in complete output mode, as in Spark; sort "
    "the result of an aggregation in complete mode, or use topN, which keeps the first rows of each key up to date"
)
_NO_STATISTICS = "the fleet does not keep these statistics of a stream; name those that you need in agg"
_NO_VIEWS = (
    "SQL over a view of this frame would keep its state in Spark, not in the fleet; make the view of the DataFrame that fleet.stateful "
    "was given, or of the result of an operator"
)
_NO_STATE_IN_SPARK = (
    "Spark may run it as an aggregation, whose state would be in Spark, not in the fleet; use join, or call it on the DataFrame that "
    "fleet.stateful was given"
)
_NO_SETS = "the fleet has no set operations (Spark has none of two streams); join with a DataFrame by how='{how}', then use distinct"
#: Methods that the fleet does not have: why not, and what to use instead.
_UNSUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(("orderBy", "sort", "sortWithinPartitions"), _NO_SORTING),
    **dict.fromkeys(("crosstab", "describe", "freqItems", "stat", "summary"), _NO_STATISTICS),
    **dict.fromkeys(
        (
            "createGlobalTempView",
            "createOrReplaceGlobalTempView",
            "createOrReplaceTempView",
            "createTempView",
            "registerTempTable",
        ),
        _NO_VIEWS,
    ),
    **dict.fromkeys(("intersect", "intersectAll"), _NO_SETS.format(how="left_semi")),
    **dict.fromkeys(("exceptAll", "subtract"), _NO_SETS.format(how="left_anti")),
    **dict.fromkeys(("lateralJoin", "nearestByJoin"), _NO_STATE_IN_SPARK),
    "_jdf": "where Spark takes a DataFrame, give it the one that fleet.stateful was given",
    "executionInfo": "Spark has it with Spark Connect only",
    "offset": "offset is not supported on streaming DataFrames, as in Spark",
    "plot": "it draws the rows of a batch query; draw what the result wrote",
    "randomSplit": "it sorts the rows, which Spark does not do on streaming DataFrames; use where with a hash of the row's key",
    "zipWithIndex": "it numbers the rows of each batch from 0 again; call it on the DataFrame that fleet.stateful is given",
}
_OTHERWISE = "a stateful frame does not pass it through; call it on the DataFrame that fleet.stateful was given, or on the result"


class StreamingFrame:
    """A streaming DataFrame before its stateful operator.

    Operations on each row by itself return such a frame again. Its properties (columns, schema) are those of the DataFrame. Written
    without an operator, by ``writeStream``, it is a query without state, and uses no fleet.
    """

    _df: DataFrame

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # isinstance() takes a frame for a DataFrame, as typed helpers need it; type() still returns the frame's own class.
        return DataFrame

    def __getattr__(self, name: str) -> Any:
        # Python looks up such names on any object, also before _df is set.
        if name.startswith("__") or name == "_df":
            raise AttributeError(name)
        if name in _ROW_BY_ROW:
            return self._passing(getattr(self._df, name))
        if name in _PASSED_THROUGH or name in _REFUSED_BY_SPARK or name in self._df.columns:
            return getattr(self._df, name)
        raise missing_attribute(self, name, DataFrame, _UNSUPPORTED, _OTHERWISE)

    def __getitem__(self, item: Any) -> Any:
        selected = self._df[item]
        return self._over(selected) if isinstance(selected, DataFrame) else selected

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *self.__dict__, *_ROW_BY_ROW, *_PASSED_THROUGH, *self._df.columns})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._df!r})"

    @property
    def na(self) -> NaFunctions:
        """Functions for missing data, as ``DataFrame.na``."""
        return NaFunctions(self)

    def transform(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of a function for this frame, as ``DataFrame.transform``: a frame, or the DataFrame of an operator.

        Raises
        ------
        TypeError
            The function returns something else.
        """
        result = func(self, *args, **kwargs)
        if not isinstance(result, StreamingFrame | DataFrame):
            raise TypeError(
                f"the function of transform returns a frame or a DataFrame, not {type(result).__name__}; return what it made"
            )
        return result

    def _passing(self, method: Callable[..., DataFrame]) -> Callable[..., StreamingFrame]:
        @wraps(method)
        def passing(*args: Any, **kwargs: Any) -> StreamingFrame:
            frames = [self._frame_of(argument) for argument in args]
            named = {name: self._frame_of(argument) for name, argument in kwargs.items()}
            return self._over(method(*frames, **named))

        return passing

    def _over(self, df: DataFrame) -> Self:
        frame = copy(self)
        frame._df = df
        return frame

    def _frame_of(self, argument: Any) -> Any:
        """Return the DataFrame of an argument that is a frame; any other argument unchanged."""
        check_classic(argument)
        return argument._df if isinstance(argument, StreamingFrame) else argument


class NaFunctions:
    """``DataFrame.na`` of a frame."""

    def __init__(self, frame: StreamingFrame) -> None:
        self.drop, self.fill, self.replace = frame.dropna, frame.fillna, frame.replace


def missing_attribute(
    owner: object, name: str, spark_class: type, reasons: Mapping[str, str], otherwise: str
) -> MissingAttributeError:
    """Return the error for a missing attribute; with the reason, if Spark's own class has it."""
    text = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if name in reasons or hasattr(spark_class, name):
        text += f": {reasons.get(name, otherwise)}"
    error = MissingAttributeError(text)
    error.name, error.obj = name, owner
    return error

"""What a stateful frame passes through to its DataFrame: columns, and whatever looks at each row by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import wraps
from typing import Any, Self

from pyspark.sql import DataFrame

__all__ = ["StreamingFrame", "missing_attribute"]

#: Methods of DataFrames that keep nothing from row to row: the result is stateful again.
_ROW_BY_ROW = frozenset({
    "alias", "coalesce", "drop", "dropna", "fillna", "filter", "hint", "mapInArrow", "mapInPandas", "melt", "observe", "repartition",
    "repartitionByRange", "replace", "sample", "sampleBy", "select", "selectExpr", "to", "toDF", "union", "unionAll", "unionByName",
    "unpivot", "where", "withColumn", "withColumnRenamed", "withColumns", "withColumnsRenamed", "withMetadata", "withWatermark",
})  # fmt: skip
#: What is asked of a DataFrame, and how it is written as it is.
_ASKED = frozenset({
    "colRegex", "columns", "dtypes", "explain", "isLocal", "isStreaming", "printSchema", "schema", "sparkSession", "writeStream",
})  # fmt: skip
#: What Spark itself refuses of a stream, with its own words.
_REFUSED_BY_SPARK = frozenset({
    "approxQuantile", "cache", "checkpoint", "collect", "corr", "count", "cov", "first", "foreach", "foreachPartition", "head",
    "inputFiles", "isEmpty", "localCheckpoint", "persist", "rdd", "show", "tail", "take", "toJSON", "toLocalIterator", "toPandas",
    "write", "writeTo",
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
_NO_SETS = "the fleet has no set operations (Spark has none of two streams); join with a DataFrame by how='{how}', then use distinct"
#: Why the fleet has them not, and what to do instead.
_NOT_HELD: Mapping[str, str] = {
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
    "_jdf": "where Spark takes a DataFrame, give it the one that fleet.stateful was given",
    "offset": "offset is not supported on streaming DataFrames, as in Spark",
    "randomSplit": "it sorts the rows, which Spark does not do on streaming DataFrames; use where with a hash of the row's key",
}
_ELSE = "a stateful frame does not pass it through; call it on the DataFrame that fleet.stateful was given, or on the result"


class StreamingFrame:
    """A streaming DataFrame that is still to get its stateful operator.

    What Spark's DataFrame does row by row gives such a frame again; what is asked of it (columns, schema) is the DataFrame's answer.
    Written as it is, with ``writeStream``, it is the query without state that it says, and nothing of it is in the fleet.
    """

    _df: DataFrame

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # What asks whether it is given a DataFrame, as typed helpers do, is told that it is one. What type() says stays.
        return DataFrame

    def __getattr__(self, name: str) -> Any:
        # Python asks objects of any kind for such names, also before there is a DataFrame.
        if name.startswith("__") or name == "_df":
            raise AttributeError(name)
        if name in _ROW_BY_ROW:
            return self._passing(getattr(self._df, name))
        if name in _ASKED or name in _REFUSED_BY_SPARK or name in self._df.columns:
            return getattr(self._df, name)
        raise missing_attribute(self, name, DataFrame, _NOT_HELD, _ELSE)

    def __getitem__(self, item: Any) -> Any:
        found = self._df[item]
        return self._over(found) if isinstance(found, DataFrame) else found

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *self.__dict__, *_ROW_BY_ROW, *_ASKED, *self._df.columns})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._df!r})"

    @property
    def na(self) -> NaFunctions:
        """Functions for missing data, as ``DataFrame.na``."""
        return NaFunctions(self)

    def transform(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function makes of this frame, as ``DataFrame.transform``: a frame again, or the DataFrame of an operator.

        Raises
        ------
        TypeError
            It makes something else.
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
            given = [self._frame_of(one) for one in args]
            named = {name: self._frame_of(one) for name, one in kwargs.items()}
            return self._over(method(*given, **named))

        return passing

    def _over(self, df: DataFrame) -> Self:
        """This frame over other rows."""
        made = copy(self)
        made._df = df
        return made

    def _frame_of(self, given: Any) -> Any:
        """The DataFrame of a frame that an argument is; any other argument as it is."""
        return given._df if isinstance(given, StreamingFrame) else given


class NaFunctions:
    """``DataFrame.na`` of a frame."""

    def __init__(self, frame: StreamingFrame) -> None:
        self.drop, self.fill, self.replace = frame.dropna, frame.fillna, frame.replace


def missing_attribute(
    owner: object, name: str, own: type, reasons: Mapping[str, str], otherwise: str
) -> AttributeError:
    """The error of an attribute that is not there; with the reason, if Spark's own class has it."""
    said = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if name in reasons or hasattr(own, name):
        said += f": {reasons.get(name, otherwise)}"
    return AttributeError(said, name=name, obj=owner)

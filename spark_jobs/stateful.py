"""``fleet.stateful(df)``: PySpark's grouping API over state that the fleet holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.errors import InvalidRequestError
from coordinator.names import check_state_name
from spark_jobs.deduplicate import build_deduplicate, build_limit
from spark_jobs.operator import OperatorPlan
from spark_jobs.plan import build_plan
from spark_jobs.top import ColumnLike, build_top

__all__ = ["StatefulDataFrame", "StatefulGroupedData"]

_OUTPUT_MODES = ("update", "append", "complete")
_UNCHECKED = "spark.sql.streaming.unsupportedOperationCheck"


class StatefulDataFrame:
    """A streaming DataFrame whose next stateful operator lives in the fleet. Made by ``Fleet.stateful``.

    Raises
    ------
    InvalidRequestError
        The DataFrame is not streaming; the name, the output mode or the number of shards is not valid.
    """

    def __init__(
        self,
        df: DataFrame,
        *,
        name: str,
        output_mode: str,
        shards: int | None,
        run_plan: Callable[[OperatorPlan], DataFrame],
    ) -> None:
        if not df.isStreaming:
            raise InvalidRequestError(
                "the fleet holds the state of streaming queries; read with spark.readStream, or use df.groupBy for a batch",
                state=name,
            )
        check_state_name(name)
        if output_mode not in _OUTPUT_MODES:
            raise InvalidRequestError(
                f"the output mode is one of {', '.join(_OUTPUT_MODES)}", state=name, outputMode=output_mode
            )
        if shards is not None and shards < 1:
            raise InvalidRequestError("a state has at least one shard", state=name, shards=shards)
        self._df = df
        self._output_mode = output_mode
        self._run_plan = run_plan

    def groupBy(self, *cols: Any) -> StatefulGroupedData:
        """Group by columns, as ``DataFrame.groupBy``."""
        columns = list(cols[0]) if len(cols) == 1 and isinstance(cols[0], list | tuple) else list(cols)
        return StatefulGroupedData(self, columns)

    groupby = groupBy

    def agg(self, *exprs: Any) -> DataFrame:
        """Aggregate everything as one group, as ``DataFrame.agg``."""
        return self.groupBy().agg(*exprs)

    def dropDuplicates(self, subset: Sequence[str] | None = None) -> DataFrame:
        """First row of each combination of the columns (all, by default), as ``DataFrame.dropDuplicates``.

        With a watermark, keys are forgotten once it passes their event time, if that is among the columns; otherwise state grows
        for ever, as in Spark.
        """
        return self._run_plan(build_deduplicate(self._df, subset, within_watermark=False))

    drop_duplicates = dropDuplicates

    def dropDuplicatesWithinWatermark(self, subset: Sequence[str] | None = None) -> DataFrame:
        """First row of each combination of the columns, as long as the watermark has not passed the row by its delay; as
        ``DataFrame.dropDuplicatesWithinWatermark``.
        """
        return self._run_plan(build_deduplicate(self._df, subset, within_watermark=True))

    def limit(self, num: int) -> DataFrame:
        """The first `num` rows of the stream, as ``DataFrame.limit``."""
        return self._run_plan(build_limit(self._df, num))

    def topN(
        self,
        n: int,
        partition_by: ColumnLike | Sequence[ColumnLike],
        order_by: ColumnLike | Sequence[ColumnLike],
    ) -> DataFrame:
        """The first `n` rows of each partition by an order, with their ``rank`` from 1: a table that the stream keeps up to date.

        Each batch emits the rows that are new in the table or whose rank changed; rows that left it are not told of: a row's place
        (partition, rank) is taken by the newest row emitted for it.

        Parameters
        ----------
        n
            Rows that are kept of each partition.
        partition_by
            Columns; an empty list is one partition of everything.
        order_by
            Columns, such as ``F.desc("price")``. Of rows that are equal in them the one that came first is first.
        """
        return self._run_plan(build_top(self._df, n, _listed(partition_by), _listed(order_by)))

    def keepLast(
        self, keys: ColumnLike | Sequence[ColumnLike], order_by: ColumnLike | Sequence[ColumnLike]
    ) -> DataFrame:
        """The last row of each key by an order, such as the newest by event time; of equal rows the one that came last.

        Each batch emits the new last row of each key that has one.
        """
        last = [F.col(column) if isinstance(column, str) else column for column in _listed(order_by)]
        descending = [column.desc() for column in last]
        return self._run_plan(build_top(self._df, 1, _listed(keys), descending, ties="last", rank=False))

    def _aggregate(self, keys: list[Any], aggregates: list[Any]) -> DataFrame:
        plan = build_plan(self._df, keys, aggregates, self._output_mode)
        if self._output_mode == "complete":
            # Spark accepts writeStream.outputMode("complete") only on a plan with an aggregation of its own, and here the
            # aggregation is the fleet's. There is no way to tell Spark so for one query only.
            self._df.sparkSession.conf.set(_UNCHECKED, "false")
        return self._run_plan(plan)

    def _numeric_columns(self, cols: tuple[str, ...]) -> list[str]:
        """The columns asked for, or all numeric ones, keys too (Spark's rule for ``sum()`` and its like)."""
        return list(cols) or [item.name for item in self._df.schema.fields if isinstance(item.dataType, T.NumericType)]


def _listed(columns: ColumnLike | Sequence[ColumnLike]) -> list[ColumnLike]:
    return [columns] if isinstance(columns, str | Column) else list(columns)


class StatefulGroupedData:
    """Groups whose aggregates live in the fleet; methods as PySpark's ``GroupedData``.

    Each returns an ordinary streaming DataFrame, with the column names, types and nullability of Spark's own aggregation.

    Raises
    ------
    InvalidRequestError
        An aggregate or a type is not held by the fleet; the message names it and says what to use.
    StateMismatchError
        The query does not fit the existing state of this name.
    pyspark.errors.AnalysisException
        Spark refuses the query: an unknown column, a type that does not fit.
    """

    def __init__(self, stateful: StatefulDataFrame, keys: list[Any]) -> None:
        self._stateful = stateful
        self._keys = keys

    def agg(self, *exprs: Any) -> DataFrame:
        """Aggregate by Columns, or by one dict of column name to function name."""
        if not exprs:
            raise InvalidRequestError("agg needs at least one aggregate")
        by_name = len(exprs) == 1 and isinstance(exprs[0], dict)
        if not by_name and not all(isinstance(expression, Column) for expression in exprs):
            raise InvalidRequestError("agg takes Columns, such as F.sum('amount'), or one dict of names to functions")
        return self._stateful._aggregate(self._keys, list(exprs))

    def count(self) -> DataFrame:
        """Rows of each group, in column ``count``."""
        return self.agg(F.count(F.lit(1)).alias("count"))

    def sum(self, *cols: str) -> DataFrame:
        """Sum of each numeric column."""
        return self._each(F.sum, cols)

    def min(self, *cols: str) -> DataFrame:
        """Smallest value of each numeric column."""
        return self._each(F.min, cols)

    def max(self, *cols: str) -> DataFrame:
        """Largest value of each numeric column."""
        return self._each(F.max, cols)

    def avg(self, *cols: str) -> DataFrame:
        """Average of each numeric column."""
        return self._each(F.avg, cols)

    mean = avg

    def _each(self, function: Callable[[str], Column], cols: tuple[str, ...]) -> DataFrame:
        names = self._stateful._numeric_columns(cols)
        return self.agg(*(function(name) for name in names))

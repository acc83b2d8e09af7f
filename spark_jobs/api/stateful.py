"""``fleet.stateful(df)``: PySpark's stateful operators with their state in the fleet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from spark_jobs.api.grouped import StatefulGroupedData
from spark_jobs.api.streaming_frame import StreamingFrame
from spark_jobs.api.target import Target
from spark_jobs.operators.join import build_join
from spark_jobs.operators.kept_rows import ColumnLike, build_deduplicate, build_limit, build_top
from spark_jobs.plan.spark_errors import RefusedQueryError


class StatefulDataFrame(StreamingFrame):
    """A streaming DataFrame whose next stateful operator has its state in the fleet. Created by ``Fleet.stateful``.

    It has PySpark's stateful operators, each of which returns an ordinary streaming DataFrame, and two more (``topN``,
    ``keepLast``). It also has PySpark's operations on each row by itself (``select``, ``where``, ``withColumn``, ``withWatermark``,
    ``union``, ..), which return a stateful frame again, and the properties of a DataFrame (``schema``, ``columns``, ``df["c"]``,
    ``df.c``, ..). ``writeStream`` writes the rows unchanged: without an operator there is no state, and nothing in the fleet.

    Raises
    ------
    InvalidRequestError
        The DataFrame is not streaming; the name or an option of the state is not valid.
    AttributeError
        There is no such attribute; if PySpark's DataFrame has it, the error says why and what to use instead.
    """

    def __init__(self, df: DataFrame, target: Target) -> None:
        if not df.isStreaming:
            raise RefusedQueryError(
                "the fleet holds the state of streaming queries; read with spark.readStream, or use df.groupBy for a batch",
                state=target.name,
            )
        self._df = df
        self._target = target.checked()

    def groupBy(self, *cols: Any) -> StatefulGroupedData:
        """Group by columns, as ``DataFrame.groupBy``."""
        return StatefulGroupedData(self._df.groupBy(*cols), self._target)

    groupby = groupBy

    def rollup(self, *cols: Any) -> StatefulGroupedData:
        """Group by columns, by all but the last, and so on up to everything, as ``DataFrame.rollup``."""
        return StatefulGroupedData(self._df.rollup(*cols), self._target)

    def cube(self, *cols: Any) -> StatefulGroupedData:
        """Group by every choice of the columns, as ``DataFrame.cube``."""
        return StatefulGroupedData(self._df.cube(*cols), self._target)

    def groupingSets(self, groupingSets: Sequence[Sequence[ColumnLike]], *cols: Any) -> StatefulGroupedData:
        """Group by each of several sets of the columns, as ``DataFrame.groupingSets``, which Spark 3.5 does not have."""
        df: Any = self._df
        return StatefulGroupedData(df.groupingSets(groupingSets, *cols), self._target)

    def agg(self, *exprs: Any) -> DataFrame:
        """Aggregate everything as one group, as ``DataFrame.agg``."""
        return self.groupBy().agg(*exprs)

    def distinct(self) -> DataFrame:
        """Keep the first of equal rows, as ``DataFrame.distinct``: :meth:`dropDuplicates` of all columns."""
        return self.dropDuplicates()

    def dropDuplicates(self, subset: Sequence[str] | None = None) -> DataFrame:
        """Keep the first row of each combination of the columns (all by default), as ``DataFrame.dropDuplicates``.

        If event time with a watermark is among the columns, keys are removed once the watermark passes it; otherwise state grows
        for ever, as in Spark.
        """
        return self._deduplicated(subset, within_watermark=False)

    drop_duplicates = dropDuplicates

    def dropDuplicatesWithinWatermark(self, subset: Sequence[str] | None = None) -> DataFrame:
        """Keep the first row of each combination of the columns, until the watermark has passed the row by its delay; as
        ``DataFrame.dropDuplicatesWithinWatermark``.
        """
        return self._deduplicated(subset, within_watermark=True)

    def join(
        self,
        other: DataFrame | StatefulDataFrame,
        on: str | list[str] | Column | list[Column] | None = None,
        how: str | None = None,
    ) -> Any:
        """Join with another stream, as ``DataFrame.join``: inner, outer or left semi, by at least one equality.

        Rows of both sides are kept while they may match by the watermark; without one for ever, as in Spark. Results are appended:
        an emitted row is final.

        Returns
        -------
        DataFrame or StatefulDataFrame
            A StatefulDataFrame for a join with a static DataFrame, which keeps no state.
        """
        right = self._frame_of(other)
        joined = self._df.join(right, on, how)
        if not right.isStreaming:
            return self._over(joined)
        mode = self._target.mode("append")
        return self._target.run(build_join(self._df, right, on, how, mode), joined)

    def crossJoin(self, other: DataFrame | StatefulDataFrame) -> Any:
        """Join with a static DataFrame without a condition, as ``DataFrame.crossJoin``; two streams have no cross join, as in Spark."""
        return self.join(other)

    def limit(self, num: int) -> DataFrame:
        """Keep the first `num` rows of the stream, as ``DataFrame.limit``."""
        mode = self._target.mode("append")
        return self._target.run(build_limit(self._df, num, mode), self._df.limit(num))

    def topN(
        self,
        n: int,
        partition_by: ColumnLike | Sequence[ColumnLike],
        order_by: ColumnLike | Sequence[ColumnLike],
    ) -> DataFrame:
        """Keep the first `n` rows of each partition by an order, with their ``rank`` from 1: a table that the stream keeps up to date.

        Each batch emits the rows that are new in the table or whose rank changed. Rows that left it are not reported: a position
        (partition, rank) belongs to the newest row emitted for it.

        Parameters
        ----------
        n
            Number of rows to keep for each partition.
        partition_by
            Columns; an empty list means a single partition.
        order_by
            Columns, such as ``F.desc("price")``. Rows that are equal in them are ordered by their arrival.
        """
        mode = self._target.mode("update")
        return self._target.run(build_top(self._df, n, _listed(partition_by), _listed(order_by), mode), self._df)

    def keepLast(
        self, keys: ColumnLike | Sequence[ColumnLike], order_by: ColumnLike | Sequence[ColumnLike]
    ) -> DataFrame:
        """Keep the last row of each key by an order, such as the newest by event time; among equal rows, the last to arrive.

        Each batch emits the last row of each key for which it changed.
        """
        last = [F.col(column) if isinstance(column, str) else column for column in _listed(order_by)]
        descending = [column.desc() for column in last]
        mode = self._target.mode("update")
        plan = build_top(self._df, 1, _listed(keys), descending, mode, ties="last", rank=False)
        return self._target.run(plan, self._df)

    def _deduplicated(self, subset: Sequence[str] | None, *, within_watermark: bool) -> DataFrame:
        # A string is passed on to Spark, which refuses it; list() would split it into letters.
        names: Any = list(subset) if isinstance(subset, Iterable) and not isinstance(subset, str) else subset
        drop = self._df.dropDuplicatesWithinWatermark if within_watermark else self._df.dropDuplicates
        marked, mode = drop(names), self._target.mode("append")
        return self._target.run(build_deduplicate(marked, mode, within_watermark=within_watermark), marked)

    def _frame_of(self, argument: Any) -> Any:
        if isinstance(argument, StatefulDataFrame) and argument._target != self._target:
            raise RefusedQueryError(
                "an operator has one state, and these two frames name two; give this one the DataFrame that the other one was made "
                "of, or give both the same name and options",
                state=self._target.name,
                other_state=argument._target.name,
            )
        return super()._frame_of(argument)


def _listed(columns: ColumnLike | Sequence[ColumnLike]) -> list[ColumnLike]:
    return [columns] if isinstance(columns, str | Column) else list(columns)

"""``fleet.stateful(df)``: PySpark's stateful operators over state that the fleet holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from coordinator.model.errors import InvalidRequestError
from spark_jobs.grouped import StatefulGroupedData
from spark_jobs.operators.deduplicate import build_deduplicate, build_limit
from spark_jobs.operators.join import build_join
from spark_jobs.operators.top import ColumnLike, build_top
from spark_jobs.streaming_frame import StreamingFrame
from spark_jobs.target import Target

__all__ = ["StatefulDataFrame"]


class StatefulDataFrame(StreamingFrame):
    """A streaming DataFrame whose next stateful operator lives in the fleet. Made by ``Fleet.stateful``.

    Has PySpark's stateful operators, each of which gives an ordinary streaming DataFrame, and two more (``topN``, ``keepLast``). Of the
    rest of PySpark's DataFrame it has what looks at each row by itself (``select``, ``where``, ``withColumn``, ``withWatermark``,
    ``union``, ..), which gives a stateful frame again, and what is asked of a DataFrame (``schema``, ``columns``, ``df["c"]``,
    ``df.c``, ..). ``writeStream`` writes the rows as they are: without an operator there is no state, and nothing in the fleet.

    Raises
    ------
    InvalidRequestError
        The DataFrame is not streaming; the name or an option of the state is not valid.
    AttributeError
        It has not got what is asked for; says why and what to do, if PySpark's DataFrame has it.
    """

    def __init__(self, df: DataFrame, target: Target) -> None:
        if not df.isStreaming:
            raise InvalidRequestError(
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

    def agg(self, *exprs: Any) -> DataFrame:
        """Aggregate everything as one group, as ``DataFrame.agg``."""
        return self.groupBy().agg(*exprs)

    def distinct(self) -> DataFrame:
        """First row of those that are equal, as ``DataFrame.distinct``: :meth:`dropDuplicates` of all columns."""
        return self.dropDuplicates()

    def dropDuplicates(self, subset: Sequence[str] | None = None) -> DataFrame:
        """First row of each combination of the columns (all, by default), as ``DataFrame.dropDuplicates``.

        With a watermark, keys are forgotten once it passes their event time, if that is among the columns; otherwise state grows
        for ever, as in Spark.
        """
        return self._deduplicated(subset, within_watermark=False)

    drop_duplicates = dropDuplicates

    def dropDuplicatesWithinWatermark(self, subset: Sequence[str] | None = None) -> DataFrame:
        """First row of each combination of the columns, as long as the watermark has not passed the row by its delay; as
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

        Rows of both sides are kept as long as the watermark lets them match; without one for ever, as in Spark. Results are
        appended: a row stands once it is emitted.

        Returns
        -------
        DataFrame or StatefulDataFrame
            The latter of a join with a static DataFrame, which keeps no state.
        """
        right = self._frame_of(other)
        joined = self._df.join(right, on, how)
        if not right.isStreaming:
            return self._over(joined)
        mode = self._target.mode("append")
        return self._target.run(build_join(self._df, right, on, how, mode), joined)

    def crossJoin(self, other: DataFrame | StatefulDataFrame) -> Any:
        """Join with a static DataFrame without a condition, as ``DataFrame.crossJoin``; of two streams there is none, as in Spark."""
        return self.join(other)

    def limit(self, num: int) -> DataFrame:
        """The first `num` rows of the stream, as ``DataFrame.limit``."""
        mode = self._target.mode("append")
        return self._target.run(build_limit(self._df, num, mode), self._df.limit(num))

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
        mode = self._target.mode("update")
        return self._target.run(build_top(self._df, n, _listed(partition_by), _listed(order_by), mode), self._df)

    def keepLast(
        self, keys: ColumnLike | Sequence[ColumnLike], order_by: ColumnLike | Sequence[ColumnLike]
    ) -> DataFrame:
        """The last row of each key by an order, such as the newest by event time; of equal rows the one that came last.

        Each batch emits the new last row of each key that has one.
        """
        last = [F.col(column) if isinstance(column, str) else column for column in _listed(order_by)]
        descending = [column.desc() for column in last]
        mode = self._target.mode("update")
        plan = build_top(self._df, 1, _listed(keys), descending, mode, ties="last", rank=False)
        return self._target.run(plan, self._df)

    def _deduplicated(self, subset: Sequence[str] | None, *, within_watermark: bool) -> DataFrame:
        # A string goes to Spark as it is, which refuses it: its letters are no columns.
        names: Any = list(subset) if isinstance(subset, Iterable) and not isinstance(subset, str) else subset
        own = self._df.dropDuplicatesWithinWatermark if within_watermark else self._df.dropDuplicates
        marked, mode = own(names), self._target.mode("append")
        return self._target.run(build_deduplicate(marked, mode, within_watermark=within_watermark), marked)

    def _frame_of(self, given: Any) -> Any:
        if isinstance(given, StatefulDataFrame) and given._target != self._target:
            raise InvalidRequestError(
                "an operator has one state, and these two frames name two; give this one the DataFrame that the other one was made "
                "of, or give both the same name and options",
                state=self._target.name,
                other_state=given._target.name,
            )
        return super()._frame_of(given)


def _listed(columns: ColumnLike | Sequence[ColumnLike]) -> list[ColumnLike]:
    return [columns] if isinstance(columns, str | Column) else list(columns)

"""``fleet.stateful(df)``: PySpark's stateful operators, on a DataFrame and on its groups, with their state in the fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, GroupedData
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_jobs.api.distinct import over_distinct_values
from spark_jobs.api.streaming_frame import StreamingFrame, missing_attribute
from spark_jobs.api.target import Target
from spark_jobs.functions.group_plan import GroupFunction, build_group_state
from spark_jobs.functions.state_batch import BatchFunction
from spark_jobs.operators.aggregate import build_plan
from spark_jobs.operators.join import build_as_of_join, build_join
from spark_jobs.operators.kept_rows import ColumnLike, build_deduplicate, build_limit, build_top
from spark_jobs.plan.event_time import interval_ms
from spark_jobs.plan.spark_errors import InvalidArgumentError, InvalidTypeError, RefusedQueryError
from spark_jobs.transform.plan import Transformation, build_transform
from spark_jobs.transform.processor import StatefulProcessor

_PER_BATCH = (
    "it would see the rows of one batch at a time, in Spark, too, and keeps no state; use applyInPandasWithState, or call it on the "
    "DataFrame that fleet.stateful was given"
)
_UNSUPPORTED: Mapping[str, str] = dict.fromkeys(("apply", "applyInPandas", "cogroup"), _PER_BATCH)


class StatefulGroupedData:
    """Groups with their state in the fleet; methods as PySpark's ``GroupedData``.

    Each returns an ordinary streaming DataFrame, with the column names, types and nullability of Spark's own aggregation.

    Raises
    ------
    InvalidRequestError
        The fleet does not support an aggregate or a type; the error names it and says what to use instead.
    StateMismatchError
        The query does not fit the existing state of this name.
    pyspark.errors.AnalysisException
        Spark refuses the query: an unknown column, a type that does not fit.
    """

    def __init__(self, grouped: GroupedData, target: Target) -> None:
        self._grouped = grouped
        self._target = target

    def __getattr__(self, name: str) -> Any:
        raise missing_attribute(self, name, GroupedData, _UNSUPPORTED, "the fleet does not have it")

    def agg(self, *exprs: Any) -> DataFrame:
        """Aggregate by Columns, or by a dict from column name to function name."""
        if not exprs:
            raise InvalidArgumentError("agg needs at least one aggregate")
        by_name = len(exprs) == 1 and isinstance(exprs[0], dict)
        if not by_name and not all(isinstance(expression, Column) for expression in exprs):
            raise InvalidTypeError("agg takes Columns, such as F.sum('amount'), or one dict of names to functions")
        return self._aggregate(self._grouped.agg(*exprs))

    def count(self) -> DataFrame:
        """Count the rows of each group, in column ``count``."""
        return self._aggregate(self._grouped.count())

    def sum(self, *cols: str) -> DataFrame:
        """Compute the sum of each numeric column."""
        return self._aggregate(self._grouped.sum(*cols))

    def min(self, *cols: str) -> DataFrame:
        """Compute the smallest value of each numeric column."""
        return self._aggregate(self._grouped.min(*cols))

    def max(self, *cols: str) -> DataFrame:
        """Compute the largest value of each numeric column."""
        return self._aggregate(self._grouped.max(*cols))

    def avg(self, *cols: str) -> DataFrame:
        """Compute the average of each numeric column."""
        return self._aggregate(self._grouped.avg(*cols))

    mean = avg

    def pivot(self, pivot_col: str, values: Sequence[Any] | None = None) -> StatefulGroupedData:
        """Raise an error: streaming has no pivot.

        Raises
        ------
        InvalidRequestError
            Always; the error says what to use instead.
        """
        raise RefusedQueryError(
            "pivot is not supported on streaming DataFrames, as in Spark (which has it in append mode only, with values); name an "
            "aggregate for each value, as F.expr(\"sum(amount) FILTER (WHERE kind = 'a') AS a\")",
            column=pivot_col,
        )

    def applyInPandasWithState(
        self,
        func: Callable[..., Any],
        outputStructType: T.StructType | str,
        stateStructType: T.StructType | str,
        outputMode: str,
        timeoutConf: str,
    ) -> DataFrame:
        """Call a function for each key with rows, and for each key that timed out, with a state of its own; as PySpark's
        ``GroupedData.applyInPandasWithState``.

        The function is called as ``func(key, pdfs, state)``: a tuple, an iterator of pandas DataFrames, PySpark's ``GroupState``. It
        returns an iterable of DataFrames. If it is not deterministic, a task that Spark repeats after its commit may emit rows that do
        not belong to the committed state, as in Spark.

        Parameters
        ----------
        func
            The function.
        outputStructType, stateStructType
            Types of the emitted rows and of the state, as Spark's types or DDL. Nested state is stored as binary
            (:mod:`spark_jobs.functions.groups`).
        outputMode
            ``append`` or ``update``.
        timeoutConf
            A value of PySpark's ``GroupStateTimeout``. A timeout is valid until the function is called for the key again. Timeouts
            fire as in Spark, which runs a batch without data for them if there are no new rows.

        Raises
        ------
        InvalidRequestError
            An argument is not valid, or timeouts of event time have no watermark.

        Examples
        --------
        >>> import pandas as pd
        >>> def count(key, pdfs, state):
        ...     seen = state.get[0] if state.exists else 0
        ...     seen += sum(len(pdf) for pdf in pdfs)
        ...     state.update((seen,))
        ...     yield pd.DataFrame({"user": [key[0]], "seen": [seen]})
        >>> users = fleet.stateful(clicks, name="users").groupBy("user")  # doctest: +SKIP
        >>> users.applyInPandasWithState(  # doctest: +SKIP
        ...     count, "user string, seen long", "seen long", "update", GroupStateTimeout.NoTimeout
        ... )
        """
        return self._with_state(
            GroupFunction(func, outputStructType, stateStructType, outputMode, timeoutConf, arrow=False)
        )

    def applyInArrowWithState(
        self,
        func: BatchFunction,
        outputStructType: T.StructType | str,
        stateStructType: T.StructType | str,
        outputMode: str,
        timeoutConf: str,
    ) -> DataFrame:
        """Call a function for many keys at once, in Arrow columns, so that no Python code runs for each key or row.

        The function is called as ``func(keys, rows, state)`` and returns a table with the columns of `outputStructType`, or None:

        - ``keys``: a table of the grouping columns, a row for each key;
        - ``rows``: a table of the DataFrame's columns and, last, ``key_index``: the row of its key in ``keys``. Rows of a key are
          adjacent, in the order of their arrival; ``state.offsets`` has the index of each key's first row;
        - ``state``: a :class:`~spark_jobs.functions.state_batch.StateBatch`: ``get``, ``values``, ``exists``, ``update``, ``remove``,
          ``set_timeout_duration``, ``set_timeout_timestamp``, each for all keys or for those of a mask.

        A task calls it for all its keys with rows (up to 131072 at once), then for the keys that timed out, without rows:
        ``state.has_timed_out`` is True.

        Parameters
        ----------
        func
            The function.
        outputStructType, stateStructType, outputMode, timeoutConf
            As :meth:`applyInPandasWithState`.

        Raises
        ------
        InvalidRequestError
            As :meth:`applyInPandasWithState`.

        Examples
        --------
        Sums by key, emitted and removed once a key has had no rows for a minute:

        >>> import pyarrow.compute as pc
        >>> def sums(keys, rows, state):
        ...     if state.has_timed_out:
        ...         total = state.get("total")
        ...         state.remove()
        ...         return keys.append_column("total", total)
        ...     new = rows.group_by("key_index", use_threads=False).aggregate([("amount", "sum")])
        ...     state.update({"total": pc.add(state.get("total", 0), new["amount_sum"])})
        ...     state.set_timeout_duration(60_000)
        >>> shops = fleet.stateful(sales, name="shops").groupBy("shop")  # doctest: +SKIP
        >>> shops.applyInArrowWithState(  # doctest: +SKIP
        ...     sums, "shop string, total long", "total long", "update", GroupStateTimeout.ProcessingTimeTimeout
        ... )
        """
        return self._with_state(
            GroupFunction(func, outputStructType, stateStructType, outputMode, timeoutConf, arrow=True)
        )

    def transformWithStateInPandas(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: T.StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: GroupedData | None = None,
        eventTimeColumnName: str = "",
    ) -> DataFrame:
        """Run :meth:`transformWithState` with a key's rows, and the emitted rows, as pandas DataFrames."""
        transformation = Transformation(
            statefulProcessor, outputStructType, outputMode, timeMode, initialState, eventTimeColumnName, True
        )
        return self._transform(transformation)

    def transformWithState(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: T.StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: GroupedData | None = None,
        eventTimeColumnName: str = "",
    ) -> DataFrame:
        """Have a processor work on the rows of each key, with state variables and timers of its own; as PySpark 4's
        ``GroupedData.transformWithState``.

        Timers and late rows follow :meth:`applyInPandasWithState`.

        Parameters
        ----------
        statefulProcessor
            An object of a class that extends :class:`~spark_jobs.transform.processor.StatefulProcessor`.
        outputStructType
            Type of the emitted rows, as Spark's type or in DDL.
        outputMode
            ``append`` or ``update``.
        timeMode
            The clock of the timers: ``None``, ``ProcessingTime`` or ``EventTime``. With ``ProcessingTime``, state variables may
            have a time to live; with ``EventTime``, late rows are dropped.
        initialState
            A batch DataFrame grouped by the same columns, added to the state in its first batch. It is read when the query is
            built, and kept on the driver and the executors, while the state has no version after its first.
        eventTimeColumnName
            Timestamp column of the output that following stateful operators use as event time.

        Raises
        ------
        InvalidRequestError
            An argument is not valid, or a state variable that the processor asks for in ``init``.

        Examples
        --------
        >>> class Seen(StatefulProcessor):
        ...     def init(self, handle):
        ...         self.seen = handle.getValueState("seen", "n long")
        ...     def handleInputRows(self, key, rows, timerValues):
        ...         n = sum(1 for _ in rows) + (self.seen.get() or (0,))[0]
        ...         self.seen.update((n,))
        ...         yield (key[0], n)
        >>> users = fleet.stateful(clicks, name="seen").groupBy("user")  # doctest: +SKIP
        >>> users.transformWithState(Seen(), "user string, seen long", "update", "None")  # doctest: +SKIP
        """
        transformation = Transformation(
            statefulProcessor, outputStructType, outputMode, timeMode, initialState, eventTimeColumnName, False
        )
        return self._transform(transformation)

    def _with_state(self, given: GroupFunction) -> DataFrame:
        plan = build_group_state(self._grouped, given, self._target.output_mode)
        try:
            sparks = self._grouped.applyInPandasWithState(
                given.function, given.output, given.state, given.output_mode, given.timeout_conf
            )
        except AnalysisException:
            # Spark does not support keys that are expressions.
            sparks = self._grouped._df
        return self._target.run(plan, sparks)

    def _transform(self, transformation: Transformation) -> DataFrame:
        plan = build_transform(self._grouped, transformation, self._target.output_mode)
        return self._target.run(plan, self._grouped._df)

    def _aggregate(self, aggregated: DataFrame) -> DataFrame:
        aggregated = over_distinct_values(aggregated, self._target)
        plan = build_plan(aggregated, self._target.output_mode)
        return self._target.run(plan, aggregated, plan.refused)


class StatefulDataFrame(StreamingFrame):
    """A streaming DataFrame whose next stateful operator has its state in the fleet. Created by ``Fleet.stateful``.

    It has PySpark's stateful operators, each of which returns an ordinary streaming DataFrame, and ``topN``, ``keepLast`` and
    ``joinAsOf``. It also has PySpark's operations on each row by itself (``select``, ``where``, ``withColumn``, ``withWatermark``,
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

    def joinAsOf(
        self,
        other: DataFrame | StatefulDataFrame,
        leftAsOfColumn: ColumnLike,
        rightAsOfColumn: ColumnLike,
        on: str | list[str] | Column | list[Column],
        how: str = "inner",
        *,
        tolerance: str | None = None,
        allowExactMatches: bool = True,
    ) -> DataFrame:
        """Join each row with the newest row of another stream, of equal columns, that is not later: such as a trade with the quote of
        its time.

        A row is emitted once, when the watermark has passed it: then its match is final. Of the other stream, the newest row of each
        key is kept, and those that the watermark has not passed. Among rows of equal time, the last to arrive is the newest.

        Parameters
        ----------
        leftAsOfColumn, rightAsOfColumn
            The columns of event time, each with a watermark.
        on
            Names of columns that both have, or equalities.
        how
            ``inner``, or ``left``: with nulls for a row without a match.
        tolerance
            How much older a match may be, as ``withWatermark`` takes it, in whole milliseconds; None for any time. With it keys end.
        allowExactMatches
            Whether a row of the same time matches; without, nor does one that is older by all of the tolerance.
        """
        right = self._frame_of(other)
        if not right.isStreaming:
            raise RefusedQueryError(
                "an as-of join is of two streams; use join for a static DataFrame", state=self._target.name
            )
        plan = build_as_of_join(
            self._df,
            right,
            (leftAsOfColumn, rightAsOfColumn),
            on,
            how,
            None if tolerance is None else interval_ms(self._df.sparkSession, tolerance),
            self._target.mode("append"),
            is_strict=not allowExactMatches,
        )
        return self._target.run(plan, self._df)

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
        self, keys: ColumnLike | Sequence[ColumnLike], order_by: ColumnLike | Sequence[ColumnLike], n: int = 1
    ) -> DataFrame:
        """Keep the last `n` rows of each key by an order, such as the newest by event time; among equal rows, the last to arrive.

        Each batch emits the last row of each key for which it changed. Of several rows it emits those that are new among the last `n`
        or whose ``rank`` changed, which is 1 for the last one.
        """
        last = [F.col(column) if isinstance(column, str) else column for column in _listed(order_by)]
        descending = [column.desc() for column in last]
        mode = self._target.mode("update")
        plan = build_top(self._df, n, _listed(keys), descending, mode, ties="last", rank=n > 1)
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

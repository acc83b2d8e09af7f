"""``fleet.stateful(df)``: PySpark's stateful operators over state that the fleet holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame, GroupedData
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.errors import InvalidRequestError
from coordinator.names import check_state_name
from spark_jobs.functions.group_plan import GroupFunction, build_group_state
from spark_jobs.functions.state_batch import BatchFunction
from spark_jobs.operators.aggregate import build_plan
from spark_jobs.operators.deduplicate import build_deduplicate, build_limit
from spark_jobs.operators.join import build_join
from spark_jobs.operators.top import ColumnLike, build_top
from spark_jobs.plan.logical import analysed
from spark_jobs.plan.operator_plan import OperatorPlan
from spark_jobs.plan.streaming_rules import check_as_spark_would
from spark_jobs.streaming_frame import StreamingFrame, missing_attribute
from spark_jobs.transform.plan import Transformation, build_transform
from spark_jobs.transform.processor import StatefulProcessor

__all__ = ["StatefulDataFrame", "StatefulGroupedData"]

_OUTPUT_MODES = ("update", "append", "complete")


class StatefulDataFrame(StreamingFrame):
    """A streaming DataFrame whose next stateful operator lives in the fleet. Made by ``Fleet.stateful``.

    Has PySpark's stateful operators, each of which gives an ordinary streaming DataFrame, and two more (``topN``, ``keepLast``). Of the
    rest of PySpark's DataFrame it has what looks at each row by itself (``select``, ``where``, ``withColumn``, ``withWatermark``,
    ``union``, ..), which gives a stateful frame again, and what is asked of a DataFrame (``schema``, ``columns``, ``df["c"]``,
    ``df.c``, ..). ``writeStream`` writes the rows as they are: without an operator there is no state, and nothing in the fleet.

    Raises
    ------
    InvalidRequestError
        The DataFrame is not streaming; the name, the output mode or the number of shards is not valid.
    AttributeError
        It has not got what is asked for; says why and what to do, if PySpark's DataFrame has it.
    """

    def __init__(
        self,
        df: DataFrame,
        *,
        name: str,
        output_mode: str | None,
        shards: int | None,
        run_plan: Callable[[OperatorPlan], DataFrame],
    ) -> None:
        if not df.isStreaming:
            raise InvalidRequestError(
                "the fleet holds the state of streaming queries; read with spark.readStream, or use df.groupBy for a batch",
                state=name,
            )
        check_state_name(name)
        # In any case, as Spark takes them.
        mode = output_mode.lower() if isinstance(output_mode, str) else output_mode
        if mode is not None and mode not in _OUTPUT_MODES:
            raise InvalidRequestError(
                f"the output mode is one of {', '.join(_OUTPUT_MODES)}", state=name, outputMode=output_mode
            )
        if shards is not None and shards < 1:
            raise InvalidRequestError("a state has at least one shard", state=name, shards=shards)
        self._df = df
        self._name, self._output_mode, self._shards = name, mode, shards
        self._run_plan = run_plan

    def groupBy(self, *cols: Any) -> StatefulGroupedData:
        """Group by columns, as ``DataFrame.groupBy``."""
        return StatefulGroupedData(self, self._df.groupBy(*cols))

    groupby = groupBy

    def rollup(self, *cols: Any) -> StatefulGroupedData:
        """Group by columns, by all but the last, and so on up to everything, as ``DataFrame.rollup``."""
        return StatefulGroupedData(self, self._df.rollup(*cols))

    def cube(self, *cols: Any) -> StatefulGroupedData:
        """Group by every choice of the columns, as ``DataFrame.cube``."""
        return StatefulGroupedData(self, self._df.cube(*cols))

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
        mode = self._mode("append")
        return self._run(build_join(self._df, right, on, how, mode), joined, mode)

    def crossJoin(self, other: DataFrame | StatefulDataFrame) -> Any:
        """Join with a static DataFrame without a condition, as ``DataFrame.crossJoin``; of two streams there is none, as in Spark."""
        return self.join(other)

    def limit(self, num: int) -> DataFrame:
        """The first `num` rows of the stream, as ``DataFrame.limit``."""
        mode = self._mode("append")
        return self._run(build_limit(self._df, num, mode), self._df.limit(num), mode)

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
        mode = self._mode("update")
        return self._run(build_top(self._df, n, _listed(partition_by), _listed(order_by), mode), self._df, mode)

    def keepLast(
        self, keys: ColumnLike | Sequence[ColumnLike], order_by: ColumnLike | Sequence[ColumnLike]
    ) -> DataFrame:
        """The last row of each key by an order, such as the newest by event time; of equal rows the one that came last.

        Each batch emits the new last row of each key that has one.
        """
        last = [F.col(column) if isinstance(column, str) else column for column in _listed(order_by)]
        descending = [column.desc() for column in last]
        mode = self._mode("update")
        plan = build_top(self._df, 1, _listed(keys), descending, mode, ties="last", rank=False)
        return self._run(plan, self._df, mode)

    def _deduplicated(self, subset: Sequence[str] | None, *, within_watermark: bool) -> DataFrame:
        # A string goes to Spark as it is, which refuses it: its letters are no columns.
        names: Any = list(subset) if isinstance(subset, Iterable) and not isinstance(subset, str) else subset
        own = self._df.dropDuplicatesWithinWatermark if within_watermark else self._df.dropDuplicates
        marked, mode = own(names), self._mode("append")
        return self._run(build_deduplicate(marked, mode, within_watermark=within_watermark), marked, mode)

    def _aggregate(self, aggregated: DataFrame) -> DataFrame:
        mode = self._mode("update")
        plan = build_plan(aggregated, mode)
        return self._run(plan, aggregated, mode)

    def _with_state(self, grouped: GroupedData, function: GroupFunction) -> DataFrame:
        plan = build_group_state(grouped, function, self._output_mode)
        return self._run(plan, self._df, plan.schema.output_mode)

    def _transform(self, grouped: GroupedData, given: Transformation) -> DataFrame:
        plan = build_transform(grouped, given, self._output_mode)
        return self._run(plan, self._df, plan.schema.output_mode)

    def _mode(self, usual: str) -> str:
        """The output mode that was given, or an operator's usual one."""
        return usual if self._output_mode is None else self._output_mode

    def _run(self, plan: OperatorPlan, own: DataFrame, mode: str) -> DataFrame:
        """The operator's results.

        Parameters
        ----------
        own
            The query with Spark's own operator; what is below it where Spark has none.
        """
        result = self._run_plan(plan)
        # Last: what the fleet refuses itself comes with its remedy.
        check_as_spark_would(analysed(own), mode, self._name)
        return result

    def _frame_of(self, given: Any) -> Any:
        if isinstance(given, StatefulDataFrame):
            asked, other = ((one._name, one._output_mode, one._shards) for one in (self, given))
            if asked != other:
                raise InvalidRequestError(
                    "an operator has one state, and these two frames name two; give this one the DataFrame that the other one was made "
                    "of, or give both the same name, output mode and shards",
                    state=self._name,
                    other_state=given._name,
                )
        return super()._frame_of(given)


def _listed(columns: ColumnLike | Sequence[ColumnLike]) -> list[ColumnLike]:
    return [columns] if isinstance(columns, str | Column) else list(columns)


_PER_BATCH = (
    "it would see the rows of one batch at a time, in Spark, too, and keeps no state; use applyInPandasWithState, or call it on the "
    "DataFrame that fleet.stateful was given"
)
_NOT_HELD: Mapping[str, str] = dict.fromkeys(("apply", "applyInPandas", "cogroup"), _PER_BATCH)


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

    def __init__(self, stateful: StatefulDataFrame, grouped: GroupedData) -> None:
        self._stateful = stateful
        self._grouped = grouped

    def __getattr__(self, name: str) -> Any:
        raise missing_attribute(self, name, GroupedData, _NOT_HELD, "the fleet does not have it")

    def agg(self, *exprs: Any) -> DataFrame:
        """Aggregate by Columns, or by one dict of column name to function name."""
        if not exprs:
            raise InvalidRequestError("agg needs at least one aggregate")
        by_name = len(exprs) == 1 and isinstance(exprs[0], dict)
        if not by_name and not all(isinstance(expression, Column) for expression in exprs):
            raise InvalidRequestError("agg takes Columns, such as F.sum('amount'), or one dict of names to functions")
        return self._stateful._aggregate(self._grouped.agg(*exprs))

    def count(self) -> DataFrame:
        """Rows of each group, in column ``count``."""
        return self._stateful._aggregate(self._grouped.count())

    def sum(self, *cols: str) -> DataFrame:
        """Sum of each numeric column."""
        return self._stateful._aggregate(self._grouped.sum(*cols))

    def min(self, *cols: str) -> DataFrame:
        """Smallest value of each numeric column."""
        return self._stateful._aggregate(self._grouped.min(*cols))

    def max(self, *cols: str) -> DataFrame:
        """Largest value of each numeric column."""
        return self._stateful._aggregate(self._grouped.max(*cols))

    def avg(self, *cols: str) -> DataFrame:
        """Average of each numeric column."""
        return self._stateful._aggregate(self._grouped.avg(*cols))

    mean = avg

    def pivot(self, pivot_col: str, values: Sequence[Any] | None = None) -> StatefulGroupedData:
        """The fleet has none.

        Raises
        ------
        InvalidRequestError
            Always; says what to use.
        """
        raise InvalidRequestError(
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
        """Call a function for each key with rows, and for each that timed out, with a state of the user's own; as PySpark's
        ``GroupedData.applyInPandasWithState``.

        The function is called as ``func(key, pdfs, state)``: a tuple, an iterator of pandas DataFrames, PySpark's ``GroupState``. It
        returns an iterable of DataFrames. If it is not deterministic, a task that Spark repeats after its state was committed may emit
        other rows than those that belong to that state, as in Spark.

        Parameters
        ----------
        func
            The function.
        outputStructType, stateStructType
            Types of what it emits and of the state, as Spark's types or DDL. Nested state is held as binary
            (:mod:`spark_jobs.functions.groups`).
        outputMode
            ``append`` or ``update``.
        timeoutConf
            Of PySpark's ``GroupStateTimeout``. A timeout stands until the function is called for the key again. They fire as in Spark,
            which runs a batch without data for them if there are no new rows.

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
        return self._with_state(func, outputStructType, stateStructType, outputMode, timeoutConf, arrow=False)

    def applyInArrowWithState(
        self,
        func: BatchFunction,
        outputStructType: T.StructType | str,
        stateStructType: T.StructType | str,
        outputMode: str,
        timeoutConf: str,
    ) -> DataFrame:
        """:meth:`applyInPandasWithState` with one call for many keys, in Arrow columns: no Python code runs for each key or row.

        The function is called as ``func(keys, rows, state)`` and returns a table with the columns of `outputStructType`, or None:

        - ``keys``: a table of the grouping columns, one row a key;
        - ``rows``: a table of the DataFrame's columns and, last, ``key_index``: the row's place in ``keys``. Rows of a key stand
          together, in the order in which they came; ``state.offsets`` says where they begin;
        - ``state``: a :class:`~spark_jobs.functions.state_batch.StateBatch`: ``get``, ``values``, ``exists``, ``update``, ``remove``,
          ``set_timeout_duration``, ``set_timeout_timestamp``, each for all the keys or those of a mask.

        A task calls it for all its keys with rows (up to 131072 at once), then for those that timed out, without rows:
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
        Sums by key, forgotten and emitted once a key has been quiet for a minute:

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
        return self._with_state(func, outputStructType, stateStructType, outputMode, timeoutConf, arrow=True)

    def transformWithStateInPandas(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: T.StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: GroupedData | None = None,
        eventTimeColumnName: str = "",
    ) -> DataFrame:
        """:meth:`transformWithState` with a key's rows, and what is emitted, as pandas DataFrames."""
        given = Transformation(
            statefulProcessor, outputStructType, outputMode, timeMode, initialState, eventTimeColumnName, True
        )
        return self._stateful._transform(self._grouped, given)

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
            Type of what it emits, as Spark's type or in DDL.
        outputMode
            ``append`` or ``update``.
        timeMode
            ``None``, ``ProcessingTime`` or ``EventTime``: what timers go by. State variables may have a time to live with the second;
            with the third, late rows are dropped.
        initialState
            A batch DataFrame grouped by the same columns, taken in with the first batch of the state. It is read when the query is
            built, and kept on the driver and the executors, as long as the state has no version after its first.
        eventTimeColumnName
            Timestamp column of the output that stateful operators which follow go by.

        Raises
        ------
        InvalidRequestError
            An argument is not valid, or what the processor asks for in ``init``.

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
        given = Transformation(
            statefulProcessor, outputStructType, outputMode, timeMode, initialState, eventTimeColumnName, False
        )
        return self._stateful._transform(self._grouped, given)

    def _with_state(
        self,
        func: Callable[..., Any],
        output: T.StructType | str,
        state: T.StructType | str,
        output_mode: str,
        timeout_conf: str,
        *,
        arrow: bool,
    ) -> DataFrame:
        function = GroupFunction(func, output, state, output_mode, timeout_conf, arrow)
        return self._stateful._with_state(self._grouped, function)

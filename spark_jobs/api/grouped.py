"""``fleet.stateful(df).groupBy(..)``: PySpark's grouped data with its state in the fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, GroupedData
from pyspark.sql import types as T

from spark_jobs.api.streaming_frame import missing_attribute
from spark_jobs.api.target import Target
from spark_jobs.functions.group_plan import GroupFunction, build_group_state
from spark_jobs.functions.state_batch import BatchFunction
from spark_jobs.operators.aggregate import build_plan
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
        return self._with_state(func, outputStructType, stateStructType, outputMode, timeoutConf, arrow=False)

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
        plan = build_group_state(self._grouped, function, self._target.output_mode)
        try:
            sparks = self._grouped.applyInPandasWithState(func, output, state, output_mode, timeout_conf)
        except AnalysisException:
            # Spark does not support keys that are expressions.
            sparks = self._grouped._df
        return self._target.run(plan, sparks)

    def _transform(self, transformation: Transformation) -> DataFrame:
        plan = build_transform(self._grouped, transformation, self._target.output_mode)
        return self._target.run(plan, self._grouped._df)

    def _aggregate(self, aggregated: DataFrame) -> DataFrame:
        plan = build_plan(aggregated, self._target.output_mode)
        return self._target.run(plan, aggregated, plan.refused)

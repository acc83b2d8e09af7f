"""DataFrames for a user's functions: a key's rows, the rows that it emits, and the calls of ``applyInPandasWithState`` for each key.

PySpark's own code converts the values, for all keys at once, and state is PySpark's own ``GroupState``, so a function gets the same
values as in Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.errors import PySparkRuntimeError, PySparkTypeError
from pyspark.sql import types as T
from pyspark.sql.streaming.state import GroupState

from spark_jobs.functions.groups import Groups, single_chunk, tables_of
from spark_jobs.functions.state_batch import NO_TIMEOUT, Mask, StateBatch
from spark_jobs.functions.values import to_arrow, to_python
from spark_jobs.plan.spark_errors import StateCallError
from spark_jobs.plan.spark_version import SPARK, PandasConversions

#: ``func(key, pdfs, state)``, which returns the DataFrames to emit.
PandasFunction = Callable[[tuple[Any, ...], Iterator[pd.DataFrame], GroupState], Iterable[pd.DataFrame]]


@dataclass(frozen=True)
class PandasForm:
    """Rows as pandas DataFrames."""

    output: T.StructType
    #: ``timezone``, ``safe``, ``by_name``, ``max_rows``: Settings of Spark's session: its time zone, whether conversions to
    #: Arrow are checked, whether columns of results are found by name, and the largest number of rows in one DataFrame.
    timezone: str
    safe: bool
    by_name: bool
    max_rows: int

    @cached_property
    def _conversions(self) -> PandasConversions:
        return SPARK.pandas_conversions(self.timezone, safe=self.safe, by_name=self.by_name)

    def keys(self, keys: pa.Table) -> Iterator[tuple[Any, ...]]:
        yield from zip(*(self._values(single_chunk(column)) for column in keys.itercolumns()), strict=True)

    def _values(self, column: pa.Array) -> list[Any]:
        alone = _retyping(column)
        series = self._conversions.to_pandas(column.filter(pa.array(~alone)))
        # Numbers remain NumPy's; times become pandas'.
        together = iter(series.to_numpy() if series.dtype.kind in "biuf" else series)
        return [
            self._conversions.to_pandas(column.slice(index, 1)).iloc[0] if by_itself else next(together)
            for index, by_itself in enumerate(alone.tolist())
        ]

    def rows(self, groups: Groups) -> Iterator[Iterator[pd.DataFrame]]:
        """Return the DataFrames of each key, of at most ``max_rows`` rows."""
        alone = _converted_alone(groups)
        begins, ends = groups.offsets[:-1], groups.offsets[1:]
        together = groups.rows
        shift = np.zeros(len(groups), np.int64)
        if alone.any():
            together = groups.rows.filter(pa.array(np.repeat(~alone, ends - begins)))
            shift = np.cumsum(np.where(alone, ends - begins, 0))
        whole = _frame(together, self._conversions)
        for begin, end, by_itself, removed in zip(
            begins.tolist(), ends.tolist(), alone.tolist(), shift.tolist(), strict=True
        ):
            if by_itself:
                frame, start, stop = _frame(groups.rows.slice(begin, end - begin), self._conversions), 0, end - begin
            else:
                frame, start, stop = whole, begin - removed, end - removed
            yield self._chunks(frame, start, stop)

    def _chunks(self, frame: pd.DataFrame, start: int, stop: int) -> Iterator[pd.DataFrame]:
        for begin in range(start, stop, self.max_rows):
            # A copy, as a function may change its rows, which must not affect other keys.
            chunk = frame.iloc[begin : min(stop, begin + self.max_rows)].copy()
            chunk.index = pd.RangeIndex(len(chunk))
            yield chunk

    def checked(self, frames: Any) -> Iterator[pd.DataFrame]:
        """Yield the DataFrames that the function returned; refuse anything else, by Spark's own errors."""
        if isinstance(frames, pd.DataFrame) or not isinstance(frames, Iterable):
            raise _wrong_return("iterable of pandas.DataFrame", type(frames).__name__)
        for frame in frames:
            if not isinstance(frame, pd.DataFrame):
                raise _wrong_return("iterator of pandas.DataFrame", f"iterator of {type(frame).__name__}")
            if len(frame.columns) != len(self.output) and (len(frame.columns) or not frame.empty):
                raise PySparkRuntimeError(
                    **SPARK.error_arguments(
                        SPARK.WRONG_COLUMN_COUNT,
                        {"expected": str(len(self.output)), "actual": str(len(frame.columns))},
                    )
                )
            yield frame

    def size(self, emitted: pd.DataFrame) -> int:
        return len(emitted)

    def table(self, frames: Sequence[pd.DataFrame]) -> pa.Table:
        return self._conversions.to_arrow(pd.concat(frames, ignore_index=True), self.output)


def _wrong_return(expected: str, actual: str) -> PySparkTypeError:
    return PySparkTypeError(**SPARK.error_arguments("UDF_RETURN_TYPE", {"expected": expected, "actual": actual}))


def _frame(rows: pa.Table, conversions: PandasConversions) -> pd.DataFrame:
    # As one array: PySpark 4 converts no times of a column that has no chunk.
    series = [
        conversions.to_pandas(single_chunk(column)).rename(name)
        for name, column in zip(rows.column_names, rows.itercolumns(), strict=True)
    ]
    frame: pd.DataFrame = pd.concat(series, axis=1)
    return frame


def _converted_alone(groups: Groups) -> Mask:
    """Return a mask of the keys with :func:`_retyping` rows, which must not change the columns of other keys."""
    retypes = np.zeros(groups.rows.num_rows, np.bool_)
    for column in groups.rows.itercolumns():
        retypes |= _retyping(single_chunk(column))
    if not retypes.any():
        return np.zeros(len(groups), np.bool_)
    return np.logical_or.reduceat(retypes, groups.offsets[:-1])


def _retyping(column: pa.Array) -> Mask:
    """Return a mask of the rows with a null, at any depth, that changes the type of the whole pandas column: integers become floats."""
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        retypes: Mask = column.is_null().to_numpy(zero_copy_only=False)
        return retypes
    retypes = np.zeros(len(column), np.bool_)
    if pa.types.is_struct(kind):
        # The fields of a null struct are also null.
        for field in column.flatten():
            retypes |= _retyping(field)
    elif pa.types.is_map(kind):
        retypes |= _any_of(_retyping(column.keys) | _retyping(column.items), column)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        retypes |= _any_of(_retyping(column.values), column)
    return retypes


def _any_of(elements: Mask, lists: pa.Array) -> Mask:
    """Return a mask of the lists in which the mask of elements has a True."""
    counts = np.concatenate([[0], np.cumsum(elements)])[lists.offsets.to_numpy()]
    result: Mask = (np.diff(counts) > 0) & lists.is_valid().to_numpy(zero_copy_only=False)
    return result


@dataclass(frozen=True)
class PandasCalls:
    """A function of a single key, called for many keys."""

    function: PandasFunction
    state: T.StructType
    form: PandasForm

    def __call__(self, groups: Groups, state: StateBatch) -> Iterator[pa.Table]:
        """Call the function for each key; yield the rows to emit, and change `state`."""
        form = self.form
        results: list[GroupState] = []

        def calls() -> Iterator[Iterator[pd.DataFrame]]:
            inputs = _no_rows(groups) if state.has_timed_out else form.rows(groups)
            for key, frames, key_state in zip(form.keys(groups.keys), inputs, _states(self.state, state), strict=True):
                yield form.checked(self.function(key, frames, key_state))
                results.append(key_state)

        yield from tables_of(form, calls())
        self._keep(results, state)

    def _keep(self, results: Sequence[GroupState], state: StateBatch) -> None:
        """Set the changes of each key's state in the batch's columns."""
        updated = np.array([result._updated for result in results], np.bool_)
        removed = np.array([result._removed for result in results], np.bool_)
        if updated.any():
            empty = (None,) * len(self.state)
            rows = [tuple(result._value) if result._updated else empty for result in results]
            for row in rows:
                if len(row) != len(self.state):
                    raise StateCallError(
                        "the state was updated with another number of values than it has columns",
                        columns=self.state.names,
                        values=len(row),
                    )
            columns = zip(self.state.fields, zip(*rows, strict=True), strict=True)
            state.update(
                {item.name: [to_arrow(value, item.dataType) for value in column] for item, column in columns}, updated
            )
        if removed.any():
            state.remove(removed)
        state.keep_timeouts([result._timeout_timestamp for result in results])


def _no_rows(groups: Groups) -> Iterator[Iterator[pd.DataFrame]]:
    for _ in range(len(groups)):
        yield iter([pd.DataFrame(columns=groups.rows.column_names)])


def _states(kind: T.StructType, state: StateBatch) -> Iterator[GroupState]:
    columns = [
        [to_python(value, item.dataType) for value in array.to_pylist()]
        for item, array in zip(kind.fields, state.values.itercolumns(), strict=True)
    ]
    clock = state.clock
    for exists, *values in zip(state.exists.tolist(), *columns, strict=True):
        yield GroupState(
            optionalValue=T.Row(*values) if exists else None,  # type: ignore[arg-type]
            batchProcessingTimeMs=clock.processing_time_ms,
            eventTimeWatermarkMs=GroupState.NO_TIMESTAMP if clock.watermark_ms is None else clock.watermark_ms,
            timeoutConf=clock.timeout_conf,
            hasTimedOut=clock.has_timed_out,
            watermarkPresent=clock.watermark_ms is not None,
            defined=exists,
            updated=False,
            removed=False,
            timeoutTimestamp=NO_TIMEOUT,
            keyAsUnsafe=b"",
            valueSchema=kind,
        )

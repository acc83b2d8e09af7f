"""Functions of ``applyInPandasWithState``: called key by key over columns that are converted for all keys at once.

Values are converted by PySpark's own code, and state is PySpark's own ``GroupState``, so a function sees what it sees in Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.errors import PySparkRuntimeError, PySparkTypeError
from pyspark.sql import types as T
from pyspark.sql.pandas.serializers import ArrowStreamPandasUDFSerializer
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.streaming.state import GroupState

from coordinator.errors import InvalidRequestError
from spark_jobs.group_rows import Groups, single_chunk
from spark_jobs.group_state import NO_TIMEOUT, StateBatch

__all__ = ["PandasCalls", "PandasFunction"]

#: ``func(key, pdfs, state)``: DataFrames to emit.
PandasFunction = Callable[[tuple[Any, ...], Iterator[pd.DataFrame], GroupState], Iterable[pd.DataFrame]]


@dataclass(frozen=True)
class PandasCalls:
    """A function of one key, as a function of many.

    Attributes
    ----------
    function
        The user's.
    output, state
        Types of what it emits and of the state.
    timezone, safe, by_name, max_rows
        Of Spark's session: its time zone, whether conversions to Arrow are checked, whether columns of results are found by name, and
        the largest number of rows in one DataFrame.
    """

    function: PandasFunction
    output: T.StructType
    state: T.StructType
    timezone: str
    safe: bool
    by_name: bool
    max_rows: int

    def __call__(self, groups: Groups, state: StateBatch) -> Iterator[pa.Table]:
        """Call the function for each key; yields what to emit and changes `state`."""
        serializer = _serializer(self.timezone, self.safe, self.by_name)
        emitted: list[pd.DataFrame] = []
        rows = 0
        results: list[GroupState] = []
        inputs = self._inputs(groups, state, serializer)
        for key, frames, one in zip(_keys(groups.keys, serializer), inputs, _states(self.state, state), strict=True):
            for frame in self._checked(self.function(key, frames, one)):
                if len(frame):
                    emitted.append(frame)
                    rows += len(frame)
            results.append(one)
            if rows > self.max_rows:
                yield self._table(emitted, serializer)
                emitted, rows = [], 0
        if emitted:
            yield self._table(emitted, serializer)
        self._keep(results, state)

    def _inputs(self, groups: Groups, state: StateBatch, serializer: Any) -> Iterator[Iterator[pd.DataFrame]]:
        """DataFrames of each key."""
        names = groups.rows.column_names
        if state.has_timed_out:
            for _ in range(len(groups)):
                yield iter([pd.DataFrame(columns=names)])
            return
        alone = _converted_alone(groups)
        begins, ends = groups.offsets[:-1], groups.offsets[1:]
        together = groups.rows
        shift = np.zeros(len(groups), np.int64)
        if alone.any():
            together = groups.rows.filter(pa.array(np.repeat(~alone, ends - begins)))
            shift = np.cumsum(np.where(alone, ends - begins, 0))
        whole = _frame(together, serializer)
        for begin, end, by_itself, gone in zip(
            begins.tolist(), ends.tolist(), alone.tolist(), shift.tolist(), strict=True
        ):
            if by_itself:
                frame, start, stop = _frame(groups.rows.slice(begin, end - begin), serializer), 0, end - begin
            else:
                frame, start, stop = whole, begin - gone, end - gone
            yield self._chunks(frame, start, stop)

    def _chunks(self, frame: pd.DataFrame, start: int, stop: int) -> Iterator[pd.DataFrame]:
        for begin in range(start, stop, self.max_rows):
            # A copy: what a function does to its rows is not seen by other keys.
            chunk = frame.iloc[begin : min(stop, begin + self.max_rows)].copy()
            chunk.index = pd.RangeIndex(len(chunk))
            yield chunk

    def _checked(self, frames: Any) -> Iterator[pd.DataFrame]:
        """What the function returned, refused in Spark's words if it is not what it should be."""
        if isinstance(frames, pd.DataFrame) or not isinstance(frames, Iterable):
            raise _wrong_return("iterable of pandas.DataFrame", type(frames).__name__)
        for frame in frames:
            if not isinstance(frame, pd.DataFrame):
                raise _wrong_return("iterator of pandas.DataFrame", f"iterator of {type(frame).__name__}")
            if len(frame.columns) != len(self.output) and (len(frame.columns) or not frame.empty):
                raise PySparkRuntimeError(
                    error_class="RESULT_LENGTH_MISMATCH_FOR_PANDAS_UDF",
                    message_parameters={"expected": str(len(self.output)), "actual": str(len(frame.columns))},
                )
            yield frame

    def _table(self, frames: Sequence[pd.DataFrame], serializer: Any) -> pa.Table:
        kind = to_arrow_type(self.output)
        struct = serializer._create_struct_array(pd.concat(frames, ignore_index=True), kind)
        return pa.Table.from_arrays(struct.flatten(), schema=pa.schema(list(kind)))

    def _keep(self, results: Sequence[GroupState], state: StateBatch) -> None:
        """What the function did to the state of each key, in columns."""
        updated = np.array([one._updated for one in results], np.bool_)
        removed = np.array([one._removed for one in results], np.bool_)
        timeouts = np.array([one._timeout_timestamp for one in results], np.int64)
        if updated.any():
            empty = (None,) * len(self.state)
            rows = [tuple(one._value) if one._updated else empty for one in results]
            for row in rows:
                if len(row) != len(self.state):
                    raise InvalidRequestError(
                        "the state was updated with another number of values than it has columns",
                        columns=self.state.names,
                        values=len(row),
                    )
            columns = zip(self.state.fields, zip(*rows, strict=True), strict=True)
            state.update(
                {item.name: [_to_arrow(value, item.dataType) for value in column] for item, column in columns}, updated
            )
        if removed.any():
            state.remove(removed)
        state.keep_timeouts(timeouts)


def _serializer(timezone: str, safe: bool, by_name: bool) -> Any:
    """PySpark's conversions between Arrow and pandas; it has no types."""
    make: Any = ArrowStreamPandasUDFSerializer
    return make(timezone, safe, by_name)


def _wrong_return(expected: str, actual: str) -> PySparkTypeError:
    return PySparkTypeError(error_class="UDF_RETURN_TYPE", message_parameters={"expected": expected, "actual": actual})


def _frame(rows: pa.Table, serializer: Any) -> pd.DataFrame:
    """Rows as pandas sees them in Spark."""
    series = [
        serializer.arrow_to_pandas(column).rename(name)
        for name, column in zip(rows.column_names, rows.itercolumns(), strict=True)
    ]
    frame: pd.DataFrame = pd.concat(series, axis=1)
    return frame


def _converted_alone(groups: Groups) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Keys whose rows hold a null that gives a whole pandas column another type: these must not change the columns of other keys."""
    nulls = np.zeros(groups.rows.num_rows, np.bool_)
    for column in groups.rows.itercolumns():
        if column.null_count and (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
            nulls |= ~single_chunk(column).is_valid().to_numpy(zero_copy_only=False)
    if not nulls.any():
        return np.zeros(len(groups), np.bool_)
    return np.logical_or.reduceat(nulls, groups.offsets[:-1])


def _keys(keys: pa.Table, serializer: Any) -> Iterator[tuple[Any, ...]]:
    """Each key as a tuple of what its pandas columns hold."""
    parts: list[list[Any]] = []
    for column in keys.itercolumns():
        if column.null_count and (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
            parts.append(
                [serializer.arrow_to_pandas(single_chunk(column).slice(i, 1)).iloc[0] for i in range(len(column))]
            )
            continue
        series = serializer.arrow_to_pandas(column)
        plain = series.dtype.kind in "biuf"
        # Numbers stay NumPy's; times become pandas'.
        parts.append(list(series.to_numpy() if plain else series))
    yield from zip(*parts, strict=True)


def _states(kind: T.StructType, state: StateBatch) -> Iterator[GroupState]:
    """A ``GroupState`` for each key."""
    columns = [
        [_to_python(value, item.dataType) for value in array.to_pylist()]
        for item, array in zip(kind.fields, state.values.itercolumns(), strict=True)
    ]
    moment = state.moment
    for exists, *values in zip(state.exists.tolist(), *columns, strict=True):
        yield GroupState(
            optionalValue=T.Row(*values) if exists else None,  # type: ignore[arg-type]
            batchProcessingTimeMs=moment.processing_time_ms,
            eventTimeWatermarkMs=GroupState.NO_TIMESTAMP if moment.watermark_ms is None else moment.watermark_ms,
            timeoutConf=moment.timeout_conf,
            hasTimedOut=moment.has_timed_out,
            watermarkPresent=moment.watermark_ms is not None,
            defined=exists,
            updated=False,
            removed=False,
            timeoutTimestamp=NO_TIMEOUT,
            keyAsUnsafe=b"",
            valueSchema=kind,
        )


def _to_python(value: Any, kind: T.DataType) -> Any:
    """A value of Arrow as Spark gives it to Python: times in the worker's own zone, structs as rows, maps as dicts."""
    if value is None:
        return None
    if isinstance(kind, T.TimestampType):
        return value.astimezone().replace(tzinfo=None)
    if isinstance(kind, T.ArrayType):
        return [_to_python(one, kind.elementType) for one in value]
    if isinstance(kind, T.MapType):
        return {_to_python(key, kind.keyType): _to_python(one, kind.valueType) for key, one in value}
    if isinstance(kind, T.StructType):
        return T.Row(**{item.name: _to_python(value[item.name], item.dataType) for item in kind.fields})
    return value


def _to_arrow(value: Any, kind: T.DataType) -> Any:
    """The way back: what Arrow makes the type of."""
    if value is None:
        return None
    if isinstance(kind, T.TimestampType):
        # A time without a zone is in the worker's own, as in Spark.
        return value.astimezone() if isinstance(value, datetime) else value
    if isinstance(kind, T.ArrayType):
        return [_to_arrow(one, kind.elementType) for one in value]
    if isinstance(kind, T.MapType):
        return [(_to_arrow(key, kind.keyType), _to_arrow(one, kind.valueType)) for key, one in value.items()]
    if isinstance(kind, T.StructType):
        values = value if isinstance(value, dict) else dict(zip(kind.names, value, strict=True))
        return {item.name: _to_arrow(values.get(item.name), item.dataType) for item in kind.fields}
    return value

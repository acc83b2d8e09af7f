"""State of many keys at once, for a function of ``applyInArrowWithState``.

:class:`StateBatch` has the rules of PySpark's ``GroupState`` for whole columns: a timeout is valid until the function is called for
its key again, and has to be set again then; a key whose state was removed may still have a timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.streaming.state import GroupStateTimeout

from coordinator.model.errors import InvalidRequestError
from spark_jobs.functions.groups import Numbers, StateColumns

Mask: TypeAlias = npt.NDArray[np.bool_]
#: A column with a value for each key: Arrow, NumPy or a list.
Values: TypeAlias = "pa.Array | pa.ChunkedArray | npt.NDArray[Any] | Sequence[Any]"
#: Milliseconds: a number for all keys, or a column.
Milliseconds: TypeAlias = "int | Values"

#: The value for no timeout.
NO_TIMEOUT = -1
#: Later timeouts, in milliseconds since the epoch, are stored as this one: state has microseconds in 64 bits, and no clock or
#: watermark of Spark's gets there, so the key never times out (``setTimeoutTimestamp(Long.MaxValue)``).
FURTHEST_MS: int = np.iinfo(np.int64).max // 1000


@dataclass(frozen=True, slots=True)
class BatchClock:
    """The times of a call of a function, and its reason."""

    timeout_conf: str
    #: The watermark; None without one.
    watermark_ms: int | None
    processing_time_ms: int
    has_timed_out: bool


class StateBatch:
    """State of the keys of a call, in the order of the call's ``keys`` table.

    Arguments named `where` are masks, with a boolean for each key: the keys to which the call applies; all by default.

    Parameters
    ----------
    columns
        The state's type.
    values
        The state, column by column; null for a key without state.
    exists, timeouts_ms
        A mask of the keys that have state, and the time at which each key times out (-1: never).
    offsets
        Rows of key `i` are those from ``offsets[i]`` to ``offsets[i + 1]``.
    clock
        The times of the call.
    """

    def __init__(
        self,
        columns: StateColumns,
        values: Sequence[pa.Array],
        exists: Mask,
        timeouts_ms: Numbers,
        offsets: Numbers,
        clock: BatchClock,
    ) -> None:
        self._columns, self._clock = columns, clock
        self._values = list(values)
        self._exists = exists.copy()
        self._offsets = offsets
        size = len(exists)
        self._updated, self._removed = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
        self._previous_timeouts = timeouts_ms
        self._timeouts = np.full(size, NO_TIMEOUT, np.int64)

    def __len__(self) -> int:
        return len(self._exists)

    # -- reading --------------------------------------------------------------------------------------------------

    @property
    def exists(self) -> Mask:
        """Mask of the keys that have state, after the updates and removes of this call."""
        return self._exists.copy()

    @property
    def values(self) -> pa.Table:
        """All columns of the state; null for a key without state."""
        return pa.Table.from_arrays(self._values, schema=self._columns.schema)

    def get(self, column: str, default: Any = None) -> pa.Array:
        """Return a column of the state, with `default` (by default null) for a key without state or with a null.

        Raises
        ------
        InvalidRequestError
            The state has no such column.
        """
        index = self._columns.schema.get_field_index(column)
        if index < 0:
            raise InvalidRequestError("the state has no such column", column=column, columns=self._columns.schema.names)
        values = self._values[index]
        return values if default is None else pc.fill_null(values, pa.scalar(default, values.type))

    @property
    def offsets(self) -> Numbers:
        """Index in ``rows`` of each key's first row, and last the number of rows; the differences are the keys' numbers of rows."""
        return self._offsets

    @property
    def has_timed_out(self) -> bool:
        """Whether the function is called for keys that timed out, which have no rows."""
        return self._clock.has_timed_out

    @property
    def current_watermark_ms(self) -> int:
        """The watermark, in milliseconds since the epoch.

        Raises
        ------
        InvalidRequestError
            There is no watermark.
        """
        if self._clock.watermark_ms is None:
            raise InvalidRequestError("there is no watermark to ask for; call withWatermark before fleet.stateful")
        return self._clock.watermark_ms

    @property
    def current_processing_time_ms(self) -> int:
        """Time of the batch, in milliseconds since the epoch; the same on every retry."""
        return self._clock.processing_time_ms

    @property
    def clock(self) -> BatchClock:
        """The times of the call."""
        return self._clock

    # -- changes --------------------------------------------------------------------------------------------------

    def update(self, values: pa.Table | pa.RecordBatch | Mapping[str, Values], where: Values | None = None) -> None:
        """Set the state of keys.

        Parameters
        ----------
        values
            Every column of the state by name, with one value for each key of the call (those outside `where` are ignored).
        where
            Mask of the keys to update.

        Raises
        ------
        InvalidRequestError
            A column is missing, unknown, of another length, or does not fit its type. Nothing was changed.
        """
        mask = self._mask(where)
        if isinstance(values, Mapping):
            columns: dict[str, Values] = dict(values)
        else:
            columns = {name: values.column(name) for name in values.schema.names}
        if set(columns) != set(self._columns.schema.names):
            raise InvalidRequestError(
                "state is updated with all of its columns, and no others",
                columns=self._columns.schema.names,
                got=list(columns),
            )
        new = [self._fitted(field, columns[field.name]) for field in self._columns.schema]
        if not mask.all():
            new = [pc.if_else(pa.array(mask), after, before) for after, before in zip(new, self._values, strict=True)]
        self._values = new
        self._exists |= mask
        self._updated |= mask
        self._removed &= ~mask

    def remove(self, where: Values | None = None) -> None:
        """Remove the state of keys; keys without state are ignored."""
        mask = self._mask(where)
        keep = pa.array(~mask)
        self._values = [pc.if_else(keep, array, pa.scalar(None, array.type)) for array in self._values]
        self._exists &= ~mask
        self._updated &= ~mask
        self._removed |= mask

    def set_timeout_duration(self, duration_ms: Milliseconds, where: Values | None = None) -> None:
        """Let keys time out once this many milliseconds of processing time have passed.

        Raises
        ------
        InvalidRequestError
            The query has no processing-time timeouts, or a duration is not positive.
        """
        mask = self._mask(where)
        self._require_conf(GroupStateTimeout.ProcessingTimeTimeout)
        durations = self._milliseconds(duration_ms, mask)
        if (durations[mask] <= 0).any():
            raise InvalidRequestError("a timeout's duration is positive", smallest=int(durations[mask].min()))
        now_ms = self._clock.processing_time_ms
        self._timeouts[mask] = now_ms + np.minimum(durations[mask], FURTHEST_MS - now_ms)

    def set_timeout_timestamp(self, timestamp_ms: Milliseconds, where: Values | None = None) -> None:
        """Let keys time out once the watermark has passed a time, in milliseconds since the epoch (or an Arrow column of timestamps).

        Raises
        ------
        InvalidRequestError
            The query has no event-time timeouts, or a time is not positive or before the watermark.
        """
        mask = self._mask(where)
        self._require_conf(GroupStateTimeout.EventTimeTimeout)
        times = self._milliseconds(timestamp_ms, mask)
        least = max(1, self._clock.watermark_ms or 0)
        if (times[mask] < least).any():
            raise InvalidRequestError(
                "a timeout is not before the current watermark, and positive",
                earliest=int(times[mask].min()),
                watermark=self._clock.watermark_ms,
            )
        self._timeouts[mask] = np.minimum(times[mask], FURTHEST_MS)

    def keep_timeouts(self, timeouts_ms: Sequence[int]) -> None:
        """Set timeouts that ``GroupState`` has checked; -1 for none."""
        self._timeouts = np.array([min(timeout_ms, FURTHEST_MS) for timeout_ms in timeouts_ms], np.int64)

    def _require_conf(self, conf: str) -> None:
        if self._clock.timeout_conf != conf:
            raise InvalidRequestError(
                "the query was made with other timeouts; give it this timeoutConf",
                needed=conf,
                got=self._clock.timeout_conf,
            )

    def _mask(self, where: Values | None) -> Mask:
        if where is None:
            return np.ones(len(self), np.bool_)
        array = where if isinstance(where, pa.Array | pa.ChunkedArray) else pa.array(where, pa.bool_())
        if len(array) != len(self) or array.type != pa.bool_():
            raise InvalidRequestError(
                "a mask is one boolean for each key", keys=len(self), got=len(array), type=array.type
            )
        mask: Mask = pc.fill_null(array, False).to_numpy(zero_copy_only=False)
        return mask

    def _milliseconds(self, value: Milliseconds, mask: Mask) -> Numbers:
        if isinstance(value, int | np.integer):
            return np.full(len(self), min(int(value), FURTHEST_MS), np.int64)
        array = value if isinstance(value, pa.Array | pa.ChunkedArray) else pa.array(value)
        if pa.types.is_timestamp(array.type):
            array = self._in_milliseconds(array)
        # A null within the mask is refused, as it is not positive.
        field = pa.field("timeout", pa.int64())
        numbers: Numbers = pc.fill_null(self._fitted(field, array), 0).to_numpy()
        return numbers

    @staticmethod
    def _in_milliseconds(times: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
        if times.type.unit == "s":
            # Seconds reach further than milliseconds do.
            furthest = pa.scalar(FURTHEST_MS // 1000 + 1, pa.int64()).cast(times.type)
            times = pc.if_else(pc.greater(times, furthest), furthest, times)
        return times.cast(pa.timestamp("ms", times.type.tz), safe=False)

    def _fitted(self, field: pa.Field, values: Values) -> pa.Array:
        try:
            if not isinstance(values, pa.Array | pa.ChunkedArray):
                values = pa.array(values, field.type)
            array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
            fitted = array.cast(field.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise InvalidRequestError(
                f"values do not fit their column ({error}); nothing was changed", column=field.name, type=field.type
            ) from error
        if len(fitted) != len(self):
            raise InvalidRequestError(
                "a column has one value for each key of the call", column=field.name, keys=len(self), got=len(fitted)
            )
        return fitted

    # -- the result -----------------------------------------------------------------------------------------------

    def outcome(self) -> tuple[Mask, Mask, Numbers]:
        """Return masks of the keys to write and to remove, and when each key times out, in milliseconds (-1: never).

        Spark's rule: a key is written if its state was updated or removed, or if its timeout changed. A key with neither state nor
        a timeout is removed.
        """
        stays = self._exists | (self._timeouts != NO_TIMEOUT)
        changed = self._updated | self._removed | (self._timeouts != self._previous_timeouts)
        return stays & changed, ~stays, self._timeouts


#: ``func(keys, rows, state)``, which returns the rows to emit, or None.
BatchFunction = Callable[[pa.Table, pa.Table, StateBatch], "pa.Table | pa.RecordBatch | None"]

"""The input of a processor that is tested: columns as the user gives them, and rows as a task gets them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import Field
from coordinator.model.type_names import payload_type
from spark_jobs.functions.frames import PandasForm
from spark_jobs.functions.group_task import GroupView
from spark_jobs.functions.user_state_task import EVENT_TIME_FIELD
from spark_jobs.functions.values import RowValues
from spark_jobs.plan.keys import KeyTree, leaf_field
from spark_jobs.plan.spark_version import SPARK
from spark_jobs.transform.rows import RowForm, Rows
from spark_jobs.transform.task import InitialRows
from statefleet.testing.rows import GivenRows

__all__ = ["ProcessorInput"]

_UNITS_MS = {"millisecond": 1, "ms": 1, "second": 1000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
_DELAY = re.compile(rf"\s*(\d+)\s*({'|'.join(_UNITS_MS)})s?\s*")
#: Largest number of rows in a DataFrame, as in a session of ``start_session``.
_MAX_ROWS = 16384


class ProcessorInput:
    """The input of a processor: columns that a user gives, and those that a task gets for them.

    Attributes
    ----------
    keys, fields
        Columns of the operator's schema.
    view
        The columns as the processor sees them.
    delay_ms
        Delay of the watermark; None without one.
    """

    def __init__(
        self, columns: T.StructType, key: Sequence[str], watermark: tuple[str, str | timedelta] | None = None
    ) -> None:
        missing = [name for name in key if name not in columns.names]
        if missing or not key:
            raise InvalidRequestError(
                "a processor is grouped by columns of its rows", key=list(key), rows=columns.names
            )
        nested = [name for name in key if isinstance(columns[name].dataType, T.StructType | T.ArrayType | T.MapType)]
        if nested:
            raise InvalidRequestError(
                "a processor is tested with keys of atomic types; group by the fields", key=nested
            )
        self._columns, self._key = columns, list(key)
        self._rows, self._values = GivenRows(columns, "a row"), RowValues(columns, "a row")
        self._schema = SPARK.arrow_schema(columns)
        self._key_type = T.StructType([columns[name] for name in key])
        self.keys = tuple(
            leaf_field(T.StructField(f"k{index}", columns[name].dataType)) for index, name in enumerate(key)
        )
        payload = (Field(f"c{index}", payload_type(kind)) for index, kind in enumerate(self._schema.types))
        self.fields = (*payload, EVENT_TIME_FIELD)
        names = enumerate(columns.names)
        trees = ((name, KeyTree(leaf=field.name)) for name, field in zip(key, self.keys, strict=True))
        self.view = GroupView(tuple(trees), tuple((name, f"c{index}") for index, name in names))
        self._time = None if watermark is None else watermark[0]
        if self._time is not None and not isinstance(_type_of(columns, self._time), T.TimestampType):
            raise InvalidRequestError("the watermark is of a timestamp column of the rows", column=self._time)
        self.delay_ms = None if watermark is None else _delay_ms(watermark[1])

    def form(self, output: T.StructType, *, in_pandas: bool) -> Rows:
        """Return the conversion of rows for the processor, and of those that it emits."""
        if in_pandas:
            return PandasForm(output, "UTC", safe=False, by_name=True, max_rows=_MAX_ROWS)
        return RowForm(output, self._key_type, self._columns, _MAX_ROWS)

    def table(self, rows: Iterable[Any]) -> pa.Table:
        """Return rows as a task gets them: key leaves, columns, event time in microseconds."""
        values = [self._rows.raw(row) for row in rows]
        arrays = dict(zip(self._columns.names, self._values.arrays(values, self._schema.types), strict=True))
        times = pa.nulls(len(values), pa.int64())
        if self._time is not None:
            times = arrays[self._time].cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        keys = [_normalised(arrays[name]) for name in self._key]
        names = [field.name for field in (*self.keys, *self.fields)]
        return pa.table([*keys, *arrays.values(), times], names)

    def newest_ms(self, table: pa.Table) -> int | None:
        """Return the watermark by the rows of a batch; None if they have no event time."""
        newest_us = pc.max(table.column(EVENT_TIME_FIELD.name)).as_py()
        return None if newest_us is None or self.delay_ms is None else newest_us // 1000 - self.delay_ms

    def key_table(self, keys: Sequence[tuple[Any, ...]]) -> pa.Table:
        """Return keys of the state.

        Raises
        ------
        InvalidRequestError
            A key does not fit the columns.
        """
        values = RowValues(self._key_type, "a key")
        types = [self._schema.field(name).type for name in self._key]
        arrays = values.arrays([values.raw(key) for key in keys], types)
        return pa.table([_normalised(array) for array in arrays], [field.name for field in self.keys])

    def user_keys(self, leaves: pa.Table) -> list[tuple[Any, ...]]:
        """Return keys of the state as the processor gets them."""
        values = RowValues(self._key_type, "a key")
        return [values.shown(raw) for raw in values.tuples(leaves.itercolumns())]

    def initial(self, rows: Iterable[Any], form: Rows) -> InitialRows:
        """Return rows of an initial state."""
        table = self.table(rows).combine_chunks()
        chunks = [batch.serialize().to_pybytes() for batch in table.to_batches()]
        return InitialRows({0: SimpleNamespace(value=chunks)}, table.schema, self.view, form)


def _type_of(columns: T.StructType, name: str) -> T.DataType | None:
    return columns[name].dataType if name in columns.names else None


def _normalised(array: pa.Array) -> pa.Array:
    """Return key values as Spark groups them: 0.0 for -0.0."""
    return pc.add(array, pa.scalar(0.0, array.type)) if pa.types.is_floating(array.type) else array


def _delay_ms(delay: str | timedelta) -> int:
    if isinstance(delay, timedelta):
        return delay // timedelta(milliseconds=1)
    parsed = _DELAY.fullmatch(delay)
    if parsed is None:
        raise InvalidRequestError('a delay is a timedelta, or text such as "10 minutes"', delay=delay)
    return int(parsed[1]) * _UNITS_MS[parsed[2]]

"""Rows of keys as a processor gets and emits them, for ``transformWithState`` (Rows) and ``..InPandas`` (DataFrames)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql import types as T

from spark_jobs.functions.groups import Groups
from spark_jobs.functions.values import Raw, RowValues
from spark_jobs.plan.spark_errors import StateCallError
from spark_jobs.plan.spark_version import SPARK


class Rows(Protocol):
    """The conversion of keys and rows for a processor, and of the rows that it emits: :class:`RowForm`, or
    :class:`~spark_jobs.functions.frames.PandasForm`.
    """

    @property
    def max_rows(self) -> int:
        """Number of rows from which on emitted rows are sent."""

    def keys(self, keys: pa.Table) -> Iterator[tuple[Any, ...]]:
        """Return each key as a tuple."""

    def rows(self, groups: Groups) -> Iterator[Iterator[Any]]:
        """Return the rows of each key."""

    def checked(self, emitted: Any) -> Iterator[Any]:
        """Yield the rows that a processor returned; refuse anything else."""

    def size(self, emitted: Any) -> int:
        """Return the number of rows in an emitted piece."""

    def table(self, emitted: Sequence[Any]) -> pa.Table:
        """Return the emitted rows as Arrow columns."""


@dataclass(frozen=True)
class RowForm:
    """Rows as PySpark's ``Row``.

    Attributes
    ----------
    max_rows
        Number of rows from which on emitted rows are sent.
    """

    output: T.StructType
    key_type: T.StructType
    row_type: T.StructType
    max_rows: int

    @cached_property
    def _output_rows(self) -> RowValues:
        return RowValues(self.output, "the output", needs_names=True)

    def keys(self, keys: pa.Table) -> Iterator[tuple[Any, ...]]:
        """Return each key as a tuple."""
        values = RowValues(self.key_type, "a key")
        return map(values.shown, values.tuples(keys.itercolumns()))

    def rows(self, groups: Groups) -> Iterator[Iterator[T.Row]]:
        """Return the rows of each key."""
        values = RowValues(self.row_type, "a row")
        raw = values.tuples(groups.rows.itercolumns())
        new_row = T.Row(*self.row_type.names)
        for begin, end in zip(groups.offsets[:-1].tolist(), groups.offsets[1:].tolist(), strict=True):
            yield (new_row(*values.shown(row)) for row in raw[begin:end])

    def checked(self, emitted: Any) -> Iterator[Raw]:
        """Yield the rows that a processor returned; refuse anything else."""
        if not isinstance(emitted, Iterable) or isinstance(emitted, str | bytes | T.Row | dict):
            raise StateCallError(
                "a processor returns an iterator of Rows; yield them, or return a list", got=type(emitted).__name__
            )
        for row in emitted:
            values = tuple(row.get(name) for name in self.output.names) if isinstance(row, dict) else row
            yield self._output_rows.raw(values)

    def size(self, emitted: Raw) -> int:
        """Return 1, as each piece is a row."""
        return 1

    def table(self, emitted: Sequence[Raw]) -> pa.Table:
        """Return the emitted rows as Arrow columns."""
        schema = SPARK.arrow_schema(self.output)
        return pa.Table.from_arrays(self._output_rows.arrays(emitted, schema.types), schema=schema)

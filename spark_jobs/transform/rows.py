"""Rows of keys as a processor sees them, and what it emits, for ``transformWithState`` (Rows) and ``..InPandas`` (DataFrames)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from coordinator.model.errors import InvalidRequestError
from spark_jobs.functions.groups import Groups
from spark_jobs.functions.values import Raw, RowValues

__all__ = ["RowForm", "Rows"]


class Rows(Protocol):
    """How rows and keys are shown, and what is emitted taken; :class:`~spark_jobs.functions.frames.PandasForm` is the other one."""

    @property
    def max_rows(self) -> int:
        """Rows that are emitted together, if there are as many."""

    def keys(self, keys: pa.Table) -> Iterator[tuple[Any, ...]]:
        """Each key as a tuple."""

    def rows(self, groups: Groups) -> Iterator[Iterator[Any]]:
        """Rows of each key."""

    def checked(self, emitted: Any) -> Iterator[Any]:
        """What a processor returned, refused if it is not what it should be."""

    def size(self, emitted: Any) -> int:
        """Rows of a piece of what was emitted."""

    def table(self, emitted: Sequence[Any]) -> pa.Table:
        """Arrow columns of what was emitted."""


@dataclass(frozen=True)
class RowForm:
    """Rows as PySpark's ``Row``.

    Attributes
    ----------
    output
        Type of what is emitted.
    key_type, row_type
        Spark's types of the grouping columns and of the rows.
    max_rows
        Rows that are emitted together.
    """

    output: T.StructType
    key_type: T.StructType
    row_type: T.StructType
    max_rows: int

    @cached_property
    def _output_rows(self) -> RowValues:
        return RowValues(self.output, "the output", needs_names=True)

    def keys(self, keys: pa.Table) -> Iterator[tuple[Any, ...]]:
        """Each key as a tuple."""
        values = RowValues(self.key_type, "a key")
        return map(values.shown, values.tuples(keys.itercolumns()))

    def rows(self, groups: Groups) -> Iterator[Iterator[T.Row]]:
        """Rows of each key."""
        values = RowValues(self.row_type, "a row")
        raw = values.tuples(groups.rows.itercolumns())
        made = T.Row(*self.row_type.names)
        for begin, end in zip(groups.offsets[:-1].tolist(), groups.offsets[1:].tolist(), strict=True):
            yield (made(*values.shown(one)) for one in raw[begin:end])

    def checked(self, emitted: Any) -> Iterator[Raw]:
        """What a processor returned, refused if it is not what it should be."""
        if not isinstance(emitted, Iterable) or isinstance(emitted, str | bytes | T.Row | dict):
            raise InvalidRequestError(
                "a processor returns an iterator of Rows; yield them, or return a list", got=type(emitted).__name__
            )
        for row in emitted:
            given = tuple(row.get(name) for name in self.output.names) if isinstance(row, dict) else row
            yield self._output_rows.raw(given)

    def size(self, emitted: Raw) -> int:
        """Rows of a piece of what was emitted: one."""
        return 1

    def table(self, emitted: Sequence[Raw]) -> pa.Table:
        """Arrow columns of what was emitted."""
        schema = to_arrow_schema(self.output)
        return pa.Table.from_arrays(self._output_rows.arrays(emitted, schema.types), schema=schema)

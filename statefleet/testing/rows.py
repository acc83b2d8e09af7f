"""Rows as a test gives them: tuples in the order of the columns, dicts by their names, or Rows."""

from __future__ import annotations

from typing import Any

from pyspark.sql import types as T

from coordinator.model.errors import InvalidRequestError
from spark_jobs.functions.values import Raw, RowValues


class GivenRows:
    """Conversion of the rows of an input to tuples of Arrow's values.

    Parameters
    ----------
    columns
        Columns of the input.
    subject
        Name of its rows in errors.
    """

    def __init__(self, columns: T.StructType, subject: str) -> None:
        self._columns, self._subject = columns, subject
        self._values = RowValues(columns, subject, needs_names=True)

    def raw(self, row: Any) -> Raw:
        """Return the values of a row.

        Raises
        ------
        InvalidRequestError
            The row does not fit the columns.
        """
        raw = self._values.raw(self._ordered(row) if isinstance(row, dict) else row)
        for field, value in zip(self._columns.fields, raw, strict=True):
            # Arrow would take a number for microseconds, which a user may have meant as seconds.
            if isinstance(field.dataType, T.TimestampType) and isinstance(value, int | float):
                raise InvalidRequestError(
                    f"{self._subject} has a number for a time; give a datetime", column=field.name, got=value
                )
        return raw

    def _ordered(self, row: dict[str, Any]) -> tuple[Any, ...]:
        unknown = row.keys() - set(self._columns.names)
        if unknown:
            raise InvalidRequestError(
                f"{self._subject} has other columns than its input",
                unknown=sorted(unknown),
                columns=self._columns.names,
            )
        return tuple(row.get(name) for name in self._columns.names)

"""Filters of scans."""

from __future__ import annotations

from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from statefleet.reads.keys import key_array

#: A filter: an expression over the columns of the view, or a list that :func:`pyarrow.parquet.filters_to_expression` takes.
Filter: TypeAlias = pc.Expression | list[Any]


def column_is(field: pa.Field, value: Any) -> pc.Expression:
    """Return a filter for rows in which a column has a value; null equals null."""
    column = pc.field(field.name)
    return column.is_null() if value is None else column == key_array([value], field)[0]


def expression_of(chosen: Filter | None) -> tuple[pc.Expression | None, list[str] | None]:
    """Return a filter as an expression, and the columns that it uses if they are known."""
    if chosen is None or isinstance(chosen, pc.Expression):
        return chosen, None
    flat = [term for terms in chosen for term in (terms if isinstance(terms, list) else [terms])]
    return pq.filters_to_expression(chosen), [*dict.fromkeys(name for name, _, _ in flat)]

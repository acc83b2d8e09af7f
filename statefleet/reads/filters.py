"""Which rows a scan gives: what readers choose them by."""

from __future__ import annotations

from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from statefleet.reads.keys import key_array

__all__ = ["Filter", "column_is", "expression_of"]

#: What rows are chosen by: an expression over shown columns, or what :func:`pyarrow.parquet.filters_to_expression` takes.
Filter: TypeAlias = pc.Expression | list[Any]


def column_is(field: pa.Field, value: Any) -> pc.Expression:
    """Rows in which a column has a value; null is one like others."""
    column = pc.field(field.name)
    return column.is_null() if value is None else column == key_array([value], field)[0]


def expression_of(chosen: Filter | None) -> tuple[pc.Expression | None, list[str] | None]:
    """A filter, and the columns that it looks at if that is known."""
    if chosen is None or isinstance(chosen, pc.Expression):
        return chosen, None
    flat = [one for some in chosen for one in (some if isinstance(some, list) else [some])]
    return pq.filters_to_expression(chosen), [*dict.fromkeys(name for name, _, _ in flat)]

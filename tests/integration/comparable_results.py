"""Results as values that can be compared."""

from __future__ import annotations

import math
from typing import Any

from pyspark.sql import DataFrame, Row


def normal(rows: list[Row]) -> list[tuple[Any, ...]]:
    """Rows as comparable tuples, sorted; floats to 12 digits."""

    def value(item: Any) -> Any:
        if isinstance(item, float):
            return "nan" if math.isnan(item) else float(f"{item:.12g}")
        if isinstance(item, bytearray):
            return bytes(item)
        return tuple(value(part) for part in item) if isinstance(item, tuple) else item

    return sorted((tuple(value(item) for item in row) for row in rows), key=repr)


def facts(frame: DataFrame) -> list[tuple[Any, ...]]:
    """Names, types and nullability of the columns; metadata is Spark's own business."""
    return [(field.name, field.dataType, field.nullable) for field in frame.schema]

"""Values of state as JSON, and values of a column's type from text or JSON."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa

from coordinator.model.errors import InvalidRequestError

__all__ = ["column_json", "row_json", "typed_value"]

#: Largest integer that a browser's numbers represent exactly.
_EXACT = 2**53
#: Maximum number of characters of a text, and of items of a list, that are returned.
_TEXT = 4000
_ITEMS = 200


def column_json(field: pa.Field) -> dict[str, Any]:
    """Return a column's name and type, an example of its input unless that is text or a number, and the ``fields`` of a struct."""
    column = {"name": field.name, "type": str(field.type), "example": _example(field.type)}
    if pa.types.is_struct(field.type):
        column["fields"] = [column_json(child) for child in field.type]
    return column


def _example(kind: pa.DataType) -> str | None:
    if pa.types.is_timestamp(kind):
        return "2025-01-31 13:30:00"
    if pa.types.is_date(kind):
        return "2025-01-31"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "0x00ff"
    if pa.types.is_boolean(kind):
        return "true"
    if pa.types.is_struct(kind):
        return json.dumps({child.name: _example(child.type) or str(child.type) for child in kind})
    if _is_list(kind):
        return json.dumps([_example(kind.value_type) or str(kind.value_type)])
    return None


def row_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of state as JSON data."""
    return {name: _json(value) for name, value in row.items()}


def _json(value: Any) -> Any:
    match value:
        case None | bool():
            return value
        case int():
            return value if abs(value) <= _EXACT else str(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case str():
            return value if len(value) <= _TEXT else f"{value[:_TEXT]}… ({len(value)} characters)"
        case bytes():
            text = f"0x{value[: _TEXT // 2].hex()}"
            return text if len(value) <= _TEXT // 2 else f"{text}… ({len(value)} bytes)"
        case Mapping():
            return {str(name): _json(item) for name, item in value.items()}
        case list() | tuple():
            items = [_json(item) for item in value[:_ITEMS]]
            return items if len(value) <= _ITEMS else [*items, f"… ({len(value)} items)"]
        case _:
            # Times, dates and decimals.
            return str(value)


def typed_value(value: Any, kind: pa.DataType, column: str) -> Any:
    """Return a value of a column's type from text or JSON data; None stays null.

    Raises
    ------
    InvalidRequestError
        The value is not of the type.
    """
    try:
        return _typed(value, kind)
    except (ValueError, TypeError, KeyError, InvalidOperation, RecursionError) as error:
        example = _example(kind)
        raise InvalidRequestError(
            "this is no value of the column's type; nothing was looked up",
            column=column,
            type=str(kind),
            **({} if example is None else {"example": example}),
        ) from error


def _typed(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(kind) or _is_list(kind):
        return _nested(json.loads(value) if isinstance(value, str) else value, kind)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        if not isinstance(value, str):
            raise TypeError(value)
        return value
    text = (json.dumps(value) if isinstance(value, bool) else str(value)).strip()
    if pa.types.is_boolean(kind):
        return {"true": True, "false": False}[text.lower()]
    if pa.types.is_integer(kind):
        return int(text)
    if pa.types.is_floating(kind):
        return float(text)
    if pa.types.is_decimal(kind):
        return Decimal(text)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return bytes.fromhex(text.removeprefix("0x"))
    if pa.types.is_date(kind):
        return dt.date.fromisoformat(text)
    if pa.types.is_timestamp(kind):
        return _time(text, kind)
    raise TypeError(kind)


def _time(text: str, kind: pa.TimestampType) -> dt.datetime:
    time = dt.datetime.fromisoformat(text)
    if kind.tz is None:
        return time.replace(tzinfo=None)
    return time if time.tzinfo is not None else time.replace(tzinfo=dt.UTC)


def _nested(value: Any, kind: pa.DataType) -> Any:
    if _is_list(kind):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise TypeError(value)
        return [_typed(item, kind.value_type) for item in value]
    names = [child.name for child in kind]
    if set(value) != set(names):
        raise KeyError(*names)
    return {child.name: _typed(value[child.name], child.type) for child in kind}


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))

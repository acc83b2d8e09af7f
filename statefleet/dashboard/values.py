"""Values of state as JSON has them, and back: text that somebody typed as a value of a column's type."""

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

#: Integers that a browser's numbers hold exactly.
_EXACT = 2**53
#: Characters of a text, and items of a list, that are shown.
_TEXT = 4000
_ITEMS = 200


def column_json(field: pa.Field) -> dict[str, Any]:
    """A column's name and type, an example of what to type where that is no plain text or number, and the ``fields`` of a struct."""
    column = {"name": field.name, "type": str(field.type), "example": _example(field.type)}
    if pa.types.is_struct(field.type):
        column["fields"] = [column_json(one) for one in field.type]
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
        return json.dumps({one.name: _example(one.type) or str(one.type) for one in kind})
    if _is_list(kind):
        return json.dumps([_example(kind.value_type) or str(kind.value_type)])
    return None


def row_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of state."""
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
            shown = f"0x{value[: _TEXT // 2].hex()}"
            return shown if len(value) <= _TEXT // 2 else f"{shown}… ({len(value)} bytes)"
        case Mapping():
            return {str(name): _json(one) for name, one in value.items()}
        case list() | tuple():
            shown_items = [_json(one) for one in value[:_ITEMS]]
            return shown_items if len(value) <= _ITEMS else [*shown_items, f"… ({len(value)} items)"]
        case _:
            # Times, dates and decimals.
            return str(value)


def typed_value(given: Any, kind: pa.DataType, column: str) -> Any:
    """A value of a column's type, given as text or as JSON has it; None stays null.

    Raises
    ------
    InvalidRequestError
        It is none.
    """
    try:
        return _typed(given, kind)
    except (ValueError, TypeError, KeyError, InvalidOperation) as error:
        example = _example(kind)
        raise InvalidRequestError(
            "this is no value of the column's type; nothing was looked up",
            column=column,
            type=str(kind),
            **({} if example is None else {"example": example}),
        ) from error


def _typed(given: Any, kind: pa.DataType) -> Any:
    if given is None:
        return None
    if pa.types.is_struct(kind) or _is_list(kind):
        return _nested(json.loads(given) if isinstance(given, str) else given, kind)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        if not isinstance(given, str):
            raise TypeError(given)
        return given
    text = (json.dumps(given) if isinstance(given, bool) else str(given)).strip()
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
    moment = dt.datetime.fromisoformat(text)
    if kind.tz is None:
        return moment.replace(tzinfo=None)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)


def _nested(given: Any, kind: pa.DataType) -> Any:
    if _is_list(kind):
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise TypeError(given)
        return [_typed(one, kind.value_type) for one in given]
    names = [one.name for one in kind]
    if set(given) != set(names):
        raise KeyError(*names)
    return {one.name: _typed(given[one.name], one.type) for one in kind}


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))

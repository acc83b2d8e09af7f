"""Values of rows as JSON and as text, and keys that users type or send as JSON, with the types of their columns."""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import io
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from coordinator.model.errors import InvalidRequestError

if TYPE_CHECKING:
    import pyarrow as pa

    from statefleet.reads.state import LiveState


def plain(value: Any) -> Any:
    """Return a value for JSON: times in ISO 8601, decimals as text, bytes in base64, and numbers that JSON lacks as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return f"{value:f}" if isinstance(value, decimal.Decimal) else str(value)


def cell_text(value: object) -> str:
    """Return a value of a state's row as the text of a table's cell: numbers without separators, structs and lists as JSON."""
    if value is None:
        return "null"
    if isinstance(value, dt.datetime):
        return value.isoformat(sep=" ")
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(plain(value), ensure_ascii=False)
    return value if isinstance(value, str) else str(plain(value))


def key_of(state: LiveState, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a key by column, each value as :func:`key_value` has it.

    Raises
    ------
    InvalidRequestError
        A key column is missing or unknown; or a value is not of its type.
    """
    names, schema = state.keys, state.schema
    if set(values) != set(names):
        raise InvalidRequestError("a key has a value for each key column", keys=", ".join(names), got=", ".join(values))
    return {name: key_value(schema.field(name), values[name]) for name in names}


def key_value(field: pa.Field, value: Any) -> Any:
    """Return a value of a column's type from text or from JSON data; None stays null.

    A struct or a list is JSON: ``{"start": "2025-01-01T00:00:00Z", ..}``. A time without a zone is in UTC, the zone of Statefleet's
    sessions.

    Raises
    ------
    InvalidRequestError
        The value is not of the type.
    """
    import pyarrow as pa

    if value is None:
        return None
    try:
        if pa.types.is_nested(field.type):
            return _nested_value(field, json.loads(value) if isinstance(value, str) else value)
        if not isinstance(value, str) and (pa.types.is_string(field.type) or pa.types.is_large_string(field.type)):
            raise TypeError("a text is in quotes")
        text = value if isinstance(value, str) else json.dumps(value)
        if pa.types.is_timestamp(field.type) and field.type.tz is not None:
            when = dt.datetime.fromisoformat(text)
            return when if when.tzinfo is not None else when.replace(tzinfo=dt.UTC)
        return pa.array([text]).cast(field.type)[0].as_py()
    except (pa.ArrowException, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidRequestError(
            "a value does not fit its key column", column=field.name, type=str(field.type), cause=error
        ) from error


def _nested_value(field: pa.Field, value: Any) -> Any:
    import pyarrow as pa
    import pyarrow.json as pa_json

    # Arrow's reader takes a field that is missing for a null.
    if pa.types.is_struct(field.type) and set(value) != {child.name for child in field.type}:
        raise ValueError("it has a value for each field")
    line = json.dumps({field.name: value}).encode()
    options = pa_json.ParseOptions(explicit_schema=pa.schema([field]), unexpected_field_behavior="error")
    return pa_json.read_json(io.BytesIO(line), parse_options=options)[field.name][0].as_py()

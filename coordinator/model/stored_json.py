"""Values from the JSON of stored files, and defaults that are written there."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from coordinator.model.errors import NewerFormatError

_Value = TypeVar("_Value")


def from_json(data: Any, kind: type[_Value]) -> _Value:
    """Return the value of a type that JSON data describe.

    Raises
    ------
    NewerFormatError
        A later release wrote it: it has a kind of operator or of accumulator that this one does not know.
    ValueError
        The data describe no such value: a field is missing, or not known, or of another type.
    """
    try:
        return msgspec.convert(data, kind, str_keys=True)
    except msgspec.ValidationError as error:
        # Only the kinds of operators and of accumulators are enumerations.
        unknown = re.match("Invalid enum value '?(.*?)'? - ", str(error))
        if unknown is None:
            raise
        raise NewerFormatError(
            "a state was written by a later release of Statefleet: its schema has a kind that this one does not know; nothing was read "
            "of it and nothing was changed; use that release, or a newer one, for this state",
            kind=unknown[1],
        ) from error


def always_written(default: _Value) -> _Value:
    """Return the default of a field that is written also where it has its default: msgspec omits none that a function makes."""
    return msgspec.field(default_factory=lambda: default)

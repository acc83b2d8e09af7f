"""Stored files: values from their JSON, and the fields by which every file says what and where it is (``docs/format.md``). Pure.

A checksum proves that a file is as it was written. It does not prove that the file belongs where it is: it may have been copied or
swapped, or put back from another state, another fleet or a backup. So a file names its format, its state and its place.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from coordinator.model.errors import CorruptStateError, NewerFormatError

_Value = TypeVar("_Value")

#: Format of the files that this release reads and writes.
FORMAT = 3

#: What msgspec knows of a type is made at its first use; a thread that finds it half made ends the process by a segmentation fault.
_first_use = threading.Lock()
_used = set[Any]()


def converted(data: Any, kind: Any, **options: Any) -> Any:
    """Return what ``msgspec.convert`` returns, which raises the errors; several threads may call it at once."""
    if kind not in _used:
        with _first_use:
            msgspec.msgpack.Decoder(kind)
            _used.add(kind)
    return msgspec.convert(data, kind, **options)


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
        value: _Value = converted(data, kind, str_keys=True)
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
    return value


def always_written(default: _Value) -> _Value:
    """Return the default of a field that is written also where it has its default: msgspec omits none that a function makes."""
    return msgspec.field(default_factory=lambda: default)


def check_format(facts: Mapping[str, Any], file: str, field: str = "format") -> None:
    """Refuse a file of another format, without a look at its other fields.

    Parameters
    ----------
    field
        Name of the field with its format.

    Raises
    ------
    NewerFormatError
        A later release wrote it.
    CorruptStateError
        It has no format, or one from before the first release.
    """
    number = facts.get(field, 1)
    if isinstance(number, int) and number < FORMAT:
        raise CorruptStateError(
            "a file is not in a format that this release reads: Statefleet wrote it before its first release, or something else did; "
            "nothing was read of it and nothing was changed; go on with the commit that wrote it, or begin the state anew under "
            "another name",
            file=file,
            format=number,
            known=FORMAT,
        )
    if number != FORMAT:
        raise NewerFormatError(
            "a file was written by a later release of Statefleet, in a format that this one does not know; nothing was read of it and "
            "nothing was changed; use that release, or a newer one, for this state",
            file=file,
            format=number,
            known_up_to=FORMAT,
        )


def check_place(facts: Mapping[str, Any], expected: Mapping[str, Any], file: str) -> None:
    """Compare the fields of a file with the place where it was found.

    Parameters
    ----------
    expected
        Expected values by name; None or empty means not known, and fields that the file lacks are not compared.

    Raises
    ------
    CorruptStateError
        They differ: the file belongs to another place.
    """
    for name, value in expected.items():
        says = facts.get(name)
        if value not in (None, "") and says not in (None, "") and says != value:
            raise CorruptStateError(
                "a file is not the one that belongs in its place: it was copied or swapped, or comes from another state, another fleet "
                "or a backup; nothing was read of it and nothing was changed; restore the right file from a backup of the object store",
                file=file,
                field=name,
                says=says,
                expected=value,
            )

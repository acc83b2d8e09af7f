"""JSON objects with a checksum of their own: the form of every file of a state's log."""

from __future__ import annotations

import json
import zlib
from typing import Any

import msgspec

#: Beginning of a sealed object.
_SEALED = b'{"checksum": '


def seal(body: dict[str, Any]) -> bytes:
    """Return a JSON object as bytes. Its first field is a checksum of the bytes that it has without that field."""
    data = msgspec.json.encode(body)
    return b"%s%d, %s" % (_SEALED, zlib.crc32(data), memoryview(data)[1:])


def unseal(data: bytes) -> dict[str, Any]:
    """Return the object that :func:`seal` was given.

    Raises
    ------
    ValueError
        A byte of it has changed.
    """
    body: Any = msgspec.json.decode(data)
    checksum = body.pop("checksum", None) if isinstance(body, dict) else None
    if checksum is None or (checksum != _checksum(data) and checksum != _checksum_of_fields(body)):
        raise ValueError("the checksum differs")
    fields: dict[str, Any] = body
    return fields


def _checksum(data: bytes) -> int | None:
    """Return the checksum that a sealed object has to have, by its bytes; None if these do not begin as one."""
    end = data.find(b", ", len(_SEALED))
    return zlib.crc32(memoryview(data)[end + 2 :], zlib.crc32(b"{")) if data.startswith(_SEALED) and end > 0 else None


def _checksum_of_fields(body: dict[str, Any]) -> int:
    """Return the checksum of an object whose fields are in another order, or that was written before this form was."""
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())

"""JSON objects with a checksum of their own: the form of every file of a state's log."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["seal", "unseal"]

#: Depth down to which an object is encoded piece by piece: to the entries of a ledger.
_DEPTH = 3
#: Beginning of an object that was sealed with sorted keys.
_SEALED = b'{"checksum": '


def seal(body: dict[str, Any], *, sort_keys: bool = False) -> bytes:
    """Return a JSON object as bytes, with a checksum of all its other fields.

    Parameters
    ----------
    sort_keys
        Write the fields in the order in which the checksum takes them, and the checksum first: quicker to write, and to read.
    """
    if sort_keys and body:
        pieces = [piece.encode() for piece in _pieces(body, sort_keys=True)]
        # The first piece opens the object.
        return b"".join([_SEALED, b"%d, " % _crc(pieces), pieces[0][1:], *pieces[1:]])
    return "".join(_pieces({**body, "checksum": _checksum(body)})).encode()


def unseal(data: bytes) -> dict[str, Any]:
    """Return the object that :func:`seal` was given.

    Raises
    ------
    ValueError
        A byte of it has changed.
    """
    body: Any = json.loads(data)
    checksum = body.pop("checksum", None) if isinstance(body, dict) else None
    if checksum is None or (_sorted_checksum(data) != checksum and _checksum(body) != checksum):
        raise ValueError("the checksum differs")
    return dict(body)


def _sorted_checksum(data: bytes) -> int | None:
    """Return the checksum that a sorted object has to have, by its bytes; None if these do not begin as one."""
    end = data.find(b", ", len(_SEALED))
    return _crc([b"{", data[end + 2 :]]) if data.startswith(_SEALED) and end > 0 else None


def _checksum(body: dict[str, Any]) -> int:
    return _crc(piece.encode() for piece in _pieces(body, sort_keys=True))


def _crc(pieces: Iterable[bytes]) -> int:
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _pieces(value: Any, *, sort_keys: bool = False, depth: int = _DEPTH) -> Iterator[str]:
    """Yield the text of ``json.dumps`` in pieces: for a whole ledger at once it would hold the interpreter's lock for seconds."""
    if depth and value and isinstance(value, dict):
        items = sorted(value.items()) if sort_keys else value.items()
        for index, (key, item) in enumerate(items):
            yield f"{', ' if index else '{'}{json.dumps(key)}: "
            yield from _pieces(item, sort_keys=sort_keys, depth=depth - 1)
        yield "}"
    elif depth and value and isinstance(value, list):
        for index, item in enumerate(value):
            yield ", " if index else "["
            yield from _pieces(item, sort_keys=sort_keys, depth=depth - 1)
        yield "]"
    else:
        yield json.dumps(value, sort_keys=sort_keys)

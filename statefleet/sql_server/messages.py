"""Messages of PostgreSQL's protocol, version 3: taken from the bytes of a client, and made for it.

https://www.postgresql.org/docs/current/protocol-message-formats.html has their formats, whose names are used here.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: Codes of a first message that is not the start of a session.
CANCEL, TLS, GSS = 80877102, 80877103, 80877104
#: Version 3.0, which is spoken here.
VERSION = 3 << 16
#: Size of a first message at most, as in PostgreSQL.
_FIRST_BYTES = 10_000
_HEAD = struct.Struct("!cI")
_INT16, _INT32 = struct.Struct("!h"), struct.Struct("!i")


class ProtocolError(Exception):
    """What came is no message of the protocol, and where the next one begins is not known."""


class Reader:
    """The fields of a message, one after the other."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def int16(self) -> int:
        return self._number(_INT16)

    def int32(self) -> int:
        return self._number(_INT32)

    def _number(self, layout: struct.Struct) -> int:
        try:
            (number,) = layout.unpack_from(self._body, self._at)
        except struct.error as error:
            raise ProtocolError("a message ends too early") from error
        self._at += layout.size
        return int(number)

    def text(self) -> str:
        end = self._body.find(b"\0", self._at)
        if end < 0:
            raise ProtocolError("a text of a message has no end")
        raw, self._at = self._body[self._at : end], end + 1
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ProtocolError("a text of a message is not UTF-8") from error

    def data(self, size: int) -> bytes:
        begin, self._at = self._at, self._at + size
        if size < 0 or self._at > len(self._body):
            raise ProtocolError("a message ends too early")
        return self._body[begin : self._at]

    def int16s(self) -> list[int]:
        return [self.int16() for _ in range(self.int16())]


class Inbox:
    """What a client has sent, as messages of at most `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._data = bytearray()

    def __len__(self) -> int:
        return len(self._data)

    def feed(self, data: bytes) -> None:
        self._data += data

    def first(self) -> tuple[int, Reader] | None:
        """Return the code of a first message, and its fields; None until it is whole."""
        if len(self._data) < 8:
            return None
        size, code = struct.unpack_from("!II", self._data)
        if not 8 <= size <= _FIRST_BYTES:
            raise ProtocolError("a first message is of 8 to 10,000 bytes")
        if len(self._data) < size:
            return None
        body = bytes(self._data[8:size])
        del self._data[:size]
        return code, Reader(body)

    def next(self) -> tuple[bytes, bytes] | None:
        """Return the kind and the body of the next message; None until it is whole."""
        if len(self._data) < 5:
            return None
        kind, size = _HEAD.unpack_from(self._data)
        if not 4 <= size <= self._most_bytes:
            raise ProtocolError(f"a message is of 4 to {self._most_bytes:,} bytes; send a shorter statement")
        if len(self._data) <= size:
            return None
        body = bytes(self._data[5 : size + 1])
        del self._data[: size + 1]
        return kind, body


class Bind(NamedTuple):
    """A statement with values for its parameters, as a portal."""

    portal: str
    statement: str
    #: ``formats``, ``values``: Of each parameter: 1 if it is binary, and the bytes, or None.
    formats: list[int]
    values: list[bytes | None]
    #: The same of the result's columns: none for text, or one for all.
    result_formats: list[int]

    @classmethod
    def of(cls, body: bytes) -> Bind:
        fields = Reader(body)
        portal, statement, formats = fields.text(), fields.text(), fields.int16s()
        sizes = (fields.int32() for _ in range(fields.int16()))
        values = [None if size == -1 else fields.data(size) for size in sizes]
        if len(formats) == 1:
            formats *= len(values)
        return cls(portal, statement, formats or [0] * len(values), values, fields.int16s())


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a result, as it is described to clients."""

    name: str
    oid: int
    size: int


def message(kind: bytes, *parts: bytes) -> bytes:
    """Return a message of a kind."""
    body = b"".join(parts)
    return _HEAD.pack(kind, len(body) + 4) + body


def text(value: str) -> bytes:
    """Return a text as a field of a message."""
    return value.replace("\0", "").encode() + b"\0"


def row_description(columns: Sequence[Column], formats: Sequence[int]) -> bytes:
    fields = (
        text(column.name) + struct.pack("!IhIhih", 0, 0, column.oid, column.size, -1, binary)
        for column, binary in zip(columns, formats, strict=True)
    )
    return message(b"T", _INT16.pack(len(columns)), *fields)


def parameter_description(oids: Sequence[int]) -> bytes:
    return message(b"t", struct.pack(f"!h{len(oids)}I", len(oids), *oids))


def data_row(values: Sequence[bytes | None]) -> bytes:
    parts = [_INT16.pack(len(values))]
    for value in values:
        if value is None:
            parts.append(b"\xff\xff\xff\xff")
        else:
            parts += _INT32.pack(len(value)), value
    return message(b"D", *parts)


def complete(tag: str) -> bytes:
    return message(b"C", text(tag))


def ready(status: bytes) -> bytes:
    """Return that the next statement may come; `status` is ``I``, ``T`` in a transaction, ``E`` in one that failed."""
    return message(b"Z", status)


def failure(severity: str, code: str, reason: str) -> bytes:
    """Return an error with its SQLSTATE."""
    fields = {b"S": severity, b"V": severity, b"C": code, b"M": reason}
    return message(b"E", *(field + text(value) for field, value in fields.items()), b"\0")


def parameters(values: Mapping[str, str]) -> bytes:
    """Return what the server tells of its settings."""
    return b"".join(message(b"S", text(name), text(value)) for name, value in values.items())


def authentication(code: int) -> bytes:
    """Return 0 if a client is let in, 3 if it has to send its password as it is."""
    return message(b"R", _INT32.pack(code))


def key_data(number: int, secret: bytes) -> bytes:
    """Return what a client needs to cancel its statement."""
    return message(b"K", _INT32.pack(number), secret)


def negotiated(unknown: Sequence[str]) -> bytes:
    """Return the version that is spoken here, to a client that asked for a later one, and its options that are not known."""
    return message(b"v", struct.pack("!II", VERSION, len(unknown)), *map(text, unknown))


BIND_COMPLETE = message(b"2")
CLOSE_COMPLETE = message(b"3")
PARSE_COMPLETE = message(b"1")
NO_DATA = message(b"n")
EMPTY_QUERY = message(b"I")
SUSPENDED = message(b"s")

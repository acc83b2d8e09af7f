"""Values of states in PostgreSQL's types: what a column's type is there, and values as text, as binary, and back."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from coordinator.model.errors import InvalidRequestError
from statefleet.reads.json_values import plain

Encoder = Callable[[Any], bytes]

# Of times without a zone, too.
_EPOCH = dt.datetime(2000, 1, 1)  # noqa: DTZ001
_EPOCH_DAY = dt.date(2000, 1, 1)
_MICROSECOND = dt.timedelta(microseconds=1)
#: An element in the text of an array, in quotes or not; and the text of an array of one dimension.
_ELEMENT = re.compile(r'"((?:[^"\\]|\\.)*+)"|([^,{}"]++)', re.DOTALL)
_ARRAY = re.compile(rf"\{{(?:(?:{_ELEMENT.pattern})(?:,(?:{_ELEMENT.pattern}))*+)?+\}}", re.DOTALL)
#: What needs no quotes in the text of an array.
_PLAIN = re.compile(rb"[\w.+-]+")
_SIGN_OF = MappingProxyType({0: 0x0000, 1: 0x4000})
_NAN = 0xC000


def _number(layout: str) -> tuple[Encoder, Callable[[bytes], Any]]:
    packed = struct.Struct(layout)
    return packed.pack, lambda data: packed.unpack(data)[0]


def _float_text(value: float | np.float32) -> bytes:
    if math.isinf(value):
        return b"Infinity" if value > 0 else b"-Infinity"
    return b"NaN" if math.isnan(value) else str(value).encode()


def _time_text(value: dt.datetime) -> bytes:
    if value.tzinfo is None:
        return value.isoformat(" ").encode()
    return value.astimezone(dt.UTC).replace(tzinfo=None).isoformat(" ").encode() + b"+00"


def _time_binary(value: dt.datetime) -> bytes:
    moment = value if value.tzinfo is None else value.astimezone(dt.UTC).replace(tzinfo=None)
    return struct.pack("!q", (moment - _EPOCH) // _MICROSECOND)


def _time_from(data: bytes, zone: dt.tzinfo | None) -> dt.datetime:
    return (_EPOCH + dt.timedelta(microseconds=struct.unpack("!q", data)[0])).replace(tzinfo=zone)


def _clock_binary(value: dt.time) -> bytes:
    return struct.pack("!q", (dt.datetime.combine(_EPOCH_DAY, value) - _EPOCH) // _MICROSECOND)


def _interval(value: Any) -> tuple[int, int, int]:
    """Return an interval's months, days and microseconds."""
    if isinstance(value, dt.timedelta):
        return 0, value.days, (value - dt.timedelta(value.days)) // _MICROSECOND
    return value.months, value.days, value.nanoseconds // 1000


def _interval_text(value: Any) -> bytes:
    months, days, microseconds = _interval(value)
    sign, seconds = "-" if microseconds < 0 else "", abs(microseconds) // 10**6
    clock = f"{sign}{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{months} mons {days} days {clock}.{abs(microseconds) % 10**6:06}".encode()


def _interval_binary(value: Any) -> bytes:
    months, days, microseconds = _interval(value)
    return struct.pack("!qii", microseconds, days, months)


def _numeric_binary(value: Any) -> bytes:
    sign, digits, exponent = decimal.Decimal(value).as_tuple()
    if not isinstance(exponent, int):
        return struct.pack("!hhHh", 0, 0, _NAN, 0)
    # As a whole number of groups of four digits on both sides of the point.
    scale = max(-exponent, 0)
    text = ("".join(map(str, digits)) + "0" * max(exponent, 0)).rjust(scale, "0")
    before, after = text[: len(text) - scale], text[len(text) - scale :]
    before = before.rjust(-(-len(before) // 4) * 4, "0")
    after = after.ljust(-(-len(after) // 4) * 4, "0")
    groups = [int((before + after)[at : at + 4]) for at in range(0, len(before + after), 4)]
    return struct.pack(f"!hhHh{len(groups)}h", len(groups), len(before) // 4 - 1, _SIGN_OF[sign], scale, *groups)


def _numeric_from(data: bytes) -> decimal.Decimal:
    count, weight, sign, scale = struct.unpack_from("!hhHh", data)
    if sign not in _SIGN_OF.values():
        return decimal.Decimal("NaN")
    groups = struct.unpack_from(f"!{count}h", data, 8)
    digits = "".join(f"{group:04}" for group in groups) or "0"
    value = decimal.Decimal(f"{digits}e{4 * (weight + 1 - count)}")
    with decimal.localcontext(prec=1000):
        return (-value if sign else value).quantize(decimal.Decimal(1).scaleb(-scale))


def _json(value: Any) -> bytes:
    return json.dumps(plain(value), ensure_ascii=False).encode()


def _text(value: Any) -> bytes:
    # PostgreSQL has no text with this character.
    return (value if isinstance(value, str) else str(plain(value))).replace("\0", "").encode()


@dataclass(frozen=True, slots=True)
class PgType:
    """A type of PostgreSQL's."""

    oid: int
    name: str
    #: Bytes of a value; -1 where that differs.
    size: int
    text: Encoder
    binary: Encoder
    #: Returns the value of a parameter's binary form; None where that is not known.
    read: Callable[[bytes], Any] | None = None
    #: Returns the value of a parameter's text.
    from_text: Callable[[str], Any] = str
    #: The type of arrays of it; 0 if there is none here.
    array_oid: int = 0


def _bool_from(text: str) -> bool:
    if text.lower() not in ("t", "true", "1", "on", "yes", "f", "false", "0", "off", "no"):
        raise ValueError(text)
    return text.lower() in ("t", "true", "1", "on", "yes")


def _bytes_from(text: str) -> bytes:
    if not text.startswith("\\x"):
        raise ValueError(text)
    return bytes.fromhex(text[2:])


def _integer(oid: int, name: str, size: int, layout: str, array_oid: int) -> PgType:
    pack, unpack = _number(layout)
    return PgType(oid, name, size, lambda value: b"%d" % value, pack, unpack, int, array_oid)


_NUMERIC = PgType(
    1700, "numeric", -1, lambda value: f"{decimal.Decimal(value):f}".encode(), _numeric_binary, _numeric_from, decimal.Decimal, 1231
)  # fmt: skip
_FLOAT4 = PgType(700, "float4", 4, lambda value: _float_text(np.float32(value)), *_number("!f"), float, 1021)
_FLOAT8 = PgType(701, "float8", 8, _float_text, *_number("!d"), float, 1022)
_BOOL = PgType(16, "bool", 1, lambda value: b"t" if value else b"f", *_number("!?"), _bool_from, 1000)
_INT2, _INT4 = _integer(21, "int2", 2, "!h", 1005), _integer(23, "int4", 4, "!i", 1007)
_INT8 = _integer(20, "int8", 8, "!q", 1016)
TEXT = PgType(25, "text", -1, _text, _text, bytes.decode, str, 1009)
_BYTEA = PgType(17, "bytea", -1, lambda value: b"\\x" + value.hex().encode(), bytes, bytes, _bytes_from, 1001)
_JSON = PgType(114, "json", -1, _json, _json, bytes.decode, str, 199)
#: Arrow has a map as pairs.
_MAP = replace(_JSON, text=lambda pairs: _json(dict(pairs)), binary=lambda pairs: _json(dict(pairs)))
_DATE = PgType(
    1082, "date", 4, lambda value: value.isoformat().encode(), lambda value: struct.pack("!i", (value - _EPOCH_DAY).days),
    lambda data: _EPOCH_DAY + dt.timedelta(struct.unpack("!i", data)[0]), dt.date.fromisoformat, 1182,
)  # fmt: skip
_TIME = PgType(
    1083, "time", 8, lambda value: value.isoformat().encode(), _clock_binary, None, dt.time.fromisoformat, 1183
)
_TIMESTAMP = PgType(
    1114, "timestamp", 8, _time_text, _time_binary, partial(_time_from, zone=None), dt.datetime.fromisoformat, 1115
)
_TIMESTAMPTZ = PgType(
    1184, "timestamptz", 8, _time_text, _time_binary, partial(_time_from, zone=dt.UTC), dt.datetime.fromisoformat, 1185
)
_INTERVAL = PgType(1186, "interval", 16, _interval_text, _interval_binary, array_oid=1187)
_OID = _integer(26, "oid", 4, "!I", 1028)
#: What clients may say that a text is, besides text: unknown, varchar, bpchar, name, and nothing.
_TEXTS = (705, 1043, 1042, 19, 0)


def _array(element: PgType) -> PgType:
    """Return the type of arrays of a type, of one dimension."""

    def text(values: list[Any]) -> bytes:
        def quoted(value: Any) -> bytes:
            raw = element.text(value)
            if _PLAIN.fullmatch(raw) and raw.upper() != b"NULL":
                return raw
            return b'"' + raw.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'

        return b"{" + b",".join(b"NULL" if value is None else quoted(value) for value in values) + b"}"

    def binary(values: list[Any]) -> bytes:
        parts = [struct.pack("!iiI", bool(values), None in values, element.oid)]
        if values:
            parts.append(struct.pack("!ii", len(values), 1))
        for value in values:
            raw = None if value is None else element.binary(value)
            parts += (struct.pack("!i", -1),) if raw is None else (struct.pack("!i", len(raw)), raw)
        return b"".join(parts)

    def read(data: bytes) -> list[Any]:
        dimensions, _, oid = struct.unpack_from("!iiI", data)
        if dimensions > 1 or (of := TYPES.get(oid)) is None or of.read is None:
            raise ValueError("an array is of one dimension")
        values, at = list[Any](), 20
        for _ in range(struct.unpack_from("!i", data, 12)[0] if dimensions else 0):
            (size,) = struct.unpack_from("!i", data, at)
            values.append(None if size < 0 else of.read(data[at + 4 : at + 4 + size]))
            at += 4 + max(size, 0)
        return values

    def from_text(given: str) -> list[Any]:
        if _ARRAY.fullmatch(given) is None:
            raise ValueError("an array is of one dimension")
        values = list[Any]()
        for quoted, bare in _ELEMENT.findall(given[1:-1]):
            raw = bare or re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL)
            values.append(None if bare.upper() == "NULL" else element.from_text(raw))
        return values

    return PgType(element.array_oid, f"_{element.name}", -1, text, binary, read, from_text)


_SCALARS = (
    _BOOL, _INT2, _INT4, _INT8, _FLOAT4, _FLOAT8, _NUMERIC, TEXT, _BYTEA, _JSON, _DATE, _TIME, _TIMESTAMP, _TIMESTAMPTZ, _INTERVAL, _OID
)  # fmt: skip
#: All types by their numbers.
TYPES: Mapping[int, PgType] = MappingProxyType(
    {of.oid: of for of in _SCALARS}
    | {of.array_oid: _array(of) for of in _SCALARS}
    | dict.fromkeys(_TEXTS, TEXT)
    | {1015: _array(TEXT)}
)
_OF_ARROW = MappingProxyType(
    {
        pa.bool_(): _BOOL,
        pa.int8(): _INT2,
        pa.int16(): _INT2,
        pa.int32(): _INT4,
        pa.int64(): _INT8,
        pa.uint8(): _INT2,
        pa.uint16(): _INT4,
        pa.uint32(): _OID,
        pa.uint64(): _NUMERIC,
        pa.float32(): _FLOAT4,
        pa.float64(): _FLOAT8,
        pa.date32(): _DATE,
        pa.month_day_nano_interval(): _INTERVAL,
    }
)


def type_of(arrow: pa.DataType) -> PgType:
    """Return the type of a column for clients: structs, maps and what is within lists as JSON, what is not known as text."""
    known = _OF_ARROW.get(arrow)
    if known is not None:
        return known
    kinds = pa.types
    if kinds.is_decimal(arrow):
        return _NUMERIC
    if kinds.is_timestamp(arrow):
        return _TIMESTAMP if arrow.tz is None else _TIMESTAMPTZ
    if kinds.is_binary(arrow) or kinds.is_large_binary(arrow) or kinds.is_fixed_size_binary(arrow):
        return _BYTEA
    if kinds.is_time(arrow):
        return _TIME
    if kinds.is_duration(arrow):
        return _INTERVAL
    if kinds.is_list(arrow) or kinds.is_large_list(arrow) or kinds.is_fixed_size_list(arrow):
        element = type_of(arrow.value_type)
        return TYPES[element.array_oid] if element.array_oid and element is not _JSON else _JSON
    if kinds.is_map(arrow):
        return _MAP
    return _JSON if kinds.is_nested(arrow) else TEXT


def parameter(oid: int, is_binary: int, data: bytes | None) -> Any:
    """Return the value of a parameter.

    Raises
    ------
    InvalidRequestError
        It is of a type that is not known here, or not of its type.
    """
    if data is None:
        return None
    of = TYPES.get(oid)
    if of is None or (is_binary and of.read is None):
        raise InvalidRequestError(
            "a parameter is of a type that is not known here; send it as text, and cast it in the statement: $1::date",
            type=oid,
        )
    try:
        return of.read(data) if is_binary and of.read is not None else of.from_text(data.decode())
    except (ValueError, ArithmeticError, struct.error) as error:
        raise InvalidRequestError("a parameter is not of its type; nothing was read", type=of.name) from error

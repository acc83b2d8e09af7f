"""Spark's types of columns in DDL (``id bigint, tags array<string>``), without Spark's own parser, which needs a JVM."""

from __future__ import annotations

import re

from pyspark.sql import types as T

from coordinator.model.errors import InvalidRequestError
from spark_jobs.transform.handle import ParsedSchemas

__all__ = ["PythonSchemas", "parse_columns"]

_ATOMIC: dict[str, T.DataType] = {
    "bigint": T.LongType(),
    "binary": T.BinaryType(),
    "boolean": T.BooleanType(),
    "byte": T.ByteType(),
    "date": T.DateType(),
    "double": T.DoubleType(),
    "float": T.FloatType(),
    "int": T.IntegerType(),
    "integer": T.IntegerType(),
    "long": T.LongType(),
    "real": T.FloatType(),
    "short": T.ShortType(),
    "smallint": T.ShortType(),
    "string": T.StringType(),
    "timestamp": T.TimestampType(),
    "timestamp_ltz": T.TimestampType(),
    "timestamp_ntz": T.TimestampNTZType(),
    "tinyint": T.ByteType(),
}
_DECIMALS = ("decimal", "dec", "numeric")
_TOKEN = re.compile(r"\s*(`(?:[^`]|``)*`|'[^']*'|\w+|[<>(),:])")


class PythonSchemas(ParsedSchemas):
    """Spark's types by their DDL, parsed in Python."""

    def __missing__(self, ddl: str) -> T.DataType:
        parsed = self[ddl] = parse_columns(ddl)
        return parsed


def parse_columns(ddl: str) -> T.StructType:
    """Return the struct of columns in DDL.

    Raises
    ------
    InvalidRequestError
        It is not the DDL of columns, or has a type that this parser does not know.
    """
    return _Parser(ddl).columns()


class _Parser:
    """A parser of one text."""

    def __init__(self, ddl: str) -> None:
        self._ddl = ddl
        self._tokens: list[str] = []
        position = 0
        while rest := ddl[position:].strip():
            token = _TOKEN.match(ddl, position)
            if token is None:
                raise self._error(rest)
            self._tokens.append(token[1])
            position = token.end()

    def columns(self) -> T.StructType:
        fields = self._fields("")
        if self._tokens:
            raise self._error(self._tokens[0])
        return T.StructType(fields)

    def _fields(self, end: str) -> list[T.StructField]:
        """Return the fields up to a token, which stays; with an empty one up to the end of the text."""
        fields: list[T.StructField] = []
        while self._next() != end or not fields:
            if fields:
                self._take(",")
            name = self._take()
            if self._next() == ":":
                self._take(":")
            kind, nullable = self._type(), True
            if self._next().lower() == "not":
                self._take()
                self._take("null")
                nullable = False
            if self._next().lower() == "comment":
                self._take()
                fields.append(T.StructField(_name(name), kind, nullable, {"comment": self._take()[1:-1]}))
                continue
            fields.append(T.StructField(_name(name), kind, nullable))
        return fields

    def _type(self) -> T.DataType:
        name = self._take()
        lower = name.lower()
        if lower == "array":
            self._take("<")
            element = self._type()
            self._take(">")
            return T.ArrayType(element)
        if lower == "map":
            self._take("<")
            key = self._type()
            self._take(",")
            value = self._type()
            self._take(">")
            return T.MapType(key, value)
        if lower == "struct":
            self._take("<")
            fields = self._fields(">")
            self._take(">")
            return T.StructType(fields)
        if lower in _DECIMALS:
            return T.DecimalType(*self._numbers())
        if lower in _ATOMIC:
            return _ATOMIC[lower]
        raise self._error(name)

    def _numbers(self) -> list[int]:
        """Return the precision and scale of a decimal, as far as they are given."""
        numbers: list[int] = []
        if self._next() == "(":
            self._take("(")
            numbers.append(self._number())
            if self._next() == ",":
                self._take(",")
                numbers.append(self._number())
            self._take(")")
        return numbers

    def _number(self) -> int:
        token = self._take()
        if not token.isdecimal():
            raise self._error(token)
        return int(token)

    def _next(self) -> str:
        return self._tokens[0] if self._tokens else ""

    def _take(self, expected: str | None = None) -> str:
        token = self._next()
        if not token or (expected is not None and token.lower() != expected):
            raise self._error(token or "the end")
        return self._tokens.pop(0)

    def _error(self, token: str) -> InvalidRequestError:
        return InvalidRequestError(
            "these columns cannot be read without Spark; give them as a pyspark.sql.types.StructType",
            ddl=self._ddl,
            at=token,
        )


def _name(token: str) -> str:
    return token[1:-1].replace("``", "`") if token.startswith("`") else token

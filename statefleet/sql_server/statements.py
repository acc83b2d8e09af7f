"""What a statement of a client's is: a look-up of a key, a command of the session, or a query for DuckDB."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from coordinator.model.errors import InvalidRequestError

#: Statements of a text.
_MOST_STATEMENTS = 1000
#: Characters of a statement that may be a look-up, which is recognised while others wait.
_LONGEST_LOOK_UP = 2_000

# Atomic groups: no text takes longer to be recognised than in proportion to its length.
_NAME = r'(?>"(?:[^"]|"")++"|[A-Za-z_]\w*+)'
_COLUMN = rf"(?>{_NAME}(?:\s*+\.\s*+{_NAME}){{0,2}})"
_EQUAL = rf"(?P<column>{_COLUMN})\s*+=\s*+(?P<value>\$\d++|-?\d++|'(?:[^']|'')*+'|true\b|false\b)(?:::(?P<cast>\w++))?"
_UNNAMED = re.sub(r"\?P<\w+>", "?:", _EQUAL)
_CHOSEN = rf"(?P<chosen>{_COLUMN})(?:\s++AS\s++(?P<name>{_NAME}))?"
_UNNAMED_CHOSEN = re.sub(r"\?P<\w+>", "?:", _CHOSEN)
_LOOK_UP = re.compile(
    rf"\s*+SELECT\s++(?P<columns>\*|{_UNNAMED_CHOSEN}(?:\s*+,\s*+{_UNNAMED_CHOSEN})*+)"
    rf"\s++FROM\s++(?:(?:public|\"public\")\s*+\.\s*+)?(?P<table>{_NAME})(?:\s++(?:AS\s++)?(?P<alias>{_NAME}))??"
    rf"\s++WHERE\s++(?P<where>{_UNNAMED}(?:\s++AND\s++{_UNNAMED})*+)"
    r"(?:\s++LIMIT\s++(?P<limit>[1-9]\d{0,17}))?(?:\s++AS\s++OF\s++VERSION\s++(?P<version>\d{1,18}))?\s*+;?\s*+\Z",
    re.IGNORECASE,
)
_EACH_EQUAL, _EACH_CHOSEN = re.compile(_EQUAL, re.IGNORECASE), re.compile(_CHOSEN, re.IGNORECASE)
_EACH_NAME = re.compile(_NAME)
#: Casts of a value that leave it as it is, where its column is of such a type.
_CASTS = MappingProxyType(
    dict.fromkeys(("varchar", "text", "bpchar"), True)
    | dict.fromkeys(("integer", "int", "int2", "int4", "int8", "bigint", "smallint"), False)
)

# What is not closed ends with the text, so that nothing is gone through twice.
_PART = re.compile(
    r"""'(?:[^']|'')*+(?:'|\Z)|"(?:[^"]|"")*+(?:"|\Z)|--[^\n]*+|/\*(?:[^*]|\*(?!/))*+(?:\*/|\Z)"""
    r"""|\$(?P<tag>\w*+)\$.*?(?:\$(?P=tag)\$|\Z)|[^;'"$/-]++|[$/-]|(?P<end>;[;\s]*+)""",
    re.DOTALL,
)
_BEGINNING = re.compile(r"(?:\s|--[^\n]*(?:\n|\Z)|/\*.*?\*/|\()*+(?P<word>\w*+)(?:\s++(?P<second>\w++))?", re.DOTALL)
_SETTING = re.compile(r"SET\s++(?:(?:SESSION|LOCAL)\s++)?(?P<name>TIME\s++ZONE|[\w.]++)", re.IGNORECASE)
_TIMEOUT = re.compile(r"\s*+(?:=|TO\b)\s*+'?(?P<number>\d++)\s*+(?P<unit>ms|s|min)?+'?\s*+;?+\s*+\Z", re.IGNORECASE)
_SECONDS = MappingProxyType({"ms": 0.001, "s": 1.0, "min": 60.0})
#: Settings that clients make, and that change nothing here; but for the time of a statement.
_HARMLESS = (
    "application_name", "bytea_output", "characteristics", "client_encoding", "client_min_messages", "datestyle",
    "default_transaction_isolation", "default_transaction_read_only", "extra_float_digits", "idle_in_transaction_session_timeout",
    "intervalstyle", "jit", "lock_timeout", "names", "role", "search_path", "session", "standard_conforming_strings",
    "timezone", "transaction",
)  # fmt: skip
#: Words with which a query begins.
_QUERIES = ("select", "with", "values", "from", "table", "describe", "summarize", "show")
#: Commands of a session that change nothing here, and their answer.
_COMMANDS = MappingProxyType(
    {
        "begin": "BEGIN",
        "start": "BEGIN",
        "commit": "COMMIT",
        "end": "COMMIT",
        "rollback": "ROLLBACK",
        "abort": "ROLLBACK",
        "savepoint": "SAVEPOINT",
        "release": "RELEASE",
        "discard": "DISCARD ALL",
        "reset": "RESET",
        "deallocate": "DEALLOCATE",
        "close": "CLOSE CURSOR",
        "unlisten": "UNLISTEN",
    }
)


class ReadOnlyError(InvalidRequestError):
    """A statement that would write, or reach something else than states."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value that a column of a look-up is compared with."""

    #: As it is written; without its quotes.
    text: str
    #: Number of the parameter, from 1; 0 if there is none.
    parameter: int
    #: Whether it is in quotes, or cast to a text; None where both would do.
    is_text: bool | None


@dataclass(frozen=True, slots=True)
class PointLookUp:
    """A query for the rows of a key."""

    table: str
    #: Columns with their names in the result; None for all.
    columns: tuple[tuple[str, str], ...] | None
    #: Values by column.
    key: Mapping[str, Value]
    limit: int | None
    version: int | None


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the session."""

    #: What it is answered with: ``BEGIN``, ``SET`` and so on; ``SHOW`` for a question.
    tag: str
    #: The setting, or the prepared statement.
    name: str = ""
    #: The time that a statement is to have; 0 for any.
    seconds: float = 0.0


@lru_cache(4096)
def look_up_of(text: str) -> PointLookUp | None:
    """Return the look-up that a statement is by its form; None for another one."""
    found = _LOOK_UP.match(text) if len(text) <= _LONGEST_LOOK_UP else None
    if found is None:
        return None
    table = _unquoted(found["table"])
    if table.lower().startswith("pg_"):
        return None  # of the catalogue
    known = {table, _unquoted(found["alias"])} if found["alias"] else {table}
    columns: list[tuple[str, str]] | None = None
    if found["columns"] != "*":
        columns = []
        for each in _EACH_CHOSEN.finditer(found["columns"]):
            column = _column(each["chosen"], known)
            columns.append((column, _unquoted(each["name"]) if each["name"] else column))
    key: dict[str, Value] = {}
    for each in _EACH_EQUAL.finditer(found["where"]):
        column, value, cast = _column(each["column"], known), each["value"], (each["cast"] or "").lower()
        # A column that is compared twice, and a cast that changes the value, are for DuckDB.
        if column in key or (cast and cast not in _CASTS):
            return None
        is_quoted = value.startswith("'")
        text_of = value[1:-1].replace("''", "'") if is_quoted else value
        number = int(value[1:]) if value.startswith("$") else 0
        key[column] = Value(text_of, number, _CASTS[cast] if cast else None if number or is_quoted else False)
    if "" in key or any(column == "" for column, _ in columns or ()):
        return None
    limit, version = found["limit"], found["version"]
    return PointLookUp(
        table,
        None if columns is None else tuple(columns),
        key,
        None if limit is None else int(limit),
        None if version is None else int(version),
    )


def _unquoted(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


def _column(text: str, known: set[str]) -> str:
    """Return the name of a column, which may stand behind that of its table; empty if that is another one."""
    names: list[str] = [_unquoted(each) for each in _EACH_NAME.findall(text)]
    is_known = len(names) == 1 or (names[-2] in known and names[:-2] in ([], ["public"]))
    return names[-1] if is_known else ""


def split(text: str) -> list[str]:
    """Return the statements of a text, which are separated by semicolons; no empty ones.

    Raises
    ------
    InvalidRequestError
        They are too many.
    """
    begins, ends = [0], list[int]()
    for part in _PART.finditer(text):
        if part["end"]:
            ends.append(part.start())
            begins.append(part.end())
            if len(ends) > _MOST_STATEMENTS:
                raise InvalidRequestError(
                    f"a text is of {_MOST_STATEMENTS:,} statements at most; nothing was read; send less"
                )
    parts = [text[begin:end] for begin, end in zip(begins, [*ends, len(text)], strict=True)]
    return [part for part in parts if not is_empty(part)]


def is_empty(text: str) -> bool:
    """Return whether a text has no statement: nothing but blanks and comments."""
    beginning = _BEGINNING.match(text)
    assert beginning is not None, "it may be empty"
    return beginning.end() == len(text) and not beginning["word"]


def command_of(text: str) -> Command | None:
    """Return the command of the session that a statement is; None if it is a query.

    Raises
    ------
    ReadOnlyError
        It is neither.
    """
    beginning = _BEGINNING.match(text)
    assert beginning is not None, "it may be empty"
    word, second = beginning["word"].lower(), (beginning["second"] or "").lower()
    if word == "show" and second not in ("", "all", "tables", "databases"):
        rest = text[beginning.start("second") :].strip().rstrip(";").strip().lower()
        return Command("SHOW", " ".join(rest.split()))
    if word in _QUERIES:
        return None
    if word == "set":
        setting = _SETTING.match(text[beginning.start("word") :])
        name = "" if setting is None else setting["name"].lower()
        if setting is not None and name == "statement_timeout":
            time = _TIMEOUT.match(setting.string[setting.end() :])
            seconds = 0.0 if time is None else int(time["number"]) * _SECONDS[(time["unit"] or "ms").lower()]
            return Command("SET", name, seconds)
        if name in _HARMLESS or name.split() == ["time", "zone"]:
            return Command("SET", name)
    elif word in _COMMANDS:
        if word == "rollback" and second == "to":
            return Command("ROLLBACK", "to")
        words = text[beginning.end("word") :].rstrip("; \n").split()
        return Command(_COMMANDS[word], _unquoted(words[-1]) if words else "")
    raise ReadOnlyError(
        "states are read here and nothing else: no statement writes, reaches files or the network, or changes DuckDB's settings; "
        "nothing was changed; write a SELECT, or change the state by its query",
        statement=word.upper(),
    )

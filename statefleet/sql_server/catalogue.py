"""PostgreSQL's catalogue, which clients ask for tables, columns and types: answered by DuckDB over views of that name.

The states are the tables of the schema ``public``. What PostgreSQL has besides (indexes, roles, and so on) is there, and empty, as far
as clients ask for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from coordinator.model.errors import StateStoreError
from statefleet.reads.databases import isolated_database
from statefleet.reads.sql import Cancellation, RunningQuery, ValuesOf, explained, run_in, tables_of
from statefleet.reads.state import LiveState
from statefleet.sql_server.values import TYPES, type_of

#: Number of the first state as a table, as PostgreSQL begins with.
_FIRST_OID = 16384
#: Words of which a question to the catalogue has one.
_WORDS = re.compile(
    r"\b(?:pg_\w+|information_schema|version\s*\(|current_(?:schemas?|database|catalog|setting|user)|session_user|format_type|reg(?:class|type)"
    r"|(?:obj|col)_description|has_\w+_privilege|(?:quote|parse)_ident|set_config)",
    re.IGNORECASE,
)
_IN_CATALOGUE = r"(?:\"?pg_catalog\"?\s*+\.\s*+)?"
#: Of PostgreSQL's dialect, what DuckDB does not know, outside of literals.
_DIALECT = re.compile(
    rf"""
    (?P<literal>'(?:[^']|'')*+(?:'|\Z))(?:\s*+::\s*+{_IN_CATALOGUE}"?(?P<named>regclass|regtype)"?(?!\w))?+
    |\bOPERATOR\s*+\(\s*+{_IN_CATALOGUE}(?P<operator>[^)\s\w]++)\s*+\)
    |(?P<collation>\bCOLLATE\s++{_IN_CATALOGUE}"?(?:default|C)"?(?!\w))
    |(?<![\w.])(?P<oid>[\w.]++)\s*+::\s*+{_IN_CATALOGUE}"?regtype"?(?!\w)
    |(?P<cast>::\s*+{_IN_CATALOGUE}"?(?:reg(?:class|type|proc|procedure|role|namespace)|name|char|information_schema\.\w++)"?(?!\w))
    |(?P<cast_as>\bAS\s++{_IN_CATALOGUE}(?:regclass|name)\s*+\))
    |\bIN\s*+\(\s*+SELECT\s++CASE\b(?:(?!SELECT)[^;])*?(?P<path>\bcurrent_setting\('search_path'\)\s*+,\s*+','\s*+\)\s*+\w++\s*+\))
    |(?P<number>\btyp(?:receive|send))\s*+!=\s*+0\b
    |(?P<schema>"?\bpg_catalog\b"?\s*+\.\s*+)
    |(?P<info>"?\binformation_schema\b"?\s*+\.\s*+)
    |(?P<object>\bjson_build_object\b)
    |(?P<name>\b(?:current_catalog|current_user|session_user)\b(?!\s*+\())
    """,
    re.IGNORECASE | re.VERBOSE,
)
#: What stands for these in DuckDB's.
_REPLACED = {
    "collation": " ", "cast": "::VARCHAR", "cast_as": "AS VARCHAR)", "schema": "", "info": "info.", "object": "json_object",
    "name": "'statefleet'", "path": "IN ('public')",
}  # fmt: skip
#: Characters of a question to the catalogue at most.
_LONGEST = 50_000
_SQL_NAMES = {
    "int2": "smallint", "int4": "integer", "int8": "bigint", "float4": "real", "float8": "double precision", "bool": "boolean",
    "timestamp": "timestamp without time zone", "timestamptz": "timestamp with time zone", "time": "time without time zone",
}  # fmt: skip
#: Kinds of types, by which drivers choose how to read them.
_CATEGORIES = {"bool": "B", "text": "S", "bytea": "U", "json": "U", "interval": "T"}
_CATEGORIES |= dict.fromkeys(("date", "time", "timestamp", "timestamptz"), "D")

#: What the catalogue is made of. Drivers take numbers without a sign for PostgreSQL's oids.
_STATES = {"oid": pa.uint32(), "name": pa.string(), "columns": pa.int16()}
_COLUMNS = {
    "attrelid": pa.uint32(), "attname": pa.string(), "atttypid": pa.uint32(), "attlen": pa.int16(), "attnum": pa.int16()
}  # fmt: skip
_TYPES = {
    "oid": pa.uint32(), "typname": pa.string(), "typlen": pa.int16(), "typcategory": pa.string(), "typelem": pa.uint32(),
    "typarray": pa.uint32(), "sql_name": pa.string(),
}  # fmt: skip
_VIEWS = Path(__file__).with_name("catalogue.sql").read_text()


class States(Protocol):
    """What is served: the states of a fleet."""

    def states(self) -> list[str]: ...

    def state(self, name: str, /) -> LiveState: ...

    def table(self, name: str, /) -> LiveState: ...


class Catalogue:
    """The catalogue of a fleet's states."""

    def __init__(self, states: States) -> None:
        self._states = states

    @staticmethod
    def may_answer(text: str) -> bool:
        """Return whether a statement has a word of the catalogue. Whether its tables are the catalogue's, :meth:`running` says."""
        return len(text) <= _LONGEST and _WORDS.search(text) is not None

    @contextmanager
    def running(
        self,
        query: str,
        values_of: ValuesOf | None,
        *,
        settings: Mapping[str, str] | None = None,
        cancellation: Cancellation | None = None,
    ) -> Iterator[tuple[RunningQuery, list[pa.DataType | None]] | None]:
        """Run a query over the catalogue, and end it with the block; None if it has other tables.

        The types of its parameters come with it, where it casts them; `values_of` returns their values, None for nulls. Raises
        InvalidRequestError if the query is not valid.
        """
        cancellation, text = cancellation or Cancellation(), _DIALECT.sub(_rewritten, query)
        with isolated_database(settings or {}) as database, cancellation.watching(database), explained(query):
            names, types = tables_of(database, text)
            if not all(schema == "info" or name.startswith("pg_") for schema, name in names):
                # A query over states that has such a word.
                yield None
                return
            self._fill(database)
            given = [None] * len(types) if values_of is None else list(values_of(types))
            yield run_in(database, query, text, given, cancellation), types

    def _fill(self, database: Any) -> None:
        database.execute("CREATE SCHEMA public; CREATE SCHEMA pg; CREATE SCHEMA info; SET search_path = 'public,pg'")
        tables = dict(self._tables())
        states = [(_FIRST_OID + index, name, len(schema)) for index, (name, schema) in enumerate(tables.items())]
        columns = [
            (_FIRST_OID + index, column.name, kind.oid, kind.size, at)
            for index, schema in enumerate(tables.values())
            for at, column in enumerate(schema, start=1)
            for kind in [type_of(column.type)]
        ]
        types = []
        for oid, of in TYPES.items():
            if oid == of.oid and of.array_oid:
                category = _CATEGORIES.get(of.name, "N")
                shown = _SQL_NAMES.get(of.name, of.name)
                types.append((oid, of.name, of.size, category, 0, of.array_oid, shown))
                types.append((of.array_oid, f"_{of.name}", -1, "A", oid, 0, f"{shown}[]"))
        _create(database, "pg.states", _STATES, states)
        _create(database, "pg.state_columns", _COLUMNS, columns)
        _create(database, "pg.types", _TYPES, types)
        database.execute(_VIEWS)

    def _tables(self) -> Iterator[tuple[str, pa.Schema]]:
        """Yield the states, or their parts, with their columns; none that cannot be read."""
        for name in sorted(self._states.states()):
            with suppress(StateStoreError):
                parts = self._states.state(name).parts
                for table in [f"{name}.{part}" for part in parts] or [name]:
                    yield table, self._states.table(table).schema


def _rewritten(found: re.Match[str]) -> str:
    """Return in DuckDB's dialect what was found in PostgreSQL's."""
    kind = found.lastgroup or ""
    if found["literal"] is not None:
        return found[0] if found["named"] is None else f"to_{found['named']}({found['literal']})"
    if kind == "operator":
        return f" {found['operator']} "
    if kind == "oid":
        return f"format_type({found['oid']}, NULL)"
    return f"{found['number']} != ''" if kind == "number" else _REPLACED[kind]


def _create(database: Any, name: str, fields: Mapping[str, pa.DataType], rows: Sequence[tuple[Any, ...]]) -> None:
    arrays = [pa.array([row[index] for row in rows], of) for index, of in enumerate(fields.values())]
    database.register("given", pa.table(arrays, names=list(fields)))
    database.execute(f"CREATE TABLE {name} AS FROM given")
    database.unregister("given")

"""SQL over states, by DuckDB, which reads their rows as Arrow streams: only the columns that the query needs.

A state is a table of its name, also in the schema ``public``, where clients of PostgreSQL look for it. All of them are read as of one
moment, but for those of a version: ``FROM clicks AT (VERSION => 41)``, or ``AS OF VERSION 41`` at the end for all states of a query.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from coordinator.model.errors import InvalidRequestError, StateStoreError, StoreUnavailableError
from coordinator.runtime.extras import import_extra
from statefleet.reads.databases import isolated_database
from statefleet.reads.state import LiveState

#: How often the versions of several states are read, until two reads in a row are equal.
_LOOKS = 20
#: Type of DESCRIBE, SUMMARIZE and SHOW in DuckDB's parse tree.
_DESCRIPTION = "SHOW_REF"
#: Rows of a piece of a result.
_PIECE = 1024
#: The schemas that states are in.
_SCHEMAS = ("public", "main")
_OF_VERSION = re.compile(r"(?<!\s)\s++AS\s++OF\s++VERSION\s++(\d{1,18})\s*+;?\s*+\Z", re.IGNORECASE)

StateOf = Callable[[str], LiveState]
#: Values of a query's parameters; made of their types, where these are known.
ValuesOf = Callable[[Sequence[pa.DataType | None]], Sequence[Any]]


def answer(query: str, state_of: StateOf) -> pa.Table:
    """Return the result of a query; see :meth:`LiveFleet.sql <statefleet.reads.fleet.LiveFleet.sql>`.

    `state_of` returns the state, or the part of one, that a table name stands for.
    """
    with running(query, state_of) as result:
        return pa.Table.from_batches(result.pieces(), result.schema)


class Cancellation:
    """Ends a query from another thread: at once where DuckDB is at work, else before its next step."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._interrupt: Callable[[], None] | None = None

    def cancel(self) -> None:
        """End the query with an error. One that has ended stays as it is."""
        self.is_cancelled = True
        interrupt = self._interrupt
        if interrupt is not None:
            # The database may be closed meanwhile.
            with suppress(import_extra("duckdb").Error):
                interrupt()

    def check(self) -> None:
        """Raise an InvalidRequestError if the query was cancelled."""
        if self.is_cancelled:
            raise InvalidRequestError("the query was cancelled; nothing was changed")

    @contextmanager
    def watching(self, database: Any) -> Iterator[None]:
        """Have what runs in a database end with the query."""
        self._interrupt = database.interrupt
        try:
            yield
        finally:
            self._interrupt = None


class RunningQuery:
    """The result of a query, computed as it is asked for: DuckDB's reader gives the rows."""

    def __init__(self, query: str, reader: pa.RecordBatchReader, cancellation: Cancellation) -> None:
        self.schema: pa.Schema = reader.schema
        self._query = query
        self._reader = reader
        self._cancellation = cancellation

    def next_piece(self) -> pa.RecordBatch | None:
        """Return the next rows; None after the last ones."""
        with explained(self._query):
            self._cancellation.check()
            return next(self._reader, None)

    def pieces(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows that are left."""
        while (piece := self.next_piece()) is not None:
            yield piece


@contextmanager
def running(
    query: str,
    state_of: StateOf,
    values_of: ValuesOf | None = None,
    *,
    settings: Mapping[str, str] | None = None,
    cancellation: Cancellation | None = None,
) -> Iterator[RunningQuery]:
    """Run a query, and end it with the block. `values_of` returns the values of ``$1`` and so on; `settings` are further ones of
    DuckDB's.

    Raises InvalidRequestError as :meth:`LiveFleet.sql <statefleet.reads.fleet.LiveFleet.sql>`, or if the query was cancelled.
    """
    cancellation = cancellation or Cancellation()
    with isolated_database(settings or {}) as database, cancellation.watching(database), explained(query):
        cancellation.check()
        asked = _asked(database, query)
        states_then = _states_then(asked, state_of)
        types = _parameter_types(asked, {name: state.schema for name, state in states_then.items()})
        parameters = [] if values_of is None else list(values_of(types))
        if len(parameters) != len(types):
            raise InvalidRequestError(
                "a query is given a value for each of its parameters", parameters=len(types), values=len(parameters)
            )
        columns = (
            # DESCRIBE and the like read no column of a table, and return all names.
            {name: state.schema.names for name, state in states_then.items()}
            if any(node.get("type") == _DESCRIPTION for node in _nodes(asked.tree))
            else _columns_read(database, asked.text, parameters, states_then)
        )
        for name, state in states_then.items():
            database.register(name, state.scan(columns[name]))
        yield run_in(database, query, asked.text, parameters, cancellation)


def described(query: str, state_of: StateOf) -> tuple[list[pa.DataType | None], pa.Schema]:
    """Return the types of a query's parameters, where they are compared with a column, and the columns of its result.

    Raises
    ------
    InvalidRequestError
        As :func:`running`.
    """
    with isolated_database() as database, explained(query):
        asked = _asked(database, query)
        schemas = {name: state_of(table.state).schema for name, table in asked.tables.items()}
        for name, schema in schemas.items():
            database.register(name, schema.empty_table())
        relation = _relation(database, asked.text, [None] * asked.parameters)
        return _parameter_types(asked, schemas), relation.to_arrow_reader(1).schema


@dataclass(frozen=True, slots=True)
class _Table:
    """What a table of a query stands for: a state, and its version if that is fixed."""

    state: str
    version: int | None = None


@dataclass(frozen=True)
class _Asked:
    """A query, as DuckDB is given it, with its tables by their names in the text, and the number of its parameters."""

    text: str
    tree: Any
    tables: dict[str, _Table] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        named = [node["identifier"] for node in _nodes(self.tree) if node.get("class") == "PARAMETER"]
        if not all(name.isdigit() and len(name) < 6 for name in named):
            raise InvalidRequestError("parameters are numbered: $1, $2 to $99999", parameters=", ".join(named))
        return max(map(int, named), default=0)


def _asked(database: Any, query: str) -> _Asked:
    """Return a query with a table of its own for each version of a state."""
    tree, version = _parsed(database, query)
    tables: dict[str, _Table] = {}
    is_changed = version is not None
    for node in list(_tables(tree, frozenset())):
        table = _Table(node["table_name"], _version_of(node, version))
        name = table.state if table.version is None else f"{table.state}@{table.version}"
        tables[name] = table
        if name != table.state or node["schema_name"] in _SCHEMAS:
            is_changed = True
            node.update(
                alias=node["alias"] or table.state,
                schema_name="",
                catalog_name="",
                table_name=name,
                at_clause=None,
                qualified_name={"path": [name]},
            )
    if not is_changed:
        return _Asked(query, tree, tables)
    for node in _nodes(tree):
        names = node.get("column_names", [])
        if node.get("class") == "COLUMN_REF" and len(names) > 2 and names[0] in _SCHEMAS:
            del names[0]
    text = database.execute("SELECT json_deserialize_sql(?::JSON)", [json.dumps(tree)]).fetchall()[0][0]
    return _Asked(text, tree, tables)


def _version_of(node: Mapping[str, Any], version: int | None) -> int | None:
    """Return the version of a table that is named behind it, or else for the whole query."""
    clause = node.get("at_clause")
    if not clause:
        return version
    literal = clause["expr"].get("literal", {}).get("text", "")
    if clause["unit"].upper() != "VERSION" or not literal.isdigit():
        raise InvalidRequestError("a state is read at a version: AT (VERSION => 41)", table=node["table_name"])
    return int(literal)


def _states_then(asked: _Asked, state_of: StateOf) -> dict[str, LiveState]:
    """Return the states of a query, by their names in it: at the versions that it says, and the others as of one moment."""
    states = {name: state_of(table.state) for name, table in sorted(asked.tables.items())}
    newest = {name: state for name, state in states.items() if asked.tables[name].version is None}
    versions = _one_moment(newest) | {
        name: table.version for name, table in asked.tables.items() if table.version is not None
    }
    return {name: state.at(versions[name]) for name, state in states.items()}


#: Types of casts by their names.
_CAST_TYPES = MappingProxyType(
    dict.fromkeys(("boolean", "bool"), pa.bool_())
    | dict.fromkeys(("smallint", "int2"), pa.int16())
    | dict.fromkeys(("integer", "int", "int4"), pa.int32())
    | dict.fromkeys(("bigint", "int8"), pa.int64())
    | dict.fromkeys(("real", "float4"), pa.float32())
    | dict.fromkeys(("double", "float8"), pa.float64())
    | dict.fromkeys(("varchar", "text", "bpchar"), pa.string())
    | dict.fromkeys(("timestamptz", "timestamp with time zone"), pa.timestamp("us", "UTC"))
    | {
        "oid": pa.uint32(),
        "date": pa.date32(),
        "timestamp": pa.timestamp("us"),
        "bytea": pa.binary(),
        "blob": pa.binary(),
    }
)


def _parameter_types(asked: _Asked, schemas: Mapping[str, pa.Schema]) -> list[pa.DataType | None]:
    """Return the type of each parameter: what it is cast to, or that of all columns of the name that it is compared with."""
    types: list[pa.DataType | None] = [None] * asked.parameters
    of_columns: dict[str, set[pa.DataType]] = {}
    for schema in schemas.values():
        for column in schema:
            of_columns.setdefault(column.name.lower(), set()).add(column.type)

    def note(nodes: Sequence[Any], of: pa.DataType | None) -> None:
        for node in nodes:
            if isinstance(node, dict) and node.get("class") == "PARAMETER" and of is not None:
                types[int(node["identifier"]) - 1] = of

    for node in _nodes(asked.tree):
        of = _compared_type(node, of_columns)
        if node.get("class") == "CAST":
            note([node["child"]], _cast_type(node["type_expr"]))
        elif node.get("type") == "LIMIT_MODIFIER":
            note([node["limit"], node["offset"]], pa.int64())
        elif node.get("subquery_type") == "ANY" and of is not None:
            # ``= ANY($1)``
            for function in _nodes(node["subquery"]):
                if function.get("function_name") == "unnest":
                    note([argument["expression"] for argument in function["arguments"]], pa.list_(of))
        elif of is not None:
            note(_compared(node), of)
    return types


def _compared(node: Mapping[str, Any]) -> list[Any]:
    """Return what a node of a parse tree compares with each other."""
    if node.get("type") in ("COMPARE_IN", "COMPARE_NOT_IN"):
        return list(node["children"])
    names = ("left", "right") if node.get("class") == "COMPARISON" else ("input", "lower", "upper", "child")
    return [node[name] for name in names if isinstance(node.get(name), dict)]


def _compared_type(node: Mapping[str, Any], of_columns: Mapping[str, set[pa.DataType]]) -> pa.DataType | None:
    """Return the type of the column that a node compares others with; None if there is none, or several columns have its name."""
    if node.get("class") not in ("COMPARISON", "BETWEEN", "SUBQUERY", "OPERATOR"):
        return None
    columns = [each for each in _compared(node) if each.get("class") == "COLUMN_REF"]
    of = of_columns.get(columns[0]["column_names"][-1].lower(), set()) if columns else set()
    return next(iter(of)) if len(of) == 1 else None


def _cast_type(described: Mapping[str, Any]) -> pa.DataType | None:
    """Return the type of a cast in a parse tree; None if it is none of the usual ones."""
    name, within = described.get("type_name", "").lower(), described.get("children", [])
    if name == "list" and len(within) == 1:
        element = _cast_type(within[0])
        return None if element is None else pa.list_(element)
    return _CAST_TYPES.get(name)


def _relation(database: Any, text: str, parameters: Sequence[Any]) -> Any:
    return database.sql(text, params=list(parameters)) if parameters else database.sql(text)


def tables_of(database: Any, query: str) -> tuple[set[tuple[str, str]], list[pa.DataType | None]]:
    """Return the schemas and names of a query's tables, and the types of its parameters where it casts them.

    Raises
    ------
    InvalidRequestError
        It is no query.
    """
    tree, _ = _parsed(database, query)
    tables = {(node["schema_name"], node["table_name"]) for node in _tables(tree, frozenset())}
    return tables, _parameter_types(_Asked(query, tree), {})


def run_in(database: Any, query: str, text: str, parameters: Sequence[Any], cancellation: Cancellation) -> RunningQuery:
    """Run a query in a database that has its tables; `text` is the query as the database is given it."""
    # No later change to a setting is possible.
    database.execute("SET lock_configuration = true")
    cancellation.check()
    relation = _relation(database, text, parameters)
    return RunningQuery(query, relation.to_arrow_reader(_PIECE), cancellation)


@contextmanager
def explained(query: str) -> Iterator[None]:
    """Raise DuckDB's errors as errors that say what to do."""
    duckdb = import_extra("duckdb")
    try:
        yield
    except duckdb.PermissionException as error:
        raise InvalidRequestError(
            "SQL over states reads states and nothing else: files, the network and extensions are out of its reach; nothing was "
            "read; export the state's rows (to_arrow, statefleet export), and query them with a database of your own",
            query=query,
            cause=_reason(error),
        ) from error
    except (duckdb.Error, pa.ArrowException) as error:
        raise _error_within(error) or InvalidRequestError(
            "the query cannot be answered; a state is a table of its name, a part of one is written in quotes with a dot",
            query=query,
            cause=_reason(error),
        ) from error


def _one_moment(states: Mapping[str, LiveState]) -> dict[str, int]:
    """Return a version of each state, such that all of them were the newest at one moment.

    Raises
    ------
    StoreUnavailableError
        Batches end faster than the versions can be read.
    """
    versions = {name: state.version for name, state in states.items()}
    for _ in range(_LOOKS if len(states) > 1 else 0):
        again = {name: state.version for name, state in states.items()}
        if again == versions:
            return versions
        versions = again
    if len(states) > 1:
        raise StoreUnavailableError(
            "batches end faster than the states of the query can be looked at together; nothing was changed; ask again, or read "
            "each by itself at a version: fleet.state(name).at(version)",
            states=", ".join(states),
        )
    return versions


def _parsed(database: Any, query: str) -> tuple[Any, int | None]:
    """Return the parse tree of a query, as DuckDB serializes it to JSON, and the version of its states if it ends with one.

    Raises
    ------
    InvalidRequestError
        The text is not exactly one query, or the query lists all tables: only the tables that a query names exist.
    """

    def tree_of(text: str) -> Any:
        return json.loads(database.execute("SELECT json_serialize_sql(?::VARCHAR)", [text]).fetchall()[0][0])

    tree, version = tree_of(query), None
    # In a comment or in quotes these words mean nothing, and the text is a query with them.
    if tree["error"] and (of_version := _OF_VERSION.search(query)) is not None:
        tree, version = tree_of(query[: of_version.start()]), int(of_version[1])
    if tree["error"] or len(tree["statements"]) != 1:
        raise InvalidRequestError(
            "this is no query of SQL (one SELECT, which may begin with WITH)",
            query=query,
            error=tree.get("error_message", ""),
        )
    if any(node.get("type") == _DESCRIPTION and node["table_name"] for node in _nodes(tree)):
        raise InvalidRequestError(
            "SHOW knows no states; `describe` and a state's name tell its columns, fleet.states() and `statefleet status` which "
            "states there are",
            query=query,
        )
    return tree, version


def _tables(tree: Any, with_names: frozenset[str]) -> Iterator[dict[str, Any]]:
    """Yield the nodes of the tables that a part of a query reads.

    WITH defines the names in `with_names`, in lower case, for the part, in it or around it, as far as they come before.
    """
    if not isinstance(tree, dict):
        for child in tree if isinstance(tree, list) else ():
            yield from _tables(child, with_names)
        return
    if tree.get("type") == "BASE_TABLE" and tree["table_name"].lower() not in with_names:
        yield tree
    if tree.get("type") == "RECURSIVE_CTE_NODE":
        with_names |= {tree["cte_name"].lower()}
    for definition in tree.get("cte_map", {}).get("map", ()):
        yield from _tables(definition["value"], with_names)
        with_names |= {definition["key"].lower()}
    for key, child in tree.items():
        if key != "cte_map":
            yield from _tables(child, with_names)


def _columns_read(
    database: Any, query: str, parameters: Sequence[Any], states: Mapping[str, LiveState]
) -> dict[str, list[str]]:
    """Return the columns of each state that a query may read, according to its plan over empty tables."""
    # The other optimizers remove parts of the plan that have no rows, with their tables, whose columns the query still names.
    optimizers = database.execute("SELECT name FROM duckdb_optimizers() WHERE name <> 'unused_columns'").fetchall()
    database.execute(f"SET disabled_optimizers = '{','.join(name for (name,) in optimizers)}'")
    schemas = {name: state.schema for name, state in states.items()}
    for name, schema in schemas.items():
        database.register(name, schema.empty_table())
    plan = json.loads(_relation(database, f"EXPLAIN (FORMAT json) {query}", parameters).fetchall()[0][1])
    database.execute("RESET disabled_optimizers")
    read: set[str] = set()
    for node in _nodes(plan):
        if "ARROW" in str(node.get("name")):
            columns = node["extra_info"].get("Projections", [])
            # The plan does not name the table.
            read.update([columns] if isinstance(columns, str) else columns)
    # Counting rows needs some column of them.
    chosen = {
        name: [column for column in schema.names if column in read] or schema.names[:1]
        for name, schema in schemas.items()
    }
    whole = _result_columns(database, query, parameters)
    for name, schema in schemas.items():
        database.register(name, schema.empty_table().select(chosen[name]))
    # A query may name columns that its plan does not need, and have another meaning without them.
    is_enough = _result_columns(database, query, parameters) == whole
    return chosen if is_enough else {name: schema.names for name, schema in schemas.items()}


def _result_columns(database: Any, query: str, parameters: Sequence[Any]) -> list[tuple[str, str]] | None:
    """Return the names and types of a query's columns; None if the query does not fit the tables."""
    duckdb = import_extra("duckdb")
    try:
        relation = _relation(database, query, parameters)
    except duckdb.Error:
        return None
    return list(zip(relation.columns, map(str, relation.types), strict=True))


def _nodes(data: Any) -> Iterator[dict[str, Any]]:
    if isinstance(data, dict):
        yield data
    for child in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from _nodes(child)


def _reason(error: Exception) -> str:
    """Return DuckDB's message without the line of the query, which is not quite the one that was given."""
    return str(error).partition("\n\nLINE ")[0]


def _error_within(error: BaseException) -> StateStoreError | None:
    """Return the error of a read that DuckDB raised as an error of its own; None if there is none."""
    within: BaseException | None = error
    while within is not None and not isinstance(within, StateStoreError):
        within = within.__cause__ or within.__context__
    return within

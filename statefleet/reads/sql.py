"""SQL over states, by DuckDB, which reads their rows as Arrow streams: only the columns that the query needs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
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


def answer(query: str, state_of: Callable[[str], LiveState]) -> pa.Table:
    """Return the result of a query; see :meth:`LiveFleet.sql <statefleet.reads.fleet.LiveFleet.sql>`.

    Parameters
    ----------
    state_of
        Returns the state, or the part of one, that a table name stands for.
    """
    # Imported here, since most readers do not need it.
    duckdb = import_extra("duckdb")
    with isolated_database() as database:
        try:
            tree = _parsed(database, query)
            states = {name: state_of(name) for name in sorted(set(_tables(tree, frozenset())))}
            versions = _one_moment(states)
            states_then = {name: state.at(versions[name]) for name, state in states.items()}
            columns = (
                # DESCRIBE and the like read no column of a table, and return all names.
                {name: state.schema.names for name, state in states_then.items()}
                if any(node.get("type") == _DESCRIPTION for node in _nodes(tree))
                else _columns_read(database, query, states_then)
            )
            # No later change to a setting is possible.
            database.execute("SET lock_configuration = true")
            for name, state in states_then.items():
                database.register(name, state.scan(columns[name]))
            return database.sql(query).to_arrow_table()
        except duckdb.PermissionException as error:
            raise InvalidRequestError(
                "SQL over states reads states and nothing else: files, the network and extensions are out of its reach; nothing was "
                "read; export the state's rows (to_arrow, statefleet export), and query them with a database of your own",
                query=query,
                cause=_reason(error),
            ) from error
        except duckdb.Error as error:
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


def _parsed(database: Any, query: str) -> Any:
    """Return the parse tree of a query, as DuckDB serializes it to JSON.

    Raises
    ------
    InvalidRequestError
        The text is not exactly one query, or the query lists all tables: only the tables that a query names exist.
    """
    tree = json.loads(database.execute("SELECT json_serialize_sql(?::VARCHAR)", [query]).fetchall()[0][0])
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
    return tree


def _tables(tree: Any, with_names: frozenset[str]) -> Iterator[str]:
    """Yield the names of the tables that a part of a query reads.

    Parameters
    ----------
    with_names
        Names, in lower case, that WITH defines for the part, in it or around it, as far as they come before.
    """
    if not isinstance(tree, dict):
        for child in tree if isinstance(tree, list) else ():
            yield from _tables(child, with_names)
        return
    if tree.get("type") == "BASE_TABLE" and tree["table_name"].lower() not in with_names:
        yield tree["table_name"]
    if tree.get("type") == "RECURSIVE_CTE_NODE":
        with_names |= {tree["cte_name"].lower()}
    for definition in tree.get("cte_map", {}).get("map", ()):
        yield from _tables(definition["value"], with_names)
        with_names |= {definition["key"].lower()}
    for key, child in tree.items():
        if key != "cte_map":
            yield from _tables(child, with_names)


def _columns_read(database: Any, query: str, states: Mapping[str, LiveState]) -> dict[str, list[str]]:
    """Return the columns of each state that a query may read, according to its plan over empty tables."""
    # The other optimizers remove parts of the plan that have no rows, with their tables, whose columns the query still names.
    optimizers = database.execute("SELECT name FROM duckdb_optimizers() WHERE name <> 'unused_columns'").fetchall()
    database.execute(f"SET disabled_optimizers = '{','.join(name for (name,) in optimizers)}'")
    schemas = {name: state.schema for name, state in states.items()}
    for name, schema in schemas.items():
        database.register(name, schema.empty_table())
    plan = json.loads(database.sql(f"EXPLAIN (FORMAT json) {query}").fetchall()[0][1])
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
    whole = _result_columns(database, query)
    for name, schema in schemas.items():
        database.register(name, schema.empty_table().select(chosen[name]))
    # A query may name columns that its plan does not need, and have another meaning without them.
    is_enough = _result_columns(database, query) == whole
    return chosen if is_enough else {name: schema.names for name, schema in schemas.items()}


def _result_columns(database: Any, query: str) -> list[tuple[str, str]] | None:
    """Return the names and types of a query's columns; None if the query does not fit the tables."""
    duckdb = import_extra("duckdb")
    try:
        relation = database.sql(query)
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

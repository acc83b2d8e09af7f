"""SQL over states, by DuckDB: it reads their rows as Arrow streams, only the columns that the query looks at."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import pyarrow as pa

from coordinator.model.errors import InvalidRequestError, StateStoreError, StoreUnavailableError
from statefleet.reads.databases import isolated_database, lock_settings
from statefleet.reads.state import LiveState

__all__ = ["answer"]

#: How often the versions of several states are looked at until nothing changes in between.
_LOOKS = 20
#: What DESCRIBE, SUMMARIZE and SHOW are to DuckDB's parser.
_DESCRIPTION = "SHOW_REF"


class States(Protocol):
    """A fleet's states."""

    def states(self) -> list[str]:
        """Names of all states."""

    def state(self, name: str, part: str = "") -> LiveState:
        """See :meth:`LiveFleet.state <statefleet.reads.fleet.LiveFleet.state>`."""


def answer(query: str, fleet: States) -> pa.Table:
    """See :meth:`LiveFleet.sql <statefleet.reads.fleet.LiveFleet.sql>`."""
    # Late: most readers have no need of it.
    import duckdb

    with isolated_database() as database:
        try:
            told = _parsed(database, query)
            states = {name: _state_of(fleet, name) for name in sorted(set(_tables(told, frozenset())))}
            versions = _one_moment(states)
            pinned = {name: state.at(versions[name]) for name, state in states.items()}
            columns = (
                # What describes a table reads no column of it, and tells all.
                {name: state.schema.names for name, state in pinned.items()}
                if any(node.get("type") == _DESCRIPTION for node in _nodes(told))
                else _columns_read(database, query, pinned)
            )
            lock_settings(database)
            for name, state in pinned.items():
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


def _state_of(fleet: States, table: str) -> LiveState:
    """The state, or the part of one, that a table is named after; names of states may have dots, too."""
    if "." not in table or table in fleet.states():
        return fleet.state(table)
    return fleet.state(*table.split(".", 1))


def _one_moment(states: Mapping[str, LiveState]) -> dict[str, int]:
    """A version of each state, such that all of them were the newest at some moment.

    Raises
    ------
    StoreUnavailableError
        Batches end faster than the states can be looked at.
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
    """A query as DuckDB's parser has it.

    Raises
    ------
    InvalidRequestError
        It is no query, or not only one, or it asks which tables there are: those are only the ones that a query names.
    """
    told = json.loads(database.execute("SELECT json_serialize_sql(?::VARCHAR)", [query]).fetchall()[0][0])
    if told["error"] or len(told["statements"]) != 1:
        raise InvalidRequestError(
            "this is no query of SQL (one SELECT, which may begin with WITH)",
            query=query,
            error=told.get("error_message", ""),
        )
    if any(node.get("type") == _DESCRIPTION and node["table_name"] for node in _nodes(told)):
        raise InvalidRequestError(
            "SHOW knows no states; `describe` and a state's name tell its columns, fleet.states() and `statefleet status` which "
            "states there are",
            query=query,
        )
    return told


def _tables(told: Any, own: frozenset[str]) -> Iterator[str]:
    """Names of the tables that a part of a query reads.

    Parameters
    ----------
    own
        Names, in small letters, that WITH gives to queries there: those of it and of what is around it, so far as they come before.
    """
    if not isinstance(told, dict):
        for one in told if isinstance(told, list) else ():
            yield from _tables(one, own)
        return
    if told.get("type") == "BASE_TABLE" and told["table_name"].lower() not in own:
        yield told["table_name"]
    if told.get("type") == "RECURSIVE_CTE_NODE":
        own |= {told["cte_name"].lower()}
    for one in told.get("cte_map", {}).get("map", ()):
        yield from _tables(one["value"], own)
        own |= {one["key"].lower()}
    for key, one in told.items():
        if key != "cte_map":
            yield from _tables(one, own)


def _columns_read(database: Any, query: str, states: Mapping[str, LiveState]) -> dict[str, list[str]]:
    """Columns that a query may read of each state, as its plan over empty tables says."""
    # By the others a part of the plan goes that can have no rows, with the tables in it; the query itself names their columns yet.
    others = database.execute("SELECT name FROM duckdb_optimizers() WHERE name <> 'unused_columns'").fetchall()
    database.execute(f"SET disabled_optimizers = '{','.join(name for (name,) in others)}'")
    schemas = {name: state.schema for name, state in states.items()}
    for name, schema in schemas.items():
        database.register(name, schema.empty_table())
    plan = json.loads(database.sql(f"EXPLAIN (FORMAT json) {query}").fetchall()[0][1])
    database.execute("RESET disabled_optimizers")
    read: set[str] = set()
    for node in _nodes(plan):
        if "ARROW" in str(node.get("name")):
            columns = node["extra_info"].get("Projections", [])
            # The plan does not say of which table.
            read.update([columns] if isinstance(columns, str) else columns)
    # To count rows one needs some column of them.
    chosen = {
        name: [one for one in schema.names if one in read] or schema.names[:1] for name, schema in schemas.items()
    }
    whole = _result_columns(database, query)
    for name, schema in schemas.items():
        database.register(name, schema.empty_table().select(chosen[name]))
    # A query may name columns that its plan does not need, and mean something else without them.
    is_enough = _result_columns(database, query) == whole
    return chosen if is_enough else {name: schema.names for name, schema in schemas.items()}


def _result_columns(database: Any, query: str) -> list[tuple[str, str]] | None:
    """Names and types of what a query gives; None if it does not fit the tables that are there."""
    import duckdb

    try:
        relation = database.sql(query)
    except duckdb.Error:
        return None
    return list(zip(relation.columns, map(str, relation.types), strict=True))


def _nodes(told: Any) -> Iterator[dict[str, Any]]:
    """All objects within JSON data."""
    if isinstance(told, dict):
        yield told
    for one in told.values() if isinstance(told, dict) else told if isinstance(told, list) else ():
        yield from _nodes(one)


def _reason(error: Exception) -> str:
    """DuckDB's words without the line of the query, which is not quite the one that was asked."""
    return str(error).partition("\n\nLINE ")[0]


def _error_within(error: BaseException) -> StateStoreError | None:
    """The error of a read that DuckDB tells in its own words."""
    within: BaseException | None = error
    while within is not None and not isinstance(within, StateStoreError):
        within = within.__cause__ or within.__context__
    return within

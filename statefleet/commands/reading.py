"""Commands that read state: ``get``, ``scan``, ``sql``, ``versions``, ``changes``, ``diff``, ``export``.

Each reads beside a running fleet's batches, or with ``--offline`` from the object store alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import structs

from coordinator.model.errors import InvalidRequestError
from statefleet.commands.options import (
    Address,
    AsJson,
    Columns,
    Consistency,
    Offline,
    Part,
    ReadConsistency,
    State,
    Uri,
    Version,
    column_names,
    open_states,
)
from statefleet.commands.output import (
    ago_text,
    print_json,
    print_records,
    print_table,
    print_text,
    progress,
    size_cell,
    time_text,
)
from statefleet.reads.json_values import key_of

if TYPE_CHECKING:
    import pyarrow as pa

    from statefleet.reads.fleet import LiveFleet
    from statefleet.reads.state import LiveState


Limit = Annotated[int, typer.Option(min=0, help="most rows to show")]

#: Name of the state in the query that a condition becomes: its own name may have another meaning in SQL.
_SCANNED = "scanned"


def get(
    uri: Uri,
    state: State,
    key: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="a value for each key column")] = None,
    null: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="a key column whose value is null; may be repeated")
    ] = None,
    part: Part = "",
    version: Version = None,
    columns: Columns = None,
    consistency: ReadConsistency = Consistency.FINISHED,
    offline: Offline = False,
    address: Address = "auto",
    as_json: AsJson = False,
) -> None:
    """Rows of a key.

    Exit code 1 if there is none.

    A key column that is a struct, such as a window, takes JSON: window='{"start": "2025-01-01T00:00:00Z", ..}'.
    """
    read = _state(open_states(uri, address, offline=offline), state, part, version, consistency)
    rows = read.get_all(_key(read, key or [], null or []), columns=column_names(columns))
    if as_json:
        print_json(rows)
    elif rows:
        print_records(list(rows[0]), rows)
    else:
        print_text("there is no row of this key")
    if not rows:
        raise typer.Exit(1)


def scan(
    uri: Uri,
    state: State,
    where: Annotated[str | None, typer.Option(metavar="SQL", help='only rows for which this is true: "n > 5"')] = None,
    limit: Annotated[int, typer.Option(min=0, help="most rows to show; `export` gives all")] = 20,
    part: Part = "",
    version: Version = None,
    columns: Columns = None,
    consistency: ReadConsistency = Consistency.FINISHED,
    offline: Offline = False,
    address: Address = "auto",
    as_json: AsJson = False,
) -> None:
    """Rows of a state, in no particular order."""
    fleet = open_states(uri, address, offline=offline)
    read = _state(fleet, state, part, version, consistency)
    names = column_names(columns)
    rows = read.scan(names, limit=limit).to_arrow() if where is None else _filtered(read, where, names, limit)
    _print_rows(rows, as_json, limit)


def sql(
    uri: Uri,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="one SELECT, as DuckDB has it")],
    consistency: ReadConsistency = Consistency.FINISHED,
    offline: Offline = False,
    address: Address = "auto",
    as_json: AsJson = False,
) -> None:
    """Answer of a query of SQL over states.

    All of them are read as they were at one moment. A state is a table of its name; a
    part of one is written with a dot, in quotes: "orders.left".
    """
    _print_rows(open_states(uri, address, offline=offline).sql(query, consistency=consistency), as_json)


def versions(
    uri: Uri,
    state: State,
    limit: Annotated[int, typer.Option(min=1, help="how many of the newest ones")] = 20,
    consistency: ReadConsistency = Consistency.FINISHED,
    offline: Offline = False,
    address: Address = "auto",
    as_json: AsJson = False,
) -> None:
    """Versions that can be read, newest first.

    Of each: when its last shard was committed, rows and memory of the shards then, rows of its batch, late ones, bytes written.
    """
    history = open_states(uri, address, offline=offline).state(state, consistency=consistency).history(limit)
    if as_json:
        print_json([structs.asdict(version) for version in history])
        return
    print_table(
        ("version", "committed", "", "shards", "rows", "memory", "rows in", "late", "written"),
        [
            (
                str(version.version),
                time_text(version.committed_at_ms),
                ago_text(version.committed_at_ms),
                version.num_shards,
                version.state_rows,
                size_cell(version.state_bytes),
                version.rows_in,
                version.rows_late,
                size_cell(version.written_bytes),
            )
            for version in history
        ],
    )


def changes(
    uri: Uri,
    state: State,
    since: Annotated[
        str,
        typer.Argument(metavar="SINCE", help="what commits after this version did, or the position of the last call"),
    ],
    until: Annotated[
        int | None, typer.Argument(metavar="[UNTIL]", help="up to this one; the newest by default")
    ] = None,
    part: Part = "",
    columns: Columns = None,
    limit: Limit = 20,
    consistency: ReadConsistency = Consistency.FINISHED,
    offline: Offline = False,
    address: Address = "auto",
    as_json: AsJson = False,
) -> None:
    """Rows that commits wrote or removed.

    Each as its commit left it, or as it was before it was removed, with what was done to it, by which version, and when. Shard
    by shard; of a shard in the order of its commits. If those are all that there are, a position follows on standard error: a call
    that is given it goes on there, and says so if what it was told before has been replaced.
    """
    read = _state(open_states(uri, address, offline=offline), state, part, None, consistency)
    # One more row than is printed shows whether there are more.
    rows = read.changes(since, until, columns=column_names(columns), limit=limit + 1)
    table = rows.to_arrow()
    is_whole = table.num_rows <= limit
    _print_rows(table.slice(0, limit), as_json, None if is_whole else limit)
    if is_whole:
        print_text(f"position {rows.position}: give it as SINCE to go on from here", aside=True)


def diff(
    uri: Uri,
    state: State,
    before: Annotated[int, typer.Argument(metavar="BEFORE", help="a version")],
    after: Annotated[int | None, typer.Argument(metavar="[AFTER]", help="another one; the newest by default")] = None,
    part: Part = "",
    limit: Limit = 20,
    consistency: ReadConsistency = Consistency.FINISHED,
    offline: Offline = False,
    address: Address = "auto",
    as_json: AsJson = False,
) -> None:
    """Rows that only one of two versions has.

    Rows of the first are shown as `delete`, rows of the other as `insert`; a row that changed is there twice.
    """
    read = _state(open_states(uri, address, offline=offline), state, part, None, consistency)
    _print_rows(read.diff(before, after, limit=limit), as_json, limit)


def export(
    uri: Uri,
    state: State,
    target: Annotated[
        Path,
        typer.Argument(metavar="TARGET", help="a file FILE.parquet, or a folder, which gets a file for each shard"),
    ],
    part: Part = "",
    version: Version = None,
    columns: Columns = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="put it in the place of what is there")] = False,
    consistency: ReadConsistency = Consistency.FINISHED,
    offline: Offline = False,
    address: Address = "auto",
    as_json: AsJson = False,
) -> None:
    """All rows of one version as Parquet.

    Under the target's name they are whole, or not there.
    """
    from statefleet.reads.export import export_parquet

    rows = _state(open_states(uri, address, offline=offline), state, part, version, consistency).scan(
        column_names(columns)
    )
    with progress(f"version {rows.version} of {state}", rows.num_shards) as show:
        written = export_parquet(rows, target, show, overwrite=overwrite)
    if as_json:
        print_json({"state": state, "version": rows.version, "rows": written, "target": str(target)})
    else:
        print_text(f"{written:,} rows of version {rows.version} of {state} are in {target}")


def _state(fleet: LiveFleet, name: str, part: str, version: int | None, consistency: Consistency) -> LiveState:
    state = fleet.state(name, part, consistency=consistency)
    return state if version is None else state.at(version)


def _print_rows(rows: pa.Table, as_json: bool, limit: int | None = None) -> None:
    records = rows.to_pylist()
    if as_json:
        print_json(records)
    elif records:
        print_records(rows.column_names, records)
    else:
        print_text(f"no rows (columns: {', '.join(rows.column_names)})")
    if not as_json and rows.num_rows == limit:
        print_text(f"({limit} rows; there may be more: --limit)")


def _filtered(state: LiveState, where: str, columns: list[str] | None, limit: int) -> pa.Table:
    """Return the rows for which a condition is true, all of one version."""
    from statefleet.reads.sql import answer

    def only(table: str) -> LiveState:
        if table != _SCANNED:
            raise InvalidRequestError(
                "a condition is over the columns of the state alone; use `sql` for more", table=table
            )
        return state

    unknown = [name for name in columns or () if name not in state.schema.names]
    if unknown:
        raise InvalidRequestError(
            "the state has no such columns", unknown=", ".join(unknown), columns=", ".join(state.schema.names)
        )
    selected = ", ".join('"{}"'.format(name.replace('"', '""')) for name in columns or state.schema.names)
    # In parentheses on lines of their own, so that a comment at the end of the condition hides nothing else.
    return answer(f"SELECT {selected} FROM {_SCANNED} WHERE (\n{where}\n) LIMIT {limit}", only)


def _key(state: LiveState, assignments: list[str], null: list[str]) -> dict[str, Any]:
    """Return a key by column, each value with its column's type.

    Raises
    ------
    InvalidRequestError
        A key column is missing or unknown; or a value is not of its type.
    """
    texts: dict[str, str | None] = dict.fromkeys(null)
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator:
            raise InvalidRequestError("a key is given as column=value", got=assignment, keys=", ".join(state.keys))
        texts[name] = text
    if set(texts) != set(state.keys):
        raise InvalidRequestError(
            "a key has a value for each key column: column=value, or --null column",
            keys=", ".join(state.keys),
            got=", ".join(texts),
        )
    return key_of(state, texts)

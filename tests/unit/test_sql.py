"""SQL over states returns the rows that DuckDB returns for the same tables, and reads only the columns that a query needs."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from coordinator.model.errors import InvalidRequestError
from statefleet.reads.databases import isolated_database
from statefleet.reads.sql import answer

TABLES = {
    "clicks": pa.table(
        {
            "k": [1, 2, 2, 3, None],
            "x": [5, 7, None, 1, 5],
            "s": ["a", "b", "b", None, "c"],
            "y": [1.5, 0.5, 2.5, 1.5, 4.0],
        }
    ),
    "users": pa.table({"k": [1, 2, 4], "name": ["ann", "bob", "eve"], "x": [10, 20, 30]}),
    "seen": pa.table({"d": pa.array([[1, 2], None, []], pa.list_(pa.int64())), "b": [True, False, None]}),
}


class State:
    """A state that records the columns that are read."""

    version = 1

    def __init__(self, table: pa.Table, read: Callable[[Sequence[str]], None]) -> None:
        self._table, self._read = table, read
        self.schema = table.schema

    def at(self, version: int) -> State:
        return self

    def scan(self, columns: Sequence[str]) -> pa.Table:
        self._read(columns)
        return self._table.select(columns)


class States:
    """The tables as states of a fleet."""

    def __init__(self) -> None:
        self.read: dict[str, list[str]] = {}

    def state(self, name: str) -> Any:
        if name not in TABLES:
            raise InvalidRequestError("there is no such state", state=name)
        return State(TABLES[name], lambda columns: self.read.__setitem__(name, list(columns)))


def directly(query: str) -> pa.Table:
    with duckdb.connect() as database:
        for name, table in TABLES.items():
            database.register(name, table)
        return database.sql(query).to_arrow_table()


def rows(table: pa.Table) -> Counter[str]:
    return Counter(str(list(row.values())) for row in table.to_pylist())


VALID = [
    "select s.c from (select count(*) c, max(x) m from clicks) s",
    "select * exclude (x) from clicks",
    "select * exclude (x, y) from clicks where k = 2",
    "select * replace (k + 1 as k) from clicks",
    "select columns('k|s') from clicks",
    "select count(*) from (select * from clicks)",
    "select count(*) from (select distinct * from clicks)",
    "select u.k from users u natural join clicks",
    "select name from users join clicks using (k)",
    "select count(*) from users semi join clicks using (k)",
    "select count(*) from clicks positional join users",
    "select a.k from clicks a where exists (select * from users b where b.k = a.k)",
    "select (select max(x) from users) from clicks",
    "select k as x, s from clicks order by x",
    "select k as x from clicks group by all order by all",
    "select s, sum(x) over (partition by s order by k, y) from clicks",
    "with a as (select *, x + 1 as z from clicks) select z from a",
    "with a as (select *, x + 1 as z from clicks) select k from a",
    "select k from clicks union all by name select k, name from users",
    "select c from (from clicks select s as c, x as d) where c is not null",
    "from clicks limit 0",
    "select clicks from clicks",
    "select t.s from clicks t order by t.k desc nulls last limit 2",
    "select unnest(d) from seen",
    "select b, len(d) from seen",
    "unpivot (select k, x from clicks) on x into name what value amount",
    "select distinct on (k) k from clicks order by k, x",
    "select k from clicks qualify row_number() over (partition by k order by y) = 1",
    "select count(*) filter (where x > 1) from clicks",
    "select 1 from clicks, users where clicks.k = users.k",
    "values (1), (2)",
    "with clicks as (select * from clicks where k = 2) select x from clicks",
    "select * from (with users as (select 1 as a) select * from users) own, users",
    "select k from clicks where x in (with clicks as (select 7 as x) select x from clicks)",
    "with recursive r as (select 1 as k union all select r.k + 1 from r where r.k < 4) select * from r join users using (k)",
    "describe clicks",
    "describe select x, k from clicks",
    "select column_name from (describe users) where column_type = 'VARCHAR'",
    "select column_name, min, max from (summarize clicks)",
]  # fmt: skip


@pytest.mark.parametrize("query", VALID)
def test_a_valid_query_returns_the_rows_of_duckdb(query: str) -> None:
    assert rows(answer(query, States().state)) == rows(directly(query))


def test_columns_that_a_query_does_not_need_are_not_read() -> None:
    states = States()
    answer("select s, count(*) from clicks where x > 1 group by s", states.state)
    assert states.read == {"clicks": ["x", "s"]}
    answer("select count(*) from users", states.state)
    assert states.read["users"] == ["k"]


@pytest.mark.parametrize(
    "query",
    [
        "select * from read_csv('/etc/passwd')",
        "select * from read_text('/etc/passwd'), clicks",
        "select * from glob('/*')",
        "select * from sniff_csv('/etc/passwd')",
        "select k from clicks where s = (select content from read_text('/etc/hostname'))",
        "select * from parquet_scan('https://example.org/x.parquet')",
        "select * from '/etc/passwd'",
        "select * from TABLES",
        "copy (select 1) to '/tmp/statefleet-copy.csv'",
        "attach '/tmp/statefleet.db'",
        "install httpfs",
        "load httpfs",
        "set enable_external_access = true",
        "pragma temp_directory='/tmp'",
        "select getenv('HOME')",
        "select * from query('select * from read_csv(''/etc/passwd'')')",
        "select * from duckdb_secrets(), read_blob('/etc/passwd')",
        "export database '/tmp/statefleet-copy'",
        "select 1; copy (select 1) to '/tmp/statefleet-copy.csv'",
    ],
)
def test_sql_does_not_leave_the_states(query: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        answer(query, States().state)
    assert "root:" not in str(error.value)


@pytest.mark.parametrize("query", ["show tables", "show clicks", "select * from (show databases)"])
def test_lists_of_tables_are_refused_rather_than_answered_as_empty(query: str) -> None:
    with pytest.raises(InvalidRequestError, match="statefleet status"):
        answer(query, States().state)


def test_rows_beyond_memory_go_to_a_private_folder_that_is_removed_again() -> None:
    with isolated_database() as database:
        database.execute("SET memory_limit = '60MB'")
        database.execute("SET threads = 1")
        (folder,) = (Path(row[0]) for row in database.sql("SELECT current_setting('temp_directory')").fetchall())
        rows = database.sql("select count(*) from (select i, random() r from range(6000000) t(i) order by r)")
        assert rows.fetchall() == [(6_000_000,)]
        assert folder.stat().st_mode & 0o077 == 0
        assert folder.parent == Path(tempfile.gettempdir())
        assert any(folder.iterdir())
    assert not folder.exists()


def test_a_query_reads_the_versions_that_it_names() -> None:
    versions: dict[str, int | None] = {}

    class Versioned(State):
        name = ""

        def at(self, version: int) -> State:
            versions[self.name] = version
            return self

    def state(name: str) -> Any:
        made = Versioned(TABLES[name], lambda _: None)
        made.name = name
        return made

    for query, expected in {
        "select count(*) from clicks as of version 7": {"clicks": 7},
        "SELECT count(*) FROM clicks, users AS\n OF VERSION 7;": {"clicks": 7, "users": 7},
        "select count(*) from clicks at (version => 7) join users using (k)": {"clicks": 7, "users": 1},
        "select count(*) from public.clicks at (version => 7) where public.clicks.k = 2": {"clicks": 7},
        "with a as (from clicks) select count(*) from a as of version 7": {"clicks": 7},
        "select count(*) from clicks -- as of version 7": {"clicks": 1},
        "select count(*) from clicks where s <> ' as of version 7'": {"clicks": 1},
    }.items():
        versions.clear()
        assert answer(query, state).num_rows == 1
        assert versions == expected, query
    for query in ("select * from clicks at (timestamp => now())", "select * from clicks at (version => 1 + 1)"):
        with pytest.raises(InvalidRequestError, match="read at a version"):
            answer(query, state)

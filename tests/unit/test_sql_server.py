"""SQL for clients of PostgreSQL: psycopg and SQLAlchemy, and bytes of no client, against a server over tables instead of a fleet."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import math
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from coordinator.model.errors import InvalidRequestError, SetupError
from statefleet.sql_server.backend import Limits
from statefleet.sql_server.server import TOKEN, ServedSql, serve
from statefleet.sql_server.values import parameter
from tests.clocks import until
from tests.unit.sql_states import CLICKS, EARLIER, States

SECRET = "a-token-that-nobody-guesses"
SLOW = "select count(*) from range(200000000000)"


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> States:
    monkeypatch.delenv(TOKEN, raising=False)
    return States()


@pytest.fixture
def served(states: States) -> Iterator[ServedSql]:
    with serve(states, port=0, limits=Limits(seconds=20, login_s=5)) as server:
        yield server


def connect(served: ServedSql, **options: Any) -> psycopg.Connection:
    return psycopg.connect(served.url, user="reader", autocommit=True, connect_timeout=10, **options)


@pytest.fixture
def client(served: ServedSql) -> Iterator[psycopg.Connection]:
    with connect(served) as connection:
        yield connection


def refusal(client: psycopg.Connection, query: str, *parameters: Any) -> psycopg.Error:
    with pytest.raises(psycopg.Error) as refused:
        client.execute(query, parameters)
    return refused.value


# -- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("condition", ['"user" = %s', "\"user\" || '' = %s"], ids=["by key", "by DuckDB"])
def test_values_of_every_type_arrive_as_they_are(
    client: psycopg.Connection, states: States, binary: bool, condition: str
) -> None:
    for row in CLICKS.to_pylist():
        (got,) = client.execute(f"select * from clicks where {condition}", [row["user"]], binary=binary).fetchall()
        assert [
            math.isclose(a, b, rel_tol=1e-6) if isinstance(a, float) else a == b
            for a, b in zip(got, row.values(), strict=True)
        ]
        assert got[4:] == tuple(row.values())[4:]
    assert (states.scans == 0) == (condition == '"user" = %s')


def test_a_look_up_by_key_goes_round_duckdb_and_other_queries_do_not(
    client: psycopg.Connection, states: States
) -> None:
    def rows(query: str, *parameters: Any) -> tuple[list[Any], bool]:
        before = states.scans
        got = client.execute(query, parameters).fetchall()
        return got, states.scans == before

    assert rows('select n from clicks where "user" = %s', "u1") == ([(1,)], True)
    assert rows("select n as x, \"user\" from public.clicks c where c.\"user\" = 'it''s' limit 3;") == (
        [(3, "it's")],
        True,
    )
    assert rows('SELECT "clicks"."n" FROM "public"."clicks" WHERE "public"."clicks"."user" = %s::text', "u2") == (
        [(2,)],
        True,
    )
    assert rows('select amount from "orders.left" where id = %s', 2) == ([(20,)], True)
    assert rows('select amount from "orders.left" where id = 2') == ([(20,)], True)
    assert rows('select n from clicks where "user" = %s', "nobody") == ([], True)
    assert rows('select n from clicks where "user" = %s', None) == ([], True)
    # Equality as SQL has it, and not of the key's type.
    assert rows('select amount from "orders.left" where id = %s', 2.0) == ([(20,)], False)
    assert rows('select amount from "orders.left" where id = %s', 2**40) == ([], False)
    assert rows('select n from clicks where "user" = %s and n = %s', "u1", 1) == ([(1,)], False)
    assert rows('select n + 1 from clicks where "user" = %s', "u1") == ([(2,)], False)
    assert rows('select n from clicks where "user" > %s order by n', "u") == ([(1,), (2,)], False)


def test_look_ups_that_wait_are_sent_together_and_a_bad_key_is_the_fault_of_its_client_alone(
    served: ServedSql, states: States
) -> None:
    states.may_find.clear()
    users = ["u1", "u2", "broken", "u1", "it's", "u2", "u1", "u2"]

    def look(user: str) -> Any:
        with connect(served) as client:
            try:
                return client.execute('select n from clicks where "user" = %s', [user]).fetchall()
            except psycopg.Error as error:
                return str(error)

    with ThreadPoolExecutor(len(users)) as threads:
        found = [threads.submit(look, user) for user in users]
        time.sleep(1.0)
        states.may_find.set()
        got = [each.result() for each in found]
    assert [rows for rows in got if isinstance(rows, list)] == [[(1,)], [(2,)], [(1,)], [(3,)], [(2,)], [(1,)], [(2,)]]
    assert "the key is broken" in got[2]
    assert max(states.calls) > 1


def test_prepared_statements_pipelines_and_lists_as_parameters(client: psycopg.Connection) -> None:
    for user, n in (("u1", 1), ("u2", 2), ("it's", 3)):
        assert client.execute('select n from clicks where "user" = %s', [user], prepare=True).fetchone() == (n,)
        assert client.execute('select "user" from clicks where n = %s', [n], prepare=True).fetchone() == (user,)
    with client.pipeline():
        cursors = [client.execute("select %s::bigint + n from clicks where n = %s", [10, n]) for n in (1, 2)]
        assert [cursor.fetchone() for cursor in cursors] == [(11,), (12,)]
    assert client.execute("select n from clicks where n = any(%s) order by 1", [[1, 3]]).fetchall() == [(1,), (3,)]
    assert client.execute('select n from clicks where "user" = any(%s)', [["it's"]]).fetchall() == [(3,)]
    assert (
        client.execute(
            "select n from clicks where seen > %s limit %s", [dt.datetime(2026, 1, 1, tzinfo=dt.UTC), 1]
        ).rowcount
        == 1
    )
    assert client.execute("select n from clicks where price = %s", [decimal.Decimal("12.34")]).fetchall() == [(1,)]


@pytest.mark.parametrize("binary", [False, True])
def test_a_number_without_a_sign_has_all_of_its_digits(client: psycopg.Connection, binary: bool) -> None:
    query = "select 18446744073709551615::ubigint, [18446744073709551615::ubigint]"
    assert client.execute(query, binary=binary).fetchone() == (2**64 - 1, [2**64 - 1])


@pytest.mark.timeout(60)
def test_a_number_of_many_digits_is_read_in_a_time_in_proportion_to_them() -> None:
    digits = struct.pack("!hhHh32000h", 32_000, 0, 0, 2, *[9999] * 32_000)
    assert parameter(1700, 1, digits) == 10_000
    assert parameter(1700, 1, struct.pack("!hhHh3h", 3, 1, 0x4000, 3, 1, 2, 3400)) == decimal.Decimal("-10002.340")


def test_a_statement_reads_the_version_that_it_names(client: psycopg.Connection) -> None:
    assert client.execute(f"select count(*) from clicks as of version {EARLIER}").fetchone() == (1,)
    assert client.execute(f"select count(*) from clicks at (version => {EARLIER}), clicks b").fetchone() == (3,)
    point = 'select n from clicks where "user" = %s as of version {}'
    assert client.execute(point.format(EARLIER), ["u2"]).fetchall() == []
    assert client.execute(point.format(5), ["u2"]).fetchall() == [(2,)]
    assert "no such version" in str(refusal(client, point.format(77), "u2"))
    assert client.execute("select 'x as of version 3' -- as of version 3").fetchone() == ("x as of version 3",)


def test_several_statements_and_transactions(client: psycopg.Connection) -> None:
    cursor = client.execute("begin; select 1; select n from clicks where \"user\" = 'u2'; commit")
    results = []
    while True:
        results.append(cursor.fetchall() if cursor.description else cursor.statusmessage)
        if not cursor.nextset():
            break
    assert results == ["BEGIN", [(1,)], [(2,)], "COMMIT"]
    client.autocommit = False
    with pytest.raises(psycopg.Error), client.transaction():
        client.execute("select nothing_there from clicks")
    with client.transaction():
        with pytest.raises(psycopg.Error), client.transaction():
            client.execute("select nothing_there from clicks")
        assert client.execute("select 1").fetchone() == (1,)
    refusal(client, "select nothing_there from clicks")
    assert refusal(client, "select 1").sqlstate == "25P02"
    client.rollback()
    assert client.execute("show transaction_read_only").fetchone() == ("on",)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "insert into clicks values ('x')",
        "create table t (a int)",
        "drop table clicks",
        "copy clicks to '/tmp/statefleet-copy.csv'",
        "copy (select 1) to stdout",
        "attach '/tmp/statefleet.db'",
        "install httpfs",
        "load httpfs",
        "set memory_limit = '1TB'",
        "set enable_external_access = true",
        "pragma version",
        "call pragma_version()",
        "export database '/tmp/statefleet-copy'",
        "vacuum",
        "explain analyze insert into clicks values (1)",
    ],
)
def test_no_statement_writes_or_changes_settings(client: psycopg.Connection, statement: str) -> None:
    refused = refusal(client, statement)
    assert refused.sqlstate == "25006"
    assert "states are read here and nothing else" in str(refused)
    # Hidden behind another one.
    assert refusal(client, f"select 1; {statement}").sqlstate == "25006"
    assert refusal(client, f"/* select */ {statement}").sqlstate == "25006"


@pytest.mark.parametrize(
    "query",
    [
        "select * from read_csv('/etc/passwd')",
        "select * from read_text('/etc/passwd'), pg_class",
        "select * from glob('/*')",
        "select * from '/etc/passwd'",
        "select getenv('HOME')",
        "select getenv('HOME'), version()",
        "select * from query('select * from read_csv(''/etc/passwd'')')",
        "with x as (select * from read_blob('/etc/passwd')) select * from x",
        "select * from no_such_state",
        "select * from pg_catalog.read_text('/etc/passwd')",
    ],
)
def test_no_query_reaches_files(client: psycopg.Connection, query: str) -> None:
    assert refusal(client, query).sqlstate == "42000"


def test_a_statement_of_too_many_characters_is_refused(client: psycopg.Connection) -> None:
    text = "select 1".ljust(1 << 17)
    assert client.execute(text).fetchone() == client.execute(text, prepare=True).fetchone() == (1,)
    assert refusal(client, text + " ").sqlstate == "54000"
    with pytest.raises(psycopg.Error, match="131,072 characters at most"):
        client.execute(text + " ", prepare=True)


@pytest.mark.timeout(60)
def test_a_parameter_of_a_great_number_takes_no_memory(client: psycopg.Connection) -> None:
    # As many values as that would take some seconds, or all of the machine's memory.
    for number in (10_000_000, 10**12):
        assert "parameters are numbered" in str(refusal(client, f"select ${number} || ''"))


def test_more_rows_than_allowed_are_an_error_and_the_connection_goes_on(states: States) -> None:
    with serve(states, port=0, limits=Limits(rows=3000)) as served, connect(served) as client:
        refused = refusal(client, "select * from many")
        assert refused.sqlstate == "54000"
        assert "more than 3,000 rows" in str(refused)
        assert client.execute("select * from many limit 3000").rowcount == 3000
        assert client.execute("select count(*) from many").fetchone() == (5000,)


def test_a_statement_ends_with_its_time_and_when_its_client_cancels_it(states: States) -> None:
    with serve(states, port=0, limits=Limits(seconds=1.0)) as served, connect(served) as client:
        began = time.monotonic()
        refused = refusal(client, SLOW)
        assert (refused.sqlstate, "more than 1 s" in str(refused)) == ("57014", True)
        assert time.monotonic() - began < 10
        states.may_find.clear()
        assert refusal(client, "select n from clicks where \"user\" = 'u1'").sqlstate == "57014"
        states.may_find.set()
        assert client.execute("select 1").fetchone() == (1,)
    with serve(states, port=0) as served, connect(served) as client:
        client.execute("set statement_timeout = '700ms'")
        assert client.execute("show statement_timeout").fetchone() == ("700ms",)
        assert "more than 0.7 s; ask for less, or raise statement_timeout" in str(refusal(client, SLOW))
        client.execute("set statement_timeout = '10min'")
        assert client.execute("show statement_timeout").fetchone() == ("60000ms",), "not more than the server's"
        timer = threading.Timer(1.0, client.cancel_safe)
        timer.start()
        assert refusal(client, SLOW).sqlstate == "57014"
        timer.join()
        assert client.execute("select 1").fetchone() == (1,)
        # Who does not know the secret cancels nothing.
        with socket.create_connection((served.host, served.port)) as stranger:
            stranger.sendall(struct.pack("!IIII", 16, 80877102, client.pgconn.backend_pid, 12345))
            assert stranger.recv(1) == b""


def test_a_client_that_is_gone_ends_its_query(states: States) -> None:
    with serve(states, port=0) as served:
        client = connect(served)
        client.pgconn.send_query(SLOW.encode())
        time.sleep(0.5)
        client.close()
        deadline = time.monotonic() + 10
        while served._server._conversations and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not served._server._conversations


# -- who is let in ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def test_the_token_is_the_password(states: States, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, SECRET)
    with serve(states, port=0) as served:
        assert SECRET not in served.url
        for password in ("wrong", "", SECRET + "x"):
            with pytest.raises(psycopg.OperationalError, match=r"not the server's token|no password"):
                connect(served, password=password)
        with connect(served, password=SECRET) as client:
            assert client.execute("select 1").fetchone() == (1,)
    with pytest.raises(InvalidRequestError, match="too short"):
        serve(states, port=0, token="short")


def test_connections_are_encrypted_if_there_is_a_certificate(
    states: States, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = certificate
    with serve(states, host="0.0.0.0", port=0, token=SECRET, tls_cert=cert, tls_key=key) as served:
        options = {"host": "localhost", "port": served.port, "user": "x", "password": SECRET}
        with psycopg.connect(sslmode="verify-full", sslrootcert=str(cert), **options) as client:
            assert client.execute("select n from clicks where \"user\" = 'u1'").fetchone() == (1,)
            assert client.pgconn.ssl_in_use
        with pytest.raises(psycopg.OperationalError, match="connections here are encrypted"):
            psycopg.connect(sslmode="disable", **options)
        # What is sent in the open before the handshake does not become a part of what is encrypted.
        with socket.create_connection(("localhost", served.port)) as stranger:
            stranger.sendall(struct.pack("!II", 8, 80877103) + b"Q\0\0\0\x0dselect 1\0")
            assert stranger.recv(1) == b"E"
    with pytest.raises(InvalidRequestError, match="token and TLS"):
        serve(states, host="0.0.0.0", port=0, token=SECRET)
    with pytest.raises(InvalidRequestError, match="token and TLS"):
        serve(states, host="0.0.0.0", port=0, tls_cert=cert, tls_key=key)
    with pytest.raises(InvalidRequestError, match="two files"):
        serve(states, port=0, tls_cert=cert)
    with pytest.raises(InvalidRequestError, match="certificate"):
        serve(states, port=0, tls_cert=key, tls_key=tmp_path / "none")


def test_a_port_that_is_taken_is_an_error(states: States, served: ServedSql) -> None:
    with pytest.raises(SetupError, match="another host or port"):
        serve(states, port=served.port)


def test_more_connections_than_allowed_are_refused(states: States) -> None:
    with serve(states, port=0, limits=Limits(connections=2)) as served, connect(served), connect(served):
        with pytest.raises(psycopg.OperationalError, match="too many connections"):
            connect(served)
        # A cancellation is no connection.
        with socket.create_connection((served.host, served.port)) as stranger:
            stranger.sendall(struct.pack("!IIII", 16, 80877102, 1, 1))
            assert stranger.recv(1) == b""


# -- clients that are none --------------------------------------------------------------------------------------------

_STARTUP = struct.pack("!II", 16, 196608) + b"user\0x\0\0"


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 100,
        b"\xff" * 100,
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!II", 2**31, 196608),
        struct.pack("!II", 8, 0),
        struct.pack("!II", 12, 196608) + b"user",
        struct.pack("!II", 13, 196608) + b"\xff\xfe\0\0\0",
        _STARTUP + b"Q" + struct.pack("!I", 2**31 - 1),
        _STARTUP + b"Q\0\0\0\0",
        _STARTUP + b"Q\0\0\0\x06\xff\0",
        _STARTUP + b"Q\0\0\0\x08no e",
        _STARTUP + b"D\0\0\0\x04",
        _STARTUP + b"B\0\0\0\x06\0\0",
        _STARTUP + b"P\0\0\0\x09\0select",
        _STARTUP + b"?\0\0\0\x04",
        _STARTUP + b"E\0\0\0\x05x",
    ],
)
def test_bytes_that_are_no_message_close_their_own_connection_and_no_other(served: ServedSql, data: bytes) -> None:
    with connect(served) as client, socket.create_connection((served.host, served.port), timeout=10) as stranger:
        stranger.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(65536):
                pass
        assert client.execute("select n from clicks where \"user\" = 'u1'").fetchone() == (1,)


def test_those_who_say_nothing_and_those_who_read_nothing_keep_nobody_out(states: States) -> None:
    limits = Limits(connections=3, login_s=1.0, seconds=2.0, rows=10**9)
    with serve(states, port=0, limits=limits) as served, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection((served.host, served.port))) for _ in range(20)]
        lazy = stack.enter_context(socket.create_connection((served.host, served.port)))
        query = b"select repeat('x', 1000) from range(200000)\0"
        lazy.sendall(_STARTUP + b"Q" + struct.pack("!I", 4 + len(query)) + query)
        slow = connect(served)
        stack.callback(slow.close)
        slow.pgconn.send_query(SLOW.encode())
        with connect(served) as client:
            for _ in range(20):
                assert client.execute("select n from clicks where \"user\" = 'u1'").fetchone() == (1,)
            assert client.execute("select sum(n) from clicks").fetchone() == (6,)
        time.sleep(1.5)
        for each in silent:
            each.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""


@pytest.mark.timeout(60)
def test_a_server_is_closed_in_the_moment_in_which_a_statement_is_ended(states: States) -> None:
    with serve(states, port=0, limits=Limits(seconds=20)) as served, contextlib.ExitStack() as stack:
        client = connect(served)
        # Its own end would first roll back, which waits for the statement.
        stack.callback(client.pgconn.finish)
        client.pgconn.send_query(SLOW.encode())
        until(lambda: all(each._running is not None for each in served._server._conversations.values()), 20)

        def end() -> None:
            for conversation in served._server._conversations.values():
                conversation.end("its time is over")
                conversation.close()

        served._loop.call_soon_threadsafe(end)
        served.close()


def test_a_client_that_takes_no_rows_is_closed_when_its_time_is_over(states: States) -> None:
    with serve(states, port=0, limits=Limits(seconds=1.0, rows=10**9)) as served:
        query = b"select repeat('x', 1000) from range(2000000)\0"
        with socket.create_connection((served.host, served.port)) as lazy:
            lazy.sendall(_STARTUP + b"Q" + struct.pack("!I", 4 + len(query)) + query)
            deadline = time.monotonic() + 10
            while not served._server._conversations and time.monotonic() < deadline:
                time.sleep(0.05)
            while served._server._conversations and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not served._server._conversations


def test_prepared_statements_of_a_connection_are_bounded(client: psycopg.Connection) -> None:
    for index in range(1000):
        client.pgconn.prepare(f"s{index}".encode(), b"select 1")
    refused = client.pgconn.prepare(b"one more", b"select 1")
    assert "too many prepared statements" in refused.get_error_message()
    client.execute("deallocate all")
    assert client.execute("select 1", prepare=True).fetchone() == (1,)


# -- the catalogue ----------------------------------------------------------------------------------------------------


def test_sqlalchemy_reflects_states_and_queries_them(served: ServedSql, states: States) -> None:
    engine = sa.create_engine(served.url.replace("postgresql://", "postgresql+psycopg://reader@"))
    inspector = sa.inspect(engine)
    assert sorted(inspector.get_table_names()) == ["clicks", "many", "orders.left"]
    clicks = sa.Table("clicks", sa.MetaData(), autoload_with=engine)
    types = {column.name: str(column.type) for column in clicks.columns}
    assert types == {
        "user": "TEXT", "n": "BIGINT", "total": "DOUBLE PRECISION", "share": "REAL", "price": "NUMERIC", "seen": "TIMESTAMP",
        "local": "TIMESTAMP", "day": "DATE", "list": "ARRAY", "names": "ARRAY", "struct": "JSON", "raw": "BYTEA", "ok": "BOOLEAN",
    }  # fmt: skip
    with engine.connect() as connection:
        states.scans = 0
        assert connection.execute(sa.select(clicks.c.n).where(clicks.c.user == "u2")).all() == [(2,)]
        assert states.scans == 0
        assert connection.execute(sa.select(sa.func.sum(clicks.c.n)).where(clicks.c.n > 1)).scalar() == 5
    engine.dispose()


def test_the_catalogue_lists_states_columns_and_types(client: psycopg.Connection) -> None:
    tables = "select table_name from information_schema.tables where table_schema = 'public' order by 1"
    assert client.execute(tables).fetchall() == [("clicks",), ("many",), ("orders.left",)]
    columns = client.execute(
        "select column_name, data_type from information_schema.columns where table_name = %s order by ordinal_position",
        ["orders.left"],
    )
    assert columns.fetchall() == [("id", "integer"), ("amount", "bigint")]
    assert client.execute("select current_schema(), current_database()").fetchone() == ("public", "statefleet")
    assert client.execute("select version()").fetchone() == ("PostgreSQL 14.0 (Statefleet)",)
    # A query over states may have such words, too.
    assert client.execute("select count(*), 'pg_class' from clicks").fetchone() == (3, "pg_class")
    assert client.execute("select typname from pg_type where oid = 'int8'::regtype").fetchone() == ("int8",)
    assert client.execute("select extversion from pg_extension where extname = 'none'").fetchall() == []


def test_what_dashboards_ask_the_catalogue_is_answered(client: psycopg.Connection) -> None:
    """As Grafana's editor of queries asks for tables and columns, and Metabase for the types of these."""
    assert client.execute("select current_setting('server_version_num')::int").fetchone() == (140000,)
    names = """
        select case when quote_ident(table_schema) in (
            select case when trim(p[i]) = '"$user"' then user else trim(p[i]) end
            from generate_series(1, array_upper(string_to_array(current_setting('search_path'), ','), 1)) as i,
                string_to_array(current_setting('search_path'), ',') p
        ) then quote_ident(table_name) end from information_schema.tables order by 1"""
    assert client.execute(names).fetchall() == [('"orders.left"',), ("clicks",), ("many",)]
    split = "select parse_ident('public.clicks'), parse_ident('\"a.\"\"B\"'), parse_ident('C')"
    assert client.execute(split).fetchone() == (["public", "clicks"], ['a."B'], ["c"])
    quoted = "select quote_ident('select'), quote_ident('Ab'), quote_ident('a\"b'), quote_ident('a_1'), format('%I.%I', 'a', 'B')"
    assert client.execute(quoted).fetchone() == ('"select"', '"Ab"', '"a""b"', "a_1", 'a."B"')
    types = "select format('%s', udt_name) from information_schema.columns where table_name = 'orders.left' order by 1"
    assert client.execute(types).fetchall() == [("int4",), ("int8",)]


@pytest.mark.parametrize("command", [r"\d", r"\dt", r"\d clicks", r"\d+ clicks", r"\l", r"\dn", r"\du", r"\df", r"\z"])
def test_psql_describes_states(served: ServedSql, command: str) -> None:
    try:
        ran = subprocess.run(
            ["psql", f"{served.url}?user=reader", "-X", "-c", command],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("psql is not installed here")
    assert (ran.returncode, ran.stderr) == (0, "")
    if command in (r"\d", r"\dt"):
        assert "orders.left" in ran.stdout
    if "clicks" in command:
        assert "timestamp with time zone" in ran.stdout

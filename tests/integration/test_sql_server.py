"""SQL over a running fleet by clients that are not ours: psycopg, SQLAlchemy, psql, and PostgreSQL's JDBC driver."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
import ray
import sqlalchemy as sa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import statefleet as sf
from statefleet.sql_server.server import ServedSql
from tests.conftest import NewUri
from tests.integration.streams import Feed, Run
from tests.maven_jars import maven_jars

JDBC = "org.postgresql:postgresql:42.7.8 2a32a9dcbc42d67a50ad3a0de5efd102c8d2be46720045f2cbd6689f160ab7c7"


class Clicks:
    """A running query that counts clicks by user, and another one that lists pages by user and day."""

    def __init__(self, fleet: sf.Fleet, folder: Path) -> None:
        self.fleet = fleet
        self.feed = Feed(folder / "in", pa.schema([("user", pa.string()), ("day", pa.int32()), ("amount", pa.int64())]))
        counted = fleet.stateful(self.feed.stream(), name="clicks", shards=2).groupBy("user")
        by_day = fleet.stateful(self.feed.stream(), name="days", shards=2).groupBy("user", "day")
        totals = F.count("*").alias("n"), F.sum("amount").alias("total")
        self._runs = [
            Run(counted.agg(*totals), "update", folder / "checkpoint"),
            Run(by_day.agg(*totals), "update", folder / "checkpoint-days"),
        ]

    def add(self, *rows: tuple[str, int, int]) -> None:
        self.feed.add(rows)
        for run in self._runs:
            run.wait()

    def stop(self) -> None:
        for run in self._runs:
            run.stop()


@pytest.fixture(scope="module")
def clicks(spark: SparkSession, new_uri: NewUri, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clicks]:
    # Of its own, as other tests have states of these names.
    fleet = sf.connect(new_uri())
    running = Clicks(fleet, tmp_path_factory.mktemp("clicks"))
    running.add(("u1", 1, 5), ("u1", 2, 10), ("it's", 1, 1))
    running.add(("u1", 1, 15), ("u2", 1, 7))
    yield running
    running.stop()
    fleet.shutdown()


@pytest.fixture(scope="module")
def served(clicks: Clicks) -> Iterator[ServedSql]:
    with clicks.fleet.serve_sql(port=0) as server:
        yield server


def test_psycopg_looks_up_keys_while_the_query_runs(clicks: Clicks, served: ServedSql) -> None:
    with psycopg.connect(served.url, user="reader", autocommit=True) as client:
        query = 'select n, total from clicks where "user" = %s'
        assert client.execute(query, ["u1"]).fetchall() == [(3, 30)]
        assert client.execute(query, ["it's"], prepare=True).fetchall() == [(1, 1)]
        assert client.execute(query, ["nobody"]).fetchall() == []
        assert client.execute('select * from days where day = %s and "user" = %s', [1, "u1"]).fetchall() == [
            ("u1", 1, 2, 20)
        ]
        for amount in (1, 2, 3):
            clicks.add(("later", 1, amount))
            assert client.execute(query, ["later"]).fetchall() == [(amount, amount * (amount + 1) // 2)]
        version = clicks.fleet.state("clicks").version
        assert client.execute(f"{query} as of version {version - 1}", ["later"]).fetchall() == [(2, 3)]
        assert client.execute(f"select sum(total) from clicks as of version {version - 3}").fetchone() == (38,)


def test_both_states_are_read_as_of_one_moment_by_a_join(clicks: Clicks, served: ServedSql) -> None:
    with psycopg.connect(served.url, user="reader", autocommit=True) as client:
        rows = client.execute(
            'select c."user", c.n, sum(d.n) from clicks c join days d on c."user" = d."user" group by all order by 1'
        ).fetchall()
        assert rows
        assert all(n == of_days for _, n, of_days in rows)
        with pytest.raises(psycopg.Error, match="states are read here and nothing else"):
            client.execute("delete from clicks")
        with pytest.raises(psycopg.Error, match="reads states and nothing else"):
            client.execute("select * from clicks, read_csv('/etc/passwd')")


def test_sqlalchemy_finds_the_states_and_their_columns(served: ServedSql) -> None:
    engine = sa.create_engine(served.url.replace("postgresql://", "postgresql+psycopg://reader@"))
    assert {"clicks", "days"} <= set(sa.inspect(engine).get_table_names())
    days = sa.Table("days", sa.MetaData(), autoload_with=engine)
    assert [(column.name, str(column.type)) for column in days.columns] == [
        ("user", "TEXT"), ("day", "INTEGER"), ("n", "BIGINT"), ("total", "BIGINT"),
    ]  # fmt: skip
    with engine.connect() as connection:
        query = sa.select(days.c.total).where(days.c.user == "u1", days.c.day == 2)
        assert connection.execute(query).scalar_one() == 10
    engine.dispose()


@pytest.mark.skipif(shutil.which("psql") is None, reason="psql is not installed")
def test_psql_shows_a_state(served: ServedSql) -> None:
    command = [
        "psql",
        f"{served.url}?user=reader",
        "-X",
        "-A",
        "-c",
        r"\d clicks",
        "-c",
        "select n from clicks where \"user\" = 'u2'",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "total|bigint" in ran.stdout
    assert ran.stdout.splitlines()[-2:] == ["1", "(1 row)"]


def test_jdbc_reads_states_and_their_columns(spark: SparkSession, served: ServedSql) -> None:
    try:
        (jar,) = maven_jars([JDBC])
    except OSError as error:
        pytest.skip(f"Maven Central is not reachable: {error}")
    jvm: Any = spark._jvm
    urls = spark.sparkContext._gateway.new_array(jvm.java.net.URL, 1)
    urls[0] = jvm.java.io.File(str(jar)).toURI().toURL()
    driver = jvm.java.net.URLClassLoader(urls).loadClass("org.postgresql.Driver").newInstance()
    options = jvm.java.util.Properties()
    options.setProperty("user", "reader")
    connection = driver.connect(f"jdbc:{served.url}", options)
    columns = connection.getMetaData().getColumns(None, "public", "days", "%")
    found = []
    while columns.next():
        found.append((columns.getString("COLUMN_NAME"), columns.getString("TYPE_NAME")))
    assert found == [("user", "text"), ("day", "int4"), ("n", "int8"), ("total", "int8")]
    # The driver prepares a statement on the server from its fifth run on, and then takes binary values.
    statement = connection.prepareStatement('select total from days where "user" = ? and day = ?')
    for day, total in ((1, 20), (2, 10)) * 4:
        statement.setString(1, "u1")
        statement.setInt(2, day)
        rows = statement.executeQuery()
        assert rows.next()
        assert rows.getLong(1) == total
    connection.close()


def test_the_command_serves_until_it_is_interrupted(clicks: Clicks) -> None:
    # Of this session's cluster: `auto` is the one that was started last on the machine.
    environment = {
        **os.environ,
        "STATEFLEET_SQL_TOKEN": "a-token-that-nobody-guesses",
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
    }
    command = [sys.executable, "-m", "statefleet.cli", "serve-sql", clicks.fleet.uri, "--port", "0", "--rows", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[0]
            assert "token" not in url
            with psycopg.connect(url, user="reader", password="a-token-that-nobody-guesses", autocommit=True) as client:
                assert client.execute("select n from clicks where \"user\" = 'u2'").fetchall() == [(1,)]
                with pytest.raises(psycopg.Error, match="more than 2 rows"):
                    client.execute("select * from days")
            with pytest.raises(psycopg.OperationalError, match="not the server's token"):
                psycopg.connect(url, user="reader", password="another")
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0


def test_states_are_served_from_object_storage_alone(clicks: Clicks, new_uri: NewUri) -> None:
    offline = sf.attach(clicks.fleet.uri, offline=True)
    with offline.serve_sql(port=0) as server, psycopg.connect(server.url, user="reader", autocommit=True) as client:
        assert client.execute("select n from clicks where \"user\" = 'u2'").fetchall() == [(1,)]
        assert client.execute("select count(*) from days").fetchone() >= (4,)

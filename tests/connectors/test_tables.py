"""Delta Lake and Iceberg as sinks and as sources of the fleet's queries: the programs of docs/tables.md."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import statefleet as sf
from tests.code_blocks import blocks_of
from tests.connectors.conftest import HAS_ICEBERG
from tests.integration.streams import Feed, Run
from tests.page_programs import run_blocks

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::statefleet.UnboundedStateWarning"),
]
CLICKS = pa.schema([("user", pa.string())])
Scope = dict[str, Any]
#: Functions of the page, with the table that each writes.
SINKS = {
    "append_to_delta": "delta.`{folder}/revenue`",
    "merge_into_delta": "delta.`{folder}/totals`",
    "append_to_iceberg": "lake.shop.revenue",
    "merge_into_iceberg": "lake.shop.totals",
}
needs_iceberg = pytest.mark.skipif(not HAS_ICEBERG, reason="there is no Iceberg for this version of Spark")


@pytest.fixture
def scope(spark: SparkSession, fleet: sf.Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Scope:
    """Run the page on tables that each have three clicks; return its names."""
    monkeypatch.setattr(sf, "start_session", lambda *_, **__: spark)
    clicks = spark.createDataFrame([("ann",), ("bob",), ("ann",)], "user STRING")
    clicks.write.format("delta").save(f"{tmp_path}/clicks")
    scope: Scope = {}
    blocks = blocks_of("tests/connectors/test_tables.py::test_the_programs_of_the_page_run")
    if HAS_ICEBERG:
        for table in ("revenue", "totals", "clicks"):
            spark.sql(f"DROP TABLE IF EXISTS lake.shop.{table}")
        clicks.writeTo("lake.shop.clicks").create()
    else:
        blocks = [block for block in blocks if "lake.shop" not in block.code]
    places = {"/data/": f"{tmp_path}/", "file:///var/lib/statefleet": fleet.uri, 'name="': f'name="{name}-'}
    run_blocks(blocks, scope, places)
    return scope


@pytest.mark.parametrize("source", ["delta", pytest.param("iceberg", marks=needs_iceberg)])
def test_the_programs_of_the_page_run(scope: Scope, fleet: sf.Fleet, tmp_path: Path, name: str, source: str) -> None:
    """A table is a source: the rows that it has, and those that are appended. The state is a table as well."""

    def copy() -> list[tuple[Any, ...]]:
        scope["copy_to_delta"](fleet.state(f"{name}-{source}-users"))
        return sorted(map(tuple, scope["spark"].table(f"delta.`{tmp_path}/users`").collect()))

    with Run(scope[f"{source}_users"], "update", tmp_path / "ck") as run:
        assert sorted(map(tuple, run.take())) == copy() == [("ann", 2), ("bob", 1)]
        more: DataFrame = scope["spark"].createDataFrame([("bob",), ("eve",)], "user STRING")
        if source == "delta":
            more.write.format("delta").mode("append").save(f"{tmp_path}/clicks")
        else:
            more.writeTo("lake.shop.clicks").append()
        assert sorted(map(tuple, run.take())) == [("bob", 2), ("eve", 1)]
        assert copy() == [("ann", 2), ("bob", 2), ("eve", 1)]


def test_a_copy_of_a_state_follows_it_by_changes(scope: Scope, fleet: sf.Fleet, tmp_path: Path, name: str) -> None:
    """A copy has the state's rows after any commits and stops; it copies the whole state first, and when it begins again."""
    sql, state, chance = scope["spark"].sql, fleet.state(name), random.Random(1)
    table = f"delta.`{tmp_path}/users`"

    def copy() -> list[tuple[str | None, int]]:
        """Bring the copy up to date; return its rows that the state has not."""
        scope["copy_to_delta"](state)
        rows = Counter(map(tuple, sql(f"SELECT * FROM {table}").collect()))
        expected = Counter((row["user"], row["n"]) for row in state.scan().to_arrow().to_pylist())
        assert rows >= expected
        return list((rows - expected).elements())

    write_at_random(fleet, name, chance, 1)
    assert not copy()
    # A copy of the whole state would not leave it.
    mark = ("not of the state", -1)
    sql(f"INSERT INTO {table} VALUES {mark}")
    for commits in (0, 1, 4):
        position = sql(f"DESCRIBE DETAIL {table}").first()["properties"]["position"]
        write_at_random(fleet, name, chance, commits)
        assert copy() == [mark]
        # As a program leaves it that is stopped before it has written the position.
        sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('position' = '{position}')")
        write_at_random(fleet, name, chance, commits)
        assert copy() == [mark]
    sql(f"ALTER TABLE {table} UNSET TBLPROPERTIES ('position')")
    assert not copy()


def write_at_random(fleet: sf.Fleet, name: str, chance: random.Random, commits: int) -> None:
    """Change and remove users of a store."""
    for _ in range(commits):
        with fleet.state_store(name, keys=CLICKS, values=pa.schema([("n", pa.int64())])) as store:
            for user in chance.sample([None, *"abcdefgh"], 5):
                if chance.random() < 0.6:
                    store.put(user=user, n=chance.randrange(1000))
                else:
                    store.remove((user,))
            store.commit()


class PlannedError(Exception):
    """The error of a sink that fails on purpose."""


def failing(sink: Callable[[DataFrame, int], None], attempts: Sequence[str]) -> Callable[[DataFrame, int], None]:
    """Return a sink that fails as planned, attempt by attempt: before it writes, after it has written, or not."""
    plan = iter(attempts)

    def write(rows: DataFrame, batch_id: int) -> None:
        planned = next(plan, "")
        if planned == "before":
            raise PlannedError
        sink(rows, batch_id)
        if planned == "after":
            raise PlannedError

    return write


@pytest.mark.parametrize(
    "sink", [pytest.param(sink, marks=needs_iceberg if "iceberg" in sink else ()) for sink in SINKS]
)
def test_a_batch_that_is_repeated_is_in_the_table_once(
    scope: Scope, spark: SparkSession, fleet: sf.Fleet, tmp_path: Path, name: str, sink: str
) -> None:
    feed = Feed(tmp_path / "in", CLICKS)
    expected: Counter[str] = Counter()
    for number in range(4):
        users = [f"u{n % (number + 2)}" for n in range(10)]
        feed.add([(user,) for user in users])
        expected.update(users)
    write = failing(scope[sink], ["", "after", "after", "before", "", "after"])

    def run() -> None:
        frame = fleet.stateful(feed.stream(), name=name, outputMode="update", shards=2)
        counts = frame.groupBy("user").agg(F.count("*").alias("n"))
        query = counts.writeStream.outputMode("update").trigger(availableNow=True).foreachBatch(write)
        query.option("checkpointLocation", str(tmp_path / "ck")).start().awaitTermination()

    for _ in range(4):
        with pytest.raises(StreamingQueryException, match="PlannedError"):
            run()
    run()
    table = spark.table(SINKS[sink].format(folder=tmp_path))
    rows = [(row["user"], row["n"]) for row in table.collect()]
    if sink.startswith("merge"):
        assert sorted(rows) == sorted(expected.items())
    else:
        # Each batch appended its changed groups: every one of them once, the last ones complete.
        changed = [user for number in range(4) for user in {f"u{n % (number + 2)}" for n in range(10)}]
        assert Counter(user for user, _ in rows) == Counter(changed)
        assert {user: max(n for other, n in rows if other == user) for user in expected} == expected

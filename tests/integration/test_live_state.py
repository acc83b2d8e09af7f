"""State read beside its query, from the driver, another process and object storage alone: one finished version, as Spark has it."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import ray
from pyspark.sql import functions as F

import statefleet as sf
from coordinator.service.deploy import NAMESPACE
from coordinator.storage.uris import open_object_store
from tests.clocks import until
from tests.integration.streams import Feed, Run

pytestmark = pytest.mark.filterwarnings("ignore::statefleet.UnboundedStateWarning")

EVENTS = pa.schema([("user", pa.string()), ("ts", pa.timestamp("us", tz="UTC")), ("amount", pa.int64())])
START = dt.datetime(2025, 1, 1, tzinfo=dt.UTC)
USERS = 40
ROWS = 200


def events(batch: int) -> list[tuple[Any, ...]]:
    """Return the rows of a batch: the same number of rows of every user."""
    return [(f"u{number % USERS}", START + dt.timedelta(seconds=number), batch + 1) for number in range(ROWS)]


@contextmanager
def counted(fleet: sf.Fleet, folder: Path, name: str) -> Iterator[tuple[str, Feed, Run]]:
    """Yield counts by user after three batches, with the query still there."""
    feed = Feed(folder / "in", EVENTS)
    for batch in range(3):
        feed.add(events(batch))
    grouped = fleet.stateful(feed.stream(), name=name, shards=5).groupBy("user")
    counts = grouped.agg(F.count("*").alias("n"), F.sum("amount").alias("total"), F.avg("amount").alias("average"))
    with Run(counts, "update", folder / "checkpoint") as run:
        run.wait()
        yield name, feed, run


@pytest.fixture
def clicks(fleet: sf.Fleet, spark: Any, tmp_path: Path, name: str) -> Iterator[tuple[str, Feed, Run]]:
    """A query that a test may go on with."""
    with counted(fleet, tmp_path, name) as query:
        yield query


@pytest.fixture(scope="module")
def read_only(fleet: sf.Fleet, spark: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state of a query that has ended."""
    with counted(fleet, tmp_path_factory.mktemp("clicks"), "live-clicks") as (name, _, _):
        return name


def test_an_aggregation_is_its_result_by_key_and_as_a_table(fleet: sf.Fleet, clicks: tuple[str, Feed, Run]) -> None:
    name, feed, run = clicks
    state = fleet.state(name)
    assert (state.keys, state.schema.names) == (("user",), ["user", "n", "total", "average"])
    assert state.get({"user": "u7"}) == {"user": "u7", "n": 15, "total": 30, "average": 2.0}
    assert state.get({"user": "nobody"}) is None
    assert state.get({"user": None}) is None
    assert state.get({"user": "u7"}, columns=["n"]) == {"n": 15}
    rows = state.multi_get([{"user": user} for user in ("u3", "nobody", "u0", "u3")], columns=["total"])
    assert rows.to_pylist() == [
        {"user": "u3", "total": 30, "__found": True},
        {"user": "nobody", "total": None, "__found": False},
        {"user": "u0", "total": 30, "__found": True},
        {"user": "u3", "total": 30, "__found": True},
    ]
    expected = feed.batch().groupBy("user").agg(F.count("*"), F.sum("amount"), F.avg("amount")).collect()
    assert sorted(map(tuple, expected)) == sorted(tuple(row.values()) for row in state.scan().to_arrow().to_pylist())
    assert state.scan(["user"], filter=[("n", ">", 15)]).to_arrow().num_rows == 0
    assert state.scan(["user"], filter=pc.field("average") == 2, limit=3).to_arrow().num_rows == 3
    assert state.prefix_scan({"user": "u1"}, ["n"]).to_arrow().to_pylist() == [{"n": 15}]
    feed.add(events(3))
    run.wait()
    assert state.get({"user": "u7"}) == {"user": "u7", "n": 20, "total": 50, "average": 2.5}
    assert state.at(3).get({"user": "u7"}) == {"user": "u7", "n": 15, "total": 30, "average": 2.0}
    assert state.at(0).scan().to_arrow().num_rows == 0
    assert state.versions() == range(5)


def test_what_cannot_be_read_is_refused(fleet: sf.Fleet, read_only: str) -> None:
    name, state = read_only, fleet.state(read_only)
    with pytest.raises(sf.InvalidRequestError, match="no such state"):
        fleet.state("nothing").get({"user": "u1"})
    with pytest.raises(sf.InvalidRequestError, match="a value for each key column"):
        state.get({"name": "u1"})
    with pytest.raises(sf.InvalidRequestError, match="does not fit its key column"):
        state.get({"user": 7})
    with pytest.raises(sf.InvalidRequestError, match="no such columns"):
        state.get({"user": "u1"}, columns=["count"])
    with pytest.raises(sf.InvalidRequestError, match="no column is asked for"):
        state.get({"user": "u1"}, columns=[])
    with pytest.raises(sf.InvalidRequestError, match="leading key columns"):
        state.prefix_scan({"n": 1})
    with pytest.raises(sf.InvalidRequestError, match="only one part"):
        fleet.state(name, "left").get({"user": "u1"})
    with pytest.raises(sf.InvalidRequestError, match="committed, latest"):
        fleet.state(name, consistency="eventual")
    with pytest.raises(sf.VersionNotFoundError, match="no such version"):
        state.at(9)


def test_every_read_is_one_cut_across_the_shards_and_operators_of_a_query(
    fleet: sf.Fleet, tmp_path: Path, name: str
) -> None:
    """Each batch with data adds the same number of rows, so a read of parts of one shows in its sum."""
    feed = Feed(tmp_path / "in", EVENTS)
    feed.add(events(0))
    first = fleet.stateful(feed.stream().withWatermark("ts", "1 hour"), name=name, shards=4)
    # Each row is new: its amount tells its batch.
    kept = first.dropDuplicates(["user", "ts", "amount"])
    counted = fleet.stateful(kept, name=f"{name}-counts", outputMode="append", shards=3)
    counts = counted.groupBy(F.window("ts", "1 day"), "user").agg(F.count("*").alias("n"))
    run = Run(counts, "append", tmp_path / "checkpoint")
    run.wait()
    #: Rows and counted rows of each version that was read, and these versions in order.
    sums: dict[int, set[int]] = {}
    versions_read: list[int] = []
    problems: list[str] = []
    stop = threading.Event()

    def read() -> None:
        live = sf.attach(fleet.uri)
        kept, counted = live.state(name), live.state(f"{name}-counts")
        keys = counted.scan(["window", "user"]).to_arrow()
        while not stop.is_set():
            for scan in (kept.scan(["user"]), counted.scan(["n"])):
                rows = scan.to_arrow()
                sums.setdefault(scan.version, set()).add(
                    pc.sum(rows["n"]).as_py() if "n" in rows.schema.names else len(rows)
                )
                versions_read.append(scan.version)
            total = pc.sum(counted.multi_get(keys)["n"]).as_py()
            if total % ROWS:
                problems.append(f"looked up: {total}")

    def read_safely() -> None:
        try:
            read()
        except Exception as error:  # noqa: BLE001 - it is reported below
            problems.append(repr(error))

    reader = threading.Thread(target=read_safely)
    reader.start()
    for batch in range(1, 9):
        feed.add(events(batch))
        run.wait()
        finished = fleet.state(name).version
        assert finished >= batch + 1, "what Spark has finished is seen"
    stop.set()
    reader.join(60)
    run.stop()
    assert not problems, problems[:3]
    assert all(len(row_sums) == 1 and not min(row_sums) % ROWS for row_sums in sums.values()), sums
    assert versions_read == sorted(versions_read), "nobody goes back"
    assert len(sums) > 3


@pytest.mark.replay
def test_state_is_data_for_every_tool(fleet: sf.Fleet, spark: Any, clicks: tuple[str, Feed, Run]) -> None:
    name, feed, run = clicks
    state = fleet.state(name)
    rows = state.scan(["user", "total"], filter=[("user", "in", ["u1", "u2", "u3"])])
    expected = [(f"u{number}", 30) for number in (1, 2, 3)]
    forms = [
        rows.to_arrow().to_pandas(),
        rows.to_pandas(),
        rows.to_polars().to_pandas(),
        rows.to_ray_dataset().to_pandas(),
        rows.to_spark(spark).toPandas(),
        pa.RecordBatchReader.from_stream(rows).read_pandas(),
        state.scan(["user", "total"], filter=[("user", "in", ["u1", "u2", "u3"])], limit=3)
        .to_ray_dataset()
        .to_pandas(),
        sf.attach(fleet.uri, offline=True)
        .state(name)
        .scan(["user", "total"], rows_of("u1", "u2", "u3"))
        .to_spark(spark)
        .toPandas(),
    ]
    # Read when it is used, and yet of the version that was asked for.
    late = state.scan(["user", "n"]).to_spark(spark), state.scan(["user", "n"]).to_ray_dataset()
    feed.add(events(3))
    run.wait()
    forms.append(rows.to_pandas())
    assert [sorted(map(tuple, frame.itertuples(index=False))) for frame in forms] == [expected] * len(forms)
    assert {row["n"] for row in late[0].collect()} == {row["n"] for row in late[1].take_all()} == {15}


def test_changes_of_versions_and_what_differs(fleet: sf.Fleet, spark: Any, tmp_path: Path, name: str) -> None:
    schema = pa.schema([("user", pa.string()), ("ts", pa.timestamp("us", tz="UTC"))])
    feed = Feed(tmp_path / "in", schema)
    counted = fleet.stateful(feed.stream().withWatermark("ts", "0 seconds"), name=name, shards=2)
    counts = counted.groupBy("user", F.window("ts", "10 seconds")).agg(F.count("*").alias("n"))
    run = Run(counts, "update", tmp_path / "checkpoint")
    for users, second in (("ab", 1), ("bc", 2), ("d", 35)):
        feed.add([(user, START + dt.timedelta(seconds=second)) for user in users])
        run.wait()
    run.stop()
    for state in (fleet.state(name), sf.attach(fleet.uri, offline=True).state(name)):
        last = state.version
        changes = (
            state.changes(0, columns=["user", "n"])
            .to_arrow()
            .sort_by([("_commit_version", "ascending"), ("user", "ascending")])
        )
        rows_of_changes = [tuple(row.values())[:4] for row in changes.to_pylist()]
        versions = [version for _, _, _, version in rows_of_changes]
        assert versions == sorted(versions)
        assert [row[:3] for row in rows_of_changes] == [
            ("a", 1, "upsert"), ("b", 1, "upsert"), ("b", 2, "upsert"), ("c", 1, "upsert"), ("d", 1, "upsert"),
            ("a", 1, "delete"), ("b", 2, "delete"), ("c", 1, "delete"),
        ]  # fmt: skip
        assert changes.schema.field("_commit_timestamp").type == pa.timestamp("us", tz="UTC")
        assert state.changes(last).to_arrow().num_rows == 0
        only = state.changes(0, last, columns=["user"], filter=pc.field("_change_type") == "delete").to_arrow()
        assert sorted(only["user"].to_pylist()) == ["a", "b", "c"]
        rows = sorted(
            (row["user"], row["n"], row["_change_type"]) for row in state.diff(1, rows_of_changes[3][3]).to_pylist()
        )
        assert rows == [("b", 1, "delete"), ("b", 2, "insert"), ("c", 1, "insert")]
        assert sorted(row["user"] for row in state.diff(rows_of_changes[3][3]).to_pylist()) == ["a", "b", "c", "d"]
    spark_rows = fleet.state(name).changes(0).to_spark(spark).groupBy("_change_type").count().collect()
    assert {row[0]: row[1] for row in spark_rows} == {"upsert": 5, "delete": 3}
    with pytest.raises(sf.InvalidRequestError, match="later versions"):
        fleet.state(name).changes(3, 1)


def rows_of(*users: str) -> pc.Expression:
    return pc.field("user").isin(users)


def test_sql_over_states_is_of_one_moment(fleet: sf.Fleet, read_only: str) -> None:
    name = read_only
    top = fleet.sql(f'select "user", total from "{name}" where n > 10 order by "user" limit 2')
    assert top.to_pylist() == [{"user": "u0", "total": 30}, {"user": "u1", "total": 30}]
    assert fleet.sql(f'select count(*) as n from "{name}"').to_pylist() == [{"n": USERS}]
    paired = f'with a as (select * from "{name}") select count(*) as n from a join "{name}" b using ("user")'
    assert fleet.sql(paired).to_pylist() == [{"n": USERS}]
    assert fleet.sql("select 1 as one").to_pylist() == [{"one": 1}]
    dotted = f"{name}.of.its-own"
    with fleet.state_store(dotted, keys=pa.schema([("k", pa.int64())]), values=pa.schema([("v", pa.int64())])) as store:
        store.put(k=1, v=2)
        store.commit()
    assert fleet.sql(f'select v from "{dotted}"').to_pylist() == [{"v": 2}]
    with pytest.raises(sf.InvalidRequestError, match="no such state"):
        fleet.sql("select * from nothing")
    with pytest.raises(sf.InvalidRequestError, match="cannot be answered"):
        fleet.sql(f'select nonsense from "{name}"')
    for text in ("selec 1", f'create table x as select * from "{name}"', "select 1; select 2"):
        with pytest.raises(sf.InvalidRequestError, match="no query of SQL"):
            fleet.sql(text)


def test_keyed_stores_of_a_program_tell_their_own_columns(fleet: sf.Fleet, name: str) -> None:
    keys, values = pa.schema([("user", pa.string()), ("day", pa.int64())]), pa.schema([("total", pa.int64())])
    stores = {"totals": (keys, values), "seen": (keys, pa.schema([]))}
    for partition in (0, 1):
        with fleet.state_store(name, partition, stores=stores, shards=3) as store:
            store.store("totals").put(user="ann", day=partition, total=10 * partition)
            store.store("seen").put(user="bob", day=partition)
            store.commit()
    assert fleet.state(name, "totals").parts == ("seen", "totals")
    totals = fleet.state(name, "totals")
    assert totals.schema.names == ["user", "day", "total"]
    assert totals.get({"user": "ann", "day": 1}) == {"user": "ann", "day": 1, "total": 10}
    assert totals.prefix_scan({"user": "ann"}).to_arrow().num_rows == 2
    assert fleet.state(name, "seen").scan().to_arrow().num_rows == 2
    with pytest.raises(sf.InvalidRequestError, match="several parts"):
        fleet.state(name).scan()


def test_a_program_reads_and_leaves_no_trace(fleet: sf.Fleet, read_only: str) -> None:
    name = read_only
    objects = open_object_store(fleet.uri)
    # Of the state: those of other tests are cleaned meanwhile.
    before = {info.path for info in objects.list(name)}, _actors()
    program = (
        "import sys, json, statefleet as sf\n"
        f"state = sf.attach({fleet.uri!r}, address={ray.get_runtime_context().gcs_address!r}).state({name!r})\n"
        "print(json.dumps([state.get({'user': 'u7'}), state.scan().to_arrow().num_rows, 'pyspark' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed == [{"user": "u7", "n": 15, "total": 30, "average": 2.0}, USERS, False]
    offline = sf.attach(fleet.uri, offline=True).state(name)
    assert offline.get({"user": "u7"}) == printed[0]
    assert offline.at(1).get({"user": "u7"}) == {"user": "u7", "n": 5, "total": 5, "average": 1.0}
    live, stored = (reader.scan().to_arrow().sort_by("user") for reader in (fleet.state(name), offline))
    assert live.equals(stored)
    assert ({info.path for info in objects.list(name)}, _actors()) == before
    assert before[0]


def test_a_store_actor_that_dies_is_read_again(fleet: sf.Fleet, read_only: str) -> None:
    state = fleet.state(read_only)
    assert state.get({"user": "u7"}) is not None
    for actor in fleet.status()["store_actors"]:
        if actor["alive"]:
            ray.kill(ray.get_actor(actor["actor_name"], namespace=NAMESPACE), no_restart=False)
    assert state.get({"user": "u7"}) == {"user": "u7", "n": 15, "total": 30, "average": 2.0}
    assert state.scan().to_arrow().num_rows == USERS


def test_look_ups_go_by_a_connection_or_else_by_ray(
    fleet: sf.Fleet, read_only: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {"user": "u7", "n": 15, "total": 30, "average": 2.0}
    attached = sf.attach(fleet.uri)
    state, direct = attached.state(read_only), attached._source._direct  # type: ignore[attr-defined]
    assert state.get({"user": "u7"}) == expected
    (incarnation,) = direct._incarnations.values()
    for _ in range(2):
        until(lambda: bool(incarnation.spare))
        (connection,) = incarnation.spare
        assert state.get({"user": "u7"}) == expected
        assert incarnation.spare == [connection]
        connection.close()
        assert state.get({"user": "u7"}) == expected
        assert state.get({"user": "u7"}) == expected
    with monkeypatch.context() as patched:
        patched.setattr(direct, "begin", lambda *_: None)
        assert state.get({"user": "u7"}) == expected
    (actor,) = [actor for actor in fleet.status()["store_actors"] if actor["alive"]]
    os.kill(actor["pid"], signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(state.get, {"user": "u7"})
            with pytest.raises(TimeoutError):
                waiting.result(3)
            os.kill(actor["pid"], signal.SIGCONT)
            assert waiting.result(60) == expected
    finally:
        os.kill(actor["pid"], signal.SIGCONT)
    assert state.get({"user": "u7"}) == expected


@pytest.mark.replay
def test_the_one_global_group(fleet: sf.Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", EVENTS)
    feed.add(events(0))
    total = fleet.stateful(feed.stream(), name=name).groupBy().agg(F.sum("amount").alias("total"))
    Run(total, "update", tmp_path / "checkpoint", available_now=True).wait()
    whole = fleet.state(name)
    assert (whole.keys, whole.get({})) == ((), {"total": ROWS})
    found = whole.find({})
    assert found.rows == ({"total": ROWS},)
    assert found.shard is not None
    assert whole.at(found.version).scan(partition_id=True).to_arrow().to_pylist() == [
        {"total": ROWS, "partition_id": found.shard}
    ]


def test_a_state_is_read_across_its_rescales(fleet: sf.Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", EVENTS)
    feed.add([("ann", START, 150), ("bob", START, 10), (None, START, 40)])
    for rescales, shards in enumerate((2, 5, 3)):
        if rescales:
            feed.add([("ann", START, 1), (f"new{rescales}", START, 1)])
        grouped = fleet.stateful(feed.stream(), name=name, shards=shards).groupBy("user")
        with Run(grouped.agg(F.sum("amount").alias("total")), "update", tmp_path / "checkpoint") as run:
            run.wait()
        state = fleet.state(name)
        # Asks the coordinator: the shards that were there before do not tell that others have taken over.
        assert state.version == rescales + 1
        assert state.get({"user": "ann"}) == {"user": "ann", "total": 150 + rescales}
        assert state.get({"user": None}) == {"user": None, "total": 40}
        assert state.scan().to_arrow().num_rows == 3 + rescales
    for state in (fleet.state(name), sf.attach(fleet.uri, offline=True).state(name)):
        for version in (1, 2, 3):
            assert state.at(version).get({"user": "ann"}) == {"user": "ann", "total": 149 + version}
            assert state.at(version).scan().to_arrow().num_rows == 2 + version
        differing = sorted((row["user"], row["_change_type"]) for row in state.diff(2, 3).to_pylist())
        assert differing == [("ann", "delete"), ("ann", "insert"), ("new2", "insert")]
        with pytest.raises(sf.VersionNotFoundError, match="rescaled since"):
            state.changes(0).to_arrow()


def _actors() -> set[str]:
    return {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}

"""Queries that are moved from Spark's own stores to the fleet continue as on Spark itself, batch by batch."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from msgspec import structs
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from coordinator.model.errors import CorruptStateError, InvalidRequestError, StateMismatchError, StateStoreError
from coordinator.service.client import CoordinatorClient
from spark_jobs.plan.spark_version import SPARK
from statefleet.fleet import Fleet
from statefleet.migration.checkpoint import NewCheckpoint, SparkCheckpoint
from tests.integration.case_systems import ALL_CASES, CHANGELOGS, FORMAT_2, ROCKSDB, configured
from tests.integration.join_cases import JOIN_CASES
from tests.integration.moved_queries import Import, moved, swap
from tests.integration.operator_cases import RESTART, Case, Step
from tests.integration.streams import Feed, Run, short_list

KEPT_JOIN = "JO1 left outer of windows"
JOIN_IN_ONE_STORE = {"spark.sql.streaming.join.stateFormatVersion": "3"}
SPARKS = [name for name, case in ALL_CASES.items() if case.spark and sum(step != RESTART for step in case.steps) > 1]


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.replay
@pytest.mark.parametrize("case_name", SPARKS)
def test_a_moved_query_goes_on_as_spark_does(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, case_name: str
) -> None:
    case = ALL_CASES[case_name]
    steps = sum(isinstance(step, Step) for step in case.steps)
    moved(spark, fleet, case, name, tmp_path, at=(steps + 1) // 2)


@pytest.mark.replay
def test_a_checkpoint_of_rocksdb_with_an_open_batch_is_moved_by_the_second_of_two_imports(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"

    def before(frame: DataFrame) -> None:
        # The newest batch was begun and not committed.
        newest = max(int(path.name) for path in (old / "commits").iterdir() if path.name.isdecimal())
        for file in (f"{newest}", f".{newest}.crc"):
            (old / "commits" / file).unlink()
        with monkeypatch.context() as patched:
            patched.setattr(SparkCheckpoint, "check_unchanged", _killed)
            with pytest.raises(KeyboardInterrupt):
                fleet.import_checkpoint(str(old), frame, checkpoint=str(new))
        assert not new.exists()

    case = ALL_CASES["SW sessions, append"]
    first, _, grown, *_, last, _ = case.steps
    moved(spark, fleet, replace(case, steps=[first, grown, last]), name, tmp_path, at=2, conf=CHANGELOGS, before=before)


@pytest.mark.skipif(not SPARK.READS_STATE, reason="Spark 3.5 writes format 1 only")
@pytest.mark.parametrize("case_name", ["SW sessions, append", "JO1 left outer of windows"])
def test_a_checkpoint_of_format_2_is_moved(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, case_name: str
) -> None:
    moved(spark, fleet, ALL_CASES[case_name], name, tmp_path, at=2, conf=FORMAT_2)
    assert "stateUniqueIds" in (tmp_path / "old" / "commits" / "0").read_text()


@pytest.mark.skipif(not SPARK.READS_STATE, reason="Spark 3.5 does not write such a state")
@pytest.mark.parametrize("conf", [ROCKSDB, FORMAT_2], ids=["format 1", "format 2"])
@pytest.mark.parametrize("case_name", short_list([name for name in SPARKS if name in JOIN_CASES], [KEPT_JOIN]))
def test_a_join_with_one_store_is_moved(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, case_name: str, conf: dict[str, str]
) -> None:
    moved(spark, fleet, ALL_CASES[case_name], name, tmp_path, at=2, conf={**conf, **JOIN_IN_ONE_STORE})


@pytest.mark.skipif(not SPARK.READS_STATE, reason="Spark 3.5 does not write such a state")
def test_swapped_partitions_of_a_join_with_one_store_are_found(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    with pytest.raises(StateStoreError, match=r"have rows of partition \d: they were swapped"):
        moved(
            spark, fleet, ALL_CASES[KEPT_JOIN], name, tmp_path, at=2, conf={**ROCKSDB, **JOIN_IN_ONE_STORE},
            before=lambda _: swap(tmp_path / "old/state/0"),
        )  # fmt: skip
    assert not (tmp_path / "new").exists()


@pytest.mark.replay
@pytest.mark.skipif(SPARK.READS_STATE, reason="Spark 4 reads it")
def test_spark_35_does_not_read_a_join_with_one_store(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    def of_format_3(frame: DataFrame) -> None:
        # Spark 3.5 cannot write such a state.
        for path in (tmp_path / "old/offsets").glob("[0-9]*"):
            text = path.read_text()
            assert '"spark.sql.streaming.join.stateFormatVersion":"2"' in text
            overwrite(path, text.replace('join.stateFormatVersion":"2"', 'join.stateFormatVersion":"3"'))

    with pytest.raises(InvalidRequestError, match="import it with Spark 4"):
        moved(spark, fleet, ALL_CASES[KEPT_JOIN], name, tmp_path, at=2, before=of_format_3)


#: Aggregates of the columns below, one of each way in which Spark keeps them.
AGGREGATES = (
    "count(*) n", "count(v) nv", "sum(v) s", "sum(d) sd", "sum(big) sb", "avg(v) a", "avg(d) ad", "avg(big) ab",
    "avg(x) ax", "sum(x) sx", "min(k) mk", "max(x) mx", "first(v) f", "last(v, true) l", "stddev(x) sd2", "corr(x, v) c",
    "max_by(k, v) mb", "count_if(v > 1) ci", "approx_count_distinct(v) acd", "sort_array(collect_list(v)) cl",
    "sort_array(collect_set(v)) cs", "bit_xor(v) bx", "regr_slope(x, v) rs", "sum(v) FILTER (WHERE v > 1) sf",
    "bool_or(v > 2) bo", "try_sum(v) ts", "skewness(x) sk", "regr_r2(x, v) r2",
    "median(v) md", "sum(make_ym_interval(1, cast(v as int))) sy", "avg(make_ym_interval(0, cast(v as int))) ay",
    "percentile(x, array(0.25, 0.75)) pc", "mode(k) mo",
)  # fmt: skip


@pytest.fixture
def importing(fleet: Fleet, tmp_path: Path, name: str) -> Import:
    return Import(fleet, tmp_path, name, Feed(tmp_path / "in", EVENTS))


@pytest.mark.replay
def test_what_cannot_be_imported_begins_from_nothing(fleet: Fleet, importing: Import, name: str) -> None:
    aggregates = F.count("*").alias("n"), F.percentile_approx("v", 0.5).alias("p"), F.sum("v").alias("s")
    importing.feed.add(events(("a", 1, 1), ("a", 2, 2), ("b", 3, 3)))
    importing.run_on_spark(importing.feed.stream().groupBy("k").agg(*aggregates))
    frame = importing.stateful().groupBy("k").agg(*aggregates)
    importing.refused(frame, r"percentile_approx.*from_nothing|from_nothing.*percentile_approx", InvalidRequestError)
    importing.refused(frame, "not of all of them", InvalidRequestError, from_nothing=["n", "p", "s"])
    assert importing.rows(frame, from_nothing=["p"]) == {name: 2}
    importing.feed.add(events(("a", 4, 9)))
    with Run(frame, "update", importing.new) as run:
        assert [tuple(row) for row in run.take()] == [("a", 3, 9, 12)]
    assert sorted(map(tuple, (row.values() for row in fleet.state(name).scan().to_arrow().to_pylist()))) == [
        ("a", 3, 9, 12),
        ("b", 1, None, 3),
    ]


@pytest.mark.replay
@pytest.mark.usefixtures("months_as_numbers")
def test_every_buffer_that_is_imported_goes_on(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str) -> None:
    def query(ops: Any, inputs: Mapping[str, DataFrame]) -> DataFrame:
        columns = inputs["a"].selectExpr("k", "v", "x", "cast(x as decimal(5,2)) d", "cast(x as decimal(20,4)) big")
        grouped = ops(columns, "agg", "update").groupBy("k", F.expr("nullif(x, 1.5)").alias("z"))
        return grouped.agg(*map(F.expr, AGGREGATES))  # type: ignore[no-any-return]

    rows = [
        [("a", 1, 1.5), ("a", 2, 2.25), ("b", None, None), (None, 3, -0.0)],
        [("a", 3, 1.5), ("b", None, None), (None, 4, 0.0), ("c", 5, float("nan"))],
        [("a", 7, 1.5), ("a", 1, 2.25), ("b", 9, None), (None, 2, 0.0), ("c", 6, float("nan")), ("d", 1, 1.0)],
    ]
    steps = [Step({"a": batch}, None) for batch in rows]
    case = Case({"a": "k string, v bigint, x double"}, query, steps, mode="update")
    # By ANSI mode, which Spark 4 has on, a correlation with values that are all the same divides by zero.
    moved(spark, fleet, case, name, tmp_path, at=2, conf={"spark.sql.ansi.enabled": "false"})


def counted(fleet: Fleet, frame: DataFrame, name: str) -> DataFrame:
    grouped = fleet.stateful(frame, name=name, shards=2).groupBy("k", F.window("t", "10 seconds"))
    return grouped.agg(F.count("*").alias("n"), F.sum("v"), F.min("v"), F.first("v"), F.collect_list("v").alias("vs"))


EVENTS = pa.schema([("k", pa.string()), ("t", pa.timestamp("us", tz="UTC")), ("v", pa.int64())])


def events(*rows: tuple[str | None, int, int | None]) -> list[tuple[Any, ...]]:
    return [(key, dt.datetime.fromtimestamp(second, dt.UTC), value) for key, second, value in rows]


@pytest.mark.replay
def test_what_was_exported_is_imported_and_what_does_not_fit_leaves_nothing(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(tmp_path / "in", EVENTS)
    feed.add(events(("a", 1, 1), ("a", 2, None), (None, 3, 3), ("b", 14, 4)))
    Run(counted(fleet, feed.stream(), name), "update", tmp_path / "ck", available_now=True).wait()
    table = fleet.state(name).scan().to_spark(spark)
    copy, checkpoint = f"{name}-copy", tmp_path / "copy"
    again = Feed(tmp_path / "again", EVENTS)
    frame = counted(fleet, again.stream(), copy)
    averages = fleet.stateful(again.stream(), name=f"{copy}-avg", shards=2).groupBy("k").avg("v")
    for query, rows, refusal in (
        (averages, table.select("k", F.lit(1.0).alias("avg(v)")), "avg holds does not follow"),
        (frame, table.unionAll(table), "two rows of the table have the same"),
        (frame, table.drop("n"), "lacks columns"),
    ):
        with pytest.raises(InvalidRequestError, match=refusal):
            fleet.import_table(query, rows, checkpoint=str(checkpoint))
    assert not checkpoint.exists()
    assert fleet._coordinator.describe_state(copy) is None
    # As after a task that was killed in the middle.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CoordinatorClient, "list_versions", _one_row_less(CoordinatorClient.list_versions))
        with pytest.raises(StateMismatchError, match=r"import again.*rows=`3` imported_rows=`2`"):
            fleet.import_table(frame, table, checkpoint=str(checkpoint))
    assert fleet.import_table(frame, table, checkpoint=str(checkpoint)).rows == {copy: 3}
    assert same(fleet.state(copy)) == same(fleet.state(name))
    more = events(("a", 4, 5), ("c", 5, 6))
    for input_feed in (feed, again):
        input_feed.add(more)
    Run(counted(fleet, feed.stream(), name), "update", tmp_path / "ck", available_now=True).wait()
    Run(counted(fleet, again.stream(), copy), "update", checkpoint, available_now=True).wait()
    assert same(fleet.state(copy)) == same(fleet.state(name))
    # Complete: nothing more is done.
    assert fleet.import_table(frame, table, checkpoint=str(checkpoint)).rows == {copy: 4}


def _one_row_less(list_versions: Callable[..., Any]) -> Callable[..., Any]:
    """Return a coordinator's answer of which a row of the newest version is missing."""

    def answer(*args: Any) -> Any:
        newest, *others = list_versions(*args)
        return (structs.replace(newest, state_rows=newest.state_rows - 1), *others)

    return answer


def same(state: Any) -> list[str]:
    return sorted(map(repr, state.scan().to_arrow().to_pylist()))


@pytest.mark.replay
def test_below_a_select_aggregates_are_in_its_order_and_what_it_leaves_out_is_not_there(
    fleet: Fleet, importing: Import, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, old, new = importing.feed, importing.old, importing.new

    def query(frame: Any) -> DataFrame:
        once, tenfold, most = (
            F.sum("v").alias("once"),
            F.sum(F.col("v") * 10).alias("tenfold"),
            F.max("v").alias("most"),
        )
        selected: DataFrame = frame.groupBy("k").agg(once, tenfold, most).select("k", "tenfold", "once")
        return selected

    feed.add(events(("a", 1, 1), ("b", 2, 2)))
    with Run(query(feed.stream()), "update", old) as run:
        assert run.take_batches() == {0: [("a", 10, 1), ("b", 20, 2)]}
    ours = query(importing.stateful())
    importing.refused(ours, r"leaves out max.*nothing was written.*from_nothing")
    with monkeypatch.context() as patched:
        patched.setattr(NewCheckpoint, "_end", _killed)
        with pytest.raises(KeyboardInterrupt):
            importing.rows(ours, from_nothing=["most"])
    with pytest.raises(AnalysisException, match="belongs to another query"):
        Run(ours, "update", new)
    # A query that was started as it was has left an id of its own there, and does not keep the next import from making it whole.
    (new / "metadata").write_text(json.dumps({"id": "7f1b5f0e-95b5-4a25-9d0c-4a8a8f0a2c11"}))
    importing.rows(ours, from_nothing=["most"])
    other_query = query(fleet.stateful(feed.stream(), name=f"{name}-other", shards=2))
    with pytest.raises(StateMismatchError, match="other states"):
        importing.rows(other_query, from_nothing=["most"])
    feed.add(events(("a", 4, 3)))
    for frame, checkpoint in ((query(feed.stream()), old), (ours, new)):
        with Run(frame, "update", checkpoint) as run:
            assert run.take_batches() == {1: [("a", 40, 4)]}


def overwrite(file: Path, text: str = "") -> None:
    (file.parent / f".{file.name}.crc").unlink()
    file.write_text(text)


def with_ids_of_one_partition(commit: Path) -> None:
    version, body = commit.read_text().splitlines()
    body = json.dumps({**json.loads(body), "stateUniqueIds": {"0": [["an id"]]}})
    overwrite(commit, f"{version}\n{body}")


def swap_newest(old: Path) -> None:
    """Swap the files of the first version of two partitions, with Hadoop's checksums of them."""
    for file in ("1.delta", ".1.delta.crc"):
        first, second = (old / "state/0" / partition / file for partition in "01")
        first_bytes, second_bytes = first.read_bytes(), second.read_bytes()
        first.write_bytes(second_bytes)
        second.write_bytes(first_bytes)


def break_newest(old: Path) -> None:
    (broken,) = (old / "state" / "0" / "1").glob("1.delta")
    broken.write_bytes(broken.read_bytes()[:10])
    (broken.parent / ".1.delta.crc").unlink()


#: What is done to a checkpoint whose newest batch is 0 and whose state has two partitions, the error, and what it says.
DAMAGES: Mapping[str, tuple[Callable[[Path], object], type[StateStoreError], str]] = {
    **{
        damage: (make, CorruptStateError, says)
        for damage, make, says in (
            (
                "the last partition is missing",
                lambda old: shutil.rmtree(old / "state/0/1"),
                r"expected=`2` missing=`\[1\]`",
            ),
            ("the first partition is missing", lambda old: shutil.rmtree(old / "state/0/0"), r"missing=`\[0\]`"),
            ("one more", lambda old: shutil.copytree(old / "state/0/1", old / "state/0/2"), r"unexpected=`\[2\]`"),
            ("no offsets", lambda old: (old / "offsets/0").unlink(), "missing, empty or damaged.*offsets/0"),
            ("empty offsets", lambda old: overwrite(old / "offsets/0"), "missing, empty or damaged.*offsets/0"),
            ("an empty commit", lambda old: overwrite(old / "commits/0"), "missing, empty or damaged.*commits/0"),
            ("empty metadata", lambda old: overwrite(old / "metadata"), "missing, empty or damaged.*metadata"),
            (
                "offsets of another checksum",
                lambda old: (old / "offsets/0").write_text("v1\n"),
                r"checksum beside it.*restore both.*offsets/0",
            ),
        )
    },
    "ids of another state": (
        lambda old: with_ids_of_one_partition(old / "commits/0"),
        *(
            (CorruptStateError, "missing, empty or damaged.*commits/0")
            if SPARK.READS_STATE
            else (InvalidRequestError, "format 2.*import it with Spark 4")
        ),
    ),
    # Spark itself would not see it.
    "swapped": (swap_newest, StateStoreError, r"have rows of partition \d: they were swapped"),
    "broken": (break_newest, StateStoreError, r"not finished.*import again"),
}


def test_what_does_not_fit_a_checkpoint_or_is_not_whole_is_refused_before_anything_is_written(
    importing: Import, tmp_path: Path, name: str
) -> None:
    feed, old, stateful = importing.feed, importing.old, importing.stateful
    feed.add(events(*((key, 1, 1) for key in "abcdefgh")))
    sum_, count = F.sum("v"), F.count("*")
    frame = stateful().groupBy("k").agg(sum_, count)
    with Run(feed.stream().groupBy("k").agg(sum_, count), "update", old) as run:
        run.wait()
        importing.refused(frame, "is running.*stop it first", InvalidRequestError)
    other_order = stateful().groupBy("k").agg(count, sum_)
    importing.refused(other_order, r"aggregates of the query.*existing=.*sum bigint, count")
    importing.refused(stateful().groupBy("v").agg(sum_, count), "grouping columns of the query.*existing=.*k string")
    importing.refused(stateful().groupBy("k").agg(sum_), "aggregates of the query")
    importing.refused(stateful().dropDuplicates(["k"]), "values of the query")
    importing.refused(stateful().topN(3, ["k"], ["v"]), "is not imported", InvalidRequestError)
    importing.refused(stateful().limit(3), "columns of the query")
    importing.refused(stateful().join(feed.stream(), "k"), "operator is another one")
    importing.refused(stateful(), "no stateful operator of a fleet; nothing was written", InvalidRequestError)
    importing.refused(
        stateful().groupBy("k"), "no stateful operator of a fleet; nothing was written", InvalidRequestError
    )
    importing.refused(stateful().groupBy("k").count(), "no checkpoint", InvalidRequestError, source=tmp_path / "in")
    # An import goes by the frame that was built last of a name.
    frame = stateful().groupBy("k").agg(sum_, count)
    for damage, (make, kind, refusal) in DAMAGES.items():
        damaged = tmp_path / damage.replace(" ", "-")
        shutil.copytree(old, damaged)
        make(damaged)
        importing.refused(frame, refusal, kind, damaged)
    assert importing.rows(frame) == {name: 8}


def describe(old: Path, keys: str, values: str) -> None:
    """Describe an operator's state as Spark 3.1 did: each as DataOutput.writeUTF writes a text."""
    file = old / "state/0/0/_metadata/schema"
    (file.parent / ".schema.crc").unlink()
    file.write_bytes(b"".join(len(text).to_bytes(2, "big") + text.encode() for text in ("v1", keys, values)))


@pytest.mark.replay
def test_keys_that_spark_before_331_described_as_its_input_are_imported(
    spark: SparkSession, importing: Import, tmp_path: Path, name: str
) -> None:
    feed = importing.feed
    feed.add(events(("a", 1, 1), ("b", 2, 2), (None, 3, 3)))
    frames = feed.stream().dropDuplicates(["k"]), importing.stateful().dropDuplicates(["k"])
    counted = tmp_path / "counted"
    # The values have the keys as well, as an input has.
    with configured(spark, {"spark.sql.streaming.aggregation.stateFormatVersion": "1"}):
        Run(feed.stream().groupBy("k").count(), "update", counted, available_now=True).wait()
    importing.refused(frames[1], r"(?s)not finished.*is of another operator", StateStoreError, counted)
    importing.run_on_spark(frames[0], "append")
    describe(importing.old, spark.createDataFrame([], "k string").schema.json(), feed.stream().schema.json())
    assert importing.rows(frames[1]) == {name: 3}
    feed.add(events(("a", 4, 4), ("c", 5, 5), (None, 6, 6)))
    for frame, checkpoint in zip(frames, (importing.old, importing.new), strict=True):
        with Run(frame, "append", checkpoint) as run:
            assert [row.k for row in run.take()] == ["c"]


def test_what_spark_did_not_write_down_it_writes_with_another_batch(fleet: Fleet, importing: Import, name: str) -> None:
    def run_a_batch() -> None:
        importing.feed.add(events(("a", 1, 1), ("b", 2, 2)))
        importing.run_on_spark(importing.feed.stream().groupBy("k").count())

    run_a_batch()
    run_a_batch()
    frame = importing.stateful().groupBy("k").count()
    # As of Spark 3.0, then as of Spark 2.1.
    shutil.rmtree(importing.old / "state/0/0/_metadata")
    importing.refused(frame, r"Spark before 3\.1.*run a batch on this version of Spark", StateMismatchError)
    shutil.rmtree(importing.old / "commits")
    importing.refused(frame, r"no log of committed batches.*run a batch on this version", InvalidRequestError)
    run_a_batch()
    assert importing.rows(frame) == {name: 2}
    assert sorted(row["count"] for row in fleet.state(name).scan().to_arrow().to_pylist()) == [3, 3]


def test_the_one_partition_of_an_operator_without_keys_is_all_of_it(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", EVENTS)
    feed.add(events(("a", 1, 1), ("b", 2, 2)))
    limited = fleet.stateful(feed.stream(), name=f"{name}-limit", shards=1).limit(3)
    total = fleet.stateful(feed.stream(), name=f"{name}-total", shards=1).groupBy().count()
    for number, (sparks, frame, mode) in enumerate(
        ((feed.stream().limit(3), limited, "append"), (feed.stream().groupBy().count(), total, "update"))
    ):
        old = tmp_path / f"old{number}"
        Run(sparks, mode, old, available_now=True).wait()
        # Spark 4 has a file about the operator beside its partitions.
        assert {partition.name for partition in (old / "state" / "0").iterdir()} - {"_metadata"} == {"0"}
        imported = fleet.import_checkpoint(str(old), frame, checkpoint=str(tmp_path / f"new{number}"))
        assert list(imported.rows.values()) == [1]

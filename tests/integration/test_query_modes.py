"""A single changed line: the operator has the output mode of its query, and its columns are those of Spark's own operator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from statefleet.fleet import Fleet
from tests.integration.case_systems import configured
from tests.integration.streams import Feed, Run, stopping

ROWS = pa.schema([("k", pa.string()), ("x", pa.int64()), ("v", pa.int64())])

Build = Callable[[Any], DataFrame]


def timed(feed: Feed) -> DataFrame:
    return feed.stream().withColumn("t", F.timestamp_seconds("x")).withWatermark("t", "10 seconds")


def words(rows: Any) -> DataFrame:
    return rows.groupBy("k").count()  # type: ignore[no-any-return]


def sessions(rows: Any) -> DataFrame:
    return rows.groupBy(F.session_window("t", "5 seconds"), "k").count()  # type: ignore[no-any-return]


NAMES: dict[str, Build] = {
    "sorted by a column of the source": lambda rows: rows.groupBy(rows.k).count().orderBy(rows.k),
    "filtered by it": lambda rows: rows.groupBy(rows.k).count().where(rows.k != "a"),
    "selected": lambda rows: rows.groupBy(rows.k).count().select(rows.k, "count"),
    "of its alias": lambda rows: rows.alias("a").groupBy("a.k").agg(F.max("v").alias("m")).select("a.k", "m"),
}
FIRST: dict[str, Build] = {
    "filtered by another column": lambda rows: rows.dropDuplicates(["k", "t"]).where(rows.v > 1),
    "selected after limit": lambda rows: rows.limit(3).select(rows.k),
    "of the alias after dropDuplicates": lambda rows: rows.alias("a").dropDuplicates(["k"]).select("a.k"),
    "dropped": lambda rows: rows.dropDuplicates(["k"]).drop(rows.x),
}


@pytest.mark.filterwarnings("ignore::spark_jobs.plan.operator_rules.UnboundedStateWarning")
def test_columns_are_named_as_after_sparks_own_operator(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", ROWS)
    feed.add([("a", 1, 0), ("b", 2, 1), ("b", 2, 5), ("c", 3, 3)])
    for number, (case, build) in enumerate({**NAMES, **FIRST}.items()):
        rows = timed(feed)
        ours, spark_frame = (build(frame) for frame in (fleet.stateful(rows, name=f"{name}-{number}", shards=1), rows))
        assert ours.schema == spark_frame.schema, case
        assert [str(attribute) for attribute in attributes(ours)] == [
            str(attribute) for attribute in attributes(spark_frame)
        ], case
    mode = "complete"
    frame = NAMES["sorted by a column of the source"](fleet.stateful(timed(feed), name=name, shards=1))
    assert Run(frame, mode, tmp_path / "ck", available_now=True).take() == [("a", 1), ("b", 2), ("c", 1)]


@pytest.mark.filterwarnings("ignore::spark_jobs.plan.operator_rules.UnboundedStateWarning")
def test_views_are_made_of_what_an_operator_is_given_and_of_what_it_gives(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(tmp_path / "in", ROWS)
    for batch in ([("a", 1, 0), ("b", 2, 1), ("b", 2, 5)], [("b", 3, 3)]):
        feed.add(batch)
    source, result = (f"{name}_{part}".replace("-", "_") for part in ("given", "result"))
    timed(feed).createOrReplaceTempView(source)

    def counts(line: Callable[[DataFrame], Any], rows: DataFrame) -> DataFrame:
        counted = (
            line(rows)
            .groupBy(rows.k, f"{source}.x")
            .count()
            .where(rows.k != "a")
            .select(rows.k, f"{source}.x", "count")
        )
        counted.createOrReplaceTempView(result)
        return spark.sql(f"select {result}.k as key, x + count as n from {result}")

    def ours(rows: DataFrame) -> Any:
        return fleet.stateful(rows, name=name, shards=2)

    frames = [counts(line, spark.table(source).where("v < 9")) for line in (ours, lambda rows: rows)]
    assert frames[0].schema == frames[1].schema
    emitted = [
        Run(frame, "update", tmp_path / str(n), available_now=True).take_batches() for n, frame in enumerate(frames)
    ]
    assert emitted[0] == emitted[1] == {0: [("b", 4)], 1: [("b", 4)]}


def attributes(frame: DataFrame) -> list[Any]:
    output = frame._jdf.queryExecution().analyzed().output()
    return [(output.apply(index).name(), list_of(output.apply(index).qualifier())) for index in range(output.size())]


def list_of(names: Any) -> list[str]:
    return [names.apply(index) for index in range(names.size())]


def counts_by_window(rows: Any) -> DataFrame:
    return rows.groupBy(F.window("t", "5 seconds")).count().select("count")  # type: ignore[no-any-return]


def another_mode(queries: str) -> str:
    """Return what is said of an operator of another mode: in Spark's words, which differ by version, or the fleet's."""
    return f"the query runs in {queries} mode|(?i:{queries}) output mode not supported|streaming output mode: {queries}"


#: A query, the output modes of its operator and of itself, and what is said.
REFUSED: dict[str, tuple[Build, str | None, str, str]] = {
    "append without a watermark": (words, None, "append", "append mode needs a watermark"),
    "a sorted update": (lambda rows: words(rows).orderBy("k"), None, "update", "Sorting is not supported"),
    "topN in append mode": (
        lambda rows: rows.topN(1, "k", "v"), None, "append", r"output mode \[\"update\"\] and the query"
    ),
    "update in an append query": (words, "update", "append", another_mode("append")),
    "append in an update query": (counts_by_window, "append", "update", another_mode("update")),
    "complete in an update query": (words, "complete", "update", another_mode("update")),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::spark_jobs.plan.operator_rules.UnboundedStateWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_the_mode_is_refused_by_start(fleet: Fleet, tmp_path: Path, name: str, case: str) -> None:
    build, own, mode, says = REFUSED[case]
    feed = Feed(tmp_path / "in", ROWS)
    feed.add([("a", 1, 0)])
    frame = build(fleet.stateful(timed(feed), name=name, outputMode=own, shards=2))
    with pytest.raises(AnalysisException, match=says) as refused:
        frame.writeStream.outputMode(mode).format("noop").option("checkpointLocation", str(tmp_path / "ck")).start()
    assert "__route" not in str(refused.value)
    assert "MapInArrow" not in str(refused.value)
    assert name not in [query["name"] for query in fleet.status()["queries"]], "nothing was made"


@pytest.mark.filterwarnings("ignore::spark_jobs.plan.operator_rules.UnboundedStateWarning")
def test_sparks_checks_are_left_out_where_they_are_turned_off(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(tmp_path / "in", ROWS)
    feed.add([("b", 1, 0), ("a", 1, 0)])
    with configured(spark, {"spark.sql.streaming.unsupportedOperationCheck": "false"}):
        numbered = timed(feed).withColumn("n", F.monotonically_increasing_id() * 0)
        frame = fleet.stateful(numbered, name=name, shards=2).groupBy("k", "n").count()
        assert Run(frame, "update", tmp_path / "ck", available_now=True).take_batches()[0] == [("a", 0, 1), ("b", 0, 1)]
        # What the operator has not, it has not.
        with pytest.raises(AnalysisException, match="append mode needs a watermark"):
            Run(frame, "append", tmp_path / "ck")


def rows_in_memory(frame: DataFrame, table: str, mode: str = "complete") -> Any:
    return frame.writeStream.outputMode(mode).format("memory").queryName(table)


@pytest.mark.filterwarnings("ignore::spark_jobs.plan.operator_rules.UnboundedStateWarning")
def test_a_state_of_another_query_is_refused_before_any_task(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", ROWS)
    feed.add([("a", 1, 0)])
    counts, table = words(fleet.stateful(timed(feed), name=name, shards=2)), name.replace("-", "_")
    query = rows_in_memory(counts, table).start()
    query.processAllAvailable()
    with pytest.raises(AnalysisException, match=r"another query that is running has this state.*one foreachBatch"):
        rows_in_memory(counts, f"{table}_2").start()
    query.stop()
    other_counts = words(fleet.stateful(timed(feed), name=f"{name}-kept", shards=2))
    query = rows_in_memory(other_counts, f"{table}_2").option("checkpointLocation", str(tmp_path / "ck")).start()
    query.processAllAvailable()
    query.stop()
    with pytest.raises(AnalysisException, match=r"has no checkpointLocation.*each start of it is a new query"):
        rows_in_memory(other_counts, f"{table}_3").start()
    with pytest.raises(AnalysisException, match=r"belongs to another query \(each checkpoint"):
        rows_in_memory(other_counts, f"{table}_3").option("checkpointLocation", str(tmp_path / "another")).start()
    with pytest.raises(AnalysisException, match="made in another output mode"):
        rows_in_memory(other_counts, f"{table}_3", "update").option("checkpointLocation", str(tmp_path / "ck")).start()


@pytest.mark.filterwarnings("ignore::spark_jobs.plan.operator_rules.UnboundedStateWarning")
def test_a_cell_without_a_checkpoint_runs_as_often_as_it_is_run(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed, table = Feed(tmp_path / "in", ROWS), name.replace("-", "_")

    def cell(build: Build, shards: int) -> Any:
        with stopping(
            rows_in_memory(build(fleet.stateful(timed(feed), name=name, shards=shards)), table).start()
        ) as query:
            query.processAllAvailable()
            return sorted(tuple(row) for row in spark.table(table).collect()), len(fleet.state(name).scan().to_pandas())

    for number in range(2):
        feed.add([("a", number, 0), ("b", number, 1)])
        assert cell(words, 2) == ([("a", number + 1), ("b", number + 1)], 2)
    # What is changed in it, is.
    assert cell(lambda rows: rows.groupBy("v").agg(F.count("*"), F.max("x")), 3) == ([(0, 2, 1), (1, 2, 1)], 2)
    # With a checkpoint, it is a state that stays.
    kept = words(fleet.stateful(timed(feed), name=name, shards=3))
    run = Run(kept, "complete", tmp_path / "ck")
    run.wait()
    run.stop()
    with pytest.raises(AnalysisException, match="each start of it is a new query"):
        cell(words, 3)


@pytest.mark.filterwarnings("ignore::spark_jobs.plan.operator_rules.UnboundedStateWarning")
def test_of_two_queries_that_start_on_one_state_the_second_one_runs_no_task(
    fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(tmp_path / "in", ROWS)
    counts = words(fleet.stateful(timed(feed), name=name, shards=2))
    # Without input neither has planned a batch when the other one starts.
    runs = [Run(counts, "update", tmp_path / str(number)) for number in range(2)]
    feed.add([("a", 1, 0)])
    ended = []
    for run in runs:
        try:
            run.wait()
        except StreamingQueryException as error:
            ended.append(str(error))
    for run in runs:
        run.stop()
    (refused,) = ended
    assert "another query that is running has this state" in refused.splitlines()[0]
    assert sorted(row["count"] for run in runs for rows in run.batches.values() for row in rows) == [1]


@pytest.mark.filterwarnings("ignore::spark_jobs.plan.operator_rules.UnboundedStateWarning")
def test_two_operators_of_one_frame_are_refused_in_one_query(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", ROWS)
    frame = fleet.stateful(timed(feed), name=name, shards=2)
    union = frame.dropDuplicates(["k"]).select("k").union(frame.dropDuplicates(["x"]).select("k"))
    with pytest.raises(AnalysisException, match="two stateful operators of the query have the same name"):
        union.writeStream.format("noop").start()


ALIKE: dict[str, tuple[Build, str]] = {
    "rows that pass": (lambda rows: rows.dropDuplicates(["k"]), "append"),
    "keys, which may differ in case, and values": (
        lambda rows: rows.groupBy("c", "s").agg(F.first("s").alias("first"), F.max("l").alias("l")),
        "update",
    ),
}


@pytest.mark.filterwarnings("ignore::spark_jobs.plan.operator_rules.UnboundedStateWarning")
@pytest.mark.parametrize("case", ALIKE)
def test_structs_with_two_fields_of_one_name_are_held(fleet: Fleet, tmp_path: Path, name: str, case: str) -> None:
    build, mode = ALIKE[case]
    feed = Feed(tmp_path / "in", ROWS)
    feed.add([("a", 1, 0), ("b", 2, 1), ("a", 1, 0), ("c", 3, 3)])

    def rows() -> DataFrame:
        twice = F.struct(F.col("x").alias("a"), F.col("v").alias("a"))
        case = F.struct(F.col("x").alias("b"), F.col("v").alias("B"))
        return feed.stream().select("k", twice.alias("s"), case.alias("c"), F.array(twice).alias("l"))

    frames = build(fleet.stateful(rows(), name=name, shards=2)), build(rows())
    assert frames[0].schema == frames[1].schema
    emitted = [Run(frame, mode, tmp_path / str(n), available_now=True).take_batches() for n, frame in enumerate(frames)]
    assert emitted[0] == emitted[1]
    assert any(emitted[0].values())

"""Programs in the manner of Spark's Structured Streaming guide, each as it would be written for Spark and with the one changed line.

A program is a function of a :class:`Guide`. What it makes of its input has to be the same, whether its line gives it the DataFrame that
it had or ``fleet.stateful(df, name=..)``.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery, StreamingQueryListener
from pyspark.sql.streaming.listener import QueryIdleEvent, QueryProgressEvent, QueryStartedEvent, QueryTerminatedEvent
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from statefleet.fleet import Fleet
from tests.clocks import until
from tests.integration.streams import Feed, short_list, stopping

LINES = pa.schema([("at", pa.int64()), ("value", pa.string())])
ADS = pa.schema([("at", pa.int64()), ("ad", pa.int64())])
TEXT = [
    [(1, "apache spark"), (3, "spark streams")],
    [(12, "ray and spark"), (14, "streams of words")],
    [(2, "late words"), (31, "spark again")],
    [(60, "the end"), (61, "of it")],
]
SHOWN = [[(10, 1), (11, 2), (12, 3)], [(30, 4), (31, 2)], [(90, 9)]]
CLICKED = [[(12, 1), (13, 7)], [(33, 4)], [(91, 8)]]


@dataclass
class Guide:
    """The arguments of a program: a session, its inputs, a folder of its own, and the line.

    Attributes
    ----------
    line
        What is changed: from a streaming DataFrame and a name to what the program's next stateful operator is called of.
    side
        Different of the two runs of a program.
    """

    spark: SparkSession
    line: Callable[..., Any]
    inputs: Path
    folder: Path
    side: str

    def lines(self) -> DataFrame:
        """Return lines of text with an event time."""
        return self._timed(Feed(self.inputs / "lines", LINES, self.spark))

    def words(self) -> DataFrame:
        """Return the words of the lines."""
        return self.lines().select("t", F.explode(F.split("value", " ")).alias("word"))

    def impressions(self) -> DataFrame:
        impressions = self._timed(Feed(self.inputs / "shown", ADS, self.spark))
        return impressions.select(F.col("ad").alias("impression_ad"), F.col("t").alias("impression_time"))

    def clicks(self) -> DataFrame:
        clicked = self._timed(Feed(self.inputs / "clicked", ADS, self.spark))
        return clicked.select(F.col("ad").alias("click_ad"), F.col("t").alias("click_time"))

    def result(self, frame: DataFrame, mode: str | None = None) -> list[tuple[Any, ...]]:
        """Run a query, and return its table in memory; without an order unless it is sorted."""
        table = f"result_{self.side}"
        writer = frame.writeStream.format("memory").queryName(table).trigger(availableNow=True)
        query = (writer if mode is None else writer.outputMode(mode)).start()
        query.awaitTermination()
        return rows_of(self.spark.table(table))

    @staticmethod
    def _timed(feed: Feed) -> DataFrame:
        return feed.stream().withColumn("t", F.timestamp_seconds("at"))


def rows_of(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted((tuple(row) for row in frame.collect()), key=repr)


# -- aggregations ------------------------------------------------------------------------------------------------------


def word_count_of_a_socket(guide: Guide) -> Any:
    with lines_on_a_socket(["apache spark", "spark streams", "ray and spark"]) as port:
        source = guide.spark.readStream.format("socket").option("host", "localhost").option("port", port)
        words = source.load().select(F.explode(F.split("value", " ")).alias("word"))
        counts = guide.line(words, "words").groupBy("word").count()
        table = f"socket_{guide.side}"
        with stopping(counts.writeStream.outputMode("complete").format("memory").queryName(table).start()):
            until(lambda: sum(count for _, count in rows_of(guide.spark.table(table))) == 7)
    return rows_of(guide.spark.table(table))


def word_count_on_the_console(guide: Guide) -> Any:
    counts = guide.line(guide.words(), "words").groupBy("word").count()
    query = counts.writeStream.outputMode("complete").format("console").trigger(availableNow=True).start()
    query.awaitTermination()
    return [query.exception(), states(query)]


def words_sorted_in_complete_mode(guide: Guide) -> Any:
    words = guide.words()
    counts = guide.line(words, "words").groupBy(words.word).count()
    return guide.result(counts.orderBy(F.desc("count"), words.word).limit(3), "complete")


def running_counts_of_devices(guide: Guide) -> Any:
    guide.lines().createOrReplaceTempView(f"lines_{guide.side}")
    loud = guide.spark.sql(f"select length(value) as device, value from lines_{guide.side} where value like '%s%'")
    by_device = guide.line(loud.alias("l"), "devices").groupBy("l.device")
    return guide.result(by_device.agg(F.max("value"), F.avg(F.length("value")).alias("mean")), "complete")


def windows_without_a_watermark(guide: Guide) -> Any:
    windowed = guide.line(guide.words(), "windows").groupBy(F.window("t", "10 seconds", "5 seconds"), "word").count()
    return guide.result(windowed.orderBy("window", "word"), "complete")


def windows_with_a_watermark_in_the_usual_mode(guide: Guide) -> Any:
    words = guide.words().withWatermark("t", "10 seconds")
    windowed = guide.line(words, "windows").groupBy(F.window(words.t, "10 seconds"), words.word).count()
    return guide.result(windowed.where(words.word != "of"))


def windows_to_files(guide: Guide) -> Any:
    words = guide.words().withWatermark("t", "5 seconds")
    windowed = guide.line(words, "windows").groupBy(F.window("t", "10 seconds")).agg(F.count("*").alias("n"))
    out, checkpoint = str(guide.folder / "out"), str(guide.folder / "ck")
    writer = windowed.selectExpr("window.start", "n").writeStream.format("parquet").trigger(availableNow=True)
    writer.option("path", out).option("checkpointLocation", checkpoint).start().awaitTermination()
    return rows_of(guide.spark.read.parquet(out))


def upserts_of_updated_windows(guide: Guide) -> Any:
    words = guide.words().withWatermark("t", "10 seconds")
    windowed = guide.line(words, "windows").groupBy(F.window("t", "10 seconds"), "word").count()
    table: dict[Any, int] = {}
    written: list[tuple[int, int]] = []

    def upsert(batch: DataFrame, number: int) -> None:
        batch.persist()
        written.append((number, batch.count()))
        table.update({(row.window.start, row.word): row["count"] for row in batch.collect()})
        batch.unpersist()

    writer = windowed.writeStream.outputMode("update").foreachBatch(upsert).trigger(availableNow=True)
    writer.option("checkpointLocation", str(guide.folder / "ck")).start().awaitTermination()
    return written, table


def windows_of_windows(guide: Guide) -> Any:
    words = guide.words().withWatermark("t", "1 second")
    fine = guide.line(words, "fine").groupBy(F.window("t", "5 seconds"), "word").count()
    coarse = guide.line(fine, "coarse").groupBy(F.window("window", "10 seconds")).agg(F.sum("count").alias("n"))
    return guide.result(coarse.select("window.end", "n"))


# -- sessions ----------------------------------------------------------------------------------------------------------


def session_windows(guide: Guide) -> Any:
    words = guide.words().withWatermark("t", "5 seconds")
    sessions = guide.line(words, "sessions").groupBy(F.session_window("t", "5 seconds"), words.word).count()
    return guide.result(sessions.select("session_window.end", "word", "count"))


def session_windows_with_a_gap_of_their_own(guide: Guide) -> Any:
    words = guide.words().withWatermark("t", "5 seconds")
    gap = F.when(F.col("word") == "spark", "15 seconds").otherwise("3 seconds")
    sessions = guide.line(words, "sessions").groupBy(F.session_window("t", gap), "word").count()
    return guide.result(sessions, "complete")


def sessions_by_a_function(guide: Guide) -> Any:
    def sessionize(key: Any, frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        (events,) = state.get if state.exists else (0,)
        if state.hasTimedOut:
            state.remove()
            yield pd.DataFrame({"letter": [key[0]], "events": [events], "over": [True]})
            return
        events += sum(len(frame) for frame in frames)
        state.update((events,))
        state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + 20_000)
        yield pd.DataFrame({"letter": [key[0]], "events": [events], "over": [False]})

    # One row of a key in a batch: PySpark's own worker fails with today's pyarrow where there are several.
    letters = guide.lines().select("t", F.substring("value", 1, 1).alias("letter")).withWatermark("t", "1 second")
    sessions = (
        guide.line(letters, "sessions")
        .groupBy("letter")
        .applyInPandasWithState(
            sessionize,
            "letter string, events long, over boolean",
            "events long",
            "update",
            GroupStateTimeout.EventTimeTimeout,
        )
    )
    return guide.result(sessions, "update")


# -- joins -------------------------------------------------------------------------------------------------------------

SOON = "click_ad = impression_ad and click_time between impression_time and impression_time + interval 20 seconds"


def ads_joined(how: str) -> Callable[[Guide], Any]:
    def program(guide: Guide) -> Any:
        impressions = guide.impressions().withWatermark("impression_time", "10 seconds")
        clicks = guide.clicks().withWatermark("click_time", "20 seconds")
        return guide.result(guide.line(impressions, "ads").join(clicks, F.expr(SOON), how))

    return program


def ads_joined_for_ever(guide: Guide) -> Any:
    impressions, clicks = guide.impressions(), guide.clicks()
    joined = guide.line(impressions, "ads").join(clicks, impressions.impression_ad == clicks.click_ad)
    return guide.result(joined.select(clicks.click_time, "impression_ad"))


def a_join_that_is_counted(guide: Guide) -> Any:
    impressions = guide.impressions().withWatermark("impression_time", "10 seconds")
    clicks = guide.clicks().withWatermark("click_time", "20 seconds")
    joined = guide.line(impressions, "ads").join(clicks, F.expr(SOON))
    by_window = guide.line(joined, "by_window").groupBy(F.window("click_time", "30 seconds")).count()
    return guide.result(by_window)


def a_static_table_joined(guide: Guide) -> Any:
    names = guide.spark.createDataFrame([(1, "one"), (2, "two"), (4, "four")], "impression_ad long, name string")
    joined = guide.line(guide.impressions(), "ads").join(names, "impression_ad", "left_outer")
    return guide.result(joined.groupBy("name").count(), "update")


# -- duplicates --------------------------------------------------------------------------------------------------------


def duplicates_for_ever(guide: Guide) -> Any:
    words = guide.words()
    return guide.result(guide.line(words, "first").dropDuplicates(["word"]).where(words.t > "1970-01-01"))


def duplicates_with_event_time(guide: Guide) -> Any:
    words = guide.words().withWatermark("t", "10 seconds")
    return guide.result(guide.line(words, "first").dropDuplicates(["word", "t"]).select(words.word, "t"))


def duplicates_within_the_watermark(guide: Guide) -> Any:
    words = guide.words().withWatermark("t", "10 seconds")
    return guide.result(guide.line(words, "first").dropDuplicatesWithinWatermark(["word"]))


# -- queries -----------------------------------------------------------------------------------------------------------


class Listener(StreamingQueryListener):
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        self.events.append(("started", str(event.id)))

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        rows = [operator.numRowsTotal for operator in progress.stateOperators]
        self.events.append(("progress", str(progress.id), progress.batchId, progress.numInputRows, rows))

    def onQueryIdle(self, event: QueryIdleEvent) -> None: ...

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        self.events.append(("terminated", str(event.id), event.exception))


def a_query_that_is_listened_to(guide: Guide) -> Any:
    listener = Listener()
    guide.spark.streams.addListener(listener)
    counts = guide.line(guide.words(), "words").groupBy("word").count()
    try:
        query = counts.writeStream.outputMode("update").format("noop").trigger(availableNow=True).start()
        query.awaitTermination()
        until(lambda: ("terminated", query.id, None) in listener.events)
    finally:
        guide.spark.streams.removeListener(listener)
    return [(event[0], *event[2:]) for event in listener.events if event[1] == query.id]


def several_queries_of_one_stream(guide: Guide) -> Any:
    words = guide.words().withWatermark("t", "10 seconds")
    first = guide.line(words, "first").dropDuplicates(["word"])
    counts = guide.line(words, "counts").groupBy("word").count()
    queries = []
    for name, frame, mode in (("first", first, "append"), ("counts", counts, "complete")):
        writer = frame.writeStream.queryName(f"{name}_{guide.side}").format("memory").outputMode(mode)
        queries.append(writer.trigger(processingTime="0 seconds").start())
    try:
        assert {query.id for query in queries} <= {query.id for query in guide.spark.streams.active}
        for query in queries:
            query.processAllAvailable()
            assert not query.awaitTermination(0.01)  # type: ignore[arg-type]
            assert query.isActive
    finally:
        for query in queries:
            query.stop()
    return [rows_of(guide.spark.table(query.name)) for query in queries]


def a_query_that_goes_on_from_its_checkpoint(guide: Guide) -> Any:
    words = guide.words().withWatermark("t", "10 seconds")
    batches: list[Any] = []

    def take(batch: DataFrame, number: int) -> None:
        batches.append((number, rows_of(batch)))
        if number == 1 and len(batches) == 2:
            raise RuntimeError("the sink fails once")

    for _ in range(2):
        windowed = guide.line(words, "windows").groupBy(F.window("t", "10 seconds")).count()
        writer = windowed.writeStream.outputMode("update").foreachBatch(take).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(guide.folder / "ck")).start()
        with contextlib.suppress(Exception):
            query.awaitTermination()
    return batches


def rows_for_each(guide: Guide) -> Any:
    out = guide.folder / "rows"
    out.mkdir()

    class Writer:
        def open(self, partition: int, epoch: int) -> bool:
            self.lines = io.StringIO()
            self.file = out / f"{epoch}-{partition}-{time.monotonic_ns()}"
            return True

        def process(self, row: Row) -> None:
            self.lines.write(f"{row.word} {row['count']}\n")

        def close(self, error: Exception | None) -> None:
            self.file.write_text(self.lines.getvalue())

    counts = guide.line(guide.words(), "words").groupBy("word").count()
    writer = counts.writeStream.outputMode("update").foreach(Writer()).trigger(availableNow=True)  # type: ignore[type-var]
    writer.option("checkpointLocation", str(guide.folder / "ck")).start().awaitTermination()
    return sorted(line for file in out.iterdir() for line in file.read_text().splitlines())


def rates(guide: Guide) -> Any:
    source = guide.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).option("numPartitions", 2)
    rows = source.option("startTimestamp", 1_700_000_000_000).option("advanceMillisPerBatch", 5000).load()
    marked = rows.withWatermark("timestamp", "5 seconds")
    windowed = guide.line(marked, "rates").groupBy(F.window("timestamp", "10 seconds"), F.expr("value % 3")).count()
    batches: dict[int, Any] = {}

    def take(batch: DataFrame, number: int) -> None:
        batches[number] = rows_of(batch)

    with stopping(windowed.writeStream.outputMode("update").foreachBatch(take).start()):
        until(lambda: 3 in batches)
    return [batches[number] for number in range(4)]


def rows_at_a_rate(guide: Guide) -> Any:
    """The clock decides how many rows there are, and not which."""
    rows = guide.spark.readStream.format("rate").option("rowsPerSecond", 20).option("numPartitions", 2).load()
    thirds = guide.line(rows, "rates").groupBy((rows.value % 3).alias("third")).agg(F.count("*"), F.max("value"))
    table = f"rate_{guide.side}"
    with stopping(thirds.writeStream.outputMode("complete").format("memory").queryName(table).start()):
        until(lambda: sum(count for _, count, _ in rows_of(guide.spark.table(table))) >= 40)
    return [(third, highest == third + 3 * (n - 1)) for third, n, highest in rows_of(guide.spark.table(table))]


PROGRAMS: dict[str, Callable[[Guide], Any]] = {
    program.__name__.replace("_", " "): program
    for program in (
        word_count_of_a_socket,
        word_count_on_the_console,
        words_sorted_in_complete_mode,
        running_counts_of_devices,
        windows_without_a_watermark,
        windows_with_a_watermark_in_the_usual_mode,
        windows_to_files,
        upserts_of_updated_windows,
        windows_of_windows,
        session_windows,
        session_windows_with_a_gap_of_their_own,
        sessions_by_a_function,
        ads_joined_for_ever,
        a_join_that_is_counted,
        a_static_table_joined,
        duplicates_for_ever,
        duplicates_with_event_time,
        duplicates_within_the_watermark,
        a_query_that_is_listened_to,
        several_queries_of_one_stream,
        a_query_that_goes_on_from_its_checkpoint,
        rows_for_each,
        rates,
        rows_at_a_rate,
    )
} | {f"ads joined: {how}": ads_joined(how) for how in ("inner", "left_outer", "right_outer", "full_outer", "left_semi")}
#: What no case of the operators has that every change is tried with.
SHORT = [
    "words sorted in complete mode",
    "upserts of updated windows",
    "ads joined: left_outer",
    "several queries of one stream",
]


@pytest.mark.filterwarnings("ignore::spark_jobs.plan.operator_rules.UnboundedStateWarning")
@pytest.mark.parametrize("program", short_list(PROGRAMS, SHORT))
def test_a_program_does_the_same_with_its_line_changed(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, program: str
) -> None:
    for folder, schema, batches in (("lines", LINES, TEXT), ("shown", ADS, SHOWN), ("clicked", ADS, CLICKED)):
        feed = Feed(tmp_path / "inputs" / folder, schema)
        for batch in batches:
            feed.add(batch)

    def changed(df: DataFrame, state: str) -> Any:
        return fleet.stateful(df, name=f"{name}-{state}")

    sides: dict[str, Callable[..., Any]] = {"spark": lambda df, state: df, "fleet": changed}

    def run(side: str) -> Any:
        folder = tmp_path / side
        folder.mkdir()
        table = name.replace("-", "_")
        return PROGRAMS[program](Guide(spark, sides[side], tmp_path / "inputs", folder, f"{side}_{table}"))

    with ThreadPoolExecutor(2) as threads:
        spark_result, fleet_result = threads.map(run, sides)
    assert fleet_result == spark_result
    assert spark_result


@contextlib.contextmanager
def lines_on_a_socket(lines: list[str]) -> Iterator[int]:
    """Yield the port of a server that writes lines to every client, until the end."""
    with socket.create_server(("localhost", 0)) as server, contextlib.ExitStack() as connections:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = connections.enter_context(server.accept()[0])
                    connection.sendall("".join(f"{line}\n" for line in lines).encode())

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


def states(query: StreamingQuery) -> list[Any]:
    """Return the rows of state of each batch that ran."""
    return [
        [operator["numRowsTotal"] for operator in progress["stateOperators"]]
        for progress in query.recentProgress
        if "addBatch" in progress["durationMs"]
    ]

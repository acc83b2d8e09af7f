"""What surrounds operators in Spark's guide to streaming, in programs as they are for Spark and with the one changed line.

A program is a function of a :class:`Guide`. What it makes of its input has to be the same, whether its line gives it the DataFrame that
it had or ``fleet.stateful(df, name=..)``. Operators are in :mod:`tests.integration.test_random_programs`.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQueryListener
from pyspark.sql.streaming.listener import QueryIdleEvent, QueryProgressEvent, QueryStartedEvent, QueryTerminatedEvent

from statefleet.fleet import Fleet
from tests.clocks import until
from tests.integration.streams import Feed, short_list, stopping

LINES = pa.schema([("at", pa.int64()), ("value", pa.string())])
TEXT = [
    [(1, "apache spark"), (3, "spark streams")],
    [(12, "ray and spark"), (14, "streams of words")],
    [(2, "late words"), (31, "spark again")],
    [(60, "the end"), (61, "of it")],
]


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

    def words(self) -> DataFrame:
        """Return the words of the lines, with an event time."""
        lines = Feed(self.inputs, LINES, self.spark).stream()
        return lines.select(F.timestamp_seconds("at").alias("t"), F.explode(F.split("value", " ")).alias("word"))


def rows_of(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted((tuple(row) for row in frame.collect()), key=repr)


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


PROGRAMS: dict[str, Callable[[Guide], Any]] = {
    program.__name__.replace("_", " "): program
    for program in (
        a_query_that_is_listened_to,
        several_queries_of_one_stream,
        rows_for_each,
        rates,
    )
}


@pytest.mark.filterwarnings("ignore::spark_jobs.plan.operator_rules.UnboundedStateWarning")
@pytest.mark.parametrize("program", short_list(PROGRAMS, ["several queries of one stream"]))
def test_a_program_does_the_same_with_its_line_changed(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, program: str
) -> None:
    feed = Feed(tmp_path / "inputs", LINES)
    for batch in TEXT:
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

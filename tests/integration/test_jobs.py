"""The runnable job against a batch computation of the same, on small files with malformed lines."""

from __future__ import annotations

import argparse
import datetime as dt
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from spark_jobs.jobs.console import keep_newest
from spark_jobs.page_hits import build, execute, parse_log
from statefleet.fleet import Fleet

GOOD = (
    '10.0.0.{n} - - [17/May/2015:{h:02d}:05:03 +0000] "GET /page{p}?q=1 HTTP/1.1" {status} {size} "http://x/" '
    '"Mozilla \\"quoted\\" 5.0"'
)
BAD = [
    "",
    "nonsense",
    '10.0.0.1 - - [31/Feb/2015:10:00:00 +0000] "GET / HTTP/1.1" 200 1 "-" "-"',
    '10.0.0.1 - - [17/May/2015:10:00:00 +0000] "GET / HTTP/1.1" abc 1 "-" "-"',
]
#: What a client may send as its name; Java's regular expressions recurse on it if they may.
LONG = '10.0.0.1 - - [17/May/2015:10:00:00 +0000] "GET /page1 HTTP/1.1" 200 1 "-" "' + 'a\\"' * 20_000 + '"'


def options(folder: Path, source: Path, name: str) -> argparse.Namespace:
    return argparse.Namespace(
        folder=folder, input=str(source), name=name, shards=2, files_per_trigger=1, top=5, kafka=None, to=None
    )


def rows_of(table: Any, columns: list[str]) -> list[tuple[Any, ...]]:
    def value(item: Any) -> Any:
        if isinstance(item, dt.datetime):
            return str(item.astimezone(dt.UTC))  # Spark's rows have the local time without its zone, results have UTC
        return float(f"{item:.10g}") if isinstance(item, float) else str(item)

    return sorted(tuple(value(row[column]) for column in columns) for row in table)


def run_and_compare(spark: SparkSession, fleet: Fleet, batch: Any, source: Path, folder: Path, name: str) -> int:
    """Run the job over `source`; its results must equal its own build over `batch`. Returns the malformed lines kept."""
    rows, malformed = execute(spark, fleet, options(folder, source, name))
    parsed_good = batch.where("reason IS NULL").drop("raw", "reason")
    expected = [row.asDict() for row in build(parsed_good).collect()]
    results = pq.read_table(folder / "results.parquet").to_pylist()
    columns = list(expected[0])
    assert rows_of(results, columns) == rows_of(expected, columns)
    assert rows == batch.count()
    assert malformed == batch.where("reason IS NOT NULL").count()
    return malformed


@pytest.fixture
def log_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    for file in range(3):
        lines = [
            GOOD.format(
                n=n % 7, h=(n + file) % 24, p=n % 5, status=200 if n % 4 else 404, size=n * 10 if n % 3 else "-"
            )
            for n in range(200)
        ]
        (folder / f"access-{file}.log").write_text("\n".join([*lines, LONG, *BAD[: file + 2]]) + "\n")
    return folder


def test_a_job_equals_a_batch_and_keeps_malformed_lines(
    spark: SparkSession, fleet: Fleet, log_folder: Path, tmp_path: Path, name: str
) -> None:
    batch = parse_log(spark.read.text(str(log_folder)))
    malformed = run_and_compare(spark, fleet, batch, log_folder, tmp_path / "job", name)
    assert malformed == 2 + 3 + 4
    kept = spark.read.parquet(str(tmp_path / "job" / "malformed")).collect()
    assert {row["raw"] for row in kept} == set(BAD)
    assert {row["reason"] for row in kept} == {"not in combined log format", "time cannot be read"}


def test_results_keep_both_hours_of_the_night_that_clocks_go_back(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        for batch in ("2025-10-26 00:30:00", "2025-10-26 01:30:00", "2025-10-26 01:30:00"):
            changed = spark.sql(f"SELECT TIMESTAMP'{batch}' AS hour, CAST(NULL AS STRING) AS path, 1 AS hits")
            keep_newest(changed, tmp_path / "results.parquet", ("hour", "path"))
    finally:
        monkeypatch.undo()
        time.tzset()
    hours = pq.read_table(tmp_path / "results.parquet").column("hour").to_pylist()
    assert hours == [dt.datetime(2025, 10, 26, hour, 30, tzinfo=dt.UTC) for hour in (0, 1)]

"""Continuous queries on a rate source: their epochs by Spark's logs, and their rows by the numbers of the source."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from statefleet.fleet import Fleet
from tests.clocks import until
from tests.integration.streams import stopping

PARTITIONS, KEYS = 2, 7
#: The event time is that of the row's number: 0.1 s each, from the first minute of 1970 on.
COLUMNS = (f"value % {KEYS} as k", "value", "timestamp_millis(60000 + value * 100) as at")


def view(name: str) -> str:
    return name.replace("-", "_")


def started(
    frame: DataFrame,
    folder: Path,
    sink: str = "noop",
    name: str = "counted",
    mode: str = "update",
    epoch: str = "200 milliseconds",
) -> StreamingQuery:
    writer = frame.writeStream.format(sink).queryName(view(name)).outputMode(mode)
    return writer.trigger(continuous=epoch).option("checkpointLocation", str(folder)).start()


def committed(folder: Path) -> int:
    """Return the last epoch in Spark's commit log; -1 without any."""
    return max((int(file.name) for file in (folder / "commits").glob("[0-9]*")), default=-1)


def values_read(folder: Path, epoch: int) -> list[int]:
    """Return the numbers that Spark's offset log says were read up to the end of an epoch."""
    last = json.loads((folder / "offsets" / str(epoch)).read_text().splitlines()[-1])
    partitions = len(last)
    return [value for first, at in last.items() for value in range(int(first), at["value"] + 1, partitions)]


def rows_read(folder: Path, epochs: Iterable[int]) -> list[int]:
    """Return how many rows were read up to the end of each of some epochs; none before the first one."""
    return [0 if epoch < 0 else len(values_read(folder, epoch)) for epoch in epochs]


def comparable(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return rows in an order of their own; lists have none."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: plain(field) for name, field in sorted(value.items())}
        if isinstance(value, list):
            return sorted(map(plain, value), key=repr)
        return value.replace(tzinfo=None) if isinstance(value, datetime) else value

    return sorted(repr(plain(row)) for row in rows)


def await_epochs(query: StreamingQuery, folder: Path, epochs: int) -> None:
    """Wait until a query has committed some more epochs in which it read rows; on a busy machine some have none."""
    first = committed(folder)

    def epochs_with_rows() -> int:
        read = rows_read(folder, range(first, committed(folder) + 1))
        return sum(before < after for before, after in pairwise(read))

    until(lambda: query.exception() or epochs_with_rows() >= epochs, every_s=0.05)
    assert query.exception() is None


def rate(spark: SparkSession, partitions: int = PARTITIONS, rows: int = 200) -> DataFrame:
    stream = spark.readStream.format("rate").option("rowsPerSecond", rows)
    return stream.option("numPartitions", partitions).load().selectExpr(*COLUMNS)


def read_by(folder: Path, epoch: int) -> Counter[int]:
    """Return how many rows of each key were read up to the end of an epoch."""
    return Counter(value % KEYS for value in values_read(folder, epoch))


def state_rows(fleet: Fleet, name: str, folder: Path) -> list[dict[str, Any]]:
    """Return the state at the last epoch of Spark's commit log."""
    rows: list[dict[str, Any]] = fleet.state(name).at(committed(folder) + 1).scan().to_arrow().to_pylist()
    return rows


def shards_of(fleet: Fleet, name: str) -> int:
    (state,) = [entry for entry in fleet.status()["queries"] if entry["name"] == name]
    return len(state["shards"])


def run_for(query: StreamingQuery, folder: Path, epochs: int) -> None:
    """Have a query commit some epochs, and stop it."""
    with stopping(query):
        await_epochs(query, folder, epochs)
    assert query.exception() is None


@dataclass(frozen=True)
class NumberedRows:
    """Rows that come with numbers of a rate source: some at once, then none for a while, and then the next ones.

    Attributes
    ----------
    columns
        As DDL; those of type timestamp are given in seconds.
    groups
        The rows that come at once.
    rate
        Numbers in a second.
    first
        Number of the first row: what goes before passes while the query starts.
    gap
        Numbers from a group's first row to that of the next group.
    """

    columns: str
    groups: list[list[tuple[Any, ...]]]
    rate: int
    first: int
    gap: int

    @property
    def numbers(self) -> list[int]:
        """The numbers of all rows."""
        return [
            self.first + self.gap * group + place
            for group, rows in enumerate(self.groups)
            for place in range(len(rows))
        ]

    def of(self, numbers: Iterable[int]) -> list[tuple[Any, ...]]:
        """Return the rows among numbers, in the order of these."""
        known = dict(zip(self.numbers, (row for rows in self.groups for row in rows), strict=True))
        return [known[number] for number in numbers if number in known]

    def stream(self, spark: SparkSession, partitions: int) -> DataFrame:
        """Return the rows as a stream that can be read continuously."""
        source = spark.readStream.format("rate").option("rowsPerSecond", self.rate)
        numbers = source.option("numPartitions", partitions).load()
        fields = [field.split(" ") for field in self.columns.split(", ")]
        kinds = ", ".join(f"{name} {'bigint' if kind == 'timestamp' else kind}" for name, kind in fields)
        names = [name for name, _ in fields]
        rows = [[dict(zip(names, row, strict=True)) for row in group] for group in self.groups]
        table = F.from_json(F.lit(json.dumps(rows)), f"array<array<struct<{kinds}>>>")
        numbered = numbers.where(F.col("value") >= self.first).select(
            # Without a row where there is none of that number.
            F.get(
                F.get(table, (F.expr(f"value - {self.first}") / self.gap).cast("int")),
                ((F.col("value") - self.first) % self.gap).cast("int"),
            ).alias("row")
        )
        return numbered.where("row is not null").selectExpr(
            *(
                f"timestamp_seconds(row.{name}) as {name}" if kind == "timestamp" else f"row.{name}"
                for name, kind in fields
            )
        )


def count_epochs(fleet: Fleet, spark: SparkSession, name: str, folder: Path) -> None:
    """Run a continuous query for some epochs; each has what it read."""
    counts = fleet.stateful(rate(spark), name=name).groupBy("k").count()
    run_for(started(counts, folder), folder, 3)
    assert {row["k"]: row["count"] for row in state_rows(fleet, name, folder)} == read_by(folder, committed(folder))

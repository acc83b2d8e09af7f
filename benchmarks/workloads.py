"""The workloads of :mod:`benchmarks.operators`: for each stateful operator a stream of rows in a steady state, and the query over it.

A stream is a function of row numbers: row `i` has ``i / RATE`` seconds of event time. Watermarks, gaps and ranges are given in
rows, so that the state has about the requested number of rows for any size of a batch. The first :attr:`Workload.fill` rows build
it up, in a few large batches.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.engine import uuids
from benchmarks.harness import FLEET, PLAIN, SELDOM, SHUFFLED, Operators, Variant, use_side
from statefleet.fleet import Fleet

Numbers = npt.NDArray[np.int64]

#: Columns of :func:`keyed_rows`.
SCHEMA = "key BIGINT, amount BIGINT"

#: Rows a second of event time.
RATE = 10_000
#: Rows of a batch that builds up state, at least.
_FILL_ROWS = 1_000_000
#: Event time of row 0 in microseconds: 2020-09-13 12:26:40 UTC.
_START_US = 1_600_000_000_000_000
_STEP_US = 1_000_000 // RATE


def _span(rows: int) -> str:
    """Return the event time of a number of rows, as Spark's interval."""
    return f"{max(1, rows * 1000 // RATE)} milliseconds"


def _times(numbers: Numbers) -> pa.Array:
    return pa.array(_START_US + numbers * _STEP_US, pa.timestamp("us", tz="UTC"))


def keyed_rows(keys: Numbers) -> pa.Table:
    """Return rows of keys, for :func:`aggregate`."""
    return pa.table({"key": keys, "amount": keys * 7 + 1})


def aggregate(frame: Any) -> DataFrame:
    """Return counts and sums by key, of Spark or of the fleet."""
    return frame.groupBy("key").agg(F.count("*").alias("n"), F.sum("amount").alias("total"))


class Workload(ABC):
    """A stream and a query with state."""

    name: ClassVar[str]
    columns: ClassVar[str]
    mode: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]
    #: What `state` counts.
    state_unit: ClassVar[str] = "of state"

    def __init__(self, rows: int, state: int) -> None:
        self.rows, self.state = rows, state
        #: Number of rows before the measured ones.
        self.fill = 0

    @abstractmethod
    def table(self, begin: int, end: int) -> pa.Table:
        """Return a range of the stream's rows by number, the same in each call."""

    @abstractmethod
    def query(self, ops: Operators, source: DataFrame, side: str) -> DataFrame:
        """Return the query on the operators of a side."""

    def filling(self) -> Iterator[pa.Table]:
        """Yield the batches that build up state, a few large ones."""
        step = max(2 * self.rows, _FILL_ROWS)
        for begin in range(0, self.fill, step):
            yield self.table(begin, min(begin + step, self.fill))

    def batch(self, number: int) -> pa.Table:
        """Return a batch after those that build up state."""
        begin = self.fill + number * self.rows
        return self.table(begin, begin + self.rows)

    def start(
        self, spark: SparkSession, fleet: Fleet, side: str, shards: int, root: Path, polling: str = SELDOM
    ) -> Variant:
        """Start the query of a side; the plain one has the same rows through the same shuffle, without state and without Python."""
        use_side(spark, side, shards, polling)
        reader = spark.readStream.schema(self.columns).option("maxFilesPerTrigger", 1)
        source = reader.parquet(str(Variant.input_folder(root, side)))
        ops = Operators(fleet, side, shards)
        frame = self.keyed(source).repartition(shards, *self.keys) if side == PLAIN else self.query(ops, source, side)
        return Variant.start(side, root, frame, self.mode)

    def keyed(self, source: DataFrame) -> DataFrame:
        """Return the rows with the columns by which they are shuffled."""
        return source

    def _random(self, begin: int) -> np.random.Generator:
        return np.random.default_rng([len(self.name), begin])


class Counts(Workload):
    """Counts and sums by an integer key: all of `state` keys are there, and a batch draws from them."""

    name = "counts"
    columns = SCHEMA
    mode = "update"
    keys = ("key",)
    state_unit = "keys"

    def __init__(self, rows: int, state: int) -> None:
        super().__init__(rows, state)
        self.fill = state

    def _numbers(self, begin: int, end: int) -> Numbers:
        if begin < self.fill:
            return np.random.default_rng(self.state).permutation(self.state)[begin:end]
        return self._random(begin).integers(0, self.state, end - begin)

    def table(self, begin: int, end: int) -> pa.Table:
        return keyed_rows(self._numbers(begin, end))

    def query(self, ops: Operators, source: DataFrame, side: str) -> DataFrame:
        # Spark cannot be sure that a task which is tried again reads the same rows.
        rows = source.where("rand() < 2 + key") if side == SHUFFLED else source
        return aggregate(ops(rows, self.name, "update"))


class TextCounts(Counts):
    """The same by keys that are UUIDs as text."""

    name = "text"
    columns = "key STRING, amount BIGINT"

    def __init__(self, rows: int, state: int) -> None:
        super().__init__(rows, state)
        self._keys = uuids(state)

    def table(self, begin: int, end: int) -> pa.Table:
        numbers = self._numbers(begin, end)
        return pa.table({"key": self._keys.take(pa.array(numbers)), "amount": numbers * 7 + 1})


class Window(Workload):
    """Counts and sums by key and tumbling window; a batch adds groups, changes earlier ones, and closes a window.

    Rows arrive up to a window late, so every window has rows of two batches. The watermark keeps as many windows open as have
    `state` groups; a batch closes a window.
    """

    name = "window"
    columns = "key BIGINT, ts TIMESTAMP, amount BIGINT"
    mode = "update"
    keys = ("key", "window")

    def __init__(self, rows: int, state: int) -> None:
        super().__init__(rows, state)
        self._distinct = max(1, rows // 2)
        groups = self._distinct * (1 - math.exp(-rows / self._distinct))
        self._windows = max(2, round(state / groups))
        self.fill = rows * self._windows

    def table(self, begin: int, end: int) -> pa.Table:
        random = self._random(begin)
        keys = random.integers(0, self._distinct, end - begin)
        numbers = np.arange(begin, end) - random.integers(0, self.rows, end - begin)
        return pa.table({"key": keys, "ts": _times(numbers), "amount": keys * 7 + 1})

    def _window(self) -> Any:
        return F.window("ts", _span(self.rows))

    def query(self, ops: Operators, source: DataFrame, side: str) -> DataFrame:
        late = source.withWatermark("ts", _span(self.rows * (self._windows - 1)))
        grouped = ops(late, "window", "update").groupBy(self._window(), "key")
        return grouped.agg(F.count("*").alias("n"), F.sum("amount").alias("total"))

    def keyed(self, source: DataFrame) -> DataFrame:
        return source.select(self._window().alias("window"), "key", "amount")


class Session(Workload):
    """Sessions of users; at any time about as many are open as there are users, and a user may have several.

    A user has a row in every third gap on average. A session is closed, and emitted, once the watermark, which is three gaps behind,
    has passed the gap after its last row.
    """

    name = "session"
    columns = "user BIGINT, ts TIMESTAMP, amount BIGINT"
    mode = "append"
    keys = ("user",)

    def __init__(self, rows: int, state: int) -> None:
        super().__init__(rows, state)
        self._gap = max(1, state // 3)
        self.fill = 5 * self._gap

    def table(self, begin: int, end: int) -> pa.Table:
        users = self._random(begin).integers(0, self.state, end - begin)
        return pa.table({"user": users, "ts": _times(np.arange(begin, end)), "amount": users % 1000})

    def query(self, ops: Operators, source: DataFrame, side: str) -> DataFrame:
        late = source.withWatermark("ts", _span(3 * self._gap))
        grouped = ops(late, "session", "append").groupBy(F.session_window("ts", _span(self._gap)), "user")
        return grouped.agg(F.count("*").alias("n"), F.sum("amount").alias("total"))


class Deduplicate(Workload):
    """First rows of keys, with all keys kept: half of a batch's rows have new keys, half have known ones."""

    name = "dedup"
    columns = "key BIGINT, amount BIGINT"
    mode = "append"
    keys = ("key",)

    def __init__(self, rows: int, state: int) -> None:
        super().__init__(rows, state)
        self.fill = state

    def table(self, begin: int, end: int) -> pa.Table:
        numbers, random = np.arange(begin, end), self._random(begin)
        if end <= self.fill:
            keys = random.permutation(numbers)
        else:
            existing = self.fill + (begin - self.fill) // 2
            is_new = (numbers - begin) % 2 == 0
            keys = np.where(is_new, existing + (numbers - begin) // 2, random.integers(0, existing, end - begin))
            random.shuffle(keys)
        return pa.table({"key": keys, "amount": keys * 7 + 1})

    def query(self, ops: Operators, source: DataFrame, side: str) -> DataFrame:
        return ops(source, "dedup").dropDuplicates(["key"])


class Join(Workload):
    """Inner join of two streams by key, where a right row is up to a range later than the left row: about one match for each right row.

    Both sides are in one file, so that a batch has rows of both; Spark reads each side's row groups.
    """

    name = "join"
    columns = "side TINYINT, key BIGINT, ts TIMESTAMP, amount BIGINT"
    mode = "append"
    keys = ("key",)

    def __init__(self, rows: int, state: int) -> None:
        super().__init__(rows, state)
        # Rows alternate between the sides. Left rows are kept for range and delay, right ones for the delay.
        self._range, self._delay = state, state // 2
        self._distinct = max(1, state // 2)
        self.fill = self._range + self._delay + rows

    def table(self, begin: int, end: int) -> pa.Table:
        keys = self._random(begin).integers(0, self._distinct, end - begin)
        sides = (np.arange(begin, end) % 2).astype(np.int8)
        rows = pa.table(
            {"side": sides, "key": keys, "ts": _times(np.arange(begin, end)), "amount": np.arange(begin, end)}
        )
        return rows.take(np.argsort(sides, kind="stable"))

    def query(self, ops: Operators, source: DataFrame, side: str) -> DataFrame:
        left, right = (
            source.where(f"side = {number}")
            .select(F.col("key").alias(f"{side}_key"), F.col("ts").alias(f"{side}_ts"), F.col("amount").alias(side))
            .withWatermark(f"{side}_ts", _span(self._delay))
            for number, side in enumerate(("left", "right"))
        )
        soon = f"right_ts between left_ts and left_ts + interval {_span(self._range)}"
        return ops(left, "join").join(right, F.expr(f"left_key = right_key and {soon}"))


class Top(Workload):
    """The row with the largest amount of each key; Spark, which has no ``topN``, takes the maximum of a struct."""

    name = "top"
    columns = SCHEMA
    mode = "update"
    keys = ("key",)

    def __init__(self, rows: int, state: int) -> None:
        super().__init__(rows, state)
        self.fill = 2 * state

    def table(self, begin: int, end: int) -> pa.Table:
        random = self._random(begin)
        # Amounts grow, so that rows are replaced in every batch.
        amounts = random.integers(0, 2 * self.rows, end - begin) + np.arange(begin, end)
        return pa.table({"key": random.integers(0, self.state, end - begin), "amount": amounts})

    def query(self, ops: Operators, source: DataFrame, side: str) -> DataFrame:
        rows = ops(source, "top", "update")
        if side.startswith(FLEET):
            return rows.topN(1, "key", F.desc("amount"))
        largest = rows.groupBy("key").agg(F.max(F.struct("amount", "key")).alias("row"))
        return largest.select("row.*")

"""What ``benchmarks.operators`` runs: for each stateful operator a stream of rows in a steady state, and the query over it.

A stream is a function of places: row `i` comes at ``i / RATE`` seconds of event time, and how far watermarks, gaps and ranges reach is
told in rows, so that the state holds about as many rows as asked for, whatever the size of a batch. The first :attr:`Workload.fill`
rows build it up, in a few large batches.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from benchmarks.harness import FLEET, STATELESS, Target
from benchmarks.nexmark.query import Operators
from spark_jobs.functions.state_batch import StateBatch

__all__ = ["RATE", "WORKLOADS", "Deduplicate", "Join", "Profile", "Session", "Window", "Workload"]

Numbers = npt.NDArray[np.int64]

#: Rows a second of event time.
RATE = 10_000
#: Event time of row 0 in microseconds: 2020-09-13 12:26:40 UTC.
_START_US = 1_600_000_000_000_000
_STEP_US = 1_000_000 // RATE


def _span(rows: int) -> str:
    """So long as so many rows take to come, as Spark's interval."""
    return f"{max(1, rows * 1000 // RATE)} milliseconds"


def _times(places: Numbers) -> pa.Array:
    return pa.array(_START_US + places * _STEP_US, pa.timestamp("us", tz="UTC"))


def _as_it_is(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _promised(hdfs: float, rocksdb: float) -> tuple[Target, ...]:
    return Target("hdfs", FLEET, hdfs), Target("rocksdb", FLEET, rocksdb), Target(FLEET, STATELESS)


class Workload(ABC):
    """A stream and a query with state.

    Parameters
    ----------
    rows
        Rows of a batch.
    state
        Rows that the state is to have, about.

    Attributes
    ----------
    columns
        Of the files, as Spark's DDL.
    mode
        Output mode.
    keys
        What rows are shuffled by.
    targets, full_size
        What is compared, and from which `rows` and `state` on the bounds of it are promised.
    forms
        Variants on the fleet: :data:`FLEET`, and others that only the fleet has.
    fill
        Rows that come before those that count.
    """

    name: ClassVar[str]
    columns: ClassVar[str]
    mode: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]
    targets: ClassVar[tuple[Target, ...]]
    full_size: ClassVar[tuple[int, int]] = (1_000_000, 3_000_000)
    forms: ClassVar[tuple[str, ...]] = (FLEET,)

    def __init__(self, rows: int, state: int) -> None:
        self.rows, self.state = rows, state
        self.fill = 0

    @abstractmethod
    def table(self, begin: int, end: int) -> pa.Table:
        """Rows from one place to another, the same whenever asked for."""

    @abstractmethod
    def query(self, ops: Operators, source: DataFrame, form: str) -> DataFrame:
        """The query, on the operators of one side; `form` is one of `forms`, or a store of Spark's."""

    def filling(self) -> Iterator[pa.Table]:
        """The batches that build up state: a few large ones."""
        for begin in range(0, self.fill, 2 * self.rows):
            yield self.table(begin, min(begin + 2 * self.rows, self.fill))

    def batch(self, number: int) -> pa.Table:
        """A batch after those."""
        begin = self.fill + number * self.rows
        return self.table(begin, begin + self.rows)

    def stateless(self, source: DataFrame, shards: int) -> DataFrame:
        """The same rows through the same shuffle and a Python stage, with no state touched."""
        routed = self.keyed(source).withColumn("route", F.hash(*self.keys)).repartition(shards, "route").drop("route")
        return routed.mapInArrow(_as_it_is, routed.schema)

    def keyed(self, source: DataFrame) -> DataFrame:
        """Rows with the columns that they are shuffled by."""
        return source

    def comparisons(self) -> list[Target]:
        """``targets``; without their bounds, if this is smaller than what they are promised for."""
        is_full = self.rows >= self.full_size[0] and self.state >= self.full_size[1]
        return [target if is_full else replace(target, bound=None) for target in self.targets]

    def _random(self, begin: int) -> np.random.Generator:
        return np.random.default_rng([len(self.name), begin])


class Window(Workload):
    """Counts and sums by key and tumbling window; a batch makes groups, changes some of those before, and closes a window.

    Rows come up to a window late, so every window gets them from two batches. The watermark keeps as many windows open as have
    `state` groups; a batch closes one.
    """

    name = "window"
    columns = "key BIGINT, ts TIMESTAMP, amount BIGINT"
    mode = "update"
    keys = ("key", "window")
    targets = _promised(3.0, 10.0)

    def __init__(self, rows: int, state: int) -> None:
        super().__init__(rows, state)
        self._distinct = max(1, rows // 2)
        groups = self._distinct * (1 - math.exp(-rows / self._distinct))
        self._windows = max(2, round(state / groups))
        self.fill = rows * self._windows

    def table(self, begin: int, end: int) -> pa.Table:
        random = self._random(begin)
        keys = random.integers(0, self._distinct, end - begin)
        places = np.arange(begin, end) - random.integers(0, self.rows, end - begin)
        return pa.table({"key": keys, "ts": _times(places), "amount": keys * 7 + 1})

    def _window(self) -> Any:
        return F.window("ts", _span(self.rows))

    def query(self, ops: Operators, source: DataFrame, form: str) -> DataFrame:
        late = source.withWatermark("ts", _span(self.rows * (self._windows - 1)))
        grouped = ops(late, "window", "update").groupBy(self._window(), "key")
        result: DataFrame = grouped.agg(F.count("*").alias("n"), F.sum("amount").alias("total"))
        return result

    def keyed(self, source: DataFrame) -> DataFrame:
        return source.select(self._window().alias("window"), "key", "amount")


class Session(Workload):
    """Sessions of users; at any time about as many are open as there are users, of whom each may have several.

    A user has a row in every third gap on average. A session is closed, and emitted, once the watermark, which is three gaps behind,
    has passed the gap after its last row.
    """

    name = "session"
    columns = "user BIGINT, ts TIMESTAMP, amount BIGINT"
    mode = "append"
    keys = ("user",)
    targets = _promised(3.0, 10.0)

    def __init__(self, rows: int, state: int) -> None:
        super().__init__(rows, state)
        self._gap = max(1, state // 3)
        self.fill = 5 * self._gap

    def table(self, begin: int, end: int) -> pa.Table:
        users = self._random(begin).integers(0, self.state, end - begin)
        return pa.table({"user": users, "ts": _times(np.arange(begin, end)), "amount": users % 1000})

    def query(self, ops: Operators, source: DataFrame, form: str) -> DataFrame:
        late = source.withWatermark("ts", _span(3 * self._gap))
        grouped = ops(late, "session", "append").groupBy(F.session_window("ts", _span(self._gap)), "user")
        result: DataFrame = grouped.agg(F.count("*").alias("n"), F.sum("amount").alias("total"))
        return result


class Deduplicate(Workload):
    """First rows of keys, of which nothing is forgotten: half of a batch's rows have keys that are new, half have been seen."""

    name = "dedup"
    columns = "key BIGINT, amount BIGINT"
    mode = "append"
    keys = ("key",)
    targets = _promised(1.7, 6.0)

    def __init__(self, rows: int, state: int) -> None:
        super().__init__(rows, state)
        self.fill = state

    def table(self, begin: int, end: int) -> pa.Table:
        places, random = np.arange(begin, end), self._random(begin)
        if end <= self.fill:
            keys = random.permutation(places)
        else:
            seen = self.fill + (begin - self.fill) // 2
            is_new = (places - begin) % 2 == 0
            keys = np.where(is_new, seen + (places - begin) // 2, random.integers(0, seen, end - begin))
            random.shuffle(keys)
        return pa.table({"key": keys, "amount": keys * 7 + 1})

    def query(self, ops: Operators, source: DataFrame, form: str) -> DataFrame:
        result: DataFrame = ops(source, "dedup").dropDuplicates(["key"])
        return result


class Join(Workload):
    """Inner join of two streams by key, where a right row comes after the left one, up to a range later: about one match a right row.

    Both sides come in one file, so that a batch has its rows of both; Spark reads each side's row groups.
    """

    name = "join"
    columns = "side TINYINT, key BIGINT, ts TIMESTAMP, amount BIGINT"
    mode = "append"
    keys = ("key",)
    targets = _promised(3.0, 10.0)

    def __init__(self, rows: int, state: int) -> None:
        super().__init__(rows, state)
        # Of each side comes a row in two places. Left rows are kept for range and delay, right ones for the delay.
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

    def query(self, ops: Operators, source: DataFrame, form: str) -> DataFrame:
        left, right = (
            source.where(f"side = {place}")
            .select(F.col("key").alias(f"{side}_key"), F.col("ts").alias(f"{side}_ts"), F.col("amount").alias(side))
            .withWatermark(f"{side}_ts", _span(self._delay))
            for place, side in enumerate(("left", "right"))
        )
        soon = f"right_ts between left_ts and left_ts + interval {_span(self._range)}"
        result: DataFrame = ops(left, "join").join(right, F.expr(f"left_key = right_key and {soon}"))
        return result


class Profile(Workload):
    """A running profile of each user, by a function of one's own: in pandas, a key at a time, on all sides, and in Arrow on the fleet.

    A batch has `rows` users, of three times as many, with one row each: PySpark 3.5's own worker fails with today's pyarrow where a key
    has several rows. The first batches fill the state as any other.
    """

    name = "profile"
    columns = "user BIGINT, amount DOUBLE"
    mode = "update"
    keys = ("user",)
    ARROW: ClassVar[str] = "statefleet-arrow"
    forms = (FLEET, ARROW)
    full_size = 20_000, 0
    targets = (
        Target("hdfs", FLEET, 3.0),
        Target("rocksdb", FLEET, 3.0),
        Target("hdfs", ARROW, 50.0),
        Target("rocksdb", ARROW, 50.0),
        Target(FLEET, STATELESS),
        Target(ARROW, STATELESS),
    )

    def table(self, begin: int, end: int) -> pa.Table:
        random = self._random(begin)
        users = random.permutation(3 * (end - begin))[: end - begin].astype(np.int64)
        return pa.table({"user": users, "amount": random.random(end - begin)})

    def query(self, ops: Operators, source: DataFrame, form: str) -> DataFrame:
        users = ops(source, "profile", "update").groupBy("user")
        columns, state = "user BIGINT, n BIGINT, mean DOUBLE, largest DOUBLE", "n BIGINT, total DOUBLE, largest DOUBLE"
        timeouts = GroupStateTimeout.NoTimeout
        if form == self.ARROW:
            in_arrow: DataFrame = users.applyInArrowWithState(_profiles, columns, state, "update", timeouts)
            return in_arrow
        in_pandas: DataFrame = users.applyInPandasWithState(_profile, columns, state, "update", timeouts)
        return in_pandas


def _profile(key: tuple[int], pdfs: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """One user's rows."""
    n, total, largest = state.get if state.exists else (0, 0.0, 0.0)
    for pdf in pdfs:
        # pandas takes long over columns of a few rows: what is measured is what is around the function.
        amounts = pdf["amount"].to_numpy()
        n, total, largest = n + len(amounts), total + float(amounts.sum()), max(largest, float(amounts.max()))
    state.update((n, total, largest))
    yield pd.DataFrame({"user": [key[0]], "n": [n], "mean": [total / n], "largest": [largest]})


def _profiles(keys: pa.Table, rows: pa.Table, state: StateBatch) -> pa.Table:
    """All users' rows."""
    new = rows.group_by("key_index", use_threads=False).aggregate([("amount", "sum"), ("amount", "max")])
    n = pc.add(state.get("n", 0), np.diff(state.offsets))
    total = pc.add(state.get("total", 0.0), new["amount_sum"])
    largest = pc.max_element_wise(state.get("largest", 0.0), new["amount_max"])
    state.update({"n": n, "total": total, "largest": largest})
    mean = pc.divide(total, pc.cast(n, pa.float64()))
    return keys.append_column("n", n).append_column("mean", mean).append_column("largest", largest)


WORKLOADS: dict[str, type[Workload]] = {one.name: one for one in (Window, Session, Deduplicate, Join, Profile)}

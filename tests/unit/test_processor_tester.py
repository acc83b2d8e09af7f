"""Processors tested without Spark: rows, clock and watermark in; output rows, state and timers out."""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
from pyspark import SparkContext
from pyspark.sql import Row
from pyspark.sql import types as T

from coordinator.model.errors import InvalidRequestError
from spark_jobs.transform.processor import StatefulProcessor
from statefleet.testing import ProcessorTester
from statefleet.testing.ddl import parse_columns

NOON = dt.datetime(2025, 6, 1, 12, tzinfo=dt.UTC)
NOON_MS = int(NOON.timestamp() * 1000)
CLICKS = "user string, page string, ts timestamp"


def after(seconds: float) -> dt.datetime:
    return NOON + dt.timedelta(seconds=seconds)


class Quiet(StatefulProcessor):
    """The pages of each user, once the user has been quiet for 15 seconds of event time."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.pages = handle.getListState("pages", "page string")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for timer in self.handle.listTimers():
            self.handle.deleteTimer(timer)
        rows = list(rows)
        self.pages.appendList([(row.page,) for row in rows])
        newest = max(row.ts for row in rows)
        self.handle.registerTimer(int(newest.timestamp() * 1000) + 15_000)
        return []

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield key[0], len(list(self.pages.get()))
        self.pages.clear()


def quiet() -> ProcessorTester:
    return ProcessorTester(
        Quiet(),
        "user string, pages int",
        "Update",
        "EventTime",
        rows=CLICKS,
        key="user",
        watermark=("ts", "10 seconds"),
    )


def test_event_time_follows_the_rows() -> None:
    tester = quiet()
    assert tester.process([("ann", "/", after(0)), ("bob", "/", after(0)), ("ann", "/a", after(9))]) == []
    assert tester.watermark_ms == NOON_MS - 1000
    assert tester.state("pages", "ann") == [Row(page="/"), Row(page="/a")]
    assert tester.timers("ann") == [NOON_MS + 24_000]
    # The watermark goes to 16 s, which is after bob's timer.
    assert tester.process([("eve", "/", after(26))]) == [Row(user="bob", pages=1)]
    assert tester.keys("pages") == [("ann",), ("eve",)]
    assert tester.timers("bob") == []


def test_rows_that_are_late_are_left_out() -> None:
    tester = quiet()
    tester.process([("ann", "/", after(26))])
    assert tester.process([("old", "/", after(16)), ("new", "/", after(17))]) == []
    assert tester.keys("pages") == [("ann",), ("new",)]


def test_the_watermark_is_moved_by_hand() -> None:
    tester = quiet()
    tester.process([{"user": "ann", "page": "/", "ts": NOON}])
    assert tester.advance_watermark(NOON_MS + 14_999) == []
    assert tester.advance_watermark(NOON_MS + 15_000) == [Row(user="ann", pages=1)]
    with pytest.raises(InvalidRequestError, match="does not go back"):
        tester.advance_watermark(NOON_MS)


class Session(StatefulProcessor):
    """Counts with a time to live, a last value, counts of pages, and a timer of processing time."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n bigint", 1000)
        self.last = handle.getValueState("last", T.StructType().add("page", T.StringType()))
        self.pages = handle.getMapState("pages", "page string", "n int", 500)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        n = self.count.get()[0] if self.count.exists() else 0
        for row in rows:
            if row.page == "fail":
                raise ValueError("as asked")
            n += 1
            self.last.update((row.page,))
            self.pages.updateValue((row.page,), ((self.pages.getValue((row.page,)) or (0,))[0] + 1,))
        self.count.update((n,))
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 300)
        yield key[0], n, timerValues.getCurrentProcessingTimeInMs()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield key[0], -1, expiredTimerInfo.getExpiryTimeInMs()

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.count.update((initialState.n,))


def session(**options: Any) -> ProcessorTester:
    output = "user string, n bigint, at bigint"
    rows = "user string, page string"
    return ProcessorTester(Session(), output, timeMode="ProcessingTime", rows=rows, key="user", **options)


def test_values_outlive_their_time_to_live_by_the_clock() -> None:
    tester = session(now_ms=5000)
    assert tester.process([("ann", "/"), ("ann", "/a")]) == [Row(user="ann", n=2, at=5000)]
    assert tester.state("pages", "ann") == {Row(page="/"): Row(n=1), Row(page="/a"): Row(n=1)}
    assert tester.advance_clock(300) == [Row(user="ann", n=-1, at=5300)]
    assert tester.advance_clock(200) == []
    assert tester.state("pages", "ann") == {}
    assert tester.state("count", "ann") == Row(n=2)
    assert tester.advance_clock(500) == []
    assert tester.now_ms == 6000
    assert tester.state("count", "ann") is None
    assert tester.state("last", "ann") == Row(page="/a")
    assert (tester.keys("count"), tester.keys("last")) == ([], [("ann",)])
    assert tester.process([("ann", "/")]) == [Row(user="ann", n=1, at=6000)]


def test_the_state_begins_with_an_initial_state() -> None:
    tester = session(initialState=[("ann", 7)], initialColumns="user string, n bigint")
    assert tester.process([("bob", "/")]) == [Row(user="bob", n=1, at=0)]
    assert tester.state("count", "ann") == Row(n=7)


def test_a_batch_that_fails_changes_nothing() -> None:
    tester = session()
    tester.process([("ann", "/")])
    with pytest.raises(ValueError, match="as asked"):
        tester.process([("ann", "/a"), ("bob", "fail")])
    assert tester.state("last", "ann") == Row(page="/")
    assert tester.process([("ann", "/b")]) == [Row(user="ann", n=2, at=0)]


def test_what_a_processor_keeps_of_its_own_is_gone_after_a_batch() -> None:
    """As in a query, where every task has a copy of its own."""

    class Forgetful(StatefulProcessor):
        seen = 0

        def init(self, handle: Any) -> None:
            pass

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            self.seen += len(list(rows))
            yield (self.seen,)

    tester = ProcessorTester(Forgetful(), "n int", rows="user string", key="user")
    assert [tester.process([("ann",)]) for _ in range(2)] == [[Row(n=1)], [Row(n=1)]]


def test_a_processor_of_pandas_gets_and_emits_frames() -> None:
    class Sums(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.sum = handle.getValueState("sum", "v double")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            total = (self.sum.get() or (0.0,))[0] + sum(float(frame["v"].sum()) for frame in rows)
            self.sum.update((total,))
            yield pd.DataFrame({"k": [key[0]], "total": [total]})

    options: dict[str, Any] = {"rows": "k double, v double", "key": ["k"], "in_pandas": True}
    tester = ProcessorTester(Sums(), "k double, total double", **options)
    # -0.0 and 0.0 are one key, as Spark groups them.
    assert tester.process([(0.0, 1.0), (-0.0, 2.0)]) == [Row(k=0.0, total=3.0)]
    assert tester.state("sum", -0.0) == Row(v=3.0)


@pytest.mark.parametrize(
    ("message", "arguments"),
    {
        "grouped by columns": {"key": "nobody"},
        "keys of atomic types": {"rows": "user struct<a: int>, ts timestamp"},
        "of a timestamp column": {"watermark": ("page", "1 second")},
        "a delay is a timedelta": {"watermark": ("ts", "soon")},
        "cannot be read without Spark": {"rows": "user string, x whatever"},
        "one of None, ProcessingTime": {"timeMode": "sometimes"},
        "append or update": {"outputMode": "complete"},
    }.items(),
)
def test_arguments_that_cannot_be_are_refused(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        ProcessorTester(Quiet(), "user string, pages int", **{"rows": CLICKS, "key": "user", **arguments})


def test_uses_that_cannot_be_are_refused() -> None:
    tester = quiet()
    with pytest.raises(InvalidRequestError, match="before the first batch"):
        tester.state("pages", "ann")
    assert tester.keys("pages") == []
    for rows in ([("ann",)], [{"user": "ann", "pge": "/"}], [("ann", "/", 7)]):
        with pytest.raises(InvalidRequestError, match="row"):
            tester.process(rows)
    tester.process([("ann", "/", NOON)])
    for call in (lambda: tester.state("page", "ann"), lambda: tester.keys("page")):
        with pytest.raises(InvalidRequestError, match="no such state variable"):
            call()
    with pytest.raises(InvalidRequestError, match="a key"):
        tester.state("pages", "ann", 7)


class Pass(StatefulProcessor):
    """Emits its rows as they are; deletes a variable of earlier days."""

    def init(self, handle: Any) -> None:
        handle.deleteIfExists("before")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        yield from ((row.user, row.ts) for row in rows)


def test_rows_that_would_be_late_for_the_next_operator_are_refused() -> None:
    options: dict[str, Any] = {"rows": CLICKS, "key": "user", "watermark": ("ts", dt.timedelta(0))}
    tester = ProcessorTester(Pass(), "user string, at timestamp", "Append", eventTimeColumnName="at", **options)
    assert [row.user for row in tester.process([("ann", "/", after(5))])] == ["ann"]
    assert [row.user for row in tester.process([("ann", "/", after(6))])] == ["ann"]
    with pytest.raises(InvalidRequestError, match="not after the watermark"):
        tester.process([("ann", "/", after(6))])
    with pytest.raises(InvalidRequestError, match="outputMode Append"):
        ProcessorTester(Pass(), "user string, at timestamp", "Update", eventTimeColumnName="at", **options)


def test_no_jvm_is_started() -> None:
    quiet().process([("ann", "/", NOON)])
    assert SparkContext._gateway is None
    assert "py4j" in sys.modules  # so that the check above sees what there would be


@pytest.mark.parametrize(
    "ddl", ["", "a", "a int,", "a array<int", "a int b int", "a decimal(x)", "a int; drop", "a int>"]
)
def test_ddl_that_is_wrong_is_refused(ddl: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be read without Spark"):
        parse_columns(ddl)

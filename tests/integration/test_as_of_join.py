"""As-of joins beside Spark's own in a batch over the same rows (``DataFrame._joinAsOf``), as Spark has none on streams."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from spark_jobs.plan.spark_errors import InvalidArgumentError, RefusedQueryError
from statefleet.fleet import Fleet
from tests.integration.streams import Feed, Run, lose_store_actors, short_list

TRADES = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", tz="UTC")), ("price", pa.int64())])
QUOTES = pa.schema([("k", pa.string()), ("time", pa.timestamp("us", tz="UTC")), ("bid", pa.int64())])
NOON = datetime(2025, 6, 1, 12, tzinfo=UTC)
#: How the sides are joined: how, the oldest match in seconds, whether one of the same time counts.
JOINS: dict[str, tuple[str, int | None, bool]] = {
    "left": ("left", 4, True),
    **{
        f"seed-{seed}": (dice.choice(["inner", "left"]), dice.choice([None, None, 1, 2, 4, 9]), dice.random() < 0.5)
        for seed in range(10)
        for dice in [random.Random(seed)]
    },
}


class Market:
    """Two streams whose times are at most three seconds out of order, and rows without a key or a time."""

    def __init__(self, folder: Path, seed: str) -> None:
        self.trades, self.quotes = Feed(folder / "trades", TRADES), Feed(folder / "quotes", QUOTES)
        self._dice, self._second = random.Random(seed), 0
        #: Times of quotes, of which each key has one: else either is right.
        self._quoted = set[tuple[str | None, datetime]]()

    def _time(self) -> datetime | None:
        late = self._dice.randrange(0, 3000, 250)
        return None if self._dice.random() < 0.05 else NOON + timedelta(seconds=self._second + 5, milliseconds=-late)

    def add(self, count: int) -> None:
        keys, dice = [*"aaab", "c", None], self._dice
        quotes = dict.fromkeys((dice.choice(keys), self._time()) for _ in range(count))
        self.quotes.add([(k, at, dice.randrange(100)) for k, at in quotes if (k, at) not in self._quoted])
        self._quoted |= {*quotes}
        self.trades.add([(dice.choice(keys), self._time(), dice.randrange(100)) for _ in range(count)])
        self._second += 3

    def end(self) -> None:
        """Let the watermark pass all rows so far."""
        late = NOON + timedelta(hours=1)
        self.trades.add([("end", late, 0)])
        self.quotes.add([("end", late, 0)])

    def joined(self, fleet: Fleet, name: str, join: str) -> DataFrame:
        how, within, exact = JOINS[join]
        trades, quotes = self.trades.stream(), self.quotes.stream()
        frame = fleet.stateful(trades.withWatermark("at", "5 seconds"), name=name, shards=2).joinAsOf(
            quotes.withWatermark("time", "5 seconds"),
            "at",
            "time",
            "k",
            how,
            tolerance=None if within is None else f"{within} seconds",
            allowExactMatches=exact,
        )
        return frame.select("k", "at", "price", "time", "bid")

    def expected(self, join: str, wanted: str = "true") -> Counter[str]:
        how, within, exact = JOINS[join]
        trades, quotes = self.trades.batch(), self.quotes.batch().withColumnRenamed("k", "q")
        joined = trades._joinAsOf(  # type: ignore[operator]
            quotes,
            "at",
            "time",
            trades["k"] == quotes["q"],
            how,
            tolerance=None if within is None else F.expr(f"interval {within} seconds"),
            allowExactMatches=exact,
        )
        rows = joined.where("k <> 'end' or k is null").where(wanted).select("k", "at", "price", "time", "bid")
        return Counter(map(repr, map(tuple, rows.collect())))


def counted(rows: Any) -> Counter[str]:
    return Counter(repr(tuple(row)[:5]) for row in rows)


@pytest.mark.parametrize("join", short_list(JOINS, ["left"]))
def test_results_are_those_of_a_batch_after_losses_and_a_rescale(
    join: str, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    market, emitted = Market(tmp_path, join), Counter[str]()
    for run_number in range(2):
        with Run(market.joined(fleet, name, join), "append", tmp_path / "ck") as run:
            for batch in range(4):
                market.add(25)
                emitted += counted(run.take())
                if batch == 1 and not run_number:
                    lose_store_actors(fleet)
                if batch == 2:
                    fleet.rescale(name, 4)
            if run_number:
                market.end()
                emitted += counted(run.take())
                # Of each key one quote, and those of the end.
                (operator,) = run.query.recentProgress[-1]["stateOperators"]
                assert operator["numRowsTotal"] <= 5
    assert emitted == market.expected(join)


def test_a_filter_on_results_leaves_out_no_row_that_is_the_newest(fleet: Fleet, tmp_path: Path, name: str) -> None:
    """Spark moves filters through joins of its own."""
    market = Market(tmp_path, "filtered")
    with Run(market.joined(fleet, name, "left").where("bid > 50"), "append", tmp_path / "ck") as run:
        market.add(60)
        market.end()
        emitted = counted(run.take())
    assert emitted == market.expected("left", "bid > 50")


@pytest.mark.replay
def test_windows_of_results_are_counted_once_they_are_over(fleet: Fleet, tmp_path: Path, name: str) -> None:
    market = Market(tmp_path, "counted")
    counts = (
        fleet.stateful(market.joined(fleet, name, "left"), name=f"{name}-counts")
        .groupBy(F.window("at", "5 seconds"))
        .count()
    )
    with Run(counts, "append", tmp_path / "ck") as run:
        for _ in range(3):
            market.add(30)
        market.end()
        emitted = {row["window"]["start"]: row["count"] for row in run.take()}
    rows = market.trades.batch().where("at is not null and (k is null or k <> 'end')")
    assert emitted == {
        row["window"]["start"]: row["count"] for row in rows.groupBy(F.window("at", "5 seconds")).count().collect()
    }


@pytest.mark.replay
def test_the_row_before_is_that_of_a_window_in_a_batch(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed, dice = Feed(tmp_path / "in", TRADES), random.Random(3)
    times = [NOON + timedelta(milliseconds=100 * number + dice.randrange(90)) for number in range(120)]
    with Run(steps(fleet, feed.stream(), name), "append", tmp_path / "ck") as run:
        for batch in range(4):
            rows = [(dice.choice("abc"), at, dice.randrange(100)) for at in times[30 * batch : 30 * batch + 30]]
            feed.add(dice.sample(rows, len(rows)))
        feed.add([("end", NOON + timedelta(hours=1), 0)])
        emitted = run.take()
    window = Window.partitionBy("k").orderBy("at")
    expected = feed.batch().where("k <> 'end'").select("k", "at", "price", F.lag("price").over(window))
    assert counted(emitted) == counted(expected.collect())


def steps(fleet: Fleet, trades: DataFrame, name: str) -> DataFrame:
    marked = trades.withWatermark("at", "5 seconds")
    # Of the same columns: their names say which side is meant, as in Spark.
    before = marked.withColumnRenamed("price", "before")
    rows = fleet.stateful(marked, name=name, shards=2).alias("now")
    joined = rows.joinAsOf(before.alias("then"), "now.at", "then.at", "k", "left", allowExactMatches=False)
    return joined.select("k", "now.at", "price", "before")


def test_what_cannot_be_joined_so_is_refused(fleet: Fleet, tmp_path: Path, name: str) -> None:
    market = Market(tmp_path, name)
    trades, quotes = market.trades.stream(), market.quotes.stream().withWatermark("time", "5 seconds")
    stateful = fleet.stateful(trades.withWatermark("at", "5 seconds"), name=name)
    with pytest.raises(RefusedQueryError, match="columns of both sides by which their rows have a watermark"):
        stateful.joinAsOf(quotes, "at", "bid", "k")
    with pytest.raises(RefusedQueryError, match="columns of both sides by which their rows have a watermark"):
        stateful.joinAsOf(quotes, "at", F.expr("time + interval 1 second"), "k")
    with pytest.raises(RefusedQueryError, match="columns of both sides by which their rows have a watermark"):
        fleet.stateful(trades, name=name).joinAsOf(quotes, "at", "time", "k")
    with pytest.raises(RefusedQueryError, match="an inner or a left outer one"):
        stateful.joinAsOf(quotes, "at", "time", "k", "full_outer")
    with pytest.raises(RefusedQueryError, match="compares equal columns and the times"):
        stateful.joinAsOf(quotes.withColumnRenamed("k", "q"), "at", "time", F.expr("k = q and price > bid"))
    with pytest.raises(RefusedQueryError, match="needs an equality"):
        stateful.joinAsOf(quotes.withColumnRenamed("k", "q"), "at", "time", F.expr("price > bid"))
    with pytest.raises(RefusedQueryError, match="of two streams"):
        stateful.joinAsOf(market.quotes.batch(), "at", "time", "k")
    with pytest.raises(InvalidArgumentError, match="not an interval"):
        stateful.joinAsOf(quotes, "at", "time", "k", tolerance="soon")

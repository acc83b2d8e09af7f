"""Random stateful queries by seed, with what happens to them, for the fleet's operators and for Spark's own alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from tests.integration.operator_cases import Operators

__all__ = ["COLUMNS", "Action", "Program", "program"]

COLUMNS = {"a": "k string, s double, t timestamp, x int", "b": "k2 string, u timestamp, y int"}

Stage = Callable[[Operators, DataFrame], DataFrame]
_DELAYS = ("0 seconds", "3 seconds", "10 seconds")
_KEYS = {
    "k": lambda: F.col("k"),
    "s": lambda: F.col("s"),
    "x": lambda: F.col("x"),
    "x:decimal": lambda: F.col("x").cast("decimal(12,2)"),
    "k,x:struct": lambda: F.struct("k", "x"),
    "x:array": lambda: F.array("x", F.lit(1)),
    "t:date": lambda: F.to_date("t"),
    "t:minute": lambda: F.date_trunc("minute", "t"),
    "k:binary": lambda: F.col("k").cast("binary"),
    "x:bool": lambda: F.col("x") > 2,
}
#: Keys of a distinct; all columns.
_DISTINCT: tuple[tuple[str, ...] | None, ...] = (None, ("k",), ("k", "t"), ("s", "x"), ("t",), ("x", "k", "s"))
_AGGREGATES = {
    "count": lambda: F.count("*"),
    "count(x)": lambda: F.count("x"),
    "sum(x)": lambda: F.sum("x"),
    "avg(x)": lambda: F.avg("x"),
    "min(k)": lambda: F.min("k"),
    "max(t)": lambda: F.max("t"),
    "sum(decimal)": lambda: F.sum(F.col("x").cast("decimal(10,2)")),
    "max(struct)": lambda: F.max(F.struct("x", "k")),
    "count_if": lambda: F.count_if(F.col("x") > 2),
    "bit_xor": lambda: F.bit_xor("x"),
}


@dataclass(frozen=True)
class Action:
    """Input files, and how they come in.

    Attributes
    ----------
    files
        Rows by input, for each file.
    stops
        Whether the query is stopped before and started after, so that the files are a backlog.
    fails
        Whether the sink fails once, after the first batch's rows; the query is then started again.
    available_now
        Whether the query ends with the input that there is.
    shards
        Shards of the fleet from then on.
    """

    files: tuple[Mapping[str, list[tuple[Any, ...]]], ...]
    stops: bool
    fails: bool
    available_now: bool
    shards: int


@dataclass
class Program:
    """A query as text and as a function of its operators and inputs.

    Attributes
    ----------
    lines
        What is built, for whoever reads of a failure.
    mode
        Output mode of the query.
    actions
        What happens to it.
    emits_any
        Whether its rows are any of those that it may emit: Spark says how many, and the order in which its tasks get them which.
    """

    mode: str
    actions: list[Action]
    emits_any: bool = False
    lines: list[str] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    source: Callable[[Operators, Mapping[str, DataFrame]], DataFrame] | None = None

    def query(self, operators: Operators, inputs: Mapping[str, DataFrame]) -> DataFrame:
        """The streaming DataFrame, on the fleet or on Spark."""
        assert self.source is not None
        frame = self.source(operators, inputs)
        for stage in self.stages:
            frame = stage(operators, frame)
        return frame


def program(seed: int) -> Program:
    """The program of a seed."""
    dice = random.Random(seed)
    made = Program("append", _actions(dice))
    (_joined if dice.random() < 0.35 else _single)(dice, made)
    return made


# -- what is run ------------------------------------------------------------------------------------------------------


def _single(dice: random.Random, made: Program) -> None:
    delay = dice.choice((*_DELAYS, None)) if dice.random() < 0.7 else dice.choice(_DELAYS)
    filtered = dice.random() < 0.3
    made.lines.append(f"a.withWatermark(t, {delay})" + (".where(x is null or x < 6)" if filtered else ""))

    def source(_: Operators, inputs: Mapping[str, DataFrame]) -> DataFrame:
        frame = inputs["a"] if delay is None else inputs["a"].withWatermark("t", delay)
        return frame.where("x is null or x < 6") if filtered else frame

    made.source = source
    is_timed = delay is not None
    first = dice.choice(_DISTINCT) if dice.random() < 0.4 else ()
    if first != ():
        _distinct(dice, made, "first", first, is_timed=is_timed)
    _last(dice, made, first, is_timed=is_timed)


def _joined(dice: random.Random, made: Program) -> None:
    how = dice.choice(("inner", "left_outer", "right_outer", "full_outer", "left_semi"))
    left: str | None = dice.choice(_DELAYS)
    right: str | None = dice.choice(_DELAYS)
    near = dice.choice(
        (
            "u between t - interval 5 seconds and t + interval 10 seconds",
            "u >= t and u < t + interval 7 seconds",
            "t = u",
        )
    )
    equal = dice.choice(("k = k2", "k <=> k2", "k = k2 and x = y"))
    # No bound of a number by a constant: Spark takes it for one of event time, and keeps the rows for ever (docs/operators.md).
    more = dice.choice(("", "", " and x % 2 = 0", " and y is not null", " and x < y"))
    on = f"{equal} and {near}{more}"
    if dice.random() < 0.25 and how != "full_outer":
        # The side that may lack a match has to have one.
        left, right = (None, right) if how in ("left_outer", "left_semi", "inner") else (left, None)
    made.lines.append(f"a.withWatermark(t, {left}).join(b.withWatermark(u, {right}), {on!r}, {how})")

    def source(operators: Operators, inputs: Mapping[str, DataFrame]) -> DataFrame:
        one = inputs["a"] if left is None else inputs["a"].withWatermark("t", left)
        other = inputs["b"] if right is None else inputs["b"].withWatermark("u", right)
        return operators(one, "join").join(other, F.expr(on), how)  # type: ignore[no-any-return]

    made.source = source
    # Spark makes an inner join of an outer one whose side is wanted to be there, as by windows of its time.
    time, delay = ("u", right) if how == "right_outer" else ("t", left)
    if how != "full_outer" and delay is not None and dice.random() < 0.5:
        made.stages.append(lambda _, frame: frame.select("k", "s", F.col(time).alias("t"), "x"))
        made.lines.append(f".select(k, s, {time} as t, x)")
        _windows(dice, made, "after", append=True)


def _last(dice: random.Random, made: Program, first: tuple[str, ...] | None, *, is_timed: bool) -> None:
    """The operator at the end, which may follow a distinct by the keys `first`."""
    is_chain = bool(made.stages)
    kinds = ["distinct", "limit", "function"] + ([] if is_chain else ["keys"])
    kinds += ["windows", "windows", "windows", "sessions"] if is_timed else []
    kind = dice.choice(kinds)
    if kind == "keys":
        _groups(dice, made)
    elif kind == "windows":
        _windows(dice, made, "windows", append=is_chain)
    elif kind == "sessions":
        _sessions(dice, made, append=is_chain)
    elif kind == "function":
        _function(dice, made, append=is_chain, is_timed=is_timed)
    elif kind == "distinct":
        made.mode = "append" if is_chain else dice.choice(("append", "update"))
        # Rows that differ in the first one's keys come in any order, so of them none is the first by fewer keys.
        keys = [one for one in _DISTINCT if not is_chain or one is None or (first and {*first} <= {*one})]
        _distinct(dice, made, "last", dice.choice(keys), is_timed=is_timed)
    else:
        rows = dice.choice((1, 7, 20))
        made.emits_any = is_chain
        made.lines.append(f".limit({rows})")
        made.stages.append(lambda operators, frame: operators(frame, "limit").limit(rows))


def _aggregates(dice: random.Random) -> tuple[str, Callable[[], list[Column]]]:
    names = dice.sample(sorted(_AGGREGATES), dice.randint(1, 4))
    return ", ".join(names), lambda: [_AGGREGATES[name]().alias(f"v{place}") for place, name in enumerate(names)]


def _keys(dice: random.Random, least: int, most: int) -> tuple[str, Callable[[], list[Column]]]:
    names = dice.sample(sorted(_KEYS), dice.randint(least, most))
    return ", ".join(names), lambda: [_KEYS[name]().alias(f"k{place}") for place, name in enumerate(names)]


def _groups(dice: random.Random, made: Program) -> None:
    made.mode = dice.choice(("update", "complete"))
    (keys, by), (values, what), mode = _keys(dice, 0, 3), _aggregates(dice), made.mode
    made.lines.append(f".groupBy({keys}).agg({values})")
    made.stages.append(lambda operators, frame: operators(frame, "groups", mode).groupBy(*by()).agg(*what()))


def _windows(dice: random.Random, made: Program, name: str, *, append: bool) -> None:
    made.mode = mode = "append" if append else dice.choice(("append", "append", "update", "complete"))
    window = dice.choice((("10 seconds",), ("10 seconds", "4 seconds"), ("5 seconds", "5 seconds", "2 seconds")))
    (keys, by), (values, what) = _keys(dice, 0, 2), _aggregates(dice)
    made.lines.append(f".groupBy(window{window}, {keys}).agg({values})")
    made.stages.append(
        lambda operators, frame: operators(frame, name, mode).groupBy(F.window("t", *window), *by()).agg(*what())
    )
    if mode == "append" and dice.random() < 0.4:
        _wider_windows(dice, made)


def _wider_windows(dice: random.Random, made: Program) -> None:
    """Windows of windows."""
    window = dice.choice((("20 seconds",), ("10 seconds",), ("12 seconds", "8 seconds")))
    made.lines.append(f".groupBy(window(window, {window})).agg(count, count(v0))")

    def stage(operators: Operators, frame: DataFrame) -> DataFrame:
        groups = operators(frame, "wider").groupBy(F.window("window", *window))
        return groups.agg(F.count("*"), F.count("v0"))  # type: ignore[no-any-return]

    made.stages.append(stage)


def _sessions(dice: random.Random, made: Program, *, append: bool) -> None:
    made.mode = mode = "append" if append else dice.choice(("append", "complete"))
    gap = dice.choice(("5 seconds", "case when x > 3 then '3 seconds' else '6 seconds' end"))
    (keys, by), (values, what) = _keys(dice, 1, 2), _aggregates(dice)
    made.lines.append(f".groupBy(session_window({gap}), {keys}).agg({values})")
    made.stages.append(
        lambda operators, frame: (
            operators(frame, "sessions", mode)
            .groupBy(F.session_window("t", F.expr(gap) if "case" in gap else gap), *by())
            .agg(*what())
        )
    )


def _distinct(
    dice: random.Random, made: Program, name: str, columns: tuple[str, ...] | None, *, is_timed: bool
) -> None:
    keys = None if columns is None else list(columns)
    within = is_timed and dice.random() < 0.4
    made.lines.append(f".dropDuplicates{'WithinWatermark' if within else ''}({keys})")

    def stage(operators: Operators, frame: DataFrame) -> DataFrame:
        rows = operators(frame, name)
        return rows.dropDuplicatesWithinWatermark(keys) if within else rows.dropDuplicates(keys)  # type: ignore[no-any-return]

    made.stages.append(stage)


def _function(dice: random.Random, made: Program, *, append: bool, is_timed: bool) -> None:
    """A running total of each key, dropped once it is large, or once event time is past it."""
    made.mode = mode = "append" if append else dice.choice(("append", "update"))
    times_out = is_timed and dice.random() < 0.6
    made.lines.append(f".groupBy(k, x).applyInPandasWithState(total{' with timeouts' if times_out else ''})")
    for action in made.actions:
        for file in action.files:
            # PySpark 3.5's own worker fails with today's pyarrow where a key has several rows in a batch.
            file["a"][:] = {(row[0], row[3]): row for row in file["a"]}.values()

    def stage(operators: Operators, frame: DataFrame) -> DataFrame:
        def total(key: Any, pdfs: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
            n, sum_ = state.getOption or (0, 0)
            if state.hasTimedOut:
                state.remove()
                yield pd.DataFrame({"k": [key[0]], "x": [key[1]], "n": [n], "sum": [-1]})
                return
            for pdf in pdfs:
                n, sum_ = n + len(pdf), sum_ + int(pdf["s"].fillna(5).sum())
            state.update((n, sum_))
            if times_out and sum_ % 3:
                state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + 1000 * sum_)
            elif sum_ > 6:
                state.remove()
            yield pd.DataFrame({"k": [key[0]], "x": [key[1]], "n": [n], "sum": [sum_]})

        timeout = GroupStateTimeout.EventTimeTimeout if times_out else GroupStateTimeout.NoTimeout
        grouped = operators(frame, "totals", mode).groupBy("k", "x")
        output, kept = "k string, x int, n bigint, sum bigint", "n bigint, sum bigint"
        return grouped.applyInPandasWithState(total, output, kept, mode, timeout)  # type: ignore[no-any-return]

    made.stages.append(stage)


# -- what happens to it -----------------------------------------------------------------------------------------------


def _actions(dice: random.Random) -> list[Action]:
    now, actions, shards, available_now = 40, list[Action](), 2, dice.random() < 0.2
    for step in range(4):
        files = []
        for _ in range(dice.choice((1, 1, 2))):
            now += dice.choice((2, 8, 12, 30))
            files.append({"a": _rows_a(dice, now), "b": _rows_b(dice, now)})
        stops = step > 0 and (available_now or len(files) > 1 or dice.random() < 0.2)
        if stops and dice.random() < 0.4:
            shards = dice.choice((1, 2, 4))
        fails = not available_now and dice.random() < 0.15
        actions.append(Action(tuple(files), stops or len(files) > 1 or available_now, fails, available_now, shards))
    return actions


def _time(dice: random.Random, now: int) -> int | None:
    return None if dice.random() < 0.05 else max(0, now - dice.choice((-3, 0, 0, 1, 2, 4, 7, 12, 30)))


def _rows_a(dice: random.Random, now: int) -> list[tuple[Any, ...]]:
    doubles = (None, 0.0, -0.0, float("nan"), 1.5, 1.5)
    return [
        (
            dice.choice((None, "p", "p", "q", "")),
            dice.choice(doubles),
            _time(dice, now),
            dice.choice((None, 0, 1, 2, 4, 7)),
        )
        for _ in range(12)
    ]


def _rows_b(dice: random.Random, now: int) -> list[tuple[Any, ...]]:
    return [(dice.choice((None, "p", "q", "r")), _time(dice, now), dice.choice((None, 0, 1, 2, 4))) for _ in range(8)]

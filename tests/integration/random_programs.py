"""Random stateful queries by seed, with what happens to them, for the fleet's operators and for Spark's own alike.

Left out is what has no single answer beside Spark: the clock (timeouts of processing time, ``current_timestamp``), chance, sources
without batches of their own (rates, sockets), and aggregates of whose values any is right (``mode``, ``histogram_numeric``).
Operators that Spark 3.5 has not (``applyInArrowWithState``, processors) have tests of their own. ``topN`` and ``keepLast`` are only in
programs that run in epochs as well; Spark has a batch in their place.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from spark_jobs.api.stateful import StatefulDataFrame
from tests.integration.operator_cases import Operators
from tests.integration.random_inputs import Action, actions

Inputs = Mapping[str, DataFrame]
Stage = Callable[[Operators, DataFrame], DataFrame]
Columns = Callable[[], list[Column]]

_DELAYS = ("0 seconds", "3 seconds", "10 seconds")
_KEYS = {
    "k": lambda: F.col("k"),
    "s": lambda: F.col("s"),
    "x": lambda: F.col("x"),
    "x:decimal": lambda: F.col("x").cast("decimal(12,2)"),
    "x:bigint": lambda: F.col("x").cast("bigint"),
    "x:tinyint": lambda: F.col("x").cast("tinyint"),
    "x:interval": lambda: F.expr("make_dt_interval(0, 0, 0, x)"),
    "x:array": lambda: F.array("x", F.lit(1)),
    "x:bool": lambda: F.col("x") > 2,
    "k,x:struct": lambda: F.struct("k", "x"),
    "k,s:structs": lambda: F.struct(F.struct("k", "s"), "x"),
    "k:binary": lambda: F.col("k").cast("binary"),
    "s:float": lambda: F.col("s").cast("float"),
    "t:date": lambda: F.to_date("t"),
    "t:minute": lambda: F.date_trunc("minute", "t"),
    "t:without a zone": lambda: F.col("t").cast("timestamp_ntz"),
    "null": lambda: F.lit(None),
}
#: Keys of a distinct; all columns.
_DISTINCT: tuple[tuple[str, ...] | None, ...] = (None, ("k",), ("k", "t"), ("s", "x"), ("t",), ("x", "k", "s"))
_AGGREGATES = {
    "count": lambda: F.count("*"),
    "count(x)": lambda: F.count("x"),
    "count_if": lambda: F.count_if(F.col("x") > 2),
    "sum(x)": lambda: F.sum("x"),
    "sum(s)": lambda: F.sum("s"),
    "sum(decimal)": lambda: F.sum(F.col("x").cast("decimal(10,2)")),
    "sum(interval)": lambda: F.sum(F.expr("make_dt_interval(0, 0, 0, x)")),
    "sum(x) of p": lambda: F.expr("sum(x) FILTER (WHERE k = 'p')"),
    "avg(x)": lambda: F.avg("x"),
    "min(k)": lambda: F.min("k"),
    "max(t)": lambda: F.max("t"),
    "max(struct)": lambda: F.max(F.struct("x", "k")),
    "max(array)": lambda: F.max(F.array("x", F.length("k"))),
    "max_by": lambda: F.expr("max_by(x, struct(x, k))"),
    "every": lambda: F.expr("every(x > 0)"),
    "bit_xor": lambda: F.bit_xor("x"),
    # Their last digits depend on the order in which values are added.
    "stddev": lambda: F.round(F.stddev("x"), 6),
    "covar_pop": lambda: F.round(F.covar_pop("x", F.length("k")), 6),
    "collect_list": lambda: F.sort_array(F.collect_list("x")),
    "collect_set": lambda: F.sort_array(F.collect_set("k")),
    "approx_count_distinct": lambda: F.approx_count_distinct("x"),
    "median": lambda: F.median("x"),
    "percentile_approx": lambda: F.percentile_approx("x", [0.2, 0.9], 100),
    "sketch": lambda: F.expr("hll_sketch_estimate(hll_sketch_agg(x))"),
}
#: What is one value for rows that come in the order of their file.
_ORDERED_AGGREGATES = {
    "first(x)": lambda: F.first("x"),
    "last(x)": lambda: F.last("x", ignorenulls=True),
}
#: What may stand between the source and the first operator.
_PRELUDES: dict[str, Callable[[DataFrame], DataFrame]] = {
    ".where(x is null or x < 6)": lambda rows: rows.where("x is null or x < 6"),
    ".withColumn(x, explode(x, 3))": lambda rows: rows.withColumn("x", F.explode(F.array("x", F.lit(3)))),
    ".join(numbers, k, left_outer)": lambda rows: (
        # Broadcast, so that rows stay in the order of their file.
        rows.join(F.broadcast(rows.sparkSession.createDataFrame([("p", 1), ("q", 2)], "k string, n int")), "k", "left_outer")
        .selectExpr("k", "s", "t", "x + coalesce(n, 0) as x")
    ),
}  # fmt: skip


@dataclass
class Program:
    """A query as text and as a function of its operators and inputs.

    Attributes
    ----------
    lines
        The steps of the query as text, for messages about failures.
    mode
        Output mode of the query.
    actions
        What happens to it.
    emits_any
        Whether its rows are any of those that it may emit: Spark says how many, and the order in which its tasks get them which.
    reads_all
        Whether Spark reads all rows, so that its watermark is that of all. Its ``limit`` of a source stops reading (docs/operators.md).
    join_keeps_other_rows
        Whether the fleet's join keeps rows that Spark leaves out before, and of which none comes out, or forgets rows sooner
        (docs/operators.md).
    has_sparks_order
        Whether the operators stand as in Spark's plan. Where they do not, only rows and watermarks can be compared (docs/operators.md).
    loses_matches
        Whether it emits the rows of a left semi join, of which Spark 4.2 loses some (docs/operators.md).
    counts_late_sessions
        Whether late rows of sessions come from one map task, in each of which Spark counts those of one key and time as one.
    runs_continuously
        Whether it is to be one that runs in epochs as well: of one operator, and not in complete mode (docs/real-time.md).
    is_sparks
        Whether Spark has its operator in a stream; else only in a batch.
    is_compared_with_spark
        Whether it runs on Spark as well.
    replaces
        Whether a result replaces older ones: of its group, or of its place in a table. It is named by all columns but ``v0``, ``v1`` ..
    names_groups
        Whether these columns name one group only: of rollups and cubes, groups that differ may look the same.
    conf
        Settings of the session.
    """

    mode: str
    actions: list[Action]
    emits_any: bool = False
    reads_all: bool = True
    join_keeps_other_rows: bool = False
    has_sparks_order: bool = True
    loses_matches: bool = False
    counts_late_sessions: bool = True
    runs_continuously: bool = False
    is_sparks: bool = True
    is_compared_with_spark: bool = True
    replaces: bool = False
    names_groups: bool = True
    conf: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    source: Callable[[Operators, Inputs], DataFrame] | None = None

    def query(self, operators: Operators, inputs: Inputs) -> DataFrame:
        """Return the streaming DataFrame, on the fleet or on Spark."""
        assert self.source is not None
        frame = self.source(operators, inputs)
        for stage in self.stages:
            frame = stage(operators, frame)
        return frame

    def add(self, line: str, stage: Stage) -> None:
        """Append an operation on the rows, and its line of text."""
        self.lines.append(line)
        self.stages.append(stage)

    def draw_mode(self, dice: random.Random, *modes: str) -> str:
        """Draw the output mode; return it."""
        allowed = [mode for mode in modes if mode != "complete" or not self.runs_continuously]
        # Without the dice where there is nothing to draw.
        self.mode = dice.choice(allowed) if len(modes) > 1 else modes[0]
        return self.mode


@dataclass(frozen=True)
class Rows:
    """Properties of the rows `k`, `s`, `t` and `x` on which the last operator of a program may rely.

    Attributes
    ----------
    is_timed
        Whether `t` has a watermark.
    in_order
        Whether they come in the order of their file, so that the first one of some is the same on both sides.
    one_of_each
        Whether a batch can be made to have at most one of each `k` and `x`.
    distinct
        Keys by which they are distinct; None for all columns, nothing if they are not.
    """

    is_timed: bool
    in_order: bool = True
    one_of_each: bool = True
    distinct: tuple[str, ...] | None = ()


def program(seed: int) -> Program:
    """Return the program of a seed."""
    dice = random.Random(seed)
    draft = Program("append", actions(dice))
    (_joined if dice.random() < 0.35 else _single)(dice, draft)
    return draft


def continuous_program(seed: int, *, in_order: bool) -> Program:
    """Return the program of a seed that runs in epochs as well: one operator on one stream with one watermark.

    Parameters
    ----------
    in_order
        Whether its rows come in one order, as of a source with one partition.
    """
    dice = random.Random(seed)
    draft = Program("append", actions(dice), runs_continuously=True)
    delay, prelude = dice.choice((*_DELAYS, *_DELAYS, None)), dice.choice(("", "", "", *_PRELUDES))
    _marked(draft, delay, prelude, is_before=dice.random() < 0.5)
    kinds = ["keys", "keys", "limit", "kept", "function"]
    kinds += ["distinct", "distinct"] if in_order else []
    kinds += ["windows", "windows", "windows", "sessions", "sessions"] if delay is not None else []
    _operator(dice.choice(kinds), dice, draft, Rows(delay is not None, in_order=in_order, one_of_each=False))
    return draft


# -- one stream, or two of which one is made ---------------------------------------------------------------------------


def _single(dice: random.Random, draft: Program) -> None:
    delay = dice.choice((*_DELAYS, None)) if dice.random() < 0.7 else dice.choice(_DELAYS)
    is_union = delay is not None and dice.random() < 0.15
    prelude = dice.choice(("", "", "", *_PRELUDES))
    rows = Rows(delay is not None, in_order=not is_union, one_of_each=not is_union and "explode" not in prelude)
    if is_union:
        _united(dice, draft)
    else:
        _marked(draft, delay, prelude, is_before=dice.random() < 0.5)
    if dice.random() < 0.4:
        rows = Rows(rows.is_timed, rows.in_order, rows.one_of_each, _distinct(dice, draft, "first", rows))
        _filtered(dice, draft, ("x > 1", "k is not null", "x is null or k = 'p'"))
    _last(dice, draft, rows)


def _marked(draft: Program, delay: str | None, prelude: str, *, is_before: bool) -> None:
    mark = f".withWatermark(t, {delay})"
    draft.lines.append(f"a{mark}{prelude}" if is_before else f"a{prelude}{mark}")

    def source(_: Operators, inputs: Inputs) -> DataFrame:
        frame = inputs["a"]
        if delay is not None and is_before:
            frame = frame.withWatermark("t", delay)
        frame = _PRELUDES[prelude](frame) if prelude else frame
        return frame.withWatermark("t", delay) if delay is not None and not is_before else frame

    draft.source = source


def _united(dice: random.Random, draft: Program) -> None:
    """Unite both inputs, each with a watermark of its own."""
    delays, policy = dice.choices(_DELAYS, k=2), dice.choice(("min", "max"))
    draft.conf["spark.sql.streaming.multipleWatermarkPolicy"] = policy
    draft.lines.append(f"a.withWatermark(t, {delays[0]}).union(b.withWatermark(u, {delays[1]})), {policy}")

    def source(_: Operators, inputs: Inputs) -> DataFrame:
        from_b = inputs["b"].withWatermark("u", delays[1])
        from_b = from_b.selectExpr("k2 as k", "cast(null as double) as s", "u as t", "y as x")
        return inputs["a"].withWatermark("t", delays[0]).union(from_b)

    draft.source = source


def _joined(dice: random.Random, draft: Program) -> None:
    how = dice.choice(("inner", "left_outer", "right_outer", "full_outer", "left_semi"))
    if dice.random() < 0.2:
        _joined_windows(dice, draft, how)
        return
    left_delay: str | None = dice.choice(_DELAYS)
    right_delay: str | None = dice.choice(_DELAYS)
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
        left_delay, right_delay = (
            (None, right_delay) if how in ("left_outer", "left_semi", "inner") else (left_delay, None)
        )
    with_itself, first = dice.random() < 0.2, dice.choice(_DISTINCT) if dice.random() < 0.15 else ()
    draft.lines.append(
        f"a.withWatermark(t, {left_delay}){'' if first == () else f'.dropDuplicates({first})'}"
        f".join({'a' if with_itself else 'b'}.withWatermark(u, {right_delay}), {on!r}, {how})"
    )

    def source(operators: Operators, inputs: Inputs) -> DataFrame:
        left = inputs["a"] if left_delay is None else inputs["a"].withWatermark("t", left_delay)
        right = inputs["a"].selectExpr("k as k2", "t as u", "x as y") if with_itself else inputs["b"]
        right = right if right_delay is None else right.withWatermark("u", right_delay)
        if first != ():
            left = operators(left, "first").dropDuplicates(None if first is None else list(first))
        return operators(left, "join").join(right, F.expr(on), how)  # type: ignore[no-any-return]

    draft.source = source
    of_right = () if how == "left_semi" else ("y is not null", "k2 = 'p'")
    is_filtered = _filtered(dice, draft, ("x > 1", "k is not null", *of_right))
    draft.loses_matches = how == "left_semi"
    time, delay = ("u", right_delay) if how == "right_outer" else ("t", left_delay)
    if how != "full_outer" and delay is not None and dice.random() < 0.5:
        is_filtered, draft.loses_matches = True, False
        _after_join(dice, draft, time, how)
    if how == "left_semi" or (how != "inner" and is_filtered):
        # Of an outer join whose matched rows alone are wanted Spark makes an inner one.
        draft.join_keeps_other_rows = True


def _after_join(dice: random.Random, draft: Program, time: str, how: str) -> None:
    # A limit of an outer join Spark takes of its outer side first, and then other rows come in other batches (docs/operators.md).
    kind = dice.choice(("windows", "windows", "sessions", "distinct", "limit" if how == "inner" else "distinct"))
    # Of equal doubles the two zeros differ, and which one comes first does not.
    double = "cast(x as double) as s" if kind == "distinct" else "s"
    draft.add(
        f".select(k, {double}, {time} as t, x)", lambda _, frame: frame.selectExpr("k", double, f"{time} as t", "x")
    )
    _operator(kind, dice, draft, Rows(is_timed=True, in_order=False, one_of_each=False))


def _joined_windows(dice: random.Random, draft: Program, how: str) -> None:
    """Join counts of both streams by window."""
    delays, size = dice.choices(_DELAYS, k=2), dice.choice(("5 seconds", "10 seconds"))
    draft.lines.append(
        f"a.withWatermark(t, {delays[0]}).groupBy(window({size}) as w, k).count()"
        f".join(b.withWatermark(u, {delays[1]}).groupBy(window({size}) as w2, k2).agg(count, max(y)), "
        f"'w = w2 and k <=> k2', {how})"
    )

    def source(operators: Operators, inputs: Inputs) -> DataFrame:
        left = operators(inputs["a"].withWatermark("t", delays[0]), "left", "append")
        right = operators(inputs["b"].withWatermark("u", delays[1]), "right", "append")
        counts = left.groupBy(F.window("t", size).alias("w"), "k").agg(F.count("*").alias("n"))
        # Of another form than the other side, for which Spark takes it else where there is no data (docs/operators.md).
        other_counts = right.groupBy(F.window("u", size).alias("w2"), "k2").agg(F.count("*").alias("n2"), F.max("y"))
        return operators(counts, "join").join(other_counts, F.expr("w = w2 and k <=> k2"), how)  # type: ignore[no-any-return]

    draft.source = source
    draft.join_keeps_other_rows = _filtered(dice, draft, ("k = 'p'", "n > 1")) and how != "inner"
    # Spark moves it below the aggregation on its left.
    draft.loses_matches = how == "left_semi"
    draft.has_sparks_order = not draft.loses_matches


# -- the operator at the end -------------------------------------------------------------------------------------------


def _last(dice: random.Random, draft: Program, rows: Rows) -> None:
    kinds = ["distinct", "limit"]
    kinds += ["keys", "keys"] if rows.distinct == () else []
    kinds += ["function"] if rows.one_of_each else []
    kinds += ["windows", "windows", "windows", "sessions"] if rows.is_timed else []
    _operator(dice.choice(kinds), dice, draft, rows)


def _operator(kind: str, dice: random.Random, draft: Program, rows: Rows) -> None:
    is_chain = bool(draft.stages)
    if kind == "keys":
        _groups(dice, draft, rows)
    elif kind == "windows":
        _windows(dice, draft, rows, append=is_chain)
    elif kind == "sessions":
        _sessions(dice, draft, rows, append=is_chain)
    elif kind == "function":
        _function(dice, draft, append=is_chain, is_timed=rows.is_timed)
    elif kind == "kept":
        _kept(dice, draft)
    elif kind == "distinct":
        draft.mode = "append" if is_chain else dice.choice(("append", "update"))
        _distinct(dice, draft, "last", rows)
        if not _filtered(dice, draft, ("x > 1", "k is not null")) and dice.random() < 0.3:
            # Without its event time, of which rows are late.
            draft.add(".select(k, x)", lambda _, frame: frame.select("k", "x"))
    else:
        number = dice.choice((1, 7, 20))
        draft.emits_any = is_chain or not rows.in_order
        draft.reads_all = is_chain
        draft.add(f".limit({number})", lambda operators, frame: operators(frame, "limit").limit(number))


def _filtered(dice: random.Random, draft: Program, conditions: tuple[str, ...]) -> bool:
    """Perhaps filter what an operator emits; return whether it is filtered."""
    condition = dice.choice(conditions)
    if dice.random() > 0.25:
        return False
    draft.add(f".where({condition})", lambda _, frame: frame.where(condition))
    return True


def _aggregates(dice: random.Random, rows: Rows) -> tuple[str, Columns]:
    aggregates = _AGGREGATES | (_ORDERED_AGGREGATES if rows.in_order and rows.distinct == () else {})
    names = dice.sample(sorted(aggregates), dice.randint(1, 4))
    return ", ".join(names), lambda: [aggregates[name]().alias(f"v{index}") for index, name in enumerate(names)]


def _keys(dice: random.Random, least: int, most: int, *, constant: bool = True) -> tuple[str, Columns]:
    names = dice.sample([name for name in sorted(_KEYS) if constant or name != "null"], dice.randint(least, most))
    return ", ".join(names), lambda: [_KEYS[name]().alias(f"k{index}") for index, name in enumerate(names)]


def _groups(dice: random.Random, draft: Program, rows: Rows) -> None:
    mode = draft.draw_mode(dice, "update", "complete")
    (keys, key_columns), (values, value_columns) = _keys(dice, 0, 3), _aggregates(dice, rows)
    method = dice.choice(("groupBy", "groupBy", "rollup", "cube")) if keys else "groupBy"
    draft.replaces, draft.names_groups = True, method == "groupBy"
    draft.add(
        f".{method}({keys}).agg({values})",
        lambda operators, frame: getattr(operators(frame, "groups", mode), method)(*key_columns()).agg(
            *value_columns()
        ),
    )
    _finish(dice, draft, has_keys=bool(keys))


def _windows(dice: random.Random, draft: Program, rows: Rows, *, append: bool) -> None:
    mode = draft.draw_mode(dice, "append", *(() if append else ("append", "update", "complete")))
    window = dice.choice((("10 seconds",), ("10 seconds", "4 seconds"), ("5 seconds", "5 seconds", "2 seconds")))
    (keys, key_columns), (values, value_columns) = _keys(dice, 0, 2), _aggregates(dice, rows)
    draft.replaces = mode == "update"
    # Of a time that has no watermark, where nothing asks for one.
    time = "t" if mode == "append" or dice.random() < 0.8 else "t + interval 3 seconds"
    draft.add(
        f".groupBy(window({time}, {window}), {keys}).agg({values})",
        lambda operators, frame: (
            operators(frame, "windows", mode)
            .groupBy(F.window(F.expr(time), *window), *key_columns())
            .agg(*value_columns())
        ),
    )
    if mode == "append" and not draft.runs_continuously and dice.random() < 0.4:
        _filtered(dice, draft, ("v0 is not null", *(("k0 is not null",) if keys else ())))
        _wider_windows(dice, draft)
    else:
        _finish(dice, draft, has_keys=bool(keys), time="window.start")


def _wider_windows(dice: random.Random, draft: Program) -> None:
    """Add windows of windows."""
    window = dice.choice((("20 seconds",), ("10 seconds",), ("12 seconds", "8 seconds")))

    def stage(operators: Operators, frame: DataFrame) -> DataFrame:
        groups = operators(frame, "wider").groupBy(F.window("window", *window))
        return groups.agg(F.count("*"), F.count("v0"))  # type: ignore[no-any-return]

    draft.add(f".groupBy(window(window, {window})).agg(count, count(v0))", stage)


def _sessions(dice: random.Random, draft: Program, rows: Rows, *, append: bool) -> None:
    mode = draft.draw_mode(dice, "append", *(() if append else ("complete",)))
    draft.counts_late_sessions = rows.in_order
    gap = dice.choice(("5 seconds", "case when x > 3 then '3 seconds' else '6 seconds' end"))
    # Spark has no sessions of a constant alone, and finds out in the first batch.
    (keys, key_columns), (values, value_columns) = (
        _keys(dice, 1, 2, constant=False),
        _aggregates(dice, Rows(rows.is_timed, in_order=False)),
    )
    draft.add(
        f".groupBy(session_window({gap}), {keys}).agg({values})",
        lambda operators, frame: (
            operators(frame, "sessions", mode)
            .groupBy(F.session_window("t", F.expr(gap) if "case" in gap else gap), *key_columns())
            .agg(*value_columns())
        ),
    )
    _finish(dice, draft, has_keys=True, time="session_window.start")


def _finish(dice: random.Random, draft: Program, *, has_keys: bool, time: str | None = None) -> None:
    """Add what may follow the last aggregation."""
    if draft.mode == "complete" and dice.random() < 0.3:
        draft.add(".orderBy(all).limit(5)", lambda _, frame: frame.orderBy(*frame.columns).limit(5))
    elif time is not None and dice.random() < 0.1:
        draft.add(f".where({time} > 45 s)", lambda _, frame: frame.where(F.col(time) > F.timestamp_seconds(F.lit(45))))
    else:
        _filtered(dice, draft, ("v0 is not null", *(("k0 is not null",) if has_keys else ())))


def _distinct(dice: random.Random, draft: Program, name: str, rows: Rows) -> tuple[str, ...] | None:
    """Keep the first row of each combination of some columns; return these columns."""
    distinct_keys = rows.distinct
    # Of rows that come in any order none is the first but by all that they differ in.
    keys = [
        candidate
        for candidate in _DISTINCT
        if candidate is None
        or (rows.in_order if distinct_keys == () else distinct_keys is not None and {*distinct_keys} <= {*candidate})
    ]
    columns = dice.choice(keys)
    subset = None if columns is None else list(columns)
    within = rows.is_timed and dice.random() < 0.4

    def stage(operators: Operators, frame: DataFrame) -> DataFrame:
        first = operators(frame, name)
        return first.dropDuplicatesWithinWatermark(subset) if within else first.dropDuplicates(subset)  # type: ignore[no-any-return]

    draft.add(f".dropDuplicates{'WithinWatermark' if within else ''}({subset})", stage)
    return columns


def _function(dice: random.Random, draft: Program, *, append: bool, is_timed: bool) -> None:
    """Add a running total of each key, dropped once it is large, or once event time is past it."""
    if draft.runs_continuously:
        _function_of_pieces(dice, draft, is_timed=is_timed)
        return
    draft.mode = mode = "append" if append else dice.choice(("append", "update"))
    times_out = is_timed and dice.random() < 0.6
    for action in draft.actions:
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

    draft.add(f".groupBy(k, x).applyInPandasWithState(total{' with timeouts' if times_out else ''})", stage)


def _function_of_pieces(dice: random.Random, draft: Program, *, is_timed: bool) -> None:
    """Add a running total of each key, which is the same however often the function is called for the rows of an epoch."""
    draft.mode, draft.replaces = "update", True
    # PySpark 3.5's own worker fails with today's pyarrow where a key has several rows in a batch.
    draft.is_compared_with_spark = False
    times_out = is_timed and dice.random() < 0.6

    def total(key: Any, pdfs: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        n, sum_ = state.getOption or (0, 0)
        if state.hasTimedOut:
            state.remove()
        else:
            for pdf in pdfs:
                n, sum_ = n + len(pdf), sum_ + int(pdf["s"].fillna(5).mul(10).round().sum())
            state.update((n, sum_))
            if times_out:
                state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + 1000 * (1 + sum_ % 7))
        yield pd.DataFrame({"k": [key[0]], "x": [key[1]], "v0": [n], "v1": [-1 if state.hasTimedOut else sum_]})

    def stage(operators: Operators, frame: DataFrame) -> DataFrame:
        timeout = GroupStateTimeout.EventTimeTimeout if times_out else GroupStateTimeout.NoTimeout
        grouped = operators(frame, "totals", "update").groupBy("k", "x")
        output, kept = "k string, x int, v0 bigint, v1 bigint", "n bigint, sum bigint"
        return grouped.applyInPandasWithState(total, output, kept, "update", timeout)  # type: ignore[no-any-return]

    draft.add(f".groupBy(k, x).applyInPandasWithState(total of pieces{' with timeouts' if times_out else ''})", stage)


def _kept(dice: random.Random, draft: Program) -> None:
    """Keep the first rows of each key by an order, or its last one."""
    draft.mode, draft.replaces, draft.is_sparks = "update", True, False
    keys, is_last = dice.choice((["k"], ["x"], ["k", "x"])), dice.random() < 0.5
    number = 1 if is_last else dice.choice((1, 3))
    # Rows that are equal in the order are equal: of equal doubles the two zeros would differ.
    columns = dice.choice((["t as v0"], ["t as v0", "s + 0.0D as v1"]))
    names = [column.rpartition(" ")[2] for column in columns]

    def stage(operators: Operators, frame: DataFrame) -> DataFrame:
        rows = operators(frame.selectExpr(*keys, *columns), "kept", "update")
        order = [F.desc_nulls_last(name) if is_last else F.asc_nulls_first(name) for name in names]
        if not isinstance(rows, StatefulDataFrame):
            rank = F.row_number().over(Window.partitionBy(*keys).orderBy(*order))
            kept = rows.withColumn("rank", rank).where(F.col("rank") <= number)
        else:
            kept = rows.keepLast(keys, names) if is_last else rows.topN(number, keys, order)
        return kept.select(*keys, *([] if is_last else ["rank"]), *names)  # type: ignore[no-any-return]

    draft.add(f".keepLast({keys}, {columns})" if is_last else f".topN({number}, {keys}, {columns})", stage)
